//! Scenarios of the list, the ring and the commit, one caller at a time.
use super::testing::*;
use crate::{Batch, CommitReason, FlushPolicy, LogError, LogOptions};
use cairn_blockdev::Operation;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::{clock, thread};
use cairn_format::{BLOCK_SIZE, EntryFlags, Generation, LogSeq, TREE_FILES};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn nothing_is_durable_before_it_is_flushed_and_everything_after() {
    let volume = Volume::new();
    assert_eq!((volume.log.last(), volume.log.durable()), (LogSeq(0), LogSeq(0)));
    let first = volume.put(1, b"one");
    let second = volume.put(2, b"two");
    assert_eq!((first, second, volume.log.durable()), (LogSeq(1), LogSeq(2), LogSeq(0)));
    assert!(volume.replayed().is_empty());
    volume.log.wait_durable(first).unwrap();
    assert_eq!(volume.log.durable(), second);
    volume.put(1, b"later");
    assert_eq!(
        volume.replayed(),
        Items::from([(key(1), b"one".to_vec()), (key(2), b"two".to_vec())])
    );
    let statistics = volume.log.statistics();
    assert_eq!(
        (statistics.checkpoints, statistics.flushes, statistics.blocks_written, statistics.groups),
        (1, 1, 1, 1)
    );
}

#[test]
fn an_item_logged_again_is_written_once() {
    let volume = Volume::new();
    for round in 0..100_u64 {
        volume.put(1, &vec![7; 10 + round as usize % 90]);
        volume.put(2, &round.to_le_bytes());
    }
    volume.log.wait_durable(volume.log.last()).unwrap();
    let statistics = volume.log.statistics();
    assert_eq!(
        (statistics.operations, statistics.items_logged, statistics.context_bytes),
        (200, 2, 0)
    );
    assert_eq!(
        volume.replayed(),
        Items::from([(key(1), vec![7; 19]), (key(2), 99_u64.to_le_bytes().to_vec())])
    );
}

#[test]
fn what_was_created_and_removed_between_two_pushes_is_not_written() {
    let volume = Volume::new();
    let mut batch = Batch::new();
    volume.put(1, b"stays");
    batch.put_new(TREE_FILES, key(2), b"temporary", EntryFlags::default());
    volume.log.insert(&mut batch);
    assert!(batch.is_empty());
    volume.put(2, b"changed");
    volume.put(3, b"old");
    volume.delete(2);
    volume.delete(3);
    // Removed, made again, removed: it existed before, so the removal counts.
    batch.delete(TREE_FILES, key(4));
    batch.put_new(TREE_FILES, key(4), b"again", EntryFlags::default());
    batch.delete(TREE_FILES, key(4));
    volume.log.insert(&mut batch);
    volume.log.wait_durable(volume.log.last()).unwrap();
    assert_eq!(volume.log.statistics().items_logged, 3);
    assert_eq!(volume.replayed(), Items::from([(key(1), b"stays".to_vec())]));
    // Operations that undo each other need neither write nor flush.
    batch.put_new(TREE_FILES, key(5), b"temporary", EntryFlags::default());
    volume.log.insert(&mut batch);
    let last = volume.delete(5);
    volume.log.wait_durable(last).unwrap();
    assert_eq!(
        (
            volume.log.durable(),
            volume.log.statistics().checkpoints,
            volume.log.statistics().flushes
        ),
        (last, 1, 1)
    );
}

#[test]
fn a_written_creation_needs_its_removal() {
    let volume = Volume::new();
    let mut batch = Batch::new();
    batch.put_new(TREE_FILES, key(2), b"written", EntryFlags::default());
    volume.log.wait_durable(volume.log.insert(&mut batch)).unwrap();
    let last = volume.delete(2);
    volume.log.wait_durable(last).unwrap();
    assert!(volume.replayed().is_empty());
}

#[test]
fn unproven_data_stays_unproven_when_its_extent_is_logged_again() {
    let volume = Volume::new();
    let block = geometry().data_start();
    volume.put_data(0, block, 5);
    let value = extent_of(block, &[5; BLOCK_SIZE], volume.running).encode();
    let mut batch = Batch::new();
    batch.put(TREE_FILES, extent_key(0), &value, EntryFlags::default());
    batch.put(TREE_FILES, extent_key(1), &value, EntryFlags::NEW_DATA);
    batch.delete(TREE_FILES, extent_key(1));
    batch.put(TREE_FILES, extent_key(1), &value, EntryFlags::default());
    volume.log.wait_durable(volume.log.insert(&mut batch)).unwrap();
    let device = volume.durable_device();
    let found = replay(&device, &volume.superblock).unwrap();
    let checkpoint = found.checkpoints().next().unwrap().unwrap();
    let flags: Vec<_> = checkpoint.entries().map(|entry| (entry.key.offset, entry.flags)).collect();
    assert_eq!(flags, [(0, EntryFlags::NEW_DATA), (1, EntryFlags::default())]);
}

#[test]
fn an_fsync_of_the_next_transaction_writes_the_closed_context_first() {
    let mut volume = Volume::new();
    volume.put(1, b"old transaction");
    let cut = volume.cut();
    let last = volume.put(2, b"new transaction");
    volume.log.wait_durable(last).unwrap();
    assert_eq!(
        (cut.last, volume.log.statistics().checkpoints, volume.log.statistics().flushes),
        (LogSeq(1), 2, 1)
    );
    let device = volume.durable_device();
    let found = replay(&device, &volume.superblock).unwrap();
    let generations: Vec<_> =
        found.chain.iter().map(|checkpoint| checkpoint.header.generation.0).collect();
    assert_eq!((generations, found.checkpoints().count()), (vec![11, 12], 2));
    // With the superblock, the first one is only skipped.
    volume.commit(cut);
    let found = replay(&device, &volume.superblock).unwrap();
    assert_eq!(
        (found.chain.len(), found.checkpoints().count(), found.last_generation),
        (2, 1, Generation(12))
    );
}

#[test]
fn a_superblock_that_comes_first_drops_the_closed_context() {
    let mut volume = Volume::new();
    let old = volume.put(1, b"old transaction");
    let cut = volume.cut();
    assert_eq!(cut.position, volume.superblock.log_tail);
    volume.commit(cut);
    assert_eq!(volume.log.durable(), old);
    volume.log.wait_durable(old).unwrap();
    assert_eq!(
        (volume.log.statistics().checkpoints, volume.log.statistics().contexts_dropped),
        (0, 1)
    );
    volume.log.wait_durable(volume.put(2, b"new")).unwrap();
    assert_eq!(volume.replayed(), Items::from([(key(2), b"new".to_vec())]));
}

#[test]
fn a_commit_does_not_make_later_operations_durable() {
    let mut volume = Volume::new();
    let old = volume.put(1, b"a");
    let cut = volume.cut();
    let new = volume.put(2, b"b");
    // Written, but not flushed.
    crate::lead::push(&volume.log.core, 0);
    volume.commit(cut);
    assert_eq!(volume.log.durable(), old);
    volume.log.wait_durable(new).unwrap();
    assert_eq!(volume.log.statistics().flushes, 1);
    assert_eq!(volume.replayed(), Items::from([(key(2), b"b".to_vec())]));
}

#[test]
fn what_is_written_already_only_needs_a_flush() {
    let options =
        LogOptions { background_push_bytes: 2000, hard_limit_bytes: 1 << 20, ..quiet_options() };
    let volume = Volume::with_options(options);
    let last = volume.put(1, &[1; 3000]);
    let begin = clock::now_monotonic();
    while volume.log.statistics().checkpoints == 0 {
        assert!(begin.elapsed() < Duration::from_secs(20), "no background push");
        clock::sleep(Duration::from_millis(1));
    }
    assert_eq!((volume.log.durable(), volume.log.statistics().flushes), (LogSeq(0), 0));
    volume.log.wait_durable(last).unwrap();
    let statistics = volume.log.statistics();
    assert_eq!(
        (statistics.checkpoints, statistics.background_pushes, statistics.flushes),
        (1, 1, 1)
    );
}

#[test]
fn the_ring_goes_round_many_times() {
    let mut volume = Volume::new();
    let mut expected = Items::new();
    for round in 0..600_u64 {
        let value = vec![round as u8; 3000];
        let mut batch = Batch::new();
        for item in 0..5 {
            batch.put(TREE_FILES, key(round % 7 * 5 + item), &value, EntryFlags::default());
            expected.insert(key(round % 7 * 5 + item), value.clone());
        }
        volume.log.wait_durable(volume.log.insert(&mut batch)).unwrap();
        if round % 20 == 19 {
            assert_eq!(volume.replayed(), expected, "round {round}");
            let cut = volume.cut();
            volume.commit(cut);
            expected.clear();
        }
    }
    let statistics = volume.log.statistics();
    assert!(
        statistics.blocks_written > 8 * LOG_BLOCKS && statistics.fallbacks_ring_full == 0,
        "{statistics:?}"
    );
    // The ring begins three blocks before its end.
    assert_eq!(statistics.wraps, (statistics.blocks_written + LOG_BLOCKS - 3) / LOG_BLOCKS);
}

#[test]
fn a_full_ring_asks_for_one_commit_whose_superblock_finishes_those_who_wait() {
    let mut volume = Volume::new();
    while volume.log.statistics().ring_blocks_used + 20 <= LOG_BLOCKS {
        let mut batch = Batch::new();
        (0..20)
            .for_each(|item| batch.put(TREE_FILES, key(item), &[5; 3700], EntryFlags::default()));
        volume.log.wait_durable(volume.log.insert(&mut batch)).unwrap();
    }
    assert_eq!(volume.requests(), [CommitReason::LogPressure]);
    let checkpoints = volume.log.statistics().checkpoints;
    let mut batch = Batch::new();
    (0..20).for_each(|item| batch.put(TREE_FILES, key(item), &[6; 3700], EntryFlags::default()));
    let full = volume.log.insert(&mut batch);
    let done = Arc::new(AtomicU64::new(0));
    let count = |done: &Arc<AtomicU64>, by: u64| {
        let done = Arc::clone(done);
        Box::new(move |outcome: Result<(), LogError>| {
            // A panic here would hide why the test fails.
            done.fetch_add(if outcome.is_ok() { by } else { 1 << 40 }, Ordering::SeqCst);
        })
    };
    volume.log.on_durable(full, count(&done, 1));
    volume.log.on_durable(full, count(&done, 1));
    assert_eq!(volume.requests(), [CommitReason::LogPressure, CommitReason::RingFull]);
    let cut = volume.cut();
    let next = volume.put(50, b"of the next transaction");
    volume.log.on_durable(next, count(&done, 100));
    assert_eq!(
        (done.load(Ordering::SeqCst), volume.log.statistics().checkpoints),
        (0, checkpoints)
    );
    volume.commit(cut);
    assert_eq!(done.load(Ordering::SeqCst) % 100, 2);
    volume.log.wait_durable(next).unwrap();
    let begin = clock::now_monotonic();
    while done.load(Ordering::SeqCst) != 102 {
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "the next transaction's callback does not run"
        );
        clock::sleep(Duration::from_millis(1));
    }
    assert_eq!(volume.log.statistics().fallbacks_ring_full, 1);
    assert_eq!(volume.replayed(), Items::from([(key(50), b"of the next transaction".to_vec())]));
}

#[test]
fn a_commit_under_way_that_will_make_room_is_enough() {
    let mut volume = Volume::new();
    while volume.log.statistics().ring_blocks_used < LOG_BLOCKS - 4 {
        volume.log.wait_durable(volume.put(1, &[5; 3700])).unwrap();
    }
    let cut = volume.cut();
    let before = volume.requests();
    let mut batch = Batch::new();
    (0..20).for_each(|item| batch.put(TREE_FILES, key(item), &[6; 3700], EntryFlags::default()));
    let last = volume.log.insert(&mut batch);
    let (sender, receiver) = std::sync::mpsc::channel();
    volume.log.on_durable(
        last,
        Box::new(move |outcome| {
            let _ = sender.send(outcome.is_ok());
        }),
    );
    assert!(receiver.try_recv().is_err());
    assert_eq!(volume.requests(), before);
    volume.commit(cut);
    assert!(receiver.recv_timeout(Duration::from_secs(20)).unwrap());
    assert_eq!(volume.replayed().len(), 20);
}

#[test]
fn too_many_items_for_a_checkpoint_need_a_commit() {
    let mut volume = Volume::new();
    let mut batch = Batch::new();
    (0..LOG_BLOCKS / 2 + 10)
        .for_each(|item| batch.put(TREE_FILES, key(item), &[6; 3800], EntryFlags::default()));
    let last = volume.log.insert(&mut batch);
    let log = Arc::clone(&volume.log);
    let waiter = thread::spawn("waiter", move || log.wait_durable(last));
    let begin = clock::now_monotonic();
    while volume.requests().is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(20), "no request");
        clock::sleep(Duration::from_millis(1));
    }
    assert_eq!(volume.requests(), [CommitReason::ContextTooLarge]);
    let cut = volume.cut();
    volume.commit(cut);
    waiter.join().unwrap().unwrap();
    assert_eq!((volume.log.statistics().checkpoints, volume.log.statistics().committed), (0, 1));
}

#[test]
fn what_needs_a_commit_is_not_logged_before_its_superblock() {
    let mut volume = Volume::new();
    let earlier = volume.put(1, b"earlier");
    let mut batch = Batch::new();
    batch.put(TREE_FILES, key(2), b"with more", EntryFlags::default());
    batch.need_commit();
    let needing = volume.log.insert(&mut batch);
    let later = volume.put(3, b"later");
    let (sender, receiver) = std::sync::mpsc::channel();
    let wait = |volume: &Volume, target: LogSeq| {
        let sender = sender.clone();
        volume.log.on_durable(
            target,
            Box::new(move |outcome| {
                let _ = sender.send((target, outcome.is_ok()));
            }),
        );
    };
    wait(&volume, needing);
    assert_eq!(volume.requests(), [CommitReason::CommitNeeded]);
    // After the cut, too: a checkpoint follows the ones before it.
    let cut = volume.cut();
    let next = volume.put(4, b"of the next transaction");
    wait(&volume, next);
    assert_eq!(volume.requests(), [CommitReason::CommitNeeded]);
    assert_eq!(volume.log.statistics().checkpoints, 0);
    assert_eq!(volume.replayed(), Items::new());
    assert!(receiver.try_recv().is_err() && volume.log.durable() < earlier);
    volume.commit(cut);
    let mut done: Vec<_> =
        (0..2).map(|_| receiver.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
    // Different threads call back.
    done.sort_unstable();
    assert_eq!(done, [(needing, true), (next, true)]);
    assert!(volume.log.durable() >= later);
    assert_eq!(volume.log.statistics().fallbacks_commit_needed, 1);
    assert_eq!(volume.replayed(), Items::from([(key(4), b"of the next transaction".to_vec())]));
    // The need has gone with the context.
    volume.log.wait_durable(volume.put(5, b"logged")).unwrap();
    assert_eq!(volume.requests(), [CommitReason::CommitNeeded]);
}

#[test]
fn operations_wait_while_the_list_is_too_long() {
    let options =
        LogOptions { background_push_bytes: 30_000, hard_limit_bytes: 60_000, ..quiet_options() };
    let volume = Volume::with_options(options);
    volume.device.set_delay(Operation::Write, Duration::from_millis(2));
    for item in 0..200 {
        volume.log.throttle().unwrap();
        volume.put(item % 60, &[1; 3000]);
        assert!(volume.log.statistics().context_bytes <= 60_000 + 3100);
    }
    let statistics = volume.log.statistics();
    assert!(statistics.background_pushes > 0 && statistics.flushes == 0, "{statistics:?}");
}

#[test]
fn a_throttled_operation_goes_on_when_a_commit_or_an_error_shortens_the_list() {
    for commit in [true, false] {
        let options = LogOptions {
            background_push_bytes: 20_000,
            hard_limit_bytes: 40_000,
            ..quiet_options()
        };
        let mut volume = Volume::with_options(options);
        // Nothing of this fits into one checkpoint.
        let mut batch = Batch::new();
        (0..LOG_BLOCKS)
            .for_each(|item| batch.put(TREE_FILES, key(item), &[6; 3800], EntryFlags::default()));
        volume.log.insert(&mut batch);
        let log = Arc::clone(&volume.log);
        let throttled = thread::spawn("throttled", move || log.throttle());
        let begin = clock::now_monotonic();
        while volume.log.statistics().throttle_waits == 0 {
            assert!(begin.elapsed() < Duration::from_secs(20), "not throttled");
            clock::sleep(Duration::from_millis(1));
        }
        if commit {
            let cut = volume.cut();
            volume.commit(cut);
        } else {
            volume.log.abort(LogError::Aborted("the commit failed".into()));
        }
        assert_eq!(throttled.join().unwrap().is_ok(), commit);
    }
}

/// Items that are too many for a checkpoint, so that no push shortens the list.
fn too_many(created: bool) -> Batch {
    let mut batch = Batch::new();
    for item in 0..LOG_BLOCKS {
        match created {
            true => batch.put_new(TREE_FILES, key(item), &[6; 3800], EntryFlags::default()),
            false => batch.put(TREE_FILES, key(item), &[6; 3800], EntryFlags::default()),
        }
    }
    batch
}

fn throttled_threads(volume: &Volume, count: u64) -> Vec<thread::JoinHandle<Result<(), LogError>>> {
    let spawn = |_| {
        let log = Arc::clone(&volume.log);
        thread::spawn("throttled", move || log.throttle())
    };
    let threads = (0..count).map(spawn).collect();
    let begin = clock::now_monotonic();
    while volume.log.statistics().throttle_waits < count {
        assert!(begin.elapsed() < Duration::from_secs(20), "not throttled");
        clock::sleep(Duration::from_millis(1));
    }
    threads
}

#[test]
fn who_is_throttled_has_the_list_written_before_sleeping() {
    // Nobody else would: the list is never long enough for a push in the background.
    let options =
        LogOptions { background_push_bytes: u64::MAX, hard_limit_bytes: 20_000, ..quiet_options() };
    let volume = Volume::with_options(options);
    for round in 0..20 {
        for item in 0..8 {
            volume.put(item, &[round; 3000]);
        }
        volume.log.throttle().unwrap();
        assert_eq!(volume.log.statistics().context_bytes, 0);
    }
    assert_eq!(volume.log.statistics().throttle_waits, 20);
}

#[test]
fn who_is_throttled_goes_on_when_removals_make_the_list_shorter() {
    let options =
        LogOptions { background_push_bytes: 20_000, hard_limit_bytes: 40_000, ..quiet_options() };
    let volume = Volume::with_options(options);
    volume.log.insert(&mut too_many(true));
    let threads = throttled_threads(&volume, 3);
    // No push and no commit comes to their help.
    for item in 0..LOG_BLOCKS {
        volume.delete(item);
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    assert_eq!(
        (volume.log.statistics().context_items, volume.log.statistics().checkpoints),
        (0, 0)
    );
}

#[test]
fn who_is_throttled_goes_on_even_if_others_fill_the_list_again_at_once() {
    let options =
        LogOptions { background_push_bytes: 20_000, hard_limit_bytes: 40_000, ..quiet_options() };
    let mut volume = Volume::with_options(options);
    volume.log.insert(&mut too_many(false));
    let threads = throttled_threads(&volume, 4);
    let mut again = too_many(false);
    let cut = volume.cut();
    volume.commit(cut);
    volume.log.insert(&mut again);
    threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
}

#[test]
fn the_first_failed_write_or_flush_reaches_every_waiter_and_every_later_call() {
    for operation in [Operation::Write, Operation::Flush] {
        let volume = Volume::new();
        volume.log.wait_durable(volume.put(1, b"safe")).unwrap();
        volume.device.fail_next(operation, 1);
        let last = volume.put(2, b"unsafe");
        let log = Arc::clone(&volume.log);
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let log = Arc::clone(&log);
                thread::spawn("waiter", move || log.wait_durable(last))
            })
            .collect();
        for thread in threads {
            assert!(
                matches!(thread.join().unwrap(), Err(LogError::Device(error)) if error.operation == operation)
            );
        }
        // The device works again; the log does not.
        assert!(
            volume.log.wait_durable(last).is_err() && volume.log.wait_durable(LogSeq(1)).is_err()
        );
        assert!(volume.log.throttle().is_err() && volume.log.error().is_some());
        let calls = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&calls);
        let callback = move |outcome: Result<(), LogError>| {
            assert!(outcome.is_err());
            counted.fetch_add(1, Ordering::SeqCst);
        };
        volume.log.on_durable(last, Box::new(callback));
        assert_eq!(
            (calls.load(Ordering::SeqCst), volume.requests()),
            (1, vec![CommitReason::LogFailed])
        );
        assert_eq!(volume.replayed(), Items::from([(key(1), b"safe".to_vec())]));
        assert_eq!(volume.log.durable(), LogSeq(1));
    }
}

#[test]
fn stopping_ends_waits_with_an_error() {
    let mut volume = Volume::new();
    let (sender, receiver) = std::sync::mpsc::channel();
    let mut batch = Batch::new();
    (0..LOG_BLOCKS)
        .for_each(|item| batch.put(TREE_FILES, key(item), &[6; 3800], EntryFlags::default()));
    let last = volume.log.insert(&mut batch);
    volume.log.on_durable(
        last,
        Box::new(move |outcome| {
            let _ = sender.send(outcome);
        }),
    );
    volume.log.stop();
    assert!(matches!(receiver.recv().unwrap(), Err(LogError::Stopped)));
    assert!(receiver.recv().is_err(), "called twice");
    let cut = volume.cut();
    volume.commit(cut);
    assert_eq!(volume.log.durable(), LogSeq(0));
}

#[test]
fn a_flush_of_its_own_for_each() {
    let volume = Volume::with_options(LogOptions { flush: FlushPolicy::Each, ..quiet_options() });
    volume.device.set_flush_time(Duration::from_millis(2));
    let threads: Vec<_> = (0..8)
        .map(|index| {
            let log = Arc::clone(&volume.log);
            thread::spawn("waiter", move || {
                let mut batch = Batch::new();
                batch.put(TREE_FILES, key(index), b"x", EntryFlags::default());
                let sequence = log.insert(&mut batch);
                let (sender, receiver) = std::sync::mpsc::channel();
                log.on_durable(
                    sequence,
                    Box::new(move |outcome| {
                        let _ = sender.send(outcome);
                    }),
                );
                receiver.recv().unwrap()
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    let statistics = volume.log.statistics();
    assert_eq!((statistics.group_size_max, statistics.groups), (1, statistics.flushes));
    assert_eq!(statistics.groups + statistics.immediate, 8);
}

/// Who inserts, who waits, and who pushes don't slow each other down by sharing a cache line.
#[test]
fn each_lock_has_cache_lines_of_its_own() {
    let volume = Volume::new();
    let core = &volume.log.core;
    let line = |address: usize| address / 128;
    let lines = [
        line(std::ptr::from_ref(&core.list).addr()),
        line(std::ptr::from_ref(&core.waiters).addr()),
        line(std::ptr::from_ref(&core.checkpoints).addr()),
        line(std::ptr::from_ref(&core.data).addr()),
    ];
    for (index, one) in lines.iter().enumerate() {
        assert!(lines.iter().skip(index + 1).all(|other| other != one), "{lines:?}");
    }
    assert_eq!(std::mem::align_of_val(&core.list), 128);
    assert_eq!(std::mem::align_of_val(&core.waiters), 128);
    assert_eq!(std::mem::align_of_val(&core.checkpoints), 128);
    assert_eq!(std::mem::align_of_val(&core.data), 128);
}
