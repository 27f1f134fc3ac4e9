//! `cairn trim`: gives back the storage of what is free in a mounted volume.
use crate::mount_error;
use cairn_fuse::MountError;
use cairn_harness::{Size, console};
use rustix::io::Errno;
use std::path::PathBuf;

/// Discard free blocks: an image file takes less room on its disk, and a disk may reuse them.
/// `fstrim DIR` does the same.
#[derive(clap::Args)]
pub struct Arguments {
    /// Directory that shows the volume.
    dir: PathBuf,
}

/// Runs the command.
///
/// # Errors
/// When nothing is mounted there, when the user may not, or when the volume can't be changed.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    mount_error::refuse_shut_down(&arguments.dir)?;
    let bytes = cairn_fuse::trim(&arguments.dir).map_err(|error| match error {
        MountError::NoAnswer { path, errno: Errno::ROFS } => anyhow::anyhow!(
            "{}: the volume is read-only, so its free blocks stay as they are",
            mount_error::shown(&path)
        ),
        error => mount_error::explain(error),
    })?;
    console::print_text(&format_args!(
        "{}: {} are free, and their storage was given back",
        arguments.dir.display(),
        Size { bytes }
    ))
}
