//! How long a leader waits for others before it writes: flush coordination, after Ric Wheeler's and Darrick Wong's work
//! on ext4 and the batching in jbd2.
//!
//! A request that arrives just after a flush began waits for that flush and then for its own; had the leader waited a
//! moment, one flush would have done. So waiting pays when others are likely to come soon: those who were part of the
//! last groups and have not come back yet. The estimate follows the measured flush time, stops after a pause without
//! arrivals, and learns from waits that were in vain.
//!
//! Plain state, under the group's lock.
use std::time::Duration;

/// When a leader waits for others to join its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FlushPolicy {
    /// When a flush takes at least 2 ms and others are expected.
    #[default]
    Auto,
    /// When others are expected, however fast the device is.
    Coordinate,
    /// Never; and each request gets a flush of its own.
    Each,
}

/// Below this a flush is too cheap to wait for company.
const FLUSH_TIME_MIN: Duration = Duration::from_millis(2);
/// A leader waits at most this part of a flush,
const LIMIT_DIVISOR: u32 = 2;
/// and stops after a pause of this part of a flush without a new request.
const PAUSE_DIVISOR: u32 = 8;
/// After this many groups without a wait, one wait tells whether it would pay now.
const GROUPS_BETWEEN_PROBES: u32 = 32;

/// What a leader may wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    /// Enough waiters.
    pub(crate) wanted: usize,
    /// Longest wait.
    pub(crate) limit: Duration,
    /// Longest wait without a new request.
    pub(crate) pause: Duration,
}

#[derive(Debug)]
pub(crate) struct Gathering {
    policy: FlushPolicy,
    /// Requesters that were active lately.
    expected: usize,
    /// Share of the waits that somebody joined, in 1/256.
    success: u32,
    groups_without: u32,
}

impl Gathering {
    pub(crate) fn new(policy: FlushPolicy) -> Self {
        Self { policy, expected: 0, success: 256, groups_without: 0 }
    }

    pub(crate) fn policy(&self) -> FlushPolicy {
        self.policy
    }

    /// Whether, with `waiting` requests at hand, waiting is expected to gain more than it costs.
    pub(crate) fn plan(&mut self, waiting: usize, flush_time: Duration) -> Option<Plan> {
        let flush_long_enough = match self.policy {
            FlushPolicy::Auto => flush_time >= FLUSH_TIME_MIN,
            FlushPolicy::Coordinate => !flush_time.is_zero(),
            FlushPolicy::Each => false,
        };
        // A few may be late or gone; the others do not wait for them.
        let wanted = self.expected - self.expected / 16;
        if !flush_long_enough || self.expected < 2 || waiting == 0 || waiting >= wanted {
            return None;
        }
        // Each that joins saves about one flush time; each at hand pays at least one pause if nobody joins.
        let gain = (wanted - waiting) as u64 * u64::from(self.success) * u64::from(PAUSE_DIVISOR) / 256;
        if gain < waiting as u64 && self.groups_without < GROUPS_BETWEEN_PROBES {
            self.groups_without += 1;
            return None;
        }
        self.groups_without = 0;
        Some(Plan { wanted, limit: flush_time / LIMIT_DIVISOR, pause: flush_time / PAUSE_DIVISOR })
    }

    /// A wait is over: whether anybody came.
    pub(crate) fn gathered(&mut self, joined: bool) {
        self.success = if joined { self.success + (256 - self.success).div_ceil(2) } else { self.success * 3 / 4 };
    }

    /// A group of `size` is done, and `waiting` others have come meanwhile.
    pub(crate) fn completed(&mut self, size: usize, waiting: usize) {
        let active = size + waiting;
        self.expected = if active >= self.expected { active } else { (self.expected + active) / 2 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLUSH: Duration = Duration::from_millis(8);

    #[test]
    fn a_single_thread_and_a_fast_device_never_wait() {
        let mut gathering = Gathering::new(FlushPolicy::Auto);
        for _ in 0..100 {
            assert_eq!(gathering.plan(1, FLUSH), None);
            gathering.completed(1, 0);
        }
        gathering.completed(50, 14);
        assert_eq!(gathering.plan(1, FLUSH_TIME_MIN - Duration::from_nanos(1)), None);
        assert!(gathering.plan(1, FLUSH_TIME_MIN).is_some());
        assert!(Gathering { policy: FlushPolicy::Coordinate, ..gathering }.plan(1, Duration::from_micros(50)).is_some());
    }

    #[test]
    fn those_who_left_are_forgotten_within_a_few_groups() {
        let mut gathering = Gathering::new(FlushPolicy::Auto);
        gathering.completed(40, 24);
        let mut waits = 0;
        for _ in 0..40 {
            if gathering.plan(1, FLUSH).is_some() {
                waits += 1;
                gathering.gathered(false);
            }
            gathering.completed(1, 0);
        }
        assert!((1..=6).contains(&waits), "{waits} waits in vain");
    }

    #[test]
    fn waits_in_vain_become_rare_and_come_back_when_they_pay() {
        let mut gathering = Gathering::new(FlushPolicy::Auto);
        let round = |gathering: &mut Gathering, joined: bool| {
            gathering.completed(1, 1);
            let planned = gathering.plan(1, FLUSH).is_some();
            if planned {
                gathering.gathered(joined);
            }
            planned
        };
        let waits = (0..1000).filter(|_| round(&mut gathering, false)).count();
        assert!(waits < 50, "{waits} waits in vain");
        let waits = (0..200).filter(|_| round(&mut gathering, true)).count();
        assert!(waits > 100, "only {waits} waits that pay");
    }

    #[test]
    fn enough_is_enough() {
        let mut gathering = Gathering::new(FlushPolicy::Auto);
        gathering.completed(30, 34);
        assert_eq!(gathering.plan(60, FLUSH), None);
        assert_eq!(gathering.plan(50, FLUSH).map(|plan| plan.wanted), Some(60));
    }
}
