//! What a repair restores, and that it never leaves half a volume.
use crate::test_volume::*;
use crate::{CheckOptions, Report, Severity, check};
use cairn_blockdev::{BlockDevice, DeviceError, MemoryDevice, forward_to_device};
use cairn_format::*;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn key(inode: u64, kind: ItemKind, offset: u64) -> Key {
    Key::new(InodeNumber(inode), kind, offset)
}

fn names(report: &Report) -> (u64, u64) {
    (report.statistics.files, report.statistics.directories)
}

#[test]
fn a_repair_of_a_whole_volume_changes_nothing() {
    let volume = TestVolume::full();
    let before = image(&volume.device);
    assert_eq!(volume.repair().exit_code(), 0);
    assert!(before == image(&volume.device));
}

#[test]
fn leaves_below_a_damaged_inner_node_are_found_again() {
    let volume = TestVolume::full();
    let before = volume.check();
    let inner = volume.nodes.iter().copied().filter(|&node| volume.read_node(node).level() > 0);
    for address in inner {
        let copy = TestVolume::full();
        copy.flip(address, 200, 0x11);
        copy.assert_error("checksum mismatch");
        let repaired = copy.repair();
        assert_eq!(repaired.exit_code(), 1, "{repaired}");
        let after = copy.check();
        assert_eq!(
            (after.errors, names(&after), after.statistics.items),
            (0, names(&before), before.statistics.items),
            "{repaired}"
        );
        assert!(
            repaired.findings.iter().any(|finding| finding.problem.contains("found again")),
            "{repaired}"
        );
    }
}

#[test]
fn a_damaged_leaf_costs_what_it_held() {
    let whole = TestVolume::full();
    let items = whole.check().statistics.items;
    for &address in whole.nodes.iter().filter(|&&node| whole.read_node(node).level() == 0) {
        let volume = TestVolume::full();
        let (is_roots, held) = (
            whole.read_node(address).tree() == TREE_ROOTS,
            whole.read_node(address).count() as u64,
        );
        volume.flip(address, 300, 0x01);
        volume.assert_repairable();
        let after = volume.check();
        // An inode that lost its items is gone, one that lost its name is in lost+found; so there
        // may be more items than were left.
        let least = if is_roots { items } else { items - 3 * held };
        assert!(
            after.statistics.items >= least,
            "leaf {address}: {} items of {items}, {held} in the leaf",
            after.statistics.items
        );
    }
}

#[test]
fn what_lost_its_name_moves_to_lost_and_found() {
    let mut volume = TestVolume::unwritten();
    let (name, _) = TestVolume::entry(58, 1, "large", 0o100_644);
    let (second, _) = TestVolume::entry(58, 16, "other name", 0o100_644);
    volume.items.remove(&name).unwrap();
    volume.items.remove(&second).unwrap();
    volume.write();
    let report = volume.repair();
    assert!(
        report
            .findings
            .iter()
            .any(|finding| finding.problem == "1 inodes without a name moved to /lost+found"),
        "{report}"
    );
    let after = volume.check();
    assert!(
        after.errors == 0 && after.statistics.files == 43 && after.statistics.directories == 4,
        "{after}"
    );
    let text = crate::dump::dump_tree(&volume.device, TREE_FILES, None).unwrap().to_string();
    assert!(text.contains("\"lost+found\"") && text.contains("\"#58\""), "{text}");
}

#[test]
fn blocks_that_two_files_claim_go_to_the_one_whose_checksums_match() {
    let mut volume = TestVolume::unwritten();
    let (first, second) = (key(21, ItemKind::Extent, 0), key(22, ItemKind::Extent, 0));
    let right = Extent::decode(&volume.items[&second]).unwrap();
    let wrong = Extent { checksums: vec![1; right.blocks as usize], ..right.clone() };
    volume.items.insert(first, wrong.encode());
    volume.change_inode(21, |item| item.blocks = right.blocks);
    volume.write();
    volume.assert_error("referred to twice");
    assert_eq!(volume.repair().exit_code(), 1);
    let after = volume.check();
    assert_eq!(
        (after.errors, after.statistics.data_blocks_verified),
        (0, after.statistics.data_blocks),
        "{after}"
    );
    let text = crate::dump::dump_tree(&volume.device, TREE_FILES, None).unwrap().to_string();
    assert!(text.contains("(22 Extent 0)") && !text.contains("(21 Extent 0)"), "{text}");
}

#[test]
fn of_extents_that_overlap_each_file_block_is_kept_once() {
    // The older extent continues behind the newer one, which lies within it. The last one's data
    // does not match.
    let mut volume = TestVolume::unwritten();
    let file = volume.make_file(1, "overlap", 0);
    volume.change_inode(file, |item| item.size = 9 * 4096);
    volume.add_extent(file, 0, 8, ExtentKind::Data);
    volume.add_extent(file, 3, 2, ExtentKind::Data);
    volume.add_extent(file, 6, 3, ExtentKind::Data);
    let extent = |volume: &TestVolume, block| {
        Extent::decode(&volume.items[&key(file, ItemKind::Extent, block)]).unwrap()
    };
    let (older, newer) = (extent(&volume, 0), extent(&volume, 3));
    let damaged = Extent { checksums: vec![1; 3], ..extent(&volume, 6) };
    let generation = Generation(newer.generation.0 - 1);
    let older = Extent { generation, written: generation, ..older };
    volume.items.insert(key(file, ItemKind::Extent, 0), older.encode());
    volume.items.insert(key(file, ItemKind::Extent, 6), damaged.encode());
    volume.write();
    volume.assert_error("inside the extent before it");
    assert_eq!(volume.repair().exit_code(), 1);
    let after = volume.check();
    assert!(after.errors == 1 && after.findings[0].pass == crate::PassId::Data, "{after}");
    let text = crate::dump::dump_tree(&volume.device, TREE_FILES, None).unwrap().to_string();
    let lines: Vec<&str> =
        text.lines().filter(|line| line.contains(&format!("({file} Extent "))).collect();
    let expected =
        [(0, older.start.0), (3, newer.start.0), (5, older.start.0 + 5), (8, damaged.start.0 + 2)];
    assert_eq!(lines.len(), expected.len(), "{lines:?}");
    for (line, (block, start)) in lines.iter().zip(expected) {
        assert!(
            line.contains(&format!("({file} Extent {block})")) && line.contains(&start.to_string()),
            "{line}: not {block} at {start}"
        );
    }
}

#[test]
fn an_inode_beyond_all_numbers_is_left_out() {
    let mut volume = TestVolume::unwritten();
    let item = inode_item(0o100_644, 1, 0);
    volume.put_inode(INODE_NUMBER_END + 3, &item);
    volume.put_inode(INODE_NUMBER_END - 1, &item);
    volume.write();
    volume.assert_error("was never allocated");
    volume.assert_repairable();
    // The last possible number was taken, so lost+found got the first free one.
    let text = crate::dump::dump_tree(&volume.device, TREE_FILES, None).unwrap().to_string();
    assert!(
        text.contains(&format!("\"#{}\"", INODE_NUMBER_END - 1))
            && !text.contains(&(INODE_NUMBER_END + 3).to_string()),
        "{text}"
    );
}

#[test]
fn counters_at_their_end_forbid_a_repair() {
    let changes: [fn(&mut Superblock, u64); 2] =
        [|s, end| s.log_epoch = end, |s, end| s.log_tail.sequence = end];
    for change in changes {
        // At the very end of its counters the volume can be mounted, but could not be after a
        // repair, which raises them.
        for (end, forbidden) in
            [(COUNTER_WRITABLE_MAX - 2, false), (COUNTER_WRITABLE_MAX, true), (COUNTER_MAX, true)]
        {
            let mut volume = TestVolume::unwritten();
            change(&mut volume.superblock, end);
            volume.change_inode(17, |item| item.links = 77);
            volume.write();
            let before = image(&volume.device);
            let report = volume.repair();
            assert_eq!(
                report.to_string().contains("a counter is at its end"),
                forbidden,
                "{report}"
            );
            assert_eq!(before == image(&volume.device), forbidden);
        }
    }
}

/// A volume whose counters reached that while it was mounted is whole. The report says why the next
/// mount refuses to write.
#[test]
fn counters_at_their_end_are_no_damage() {
    let changes: [fn(&mut Superblock, u64); 2] =
        [|s, end| s.log_epoch = end, |s, end| s.log_tail.sequence = end];
    for change in changes {
        for (end, warns) in [(COUNTER_WRITABLE_MAX, false), (COUNTER_WRITABLE_MAX + 1, true)] {
            let mut volume = TestVolume::unwritten();
            change(&mut volume.superblock, end);
            volume.write();
            let report = volume.check();
            assert_eq!(report.errors, 0, "{report}");
            assert_eq!(
                report.to_string().contains("the volume can only be read"),
                warns,
                "{report}"
            );
            let before = image(&volume.device);
            assert!(
                volume.repair().errors == 0 && before == image(&volume.device),
                "there is nothing to repair"
            );
        }
    }
}

#[test]
fn a_strange_item_in_the_root_tree_brings_nothing_back_that_was_removed() {
    let undecodable: (Key, Vec<u8>) = (key(700, ItemKind::XattrPart, 9), Vec::new());
    let second =
        |root| (Key { offset: 7, ..Key::root(TREE_FILES) }, RootItem { root }.encode().to_vec());
    for with_second in [false, true] {
        let mut volume = TestVolume::unwritten();
        let kept = volume.items.clone();
        volume.make_file(1, "removed", 0);
        let older: Vec<_> = std::mem::replace(&mut volume.items, kept).into_iter().collect();
        let (older, newer) =
            (volume.write_tree(TREE_FILES, older), volume.items.clone().into_iter().collect());
        let root = volume.write_tree(TREE_FILES, newer);
        let strange = if with_second { second(older) } else { undecodable.clone() };
        volume.write_root_tree(vec![
            (Key::root(TREE_FILES), RootItem { root }.encode().to_vec()),
            strange,
        ]);
        volume.assert_error("root");
        assert_eq!(volume.repair().exit_code(), 1);
        volume.assert_clean();
        let text = crate::dump::dump_tree(&volume.device, TREE_FILES, None).unwrap().to_string();
        assert!(text.contains("\"large\"") && !text.contains("\"removed\""), "{text}");
    }
}

#[test]
fn a_lost_root_directory_is_made_anew() {
    let mut volume = TestVolume::unwritten();
    volume.items.remove(&key(1, ItemKind::Inode, 0)).unwrap();
    volume.write();
    volume.assert_repairable();
    assert_eq!(names(&volume.check()), (43, 3));
}

#[test]
fn without_room_nothing_is_changed() {
    // As many blocks are left as the nodes of the volume take.
    let with_room_for = |nodes: u64| {
        let mut volume = TestVolume::unwritten();
        volume.change_inode(17, |item| item.links = 77);
        let allocatable = volume.superblock.geometry.allocatable();
        let (start, data, free) =
            (allocatable.start.0, allocatable.start.0 + 1024, volume.next_data);
        for (name, from, to) in
            [("one", start + nodes * NODE_BLOCKS, data), ("two", free, allocatable.end().0)]
        {
            let file = volume.make_file(1, name, 0);
            volume.fill(file, from, to - from);
        }
        volume.write();
        volume
    };
    let volume = (20..80)
        .map(|nodes| (nodes, with_room_for(nodes)))
        .find(|(nodes, volume)| volume.nodes.len() as u64 == *nodes)
        .unwrap()
        .1;
    let before = image(&volume.device);
    let report = volume.repair();
    assert_eq!(report.exit_code(), 4);
    assert!(report.to_string().contains("not enough free space"), "{report}");
    assert!(counting(&before, &image(&volume.device)) < 4096);
    volume.assert_error("links");
}

fn image(device: &MemoryDevice) -> Vec<u8> {
    let mut bytes = vec![0; device.length_bytes() as usize];
    device.read(0, &mut bytes).unwrap();
    bytes
}

fn counting(one: &[u8], other: &[u8]) -> usize {
    one.chunks(4096).zip(other.chunks(4096)).filter(|(one, other)| one != other).count()
}

/// Fails every write after the first few. The rest is what a crash leaves.
struct StoppingDevice<'a> {
    device: &'a MemoryDevice,
    writes_left: AtomicU64,
}

impl BlockDevice for StoppingDevice<'_> {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let left = self.writes_left.load(Ordering::Relaxed);
        self.writes_left.store(left.saturating_sub(1), Ordering::Relaxed);
        match left {
            0 => self.device.write(1 << 40, buffers),
            // The last one is torn.
            1 => self.device.write(
                offset_bytes,
                &[&[buffers[0][..2048].to_vec(), vec![0xee; buffers[0].len() - 2048]].concat()],
            ),
            _ => self.device.write(offset_bytes, buffers),
        }
    }
    fn flush_time(&self) -> Duration {
        Duration::ZERO
    }
    forward_to_device!(self => self.device; read, flush, discard, length_bytes);
}

/// Notes whether there was a write before the first flush.
struct FlushWitness<'a> {
    device: &'a MemoryDevice,
    flushes: AtomicU64,
    writes_before: AtomicU64,
}

impl BlockDevice for FlushWitness<'_> {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.writes_before
            .fetch_add(u64::from(self.flushes.load(Ordering::Relaxed) == 0), Ordering::Relaxed);
        self.device.write(offset_bytes, buffers)
    }
    fn flush(&self) -> Result<(), DeviceError> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.device.flush()
    }
    forward_to_device!(self => self.device; read, discard, length_bytes, flush_time);
}

/// What a killed process left can be read before it is durable.
#[test]
fn a_repair_makes_durable_what_it_relies_on() {
    let leaf_and_bitmap: [fn(&TestVolume); 2] = [
        |volume| volume.flip(*volume.nodes.last().unwrap(), 300, 0x01),
        |volume| volume.flip(volume.superblock.geometry.bitmap_block(0, 0), 300, 0x01),
    ];
    for damage in leaf_and_bitmap {
        let volume = TestVolume::full();
        damage(&volume);
        let device = FlushWitness {
            device: &volume.device,
            flushes: AtomicU64::new(0),
            writes_before: AtomicU64::new(0),
        };
        let report =
            check(&device, &CheckOptions { data: true, repair: true }, &mut |_| {}).unwrap();
        assert_eq!(
            (report.exit_code(), device.writes_before.load(Ordering::Relaxed)),
            (1, 0),
            "{report}"
        );
    }
}

#[test]
fn a_repair_that_is_cut_short_at_any_write_leaves_the_volume_as_it_was_or_whole() {
    let options = CheckOptions { data: true, repair: true };
    let mut states = (0, 0);
    for writes in 1.. {
        let mut volume = TestVolume::unwritten();
        volume.change_inode(17, |item| item.links = 77);
        volume.write();
        let before = volume.check();
        let device = StoppingDevice { device: &volume.device, writes_left: AtomicU64::new(writes) };
        let finished = check(&device, &options, &mut |_| {}).is_ok()
            && device.writes_left.load(Ordering::Relaxed) > 0;
        if finished {
            break;
        }
        let after = volume.check();
        let errors = after.findings.iter().filter(|finding| {
            finding.severity == Severity::Error && finding.pass != crate::PassId::Superblocks
        });
        match errors.count() as u64 {
            0 => states.1 += 1,
            // Links are wrong as before, and nothing else.
            _ => {
                assert_eq!(after.errors, before.errors, "after {writes} writes: {after}");
                states.0 += 1;
            }
        }
        volume.assert_repairable();
    }
    assert!(states.0 > 4 && states.1 > 1, "{states:?}");
}

/// If a repair does not end, the next one needs the leaves that it found, even if no bitmap marks
/// them used.
#[test]
fn a_repair_overwrites_no_leaf_that_it_has_found_again() {
    let whole = TestVolume::full();
    let (before, groups) = (whole.check(), whole.superblock.geometry.groups());
    let inner = whole.nodes.iter().copied().filter(|&node| whole.read_node(node).level() > 0);
    let bitmaps = (0..groups)
        .flat_map(|group| [0, 1].map(|slot| whole.superblock.geometry.bitmap_block(group, slot)));
    let damaged: Vec<BlockNumber> = inner.chain(bitmaps).collect();
    for writes in 1.. {
        let volume = TestVolume::full();
        damaged.iter().for_each(|&address| volume.flip(address, 200, 0x11));
        let device = StoppingDevice { device: &volume.device, writes_left: AtomicU64::new(writes) };
        let result = check(&device, &CheckOptions { data: true, repair: true }, &mut |_| {});
        assert_eq!(volume.repair().errors, 0, "after {writes} writes");
        let after = volume.check();
        assert_eq!(
            (after.errors, names(&after)),
            (0, names(&before)),
            "after {writes} writes: {after}"
        );
        if result.is_ok() && device.writes_left.load(Ordering::Relaxed) > 0 {
            break;
        }
    }
}

/// Zeros in a slot 1 stand for a bitmap as mkfs makes it. The slot of a bitmap that is cleared has
/// them, too.
#[test]
fn a_repaired_volume_has_newer_bitmaps_than_zeros_stand_for() {
    for (generation, slot_0) in [(0, 7), (0, 0), (1, 7), (1, 1), (1, 0), (5, 1), (5, 0)] {
        let mut volume = TestVolume::unwritten();
        volume.superblock.features.incompatible |= Features::IMPLICIT_BITMAPS;
        volume.write();
        volume.superblock.generation = Generation(generation);
        for address in volume.superblock_places() {
            volume.write_block(address, &volume.superblock.encode(address));
        }
        for (slot, generation) in [(0, slot_0), (1, 8)] {
            for group in 0..volume.superblock.geometry.groups() {
                let generation = Generation(generation);
                volume.write_bitmap(slot, &Bitmap { group, generation, bits: volume.bits(group) });
            }
        }
        let report = volume.check();
        assert!(report.warnings + report.errors > 0, "{report}");
        volume.assert_repairable();
    }
}
