//! Small helpers on files of a volume, for tests that need no model.
use crate::colliding::HASH_SEED;
use crate::contents::BLOCK_BYTES;
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{
    AllocateMode, Error, FileType, FsyncKind, InodeId, NewInode, Volume, XattrMode,
};
use cairn_environment::random::Seeded;
use std::collections::BTreeMap;

/// What a new regular file is like.
pub const NEW_FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };

/// Options for a volume with a log of `log_bytes`, in which [`colliding`](crate::colliding) names
/// collide.
pub fn mkfs_options(log_bytes: u64) -> MkfsOptions {
    MkfsOptions { log_bytes: Some(log_bytes), hash_seed: Some(HASH_SEED), ..MkfsOptions::default() }
}

/// Makes a volume with a log of `log_bytes`.
///
/// # Errors
/// Those of mkfs, in words.
pub fn format(device: &dyn cairn_blockdev::BlockDevice, log_bytes: u64) -> Result<(), String> {
    mkfs(device, &mkfs_options(log_bytes)).map(drop).map_err(|error| format!("mkfs: {error}"))
}

/// Creates a file in the root directory and writes `data`; the reference is the caller's.
///
/// # Errors
/// Those of the volume.
pub fn create(volume: &Volume, name: &[u8], data: &[u8]) -> Result<InodeId, Error> {
    let inode = volume.create(volume.root(), name, &NEW_FILE)?.inode;
    volume.write(inode, 0, data).map(|()| inode).inspect_err(|_| volume.forget(inode, 1))
}

/// All bytes of a file.
///
/// # Errors
/// Those of the volume.
pub fn read_all(volume: &Volume, inode: InodeId) -> Result<Vec<u8>, Error> {
    let size = volume.attributes(inode)?.size_bytes;
    let mut bytes = Vec::new();
    volume.read(inode, 0, size as usize, &mut bytes)?;
    Ok(bytes)
}

/// The file called `name` in the root directory.
///
/// # Errors
/// Those of the volume.
pub fn read_named(volume: &Volume, name: &[u8]) -> Result<Vec<u8>, Error> {
    let inode = volume.lookup(volume.root(), name)?.inode;
    let bytes = read_all(volume, inode);
    volume.forget(inode, 1);
    bytes
}

/// Compares files in the root directory with what they must hold.
///
/// # Errors
/// The first that is missing, can't be read or differs.
pub fn expect_files(volume: &Volume, expected: &BTreeMap<Vec<u8>, Vec<u8>>) -> Result<(), String> {
    for (name, data) in expected {
        let shown = String::from_utf8_lossy(name);
        match read_named(volume, name) {
            Err(error) => return Err(format!("{shown}: {error}")),
            Ok(found) if found != *data => {
                return Err(format!(
                    "{shown} holds {} bytes, not the {} that were written",
                    found.len(),
                    data.len()
                ));
            }
            Ok(_) => {}
        }
    }
    Ok(())
}

/// What `df` calls available can be had: nothing else holds it. Everything is committed, and no
/// thread works on the volume.
///
/// # Errors
/// How much is missing, or what went wrong.
pub fn expect_room(volume: &Volume) -> Result<(), String> {
    const NAME: &[u8] = b"all the room";
    /// Of a fragmented volume the items of so many extents need some of it.
    const LEAST_PERCENT: u64 = 95;
    let available = volume.space().available_blocks;
    let wrong = |error: Error| format!("taking the room that is left: {error}");
    let file = create(volume, NAME, b"").map_err(wrong)?;
    let (mut taken, mut step) = (0, available);
    while step > 0 {
        let mode = AllocateMode::Allocate { keep_size: true };
        match volume.allocate(file, taken * BLOCK_BYTES, step * BLOCK_BYTES, mode) {
            Ok(()) => taken += step,
            Err(Error::NoSpace) => {}
            Err(error) => return Err(wrong(error)),
        }
        step = (available - taken).min(step / 2);
    }
    volume.forget(file, 1);
    volume.unlink(volume.root(), NAME).and_then(|()| volume.commit()).map_err(wrong)?;
    if taken * 100 >= available * LEAST_PERCENT {
        return Ok(());
    }
    Err(format!("of {available} available blocks only {taken} can be had"))
}

/// Makes files in any of the directories until nothing fits any more. Removed subvolumes of other
/// clients are none of its business.
///
/// # Panics
/// On any other error.
pub fn fill(volume: &Volume, directories: &[InodeId], client: u64, random: &mut Seeded) {
    let mut largest = 900_000;
    let mut made = 0;
    while largest > 1000 {
        let directory = directories[random.below(directories.len() as u64) as usize];
        made += 1;
        let name = format!("{client}-{made}").into_bytes();
        let data = vec![7; 1 + random.below(largest) as usize];
        let (with_xattr, durable) = (random.chance(1, 6), random.chance(1, 8));
        let make = || -> Result<(), Error> {
            let inode = volume.create(directory, &name, &NEW_FILE)?.inode;
            let mut done = volume.write(inode, 0, &data);
            if with_xattr {
                let set = |()| {
                    volume.set_xattr(
                        inode,
                        b"user.x",
                        &data[..data.len().min(9000)],
                        XattrMode::Any,
                    )
                };
                done = done.and_then(set);
            }
            if durable {
                done = done.and_then(|()| volume.fsync_blocking(inode, FsyncKind::Full));
            }
            volume.forget(inode, 1);
            done
        };
        match make() {
            Ok(()) => {}
            Err(Error::NoSpace) => largest /= 2,
            Err(error) => panic!("filling: {error}"),
        }
    }
}
