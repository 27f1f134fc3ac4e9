//! Locks exclude, wake up and keep their order.

use crate::clock::{self, now_monotonic, now_wall};
use crate::lock::{Condvar, Mutex, RwLock};
use crate::random::Seeded;
use crate::{Rank, thread};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn a_mutex_excludes() {
    let count = Arc::new(Mutex::new(Rank::LEAF, 0_u64));
    let adders: Vec<_> = (0..4)
        .map(|_| {
            let count = Arc::clone(&count);
            thread::spawn("adder", move || (0..10_000).for_each(|_| *count.lock() += 1))
        })
        .collect();
    adders.into_iter().for_each(|adder| adder.join().unwrap());
    assert_eq!(*count.lock(), 40_000);
}

#[test]
fn try_functions_do_not_wait() {
    let mutex = Mutex::new(Rank::LEAF, ());
    let held = mutex.lock();
    assert!(mutex.try_lock().is_none());
    drop(held);
    assert!(mutex.try_lock().is_some());

    let lock = Arc::new(RwLock::new(Rank::NODE, 1));
    let reader = lock.read();
    assert!(lock.try_read().is_some() && lock.try_read_arc_at(0).is_some());
    assert!(lock.try_write().is_none() && lock.try_write_arc_at(0).is_none());
    drop(reader);
    assert!(lock.try_write().is_some());
    assert!(lock.try_write_arc_at(0).is_some());
}

#[test]
fn owned_guards_hold_the_lock_and_keep_it_alive() {
    let lock = Arc::new(RwLock::new(Rank::NODE, vec![1]));
    let writer = lock.write_arc_at(0);
    assert!(lock.try_read().is_none());
    drop(writer);
    let first = lock.read_arc_at(0);
    let weak = Arc::downgrade(&lock);
    assert!(lock.try_write().is_none());
    drop(lock);
    assert_eq!(*first, [1]);
    drop(first);
    assert!(weak.upgrade().is_none());
}

#[test]
fn many_readers_or_one_writer() {
    let lock = Arc::new(RwLock::new(Rank::NODE, (0_u64, 0_u64)));
    let threads: Vec<_> = (0..4)
        .map(|number| {
            let lock = Arc::clone(&lock);
            thread::spawn("user", move || {
                for round in 0..5_000 {
                    if round % 4 == number {
                        let mut pair = lock.write_arc_at(0);
                        pair.0 += 1;
                        pair.1 += 1;
                    } else {
                        let pair = lock.read_arc_at(0);
                        assert_eq!(pair.0, pair.1);
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|user| user.join().unwrap());
    assert_eq!(*lock.read(), (5_000, 5_000));
}

#[test]
fn a_condition_variable_wakes_and_times_out() {
    let shared = Arc::new((Mutex::new(Rank::LEAF, false), Condvar::new()));
    let mut flag = shared.0.lock();
    assert!(shared.1.wait_for(&mut flag, Duration::from_millis(5)));
    let other = Arc::clone(&shared);
    let setter = thread::spawn("setter", move || {
        *other.0.lock() = true;
        other.1.notify_all();
    });
    while !*flag {
        shared.1.wait(&mut flag);
    }
    drop(flag);
    setter.join().unwrap();
    // The list of held locks is right after a wait: this lock can be taken again, and one before
    // it.
    drop(shared.0.lock());
    drop(Mutex::new(Rank::EXTENTS, ()).lock());
}

#[test]
fn clocks_go_forward() {
    let begin = now_monotonic();
    clock::sleep(Duration::from_millis(2));
    assert!(begin.elapsed() >= Duration::from_millis(2));
    let later = begin + Duration::from_secs(1);
    assert_eq!(later - begin, Duration::from_secs(1));
    assert_eq!(begin - later, Duration::ZERO);
    assert_eq!(later - Duration::from_secs(1), begin);
    let (seconds, nanoseconds) = now_wall();
    assert!(seconds > 1_600_000_000 && nanoseconds < 1_000_000_000);
}

#[test]
fn threads_have_names() {
    let named = thread::spawn("commit", || std::thread::current().name().map(str::to_owned));
    assert_eq!(named.join().unwrap().as_deref(), Some("commit"));
}

#[test]
fn the_seeded_generator_is_the_published_one() {
    let mut random = Seeded::new(1_234_567);
    assert_eq!(
        [random.next_u64(), random.next_u64()],
        [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]
    );
    assert!((0..1000).all(|_| random.below(7) < 7));
}

#[cfg(debug_assertions)]
mod order {
    use super::*;
    use crate::atomic::{AtomicU32, Ordering};
    use crate::{assert_may_block, assert_not_exclusive};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// The message of the panic in `function`.
    fn panic_of(function: impl FnOnce()) -> String {
        let payload = catch_unwind(AssertUnwindSafe(function)).expect_err("this must panic");
        payload.downcast_ref::<String>().cloned().unwrap_or_default()
    }

    #[test]
    fn ascending_is_allowed_and_releasing_in_any_order() {
        let (first, second, third) =
            (Mutex::new(Rank::INODE, ()), RwLock::new(Rank::NODE, ()), Mutex::new(Rank::LEAF, ()));
        let one = first.lock();
        let two = second.read();
        let three = third.lock();
        drop(one);
        drop(three);
        drop(two);
        let three = third.lock();
        drop(three);
        drop(first.lock());
    }

    #[test]
    fn descending_panics_with_both_names() {
        let (node, inode) = (Arc::new(RwLock::new(Rank::NODE, ())), Mutex::new(Rank::INODE, ()));
        let guard = node.write_arc_at(0);
        let message = panic_of(|| drop(inode.lock()));
        assert_eq!(
            message,
            "lock order: \"inode state\" (40) must not be taken while \"node\" (70) is held"
        );
        drop(guard);
        drop(inode.lock());
    }

    #[test]
    fn equal_ranks_only_when_nested() {
        let nodes = [RwLock::new(Rank::NODE, ()), RwLock::new(Rank::NODE, ())];
        let both = (nodes[0].read(), nodes[1].read());
        drop(both);
        let caches = [RwLock::new(Rank::NODE_CACHE, ()), RwLock::new(Rank::NODE_CACHE, ())];
        let one = caches[0].read();
        let message = panic_of(|| drop(caches[1].read()));
        assert!(
            message.contains("\"node cache\" (80) must not be taken while \"node cache\" (80)"),
            "{message}"
        );
        drop(one);
    }

    #[test]
    fn places_of_a_nested_rank_ascend() {
        let nodes: Vec<_> = (0..3).map(|_| Arc::new(RwLock::new(Rank::NODE, ()))).collect();
        let (first, second) = (nodes[0].write_arc_at(4), nodes[1].read_arc_at(5));
        drop(first);
        for place in [4, 5] {
            let message = panic_of(|| drop(nodes[0].write_at(place)));
            assert_eq!(
                message,
                format!(
                    "lock order: \"node\" at place {place} must not be taken while one at place 5 is held"
                )
            );
            assert_eq!(panic_of(|| nodes[0].assert_order(place)), message);
        }
        // What is tried may come in any order, and counts; a lock without a place is checked by its
        // rank alone.
        let tried = nodes[2].try_write_arc_at(9).expect("free");
        drop(second);
        assert!(panic_of(|| drop(nodes[1].read_at(7))).contains("place 9"));
        drop(nodes[0].read());
        drop(tried);
        drop(nodes[1].read_at(7));
    }

    #[test]
    fn the_same_lock_twice_panics() {
        let node = RwLock::new(Rank::NODE, ());
        let one = node.read();
        assert_eq!(
            panic_of(|| drop(node.read())),
            "the lock \"node\" is taken twice by one thread"
        );
        drop(one);
    }

    #[test]
    fn what_was_tried_counts() {
        let (node, inode) = (RwLock::new(Rank::NODE, ()), Mutex::new(Rank::INODE, ()));
        let guard = node.write();
        let tried = inode.try_lock().expect("it is free, and trying is allowed");
        drop(guard);
        let table = Mutex::new(Rank::EXTENTS, ());
        assert!(panic_of(|| drop(table.lock())).contains("\"inode state\""));
        drop(tried);
        drop(table.lock());
    }

    #[test]
    fn waiting_under_a_later_lock_panics() {
        let (group, condvar, node) =
            (Mutex::new(Rank::TRANSACTION, ()), Condvar::new(), RwLock::new(Rank::NODE, ()));
        let mut guard = group.lock();
        let later = node.read();
        let message = panic_of(|| {
            condvar.wait_for(&mut guard, Duration::ZERO);
        });
        assert!(message.contains("\"transaction state\""), "{message}");
        drop(later);
        assert!(condvar.wait_for(&mut guard, Duration::ZERO));
    }

    #[test]
    fn blocking_is_allowed_under_schedules_and_extents_only() {
        let schedules = Mutex::new(Rank::SCHEDULES, ());
        let outermost = schedules.lock();
        let (extents, inode) = (Mutex::new(Rank::EXTENTS, ()), Mutex::new(Rank::INODE, ()));
        let outer = extents.lock();
        assert_may_block(None);
        let inner = inode.lock();
        assert!(panic_of(|| assert_may_block(None)).contains("\"inode state\""));
        assert_may_block(Some(Rank::INODE));
        drop((outermost, outer, inner));
    }

    #[test]
    fn a_device_is_waited_for_under_shared_locks_only() {
        let node = RwLock::new(Rank::NODE, ());
        let reader = node.read();
        assert_not_exclusive(Rank::NODE);
        drop(reader);
        let writer = node.try_write();
        assert!(catch_unwind(|| assert_not_exclusive(Rank::NODE)).is_err());
        assert_not_exclusive(Rank::INODE);
        drop(writer);
        assert_not_exclusive(Rank::NODE);
    }

    #[test]
    fn each_thread_has_its_own_list() {
        let node = Arc::new(RwLock::new(Rank::NODE, AtomicU32::new(0)));
        let guard = node.read_arc_at(0);
        let inode = Arc::new(Mutex::new(Rank::INODE, ()));
        let other = Arc::clone(&inode);
        thread::spawn("other", move || drop(other.lock())).join().unwrap();
        guard.fetch_add(1, Ordering::Relaxed);
        assert_eq!(guard.load(Ordering::Relaxed), 1);
    }
}

#[cfg(not(debug_assertions))]
#[test]
fn a_release_build_carries_no_rank() {
    assert_eq!(size_of::<Mutex<u64>>(), size_of::<parking_lot::Mutex<u64>>());
    assert_eq!(size_of::<RwLock<u64>>(), size_of::<parking_lot::RwLock<u64>>());
    assert_eq!(size_of::<crate::lock::ArcRwLockReadGuard<u64>>(), size_of::<usize>());
    let (node, inode) = (RwLock::new(Rank::NODE, ()), Mutex::new(Rank::INODE, ()));
    drop((node.read(), inode.lock()));
}
