//! A fork whose source is gone, and its snapshots, too, gives back what it has inherited as
//! anything else: the last fork of what is left of a subvolume is joined with that.
#[path = "../../engine/tests/small_volume/mod.rs"]
mod small_volume;

use cairn_blockdev::{AlignedBuffer, BlockDevice, MemoryDevice};
use cairn_engine::{InodeId, Volume};
use cairn_format::TreeId;
use cairn_fsck::CheckOptions;
use cairn_fsck::dump::dump_tree;
use small_volume::{DIRECTORY, device, get, open, put, used};
use std::sync::Arc;

const BYTES: usize = 1 << 20;
const BLOCKS: u64 = BYTES as u64 / 4096;

fn find(volume: &Volume, name: &[u8]) -> InodeId {
    let inode = volume.lookup(volume.root(), name).unwrap().inode;
    volume.forget(inode, 1);
    inode
}

fn overwrite(volume: &Volume, name: &[u8], byte: u8) {
    let file = volume.lookup(find(volume, name), b"file").unwrap().inode;
    volume.write(file, 0, &vec![byte; BYTES]).unwrap();
    volume.forget(file, 1);
}

/// A fork of a fork of a fork, each of which has overwritten what it inherited.
fn a_chain(close_between: bool) {
    let device: Arc<MemoryDevice> = device();
    let mut volume = open(&device, None);
    let base = volume.create_subvolume(volume.root(), b"0", &DIRECTORY).unwrap().inode;
    volume.forget(put(&volume, base, b"file", &vec![0; BYTES]), 1);
    volume.forget(base, 1);
    let one = used(&volume);
    for round in 1..=12_u8 {
        let [old, new] = [round - 1, round].map(|number| number.to_string().into_bytes());
        let fork = volume.fork(find(&volume, &old), volume.root(), &new).unwrap().inode;
        volume.forget(fork, 1);
        if round % 3 == 0 {
            overwrite(&volume, &new, round);
        }
        volume.remove_subvolume(volume.root(), &old).unwrap();
        if round % 3 > 0 {
            overwrite(&volume, &new, round);
        }
        if close_between {
            volume.close().unwrap();
            volume = open(&device, None);
        }
        let now = used(&volume);
        assert!(now < one + BLOCKS / 2, "round {round}: {now} blocks, {one} at first");
        let found = get(&volume, find(&volume, &new), b"file").unwrap();
        assert!(found == vec![round; BYTES], "round {round}");
        assert_eq!(volume.statistics().failures.count(), 0);
    }
    assert_eq!(volume.subvolumes().unwrap().len(), 2);
    volume.remove_subvolume(volume.root(), b"12").unwrap();
    let left = used(&volume);
    assert!(left <= one - BLOCKS, "{left} of {one} blocks are left");
    volume.close().unwrap();
    expect_clean(&device);
}

fn expect_clean(device: &Arc<MemoryDevice>) {
    let report = cairn_fsck::check(&**device, &CheckOptions::default(), &mut |_| {}).unwrap();
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

#[test]
fn a_chain_of_forks_uses_the_space_of_one() {
    a_chain(false);
    a_chain(true);
}

#[test]
fn rollbacks_use_the_space_of_one() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let home = volume.create_subvolume(root, b"home", &DIRECTORY).unwrap().inode;
    volume.forget(put(&volume, home, b"file", &vec![0; BYTES]), 1);
    volume.forget(home, 1);
    let one = used(&volume);
    for round in 1..=6_u8 {
        let home = find(&volume, b"home");
        let snapshot = volume.create_snapshot(home, b"before").unwrap();
        overwrite(&volume, b"home", 100 + round);
        let rolled = volume.rollback(root, b"home", snapshot.root).unwrap();
        volume.delete_snapshot(snapshot.subvolume, b"before").unwrap();
        volume.remove_subvolume(root, &rolled.old_name).unwrap();
        assert_eq!(get(&volume, find(&volume, b"home"), b"file").unwrap()[0], round - 1);
        overwrite(&volume, b"home", round);
        let now = used(&volume);
        assert!(now < one + BLOCKS / 2, "round {round}: {now} blocks, {one} at first");
    }
    volume.close().unwrap();
    expect_clean(&device);
}

const FILES: u64 = 400;

fn name_of(number: u64) -> Vec<u8> {
    format!("file-{number:04}").into_bytes()
}

fn rewrite(volume: &Volume, directory: InodeId, numbers: std::ops::Range<u64>, byte: u8) {
    for number in numbers {
        let file = volume.lookup(directory, &name_of(number)).unwrap().inode;
        volume.write(file, 0, &[byte; 5000]).unwrap();
        volume.forget(file, 1);
    }
}

/// Snapshots of a joined fork share nodes that its origin made. They are in order, and stay so
/// when a repair makes the fork's tree anew.
#[test]
fn snapshots_of_a_joined_fork_survive_a_repair() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let base = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
    for number in 0..FILES {
        volume.forget(put(&volume, base, &name_of(number), &[1; 5000]), 1);
    }
    volume.forget(base, 1);
    let fork = volume.fork(find(&volume, b"base"), root, b"fork").unwrap().inode;
    let early = volume.create_snapshot(fork, b"early").unwrap();
    volume.remove_subvolume(root, b"base").unwrap();
    let all = volume.subvolumes().unwrap();
    assert!(all.iter().any(|one| one.is_fork && one.origin.is_none()), "{all:?}");
    for (name, numbers) in [(&b"two"[..], 0..3), (b"three", 200..203)] {
        rewrite(&volume, fork, numbers, name[0]);
        volume.create_snapshot(fork, name).unwrap();
    }
    rewrite(&volume, fork, 300..301, b'x');
    volume.close().unwrap();
    expect_clean(&device);

    // A leaf that the fork alone has.
    let tree = dump_tree(&*device, TreeId(early.subvolume), None).unwrap();
    let leaf = tree.nodes.iter().filter(|node| node.level == 0).max_by_key(|node| node.generation);
    let damage = AlignedBuffer::copy_of(&[0x55; 4096]);
    device.write((leaf.unwrap().block + 1) * 4096, &[&damage]).unwrap();
    let check = |repair| {
        let options = CheckOptions { data: true, repair };
        cairn_fsck::check(&*device, &options, &mut |_| {}).unwrap()
    };
    assert!(check(false).errors > 0);
    check(true);
    let report = check(false);
    assert_eq!(report.errors, 0, "{report}");
    let volume = open(&device, None);
    let snapshots = volume.snapshots(early.subvolume).unwrap();
    assert_eq!(snapshots.len(), 3, "{snapshots:?}");
    for snapshot in snapshots {
        for number in 0..FILES {
            let content = get(&volume, snapshot.root, &name_of(number)).unwrap();
            let two = snapshot.name != b"early" && number < 3;
            let three = snapshot.name == b"three" && (200..203).contains(&number);
            let byte = if two || three { b't' } else { 1 };
            assert_eq!(content, [byte; 5000], "{:?} {number}", snapshot.name);
        }
    }
    volume.close().unwrap();
}
