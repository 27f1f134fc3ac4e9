//! Groups that overlap: who writes the next one while a flush is under way, and what becomes of it
//! when that flush fails.
use super::testing::*;
use crate::gathering::Gathering;
use crate::group::{Group, Registered, Waiter};
use crate::stages::{RequestTimer, Stages};
use crate::{FlushPolicy, Log, LogError, LogOptions, LogStart};
use cairn_blockdev::{
    BlockDevice, DeviceError, FlushFence, Operation, SimulatedDevice, forward_to_device,
};
use cairn_environment::atomic::AtomicU64;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, clock, thread};
use cairn_format::LogSeq;
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum First {
    /// Has not come yet.
    Awaited,
    /// Waits until another request has been served.
    UnderWay,
    /// Another one has.
    Passed,
    /// Nobody came.
    Alone,
}

/// A device whose first flush waits until a write, or another flush, was served meanwhile.
struct Patient {
    device: Arc<SimulatedDevice>,
    /// What the first flush waits for.
    company: Operation,
    fails: bool,
    first: Mutex<First>,
    changed: Condvar,
}

impl Patient {
    fn new(company: Operation, fails: bool) -> Arc<Self> {
        let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
        Arc::new(Self {
            device,
            company,
            fails,
            first: Mutex::new(Rank::LEAF, First::Awaited),
            changed: Condvar::new(),
        })
    }

    fn served(&self, operation: Operation) {
        let mut first = self.first.lock();
        if *first == First::UnderWay && operation == self.company {
            *first = First::Passed;
            self.changed.notify_all();
        }
    }

    fn wait_until(&self, reached: impl Fn(First) -> bool) {
        let mut first = self.first.lock();
        let begin = clock::now_monotonic();
        while !reached(*first) && begin.elapsed() < Duration::from_secs(60) {
            self.changed.wait_for(&mut first, Duration::from_secs(1));
        }
        assert!(reached(*first), "{first:?}");
    }
}

impl BlockDevice for Patient {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let result = self.device.write(offset_bytes, buffers);
        self.served(Operation::Write);
        result
    }

    fn flush(&self) -> Result<(), DeviceError> {
        let is_first = {
            let mut first = self.first.lock();
            let is_first = *first == First::Awaited;
            if is_first {
                *first = First::UnderWay;
                self.changed.notify_all();
            }
            is_first
        };
        if !is_first {
            let result = self.device.flush();
            self.served(Operation::Flush);
            return result;
        }
        let mut first = self.first.lock();
        let begin = clock::now_monotonic();
        while *first == First::UnderWay {
            self.changed.wait_for(&mut first, Duration::from_secs(1));
            if *first == First::UnderWay && begin.elapsed() > Duration::from_secs(60) {
                *first = First::Alone;
            }
        }
        drop(first);
        if self.fails {
            self.device.fail_next(Operation::Flush, 1);
        }
        self.device.flush()
    }

    forward_to_device!(self => self.device; read, discard, length_bytes, flush_time);
}

fn log_on(device: Arc<dyn BlockDevice>) -> Arc<Log> {
    let superblock = superblock();
    let start = LogStart {
        epoch: superblock.log_epoch,
        position: superblock.log_tail,
        generation: superblock.generation.next(),
    };
    let options = LogOptions { flush: FlushPolicy::Overlap, ..quiet_options() };
    Log::new(
        device,
        superblock.volume,
        superblock.geometry,
        start,
        Arc::new(AtomicU64::new(5)),
        Box::new(|_| {}),
        options,
    )
}

/// One thread's operation is flushed; another thread's comes meanwhile. What both were told.
fn two_in_turn(patient: &Arc<Patient>, log: &Arc<Log>) -> [Result<(), LogError>; 2] {
    let client = |at: u64| {
        let log = Arc::clone(log);
        thread::spawn("client", move || {
            let mut batch = crate::Batch::new();
            batch.put(cairn_format::TREE_FILES, key(at), b"x", cairn_format::EntryFlags::default());
            log.wait_durable(log.insert(&mut batch))
        })
    };
    let first = client(1);
    patient.wait_until(|first| first != First::Awaited);
    let second = client(2);
    [first, second].map(|client| client.join().unwrap())
}

#[test]
fn a_group_is_written_while_the_one_before_is_flushed() {
    let patient = Patient::new(Operation::Write, false);
    let log = log_on(Arc::clone(&patient) as Arc<dyn BlockDevice>);
    assert!(two_in_turn(&patient, &log).iter().all(Result::is_ok));
    assert_eq!(*patient.first.lock(), First::Passed);
    let statistics = log.statistics();
    assert_eq!((statistics.checkpoints, statistics.flushes, completed(&statistics)), (2, 2, 2));
    log.stop();
}

/// A device tells one caller of a failed flush. The group behind it must not take its own flush for
/// good.
#[test]
fn a_failed_flush_fails_the_group_that_was_written_beside_it() {
    let patient = Patient::new(Operation::Flush, true);
    let log = log_on(Arc::new(FlushFence::new(Arc::clone(&patient) as Arc<dyn BlockDevice>)));
    let outcomes = two_in_turn(&patient, &log);
    assert!(
        outcomes.iter().all(|outcome| matches!(outcome, Err(LogError::Device(_)))),
        "{outcomes:?}"
    );
    assert_eq!((*patient.first.lock(), log.durable()), (First::Passed, LogSeq(0)));
    log.stop();
}

fn register(group: &mut Group, targets: std::ops::RangeInclusive<u64>) -> Vec<&'static str> {
    let stages = Stages::new();
    let register = |target| {
        let waiter = Waiter::Callback(Box::new(|_| {}), stages.register(RequestTimer::begin()));
        match group.register(LogSeq(target), waiter) {
            Registered::Finished(..) => "finished",
            Registered::Waiting => "waits",
            Registered::Appointed(_) => "wakes a worker",
            Registered::Lead => "leads",
        }
    };
    targets.map(register).collect()
}

#[test]
fn the_next_group_begins_when_it_is_as_large_as_the_one_in_flight() {
    let mut group = Group::new(Gathering::new(FlushPolicy::Overlap));
    assert_eq!(register(&mut group, 1..=3), ["leads", "waits", "waits"]);
    assert!(group.launch(LogSeq(3)).is_some_and(|launched| launched.successor.is_none()));
    assert_eq!((group.waiting(), group.leader, group.is_busy()), (0, false, true));
    assert_eq!(register(&mut group, 4..=7), ["waits", "waits", "wakes a worker", "waits"]);
    // Only one is in flight beside the one that is written.
    assert!(group.launch(LogSeq(7)).is_none());
    assert!(!group.land(), "another one leads");
    assert!(group.launch(LogSeq(7)).is_some());
    assert!(group.land() && group.leader);
}

#[test]
fn a_group_that_is_complete_at_once_needs_no_other_registration() {
    let mut group = Group::new(Gathering::new(FlushPolicy::Overlap));
    register(&mut group, 1..=2);
    register(&mut group, 8..=9);
    assert!(group.launch(LogSeq(2)).is_some_and(|launched| launched.successor.is_some()));
    assert!(group.leader && group.waiting() == 2);
}

#[test]
fn while_others_are_expected_the_next_group_waits_for_the_flush() {
    let mut group = Group::new(Gathering::new(FlushPolicy::Overlap));
    group.gathering.completed(clock::now_monotonic(), 10, 0);
    register(&mut group, 1..=2);
    assert!(group.launch(LogSeq(2)).is_some());
    assert!(register(&mut group, 3..=9).iter().all(|registered| *registered == "waits"));
    assert_eq!(register(&mut group, 10..=10), ["wakes a worker"]);
}

#[test]
fn groups_do_not_overlap_unless_told_to() {
    for policy in [FlushPolicy::Auto, FlushPolicy::Coordinate, FlushPolicy::Each] {
        let mut group = Group::new(Gathering::new(policy));
        register(&mut group, 1..=2);
        assert!(group.launch(LogSeq(1)).is_none() && group.leader);
    }
}
