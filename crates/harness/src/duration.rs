//! Times on the command line: a number above 0 of seconds or hours; a fraction is possible.
use std::time::Duration;

/// Seconds of an hour.
pub const SECONDS_PER_HOUR: f64 = 3600.0;

/// So many seconds.
///
/// # Errors
/// What to write instead.
pub fn seconds(text: &str) -> Result<Duration, String> {
    parse(text, 1.0).ok_or_else(|| "write a number of seconds above 0, for example 2.5".into())
}

/// So many hours.
///
/// # Errors
/// What to write instead.
pub fn hours(text: &str) -> Result<Duration, String> {
    parse(text, SECONDS_PER_HOUR)
        .ok_or_else(|| "write a number of hours above 0, for example 2 or 0.5".into())
}

fn parse(text: &str, unit_seconds: f64) -> Option<Duration> {
    let number: f64 = text.parse().ok()?;
    let time = Duration::try_from_secs_f64(number * unit_seconds).ok()?;
    (!time.is_zero()).then_some(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_are_possible_and_zero_is_not() {
        assert_eq!(seconds("2.5"), Ok(Duration::from_millis(2500)));
        assert_eq!(hours("0.5"), Ok(Duration::from_secs(1800)));
        for wrong in ["0", "-1", "NaN", "soon"] {
            assert!(seconds(wrong).is_err() && hours(wrong).is_err(), "{wrong}");
        }
    }
}
