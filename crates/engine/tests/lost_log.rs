//! What a mount does when the log lost something that had been acknowledged, and which superblock
//! it may write over.
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::{Error, FileType, FsyncKind, NewInode, Volume, VolumeOptions, mkfs};
use cairn_format::{Geometry, Superblock};
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };

fn options(read_only: bool) -> VolumeOptions {
    VolumeOptions { background: false, read_only, ..VolumeOptions::default() }
}

/// A volume after a crash, with five fsyncs in its log.
fn crashed() -> (Arc<MemoryDevice>, Superblock) {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    let superblock = mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = Volume::open(device.clone(), options(false)).unwrap();
    for name in [b"1", b"2", b"3", b"4", b"5"] {
        let file = volume.create(volume.root(), name, &FILE).unwrap().inode;
        volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    }
    (device, superblock)
}

fn newest(device: &MemoryDevice) -> Vec<(usize, u64)> {
    let mut found = Vec::new();
    for (slot, address) in Geometry::SUPERBLOCKS.into_iter().enumerate() {
        let mut block = vec![0; 4096];
        device.read(address.offset_bytes(), &mut block).unwrap();
        found.push((slot, Superblock::decode(&block, address).unwrap().generation.0));
    }
    found.sort_by_key(|&(_, generation)| generation);
    found
}

#[test]
fn a_lost_checkpoint_that_was_flushed_is_not_passed_over() {
    let (device, superblock) = crashed();
    // The second checkpoint of this mount; the later ones say that it was flushed.
    device.write((superblock.geometry.log().start.0 + 1) * 4096, &[&[0xa5; 4096]]).unwrap();
    let Err(error) = Volume::open(device.clone(), options(false)) else {
        panic!("acknowledged files were dropped in silence")
    };
    assert!(matches!(error, Error::Damaged(_)) && error.to_string().contains("is lost"), "{error}");
    let reader = Volume::open(device, options(true)).unwrap();
    assert!(
        reader.lookup(reader.root(), b"1").is_ok() && reader.lookup(reader.root(), b"3").is_err()
    );
}

#[test]
fn recovery_keeps_the_superblock_that_it_recovered_from() {
    let (device, _) = crashed();
    let before = *newest(&device).last().unwrap();
    let _volume = Volume::open(device.clone(), options(false)).unwrap();
    assert!(newest(&device).contains(&before), "a torn write would have left only an older one");
}
