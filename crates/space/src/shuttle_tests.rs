//! The ticket queue under the model checker: random schedules of who runs when.
//!
//! What every schedule must show: each waiter gets an answer (a lost wake-up would be a deadlock, which the checker
//! reports), no ticket is decided twice (asserted where it happens), and no space is lost.
use crate::{Reclaimer, Request, Space, Urgency};
use cairn_environment::thread;
use cairn_format::Geometry;
use std::sync::Arc;
use std::time::Duration;

const SCHEDULES: usize = 300;

struct Idle;

impl Reclaimer for Idle {
    fn write_delayed_data(&self, _: u64, _: &dyn Fn() -> bool) {
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

/// Waiters of all kinds compete for what a holder returns in parts, while reclaim fails some of them.
fn compete(stop_early: bool) {
    let space = volume();
    let reclaimer: Arc<dyn Reclaimer> = Arc::new(Idle);
    space.start(Arc::downgrade(&reclaimer));
    let available = space.report().available_blocks;
    let held = space.try_reserve(data(available - 10), Urgency::Normal).unwrap();
    let requests = [(40, Urgency::Normal), (15, Urgency::Normal), (5, Urgency::Normal), (700, Urgency::Removal)];
    let waiters: Vec<_> = requests
        .into_iter()
        .enumerate()
        .map(|(index, (blocks, urgency))| {
            let space = Arc::clone(&space);
            thread::spawn("waiter", move || {
                let reserved = if index == 1 {
                    space.reserve_timeout(data(blocks), urgency, Duration::from_micros(20))
                } else {
                    space.reserve(data(blocks), urgency)
                };
                if let Ok(reservation) = reserved {
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
    assert_eq!((report.tickets_waiting, report.reserved_data, report.available_blocks), (0, 0, available));
}

#[test]
fn every_waiter_gets_one_answer() {
    shuttle::check_random(|| compete(false), SCHEDULES);
}

#[test]
fn every_waiter_gets_one_answer_when_the_volume_stops() {
    shuttle::check_random(|| compete(true), SCHEDULES);
}

#[test]
fn every_waiter_gets_one_answer_under_adverse_priorities() {
    shuttle::check_pct(|| compete(false), SCHEDULES, 3);
}

#[test]
fn a_returned_block_wakes_the_only_waiter() {
    shuttle::check_random(
        || {
            let space = volume();
            let reclaimer: Arc<dyn Reclaimer> = Arc::new(Idle);
            space.start(Arc::downgrade(&reclaimer));
            let held = space.try_reserve(data(space.report().available_blocks), Urgency::Normal).unwrap();
            let other = Arc::clone(&space);
            let returner = thread::spawn("returner", move || {
                held.give_back(1, 0);
                drop(held);
            });
            // It fits at once, or it waits and is granted, or reclaim found the holder too slow; it never hangs.
            let reserved = other.reserve(data(1), Urgency::Normal);
            returner.join().unwrap();
            drop(reserved);
            space.stop();
            assert_eq!(space.report().reserved_data, 0);
        },
        SCHEDULES,
    );
}
