//! A recovered volume is used: a file is made, and must be there after the next crash.
use crate::cleanups::{delete_all, wait_for_cleanups};
use crate::files::NEW_FILE;
use crate::shape::FILLER_NAME;
use cairn_blockdev::BlockDevice;
use cairn_engine::{Error, FsyncKind, Volume};

/// Makes a file in the root directory, or writes it again, and fsyncs it. Where there is no room,
/// what fills the volume is removed first: all snapshots, if there are any, and the file that was
/// made for that. Returns whether snapshots were deleted.
///
/// # Errors
/// It is impossible.
pub(crate) fn use_volume(
    volume: &Volume,
    device: &dyn BlockDevice,
    name: &[u8],
    data: &[u8],
) -> Result<bool, String> {
    let use_it = || -> Result<(), Error> {
        let file = match volume.create(volume.root(), name, &NEW_FILE) {
            Err(Error::Exists) => volume.lookup(volume.root(), name)?.inode,
            made => made?.inode,
        };
        let used =
            volume.write(file, 0, data).and_then(|()| volume.fsync_blocking(file, FsyncKind::Full));
        volume.forget(file, 1);
        used
    };
    let failed = |error: Error| error.to_string();
    match use_it() {
        Err(Error::NoSpace) => {}
        used => return used.map(|()| false).map_err(failed),
    }
    // These are possible on every volume, and give enough back.
    let has_snapshots = !volume.snapshotted_subvolumes().map_err(failed)?.is_empty();
    if has_snapshots {
        delete_all(volume).map_err(|error| format!("deleting all snapshots: {error}"))?;
        wait_for_cleanups(volume, device)?;
    }
    match volume.unlink(volume.root(), FILLER_NAME) {
        Err(Error::NotFound) | Ok(()) => use_it().map(|()| has_snapshots).map_err(failed),
        Err(error) => Err(format!("removing what fills the volume: {error}")),
    }
}

/// The file is there.
///
/// # Errors
/// It is not.
pub(crate) fn expect_file(volume: &Volume, name: &[u8], data: &[u8]) -> Result<(), String> {
    let mut found = Vec::new();
    let result = volume
        .lookup(volume.root(), name)
        .and_then(|file| volume.read(file.inode, 0, data.len() + 1, &mut found));
    volume.close().map_err(|error| error.to_string())?;
    match result {
        Err(error) => Err(format!("the file made after the first crash: {error}")),
        Ok(()) if found != data => {
            Err("the file made after the first crash has other contents".into())
        }
        Ok(()) => Ok(()),
    }
}
