//! The transactions' state machine under a scheduler that tries many interleavings: a lost wake-up shows as a deadlock, which
//! the scheduler reports.
use crate::transaction::Transactions;
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use cairn_environment::simulation::schedules;
use cairn_environment::thread::{self, JoinHandle};
use cairn_format::Generation;
use std::sync::Arc;

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
            assert!(!self.cut[generation].load(SeqCst), "generation {generation} was cut with an operation joined");
        }
        self.inside[generation].fetch_sub(1, SeqCst);
        drop(handle);
        true
    }

    fn generation_is_small(&self) -> bool {
        (self.transactions.generation().0 as usize) < GENERATIONS - 1
    }

    /// One commit, of what runs or of what somebody else commits meanwhile; whether the machine still runs.
    fn commit(&self) -> bool {
        let wanted = self.transactions.generation();
        let Ok(begun) = self.transactions.begin_commit(wanted) else { return false };
        if let Some(mut commit) = begun {
            let generation = commit.generation();
            let number = generation.0 as usize;
            assert!(!self.cut[number].swap(true, SeqCst), "generation {number} is cut twice");
            assert_eq!(self.inside[number].load(SeqCst), 0, "somebody is in generation {number}");
            commit.unblock();
            thread::yield_now();
            commit.super_committed();
            drop(commit);
        }
        assert!(self.transactions.super_committed() >= wanted || self.transactions.failure().is_some());
        true
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
    let mut threads: Vec<_> = (0..3).map(|_| spawn(&machine, |machine| (0..2).for_each(|_| assert!(machine.operate())))).collect();
    threads.extend((0..2).map(|_| spawn(&machine, |machine| (0..2).for_each(|_| assert!(machine.commit())))));
    join_all(threads);
    let last = machine.transactions.super_committed().0;
    assert!((3..=5).contains(&last), "each commit was its own or another's, up to {last}");
}

#[test]
fn a_cut_never_meets_an_operation() {
    shuttle::check_random(cuts_beside_operations, schedules_each());
    shuttle::check_pct(cuts_beside_operations, schedules_each(), 3);
}

/// Whoever waits hears of the failure: to join, to commit, for the drain, for the completion.
#[test]
fn a_failure_reaches_everybody() {
    let model = || {
        let machine = Machine::new();
        let threads = vec![
            spawn(&machine, |machine| while machine.operate() {}),
            spawn(&machine, |machine| while machine.generation_is_small() && machine.commit() {}),
            spawn(&machine, |machine| assert!(machine.transactions.wait_completed(Generation(99)).is_err())),
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

/// Whoever waits for the completion goes on after it, not after the superblock.
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
