//! What a crash left unfinished in subvolumes goes on after the next mount: removals at once, what
//! is inside of one when that is used.
use crate::crash::expect_clean_but_for;
use crate::found::Found;
use crate::refusal::PLENTY_BYTES;
use cairn_blockdev::BlockDevice;
use cairn_engine::{Error, Volume, VolumeOptions};
use cairn_fsck::PassId;
use std::sync::Arc;

/// Options for opening a state: nothing happens but what is asked for.
pub(crate) fn recovery_options() -> VolumeOptions {
    VolumeOptions {
        background: false,
        node_cache_bytes: 1 << 20,
        data_cache_bytes: 0,
        ..VolumeOptions::default()
    }
}

/// What a crash left of the removal of a subvolume is removed while the volume is opened, or after
/// a commit, if there was no space for that.
///
/// # Errors
/// It is still there.
pub fn expect_removals_to_end(volume: &Volume) -> Result<(), String> {
    let are_left = || {
        let subvolumes = volume.subvolumes().map_err(|error| format!("subvolumes: {error}"))?;
        Ok::<bool, String>(subvolumes.iter().any(|subvolume| subvolume.is_dying))
    };
    if are_left()? {
        volume.sync().map_err(|error| format!("sync: {error}"))?;
        volume.sync().map_err(|error| format!("sync: {error}"))?;
        if are_left()? {
            return Err("the removal of a subvolume was interrupted, and does not go on".into());
        }
    }
    Ok(())
}

/// Whether a removal may have to wait for space: on a full volume with snapshots, if only those
/// that forks need, it gives nothing back.
fn lacks_space(volume: &Volume) -> Result<bool, Error> {
    let space = volume.space();
    let available_bytes = space.available_blocks * u64::from(space.block_size);
    let has_forks = volume.subvolumes()?.iter().any(|info| info.is_fork);
    let has_snapshots = has_forks || !volume.snapshotted_subvolumes()?.is_empty();
    Ok(has_snapshots && available_bytes < PLENTY_BYTES)
}

/// What a crash left unfinished in subvolumes that nobody has opened is done once somebody has, in
/// the background. Before, the device was opened for writing and closed in order.
///
/// # Errors
/// Something is left.
pub fn finish_orphans(
    open: &dyn Fn() -> Result<Arc<dyn BlockDevice>, String>,
) -> Result<(), String> {
    let options = VolumeOptions { background: true, ..recovery_options() };
    let volume = Volume::open(open()?, options).map_err(|error| format!("opening: {error}"))?;
    Found::read(&volume)?;
    let may_wait = lacks_space(&volume).map_err(|error| error.to_string())?;
    volume.close().map_err(|error| format!("closing after unfinished removals: {error}"))?;
    drop(volume);
    // Data that could not be written may be missing.
    let left = expect_clean_but_for(&*open()?, Some(PassId::Data))?.orphans;
    if left > 0 && !may_wait {
        return Err(format!("{left} removals or truncations do not go on after a crash"));
    }
    Ok(())
}
