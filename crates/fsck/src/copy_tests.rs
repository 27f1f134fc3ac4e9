//! What two claim, and what of it a repair copies, or calls lost.
use crate::report::{Losses, Report};
use crate::test_forks::{FORK, full};
use crate::test_volume::TestVolume;
use cairn_format::*;

/// Two files with the same blocks.
fn twins() -> TestVolume {
    let mut volume = TestVolume::empty();
    let inodes = ["one", "two"].map(|name| volume.make_file(1, name, 9_000));
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
