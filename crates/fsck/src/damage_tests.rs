//! Physical damage: flipped bytes in every structure, lost writes, torn and truncated volumes,
//! garbage. The check finds all of it, and after a repair the volume is clean.
use crate::test_volume::*;
use crate::{CheckOptions, FsckError, Severity, check};
use cairn_blockdev::{BlockDevice, DeviceError, MemoryDevice, forward_to_device};
use cairn_format::*;
use proptest::prelude::*;
use std::time::Duration;

/// A prime step through a structure's bytes; the headers are covered byte by byte.
const STEP: usize = 97;

fn positions(length: usize) -> impl Iterator<Item = usize> {
    (0..HEADER_BYTES + 80).chain((HEADER_BYTES + 80..length).step_by(STEP)).chain([length - 1])
}

#[test]
fn a_volume_with_one_of_everything_is_clean() {
    let volume = TestVolume::full();
    volume.assert_clean();
    let statistics = volume.check().statistics;
    assert_eq!(
        (statistics.directories, statistics.orphans, statistics.unwritten_blocks),
        (3, 1, 3)
    );
    assert!(
        statistics.nodes > 20 && statistics.leaves < statistics.nodes - 3,
        "several levels: {statistics:?}"
    );
    assert_eq!(statistics.data_blocks_verified, statistics.data_blocks);
    assert_eq!(statistics.referenced_blocks, volume.superblock.used_blocks);
}

#[test]
fn every_flipped_byte_of_a_node_is_found() {
    let volume = TestVolume::full();
    for &address in &volume.nodes {
        for position in positions(NODE_SIZE).step_by(7) {
            volume.flip(address, position, 0x10);
            let report = check(&volume.device, &CheckOptions::default(), &mut |_| {}).unwrap();
            assert!(
                report.findings.iter().any(|finding| finding.block == Some(address.0)),
                "block {address}, byte {position}: {report}"
            );
            assert_eq!(report.exit_code(), 4);
            volume.flip(address, position, 0x10);
        }
    }
    volume.assert_clean();
}

#[test]
fn every_flipped_byte_of_a_superblock_is_found_and_repaired() {
    let volume = TestVolume::full();
    for (index, address) in volume.superblock_places().into_iter().enumerate() {
        for position in positions(BLOCK_SIZE) {
            volume.flip(address, position, 0x40);
            let report = volume.check();
            let [finding] = &report.findings[..] else {
                panic!("byte {position} of {address}: {report}")
            };
            // The newest generation is odd: slot 1 was flushed before the copy was written.
            let severity = if index == 1 { Severity::Error } else { Severity::Warning };
            assert_eq!((finding.severity, finding.block), (severity, Some(address.0)));
            assert_eq!(volume.repair().exit_code(), 1);
            volume.assert_clean();
        }
    }
}

#[test]
fn a_lost_write_of_the_newest_slot_is_found_and_repaired() {
    let volume = TestVolume::full();
    let newest = volume.superblock.generation;
    assert_eq!(newest.0 % 2, 1);
    let older = |generation| cairn_format::Superblock { generation, ..volume.superblock.clone() };
    let [other, slot, _] = volume.superblock_places();
    volume.write_block(other, &older(Generation(newest.0 - 1)).encode(other));
    volume.assert_clean();
    volume.write_block(slot, &older(Generation(newest.0 - 2)).encode(slot));
    let report = volume.check();
    assert_eq!(
        (report.errors, report.warnings, report.findings[0].block),
        (0, 1, Some(slot.0)),
        "{report}"
    );
    assert!(
        report.to_string().contains("the slot has generation 3; only the copy has the newest, 5"),
        "{report}"
    );
    assert_eq!(volume.repair().exit_code(), 1);
    volume.assert_clean();
}

#[test]
fn every_flipped_byte_of_a_bitmap_is_found_and_repaired() {
    let volume = TestVolume::full();
    let covered = HEADER_BYTES + 16 + BITMAP_BYTES;
    for (slot, code) in [(0, 0), (1, 4)] {
        let address = volume.superblock.geometry.bitmap_block(0, slot);
        for position in positions(covered).step_by(3) {
            volume.write_bitmaps();
            volume.flip(address, position, 0x04);
            let report = volume.check();
            assert!(
                report
                    .findings
                    .iter()
                    .any(|f| f.block.is_some() && f.severity >= Severity::Warning),
                "{position}: {report}"
            );
            assert_eq!(report.exit_code(), code, "byte {position} of slot {slot}: {report}");
            assert_eq!(volume.repair().exit_code(), 1);
            volume.assert_clean();
        }
        // What follows the covered bytes is padding.
        volume.write_bitmaps();
        volume.flip(address, covered + 5, 0xff);
        volume.assert_clean();
    }
}

#[test]
fn a_bitmap_of_an_unfinished_commit_is_pointed_out_and_removed() {
    let volume = TestVolume::full();
    let newer = Bitmap { group: 0, generation: Generation(6), bits: Box::new([0; BITMAP_BYTES]) };
    volume.write_bitmap(0, &newer);
    let report = volume.check();
    assert_eq!((report.exit_code(), report.warnings), (0, 1), "{report}");
    assert_eq!(volume.repair().exit_code(), 1);
    volume.assert_clean();
}

#[test]
fn every_flipped_byte_of_data_is_found() {
    let volume = TestVolume::full();
    for range in volume.data.iter().filter(|range| range.blocks > 3 || range.blocks == 1) {
        for position in
            [0, 1, 2047, 4095].map(|byte| (range.blocks as usize - 1) * BLOCK_SIZE + byte)
        {
            volume.flip(range.start, position, 1);
            let report = volume.assert_error("don't match their checksums");
            assert_eq!(report.findings[0].block, Some(range.end().0 - 1));
            assert_eq!(report.errors, 1);
            let without_data =
                check(&volume.device, &CheckOptions::default(), &mut |_| {}).unwrap();
            assert_eq!(without_data.exit_code(), 0);
            volume.flip(range.start, position, 1);
        }
    }
    volume.assert_clean();
}

#[test]
fn findings_name_the_file() {
    let volume = TestVolume::full();
    let (key, extent) = volume
        .items
        .iter()
        .rfind(|(key, _)| key.kind == ItemKind::Extent as u8 && key.inode == 20)
        .unwrap();
    let start = Extent::decode(extent).unwrap().start;
    volume.flip(start, 9, 1);
    let report = volume.assert_error("don't match");
    assert_eq!(report.findings[0].inode, Some(key.inode));
    assert_eq!(report.findings[0].path.as_deref(), Some("/mail/new/message-2"));
}

#[test]
fn a_lost_write_of_a_node_is_found() {
    let volume = TestVolume::full();
    let leaf = volume.nodes[0];
    volume.change_node(leaf, |node| node.relocate(leaf, Generation(4)));
    volume.assert_error("a write was lost");
    volume.change_node(leaf, |node| node.relocate(leaf, Generation(5)));
    volume.assert_clean();
    // Valid bytes of another node in this block.
    let other = volume.read_node(volume.nodes[1]);
    volume.write_block(leaf, &other.page()[..]);
    volume.assert_error("was written for block");
}

#[test]
fn a_truncated_volume_is_reported() {
    let volume = TestVolume::full();
    for blocks in [0, 1, 17, 33, 64, 66, 300, 700, 1500, 2000, 4095] {
        let device = MemoryDevice::new(blocks * BLOCK_SIZE as u64);
        for block in 0..blocks {
            let mut bytes = vec![0; BLOCK_SIZE];
            volume.device.read(block * BLOCK_SIZE as u64, &mut bytes).unwrap();
            device.write(block * BLOCK_SIZE as u64, &[&bytes]).unwrap();
        }
        match check(&device, &CheckOptions { data: true, repair: blocks % 2 == 0 }, &mut |_| {}) {
            Ok(report) => {
                assert!(blocks > 16 && report.exit_code() == 4, "{blocks} blocks: {report}");
                assert!(
                    report
                        .findings
                        .iter()
                        .any(|finding| finding.problem.contains("the device only"))
                );
            }
            Err(error) => assert!(
                blocks <= 16 && matches!(error, FsckError::NoVolume { .. }),
                "{blocks} blocks: {error}"
            ),
        }
    }
}

#[test]
fn other_magic_and_newer_versions_are_refused() {
    for (byte, value, text) in [
        (0, b'X', "bad magic"),
        (8, 99, "version 99 is not supported"),
        (71, 0x20, "incompatible features"),
    ] {
        let volume = TestVolume::full();
        for address in volume.superblock_places() {
            let mut block = volume.superblock.encode(address);
            block[byte] = value;
            Header::seal(&mut block);
            volume.write_block(address, &block);
        }
        let error = check(&volume.device, &CheckOptions::default(), &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn unknown_read_only_features_forbid_repair() {
    let mut volume = TestVolume::full();
    volume.superblock.features.read_only_compatible = 1;
    volume.write_superblocks();
    volume.assert_clean();
    volume.flip(volume.superblock_places()[2], 700, 1);
    let report = volume.repair();
    assert_eq!((report.repaired, report.warnings), (0, 1));
    assert!(report.findings[0].to_string().contains("can only read"));
}

/// Reads of one block fail.
struct BadBlock<'a> {
    device: &'a MemoryDevice,
    block: u64,
}

impl BlockDevice for BadBlock<'_> {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let bad = self.block * BLOCK_SIZE as u64;
        let hit = (offset_bytes..offset_bytes + buffer.len() as u64).contains(&bad);
        self.device.read(if hit { 1 << 40 } else { offset_bytes }, buffer)
    }
    fn flush_time(&self) -> Duration {
        Duration::ZERO
    }
    forward_to_device!(self => self.device; write, flush, discard, length_bytes);
}

#[test]
fn unreadable_blocks_are_findings() {
    let volume = TestVolume::full();
    let geometry = &volume.superblock.geometry;
    let log_tail = geometry.log().start.0 + volume.superblock.log_tail.block;
    let blocks = [
        16,
        32,
        geometry.superblock_copy().0,
        geometry.bitmap_block(0, 0).0,
        geometry.bitmap_block(0, 1).0,
        log_tail,
    ];
    let data =
        volume.data.iter().filter(|range| range.blocks > 1).map(|range| range.start.0 + 1).take(1);
    for block in blocks.into_iter().chain(volume.nodes.iter().map(|node| node.0 + 2)).chain(data) {
        let device = BadBlock { device: &volume.device, block };
        let report =
            check(&device, &CheckOptions { data: true, repair: false }, &mut |_| {}).unwrap();
        assert!(report.errors + report.warnings > 0, "block {block}: {report}");
        assert!(report.to_string().contains("cannot be read"), "block {block}: {report}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn garbage_never_panics(seed in any::<u64>(), blocks in 0u64..80) {
        let device = MemoryDevice::new(blocks * BLOCK_SIZE as u64);
        let mut state = seed;
        for block in 0..blocks {
            let bytes: Vec<u8> = (0..BLOCK_SIZE).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            }).collect();
            device.write(block * BLOCK_SIZE as u64, &[&bytes]).unwrap();
        }
        let result = check(&device, &CheckOptions { data: true, repair: true }, &mut |_| {});
        let refused = matches!(result, Err(FsckError::NoVolume { .. }));
        prop_assert!(refused);
    }

    /// Damage under a valid checksum, as a bug would write it, not a disk.
    #[test]
    fn resealed_damage_never_panics(
        node in any::<prop::sample::Index>(),
        changes in proptest::collection::vec((40usize..NODE_SIZE, any::<u8>()), 1..8),
        repair in any::<bool>(),
    ) {
        let volume = TestVolume::full();
        let address = *node.get(&volume.nodes);
        let mut page = *volume.read_node(address).page();
        for (position, value) in changes {
            page[position] = value;
        }
        Header::seal(&mut page);
        volume.write_block(address, &page);
        let options = CheckOptions { data: true, repair };
        let report = check(&volume.device, &options, &mut |_| {}).unwrap();
        prop_assert!(report.passes.len() >= 5);
        prop_assert!(serde_json::to_string(&report).is_ok());
        let dumps = [TREE_FILES, TREE_ROOTS]
            .map(|tree| crate::dump::dump_tree(&volume.device, tree, None));
        for dump in dumps.into_iter().flatten() {
            prop_assert!(dump.to_string().starts_with("tree"));
        }
    }

    #[test]
    fn resealed_superblocks_never_panic(
        changes in proptest::collection::vec((40usize..400, any::<u8>()), 1..6),
        repair in any::<bool>(),
    ) {
        let volume = TestVolume::full();
        for address in volume.superblock_places() {
            let mut block = volume.superblock.encode(address);
            for (position, value) in &changes {
                block[*position] = *value;
            }
            Header::seal(&mut block);
            volume.write_block(address, &block);
        }
        let options = CheckOptions { data: true, repair };
        if let Ok(report) = check(&volume.device, &options, &mut |_| {}) {
            prop_assert!(!report.passes.is_empty());
        }
        let _ = (
            crate::dump::dump_super(&volume.device),
            crate::dump::dump_log(&volume.device),
            crate::dump::dump_space(&volume.device),
        );
    }
}
