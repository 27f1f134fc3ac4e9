//! A small volume in memory, for tests of subvolumes, snapshots and forks.
#![allow(dead_code, reason = "no test program uses all of it")]
pub mod files;
pub mod gated;
pub mod history;
pub mod shown;

use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{Error, FileType, InodeId, NewInode, Volume, VolumeOptions};
use std::sync::Arc;

/// The subvolume that a volume begins with.
pub const FIRST: u64 = 256;

pub const DIRECTORY: NewInode<'_> = NewInode {
    file_type: FileType::Directory,
    mode: 0o755,
    uid: 0,
    gid: 0,
    device: 0,
    target: None,
};
pub const FILE: NewInode<'_> = NewInode { file_type: FileType::Regular, mode: 0o644, ..DIRECTORY };

/// A device of 64 MiB with an empty volume.
pub fn device() -> Arc<MemoryDevice> {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    device
}

/// Opens it without background threads; shows `subvolume` at the root.
pub fn open(device: &Arc<MemoryDevice>, subvolume: Option<u64>) -> Volume {
    open_with(device, VolumeOptions { subvolume, background: false, ..VolumeOptions::default() })
}

pub fn open_with(device: &Arc<MemoryDevice>, options: VolumeOptions) -> Volume {
    Volume::open(Arc::clone(device) as Arc<dyn BlockDevice>, options).unwrap()
}

/// Makes a file; the caller has a reference on it.
pub fn put(volume: &Volume, directory: InodeId, name: &[u8], content: &[u8]) -> InodeId {
    let inode = volume.create(directory, name, &FILE).unwrap().inode;
    volume.write(inode, 0, content).unwrap();
    inode
}

/// What a file holds, up to 1 MiB.
pub fn get(volume: &Volume, directory: InodeId, name: &[u8]) -> Result<Vec<u8>, Error> {
    let inode = volume.lookup(directory, name)?.inode;
    let mut content = Vec::new();
    volume.read(inode, 0, 1 << 20, &mut content)?;
    volume.forget(inode, 1);
    Ok(content)
}

/// Blocks in use, without what a commit frees.
pub fn used(volume: &Volume) -> u64 {
    volume.sync().unwrap();
    // The second one frees what the first one has pinned.
    volume.commit().unwrap();
    volume.commit().unwrap();
    let space = volume.space();
    space.total_blocks - space.free_blocks
}
