//! Sizes on the command line: `4096`, `512M`, `4G`, `1T`.
use std::fmt;
use std::str::FromStr;

/// A number of bytes, written as a whole number with an optional unit `K`, `M`, `G`, `T`, `P` or
/// `E` (powers of 1024).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size {
    /// The size in bytes.
    pub bytes: u64,
}

const UNITS: [(char, u32); 6] = [('E', 60), ('P', 50), ('T', 40), ('G', 30), ('M', 20), ('K', 10)];

/// Offsets in files and devices have 63 bits.
const BYTES_MAX: u64 = i64::MAX as u64;

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let letter = ["iB", "B", "i"]
            .iter()
            .find_map(|end| unit.strip_suffix(end))
            .unwrap_or(unit)
            .to_ascii_uppercase();
        let shift = match letter.as_str() {
            // "4i" says nothing.
            "" if matches!(unit, "" | "B") => Some(0),
            letter => {
                UNITS.iter().find(|(name, _)| letter == name.to_string()).map(|&(_, shift)| shift)
            }
        };
        let Some(shift) = shift.filter(|_| !number.is_empty()) else {
            return Err(format!(
                "\"{text}\" is not a size; write a whole number of bytes, or of a unit: 512M, 4G, \
                 1T"
            ));
        };
        // A number that no 64 bits hold is too large in any unit.
        let bytes = number
            .parse()
            .ok()
            .and_then(|number: u64| number.checked_mul(1 << shift))
            .filter(|bytes| *bytes <= BYTES_MAX);
        bytes
            .map(|bytes| Self { bytes })
            .ok_or_else(|| format!("\"{text}\" is too large: files and devices have less than 8E"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|&&(_, shift)| self.bytes >> shift > 0) {
            Some(&(unit, shift)) if self.bytes.is_multiple_of(1 << shift) => {
                write!(formatter, "{} {unit}iB", self.bytes >> shift)
            }
            Some(&(unit, shift)) => {
                write!(formatter, "{:.1} {unit}iB", self.bytes as f64 / (1u64 << shift) as f64)
            }
            None => write!(formatter, "{} bytes", self.bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024() {
        let bytes = |text: &str| text.parse::<Size>().map(|size| size.bytes);
        assert_eq!(bytes("0"), Ok(0));
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("512M"), Ok(512 << 20));
        assert_eq!(bytes("4g"), Ok(4 << 30));
        assert_eq!(bytes("4GiB"), Ok(4 << 30));
        assert_eq!(bytes("1T"), Ok(1 << 40));
        assert_eq!(bytes("64KB"), Ok(64 << 10));
        assert_eq!(
            [bytes("64k"), bytes("64Ki"), bytes("64KiB")],
            [Ok(64 << 10), Ok(64 << 10), Ok(64 << 10)]
        );
        assert_eq!([bytes("3P"), bytes("7EiB"), bytes("5B")], [Ok(3 << 50), Ok(7 << 60), Ok(5)]);
        assert_eq!(bytes("9223372036854775807"), Ok(BYTES_MAX));
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", "G", "B", "-1", "1.5G", "4X", "4 G", "4GG", "4i", "4iB", "0x10", "4é"] {
            assert!(text.parse::<Size>().unwrap_err().contains("is not a size"), "{text}");
        }
        for text in ["8E", "10E", "99999999T", "99999999999999999999", "99999999999999999999G"] {
            let error = text.parse::<Size>().unwrap_err();
            assert!(
                error.contains(text)
                    && error.contains("too large")
                    && error.contains("less than 8E"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_size_reads_well() {
        let shown: Vec<String> = [512, 4096, 3 << 20, 4 << 30, (3 << 30) / 2]
            .map(|bytes| Size { bytes }.to_string())
            .into();
        assert_eq!(shown, ["512 bytes", "4 KiB", "3 MiB", "4 GiB", "1.5 GiB"]);
    }
}
