//! The runs of `cairn torture` that need no image, no mount and no right: each with its progress,
//! an end in order after Ctrl-C, and its report in words.
//!
//! What they do lives in the modules of the same names above, and in [`crate::hostile`]; here is
//! what a user sees of it. Errors say that a run could not be done; a finding is no error, but
//! stands in the [`RunReport`](crate::run_report::RunReport).
pub mod campaign;
pub mod crash;
pub mod faults;
pub mod fuzz;

use anyhow::Context;
use std::fs;
use std::path::Path;

/// Makes a folder for what is found, unless there is one: a wrong one shows at once, not with the
/// first finding.
///
/// # Errors
/// When that cannot be.
pub fn make_folder(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))
}
