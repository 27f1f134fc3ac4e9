//! The measured flush time: a moving average that resists outliers.
//!
//! Each flush moves the average a quarter of the way, (3·old + new) / 4, as jbd2 does for its
//! commit time. In ZFS, a single stall in such an average made every later decision wrong for a
//! while (openzfs #9444). So a new value counts for at most four times the average plus one
//! millisecond. If a device really becomes slower, the average follows after a few flushes.

use cairn_environment::atomic::{AtomicU64, Ordering, try_update};
use std::time::Duration;

/// The bound for the very first flush, which often pays for earlier writes.
const FIRST_BOUND_NANOSECONDS: u64 = 10_000_000;
const SLACK_NANOSECONDS: u64 = 1_000_000;

/// A moving average of flush times.
///
/// ```
/// use cairn_blockdev::FlushTime;
/// use std::time::Duration;
/// let average = FlushTime::default();
/// average.record(Duration::from_millis(4));
/// average.record(Duration::from_millis(8));
/// assert_eq!(average.average(), Duration::from_millis(5));
/// ```
#[derive(Debug, Default)]
pub struct FlushTime {
    /// Zero until the first flush.
    average_nanoseconds: AtomicU64,
}

impl FlushTime {
    /// Adds one measured flush to the average.
    pub fn record(&self, measured: Duration) {
        let measured = u64::try_from(measured.as_nanos()).unwrap_or(u64::MAX).max(1);
        let update = |old: u64| match old {
            0 => Some(measured.min(FIRST_BOUND_NANOSECONDS)),
            _ => Some((3 * old + measured.min(4 * old + SLACK_NANOSECONDS)) / 4),
        };
        try_update(&self.average_nanoseconds, update);
    }

    /// The average; zero until the first flush was recorded.
    pub fn average(&self) -> Duration {
        Duration::from_nanos(self.average_nanoseconds.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_outlier_cannot_poison_the_average_but_a_slower_device_is_believed() {
        let average = FlushTime::default();
        assert_eq!(average.average(), Duration::ZERO);
        for _ in 0..20 {
            average.record(Duration::from_micros(200));
        }
        average.record(Duration::from_secs(30));
        assert!(average.average() < Duration::from_millis(1), "{:?}", average.average());
        for _ in 0..20 {
            average.record(Duration::from_millis(20));
        }
        assert!(average.average() > Duration::from_millis(19), "{:?}", average.average());
    }
}
