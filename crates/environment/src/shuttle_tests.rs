//! The locks under the model checker: it finds what is wrong, and finds nothing wrong with what is
//! right.

use crate::atomic::{AtomicU64, Ordering};
use crate::clock;
use crate::lock::{Condvar, Mutex, RwLock};
use crate::{Rank, thread};
use std::panic::catch_unwind;
use std::sync::Arc;
use std::time::Duration;

const SCHEDULES: usize = 1_000;

#[test]
fn a_queue_of_one_delivers_everything() {
    shuttle::check_random(
        || {
            let shared = Arc::new((Mutex::new(Rank::LEAF, None), Condvar::new()));
            let consumer = Arc::clone(&shared);
            let sum = thread::spawn("consumer", move || {
                let mut sum = 0;
                for _ in 0..3 {
                    let mut slot = consumer.0.lock();
                    while slot.is_none() {
                        consumer.1.wait(&mut slot);
                    }
                    sum += slot.take().unwrap_or(0);
                    consumer.1.notify_all();
                }
                sum
            });
            for value in 1..=3 {
                let mut slot = shared.0.lock();
                while slot.is_some() {
                    shared.1.wait(&mut slot);
                }
                *slot = Some(value);
                shared.1.notify_all();
            }
            assert_eq!(sum.join().unwrap(), 6);
        },
        SCHEDULES,
    );
}

#[test]
fn readers_never_see_half_a_write() {
    shuttle::check_random(
        || {
            let pair = Arc::new(RwLock::new(Rank::NODE, (0, 0)));
            let writers: Vec<_> = (0..2)
                .map(|_| {
                    let pair = Arc::clone(&pair);
                    thread::spawn("writer", move || {
                        let mut pair = pair.write_arc_at(0);
                        pair.0 += 1;
                        thread::yield_now();
                        pair.1 += 1;
                    })
                })
                .collect();
            let seen = pair.read_arc_at(0);
            assert_eq!(seen.0, seen.1);
            drop(seen);
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            assert_eq!(*pair.read(), (2, 2));
        },
        SCHEDULES,
    );
}

#[test]
fn a_timed_wait_ends_although_nobody_notifies() {
    shuttle::check_random(
        || {
            let (mutex, condvar) = (Mutex::new(Rank::LEAF, ()), Condvar::new());
            let begin = clock::now_monotonic();
            assert!(condvar.wait_for(&mut mutex.lock(), Duration::from_secs(3600)));
            clock::sleep(Duration::from_secs(3600));
            assert!(begin.elapsed() >= Duration::from_secs(3600));
        },
        10,
    );
}

#[test]
fn a_lost_update_is_found() {
    let lost = catch_unwind(|| {
        shuttle::check_random(
            || {
                let count = Arc::new(AtomicU64::new(0));
                let other = Arc::clone(&count);
                let adder = thread::spawn("adder", move || {
                    other.store(other.load(Ordering::SeqCst) + 1, Ordering::SeqCst)
                });
                count.store(count.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
                adder.join().unwrap();
                assert_eq!(count.load(Ordering::SeqCst), 2);
            },
            SCHEDULES,
        );
    });
    assert!(lost.is_err());
}

#[test]
fn a_forgotten_notification_is_found() {
    let stuck = catch_unwind(|| {
        shuttle::check_random(
            || {
                let shared = Arc::new((Mutex::new(Rank::LEAF, false), Condvar::new()));
                let other = Arc::clone(&shared);
                let setter = thread::spawn("setter", move || *other.0.lock() = true);
                let mut flag = shared.0.lock();
                while !*flag {
                    shared.1.wait(&mut flag);
                }
                drop(flag);
                setter.join().unwrap();
            },
            SCHEDULES,
        );
    });
    assert!(stuck.is_err());
}
