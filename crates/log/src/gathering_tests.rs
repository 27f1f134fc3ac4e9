//! The policy alone, and the policy on a device that serves one request at a time, on a clock of
//! the tests' own.
use super::*;
use cairn_blockdev::FlushTime;
use cairn_environment::random::Seeded;
use std::collections::BinaryHeap;

const FLUSH: Duration = Duration::from_millis(8);

fn at(microseconds: u64) -> Monotonic {
    Monotonic::from_nanoseconds(microseconds * 1000)
}

/// One that closed a group, saw it done at `at(0)`, the beginning of the clock, and has found that
/// waiting pays.
fn after_a_group(size: usize, waiting: usize) -> Gathering {
    let mut gathering = Gathering::new(FlushPolicy::Auto);
    gathering.apart.add(100, Duration::from_secs(2));
    gathering.together.add(100, Duration::from_secs(1));
    assert!(!gathering.begin(at(0), size, FLUSH));
    gathering.completed(at(0), size, waiting);
    gathering
}

#[test]
fn a_single_thread_and_a_fast_device_never_wait() {
    let mut gathering = Gathering::new(FlushPolicy::Auto);
    for round in 0..100 {
        assert!(!gathering.begin(at(round * 8000), 1, FLUSH));
        gathering.completed(at(round * 8000 + 8000), 1, 0);
    }
    let mut gathering = after_a_group(50, 14);
    assert!(!gathering.begin(at(1), 1, FLUSH_TIME_MIN - Duration::from_nanos(1)));
    assert!(gathering.begin(at(1), 1, FLUSH_TIME_MIN));
    let mut coordinating = Gathering { policy: FlushPolicy::Coordinate, ..after_a_group(50, 14) };
    assert!(coordinating.begin(at(1), 1, Duration::from_micros(50)));
    let mut each = Gathering { policy: FlushPolicy::Each, ..after_a_group(50, 14) };
    assert!(!each.begin(at(1), 1, FLUSH));
}

#[test]
fn nobody_waits_when_the_device_was_idle() {
    assert!(!after_a_group(50, 14).begin(at(16_000), 1, FLUSH));
    assert!(after_a_group(50, 14).begin(at(15_999), 1, FLUSH));
}

#[test]
fn all_who_are_expected_are_enough() {
    let mut gathering = after_a_group(30, 34);
    gathering.grows = false;
    assert!(!gathering.begin(at(8000), 64, FLUSH));
    let mut gathering = after_a_group(30, 34);
    gathering.grows = false;
    assert!(gathering.begin(at(8000), 40, FLUSH));
    assert_eq!(gathering.patience(at(8010), 45).map(|patience| patience.wanted), Some(60));
    let late = gathering.patience(at(8020), 60).unwrap();
    assert_eq!(late.wanted, 64);
    assert!(late.pause < FLUSH / 2, "{late:?}");
    assert_eq!(gathering.patience(at(8030), 64), None);
}

#[test]
fn a_wait_has_an_end_even_if_others_keep_coming() {
    for flush_ms in [8, 200] {
        let (mut gathering, flush_time) = (after_a_group(1, 0), Duration::from_millis(flush_ms));
        gathering.completed(at(flush_ms * 1000), 1, 100_000);
        assert!(gathering.begin(at(flush_ms * 1000), 1, flush_time));
        // One comes in each millisecond; none came during the flush.
        let ends = (0..)
            .find(|ms| gathering.patience(at((flush_ms + ms) * 1000), 1 + *ms as usize).is_none());
        let limit_ms = (flush_ms * 48).min(1000);
        assert!(ends.is_some_and(|ms| ms > flush_ms && ms <= limit_ms), "{ends:?}");
    }
}

#[test]
fn those_who_left_are_forgotten_within_a_few_groups() {
    let mut gathering = after_a_group(40, 24);
    let mut waits = 0;
    for round in 1..40 {
        if gathering.begin(at(round * 20_000 - 19_000), 1, FLUSH) {
            waits += 1;
            gathering.end(at(round * 20_000 - 9000), 1);
        }
        gathering.completed(at(round * 20_000), 1, 0);
    }
    assert!((1..=6).contains(&waits), "{waits} waits in vain");
}

/// What happens at a moment of the model.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A client's read is done, or it begins.
    Step(usize),
    Flushed,
    /// The leader's patience ends; void if the number isn't the current one.
    Pause(u64),
}

enum Leader {
    Idle,
    Gathering { seen: usize },
    Flushing { group: Vec<usize> },
}

/// Clients in a circle, each some reads and then an fsync, on a device that serves one request at a
/// time, flushes among them, in the order of arrival. Without reads (`read_us` 0) clients think for
/// `think_us` instead.
struct Model {
    gathering: Gathering,
    /// Whether the leader may wait at all.
    gathers: bool,
    flush_us: u64,
    /// As it is measured, with what came before the flush; and when the one under way began.
    measured: FlushTime,
    flush_began_us: u64,
    read_us: u64,
    think_us: u64,
    now_us: u64,
    free_us: u64,
    events: BinaryHeap<std::cmp::Reverse<(u64, Event)>>,
    /// Of each client, since its last fsync.
    writes: Vec<u32>,
    waiting: Vec<usize>,
    leader: Leader,
    pause_number: u64,
    random: Seeded,
    /// When each client's fsync began.
    began_us: Vec<u64>,
    latency_us: u64,
    fsyncs: u64,
    flushes: u64,
}

impl Model {
    fn new(
        policy: FlushPolicy,
        clients: usize,
        flush_us: u64,
        read_us: u64,
        think_us: u64,
    ) -> Self {
        Self {
            gathering: Gathering::new(policy),
            gathers: true,
            flush_us,
            measured: FlushTime::default(),
            flush_began_us: 0,
            read_us,
            think_us,
            now_us: 0,
            free_us: 0,
            events: (0..clients)
                .map(|client| std::cmp::Reverse((client as u64, Event::Step(client))))
                .collect(),
            writes: vec![0; clients],
            waiting: Vec::new(),
            leader: Leader::Idle,
            pause_number: 0,
            random: Seeded::new(7),
            began_us: vec![0; clients],
            latency_us: 0,
            fsyncs: 0,
            flushes: 0,
        }
    }

    fn push(&mut self, time_us: u64, event: Event) {
        self.events.push(std::cmp::Reverse((time_us, event)));
    }

    /// The device is busy with it for so long, after what came before.
    fn serve(&mut self, service_us: u64, event: Event) {
        self.free_us = self.free_us.max(self.now_us) + service_us;
        self.push(self.free_us, event);
    }

    /// Every other step is a read, the others are writes, which cost nothing; an fsync follows each
    /// fifth of them.
    fn step(&mut self, client: usize) {
        while self.read_us > 0 && self.writes[client] < 5 {
            if self.random.chance(1, 2) {
                return self.serve(self.read_us, Event::Step(client));
            }
            self.writes[client] += 1;
        }
        self.writes[client] = 0;
        self.waiting.push(client);
        self.began_us[client] = self.now_us;
        match self.leader {
            Leader::Idle => self.lead(),
            Leader::Gathering { .. } => self.gather(true),
            Leader::Flushing { .. } => {}
        }
    }

    fn lead(&mut self) {
        let (flush_time, waiting) = (self.measured.average(), self.waiting.len());
        if self.gathers && self.gathering.begin(at(self.now_us), waiting, flush_time) {
            self.leader = Leader::Gathering { seen: waiting };
            self.patience();
        } else {
            self.flush();
        }
    }

    /// As the leader of the product does: it wakes up when enough have come, or after a pause.
    fn gather(&mut self, arrived: bool) {
        let Leader::Gathering { seen } = self.leader else { return };
        let now = at(self.now_us);
        let enough = self
            .gathering
            .patience(now, seen)
            .is_none_or(|patience| self.waiting.len() >= patience.wanted);
        if arrived && !enough {
            return;
        }
        if !arrived && self.waiting.len() <= seen {
            return self.stop_gathering();
        }
        self.leader = Leader::Gathering { seen: self.waiting.len() };
        self.patience();
    }

    fn patience(&mut self) {
        match self.gathering.patience(at(self.now_us), self.waiting.len()) {
            Some(patience) => {
                self.pause_number += 1;
                let end_us = self.now_us + patience.pause.as_micros() as u64;
                self.push(end_us, Event::Pause(self.pause_number));
            }
            None => self.stop_gathering(),
        }
    }

    fn stop_gathering(&mut self) {
        self.gathering.end(at(self.now_us), self.waiting.len());
        self.flush();
    }

    fn flush(&mut self) {
        let size =
            if self.gathering.policy() == FlushPolicy::Each { 1 } else { self.waiting.len() };
        self.leader = Leader::Flushing { group: self.waiting.drain(..size).collect() };
        self.flush_began_us = self.now_us;
        self.serve(self.flush_us, Event::Flushed);
    }

    fn flushed(&mut self) {
        let Leader::Flushing { group } = std::mem::replace(&mut self.leader, Leader::Idle) else {
            return;
        };
        self.measured.record(Duration::from_micros(self.now_us - self.flush_began_us));
        self.gathering.completed(at(self.now_us), group.len(), self.waiting.len());
        (self.flushes, self.fsyncs) = (self.flushes + 1, self.fsyncs + group.len() as u64);
        for client in group {
            self.latency_us += self.now_us - self.began_us[client];
            let think_us = self.think_us / 2 + self.random.below(self.think_us + 1);
            self.push(self.now_us + 5 + think_us, Event::Step(client));
        }
        if !self.waiting.is_empty() {
            self.lead();
        }
    }

    /// What happened in the last two thirds of `seconds`.
    fn run(mut self, seconds: u64) -> Outcome {
        let (end_us, mut before) = (seconds * 1_000_000, None);
        while let Some(std::cmp::Reverse((time_us, event))) = self.events.pop() {
            self.now_us = time_us;
            if time_us > end_us / 3 && before.is_none() {
                before = Some((self.fsyncs, self.flushes, self.latency_us));
            }
            if time_us > end_us {
                break;
            }
            match event {
                Event::Step(client) => self.step(client),
                Event::Flushed => self.flushed(),
                Event::Pause(number) if number == self.pause_number => self.gather(false),
                Event::Pause(_) => {}
            }
        }
        let (fsyncs, flushes, latency_us) = before.unwrap();
        let fsyncs = (self.fsyncs - fsyncs) as f64;
        Outcome {
            rate: fsyncs * 1.5 / seconds as f64,
            per_flush: fsyncs / (self.flushes - flushes) as f64,
            latency_us: (self.latency_us - latency_us) as f64 / fsyncs,
        }
    }
}

#[derive(Debug)]
struct Outcome {
    /// Fsyncs per second.
    rate: f64,
    per_flush: f64,
    /// Mean of the fsyncs.
    latency_us: f64,
}

const SLOW_FLUSH_US: u64 = 10_000;

/// Clients that think between two fsyncs, on a device that does nothing else.
fn thinking(clients: usize, think_us: u64, gathers: bool) -> Outcome {
    let mut model = Model::new(FlushPolicy::Auto, clients, SLOW_FLUSH_US, 0, think_us);
    model.gathers = gathers;
    model.run(100)
}

/// The extremes of the policy, where none of them pays.
#[test]
fn each_and_coordinate_do_as_they_are_told() {
    let run = |policy, think_us| Model::new(policy, 20, 1000, 0, think_us).run(10);
    assert_eq!(run(FlushPolicy::Each, 20).per_flush, 1.0);
    // On a device as fast as this the default doesn't wait.
    let [auto, coordinate] =
        [FlushPolicy::Auto, FlushPolicy::Coordinate].map(|policy| run(policy, 20_000).per_flush);
    assert!(auto < 2.0 && coordinate > 5.0, "{auto} {coordinate}");
}

#[test]
fn those_who_come_back_at_once_share_every_flush() {
    for clients in [2, 64] {
        let outcome = thinking(clients, 50, true);
        println!("{clients} clients: {outcome:?}");
        assert!(
            outcome.per_flush > 0.9 * clients as f64 && outcome.rate > 90.0 * clients as f64,
            "{outcome:?}"
        );
    }
}

/// Requests that come whatever the leader does gain nothing by its waiting: then it hardly waits.
#[test]
fn those_who_come_by_themselves_hardly_wait() {
    for think_us in [30_000, 100_000, 400_000, 2_000_000] {
        for clients in [2, 20, 200] {
            let [with, without] =
                [true, false].map(|gathers| thinking(clients, think_us, gathers).latency_us);
            println!(
                "{clients} clients that think {think_us} µs: {with:.0} µs, if nobody ever gathered {without:.0} µs"
            );
            // Trials are frequent at first.
            assert!(with < without * 1.35, "{with} {without}");
        }
    }
}

/// Per cent of the rate that the device would give without flushes.
fn loss_percent(policy: FlushPolicy, clients: usize, flush_us: u64, seconds: u64) -> f64 {
    let read_us = flush_us / 20;
    let outcome = Model::new(policy, clients, flush_us, read_us, 0).run(seconds);
    100.0 * (1.0 - outcome.rate * (5 * read_us) as f64 / 1e6)
}

/// No policy can do better: each flush completes at most every client's fsync, and nothing else is
/// served meanwhile.
fn least_loss_percent(clients: usize) -> f64 {
    100.0 / (1.0 + clients as f64 / 4.0)
}

#[test]
fn the_loss_to_flushes_is_near_the_least_that_is_possible() {
    for flush_us in [2000, 10_000] {
        for clients in [16, 64, 128] {
            let [each, auto] = [FlushPolicy::Each, FlushPolicy::Auto]
                .map(|policy| loss_percent(policy, clients, flush_us, 300));
            let soon = loss_percent(FlushPolicy::Auto, clients, flush_us, 8);
            let least = least_loss_percent(clients);
            println!(
                "flush {flush_us} µs, {clients} clients: each {each:.1} %, auto {auto:.1} % (at the beginning {soon:.1} %), least {least:.1} %"
            );
            assert!((75.0..85.0).contains(&each), "{each}");
            assert!(auto < least + 1.5 && soon < least + 6.0, "{auto} {soon} {least}");
        }
    }
}

/// 32 requests at a time, of which `apart_us` and `overlapping_us` are between two closes; how many
/// of the last 1,000 groups overlapped.
fn overlapping_groups(flush_time: Duration, apart_us: u64, overlapping_us: u64) -> usize {
    let mut gathering = Gathering::new(FlushPolicy::Auto);
    let (mut now_us, mut random) = (1000, Seeded::new(1));
    let mut group = |_| {
        assert!(!gathering.begin(at(now_us), 32, flush_time), "nobody waits for others");
        let mean_us = if gathering.overlaps() { overlapping_us } else { apart_us };
        now_us += mean_us / 2 + random.below(mean_us + 1);
        gathering.completed(at(now_us), 32, 32);
        usize::from(gathering.overlaps())
    };
    (0..3000).map(&mut group).skip(2000).sum()
}

#[test]
fn groups_overlap_while_that_serves_more() {
    let flush_time = Duration::from_millis(1);
    let gains = overlapping_groups(flush_time, 1200, 800);
    assert!(gains > 950, "{gains}");
    for overlapping_us in [1200, 1260, 2000] {
        let loses = overlapping_groups(flush_time, 1200, overlapping_us);
        assert!(loses < 50, "{loses}");
    }
    // Below some flush time it is not even tried.
    let cheap = OVERLAP_FLUSH_TIME_MIN - Duration::from_nanos(1);
    assert_eq!(overlapping_groups(cheap, 1200, 800), 0);
    // Nor while a short flush is a small part of the time between groups.
    for (flush_time, most_us) in [(OVERLAP_FLUSH_TIME_MIN, 250), (Duration::from_micros(120), 600)]
    {
        assert!(overlapping_groups(flush_time, most_us * 4 / 5, most_us / 2) > 950);
        assert_eq!(overlapping_groups(flush_time, most_us * 5 / 4, most_us / 2), 0);
    }
    assert!(overlapping_groups(SHORT_FLUSH_TIME, 4000, 2000) > 950);
}
