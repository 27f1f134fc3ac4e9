//! The bar of a load, over its time or over its operations.
use cairn_harness::progress::ProgressBar;
use std::time::Duration;

/// Shows how much of a time or of a number of operations is over; disappears when dropped.
pub struct Progress {
    bar: ProgressBar,
    over_time: bool,
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Progress {
    /// A bar over a time.
    pub fn over_time(task: &str, duration: Duration) -> Self {
        Self { bar: ProgressBar::load(task, milliseconds(duration)), over_time: true }
    }

    /// A bar over a number of operations.
    pub fn over_operations(task: &str, total: u64) -> Self {
        Self { bar: ProgressBar::load(task, total), over_time: false }
    }

    /// Moves on: `elapsed` is over, and `operations` are done.
    pub fn set(&self, elapsed: Duration, operations: u64) {
        self.bar.set(if self.over_time { milliseconds(elapsed) } else { operations });
        self.bar.note(format!("{operations} operations, {:.0} s", elapsed.as_secs_f64()));
    }
}
