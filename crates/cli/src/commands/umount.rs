//! `cairn umount`: ends a mount.
use crate::{image, mount_error};
use anyhow::Context;
use cairn_fuse::MountError;
use cairn_harness::console;
use rustix::io::Errno;
use std::path::PathBuf;

/// Unmount; returns when everything is durable and the server has released the image.
#[derive(clap::Args)]
pub struct Arguments {
    /// Directory that shows the volume.
    dir: PathBuf,
}

/// Ends the mount in this order:
/// 1. Sync, while the command can still report a failure. *It keeps the error, and ends the mount
///    all the same.* A volume that was shut down has nothing to sync, and a mount whose server has
///    died has nobody to do it: the next mount recovers the volume.
/// 2. Unmount, and wait until the server has closed the volume and ended.
///
/// # Errors
/// When nothing is mounted, when it is busy, or when not everything became durable.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let directory = &arguments.dir;
    let shown = directory.display();
    let source = cairn_fuse::find_mount(directory)?.map(|mount| mount.source);
    let synced =
        if cairn_fuse::is_shut_down(directory) { Ok(()) } else { cairn_fuse::sync(directory) };
    cairn_fuse::unmount(directory)?;
    match synced {
        // Of a request that was on its way when the kernel learned of it, ECONNABORTED.
        Err(MountError::NoAnswer { errno: Errno::NOTCONN | Errno::CONNABORTED, .. }) => {
            if !source.is_some_and(image::is_clean) {
                console::tell(&format_args!(
                    "cairn: {shown} is unmounted; its server had died. The next mount \
                     recovers everything that was acknowledged as durable"
                ));
            }
            Ok(())
        }
        synced => synced.map_err(mount_error::after_unmount).with_context(|| {
            format!("{shown} is unmounted, but data that was not synced may be lost")
        }),
    }
}
