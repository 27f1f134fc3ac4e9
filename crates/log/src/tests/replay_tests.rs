//! What replay accepts, where it stops, and what it refuses.
use super::testing::*;
use crate::{Batch, Replay, ReplayError};
use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_environment::atomic::Ordering;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, Checkpoint, EntryFlags, Extent, ExtentKind, Generation, LogPosition,
    LogSeq, Superblock, TREE_FILES, VolumeId,
};

fn ring_offset(ring_block: u64) -> u64 {
    (geometry().log().start.0 + ring_block) * BLOCK_SIZE as u64
}

/// Three checkpoints of one, two and one block, around the end of the ring.
fn three() -> (Volume, SimulatedDevice) {
    let volume = Volume::new();
    volume.log.wait_durable(volume.put(1, b"first")).unwrap();
    volume.next_inode.store(77, Ordering::Relaxed);
    volume.put(2, &[2; 3000]);
    volume.log.wait_durable(volume.put(3, &[3; 3000])).unwrap();
    volume.log.wait_durable(volume.put(1, b"third")).unwrap();
    let device = volume.durable_device();
    (volume, device)
}

fn accepted(device: &SimulatedDevice, superblock: &Superblock) -> usize {
    let found = replay(device, superblock).unwrap();
    assert!(!found.stopped.is_empty());
    assert_eq!(found.end.sequence, superblock.log_tail.sequence + found.chain.len() as u64);
    assert_eq!(found.checkpoints().filter(Result::is_ok).count(), found.chain.len());
    found.chain.len()
}

#[test]
fn the_chain_is_followed_around_the_end_of_the_ring() {
    let (volume, device) = three();
    let found = replay(&device, &volume.superblock).unwrap();
    assert_eq!(
        found.chain.iter().map(|found| (found.ring_block, found.blocks)).collect::<Vec<_>>(),
        [(253, 1), (254, 2), (0, 1)]
    );
    assert_eq!(
        (found.end, found.last_generation, found.next_inode),
        (LogPosition { block: 1, sequence: 10 }, Generation(11), 77)
    );
    let mut items = Items::new();
    assert_eq!(apply(&found, &mut items).unwrap(), Some(LogSeq(4)));
    assert_eq!(
        items,
        Items::from([
            (key(1), b"third".to_vec()),
            (key(2), vec![2; 3000]),
            (key(3), vec![3; 3000])
        ])
    );
}

#[test]
fn a_superblock_on_which_a_checkpoint_relies_must_be_there() {
    let volume = Volume::new();
    let generation = volume.superblock.generation;
    volume.log.wait_durable(volume.put(1, b"first")).unwrap();
    let committed = generation.next();
    let cut = volume.log.cut(committed.next());
    volume.put(2, b"second");
    volume.log.super_committed(committed);
    let superblock =
        Superblock { generation: committed, log_tail: cut.position, ..volume.superblock.clone() };
    volume.log.wait_durable(volume.put(3, b"third")).unwrap();
    let device = volume.durable_device();

    let found = replay(&device, &superblock).unwrap();
    assert_eq!((found.chain.len(), &found.lost), (1, &None));
    assert_eq!(found.chain[0].header.superblock, committed);
    // With the superblock before it, what the newer one's trees have is in no checkpoint.
    let found = replay(&device, &volume.superblock).unwrap();
    assert_eq!(found.chain.len(), 1);
    assert!(
        found.lost.as_ref().is_some_and(|lost| lost.contains("the superblock of generation")),
        "{:?}",
        found.lost
    );
    // The same where the chain ends before.
    device.corrupt(ring_offset(found.chain[0].ring_block) + 130, 1, 1);
    let found = replay(&device, &volume.superblock).unwrap();
    assert_eq!(found.chain.len(), 0);
    assert!(found.lost.is_some());
}

#[test]
fn a_checkpoint_may_cross_the_end_of_the_ring() {
    let superblock =
        Superblock { log_tail: LogPosition { block: LOG_BLOCKS - 2, sequence: 1 }, ..superblock() };
    let volume = Volume::mount(Volume::new().device, superblock, quiet_options());
    let mut batch = Batch::new();
    (0..5).for_each(|item| {
        batch.put(TREE_FILES, key(item), &[item as u8; 3500], EntryFlags::default())
    });
    volume.log.wait_durable(volume.log.insert(&mut batch)).unwrap();
    assert_eq!(volume.log.statistics().blocks_written, 5);
    assert_eq!(volume.replayed().len(), 5);
}

#[test]
fn damage_anywhere_ends_the_chain_there() {
    let (volume, device) = three();
    let chain = replay(&device, &volume.superblock).unwrap().chain;
    for (index, found) in chain.iter().enumerate() {
        for at in [0, 5, 20, 40, 90, 130] {
            let damaged = device.snapshot();
            damaged.corrupt(ring_offset(found.ring_block) + at, 1, 0x10);
            assert_eq!(
                accepted(&damaged, &volume.superblock),
                index,
                "byte {at} of checkpoint {index}"
            );
        }
    }
}

#[test]
fn only_the_superblocks_epoch_volume_and_sequence_count() {
    let (volume, device) = three();
    let superblock = &volume.superblock;
    assert_eq!(accepted(&device, superblock), 3);
    assert_eq!(
        accepted(
            &device,
            &Superblock { log_epoch: superblock.log_epoch + 1, ..superblock.clone() }
        ),
        0
    );
    assert_eq!(
        accepted(&device, &Superblock { volume: VolumeId([9; 16]), ..superblock.clone() }),
        0
    );
    let tail = LogPosition { sequence: 8, ..superblock.log_tail };
    assert_eq!(accepted(&device, &Superblock { log_tail: tail, ..superblock.clone() }), 0);
    let tail = LogPosition { block: 254, sequence: 8 };
    assert_eq!(accepted(&device, &Superblock { log_tail: tail, ..superblock.clone() }), 2);
}

#[test]
fn the_next_mount_continues_where_the_chain_ends_and_ignores_what_follows() {
    let (volume, device) = three();
    device.corrupt(ring_offset(254) + 60, 1, 1);
    let found = replay(&device, &volume.superblock).unwrap();
    assert_eq!(found.chain.len(), 1);
    let superblock = Superblock {
        log_epoch: 3,
        log_tail: found.end,
        generation: Generation(11),
        ..volume.superblock.clone()
    };
    let next = Volume::mount(device.snapshot().into(), superblock, quiet_options());
    next.put(20, &[1; 3000]);
    next.log.wait_durable(next.put(21, &[1; 3000])).unwrap();
    // The third checkpoint of the first mount stands behind it, with the right sequence.
    assert_eq!(next.replayed().keys().copied().collect::<Vec<_>>(), [key(20), key(21)]);
}

#[test]
fn a_clean_volume_has_nothing_to_replay() {
    let mut volume = three().0;
    let cut = volume.cut();
    volume.commit(cut);
    let superblock = Superblock { clean: true, ..volume.superblock.clone() };
    let device = volume.durable_device();
    let found = replay(&device, &superblock).unwrap();
    assert_eq!((found.chain.len(), found.end, found.next_inode), (0, superblock.log_tail, 5));
    // A volume that never logged anything.
    let blank = SimulatedDevice::new(VOLUME_BYTES);
    let superblock = Superblock { log_tail: LogPosition::default(), ..superblock };
    assert_eq!(replay(&blank, &superblock).unwrap().end, LogPosition { block: 0, sequence: 1 });
}

fn with_data() -> (Volume, BlockNumber) {
    let volume = Volume::new();
    let start = geometry().data_start();
    for item in 0..4 {
        volume
            .log
            .wait_durable(volume.put_data(item, BlockNumber(start.0 + item), item as u8 + 1))
            .unwrap();
    }
    (volume, start)
}

#[test]
fn missing_data_ends_the_chain_unless_a_flush_was_seen_after_it() {
    let (volume, start) = with_data();
    let device = volume.durable_device();
    assert_eq!(accepted(&device, &volume.superblock), 4);
    // The last checkpoint says that the first three were flushed: their data is not looked at.
    device.corrupt(start.offset_bytes(), 1, 1);
    assert_eq!(accepted(&device, &volume.superblock), 4);
    device.corrupt(BlockNumber(start.0 + 3).offset_bytes() + 4000, 1, 1);
    let found = replay(&device, &volume.superblock).unwrap();
    assert_eq!(found.chain.len(), 3);
    assert!(found.stopped.contains("was not written"), "{}", found.stopped);
}

#[test]
fn data_that_the_superblock_covers_is_not_looked_at() {
    let mut volume = Volume::new();
    let start = geometry().data_start();
    volume.put_data(0, start, 1);
    let cut = volume.cut();
    volume.log.wait_durable(volume.put(1, b"next")).unwrap();
    let device = volume.durable_device();
    device.corrupt(start.offset_bytes(), 1, 1);
    assert_eq!(accepted_chain(&replay(&device, &volume.superblock).unwrap()), 0);
    volume.commit(cut);
    assert_eq!(accepted_chain(&replay(&device, &volume.superblock).unwrap()), 2);
}

fn accepted_chain(found: &Replay<'_>) -> usize {
    found.chain.len()
}

#[test]
fn an_extent_outside_the_volumes_data_is_damage() {
    let last = geometry().superblock_copy();
    for (start, blocks) in
        [(BlockNumber(70), 1), (last, 1), (BlockNumber(last.0 - 1), 2), (BlockNumber(1 << 60), 1)]
    {
        let volume = Volume::new();
        let extent = Extent {
            start,
            blocks,
            kind: ExtentKind::Unwritten,
            generation: volume.running,
            written: volume.running,
            checksums: vec![],
        };
        let mut batch = Batch::new();
        batch.put(TREE_FILES, extent_key(0), &extent.encode(), EntryFlags::default());
        volume.log.wait_durable(volume.log.insert(&mut batch)).unwrap();
        let device = volume.durable_device();
        let error = replay(&device, &volume.superblock).err().expect("refused");
        assert!(
            matches!(&error, ReplayError::Damaged(_)) && error.to_string().contains("outside"),
            "{error}"
        );
    }
    let volume = Volume::new();
    let mut batch = Batch::new();
    batch.put(TREE_FILES, extent_key(0), b"nonsense", EntryFlags::NEW_DATA);
    volume.log.wait_durable(volume.log.insert(&mut batch)).unwrap();
    assert!(matches!(
        replay(&volume.durable_device(), &volume.superblock),
        Err(ReplayError::Damaged(_))
    ));
}

#[test]
fn a_device_error_is_never_taken_for_the_end_of_the_chain() {
    let (volume, start) = with_data();
    for range in [ring_offset(253)..ring_offset(254), ring_offset(0)..ring_offset(1), {
        let last = BlockNumber(start.0 + 3).offset_bytes();
        last..last + 1
    }] {
        let device = volume.durable_device();
        device.fail_range(Operation::Read, range);
        assert!(matches!(replay(&device, &volume.superblock), Err(ReplayError::Device(_))));
    }
}

#[test]
fn impossible_lengths_are_not_believed() {
    let (volume, device) = three();
    let mut block = vec![0; BLOCK_SIZE];
    device.read(ring_offset(253), &mut block).unwrap();
    for length in [0_u32, 1, 47, 5000, 1 << 20, u32::MAX] {
        block[12..16].copy_from_slice(&length.to_le_bytes());
        device.write(ring_offset(253), &[&block]).unwrap();
        assert_eq!(accepted(&device, &volume.superblock), 0, "length {length}");
    }
    assert!(Checkpoint::blocks_announced(&block).is_some_and(|blocks| blocks > LOG_BLOCKS));
}
