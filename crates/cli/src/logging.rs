//! Where messages of a running mount go: standard error, or the file behind `--log`.
use anyhow::Context;
use std::fs::{File, OpenOptions};
use std::path::Path;
use tracing::level_filters::LevelFilter;

/// Opens the log file for appending.
///
/// # Errors
/// When that is not possible.
pub fn open(path: &Path) -> anyhow::Result<File> {
    OpenOptions::new().create(true).append(true).open(path).with_context(|| format!("{}: cannot open the log file", path.display()))
}

/// Sends messages to standard error, which a daemon points at its log file. A message that cannot be written is dropped.
pub fn start() {
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::INFO)
        .with_ansi(false)
        .with_target(false)
        .with_writer(std::io::stderr)
        // They go to standard error, too, and panic when it cannot be written.
        .log_internal_errors(false)
        .finish();
    // There is one subscriber in a process; a second call keeps the first.
    let _ = tracing::subscriber::set_global_default(subscriber);
}
