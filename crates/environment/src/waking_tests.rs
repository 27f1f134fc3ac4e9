//! The predecessor's lock excludes, blocks, and wakes all waiters.
use crate::atomic::{AtomicU32, Ordering};
use crate::waking::{RwLock, block_held};
use crate::{Rank, thread};
use std::sync::Arc;

#[test]
fn a_blocking_hold_excludes_like_a_spinning_one() {
    let lock = RwLock::waking(Rank::LEAF, 1);
    let reader = lock.read();
    assert!(lock.try_read().is_some(), "spinning readers share");
    block_held();
    assert!(
        lock.try_read().is_some() && lock.try_write().is_none(),
        "a blocking reader keeps writers away"
    );
    drop(reader);
    let writer = lock.write();
    block_held();
    block_held();
    assert!(
        lock.try_read().is_none() && lock.try_write().is_none(),
        "a blocking writer keeps all others away"
    );
    drop(writer);
    assert!(lock.try_write().is_some());
}

#[test]
fn writers_and_readers_that_block_at_times_exclude_each_other() {
    let lock = Arc::new(RwLock::waking(Rank::LEAF, (0_u64, 0_u64)));
    let work = |number: u64| {
        let lock = Arc::clone(&lock);
        thread::spawn("user", move || {
            for round in 0..4_000 {
                if (round + number).is_multiple_of(3) {
                    let mut pair = lock.write_arc_at(0);
                    pair.0 += 1;
                    if round % 5 == 0 {
                        block_held();
                        thread::yield_now();
                    }
                    pair.1 += 1;
                } else {
                    let pair = lock.read_arc_at(0);
                    if round % 7 == 0 {
                        block_held();
                        thread::yield_now();
                    }
                    assert_eq!(pair.0, pair.1);
                }
            }
        })
    };
    let users: Vec<_> = (0..6).map(work).collect();
    users.into_iter().for_each(|user| user.join().expect("no panic"));
    assert_eq!(*lock.read(), (8_000, 8_000));
}

#[test]
fn the_release_of_a_blocking_hold_wakes_all_waiters() {
    let lock = Arc::new(RwLock::waking(Rank::LEAF, ()));
    let (started, inside) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let writer = lock.write();
    block_held();
    let waiters: Vec<_> = (0..8)
        .map(|number| {
            let (lock, started, inside) =
                (Arc::clone(&lock), Arc::clone(&started), Arc::clone(&inside));
            thread::spawn("waiter", move || {
                started.fetch_add(1, Ordering::SeqCst);
                if number % 2 == 0 {
                    drop(lock.write());
                } else {
                    drop(lock.read());
                }
                inside.fetch_add(1, Ordering::SeqCst);
            })
        })
        .collect();
    while started.load(Ordering::SeqCst) < 8 {
        thread::yield_now();
    }
    assert_eq!(inside.load(Ordering::SeqCst), 0);
    drop(writer);
    waiters.into_iter().for_each(|waiter| waiter.join().expect("no panic"));
    assert_eq!(inside.load(Ordering::SeqCst), 8);
}
