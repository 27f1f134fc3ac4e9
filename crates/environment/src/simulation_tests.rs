//! The simulation: time jumps, a seed repeats a run exactly, and what is wrong is found.

use crate::clock::{now_monotonic, sleep};
use crate::lock::{Condvar, Mutex};
use crate::simulation::{Settings, Simulated, note_progress, run};
use crate::{Rank, random, thread};
use std::sync::Arc;
use std::time::Duration;

const HOUR: Duration = Duration::from_secs(3600);

fn settings(seed: u64) -> Settings {
    Settings { seed, steps_max: 1_000_000, quiet_max: 100 * HOUR }
}

#[test]
fn time_jumps_to_the_next_deadline() {
    for seed in 0..50 {
        let simulated = run(&settings(seed), || {
            let order = Arc::new(Mutex::new(Rank::LEAF, Vec::new()));
            let sleepers: Vec<_> = [3, 1, 2]
                .map(|hours| {
                    let order = Arc::clone(&order);
                    thread::spawn("sleeper", move || {
                        sleep(hours * HOUR);
                        order.lock().push(hours);
                    })
                })
                .into();
            sleepers.into_iter().for_each(|sleeper| sleeper.join().unwrap());
            let order = order.lock().clone();
            (order, now_monotonic().nanoseconds())
        });
        let (order, now_ns) = simulated.outcome.unwrap();
        assert_eq!(order, [1, 2, 3]);
        assert!(
            now_ns >= 3 * HOUR.as_nanos() as u64
                && simulated.time < 3 * HOUR + Duration::from_millis(1)
        );
    }
}

#[test]
fn a_timed_wait_ends_by_notification_or_by_time() {
    for seed in 0..200 {
        let simulated = run(&settings(seed), || {
            let shared = Arc::new((Mutex::new(Rank::LEAF, false), Condvar::new()));
            let other = Arc::clone(&shared);
            let setter = thread::spawn("setter", move || {
                sleep(HOUR);
                *other.0.lock() = true;
                other.1.notify_one();
            });
            let mut set = shared.0.lock();
            assert!(shared.1.wait_for(&mut set, HOUR / 2), "nobody notifies so early");
            assert!(!shared.1.wait_for(&mut set, 10 * HOUR), "it is notified");
            assert!(*set);
            drop(set);
            setter.join().unwrap();
        });
        simulated.outcome.unwrap();
        assert!(simulated.time < 2 * HOUR);
    }
}

/// What several threads do with locks, waits and random numbers.
fn scramble(seed: u64) -> Simulated<Vec<(u64, u64, u64)>> {
    run(&settings(seed), || {
        let list = Arc::new(Mutex::new(Rank::LEAF, Vec::new()));
        let threads: Vec<_> = (0..5)
            .map(|number| {
                let list = Arc::clone(&list);
                thread::spawn("scrambler", move || {
                    for _ in 0..20 {
                        if random::u64().is_multiple_of(3) {
                            sleep(Duration::from_millis(random::u64() % 10));
                        }
                        list.lock().push((number, random::u64(), now_monotonic().nanoseconds()));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        list.lock().clone()
    })
}

#[test]
fn a_seed_repeats_a_run() {
    for seed in 0..20 {
        let (first, second) = (scramble(seed), scramble(seed));
        assert_eq!((first.steps, first.time), (second.steps, second.time));
        assert_eq!(first.outcome.unwrap(), second.outcome.unwrap());
    }
    assert_ne!(scramble(1).outcome, scramble(2).outcome);
}

#[test]
fn a_lost_update_a_deadlock_and_a_vain_wait_are_found() {
    let lost = (0..100).any(|seed| {
        let simulated = run(&settings(seed), || {
            let count = Arc::new(crate::atomic::AtomicU64::new(0));
            let add = |count: &crate::atomic::AtomicU64| {
                use crate::atomic::Ordering::SeqCst;
                count.store(count.load(SeqCst) + 1, SeqCst);
            };
            let other = Arc::clone(&count);
            let adder = thread::spawn("adder", move || add(&other));
            add(&count);
            adder.join().unwrap();
            assert_eq!(count.load(crate::atomic::Ordering::SeqCst), 2, "an update is lost");
        });
        simulated.outcome.is_err_and(|error| error.contains("an update is lost"))
    });
    assert!(lost);
    let stuck = run(&settings(1), || {
        let (mutex, condvar) = (Mutex::new(Rank::LEAF, ()), Condvar::new());
        condvar.wait(&mut mutex.lock());
    });
    assert!(stuck.outcome.unwrap_err().contains("deadlock"));
    // Somebody looks every hour, and so nothing is ever stuck.
    let quiet = run(&settings(1), || {
        let (mutex, condvar) = (Mutex::new(Rank::LEAF, ()), Condvar::new());
        note_progress();
        loop {
            condvar.wait_for(&mut mutex.lock(), HOUR);
        }
    });
    assert!(quiet.outcome.unwrap_err().contains("waits for ever"));
}
