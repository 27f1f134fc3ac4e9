//! `cairn umount`: ends a mount.
use crate::mount_error;
use anyhow::Context;
use std::path::PathBuf;

/// Unmount; returns when everything is durable and the server has let the image go.
#[derive(clap::Args)]
pub struct Arguments {
    /// Directory that shows the volume.
    dir: PathBuf,
}

/// Ends the mount in this order:
/// 1. Sync, while a failure can still be told. *Its error is kept, and the mount ended all the same.* A volume that was shut
///    down has nothing to sync.
/// 2. Unmount, and wait until the server has closed the volume and ended.
///
/// # Errors
/// When nothing is mounted, when it is busy, or when not everything became durable.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let directory = &arguments.dir;
    let synced = if cairn_fuse::is_shut_down(directory) { Ok(()) } else { cairn_fuse::sync(directory).map_err(mount_error::after_unmount) };
    cairn_fuse::unmount(directory)?;
    synced.with_context(|| format!("{} is unmounted now, but some of what was not synced before is lost", directory.display()))
}
