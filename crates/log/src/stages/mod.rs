//! How long each part of a request for durability took (an fsync, mostly).
//!
//! ```text
//! begin ── data write ── registered ── group wait ── checkpoint write ── flush ── wake-up ── end
//!                                  └───────────────── commit ─────────────────┘
//! ```
//! A request measures its own begin, registration and end; the leader measures its round once for
//! the whole group, and a commit its superblock. So a request costs three looks at the clock, and a
//! round three more. Each request counts in every stage that it went through: those of a group once
//! per waiter, because they are what this waiter waited for. A request that found its operation
//! durable has no stages but the first and the total. What failed isn't counted.
//!
//! The stages of one request follow each other without a gap, but for a waiter that registers while
//! the checkpoint with its operation is being written already: it counts the whole write. Of two
//! groups that overlap, the flush of the later one may serve both: those of the earlier one count
//! the later round.
//!
//! No lock: [`Histogram`]s.
mod histogram;

use cairn_environment::clock::{Monotonic, now_monotonic};
use histogram::Histogram;

/// Durations of one stage since the log was made.
#[derive(Clone, PartialEq, Debug)]
pub struct StageTime {
    /// Which stage: `data write`, `group wait`, `checkpoint write`, `flush`, `commit`, `wake-up` or
    /// `total`.
    pub stage: &'static str,
    /// Requests that went through it.
    pub count: u64,
    /// Average, in nanoseconds.
    pub mean_ns: f64,
    /// Median, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile, in nanoseconds.
    pub p99_ns: u64,
    /// Longest, in nanoseconds.
    pub max_ns: u64,
    /// How many took about how long, in nanoseconds; ascending, each within 0.8 %.
    pub buckets: Vec<(u64, u64)>,
}

/// When a request began: taken before the file's data is written, and handed over with the
/// operation to wait for.
#[derive(Clone, Copy, Debug)]
pub struct RequestTimer(Monotonic);

impl RequestTimer {
    /// A request begins now.
    pub fn begin() -> Self {
        Self(now_monotonic())
    }
}

/// A request that waits.
#[derive(Clone, Copy)]
pub(crate) struct Registration {
    begin: Monotonic,
    registered: Monotonic,
}

/// What made a waiter's operation durable.
#[derive(Clone, Copy)]
pub(crate) enum Ending {
    /// It was durable before.
    Immediate,
    /// A leader's round.
    Round(RoundTimes),
    /// A superblock.
    Commit(Monotonic),
}

impl Ending {
    /// A superblock that is durable as of now.
    pub(crate) fn commit_now() -> Self {
        Self::Commit(now_monotonic())
    }
}

/// The times of one round of a leader.
#[derive(Clone, Copy, Default)]
pub(crate) struct RoundTimes {
    write: Option<Monotonic>,
    flush: Monotonic,
    flushed: Monotonic,
}

impl RoundTimes {
    /// The round begins to take and write the list.
    pub(crate) fn writing(&mut self) {
        self.write = Some(now_monotonic());
    }

    /// The round flushed, or found that it need not.
    pub(crate) fn flushed(&mut self, began: Option<Monotonic>) {
        self.flushed = now_monotonic();
        self.flush = began.unwrap_or(self.flushed);
    }

    fn write(&self) -> Monotonic {
        self.write.unwrap_or(self.flush)
    }
}

/// All durations.
pub(crate) struct Stages {
    data_write: Histogram,
    group_wait: Histogram,
    checkpoint_write: Histogram,
    flush: Histogram,
    commit: Histogram,
    wake_up: Histogram,
    total: Histogram,
}

fn nanoseconds(from: Monotonic, to: Monotonic) -> u64 {
    to.nanoseconds().saturating_sub(from.nanoseconds())
}

impl Stages {
    pub(crate) fn new() -> Self {
        Self {
            data_write: Histogram::new(),
            group_wait: Histogram::new(),
            checkpoint_write: Histogram::new(),
            flush: Histogram::new(),
            commit: Histogram::new(),
            wake_up: Histogram::new(),
            total: Histogram::new(),
        }
    }

    /// The request's operation is logged; now it waits.
    pub(crate) fn register(&self, timer: RequestTimer) -> Registration {
        let registration = Registration { begin: timer.0, registered: now_monotonic() };
        self.data_write.record(nanoseconds(registration.begin, registration.registered), 1);
        registration
    }

    /// A round is over for `waiters` waiters.
    pub(crate) fn round(&self, times: &RoundTimes, waiters: u64) {
        self.checkpoint_write.record(nanoseconds(times.write(), times.flush), waiters);
        self.flush.record(nanoseconds(times.flush, times.flushed), waiters);
    }

    /// A waiter goes on.
    pub(crate) fn finish(&self, registration: &Registration, ending: Ending) {
        let end = match ending {
            Ending::Immediate => registration.registered,
            Ending::Round(times) => {
                let end = now_monotonic();
                self.group_wait.record(nanoseconds(registration.registered, times.write()), 1);
                self.wake_up.record(nanoseconds(times.flushed, end), 1);
                end
            }
            Ending::Commit(durable) => {
                let end = now_monotonic();
                self.commit.record(nanoseconds(registration.registered, durable), 1);
                self.wake_up.record(nanoseconds(durable, end), 1);
                end
            }
        };
        self.total.record(nanoseconds(registration.begin, end), 1);
    }

    /// The stages in which anything was recorded.
    pub(crate) fn report(&self) -> Vec<StageTime> {
        let stages = [
            ("data write", &self.data_write),
            ("group wait", &self.group_wait),
            ("checkpoint write", &self.checkpoint_write),
            ("flush", &self.flush),
            ("commit", &self.commit),
            ("wake-up", &self.wake_up),
            ("total", &self.total),
        ];
        let time_of = |(stage, histogram): (&'static str, &Histogram)| {
            let summary = histogram.summary();
            StageTime {
                stage,
                count: summary.count,
                mean_ns: summary.mean_ns,
                p50_ns: summary.p50_ns,
                p99_ns: summary.p99_ns,
                max_ns: summary.max_ns,
                buckets: histogram.filled(),
            }
        };
        stages.into_iter().map(time_of).filter(|time| time.count > 0).collect()
    }
}
