//! What a repair finds again when several structures are damaged at once, and its report of what it
//! does not find.
use crate::test_volume::*;
use crate::{CheckOptions, Losses, Report, check};
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_format::*;

/// A volume whose free blocks hold an older version of the whole tree, with files that were
/// removed.
fn volume_with_a_past() -> TestVolume {
    let mut volume = TestVolume::unwritten();
    let kept = (volume.items.clone(), volume.data.clone(), volume.superblock.clone());
    for number in 0..30 {
        volume.make_file(1, &format!("removed-{number}"), 0);
    }
    volume.superblock.generation = Generation(3);
    volume.write();
    (volume.items, volume.data, volume.superblock) = kept;
    volume.nodes.clear();
    volume.write();
    volume
}

fn copy_of(volume: &TestVolume) -> MemoryDevice {
    let mut bytes = vec![0; volume.device.length_bytes() as usize];
    volume.device.read(0, &mut bytes).unwrap();
    let copy = MemoryDevice::new(bytes.len() as u64);
    copy.write(0, &[&bytes]).unwrap();
    copy
}

fn fsck(device: &MemoryDevice, repair: bool) -> Report {
    check(device, &CheckOptions { data: true, repair }, &mut |_| {}).unwrap()
}

/// Files and directories in the tree, except those moved to `lost+found`.
fn names(device: &MemoryDevice) -> Vec<String> {
    let text = crate::dump::dump_tree(device, TREE_FILES, None).unwrap().to_string();
    let quoted = text
        .lines()
        .filter(|line| line.contains(" DirectoryEntry "))
        .filter_map(|line| line.split('"').nth(1));
    quoted
        .map(str::to_owned)
        .filter(|name| name != "lost+found" && !name.starts_with('#'))
        .collect()
}

/// Blocks to overwrite.
fn structures(volume: &TestVolume) -> Vec<(&'static str, Vec<BlockNumber>)> {
    let node = |&address: &BlockNumber| {
        let node = volume.read_node(address);
        let kind =
            if node.tree() == TREE_ROOTS || node.level() > 0 { "inner node" } else { "leaf" };
        (kind, vec![address])
    };
    let [older, newer] = [0, 1].map(|slot| volume.superblock.geometry.bitmap_block(0, slot));
    let bitmaps = [("bitmap in use", vec![newer]), ("all bitmaps", vec![older, newer])];
    volume.nodes.iter().map(node).chain(bitmaps).collect()
}

#[test]
fn of_two_damaged_structures_all_that_is_left_is_found() {
    let volume = volume_with_a_past();
    let before = volume.check();
    assert_eq!(before.errors, 0, "{before}");
    let (all, structures) = (names(&volume.device), structures(&volume));
    assert!(
        structures.iter().filter(|(kind, _)| *kind == "inner node").count() > 4,
        "several levels"
    );
    let mut pairs = 0;
    for (index, (kind, blocks)) in structures.iter().enumerate() {
        for (other_kind, others) in
            structures[index..].iter().step_by(if *kind == "leaf" { 5 } else { 1 })
        {
            let device = copy_of(&volume);
            for block in blocks.iter().chain(others) {
                device.write(block.offset_bytes(), &[&[0xa5; BLOCK_SIZE]]).unwrap();
            }
            let what = format!("{kind} {blocks:?} and {other_kind} {others:?}");
            let report = fsck(&device, true);
            assert_eq!(report.errors, 0, "{what}: {report}");
            let left = names(&device);
            let back: Vec<&String> = left.iter().filter(|name| !all.contains(name)).collect();
            // Without any bitmap, a leaf that was removed may look like one in use. Then the report
            // says so.
            let is_reported = report
                .findings
                .iter()
                .any(|finding| finding.problem.contains("removed files may be back"));
            assert!(
                back.is_empty() || (is_reported && *other_kind == "all bitmaps"),
                "{what}: {back:?} were removed: {report}"
            );
            let leaves = [*kind, *other_kind].iter().filter(|kind| **kind == "leaf").count() as u64
                - u64::from(*kind == "leaf" && blocks == others);
            // A leaf without a pointer to it is known by its blocks only.
            let inner = [*kind, *other_kind].contains(&"inner node");
            assert!(
                report.losses.leaves == leaves || (inner && report.losses.blocks >= 4),
                "{what}: {report}"
            );
            if leaves == 0 && is_reported {
                assert!(all.iter().all(|name| left.contains(name)), "{what}: {left:?} {report}");
            } else if leaves == 0 {
                let items = fsck(&device, false).statistics.items;
                assert_eq!(
                    (report.losses, left.len(), items),
                    (Losses::default(), all.len(), before.statistics.items),
                    "{what}: {report}"
                );
            }
            let after = fsck(&device, false);
            assert_eq!(after.errors, 0, "{what}: {after}");
            pairs += 1;
        }
    }
    assert!(pairs > 100, "{pairs}");
}

/// Names between quotation marks behind `called`.
fn listed(report: &Report) -> Vec<String> {
    let quoted = report
        .findings
        .iter()
        .filter_map(|finding| finding.problem.split_once("called \"")?.1.split('"').next());
    quoted.map(str::to_owned).collect()
}

#[test]
fn what_a_damaged_leaf_held_is_called_lost() {
    let volume = TestVolume::full();
    let all = names(&volume.device);
    let (mut by_name, mut by_count) = (0, 0);
    for &leaf in volume.nodes.iter().filter(|&&node| {
        volume.read_node(node).level() == 0 && volume.read_node(node).tree() == TREE_FILES
    }) {
        let device = copy_of(&volume);
        device.write(leaf.offset_bytes(), &[&[0; BLOCK_SIZE]]).unwrap();
        let report = fsck(&device, true);
        assert_eq!(
            (report.exit_code(), report.errors, report.losses.leaves),
            (1, 0, 1),
            "{report}"
        );
        let finding = report.findings.iter().find(|finding| finding.block == Some(leaf.0)).unwrap();
        let (first, last) = (
            volume.read_node(leaf).key(0).inode,
            volume.read_node(leaf).items().last().unwrap().0.inode,
        );
        let lost = finding.lost.as_deref().unwrap();
        assert!(
            !finding.repaired && lost.starts_with("dropped; lost with it: items of "),
            "{finding}"
        );
        assert!(
            first < INODE_FIRST || lost.contains(&first.to_string()),
            "{first} to {last}: {finding}"
        );
        assert!(
            report.to_string().lines().last().unwrap().contains("lost: 1 leaves of the file tree"),
            "{report}"
        );
        assert_eq!(serde_json::to_value(&report).unwrap()["losses"]["leaves"], 1);
        // Each lost name is listed or counted.
        let (left, listed) = (names(&device), listed(&report));
        let gone: Vec<&String> = all.iter().filter(|name| !left.contains(name)).collect();
        assert_eq!(listed.len() as u64, report.losses.inodes, "{report}");
        let counted = gone.iter().filter(|name| !listed.contains(name)).count() as u64;
        assert!(listed.iter().all(|name| gone.contains(&name)), "{report}");
        let counter_is_left =
            [INODE_ROOT.0, 16, 17].iter().all(|directory| !(first..=last).contains(directory));
        assert!(report.losses.names == counted || !counter_is_left, "{gone:?}: {report}");
        by_name += listed.len();
        by_count += report.losses.names;
    }
    assert!(by_name > 20 && by_count > 20, "{by_name} {by_count}");
}

#[test]
fn blocks_of_a_file_that_are_lost_are_counted() {
    let volume = TestVolume::full();
    // The leaf with the last extents of the file with several.
    let of_large = |node: &BlockNumber| {
        let node = volume.read_node(*node);
        let extents = node
            .items()
            .filter(|(key, _)| key.inode == 58 && key.kind == ItemKind::Extent as u8)
            .count();
        node.level() == 0
            && node.tree() == TREE_FILES
            && extents > 0
            && !node.items().any(|(key, _)| key == Key::new(InodeNumber(58), ItemKind::Inode, 0))
    };
    let leaf =
        *volume.nodes.iter().find(|node| of_large(node)).expect("its items fill more than a leaf");
    volume.flip(leaf, 300, 1);
    let report = volume.repair();
    let finding = report
        .findings
        .iter()
        .find(|finding| finding.problem.ends_with("blocks of this file"))
        .unwrap();
    assert_eq!(
        (finding.inode, finding.lost.as_deref(), finding.path.is_some()),
        (Some(58), Some("lost"), true),
        "{report}"
    );
    assert!(
        report.losses.data_blocks > 0 && report.losses.blocks >= report.losses.data_blocks,
        "{report}"
    );
}
