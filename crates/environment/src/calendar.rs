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

/// Days from 1970-01-01 to a date, the inverse of [`date_of`].
fn days_to(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let month_from_march = (month + 9) % 12;
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// The inverse of [`utc_text`], for the years 0000 to 9999; `None` for any other text.
///
/// ```
/// use cairn_environment::calendar::seconds_of;
/// assert_eq!(seconds_of("1970-01-01T00:01:00Z"), Some(60));
/// assert_eq!(seconds_of("1970-02-30T00:00:00Z"), None);
/// ```
pub fn seconds_of(text: &str) -> Option<i64> {
    const PLACES: [(usize, usize); 6] = [(0, 4), (5, 7), (8, 10), (11, 13), (14, 16), (17, 19)];
    let number = |(begin, end): (usize, usize)| -> Option<i64> {
        let digits = text.get(begin..end)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    let mut numbers = [0; 6];
    for (found, place) in numbers.iter_mut().zip(PLACES) {
        *found = number(place)?;
    }
    let [year, month, day, hour, minute, second] = numbers;
    let seconds = days_to(year, month, day) * DAY_SECONDS + hour * 3600 + minute * 60 + second;
    // Another text has another time, or none.
    (utc_text(seconds) == text).then_some(seconds)
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

    #[test]
    fn texts_of_times_are_read() {
        let mut seconds = -30_000_000_000;
        while seconds < 250_000_000_000 {
            assert_eq!(seconds_of(&utc_text(seconds)), Some(seconds), "{}", utc_text(seconds));
            seconds += 86_399_999;
        }
        for wrong in [
            "",
            "2026-11-26T15:40:05",
            "2026-11-26T15:40:05ZZ",
            "2026-11-26 15:40:05Z",
            "2026-11-31T15:40:05Z",
            "2026-13-01T15:40:05Z",
            "2026-00-01T15:40:05Z",
            "2026-01-00T15:40:05Z",
            "2026-11-26T24:40:05Z",
            "2026-11-26T15:60:05Z",
            "+026-11-26T15:40:05Z",
            "2026-11-26T15:40:\u{e9}5Z",
        ] {
            assert_eq!(seconds_of(wrong), None, "{wrong}");
        }
    }
}
