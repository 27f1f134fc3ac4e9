//! `cairn fsck`: checks a volume that is not mounted.
use crate::output;
use crate::progress::ProgressBar;
use anyhow::Context;
use cairn_blockdev::{FileDevice, OpenMode};
use cairn_fsck::{CheckOptions, FsckError, PassId, Progress};
use std::path::PathBuf;
use std::process::ExitCode;

/// Exit code of a check that could not be done.
pub const EXIT_FAILURE: u8 = FsckError::EXIT_CODE;

/// Check a volume that is not mounted. Exit code: 0 clean, 1 repaired, 4 errors left, 8 failure.
#[derive(clap::Args)]
pub struct Arguments {
    /// Image file or block device.
    image: PathBuf,
    /// Read all file data too, and compare it with its checksums.
    #[arg(long)]
    data: bool,
    /// Repair what can be repaired without guessing.
    #[arg(long)]
    repair: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the check could not be done.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mode = if arguments.repair { OpenMode::ReadWrite } else { OpenMode::ReadOnly };
    let device = FileDevice::open(&arguments.image, mode)?;
    let options = CheckOptions { data: arguments.data, repair: arguments.repair };
    let bar = ProgressBar::items("superblocks", 0);
    let mut pass: Option<PassId> = None;
    let mut show = |progress: Progress| {
        if pass.replace(progress.pass) != Some(progress.pass) {
            bar.restart(&progress.pass.to_string(), progress.total);
        }
        bar.set(progress.done);
    };
    let result = cairn_fsck::check(&device, &options, &mut show);
    drop(bar);
    let report = result.with_context(|| arguments.image.display().to_string())?;
    output::print(&report, arguments.json)?;
    Ok(ExitCode::from(report.exit_code()))
}
