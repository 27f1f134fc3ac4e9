//! Sizes on the command line: `4096`, `512M`, `4G`, `1T`.
use std::fmt;
use std::str::FromStr;

/// A number of bytes, written as a whole number with an optional unit `K`, `M`, `G` or `T` (powers of 1024).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size {
    /// The size in bytes.
    pub bytes: u64,
}

const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let unit_letter = unit.strip_suffix("iB").or_else(|| unit.strip_suffix('B')).unwrap_or(unit);
        let shift = match unit_letter.to_ascii_uppercase().as_str() {
            "" => Some(0),
            letter => UNITS.iter().find(|(name, _)| letter == name.to_string()).map(|&(_, shift)| shift),
        };
        match (number.parse::<u64>(), shift) {
            (Ok(number), Some(shift)) => match number.checked_mul(1 << shift) {
                Some(bytes) => Ok(Self { bytes }),
                None => Err(format!("\"{text}\" is more than 16 EiB")),
            },
            _ => Err(format!("\"{text}\" is not a size; write plain bytes or a unit, such as 512M, 4G, 1T")),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|&&(_, shift)| self.bytes >> shift > 0) {
            Some(&(unit, shift)) if self.bytes.is_multiple_of(1 << shift) => write!(formatter, "{} {unit}iB", self.bytes >> shift),
            Some(&(unit, shift)) => write!(formatter, "{:.1} {unit}iB", self.bytes as f64 / (1u64 << shift) as f64),
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
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", "G", "-1", "1.5G", "4X", "4 G", "99999999T", "99999999999999999999", "4GG", "0x10", "4é"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_size_reads_well() {
        let shown: Vec<String> = [512, 4096, 3 << 20, 4 << 30, (3 << 30) / 2].map(|bytes| Size { bytes }.to_string()).into();
        assert_eq!(shown, ["512 bytes", "4 KiB", "3 MiB", "4 GiB", "1.5 GiB"]);
    }
}
