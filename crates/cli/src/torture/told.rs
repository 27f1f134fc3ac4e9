//! The report of a run, with what it takes to repeat it, as JSON or in words.
use crate::output;
use serde::Serialize;
use std::fmt;
use std::process::ExitCode;

/// A report with what it takes to repeat it.
#[derive(Serialize)]
pub struct Told<T> {
    /// What was run.
    pub command: String,
    pub seed: u64,
    /// Whether nothing was found.
    pub passed: bool,
    #[serde(flatten)]
    pub report: T,
}

impl<T: Serialize> Told<T>
where
    Told<T>: fmt::Display,
{
    /// Prints it; the exit code says whether something was found.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn tell(&self, json: bool) -> anyhow::Result<ExitCode> {
        output::print(self, json)?;
        Ok(if self.passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Digits in groups of three.
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

/// One figure of a report in words.
pub fn line(formatter: &mut fmt::Formatter<'_>, name: &str, value: u64, explanation: &str) -> fmt::Result {
    writeln!(formatter, "  {name:<22} {:>12}  {explanation}", grouped(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
