//! `cairn trim`: gives back the storage of what is free in a mounted volume.
use crate::mount_error;
use cairn_harness::{Size, console};
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
    let bytes = cairn_fuse::trim(&arguments.dir).map_err(mount_error::explain)?;
    console::print_text(&format_args!(
        "{}: {} are free, and their storage was given back",
        arguments.dir.display(),
        Size { bytes }
    ))
}
