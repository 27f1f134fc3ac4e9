//! What a full volume must still do.
use cairn_blockdev::MemoryDevice;
use cairn_engine::{AllocateMode, AttributeChange, Error, FileType, FsyncKind, InodeNumber, NewInode, Volume, VolumeOptions, mkfs};
use std::sync::Arc;

const FILE: NewInode<'static> = NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };

fn volume(bytes: u64) -> (Arc<MemoryDevice>, Volume) {
    let device = Arc::new(MemoryDevice::new(bytes));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = open(&device).unwrap();
    (device, volume)
}

fn open(device: &Arc<MemoryDevice>) -> Result<Volume, Error> {
    Volume::open(device.clone(), VolumeOptions { background: false, ..VolumeOptions::default() })
}

fn fill(volume: &Volume, file: InodeNumber) -> u64 {
    let mut end = 0;
    let mut step = 1 << 20;
    while step >= 4096 {
        match volume.allocate(file, end, step, AllocateMode::Allocate { keep_size: false }) {
            Ok(()) => end += step,
            Err(Error::NoSpace) => step /= 2,
            Err(error) => panic!("{error}"),
        }
    }
    // What allocate leaves: block by block, as long as a writer gets one.
    let data = vec![7; 4096];
    loop {
        match volume.write(file, end, &data) {
            Ok(()) => end += 4096,
            Err(Error::NoSpace) => break,
            Err(error) => panic!("{error}"),
        }
    }
    end
}

/// A write was accepted, so it has its space: fsync must not report that there is none.
#[test]
fn scattered_pages_accepted_on_a_nearly_full_volume_can_be_written() {
    let (_device, volume) = volume(64 << 20);
    let root = volume.root();
    for i in 0..400 {
        volume.create(root, format!("some file {i}").as_bytes(), &FILE).unwrap();
    }
    let a = volume.create(root, b"a", &FILE).unwrap().inode;
    let b = volume.create(root, b"b", &FILE).unwrap().inode;
    let end = fill(&volume, b);
    volume.sync().unwrap();
    volume.set_attributes(b, &AttributeChange { size: Some(end - 140 * 4096), ..AttributeChange::default() }).unwrap();
    volume.commit().unwrap();
    // Each takes one block of data and one node: they fit, so nothing is reclaimed.
    let accepted = 20;
    for i in 0..accepted {
        volume.write(a, i * 16 * 4096, b"scattered").unwrap();
    }
    let synced = volume.fsync_blocking(a, FsyncKind::Full);
    assert!(synced.is_ok(), "{accepted} writes were accepted, then fsync: {synced:?}; {:?}", volume.space());
    volume.close().unwrap();
}

fn deleting_frees_space(bytes: u64) {
    let (device, volume) = volume(bytes);
    let root = volume.root();
    let file = volume.create(root, b"big", &FILE).unwrap().inode;
    let end = fill(&volume, file);
    let before = volume.space().available_blocks;
    volume.unlink(root, b"big").unwrap();
    volume.forget(file, 1);
    volume.commit().unwrap();
    let after = volume.space().available_blocks;
    drop(volume);
    let again = open(&device);
    assert!(again.is_ok(), "mounting after deleting on a full volume: {:?}", again.err());
    assert!(after > before + end / 4096 / 2, "{bytes}: a file of {end} bytes was deleted; available blocks before {before}, after {after}");
}

#[test]
fn deleting_frees_space_on_a_full_volume_of_16_mib() {
    deleting_frees_space(16 << 20);
}

#[test]
fn deleting_frees_space_on_a_full_volume_of_32_mib() {
    deleting_frees_space(32 << 20);
}

#[test]
fn deleting_frees_space_on_a_full_volume_of_64_mib() {
    deleting_frees_space(64 << 20);
}
