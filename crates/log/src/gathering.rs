//! M3, coordinated flushes: how groups of fsyncs follow each other, so that as many requests as
//! possible share a flush where that serves more of them per time.
//!
//! Two questions, both answered here: how long a leader waits for other requests before it closes
//! its group (after Ric Wheeler's and Darrick Wong's work on ext4, and the batching in jbd2), and
//! whether a group is written while the one before is flushed.
//!
//! **Waiting for company.** A flush keeps a simple device from everything else, so the fewer of
//! them the better; but a request that waits for company is not served meanwhile. Whether that pays
//! depends on why requests come:
//! - *In a circle*: the requests that come are from the clients whose requests the last group
//!   completed. Then, if the leader waits until all are there, one flush does for all of them, and
//!   more requests are served per time.
//! - *By themselves*, whatever the leader does. Then as many are served per time with a wait as
//!   without, and all that the wait changes is that each takes longer.
//!
//! **Overlapping.** Where a flush is too short for that, some clients are always in flight and some
//! at work, and the question is another one: a device that works on several requests at once is
//! faster with two groups in flight, one that doesn't is slower.
//!
//! **Three ways, and how one is chosen.** Groups are closed *together*, when all clients that were
//! active lately have come; *apart*, one after the other, at once; or *overlapping*, when all have
//! come that aren't in flight. Apart is compared with the one of the others that suits the measured
//! flush time: the requests per time are measured for both, from close to close, and it is left
//! only while the other was found to serve more. From time to time the other way is tried for a
//! while, after the first trials more rarely. After a change of the way nothing counts until each
//! client may have come once: they come as the old way completed them. With a single client, or a
//! flush below 2 ms, no leader waits.
//!
//! Where it acts: the leader asks [`Gathering::begin`] when it takes its group and
//! [`Gathering::patience`] while it waits (`lead.rs`, step 2); the group asks
//! [`Gathering::overlaps`] when its flush begins (step 7), and [`Gathering::is_almost_all`] when a
//! request registers beside a group in flight.
//!
//! States of a group: nothing → *gathering*, unless it is closed at once ([`Gathering::begin`],
//! then [`Gathering::patience`] until it is out, then [`Gathering::end`]) → closed →
//! [`Gathering::completed`].
//!
//! Plain state, under the group's lock. The callers pass the time, so that tests can run it on a
//! clock of their own.
use cairn_environment::clock::Monotonic;
use std::time::Duration;

/// When a leader waits for others to join its group, and whether groups overlap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FlushPolicy {
    /// It waits when a flush takes at least 2 ms, others are expected, and waiting for them was
    /// found to pay. Groups overlap when a flush takes 0.05 to 2 ms, a good part of the time
    /// between two groups, and that was found to pay.
    #[default]
    Auto,
    /// When others are expected, however fast the device is, and whether it pays or not.
    Coordinate,
    /// Never; and each request gets a flush of its own.
    Each,
    /// Never; but the next group is written while the one before is flushed, whether it pays or
    /// not.
    Overlap,
}

/// Below this a flush is too cheap to wait for company, and groups may overlap instead,
const FLUSH_TIME_MIN: Duration = Duration::from_millis(2);
/// but not below this: then it takes no longer than to wake the threads that would work meanwhile.
const OVERLAP_FLUSH_TIME_MIN: Duration = Duration::from_micros(50);
/// Below this they overlap only if a flush takes a good part of the time between two groups: of
/// large groups most is writing, and several at once are in each other's way.
const SHORT_FLUSH_TIME: Duration = Duration::from_micros(400);
/// That part is one of so many.
const SHORT_FLUSH_PART: u32 = 5;
/// No leader waits for company longer than so many flush times, after which a flush is only a small
/// part of the whole,
const WAIT_MAX_FLUSHES: u32 = 48;
/// nor longer than this.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// Arrivals are irregular: a pause of this many mean intervals is taken as the end of them,
const PAUSE_INTERVALS: f64 = 8.0;
/// or of this many when almost all are there;
const PAUSE_INTERVALS_COMPLETE: f64 = 3.0;
/// but not below this part of a flush, nor above so many flush times.
const PAUSE_MIN: f64 = 1.0 / 8.0;
const PAUSE_MAX: f64 = 4.0;
/// A device that did nothing for so many flush times since the last flush is not busy; more of a
/// pause doesn't count.
const BUSY_FLUSHES: u32 = 2;
/// With fewer requests in a flush time there is none to share a flush with.
const SHARERS_MIN: f64 = 0.75;
/// The other way must serve so many times more requests per time,
const GAIN: f64 = 1.02;
/// and by this part more than what chance does to so few irregular arrivals as were counted.
const CHANCE: f64 = 0.75;
/// A trial lasts for as many requests as there are clients, and for so many at least,
const TRIAL_REQUESTS_MIN: usize = 48;
/// and comes after so many groups at first, and at most, without a trial.
const GROUPS_BETWEEN_TRIALS: (u32, u32) = (64, 2048);

/// How groups are closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Apart,
    Together,
    Overlapping,
}

/// How many requests a way served lately, and in which time.
#[derive(Clone, Copy, Debug, Default)]
struct Served {
    count: f64,
    groups: f64,
    seconds: f64,
}

impl Served {
    /// What was before counts for less and less: some hundred requests are remembered, and some
    /// groups at least.
    fn add(&mut self, count: usize, time: Duration) {
        let kept = (1.0 - count as f64 / 384.0).max(0.75);
        self.count = self.count * kept + count as f64;
        self.groups = self.groups * kept + 1.0;
        self.seconds = self.seconds * kept + time.as_secs_f64();
    }

    /// Requests per second, once there were any.
    fn rate(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.count / self.seconds)
    }

    /// From the close of a group to the next one's, once there were any.
    fn interval(&self) -> Option<Duration> {
        (self.groups > 0.0).then(|| Duration::from_secs_f64(self.seconds / self.groups))
    }
}

/// How long a leader waits, unless more requests come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Patience {
    /// With so many waiting there is no need to wait any longer.
    pub(crate) wanted: usize,
    /// If no request comes within this time, none is expected any more.
    pub(crate) pause: Duration,
}

/// A leader that waits.
#[derive(Clone, Copy, Debug)]
struct LeaderWait {
    begin: Monotonic,
    flush_time: Duration,
}

#[derive(Debug)]
pub(crate) struct Gathering {
    policy: FlushPolicy,
    /// Clients that were active lately, and whether there seem to be more: some came while the last
    /// group was flushed.
    expected: usize,
    grows: bool,
    apart: Served,
    together: Served,
    overlapping: Served,
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
    /// A group is in flight, so the device is not idle.
    in_flight: bool,
    /// Clients whose requests were completed since the last group began.
    released: usize,
    wait: Option<LeaderWait>,
}

impl Gathering {
    pub(crate) fn new(policy: FlushPolicy) -> Self {
        Self {
            policy,
            expected: 0,
            grows: false,
            apart: Served::default(),
            together: Served::default(),
            overlapping: Served::default(),
            way: if policy == FlushPolicy::Overlap { Way::Overlapping } else { Way::Apart },
            uncounted: 0,
            trial: None,
            groups_without_trial: 0,
            groups_between_trials: GROUPS_BETWEEN_TRIALS.0,
            closed: None,
            completed: None,
            in_flight: false,
            released: 0,
            wait: None,
        }
    }

    pub(crate) fn policy(&self) -> FlushPolicy {
        self.policy
    }

    /// Whether the leader waits for others. If not, its group, of `waiting` requests, is closed.
    pub(crate) fn begin(&mut self, now: Monotonic, waiting: usize, flush_time: Duration) -> bool {
        self.released = 0;
        let alternative = match self.policy {
            FlushPolicy::Each | FlushPolicy::Overlap => None,
            FlushPolicy::Auto if flush_time >= FLUSH_TIME_MIN => Some(Way::Together),
            FlushPolicy::Auto => (flush_time >= OVERLAP_FLUSH_TIME_MIN).then_some(Way::Overlapping),
            FlushPolicy::Coordinate => (!flush_time.is_zero()).then_some(Way::Together),
        };
        let Some(alternative) = alternative.filter(|_| waiting > 0) else {
            self.closed = Some(now);
            if self.policy == FlushPolicy::Auto
                && std::mem::replace(&mut self.way, Way::Apart) != Way::Apart
            {
                self.uncounted = self.expected;
            }
            return false;
        };
        // With a pause behind it, or with a single client, there is nothing to gain.
        let idle = if self.in_flight {
            Duration::ZERO
        } else {
            self.completed.map_or(Duration::MAX, |completed| now - completed)
        };
        if idle >= flush_time * BUSY_FLUSHES || self.expected < 2 {
            let pause = idle.saturating_sub(flush_time * BUSY_FLUSHES);
            let way = if alternative == Way::Overlapping { Way::Apart } else { self.way };
            self.close(now, pause, waiting, way);
            return false;
        }
        match self.choose(alternative, flush_time) {
            Way::Together if waiting < self.expected || self.grows => {
                self.wait = Some(LeaderWait { begin: now, flush_time });
                true
            }
            way => {
                self.close(now, Duration::ZERO, waiting, way);
                false
            }
        }
    }

    /// Whether a flush is too small a part of the time between groups for them to overlap.
    fn flush_is_small_part(&self, flush_time: Duration) -> bool {
        let interval = self.apart.interval();
        flush_time < SHORT_FLUSH_TIME
            && interval.is_some_and(|interval| flush_time * SHORT_FLUSH_PART < interval)
    }

    /// The way for the next group: apart, or `alternative`.
    fn choose(&mut self, alternative: Way, flush_time: Duration) -> Way {
        if self.policy == FlushPolicy::Coordinate {
            return Way::Together;
        }
        if alternative == Way::Overlapping && self.flush_is_small_part(flush_time) {
            self.trial = None;
            return Way::Apart;
        }
        match self.trial.take_if(|(way, _)| *way == Way::Apart || *way == alternative) {
            Some((way, left)) if left > 0 => {
                self.trial = Some((way, left));
                return way;
            }
            Some(_) => {
                self.groups_between_trials =
                    (self.groups_between_trials * 2).min(GROUPS_BETWEEN_TRIALS.1)
            }
            // One of a way that doesn't suit the flush time any more.
            None => self.trial = None,
        }
        let better = self.better(alternative);
        self.groups_without_trial += 1;
        let untried = self.served(alternative).rate().is_none()
            && self.apart.count >= self.expected.max(TRIAL_REQUESTS_MIN) as f64;
        let lonely = alternative == Way::Together
            && better == Way::Apart
            && self.apart.rate().is_none_or(|rate| rate * flush_time.as_secs_f64() < SHARERS_MIN);
        if lonely || (self.groups_without_trial <= self.groups_between_trials && !untried) {
            return better;
        }
        self.groups_without_trial = 0;
        let other = if better == Way::Apart { alternative } else { Way::Apart };
        self.trial = Some((other, self.expected.max(TRIAL_REQUESTS_MIN)));
        other
    }

    /// The way that was found to serve more requests.
    fn better(&mut self, alternative: Way) -> Way {
        let (other, apart) = (*self.served(alternative), self.apart);
        match (other.rate(), apart.rate()) {
            (Some(other_rate), Some(apart_rate)) => {
                let chance = (1.0 / other.count.sqrt() + 1.0 / apart.count.sqrt()) * CHANCE;
                if other_rate > apart_rate * (GAIN + chance) { alternative } else { Way::Apart }
            }
            _ => Way::Apart,
        }
    }

    fn served(&mut self, way: Way) -> &mut Served {
        match way {
            Way::Apart => &mut self.apart,
            Way::Together => &mut self.together,
            Way::Overlapping => &mut self.overlapping,
        }
    }

    /// A group is closed; of the time since the one before, `pause` doesn't count.
    fn close(&mut self, now: Monotonic, pause: Duration, waiting: usize, way: Way) {
        let Some(before) = self.closed.replace(now) else { return };
        if std::mem::replace(&mut self.way, way) != way {
            self.uncounted = self.expected;
        }
        if self.uncounted > 0 {
            self.uncounted = self.uncounted.saturating_sub(waiting);
            return;
        }
        self.served(way).add(waiting, (now - before).saturating_sub(pause));
        if let Some((_, left)) = &mut self.trial {
            *left = left.saturating_sub(waiting);
        }
    }

    /// What a leader that began to wait does with `waiting` requests at hand: wait so long, or no
    /// longer.
    pub(crate) fn patience(&self, now: Monotonic, waiting: usize) -> Option<Patience> {
        let LeaderWait { begin, flush_time } = self.wait?;
        if waiting == 0
            || (waiting >= self.expected && !self.grows)
            || now - begin >= WAIT_MAX.min(flush_time * WAIT_MAX_FLUSHES)
        {
            return None;
        }
        // A few may be late or may not come; the others do not wait long for them.
        let almost = self.almost_all();
        let complete = waiting >= almost;
        let interval =
            self.closed.map_or(flush_time, |closed| now - closed).div_f64(waiting as f64);
        let intervals = if complete { PAUSE_INTERVALS_COMPLETE } else { PAUSE_INTERVALS };
        let pause = interval
            .mul_f64(intervals)
            .clamp(flush_time.mul_f64(PAUSE_MIN), flush_time.mul_f64(PAUSE_MAX));
        let wanted = [almost, self.expected].into_iter().find(|wanted| waiting < *wanted);
        Some(Patience { wanted: wanted.unwrap_or(usize::MAX), pause })
    }

    /// Whether the next group may be written while this one is flushed.
    pub(crate) fn overlaps(&self) -> bool {
        self.way == Way::Overlapping
    }

    fn almost_all(&self) -> usize {
        self.expected - self.expected / 16
    }

    /// Whether hardly any client is expected beyond `active` ones.
    pub(crate) fn is_almost_all(&self, active: usize) -> bool {
        active >= self.almost_all()
    }

    /// The wait is over, and the group closed with `waiting` requests.
    pub(crate) fn end(&mut self, now: Monotonic, waiting: usize) {
        if self.wait.take().is_some() {
            self.close(now, Duration::ZERO, waiting, Way::Together);
        }
    }

    /// The flush of a group has begun that others may overlap.
    pub(crate) fn launched(&mut self) {
        self.in_flight = true;
    }

    /// That flush is done.
    pub(crate) fn landed(&mut self) {
        self.in_flight = false;
    }

    /// A group of `size` is done, and `waiting` others have come meanwhile. Of two groups that
    /// overlap, the later one's flush may have served both.
    pub(crate) fn completed(&mut self, now: Monotonic, size: usize, waiting: usize) {
        self.completed = Some(now);
        if size == 0 {
            return;
        }
        self.grows = waiting > 0;
        // Those of the group that overlapped with this one are on their way back.
        let active = size + waiting.max(self.released);
        self.released += size;
        self.expected = if active >= self.expected { active } else { (self.expected + active) / 2 };
    }
}

#[cfg(test)]
#[path = "gathering_tests.rs"]
mod gathering_tests;
