//! Dates of the wall clock, in UTC.

const DAY_SECONDS: i64 = 86_400;

/// Year, month and day of a number of days since 1970-01-01 (Howard Hinnant, "chrono-compatible
/// low-level date algorithms").
///
/// ```
/// assert_eq!(cairn_environment::calendar::date_of(59), (1970, 3, 1));
/// ```
pub fn date_of(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// Days since 1970-01-01, and hour, minute and second of that day.
pub fn day_and_time_of(seconds: i64) -> (i64, [i64; 3]) {
    let second = seconds.rem_euclid(DAY_SECONDS);
    (seconds.div_euclid(DAY_SECONDS), [second / 3600, second / 60 % 60, second % 60])
}

/// Seconds since 1970 as `2026-01-31T23:59:59Z`.
///
/// ```
/// assert_eq!(cairn_environment::calendar::utc_text(0), "1970-01-01T00:00:00Z");
/// ```
pub fn utc_text(seconds: i64) -> String {
    let (days, [hour, minute, second]) = day_and_time_of(seconds);
    let (year, month, day) = date_of(days);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(utc_text(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(utc_text(1_798_761_599), "2026-12-31T23:59:59Z");
        assert_eq!(utc_text(-1), "1969-12-31T23:59:59Z");
    }
}
