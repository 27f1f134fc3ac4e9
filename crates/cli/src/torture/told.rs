//! The report of a run, with what it takes to repeat it, as JSON or in words.
use crate::output;
use serde::Serialize;
use std::fmt;
use std::process::ExitCode;

/// A report with what it takes to repeat it.
#[derive(Serialize)]
pub struct Told<T, S = u64> {
    /// What was run.
    pub command: String,
    pub seed: S,
    /// Whether nothing was found.
    pub passed: bool,
    /// Whether a signal ended it early.
    pub interrupted: bool,
    #[serde(flatten)]
    pub report: T,
}

impl<T: Serialize, S: Serialize> Told<T, S>
where
    Told<T, S>: fmt::Display,
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

/// What the first line of a report says of a run that was interrupted.
pub fn interrupted_after(interrupted: bool, done: u64, total: Option<u64>, things: &str) -> String {
    let total = total.map_or(String::new(), |total| format!(" of {}", grouped(total)));
    if interrupted {
        format!(", interrupted after {}{total} {things}", grouped(done))
    } else {
        String::new()
    }
}

/// How often something was done.
pub fn times(count: u64) -> String {
    match count {
        1 => "once".into(),
        2 => "twice".into(),
        count => format!("{} times", grouped(count)),
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
pub fn line(
    formatter: &mut fmt::Formatter<'_>,
    name: &str,
    value: u64,
    explanation: &str,
) -> fmt::Result {
    writeln!(formatter, "  {name:<22} {:>12}  {explanation}", grouped(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_run_says_how_far_it_got() {
        assert_eq!(
            interrupted_after(true, 12, Some(39_304), "workloads"),
            ", interrupted after 12 of 39,304 workloads"
        );
        assert_eq!(
            interrupted_after(true, 1200, None, "volumes"),
            ", interrupted after 1,200 volumes"
        );
        assert_eq!(interrupted_after(false, 12, Some(35), "workloads"), "");
    }

    #[test]
    fn digits_are_grouped() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
