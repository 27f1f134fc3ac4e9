//! Time. Intervals come from a clock that never goes back, time stamps from the wall clock.
//!
//! Under the feature `shuttle` the time is that of the simulation. Where there is none, the
//! monotonic clock moves only when it is read or slept on, so that a schedule can be replayed, and
//! the wall clock stands still.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A point on the monotonic clock, in nanoseconds since the program first asked for the time.
///
/// ```
/// use cairn_environment::clock::now_monotonic;
/// let begin = now_monotonic();
/// assert!(now_monotonic() - begin <= begin.elapsed());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Monotonic(u64);

impl Monotonic {
    /// The point `nanoseconds` after the clock's beginning.
    pub const fn from_nanoseconds(nanoseconds: u64) -> Monotonic {
        Monotonic(nanoseconds)
    }

    /// Nanoseconds since the clock's beginning; fits into an atomic.
    pub const fn nanoseconds(self) -> u64 {
        self.0
    }

    /// Time since this point; zero when it lies in the future.
    pub fn elapsed(self) -> Duration {
        now_monotonic() - self
    }
}

impl Sub for Monotonic {
    type Output = Duration;

    /// The time from `earlier` to `self`; zero when `earlier` is the later one.
    fn sub(self, earlier: Monotonic) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Monotonic {
    type Output = Monotonic;

    fn add(self, interval: Duration) -> Monotonic {
        Monotonic(self.0.saturating_add(nanoseconds(interval)))
    }
}

impl Sub<Duration> for Monotonic {
    type Output = Monotonic;

    fn sub(self, interval: Duration) -> Monotonic {
        Monotonic(self.0.saturating_sub(nanoseconds(interval)))
    }
}

fn nanoseconds(interval: Duration) -> u64 {
    u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(not(feature = "shuttle"))]
mod source {
    use std::sync::OnceLock;
    use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

    pub(super) fn monotonic_nanoseconds() -> u64 {
        static BEGINNING: OnceLock<Instant> = OnceLock::new();
        super::nanoseconds(BEGINNING.get_or_init(Instant::now).elapsed())
    }

    pub(super) fn wall() -> (i64, u32) {
        match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(after) => (i64::try_from(after.as_secs()).unwrap_or(i64::MAX), after.subsec_nanos()),
            Err(error) => before_the_epoch(error.duration()),
        }
    }

    fn before_the_epoch(before: Duration) -> (i64, u32) {
        let seconds = i64::try_from(before.as_secs()).unwrap_or(i64::MAX);
        match before.subsec_nanos() {
            0 => (-seconds, 0),
            nanoseconds => (-seconds - 1, 1_000_000_000 - nanoseconds),
        }
    }

    pub(super) fn sleep(interval: Duration) {
        std::thread::sleep(interval);
    }
}

#[cfg(feature = "shuttle")]
mod source {
    use crate::simulation;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    /// Without a simulation the clock moves when it is read or slept on.
    static NANOSECONDS: AtomicU64 = AtomicU64::new(0);
    const WALL_SECONDS: u64 = 1_700_000_000;

    pub(super) fn monotonic_nanoseconds() -> u64 {
        simulation::read_clock().unwrap_or_else(|| NANOSECONDS.fetch_add(1_000, Ordering::Relaxed))
    }

    pub(super) fn wall() -> (i64, u32) {
        let now = Duration::from_nanos(simulation::now().unwrap_or(0));
        ((WALL_SECONDS + now.as_secs()) as i64, now.subsec_nanos())
    }

    pub(super) fn sleep(interval: Duration) {
        if !simulation::sleep(interval) {
            NANOSECONDS.fetch_add(super::nanoseconds(interval), Ordering::Relaxed);
            shuttle::thread::yield_now();
        }
    }
}

/// The time for measuring intervals.
pub fn now_monotonic() -> Monotonic {
    Monotonic(source::monotonic_nanoseconds())
}

/// The time for time stamps: seconds since 1970 (negative before), and nanoseconds within that
/// second.
///
/// ```
/// let (seconds, nanoseconds) = cairn_environment::clock::now_wall();
/// assert!(seconds > 0 && nanoseconds < 1_000_000_000);
/// ```
pub fn now_wall() -> (i64, u32) {
    source::wall()
}

/// Lets `interval` pass.
pub fn sleep(interval: Duration) {
    source::sleep(interval);
}
