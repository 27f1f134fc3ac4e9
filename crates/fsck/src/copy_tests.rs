//! What two claim, and what of it a repair copies, or calls lost.
use crate::report::{Losses, Report, Statistics};
use crate::test_forks::{FORK, NESTED, full};
use crate::test_volume::TestVolume;
use crate::{CheckOptions, FsckError, check};
use cairn_blockdev::{BlockDevice, DeviceError, MemoryDevice, Operation, forward_to_device};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_format::*;
use std::ops::Range;
use std::sync::Arc;

/// The first file that a volume gets.
const FIRST_FILE: u64 = 16;

/// Two files with the same blocks.
fn twins() -> TestVolume {
    let mut volume = TestVolume::empty();
    let inodes = ["one", "two"].map(|name| volume.make_file(1, name, 9_000));
    assert_eq!(inodes[0], FIRST_FILE);
    let [first, second] = inodes.map(|inode| Key::new(InodeNumber(inode), ItemKind::Extent, 0));
    let extent = volume.items[&first].clone();
    volume.items.insert(second, extent);
    volume
}

fn has(report: &Report, text: &str) -> bool {
    report.findings.iter().any(|finding| finding.to_string().contains(text))
}

#[test]
fn two_files_with_the_same_blocks_get_a_copy_each() {
    let mut volume = twins();
    volume.write();
    let repaired = volume.repair();
    assert_eq!(repaired.losses, Losses::default(), "{repaired}");
    assert!(has(&repaired, "3 blocks that were claimed twice were copied"), "{repaired}");
    volume.assert_clean();
}

#[test]
fn what_finds_no_room_for_a_copy_is_called_lost() {
    let mut volume = twins();
    let allocatable = volume.superblock.geometry.allocatable();
    let (start, free) = (allocatable.start.0, volume.next_data);
    let filled = [(start + 48, start + 1024), (free, allocatable.end().0 - 40)];
    for (name, (from, to)) in ["three", "four"].into_iter().zip(filled) {
        let file = volume.make_file(1, name, 0);
        volume.fill(file, from, to - from);
    }
    volume.write();
    let repaired = volume.repair();
    assert_eq!(repaired.losses.data_blocks, 3, "{repaired}");
    assert!(has(&repaired, "(/two): 3 of 3 blocks of this file (lost)"), "{repaired}");
    volume.assert_clean();
}

/// A device of which parts fail.
struct Failing<'a> {
    device: &'a MemoryDevice,
    /// So many reads of these bytes succeed.
    reads: Mutex<(Range<u64>, u64)>,
    /// What was discarded, in bytes.
    discarded: Mutex<Vec<Range<u64>>>,
    /// So many writes of that fail.
    failing_writes: Mutex<u64>,
}

impl<'a> Failing<'a> {
    fn new(device: &'a MemoryDevice, reads: (Range<u64>, u64), failing_writes: u64) -> Self {
        let (reads, discarded) =
            (Mutex::new(Rank::LEAF, reads), Mutex::new(Rank::LEAF, Vec::new()));
        let failing_writes = Mutex::new(Rank::LEAF, failing_writes);
        Self { device, reads, discarded, failing_writes }
    }

    fn fails_to_write(&self) -> bool {
        let mut left = self.failing_writes.lock();
        let fails = *left > 0;
        *left -= u64::from(fails);
        fails
    }

    fn try_repair(&self) -> Result<Report, FsckError> {
        check(self, &CheckOptions { data: false, repair: true }, &mut |_| {})
    }

    fn repair(&self) -> Report {
        self.try_repair().unwrap()
    }

    fn discarded_blocks(&self) -> u64 {
        self.discarded.lock().iter().map(|range| range.end - range.start).sum::<u64>()
            / BLOCK_SIZE as u64
    }
}

fn failure(operation: Operation, offset_bytes: u64, length: usize) -> DeviceError {
    let error = std::io::Error::other("injected");
    DeviceError::new(operation, offset_bytes, length as u64, &Arc::from("test"), error)
}

impl BlockDevice for Failing<'_> {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let fails = {
            let (bytes, left) = &mut *self.reads.lock();
            let end = offset_bytes + buffer.len() as u64;
            let is_counted = offset_bytes < bytes.end && bytes.start < end;
            let fails = is_counted && *left == 0;
            *left -= u64::from(is_counted && !fails);
            fails
        };
        if fails {
            return Err(failure(Operation::Read, offset_bytes, buffer.len()));
        }
        self.device.read(offset_bytes, buffer)
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let is_in = |range: &Range<u64>| range.contains(&offset_bytes);
        if self.discarded.lock().iter().any(is_in) && self.fails_to_write() {
            return Err(failure(Operation::Write, offset_bytes, buffers.len()));
        }
        self.device.write(offset_bytes, buffers)
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        self.discarded.lock().push(offset_bytes..offset_bytes + length_bytes);
        Ok(())
    }

    forward_to_device!(self => self.device; flush, length_bytes, flush_time);
}

#[test]
fn a_copy_that_cannot_be_written_goes_elsewhere() {
    let mut volume = twins();
    volume.write();
    let repaired = Failing::new(&volume.device, (0..0, 0), 3).repair();
    assert_eq!(repaired.losses, Losses::default(), "{repaired}");
    volume.assert_clean();
}

/// What it could copy another time is not lost.
#[test]
fn a_device_without_room_for_copies_ends_the_repair() {
    let mut volume = twins();
    volume.write();
    let bytes = || {
        let mut bytes = vec![0; volume.device.length_bytes() as usize];
        volume.device.read(0, &mut bytes).unwrap();
        bytes
    };
    let before = bytes();
    let failed = Failing::new(&volume.device, (0..0, 0), u64::MAX).try_repair();
    assert!(matches!(failed, Err(FsckError::Device(_))), "{failed:?}");
    assert!(bytes() == before, "nothing has changed");
    assert_eq!(volume.repair().losses, Losses::default());
    volume.assert_clean();
}

#[test]
fn what_cannot_be_read_any_more_is_called_lost() {
    let mut lost = 0;
    for reads in 0.. {
        let mut volume = twins();
        volume.write();
        let key = Key::new(InodeNumber(FIRST_FILE), ItemKind::Extent, 0);
        let extent = Extent::decode(&volume.items[&key]).unwrap().range();
        let bytes = extent.start.offset_bytes()..extent.end().offset_bytes();
        let device = Failing::new(&volume.device, (bytes, reads), 0);
        let repaired = device.repair();
        // As if the device had been replaced.
        volume.assert_clean();
        if repaired.losses == Losses::default() {
            assert!(has(&repaired, "3 blocks that were claimed twice were copied"), "{repaired}");
            break;
        }
        assert_eq!(repaired.losses.data_blocks, 3, "{reads}: {repaired}");
        assert!(has(&repaired, "3 of 3 blocks of this file (lost)"), "{reads}: {repaired}");
        lost += 1;
    }
    assert!(lost > 2, "reads for the comparison, and that of the copy");
}

/// What is discarded needs not be saved: that is so only if the bitmaps say what was free.
#[test]
fn only_what_is_surely_free_is_discarded() {
    let mut volume = twins();
    volume.write();
    let device = Failing::new(&volume.device, (0..0, 0), 0);
    device.repair();
    assert_eq!(device.discarded_blocks(), 3);
    let allocated = volume.bits(0);
    for block in
        device.discarded.lock().iter().flat_map(|range| {
            range.clone().step_by(BLOCK_SIZE).map(|byte| byte as usize / BLOCK_SIZE)
        })
    {
        assert_eq!(allocated[block / 8] & 1 << (block % 8), 0, "block {block}");
    }
    // An older bitmap stands in for a damaged one.
    let mut volume = twins();
    volume.write();
    volume.flip(volume.superblock.geometry.bitmap_block(0, 1), 100, 1);
    let device = Failing::new(&volume.device, (0..0, 0), 0);
    let repaired = device.repair();
    assert!(has(&repaired, "3 blocks that were claimed twice were copied"), "{repaired}");
    assert_eq!(device.discarded_blocks(), 0);
    volume.assert_clean();
}

#[test]
fn a_fork_without_its_origin_keeps_its_data() {
    let mut built = full();
    built.delete("first");
    built.write();
    let volume = built.volume;
    let repaired = volume.repair();
    assert_eq!(repaired.losses.data_blocks, 0, "{repaired}");
    assert!(has(&repaired, "were copied"), "{repaired}");
    assert!(
        !repaired
            .findings
            .iter()
            .any(|finding| { finding.subvolume == Some(FORK.0) && finding.lost.is_some() }),
        "{repaired}"
    );
}

#[test]
fn a_name_that_goes_is_called_lost() {
    let mut volume = TestVolume::empty();
    let directory = volume.make_directory(1, "first");
    let target = EntryTarget::Inode(InodeNumber(directory), FileType::Directory);
    volume.add_entry(target, 1, "second");
    volume.write();
    let repaired = volume.repair();
    assert_eq!(repaired.losses.names, 1, "{repaired}");
    assert!(has(&repaired, "the name \"") && has(&repaired, "in this directory (lost)"));
    volume.assert_clean();
}

#[test]
fn an_attribute_that_goes_is_counted() {
    let mut volume = TestVolume::empty();
    let file = volume.make_file(1, "file", 0);
    volume.set_xattr(file, "user.large", 60_000);
    volume.write();
    // A leaf with nothing but parts of it.
    let of_parts = |node: &BlockNumber| {
        let node = volume.read_node(*node);
        let kind = ItemKind::XattrPart as u8;
        node.level() == 0 && node.items().all(|(key, _)| key.kind == kind)
    };
    let leaf = volume.nodes.iter().copied().find(of_parts).unwrap();
    volume.flip(leaf, 1000, 1);
    let repaired = volume.repair();
    assert_eq!((repaired.losses.leaves, repaired.losses.attributes), (1, 1), "{repaired}");
    assert!(has(&repaired, "extended attribute \"user.large\" (lost)"), "{repaired}");
    volume.assert_clean();
}

/// Nodes that a fork has made itself are its own, also if they are older than the origin that its
/// item names.
#[test]
fn a_fork_with_a_wrong_origin_keeps_all_that_it_has() {
    let mut whole = full();
    whole.write();
    let before = whole.volume.check().statistics;
    for made in [3392, 12, 11, 10] {
        let mut built = full();
        let item = built.volume.subvolumes.get_mut(&NESTED).unwrap();
        item.origin.as_mut().unwrap().generation = Generation(made);
        built.write();
        let text = format!("subvolume {NESTED} is a fork of the snapshot of {made}");
        let report = built.volume.assert_error(&text);
        assert!(!has(&report, "belongs to tree"), "{report}");
        let repaired = built.volume.repair();
        assert_eq!(repaired.losses, Losses::default(), "{repaired}");
        let report = built.volume.check();
        let after = report.statistics;
        let counts = |of: &Statistics| (of.inodes, of.files, of.directories, of.extents);
        assert_eq!(counts(&after), counts(&before), "{report}\n{repaired}");
        built.volume.assert_clean();
    }
}
