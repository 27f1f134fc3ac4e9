//! `cairn fsck --extract`: copies the files of a volume into a directory, without a mount.
use crate::image::Image;
use anyhow::Context;
use cairn_blockdev::BlockDevice;
use cairn_format::TreeId;
use cairn_fsck::extract::{ExtractError, ExtractProgress, extract, extract_snapshot};
use cairn_harness::console;
use cairn_harness::progress::ProgressBar;
use cairn_harness::{Interrupt, Interrupted, SecondSignal};
use std::path::Path;
use std::process::ExitCode;

/// Copies all files of the volume on `device`, or of one of its snapshots, into `directory`, and
/// prints the report.
///
/// # Errors
/// There is no volume or snapshot, the directory holds something, the host failed or is full, or a signal ended
/// it. Then the report is printed first, if anything was copied.
pub fn run(
    device: &dyn BlockDevice,
    image: &Image,
    directory: &Path,
    snapshot: Option<(TreeId, &[u8])>,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::by_signals(SecondSignal::EndsAtOnce)?;
    let bar = ProgressBar::bytes("reading", 0);
    let mut is_extracting = false;
    let mut show = |progress: ExtractProgress<'_>| match progress {
        ExtractProgress::Reading(progress) => bar.set(progress.done.min(progress.total)),
        ExtractProgress::Extracting { done_bytes, total_bytes, .. } => {
            if !std::mem::replace(&mut is_extracting, true) {
                bar.restart("extracting", total_bytes);
            }
            bar.set(done_bytes.min(total_bytes));
        }
    };
    let stop = interrupt.flag();
    let result = match snapshot {
        None => extract(device, directory, &stop, &mut show),
        Some(snapshot) => extract_snapshot(device, snapshot, directory, &stop, &mut show),
    };
    drop(bar);
    match result {
        Ok(report) => {
            console::print(&report, json)?;
            Ok(ExitCode::from(report.exit_code()))
        }
        Err(error) => {
            if let Some(report) = error.report() {
                console::print(report, json)?;
            }
            match error {
                ExtractError::Interrupted { .. } => Err(anyhow::Error::from(Interrupted)
                    .context(format!("{}: {error}", directory.display()))),
                ExtractError::Volume(_) => Err(error).with_context(|| image.to_string()),
                ExtractError::Host { .. } => {
                    Err(error).with_context(|| directory.display().to_string())
                }
                ExtractError::Directory { .. } | ExtractError::NotEmpty { .. } => Err(error.into()),
            }
        }
    }
}
