//! Data that the log writes: what counts as durable, what a failure means, what a commit waits for.
use super::testing::*;
use cairn_blockdev::simulated::{EventInfo, Fate};
use cairn_blockdev::{BlockDevice, Operation};
use cairn_environment::thread;
use cairn_format::{BLOCK_SIZE, BlockNumber, EntryFlags, Generation, Superblock};
use std::sync::Arc;

fn block(index: u64) -> BlockNumber {
    BlockNumber(geometry().data_start().0 + index)
}

fn bytes_of(block: BlockNumber) -> std::ops::Range<u64> {
    block.offset_bytes()..block.offset_bytes() + BLOCK_SIZE as u64
}

fn holds(device: &dyn BlockDevice, block: BlockNumber, fill: u8) -> bool {
    let mut bytes = vec![0; BLOCK_SIZE];
    device.read(block.offset_bytes(), &mut bytes).unwrap();
    bytes == [fill; BLOCK_SIZE]
}

#[test]
fn data_and_checkpoint_share_one_flush() {
    let volume = Volume::new();
    volume.device.start_recording();
    let tickets: Vec<_> = (0..10)
        .map(|index| volume.put_carried(index, block(9 - index), index as u8 + 1).1)
        .collect();
    assert!(
        tickets.iter().all(|ticket| ticket.outcome().is_none())
            && volume.device.unflushed().is_empty()
    );
    assert_eq!(volume.log.unwritten_blocks(), 10);
    volume.log.wait_durable(volume.log.last()).unwrap();
    assert!(tickets.iter().all(|ticket| matches!(ticket.outcome(), Some(Ok(())))));
    assert_eq!(volume.log.unwritten_blocks(), 0);
    let survivor = volume.durable_device();
    assert!((0..10).all(|index| holds(&survivor, block(9 - index), index as u8 + 1)));
    // Neighbours go in one write, whatever the order in which they came.
    let explorer = volume.device.explorer();
    let events: Vec<_> =
        (0..explorer.history_len()).filter_map(|index| explorer.event(index)).collect();
    assert!(
        matches!(events[..], [EventInfo::Write { .. }, EventInfo::Write { .. }, EventInfo::Flush]),
        "{events:?}"
    );
    assert_eq!(volume.replayed().len(), 10);
}

/// The checkpoint may be on the medium before its data: then it must not count.
#[test]
fn without_its_data_a_checkpoint_does_not_count() {
    let volume = Volume::new();
    volume.put(1, b"before");
    volume.log.wait_durable(volume.log.last()).unwrap();
    volume.put_carried(0, block(0), 7);
    crate::lead::push(&volume.log.core, 0);
    let ring = geometry().log();
    let survivor = volume.device.crash_state_with(|unflushed| {
        let in_ring =
            |offset: u64| (ring.start.offset_bytes()..ring.end().offset_bytes()).contains(&offset);
        unflushed
            .iter()
            .map(|write| if in_ring(write.offset_bytes) { Fate::Written } else { Fate::Lost })
            .collect()
    });
    let mut items = Items::new();
    apply(&replay(&survivor, &volume.superblock).unwrap(), &mut items).unwrap();
    assert_eq!(items, Items::from([(key(1), b"before".to_vec())]));
}

#[test]
fn a_write_that_fails_is_tried_again_alone() {
    let volume = Volume::new();
    volume.device.fail_next(Operation::Write, 1);
    let tickets: Vec<_> =
        (0..3).map(|index| volume.put_carried(index, block(index), 5).1).collect();
    // The first write to fail might be the checkpoint's, which is not tried again: let the commit
    // write the data.
    volume.log.write_data().unwrap();
    assert!(tickets.iter().all(|ticket| matches!(ticket.outcome(), Some(Ok(())))));
    assert_eq!(volume.log.data_losses(), 0);
    volume.log.wait_durable(volume.log.last()).unwrap();
    assert_eq!(volume.replayed().len(), 3);
}

/// One file's data is lost; the others of the group, and those of later groups, are durable all the
/// same, although nothing later proves that their checkpoints were flushed.
#[test]
fn lost_data_ends_no_chain() {
    let volume = Volume::new();
    volume.device.fail_range(Operation::Write, bytes_of(block(1)));
    let tickets: Vec<_> =
        (0..3).map(|index| volume.put_carried(index, block(index), 5).1).collect();
    volume.log.wait_durable(volume.log.last()).unwrap();
    let outcomes: Vec<bool> =
        tickets.iter().map(|ticket| ticket.outcome().unwrap().is_ok()).collect();
    assert_eq!((outcomes, volume.log.data_losses()), (vec![true, false, true], 1));
    assert_eq!(volume.replayed().len(), 3);
    // The extent is logged again, marked as if its data were new.
    let mut batch = crate::Batch::new();
    let extent = extent_of(block(1), &[5; BLOCK_SIZE], volume.running);
    batch.put(cairn_format::TREE_FILES, extent_key(1), &extent.encode(), EntryFlags::NEW_DATA);
    volume.log.insert(&mut batch);
    let (last, _) = volume.put_carried(4, block(4), 6);
    volume.log.wait_durable(last).unwrap();
    assert_eq!(volume.replayed().len(), 4);
    assert!(holds(&volume.durable_device(), block(4), 6));
}

/// Once their transaction is durable, lost blocks may hold something new.
#[test]
fn blocks_count_as_lost_until_their_transaction_is_durable() {
    let mut volume = Volume::new();
    volume.device.fail_range(Operation::Write, bytes_of(block(1)));
    volume.put_carried(1, block(1), 5);
    let cut = volume.cut();
    volume.commit(cut);
    assert_eq!(volume.log.data_losses(), 1);
    volume.device.clear_failures();
    let flushes = volume.log.statistics().flushes;
    let (last, ticket) = volume.put_carried(1, block(1), 6);
    volume.log.wait_durable(last).unwrap();
    assert!(matches!(ticket.outcome(), Some(Ok(()))));
    assert_eq!(volume.log.statistics().flushes, flushes + 1, "nothing special about this group");
    let survivor = volume.durable_device();
    let found = replay(&survivor, &volume.superblock).unwrap();
    let flags: Vec<_> = found
        .checkpoints()
        .flat_map(|checkpoint| {
            checkpoint.unwrap().entries().map(|entry| entry.flags).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(flags, [EntryFlags::NEW_DATA]);
}

#[test]
fn a_failed_checkpoint_write_settles_the_data_and_fails_everybody() {
    let volume = Volume::new();
    let ring = geometry().log();
    volume
        .device
        .fail_range(Operation::Write, ring.start.offset_bytes()..ring.end().offset_bytes());
    let (last, ticket) = volume.put_carried(1, block(1), 5);
    assert!(volume.log.wait_durable(last).is_err());
    assert!(matches!(ticket.outcome(), Some(Ok(()))));
    volume.put_carried(2, block(2), 5);
    assert_eq!(volume.log.unwritten_blocks(), 0, "a dead log keeps nothing");
    assert!(volume.log.write_data().is_err(), "a commit must not go on without the data");
}

/// Blocks stop to count as lost when their superblock is durable, also in the middle of a push that
/// began before.
#[test]
fn a_superblock_in_the_middle_of_a_push_takes_no_checkpoint_away() {
    let mut volume = Volume::new();
    volume.device.fail_range(Operation::Write, bytes_of(block(1)));
    volume.put_carried(1, block(1), 5);
    let cut = volume.cut();
    volume.log.write_data().unwrap();
    assert_eq!(volume.log.data_losses(), 1);
    volume.device.clear_failures();
    // The push waits for data that somebody else took.
    volume.put_carried(5, block(5), 7);
    let taken = volume.log.core.data.take();
    let (last, ticket) = volume.put_carried(2, block(2), 6);
    let log = Arc::clone(&volume.log);
    let waiter = thread::spawn("fsync", move || log.wait_durable(last));
    while ticket.outcome().is_none() {
        thread::yield_now();
    }
    let generation = Generation(volume.running.0 - 1);
    volume.superblock =
        Superblock { generation, log_tail: cut.position, ..volume.superblock.clone() };
    volume.log.super_committed(generation);
    volume.log.core.data.write(taken, Vec::new(), &mut || {}).unwrap();
    waiter.join().unwrap().unwrap();
    assert_eq!(volume.replayed().len(), 2, "what was acknowledged is in the log");
}

/// While a group's data is under way, a commit waits for it.
#[test]
fn a_commit_waits_for_what_others_took() {
    let volume = Volume::new();
    volume.put_carried(1, block(1), 5);
    let batch = volume.log.core.data.take();
    let log = Arc::clone(&volume.log);
    let (send, returned) = std::sync::mpsc::channel();
    let committer = thread::spawn("commit", move || {
        log.write_data().unwrap();
        send.send(()).unwrap();
    });
    for _ in 0..1000 {
        thread::yield_now();
    }
    assert!(returned.try_recv().is_err(), "the data is not written");
    volume.log.core.data.write(batch, Vec::new(), &mut || {}).unwrap();
    returned.recv().unwrap();
    committer.join().unwrap();
    assert!(holds(&volume.device.snapshot(), block(1), 5));
}

/// Operations that undid each other leave no checkpoint, but their data: until it is written, none
/// of them counts as written, or the flush of a group in flight would tell their fsyncs so.
#[test]
fn operations_without_a_checkpoint_are_written_when_their_data_is() {
    let volume = Volume::new();
    let data = [5; BLOCK_SIZE];
    let (write, ticket) = volume.carried(block(1), &data);
    let mut batch = crate::Batch::new();
    let extent = extent_of(block(1), &data, volume.running);
    batch.put_new(cairn_format::TREE_FILES, extent_key(1), &extent.encode(), EntryFlags::NEW_DATA);
    volume.log.insert_with_data(&mut batch, vec![write]);
    batch.delete(cairn_format::TREE_FILES, extent_key(1));
    let last = volume.log.insert(&mut batch);
    let core = &volume.log.core;
    let taken = core.data.take();
    let log = Arc::clone(&volume.log);
    let waiter = thread::spawn("fsync", move || log.wait_durable(last));
    // It waits for the data that somebody else took.
    while !core.waiters.is_led() {
        thread::yield_now();
    }
    for _ in 0..1000 {
        thread::yield_now();
        assert!(ticket.outcome().is_none() && core.checkpoints.written_last() < last);
    }
    core.data.write(taken, Vec::new(), &mut || {}).unwrap();
    waiter.join().unwrap().unwrap();
    assert!(matches!(ticket.outcome(), Some(Ok(()))) && core.checkpoints.written_last() == last);
    assert_eq!(volume.log.statistics().checkpoints, 0);
}

/// What a thread took that panicked is neither written nor lost: nobody waits for it, and nobody
/// believes it.
#[test]
fn a_panic_with_data_under_way_ends_the_waits_for_it() {
    let volume = Volume::new();
    let (last, ticket) = volume.put_carried(1, block(1), 5);
    let log = Arc::clone(&volume.log);
    let taker = thread::spawn("taker", move || {
        let _batch = log.core.data.take();
        panic!("on purpose");
    });
    assert!(taker.join().is_err());
    assert!(volume.log.write_data().is_err());
    assert!(volume.log.wait_durable(last).is_err());
    assert!(ticket.outcome().is_none());
}

/// A callback that panics takes its leader along, and with it the log, but none of those who wait.
#[test]
fn a_panic_of_the_leader_ends_every_wait() {
    let volume = Volume::new();
    volume.put(1, b"one");
    let log = Arc::clone(&volume.log);
    let leader = thread::spawn("leader", move || {
        log.on_durable(log.last(), Box::new(|_| panic!("on purpose")))
    });
    assert!(leader.join().is_err());
    volume.put(2, b"two");
    assert!(volume.log.wait_durable(volume.log.last()).is_err());
    volume.log.stop();
}
