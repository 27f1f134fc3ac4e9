//! What programs expect.
use cairn_blockdev::MemoryDevice;
use cairn_engine::{FileType, InodeNumber, NewInode, Volume, VolumeOptions, mkfs};
use std::sync::Arc;

const FILE: NewInode<'static> = NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };

fn volume() -> Volume {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    Volume::open(device, VolumeOptions { background: false, ..VolumeOptions::default() }).unwrap()
}

/// PATH_MAX is 4096 with the terminating zero.
#[test]
fn a_symbolic_link_may_be_as_long_as_a_path() {
    let volume = volume();
    let target = vec![b'x'; 4095];
    let link = NewInode { file_type: FileType::Symlink, target: Some(&target), ..FILE };
    let link = volume.create(volume.root(), b"link", &link);
    assert!(link.is_ok(), "{link:?}");
    assert_eq!(volume.read_link(link.unwrap().inode).unwrap(), target);
}

/// Asking for an inode that does not exist yet must not disturb its later creation.
#[test]
fn a_number_that_was_asked_for_can_be_created() {
    let volume = volume();
    let next = volume.create(volume.root(), b"1", &FILE).unwrap().inode.0 + 1;
    assert!(volume.attributes(InodeNumber(next)).is_err());
    assert_eq!(volume.create(volume.root(), b"2", &FILE).unwrap().inode.0, next);
}
