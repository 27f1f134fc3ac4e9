//! The ticket queue under the model checker: random schedules of who runs when.
//!
//! What every schedule must show: each waiter gets an answer (a lost wake-up would be a deadlock,
//! which the checker reports), no ticket is decided twice (asserted where it happens), and no space
//! is lost.
use crate::{Caller, Reclaimer, Request, Reservation, Space, Urgency};
use cairn_environment::atomic::{AtomicBool, Ordering::SeqCst};
use cairn_environment::lock::Mutex;
use cairn_environment::simulation::schedules;
use cairn_environment::thread::JoinHandle;
use cairn_environment::{Rank, thread};
use cairn_format::{BlockNumber, BlockRange, Generation, Geometry};
use std::collections::HashSet;
use std::sync::Arc;

struct Idle;

impl Reclaimer for Idle {
    fn write_delayed_data(&self, _: Option<u64>, _: &dyn Fn() -> bool) {
        thread::yield_now();
    }
    fn commit(&self) {
        thread::yield_now();
    }
}

fn volume() -> Arc<Space> {
    let geometry = Geometry::for_size(16 << 20, Some(1 << 20)).unwrap();
    Space::new(geometry, Space::fresh_bitmaps(&geometry))
}

fn data(data_blocks: u64) -> Request {
    Request { data_blocks, nodes: 0 }
}

/// A volume with reclaim, in which somebody holds everything but `free_blocks`.
struct NearlyFull {
    space: Arc<Space>,
    held: Reservation,
    available: u64,
    _reclaimer: Arc<dyn Reclaimer>,
}

fn nearly_full(free_blocks: u64) -> NearlyFull {
    let space = volume();
    let reclaimer: Arc<dyn Reclaimer> = Arc::new(Idle);
    space.start(Arc::downgrade(&reclaimer));
    let available = space.report().available_blocks;
    let held = space.try_reserve(data(available - free_blocks), Urgency::Ordinary).unwrap();
    NearlyFull { space, held, available, _reclaimer: reclaimer }
}

fn spawn<T: Send + 'static>(
    name: &str,
    space: &Arc<Space>,
    task: impl FnOnce(&Arc<Space>) -> T + Send + 'static,
) -> JoinHandle<T> {
    let space = Arc::clone(space);
    thread::spawn(name, move || task(&space))
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    shuttle::check_random(model, schedules(300));
}

/// Prefers a few threads over the others, and changes that at some points.
fn check_adversely(model: impl Fn() + Send + Sync + 'static) {
    shuttle::check_pct(model, schedules(300), 3);
}

/// Waiters of all kinds compete for what a holder returns in parts, while reclaim fails some of
/// them.
fn compete(stop_early: bool) {
    let NearlyFull { space, held, available, _reclaimer } = nearly_full(10);
    let requests = [
        (40, Urgency::Ordinary),
        (15, Urgency::Ordinary),
        (5, Urgency::Ordinary),
        (700, Urgency::Removal),
    ];
    let waiters: Vec<_> = requests
        .into_iter()
        .enumerate()
        .map(|(index, (blocks, urgency))| {
            spawn("waiter", &space, move |space| {
                // The second one's caller is gone.
                let gone = Caller { request: 1, thread: 0, is_gone: |_| true };
                let caller = (index == 1).then_some(gone);
                if let Ok(reservation) = space.reserve_for(caller, data(blocks), urgency) {
                    assert_eq!(reservation.data_blocks(), blocks);
                    reservation.give_back(blocks / 2, 0);
                }
            })
        })
        .collect();
    held.give_back(15, 0);
    if stop_early {
        space.stop();
    }
    drop(held);
    for waiter in waiters {
        waiter.join().unwrap();
    }
    space.stop();
    let report = space.report();
    assert_eq!(
        (report.tickets_waiting, report.reserved_data, report.available_blocks),
        (0, 0, available)
    );
}

#[test]
fn every_waiter_gets_one_answer() {
    check(|| compete(false));
}

#[test]
fn every_waiter_gets_one_answer_when_the_volume_stops() {
    check(|| compete(true));
}

#[test]
fn every_waiter_gets_one_answer_under_adverse_priorities() {
    check_adversely(|| compete(false));
}

#[test]
fn a_returned_block_wakes_the_only_waiter() {
    check(|| {
        let NearlyFull { space, held, available: _, _reclaimer } = nearly_full(0);
        let returner = thread::spawn("returner", move || {
            held.give_back(1, 0);
            drop(held);
        });
        // It fits at once, or it waits and is granted, or reclaim found the holder too slow; it
        // never hangs.
        let reserved = space.reserve(data(1), Urgency::Ordinary);
        returner.join().unwrap();
        drop(reserved);
        space.stop();
        assert_eq!(space.report().reserved_data, 0);
    });
}

/// The first waits, or it was decided already.
fn until_waiting_or_decided(space: &Space) {
    while space.report().tickets_waiting == 0
        && space.report().tickets_granted == 0
        && space.report().tickets_failed == 0
    {
        thread::yield_now();
    }
}

/// A large request that can't be served fails, and the small one behind it lives.
#[test]
fn a_small_request_outlives_a_large_one_that_fails() {
    check(|| {
        let NearlyFull { space, held, available: _, _reclaimer } = nearly_full(10);
        let reserver = |blocks: u64| {
            spawn("waiter", &space, move |space| {
                space.reserve(data(blocks), Urgency::Ordinary).map(drop).is_ok()
            })
        };
        let large = reserver(50);
        until_waiting_or_decided(&space);
        let small = reserver(5);
        assert!(!large.join().unwrap(), "nobody returns so much");
        assert!(small.join().unwrap(), "it fits");
        drop(held);
        space.stop();
    });
}

/// Who comes while somebody waits gets nothing, although it would fit.
#[test]
fn nobody_barges() {
    check(|| {
        let NearlyFull { space, held, available: _, _reclaimer } = nearly_full(10);
        let first_is_served = Arc::new(AtomicBool::new(false));
        let served = Arc::clone(&first_is_served);
        let first = spawn("first", &space, move |space| {
            let reserved = space.reserve(data(15), Urgency::Ordinary);
            served.store(true, SeqCst);
            reserved
        });
        let newcomer = spawn("newcomer", &space, move |space| {
            while space.report().tickets_waiting == 0 && !first_is_served.load(SeqCst) {
                thread::yield_now();
            }
            let reserved: Vec<bool> =
                (0..3).map(|_| space.try_reserve(data(5), Urgency::Ordinary).is_ok()).collect();
            // Once the first has failed, it waits no longer.
            reserved.contains(&true) && space.report().tickets_failed == 0
        });
        let returner = thread::spawn("returner", move || {
            held.give_back(5, 0);
            held
        });
        let barged = newcomer.join().unwrap();
        assert!(!barged, "what the first waits for went to another");
        drop(first.join().unwrap());
        drop(returner.join().unwrap());
        space.stop();
    });
}

/// Of two transactions one is unpinned while the other frees blocks: each block is free once, and
/// none too early.
#[test]
fn unpinning_frees_each_block_once() {
    let model = || {
        let space = volume();
        let all =
            space.try_reserve(data(space.report().available_blocks), Urgency::Ordinary).unwrap();
        let mut extents = Vec::new();
        while all.data_blocks() > 0 {
            let range = space.allocate_data(&all, all.data_blocks(), None).unwrap();
            space.reference(range);
            extents.push(range);
        }
        let start = extents
            .iter()
            .find(|range| range.blocks >= 16)
            .expect("an empty volume has long extents")
            .start;
        let (old, young) =
            (BlockRange::new(start, 8), BlockRange::new(BlockNumber(start.0 + 8), 8));
        space.free(old, Generation(2)).unwrap();
        let owned: Arc<Mutex<HashSet<u64>>> =
            Arc::new(Mutex::new(Rank::LEAF, (young.start.0..young.end().0).collect()));
        let take = |tries: u64| {
            let owned = Arc::clone(&owned);
            move |space: &Arc<Space>| {
                for _ in 0..tries {
                    let Ok(reservation) = space.try_reserve(data(2), Urgency::Ordinary) else {
                        continue;
                    };
                    while reservation.data_blocks() > 0 {
                        let range = space
                            .allocate_data(&reservation, reservation.data_blocks(), Some(start))
                            .unwrap();
                        space.reference(range);
                        let mut owned = owned.lock();
                        (range.start.0..range.end().0).for_each(|block| {
                            assert!(owned.insert(block), "block {block} was given away twice")
                        });
                    }
                }
            }
        };
        let threads = vec![
            spawn("unpinner", &space, |space| space.unpin(Generation(2))),
            spawn("remover", &space, move |space| space.free(young, Generation(3)).unwrap()),
            spawn("taker", &space, take(3)),
            spawn("taker", &space, take(3)),
        ];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        take(8)(&space);
        let owned_blocks = owned.lock().len();
        assert_eq!((owned_blocks, space.report().available_blocks), (16, 0));
        space.unpin(Generation(3));
        assert_eq!(space.report().available_blocks, 8);
    };
    check(model);
    check_adversely(model);
}
