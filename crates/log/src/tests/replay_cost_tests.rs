//! What a replay reads follows the bytes of log and data, not the number of checkpoints and
//! extents.
use super::testing::*;
use crate::Batch;
use crate::replay::ring_reader::WINDOW_BLOCKS;
use crate::replay::verify::{BATCH_BLOCKS, NewData, RUN_BLOCKS, verify};
use cairn_blockdev::{BlockDevice, DeviceError, SimulatedDevice, forward_to_device};
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_format::{BLOCK_SIZE, BlockNumber, EntryFlags, Generation, TREE_FILES};

/// Counts reads.
struct Counting {
    device: SimulatedDevice,
    reads: AtomicU64,
}

impl Counting {
    fn new(device: SimulatedDevice) -> Self {
        Self { device, reads: AtomicU64::new(0) }
    }

    fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }
}

impl BlockDevice for Counting {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.device.read(offset_bytes, buffer)
    }

    forward_to_device!(self => self.device; write, flush, discard, length_bytes, flush_time);
}

/// Windows of the ring, one more for each time that a pass begins in the middle or goes around the
/// end.
const READS_PER_PASS: u64 = LOG_BLOCKS.div_ceil(WINDOW_BLOCKS) + 2;

#[test]
fn a_ring_full_of_small_checkpoints_is_read_in_large_pieces() {
    let mut volume = Volume::new();
    // Twice around the ring, so that old checkpoints of the same epoch stand behind the end.
    for round in 0..6 {
        for item in 0..100 {
            volume.log.wait_durable(volume.put(item, &[round; 20])).unwrap();
        }
        let cut = volume.cut();
        volume.commit(cut);
    }
    for item in 0..200 {
        volume.log.wait_durable(volume.put(item, b"last")).unwrap();
    }
    let device = Counting::new(volume.durable_device());
    let mut items = Items::new();
    let found = replay(&device, &volume.superblock).unwrap();
    assert_eq!(found.chain.len(), 200);
    // Walk, search, verification.
    assert!(
        device.reads() <= 3 * READS_PER_PASS,
        "{} reads for {LOG_BLOCKS} blocks of log",
        device.reads()
    );
    apply(&found, &mut items).unwrap();
    assert_eq!(items.len(), 200);
    assert!(
        device.reads() <= 4 * READS_PER_PASS,
        "{} reads for {LOG_BLOCKS} blocks of log",
        device.reads()
    );
}

/// One checkpoint with `count` extents of a block each, every other block of the volume's data, in
/// an order that jumps.
fn scattered(count: u64) -> (Volume, u64) {
    let volume = Volume::new();
    let mut batch = Batch::new();
    let start = volume.superblock.geometry.data_start().0;
    for index in 0..count {
        let block = BlockNumber(start + 2 * (index * 7 % count));
        let data = [index as u8; BLOCK_SIZE];
        volume.device.write(block.offset_bytes(), &[&data]).unwrap();
        let extent = extent_of(block, &data, volume.running);
        batch.put(TREE_FILES, extent_key(index), &extent.encode(), EntryFlags::NEW_DATA);
    }
    volume.log.wait_durable(volume.log.insert(&mut batch)).unwrap();
    (volume, start)
}

#[test]
fn small_extents_are_verified_in_large_reads() {
    const EXTENTS: u64 = 1000;
    let (volume, _) = scattered(EXTENTS);
    let device = Counting::new(volume.durable_device());
    let found = replay(&device, &volume.superblock).unwrap();
    assert_eq!(found.chain.len(), 1);
    let data_reads = (2 * EXTENTS).div_ceil(RUN_BLOCKS) + 1;
    assert!(
        device.reads() <= 3 * READS_PER_PASS + data_reads,
        "{} reads for {EXTENTS} extents",
        device.reads()
    );
    const { assert!(EXTENTS < BATCH_BLOCKS) }
}

#[test]
fn one_missing_block_among_many_ends_the_chain() {
    let (volume, start) = scattered(500);
    for missing in [0, 250, 499] {
        let device = volume.durable_device();
        device.corrupt(BlockNumber(start + 2 * missing).offset_bytes(), 1, 0x10);
        let found = replay(&device, &volume.superblock).unwrap();
        assert_eq!(found.chain.len(), 0, "{}", found.stopped);
        assert!(
            found.stopped.contains(&format!("block {}", start + 2 * missing)),
            "{}",
            found.stopped
        );
    }
}

#[test]
fn of_several_checkpoints_without_their_data_the_first_counts() {
    let device = SimulatedDevice::new(VOLUME_BYTES);
    let start = geometry().data_start().0;
    // Their order on the device is not their order in the log; one is too far away to be read with
    // the others.
    let blocks = [start + 40, start + 20, start, start + 2 * RUN_BLOCKS];
    let new_data = |broken: &[usize]| -> Vec<NewData> {
        let extent = |(checkpoint, &block): (usize, &u64)| {
            let (data, lost) = ([checkpoint as u8; BLOCK_SIZE], [9; BLOCK_SIZE]);
            let written = if broken.contains(&checkpoint) { &lost } else { &data };
            device.write(BlockNumber(block).offset_bytes(), &[written]).unwrap();
            NewData {
                checkpoint,
                key: extent_key(block),
                extent: extent_of(BlockNumber(block), &data, Generation(1)),
            }
        };
        blocks.iter().enumerate().map(extent).collect()
    };
    assert!(verify(&device, new_data(&[])).unwrap().is_none());
    for (broken, first) in
        [(vec![1, 2], 1), (vec![3, 2], 2), (vec![0], 0), (vec![3], 3), (vec![0, 1, 2, 3], 0)]
    {
        let missing = verify(&device, new_data(&broken)).unwrap().unwrap();
        assert_eq!(missing.checkpoint, first, "{broken:?}");
        assert!(missing.cause.unwrap().contains(&format!("block {}", blocks[first])));
    }
}
