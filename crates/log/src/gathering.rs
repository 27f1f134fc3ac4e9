//! How long a leader waits for others before it writes: flush coordination, after Ric Wheeler's and Darrick Wong's work
//! on ext4 and the batching in jbd2.
//!
//! A flush keeps a simple device from everything else, so the fewer of them the better; but who waits for company is not
//! served meanwhile. Whether that pays depends on why requests come:
//! - *In a circle*: those who come are the ones that the last group let go. Then, if the leader waits until all are there,
//!   one flush does for all of them, and more requests are served per time.
//! - *By themselves*, whatever the leader does. Then as many are served per time with a wait as without, and all that the
//!   wait changes is that each takes longer.
//!
//! So groups are closed in one of two ways: *together*, when all who were active lately have come, and *apart*, at once. The
//! requests per time are measured for both, from close to close; together is for those times at which it served more. From
//! time to time the other way is tried for a few groups, the more rarely the more often it was found to be worse.
//!
//! States of a group: nothing → *gathering*, unless it is closed at once ([`Gathering::begin`], then
//! [`Gathering::patience`] until it is out, then [`Gathering::end`]) → closed → [`Gathering::completed`].
//!
//! Plain state, under the group's lock. It is told the time, so that tests can run it on a clock of their own.
use cairn_environment::clock::Monotonic;
use std::time::Duration;

/// When a leader waits for others to join its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FlushPolicy {
    /// When a flush takes at least 2 ms, others are expected, and waiting for them was found to pay.
    #[default]
    Auto,
    /// When others are expected, however fast the device is, and whether it pays or not.
    Coordinate,
    /// Never; and each request gets a flush of its own.
    Each,
}

/// Below this a flush is too cheap to wait for company.
const FLUSH_TIME_MIN: Duration = Duration::from_millis(2);
/// Nobody waits for company longer than so many flush times, after which a flush is only a small part of the whole,
const WAIT_MAX_FLUSHES: u32 = 48;
/// nor longer than this.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// Arrivals are irregular: a pause of this many mean intervals is taken as the end of them,
const PAUSE_INTERVALS: f64 = 8.0;
/// or of this many when almost all are there;
const PAUSE_INTERVALS_COMPLETE: f64 = 2.0;
/// but not below this part of a flush, nor above so many flush times.
const PAUSE_MIN: f64 = 1.0 / 8.0;
const PAUSE_MAX: f64 = 4.0;
/// Together must serve so many times more requests per time: less may be chance.
const GAIN: f64 = 1.1;
/// The other way is tried until each requester was served so many times,
const TRIAL_TURNS: usize = 2;
/// after so many groups at first, and at most, without a trial.
const GROUPS_BETWEEN_TRIALS: (u32, u32) = (8, 512);

/// How groups are closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Together,
    Apart,
}

impl Way {
    fn other(self) -> Way {
        match self {
            Way::Together => Way::Apart,
            Way::Apart => Way::Together,
        }
    }
}

/// How many requests a way served lately, and in which time.
#[derive(Clone, Copy, Debug, Default)]
struct Served {
    count: f64,
    seconds: f64,
}

impl Served {
    /// What was before counts for less and less: some hundred requests are remembered, but not fewer than some groups.
    fn add(&mut self, count: usize, time: Duration) {
        let kept = (1.0 - count as f64 / 512.0).clamp(0.75, 15.0 / 16.0);
        self.count = self.count * kept + count as f64;
        self.seconds = self.seconds * kept + time.as_secs_f64();
    }

    /// Requests per second, once there were any.
    fn rate(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.count / self.seconds)
    }
}

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
    flush_time: Duration,
}

#[derive(Debug)]
pub(crate) struct Gathering {
    policy: FlushPolicy,
    /// Requesters that were active lately.
    expected: usize,
    together: Served,
    apart: Served,
    /// How the last group was closed, and how many requests will be served before it counts.
    way: Way,
    uncounted: usize,
    /// The way that is tried, and for how many requests more.
    trial: Option<(Way, usize)>,
    groups_without_trial: u32,
    groups_between_trials: u32,
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
            together: Served::default(),
            apart: Served::default(),
            way: Way::Together,
            uncounted: 0,
            trial: None,
            groups_without_trial: 0,
            groups_between_trials: GROUPS_BETWEEN_TRIALS.0,
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
        let flush_long_enough = match self.policy {
            FlushPolicy::Auto => flush_time >= FLUSH_TIME_MIN,
            FlushPolicy::Coordinate => !flush_time.is_zero(),
            FlushPolicy::Each => false,
        };
        // With a pause of two flush times behind it, the device has nothing to gain, and nothing is learned.
        let busy = self.completed.is_some_and(|completed| now - completed < flush_time * 2);
        if !flush_long_enough || !busy || self.expected < 2 || waiting == 0 {
            self.closed = Some(now);
            return false;
        }
        match self.choose() {
            Way::Together if waiting < self.expected => {
                self.wait = Some(Wait { begin: now, flush_time });
                true
            }
            way => {
                self.close(now, waiting, way);
                false
            }
        }
    }

    /// The way for the next group.
    fn choose(&mut self) -> Way {
        if self.policy == FlushPolicy::Coordinate {
            return Way::Together;
        }
        match self.trial {
            Some((way, left)) if left > 0 => return way,
            Some((way, _)) => {
                self.trial = None;
                let longer = (self.groups_between_trials * 2).min(GROUPS_BETWEEN_TRIALS.1);
                self.groups_between_trials = if self.better() == way { GROUPS_BETWEEN_TRIALS.0 } else { longer };
            }
            None => {}
        }
        let better = self.better();
        self.groups_without_trial += 1;
        if self.groups_without_trial <= self.groups_between_trials {
            return better;
        }
        self.groups_without_trial = 0;
        self.trial = Some((better.other(), TRIAL_TURNS * self.expected));
        better.other()
    }

    /// The way that serves more requests.
    fn better(&self) -> Way {
        match (self.together.rate(), self.apart.rate()) {
            (Some(together), Some(apart)) if together < apart * GAIN => Way::Apart,
            _ => Way::Together,
        }
    }

    fn close(&mut self, now: Monotonic, waiting: usize, way: Way) {
        let Some(before) = self.closed.replace(now) else { return };
        if std::mem::replace(&mut self.way, way) != way {
            self.uncounted = self.expected;
        }
        if self.uncounted > 0 {
            self.uncounted = self.uncounted.saturating_sub(waiting);
            return;
        }
        let served = if way == Way::Together { &mut self.together } else { &mut self.apart };
        served.add(waiting, now - before);
        if let Some((_, left)) = &mut self.trial {
            *left = left.saturating_sub(waiting);
        }
    }

    /// What a leader that began to wait does with `waiting` requests at hand: wait so long, or no longer.
    pub(crate) fn patience(&self, now: Monotonic, waiting: usize) -> Option<Patience> {
        let Wait { begin, flush_time } = self.wait?;
        if waiting == 0 || waiting >= self.expected || now - begin >= WAIT_MAX.min(flush_time * WAIT_MAX_FLUSHES) {
            return None;
        }
        // A few may be late or gone; the others do not wait long for them.
        let almost = self.expected - self.expected / 16;
        let complete = waiting >= almost;
        let interval = self.closed.map_or(flush_time, |closed| now - closed).div_f64(waiting as f64);
        let intervals = if complete { PAUSE_INTERVALS_COMPLETE } else { PAUSE_INTERVALS };
        let pause = interval.mul_f64(intervals).clamp(flush_time.mul_f64(PAUSE_MIN), flush_time.mul_f64(PAUSE_MAX));
        Some(Patience { wanted: if complete { self.expected } else { almost }, pause })
    }

    /// The wait is over, and the group closed with `waiting` requests.
    pub(crate) fn end(&mut self, now: Monotonic, waiting: usize) {
        if self.wait.take().is_some() {
            self.close(now, waiting, Way::Together);
        }
    }

    /// A group of `size` is done, and `waiting` others have come meanwhile.
    pub(crate) fn completed(&mut self, now: Monotonic, size: usize, waiting: usize) {
        self.completed = Some(now);
        let active = size + waiting;
        self.expected = if active >= self.expected { active } else { (self.expected + active) / 2 };
    }
}

#[cfg(test)]
#[path = "gathering_tests.rs"]
mod gathering_tests;
