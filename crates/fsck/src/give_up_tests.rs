//! Damaged data that the owner gives up, file by file.
use crate::test_volume::*;
use crate::{CheckOptions, Report, Severity, check_accepting};
use cairn_blockdev::{BlockDevice, DeviceError, Operation, forward_to_device};
use cairn_format::*;
use std::io;
use std::sync::Arc;

const REPAIR: CheckOptions = CheckOptions { data: true, repair: true };

/// A volume with the files "one" and "two" of 20 blocks each, and their first blocks.
fn two_files() -> (TestVolume, [u64; 2]) {
    files_named([b"one", b"two"])
}

/// The same with other names.
fn files_named(names: [&[u8]; 2]) -> (TestVolume, [u64; 2]) {
    let mut volume = TestVolume::unwritten();
    let inodes =
        ["one", "two"].map(|name| volume.make_file(INODE_ROOT.0, name, 20 * BLOCK_SIZE as u64));
    for (from, to) in ["one", "two"].into_iter().zip(names) {
        rename(&mut volume, from, to);
    }
    volume.write();
    volume.assert_clean();
    let start = |inode| {
        Extent::decode(&volume.items[&Key::new(InodeNumber(inode), ItemKind::Extent, 0)])
            .unwrap()
            .start
            .0
    };
    let starts = inodes.map(start);
    (volume, starts)
}

fn give_up(device: &dyn BlockDevice, paths: &[&str]) -> Report {
    let paths: Vec<String> = paths.iter().map(|path| (*path).to_owned()).collect();
    check_accepting(device, &REPAIR, &paths, &mut |_| {}).unwrap()
}

fn errors(report: &Report) -> Vec<(String, Option<String>)> {
    let errors = report.findings.iter().filter(|finding| finding.severity == Severity::Error);
    errors.map(|finding| (finding.path.clone().unwrap_or_default(), finding.lost.clone())).collect()
}

#[test]
fn the_damaged_blocks_of_a_file_that_is_given_up_become_holes() {
    let (volume, [one, two]) = two_files();
    let before = volume.check().statistics;
    // The same block of both, so that both findings have the same text.
    for block in [one + 3, one + 4, one + 19, two + 3, two + 4, two + 19] {
        volume.flip(BlockNumber(block), 5, 1);
    }
    let none = give_up(&volume.device, &["/three"]);
    assert_eq!((none.exit_code(), none.losses.data_blocks), (4, 0), "{none}");
    assert_eq!(none.findings[0].not_repaired_because.as_deref(), Some("no good copy is left"));
    let first = give_up(&volume.device, &["/one"]);
    assert_eq!((first.exit_code(), first.errors, first.losses.data_blocks), (4, 1, 3), "{first}");
    let given_up = Some("given up: these blocks are holes now".to_owned());
    assert_eq!(errors(&first), [("/one".to_owned(), given_up), ("/two".to_owned(), None)]);
    let second = give_up(&volume.device, &["/one", "/two"]);
    assert_eq!((second.exit_code(), second.losses.data_blocks), (1, 3), "{second}");
    let after = volume.check();
    assert_eq!((after.exit_code(), after.errors), (0, 0), "{after}");
    assert_eq!(
        (after.statistics.data_blocks, after.statistics.files),
        (before.data_blocks - 6, before.files)
    );
    assert_eq!(give_up(&volume.device, &["/one"]).exit_code(), 0);
}

/// Gives a file of the root directory another name.
fn rename(volume: &mut TestVolume, from: &str, to: &[u8]) {
    let (key, _) = TestVolume::entry(0, INODE_ROOT.0, from, 0o100644);
    let entry = DirectoryEntry::decode(&volume.items.remove(&key).unwrap()).unwrap();
    let offset = *name_slot_range(hash_name(&volume.superblock.hash_seed, to)).start();
    let entry = DirectoryEntry { name: to.to_vec(), ..entry };
    volume.items.insert(Key { offset, ..key }, entry.encode());
    volume.change_inode(INODE_ROOT.0, |item| {
        item.size = item.size + to.len() as u64 - from.len() as u64;
    });
}

#[test]
fn a_name_forges_no_line_of_a_report_and_stands_for_no_other_file() {
    let names: [&[u8]; 2] = [b"\xe9\n0 errors\x1b[2J\\", b"\xe8\n0 errors\x1b[2J\\"];
    let (volume, [one, two]) = files_named(names);
    volume.flip(BlockNumber(one), 5, 1);
    volume.flip(BlockNumber(two), 5, 1);
    let paths = [r"/\xe9\x0a0 errors\x1b[2J\\", r"/\xe8\x0a0 errors\x1b[2J\\"];
    let report = give_up(&volume.device, &[paths[1]]);
    let given_up = Some("given up: these blocks are holes now".to_owned());
    let expected = [(paths[1].to_owned(), given_up), (paths[0].to_owned(), None)];
    assert_eq!((errors(&report), report.losses.data_blocks), (expected.to_vec(), 1));
    let lines: Vec<String> = report.to_string().lines().map(str::to_owned).collect();
    assert!(lines.iter().all(|line| !line.contains('\x1b') && !line.starts_with('0')), "{lines:?}");
}

#[test]
fn data_is_given_up_together_with_another_repair() {
    let (mut volume, [one, _]) = two_files();
    volume.change_inode(17, |item| item.links = 77);
    volume.write();
    volume.flip(BlockNumber(one), 0, 1);
    let report = give_up(&volume.device, &["/one"]);
    assert_eq!((report.exit_code(), report.losses.data_blocks), (1, 1), "{report}");
    volume.assert_clean();
}

/// A device with blocks that can't be read.
struct UnreadableBlocks<'a> {
    device: &'a dyn BlockDevice,
    blocks: [u64; 2],
}

impl BlockDevice for UnreadableBlocks<'_> {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let range = offset_bytes..offset_bytes + buffer.len() as u64;
        if self.blocks.iter().any(|block| range.contains(&(block * BLOCK_SIZE as u64))) {
            let (name, error) = (Arc::from("device"), io::Error::other("unreadable"));
            return Err(DeviceError::new(
                Operation::Read,
                offset_bytes,
                buffer.len() as u64,
                &name,
                error,
            ));
        }
        self.device.read(offset_bytes, buffer)
    }
    forward_to_device!(self => self.device; write, flush, discard, length_bytes, flush_time);
}

#[test]
fn blocks_that_cannot_be_read_are_given_up_alone() {
    let (volume, [one, two]) = two_files();
    let before = volume.check().statistics.data_blocks;
    let device = UnreadableBlocks { device: &volume.device, blocks: [one + 7, two] };
    let report = give_up(&device, &["/one", "/two"]);
    assert_eq!((report.exit_code(), report.losses.data_blocks), (1, 2), "{report}");
    let after = volume.check();
    assert_eq!((after.exit_code(), after.statistics.data_blocks), (0, before - 2), "{after}");
}
