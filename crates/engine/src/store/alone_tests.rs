//! An application of which more would die than one cut can write.
use crate::mkfs::{MkfsOptions, mkfs};
use crate::{
    Apply, AttributeChange, Error, FileType, InodeId, NewInode, TimeChange, Volume, VolumeOptions,
    Winner,
};
use cairn_blockdev::MemoryDevice;
use std::sync::Arc;

const DIRECTORY: NewInode<'_> = NewInode {
    file_type: FileType::Directory,
    mode: 0o755,
    uid: 0,
    gid: 0,
    device: 0,
    target: None,
};
const FILE: NewInode<'_> = NewInode { file_type: FileType::Regular, mode: 0o644, ..DIRECTORY };
const FILES: u32 = 300;
/// More than a few files need, and less than all.
const DEAD_RUNS_MAX: u64 = 200;

fn content(volume: &Volume, directory: InodeId, number: u32) -> Vec<u8> {
    let name = number.to_string();
    let file = volume.lookup(directory, name.as_bytes()).unwrap().inode;
    let mut content = Vec::new();
    volume.read(file, 0, 100, &mut content).unwrap();
    content
}

fn write(volume: &Volume, directory: InodeId, numbers: std::ops::Range<u32>, content: &[u8]) {
    for number in numbers {
        let name = number.to_string();
        let file = volume.lookup(directory, name.as_bytes()).unwrap().inode;
        volume.write(file, 0, content).unwrap();
    }
}

#[test]
fn what_one_cut_cannot_write_is_refused_before_anything_changes() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    let volume = Volume::open(device.clone(), options.clone()).unwrap();
    let origin = volume.create_subvolume(volume.root(), b"origin", &DIRECTORY).unwrap().inode;
    for number in 0..FILES {
        volume.create(origin, number.to_string().as_bytes(), &FILE).unwrap();
    }
    write(&volume, origin, 0..FILES, b"old");
    let fork = volume.fork(origin, volume.root(), b"fork").unwrap().inode;
    write(&volume, fork, 0..FILES, b"new");

    volume.store().cut_work.set_dead_runs_max(DEAD_RUNS_MAX);
    let used = |volume: &Volume| {
        volume.sync().unwrap();
        (0..3).for_each(|_| volume.commit().unwrap());
        volume.space().free_blocks
    };
    let before = used(&volume);
    let applied = volume.apply(fork, Winner::Neither);
    assert!(matches!(applied, Err(Error::TooMuchAtOnce)), "{applied:?}");
    assert_eq!(used(&volume), before, "its copies are given back");
    for number in 0..FILES {
        assert_eq!(content(&volume, origin, number), b"old");
        assert_eq!(content(&volume, fork, number), b"new");
    }
    // With most of it copied by hand, times too, the rest is applied.
    write(&volume, origin, 5..FILES, b"new");
    for number in 5..FILES {
        let name = number.to_string();
        let [from, to] =
            [fork, origin].map(|root| volume.lookup(root, name.as_bytes()).unwrap().inode);
        let modified = TimeChange::At(volume.attributes(from).unwrap().modified);
        let change = AttributeChange { modified: Some(modified), ..AttributeChange::default() };
        volume.set_attributes(to, &change).unwrap();
    }
    let applied = volume.apply(fork, Winner::Neither);
    assert!(matches!(applied, Ok(Apply::Done(_))), "{applied:?}");
    volume.close().unwrap();
    let volume = Volume::open(device, options).unwrap();
    let origin = volume.lookup(volume.root(), b"origin").unwrap().inode;
    (0..FILES).for_each(|number| assert_eq!(content(&volume, origin, number), b"new"));
}
