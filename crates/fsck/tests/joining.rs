//! A fork whose source is gone, and its snapshots, too, gives back what it has inherited as
//! anything else: the last fork of what is left of a subvolume is joined with that.
#[path = "../../engine/tests/small_volume/mod.rs"]
mod small_volume;

use cairn_blockdev::{AlignedBuffer, BlockDevice, MemoryDevice};
use cairn_engine::{InodeId, Volume};
use cairn_format::TreeId;
use cairn_fsck::dump::{NodeDump, dump_tree};
use cairn_fsck::{CheckOptions, Losses, Report};
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

fn check(device: &MemoryDevice, repair: bool) -> Report {
    cairn_fsck::check(device, &CheckOptions { data: true, repair }, &mut |_| {}).unwrap()
}

fn damage(device: &MemoryDevice, node: &NodeDump) {
    device.write((node.block + 1) * 4096, &[&AlignedBuffer::copy_of(&[0x55; 4096])]).unwrap();
}

/// What the file with this number holds in the fork, `Some` if it is a snapshot of that.
fn wanted(number: u64, snapshot: Option<&[u8]>) -> [u8; 5000] {
    let is_changed = match number {
        0..3 => snapshot != Some(b"early"),
        200..203 => !matches!(snapshot, Some(b"early" | b"two")),
        _ => false,
    };
    match number {
        300 if snapshot.is_none() => [b'x'; 5000],
        _ => [if is_changed { b't' } else { 1 }; 5000],
    }
}

/// A volume with a fork that was joined, whose nodes its origin made, but for some. It has three
/// snapshots. Returns the fork's id, too.
fn joined_fork() -> (Arc<MemoryDevice>, TreeId) {
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
    (device, TreeId(early.subvolume))
}

fn expect_in_snapshots(volume: &Volume, fork: TreeId) {
    let snapshots = volume.snapshots(fork.0).unwrap();
    assert_eq!(snapshots.len(), 3, "{snapshots:?}");
    for snapshot in snapshots {
        for number in 0..FILES {
            let content = get(volume, snapshot.root, &name_of(number)).unwrap();
            let name = &snapshot.name[..];
            assert_eq!(content, wanted(number, Some(name)), "{name:?} {number}");
        }
    }
}

/// Snapshots of a joined fork share nodes that its origin made. They are in order, and stay so
/// when a repair makes the fork's tree anew.
#[test]
fn snapshots_of_a_joined_fork_survive_a_repair() {
    let (device, fork) = joined_fork();
    // A leaf that the fork alone has.
    let tree = dump_tree(&*device, fork, None).unwrap();
    let leaf = tree.nodes.iter().filter(|node| node.level == 0).max_by_key(|node| node.generation);
    damage(&device, leaf.unwrap());
    assert!(check(&device, false).errors > 0);
    check(&device, true);
    let report = check(&device, false);
    assert_eq!(report.errors, 0, "{report}");
    let volume = open(&device, None);
    expect_in_snapshots(&volume, fork);
    volume.close().unwrap();
}

/// The leaves below a damaged inner node of a joined fork are found, whichever tree made them.
#[test]
fn what_is_below_a_damaged_inner_node_of_a_joined_fork_is_found() {
    let (device, fork) = joined_fork();
    let tree = dump_tree(&*device, fork, None).unwrap();
    let root = tree.nodes.iter().max_by_key(|node| node.level).unwrap();
    assert!(root.level > 0 && tree.nodes.len() > 5, "{tree}");
    damage(&device, root);
    assert!(check(&device, false).errors > 0);
    let repaired = check(&device, true);
    assert_eq!(repaired.losses, Losses::default(), "{repaired}");
    let report = check(&device, false);
    assert_eq!(report.errors, 0, "{report}");
    let volume = open(&device, None);
    expect_in_snapshots(&volume, fork);
    let found = find(&volume, b"fork");
    for number in 0..FILES {
        let content = get(&volume, found, &name_of(number)).unwrap();
        assert_eq!(content, wanted(number, None), "{number}");
    }
    volume.close().unwrap();
}
