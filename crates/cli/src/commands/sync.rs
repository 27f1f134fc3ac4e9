//! `cairn sync`: makes everything on a mount durable.
use crate::mount_error;
use std::path::PathBuf;

/// Make everything durable that was written to a mounted volume.
#[derive(clap::Args)]
pub struct Arguments {
    /// Directory that shows the volume.
    dir: PathBuf,
}

/// Runs the command.
///
/// # Errors
/// When nothing is mounted there, or when not everything became durable.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    mount_error::refuse_shut_down(&arguments.dir)?;
    cairn_fuse::sync(&arguments.dir).map_err(mount_error::explain)
}
