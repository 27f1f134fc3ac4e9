//! A fork whose source is gone, and its snapshots, too, gives back what it has inherited as
//! anything else: the last fork of what is left of a subvolume is joined with that.
#[path = "../../engine/tests/small_volume/mod.rs"]
mod small_volume;

use cairn_blockdev::MemoryDevice;
use cairn_engine::{InodeId, Volume};
use cairn_fsck::CheckOptions;
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
