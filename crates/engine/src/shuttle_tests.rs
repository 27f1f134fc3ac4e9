//! The transactions' state machine and the queue of removals under a scheduler that tries many
//! interleavings: a lost wake-up shows as a deadlock, which the scheduler reports. Planned reads,
//! the data cache, the births of dead lists, the names of snapshots and their long reads have a
//! file each.
use crate::InodeId;
use crate::file::removal_queue::{Orphan, RemovalQueue, Taken};
use crate::store::transaction::{Commit, Transactions};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use cairn_environment::simulation::schedules;
use cairn_environment::thread::{self, JoinHandle};
use cairn_format::Generation;
use std::sync::Arc;

#[path = "file/data_cache_shuttle_tests.rs"]
mod data_cache;
#[path = "store/list_births_shuttle_tests.rs"]
mod list_births;
#[path = "file/long_reads_shuttle_tests.rs"]
mod long_reads;
#[path = "file/planned_read_shuttle_tests.rs"]
mod planned_read;
#[path = "store/trees/snapshot_names_shuttle_tests.rs"]
mod snapshot_names;

fn schedules_each() -> usize {
    schedules(2000)
}
/// More than are ever reached.
const GENERATIONS: usize = 16;

/// The machine, and what it must be true to.
struct Machine {
    transactions: Transactions,
    /// Operations that have joined, by generation.
    inside: [AtomicU64; GENERATIONS],
    /// Whether the generation has been cut.
    cut: [AtomicBool; GENERATIONS],
}

impl Machine {
    fn new() -> Arc<Machine> {
        let transactions = Transactions::new(Generation(2));
        Arc::new(Machine {
            transactions,
            inside: [const { AtomicU64::new(0) }; GENERATIONS],
            cut: [const { AtomicBool::new(false) }; GENERATIONS],
        })
    }

    /// One operation; whether the machine still runs.
    fn operate(&self) -> bool {
        let Ok(handle) = self.transactions.join() else { return false };
        let generation = handle.generation().0 as usize;
        self.inside[generation].fetch_add(1, SeqCst);
        for _ in 0..2 {
            assert!(
                !self.cut[generation].load(SeqCst),
                "generation {generation} was cut with an operation joined"
            );
        }
        self.inside[generation].fetch_sub(1, SeqCst);
        drop(handle);
        true
    }

    fn generation_is_small(&self) -> bool {
        (self.transactions.generation().0 as usize) < GENERATIONS - 1
    }

    /// One commit, of what runs or of what somebody else commits meanwhile; whether the machine
    /// still runs.
    fn commit(&self) -> bool {
        let wanted = self.transactions.generation();
        let Ok(begun) = self.transactions.begin_commit(wanted) else { return false };
        if let Some(commit) = begun {
            self.finish(commit);
        }
        assert!(
            self.transactions.super_committed() >= wanted || self.transactions.failure().is_some()
        );
        true
    }

    fn finish(&self, mut commit: Commit<'_>) {
        let number = commit.generation().0 as usize;
        assert!(!self.cut[number].swap(true, SeqCst), "generation {number} is cut twice");
        assert_eq!(self.inside[number].load(SeqCst), 0, "somebody is in generation {number}");
        commit.unblock();
        thread::yield_now();
        commit.super_committed();
    }

    /// One operation that nobody else joins, and its commit if it `goes_on`.
    fn operate_alone(&self, goes_on: bool) {
        loop {
            let begun = self.transactions.begin_commit(self.transactions.generation()).unwrap();
            let Some(commit) = begun else { continue };
            let inside = &self.inside[commit.generation().0 as usize];
            let handle = commit.join_alone();
            for _ in 0..2 {
                assert_eq!(inside.load(SeqCst), 0, "another operation is joined");
            }
            drop(handle);
            if goes_on {
                self.finish(commit);
            }
            return;
        }
    }
}

fn spawn(machine: &Arc<Machine>, task: impl FnOnce(&Machine) + Send + 'static) -> JoinHandle<()> {
    let machine = Arc::clone(machine);
    thread::spawn("model", move || task(&machine))
}

fn join_all(threads: Vec<JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
}

fn cuts_beside_operations() {
    let machine = Machine::new();
    let mut threads: Vec<_> = (0..3)
        .map(|_| spawn(&machine, |machine| (0..2).for_each(|_| assert!(machine.operate()))))
        .collect();
    threads.extend(
        (0..2).map(|_| spawn(&machine, |machine| (0..2).for_each(|_| assert!(machine.commit())))),
    );
    join_all(threads);
    let last = machine.transactions.super_committed().0;
    assert!((3..=5).contains(&last), "each commit was its own or another's, up to {last}");
}

#[test]
fn a_cut_never_meets_an_operation() {
    shuttle::check_random(cuts_beside_operations, schedules_each());
    shuttle::check_pct(cuts_beside_operations, schedules_each(), 3);
}

fn alone_beside_operations() {
    let machine = Machine::new();
    let mut threads: Vec<_> = (0..2)
        .map(|_| spawn(&machine, |machine| (0..2).for_each(|_| assert!(machine.operate()))))
        .collect();
    threads.push(spawn(&machine, |machine| assert!(machine.commit())));
    threads.extend(
        [true, false].map(|goes_on| spawn(&machine, move |machine| machine.operate_alone(goes_on))),
    );
    join_all(threads);
    let last = machine.transactions.super_committed().0;
    assert!((2..=3).contains(&last), "one that does not go on commits nothing, up to {last}");
}

#[test]
fn an_operation_that_is_alone_meets_no_other() {
    shuttle::check_random(alone_beside_operations, schedules_each());
    shuttle::check_pct(alone_beside_operations, schedules_each(), 3);
}

/// Every waiter gets the failure: to join, to commit, for the drain, for the completion.
#[test]
fn a_failure_reaches_everybody() {
    let model = || {
        let machine = Machine::new();
        let threads = vec![
            spawn(&machine, |machine| while machine.operate() {}),
            spawn(&machine, |machine| while machine.generation_is_small() && machine.commit() {}),
            spawn(&machine, |machine| {
                assert!(machine.transactions.wait_completed(Generation(99)).is_err())
            }),
            spawn(&machine, |machine| {
                // Stays joined until it hears of the failure, so that a commit waits for it.
                let handle = machine.transactions.join();
                while handle.is_ok() && machine.transactions.failure().is_none() {
                    thread::yield_now();
                }
            }),
        ];
        (0..cairn_environment::random::u64() % 60).for_each(|_| thread::yield_now());
        assert!(machine.transactions.fail("the device is gone"));
        assert!(!machine.transactions.fail("again"));
        join_all(threads);
        assert!(!machine.operate() && !machine.commit());
    };
    shuttle::check_random(model, schedules_each());
}

/// After the cut of the last commit no thread changes or commits anything, whether it waited or
/// comes later.
#[test]
fn nothing_follows_the_last_commit() {
    let model = || {
        let machine = Machine::new();
        let threads = vec![
            spawn(&machine, |machine| while machine.operate() {}),
            spawn(&machine, |machine| while machine.generation_is_small() && machine.commit() {}),
        ];
        let mut last = loop {
            let wanted = machine.transactions.generation();
            if let Some(commit) = machine.transactions.begin_commit(wanted).expect("nothing fails")
            {
                break commit;
            }
        };
        let generation = last.generation();
        assert!(!machine.cut[generation.0 as usize].swap(true, SeqCst));
        last.end();
        thread::yield_now();
        last.super_committed();
        drop(last);
        machine.transactions.complete(generation);
        machine.transactions.wait_completed(generation).expect("that is no failure");
        join_all(threads);
        assert!(!machine.operate() && !machine.commit());
        assert_eq!(machine.transactions.super_committed(), generation);
    };
    shuttle::check_random(model, schedules_each());
}

/// A thread that waits for the completion goes on after it, not after the superblock.
#[test]
fn completion_follows_the_superblock() {
    let model = || {
        let machine = Machine::new();
        let unpinned = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&unpinned);
        let threads = vec![
            spawn(&machine, |machine| {
                machine.operate();
            }),
            spawn(&machine, move |machine| {
                machine.transactions.wait_completed(Generation(2)).expect("nothing fails");
                assert!(seen.load(SeqCst), "it waited for nothing");
            }),
            spawn(&machine, move |machine| {
                assert!(machine.commit());
                unpinned.store(true, SeqCst);
                machine.transactions.complete(Generation(2));
            }),
        ];
        join_all(threads);
    };
    shuttle::check_random(model, schedules_each());
}

/// Removals and their queue; the second try of a postponed one succeeds.
struct Removals {
    queue: RemovalQueue,
    /// Blocks that are announced.
    announced: AtomicU64,
    /// How often each was removed.
    removed: [AtomicU64; 12],
}

/// Inodes that are postponed at first.
const LACKS_SPACE: std::ops::Range<u64> = 0..2;
/// An inode that reclaim finds busy.
const BUSY: u64 = 3;

impl Removals {
    fn new() -> Arc<Removals> {
        Arc::new(Removals {
            queue: RemovalQueue::new(),
            announced: AtomicU64::new(0),
            removed: [const { AtomicU64::new(0) }; 12],
        })
    }

    fn remove(&self, orphan: Orphan) {
        thread::yield_now();
        match orphan.blocks {
            0 if LACKS_SPACE.contains(&orphan.number.0) => {
                self.queue.postpone(Orphan { blocks: 1, ..orphan })
            }
            blocks => {
                self.announced.fetch_sub(blocks, SeqCst);
                self.removed[orphan.number.0 as usize].fetch_add(1, SeqCst);
            }
        }
    }

    fn announce(&self, blocks: u64) {
        self.announced.fetch_add(blocks, SeqCst);
    }

    fn retry_postponed(&self) {
        self.queue.retry_postponed(|blocks| self.announce(blocks));
    }

    /// What reclaim does.
    fn remove_queued(&self) {
        let mut busy = Vec::new();
        let postponed = self.queue.take_postponed(|blocks| self.announce(blocks));
        for taken in postponed.into_iter().chain(std::iter::from_fn(|| self.queue.take())) {
            if taken.orphan.number.0 == BUSY { busy.push(taken) } else { self.remove(taken.orphan) }
        }
        busy.into_iter().for_each(Taken::give_back);
    }

    fn push(&self, numbers: std::ops::Range<u64>) {
        numbers.for_each(|number| self.queue.push(Orphan::inode(InodeId(number), 0)));
    }

    fn times_removed(&self, numbers: std::ops::Range<u64>) -> Vec<u64> {
        numbers.map(|number| self.removed[number as usize].load(SeqCst)).collect()
    }
}

/// The reaper, reclaim and a commit work the queue off beside each other, and others queue more,
/// while two wait for the end.
fn removals_end() {
    let removals = Removals::new();
    let spawn = |task: fn(&Removals)| {
        let removals = Arc::clone(&removals);
        thread::spawn("model", move || task(&removals))
    };
    let reaper = spawn(|removals| {
        while let Some(taken) = removals.queue.wait_and_take() {
            removals.remove(taken.orphan);
        }
    });
    let threads = vec![
        spawn(|removals| removals.push(10..12)),
        spawn(Removals::remove_queued),
        spawn(|removals| {
            removals.push(0..4);
            removals.queue.wait_until_idle();
            assert_eq!(
                removals.times_removed(2..4),
                [1, 1],
                "they were queued before the wait began"
            );
        }),
        spawn(Removals::retry_postponed),
        spawn(|removals| removals.queue.wait_until_idle()),
    ];
    join_all(threads);
    for _ in 0..2 {
        removals.retry_postponed();
        removals.queue.wait_until_idle();
    }
    assert_eq!(
        (removals.times_removed(0..4), removals.times_removed(10..12)),
        (vec![1; 4], vec![1; 2])
    );
    assert_eq!(removals.announced.load(SeqCst), 0, "each was announced once before it was removed");
    removals.queue.stop();
    reaper.join().expect("no panic");
}

#[test]
fn everybody_hears_that_nothing_is_left_to_remove() {
    shuttle::check_random(removals_end, schedules_each());
    shuttle::check_pct(removals_end, schedules_each(), 3);
}

/// With the reaper gone, nobody waits for what it would have removed.
#[test]
fn stopping_ends_the_wait_for_removals() {
    let model = || {
        let removals = Removals::new();
        let waiting: Vec<_> = (0..2)
            .map(|_| {
                let removals = Arc::clone(&removals);
                thread::spawn("model", move || {
                    removals.push(2..4);
                    removals.queue.wait_until_idle();
                })
            })
            .collect();
        removals.queue.stop();
        join_all(waiting);
        assert!(removals.queue.wait_and_take().is_none());
    };
    shuttle::check_random(model, schedules_each());
}
