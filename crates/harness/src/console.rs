//! What a command prints: results on standard output, messages on standard error.
//!
//! The reader of results may stop early (`cairn dump … | head`); that is not an error. No message
//! is worth the process, which may be the server of a mount: what standard error does not take, a
//! full disk perhaps, is dropped. The macros of the standard library panic instead.
use serde::Serialize;
use std::fmt::Display;
use std::io::{self, Write};

/// Prints `value` as JSON or as text.
///
/// # Errors
/// When it can't be written.
pub fn print<T: Serialize + Display>(value: &T, json: bool) -> anyhow::Result<()> {
    if json { print_text(&serde_json::to_string_pretty(value)?) } else { print_text(value) }
}

/// Prints `text` and a line end, unless it has one.
///
/// # Errors
/// When it can't be written.
pub fn print_text(text: &dyn Display) -> anyhow::Result<()> {
    print_bytes(text.to_string().trim_end_matches('\n').as_bytes())
}

/// Prints `bytes`, a path perhaps, as they are, and a line end.
///
/// # Errors
/// When they can't be written.
pub fn print_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut output = io::stdout().lock();
    let written = output
        .write_all(bytes)
        .and_then(|()| output.write_all(b"\n"))
        .and_then(|()| output.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

/// Writes `text` and a line end to standard error.
pub fn tell(text: &dyn Display) {
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Digits in groups of three.
///
/// ```
/// assert_eq!(cairn_harness::console::grouped(1_234_567), "1,234,567");
/// ```
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
