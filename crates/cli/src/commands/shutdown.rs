//! `cairn shutdown`: stops a mounted volume as a crash would.
use crate::mount_error;
use std::path::PathBuf;

/// Stop a mounted volume, for tests: from then on every call fails, until it is unmounted and
/// mounted again.
#[derive(clap::Args)]
pub struct Arguments {
    /// Directory that shows the volume.
    dir: PathBuf,
    /// Stop at once, as a crash would: data that no fsync made durable may be lost.
    #[arg(long)]
    no_log_flush: bool,
}

/// Runs the command.
///
/// # Errors
/// When nothing is mounted there, when the user may not, or when not everything became durable.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    mount_error::refuse_shut_down(&arguments.dir)?;
    cairn_fuse::shut_down(&arguments.dir, !arguments.no_log_flush).map_err(mount_error::explain)
}
