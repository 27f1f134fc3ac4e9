//! How long a leader waits for others before it writes: flush coordination, after Ric Wheeler's and Darrick Wong's work
//! on ext4 and the batching in jbd2.
//!
//! A flush keeps a simple device from everything else, so the fewer of them the better; but who waits for company is not
//! served meanwhile. If a group of `G` requests is closed a time `T` after the one before, then `G / T` requests are served
//! per time, for each cycle has one flush. So the leader waits as long as requests arrive faster than that. This tells
//! apart the two reasons why requests come:
//! - *In a circle*: those who come are the ones that the last group let go, and they make way only while no flush is
//!   under way. Then they arrive faster while the leader waits than over the whole cycle, and a longer wait is worth more,
//!   until all are there.
//! - *By themselves*: as many come during a flush as at any other time. Then all waits are worth the same, and none is made.
//!
//! States of a group: nothing → *gathering* ([`Gathering::begin`], then [`Gathering::patience`] until it is out, then
//! [`Gathering::end`]) → written and flushed → [`Gathering::completed`].
//!
//! Plain state, under the group's lock. It is told the time, so that tests can run it on a clock of their own.
use cairn_environment::clock::Monotonic;
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
/// Requests must come faster than they are served by this part, which is what a longer wait could still save. It bounds the
/// wait as well: after 48 flush times, a flush is no larger part of the whole.
const MARGIN: f64 = 1.0 / 48.0;
/// Over the last groups, so many times more requests must have come while leaders waited than during flushes; less may be
/// chance.
const SURPLUS: f64 = 1.25;
/// What happened counts for so much less with every group that follows.
const FADING: f64 = 15.0 / 16.0;
/// However long a flush takes, nobody waits longer than this for company.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// Arrivals are irregular: a pause of this many mean intervals is taken as the end of them,
const PAUSE_INTERVALS: f64 = 8.0;
/// or of this many when almost all are there;
const PAUSE_INTERVALS_COMPLETE: f64 = 2.0;
/// but not below this part of a flush, nor above so many flush times: who comes later might as well have its own.
const PAUSE_MIN: f64 = 1.0 / 8.0;
const PAUSE_MAX: f64 = 2.0;
/// A rate is told from so many arrivals, or from a wait of one flush time.
const ARRIVALS_MIN: usize = 8;
/// After this many groups without a wait, one wait tells whether it would pay now.
const GROUPS_BETWEEN_PROBES: u32 = 64;

/// How long a leader waits, unless more requests come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Patience {
    /// With so many waiting there is no need to wait any longer.
    pub(crate) wanted: usize,
    /// If nobody comes within this time, nobody is expected any more.
    pub(crate) pause: Duration,
}

/// A leader that waits.
#[derive(Clone, Copy, Debug)]
struct Wait {
    begin: Monotonic,
    /// Requests at hand then.
    waiting: usize,
    flush_time: Duration,
}

/// How fast requests came lately.
#[derive(Clone, Copy, Debug, Default)]
struct Arrivals {
    count: f64,
    seconds: f64,
}

impl Arrivals {
    fn add(&mut self, count: usize, time: Duration) {
        self.count += count as f64;
        self.seconds += time.as_secs_f64();
    }

    fn fade(&mut self) {
        self.count *= FADING;
        self.seconds *= FADING;
    }

    fn per_second(&self) -> f64 {
        if self.seconds > 0.0 { self.count / self.seconds } else { 0.0 }
    }
}

#[derive(Debug)]
pub(crate) struct Gathering {
    policy: FlushPolicy,
    /// Requesters that were active lately.
    expected: usize,
    /// While leaders waited, and while groups were written and flushed.
    while_waiting: Arrivals,
    while_flushing: Arrivals,
    groups_without: u32,
    /// When the last group was closed, and when it was done.
    closed: Option<Monotonic>,
    completed: Option<Monotonic>,
    wait: Option<Wait>,
}

impl Gathering {
    pub(crate) fn new(policy: FlushPolicy) -> Self {
        Self {
            policy,
            expected: 0,
            while_waiting: Arrivals::default(),
            while_flushing: Arrivals::default(),
            groups_without: 0,
            closed: None,
            completed: None,
            wait: None,
        }
    }

    pub(crate) fn policy(&self) -> FlushPolicy {
        self.policy
    }

    /// Whether the leader waits for others. If not, its group, of `waiting` requests, is closed.
    pub(crate) fn begin(&mut self, now: Monotonic, waiting: usize, flush_time: Duration) -> bool {
        let waits = self.pays(now, waiting, flush_time);
        if waits {
            self.wait = Some(Wait { begin: now, waiting, flush_time });
        } else {
            self.closed = Some(now);
        }
        waits
    }

    /// Whether waiting is expected to gain more than it costs.
    fn pays(&mut self, now: Monotonic, waiting: usize, flush_time: Duration) -> bool {
        let flush_long_enough = match self.policy {
            FlushPolicy::Auto => flush_time >= FLUSH_TIME_MIN,
            FlushPolicy::Coordinate => !flush_time.is_zero(),
            FlushPolicy::Each => false,
        };
        // With a pause of two flush times behind it, the device has nothing to gain.
        let busy = self.completed.is_some_and(|completed| now - completed < flush_time * 2);
        if !flush_long_enough || !busy || self.expected < 2 || waiting == 0 || waiting >= self.expected {
            return false;
        }
        let known = self.while_waiting.seconds >= flush_time.as_secs_f64();
        let rate = self.while_waiting.per_second();
        // Each that joins saves a flush: a wait that is longer than that, for one, is no gain either.
        let pays = rate > self.while_flushing.per_second() * SURPLUS && rate * flush_time.as_secs_f64() > 1.0;
        if known && !pays && self.groups_without < GROUPS_BETWEEN_PROBES {
            self.groups_without += 1;
            return false;
        }
        self.groups_without = 0;
        true
    }

    /// Requests served per second, if the group were closed now.
    fn rate(&self, now: Monotonic, waiting: usize) -> f64 {
        let since = self.closed.map_or(Duration::ZERO, |closed| now - closed);
        waiting as f64 / since.max(Duration::from_nanos(1)).as_secs_f64()
    }

    /// What a leader that began to wait does with `waiting` requests at hand: wait so long, or no longer.
    pub(crate) fn patience(&self, now: Monotonic, waiting: usize) -> Option<Patience> {
        let Wait { begin, waiting: before, flush_time } = self.wait?;
        let (waited, arrived) = (now - begin, waiting.saturating_sub(before));
        if waiting == 0 || waiting >= self.expected || waited >= WAIT_MAX.min(flush_time.div_f64(MARGIN)) {
            return None;
        }
        let rate = self.rate(now, waiting);
        let known = arrived >= ARRIVALS_MIN || waited >= flush_time;
        if known && arrived as f64 / waited.as_secs_f64() < rate * (1.0 + MARGIN) {
            return None;
        }
        // A few may be late or gone; the others do not wait long for them.
        let complete = waiting >= self.expected - self.expected / 16;
        let intervals = if complete { PAUSE_INTERVALS_COMPLETE } else { PAUSE_INTERVALS };
        let bounds = (flush_time.mul_f64(PAUSE_MIN), flush_time.mul_f64(PAUSE_MAX));
        let pause = Duration::from_secs_f64(intervals / rate).clamp(bounds.0, bounds.1);
        let wanted = if complete { self.expected } else { self.expected - self.expected / 16 };
        Some(Patience { wanted, pause })
    }

    /// The wait is over, and the group closed with `waiting` requests.
    pub(crate) fn end(&mut self, now: Monotonic, waiting: usize) {
        let Some(wait) = self.wait.take() else { return };
        self.while_waiting.add(waiting.saturating_sub(wait.waiting), now - wait.begin);
        self.closed = Some(now);
    }

    /// A group of `size` is done, and `waiting` others have come meanwhile.
    pub(crate) fn completed(&mut self, now: Monotonic, size: usize, waiting: usize) {
        self.completed = Some(now);
        self.while_waiting.fade();
        self.while_flushing.fade();
        self.while_flushing.add(waiting, self.closed.map_or(Duration::ZERO, |closed| now - closed));
        let active = size + waiting;
        self.expected = if active >= self.expected { active } else { (self.expected + active) / 2 };
    }
}

#[cfg(test)]
#[path = "gathering_tests.rs"]
mod gathering_tests;
