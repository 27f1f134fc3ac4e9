//! Hostile images: volumes whose checksums hold but whose content no program of ours wrote.
//!
//! [`program`] turns any sequence of bytes into a changed volume, [`exercise`](mod@exercise) uses
//! it in every way and says which rule does not hold, [`fuzz`](fn@fuzz) looks for such sequences.
//! The folder `fuzz/` at the root has the same ([`try_input`]) for libFuzzer, which is guided by
//! coverage.
pub mod exercise;
pub mod fields;
mod fuzz;
pub mod images;
mod input;
mod lineages;
mod loss;
pub mod overlay;
pub mod program;
mod records;
mod walk;

pub use fuzz::{AllocationMeter, Finding, FuzzOptions, FuzzProgress, FuzzReport, fuzz};
pub use input::BYTES_MAX as INPUT_BYTES_MAX;

use images::BaseImage;

/// Makes the volume that the input means, and does everything with it.
///
/// # Errors
/// The rule that does not hold. Panics of this thread are not caught.
pub fn try_input(bases: &[BaseImage], bytes: &[u8]) -> Result<exercise::Seen, String> {
    exercise::exercise(program::run(bases, bytes))
}

/// The inputs that are kept beside the code: those that broke a rule once, and a sample of those
/// that showed something new.
pub fn corpus() -> Vec<Vec<u8>> {
    let texts =
        [include_str!("../../corpus/regressions.hex"), include_str!("../../corpus/inputs.hex")];
    let lines = texts.iter().flat_map(|text| text.lines()).filter(|line| !line.starts_with('#'));
    lines.map(|line| from_hex(line).unwrap_or_default()).collect()
}

/// An input from its text; `None` if that is not hexadecimal.
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text
        .as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    digits.collect::<Option<_>>().filter(|_| text.len().is_multiple_of(2))
}

/// An input as text.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_can_be_read() {
        assert!(corpus().len() > 100 && corpus().iter().all(|input| !input.is_empty()));
        assert_eq!(from_hex("0aff").as_deref(), Some(&[10, 255][..]));
        assert_eq!(
            (from_hex("0"), from_hex("zz"), to_hex(&[10, 255]).as_str()),
            (None, None, "0aff")
        );
    }
}
