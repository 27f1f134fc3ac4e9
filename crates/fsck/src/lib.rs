//! Checks a volume, and repairs what can be repaired without guessing.
//!
//! This crate uses only the format and the device. It has its own readers of trees and log, so that
//! a mistake in the engine's reader is not repeated here.
//!
//! If the log is not empty, the check compares the superblock's trees with the allocation bitmaps.
//! Everything that users see (inodes, names, extents, data) it checks in the state *after* replay:
//! the trees with the log's entries on top.
//!
//! Each subvolume is a tree of files with inode numbers of its own. The passes loop over these
//! trees; what one pass finds out about a tree for the next is in its `FileTree`. An [`ObjectId`]
//! names subvolume and inode together.
//!
//! The passes, with permanent numbers and prerequisites, are in [`PassId`] and the table
//! `passes::PASSES`. No pass panics, whatever the volume holds. The check takes no lock; no other
//! program may use the volume meanwhile.
//!
//! [`TreeReader`] reads single files, [`Walk`] goes through all names, and [`extract()`] copies
//! everything into a directory of the host. They take the state after replay, too, and change
//! nothing.
//!
//! ```
//! use cairn_blockdev::MemoryDevice;
//! use cairn_fsck::{CheckOptions, FsckError, check};
//! let device = MemoryDevice::new(16 << 20);
//! let result = check(&device, &CheckOptions { data: true, repair: false }, &mut |_| {});
//! assert!(matches!(result, Err(FsckError::NoVolume { .. })));
//! ```
#![forbid(unsafe_code)]

mod bitmaps;
mod block_set;
mod checker;
mod data;
pub mod dump;
pub mod extract;
mod file_group;
mod file_tree;
mod forks;
mod item_stream;
mod items;
mod log;
mod names;
mod namespace;
mod object;
mod overlay;
mod passes;
mod paths;
mod readable_tree;
mod reader;
mod repair;
mod report;
mod second_try;
mod snapshots;
mod subvolumes;
mod superblocks;
mod tree_reader;
mod trees;
mod walk;

pub use extract::{extract, extract_snapshot};
pub use object::ObjectId;
pub use report::{
    DamagedSnapshot, Finding, Losses, PassId, Progress, Report, Severity, Statistics, Structure,
};
pub use tree_reader::{Piece, TreeReader, Xattrs};
pub use walk::{Entry, LOST_AND_FOUND, Step, Walk, shown_path};

use cairn_blockdev::{BlockDevice, DeviceError};
use checker::WholeMax;
use std::collections::BTreeSet;

/// What to check, and whether to repair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CheckOptions {
    /// Read all data, and compare it with its checksums.
    pub data: bool,
    /// Repair what can be repaired without guessing.
    pub repair: bool,
}

/// Why a check was not possible at all.
#[derive(Debug, thiserror::Error)]
pub enum FsckError {
    /// None of the three superblocks can be used.
    #[error("no volume that this program can read: {problems}")]
    NoVolume {
        /// The problem of each of the three.
        problems: String,
    },
    /// A block that was readable before cannot be read any more.
    #[error("block {block} changed while the volume was checked; is it mounted?")]
    Changed {
        /// The block.
        block: u64,
    },
    /// The requested tree is not in the root tree.
    #[error("the volume has no tree {tree}")]
    NoTree {
        /// The tree's number.
        tree: u64,
    },
    /// The requested snapshot does not exist.
    #[error("subvolume {subvolume} has no snapshot named \"{name}\"; its snapshots: {names}")]
    NoSnapshot {
        /// Id of the subvolume.
        subvolume: u64,
        /// The name.
        name: String,
        /// Those that it shows: of each the id of the subvolume that has it, `/`, and its name.
        names: String,
    },
    /// The requested snapshot was not found, and damage hides snapshots.
    #[error(
        "the tree that names the snapshots is damaged, and snapshot \"{name}\" of subvolume \
         {subvolume} is not among those that can be found: {names}; without --snapshot, the files \
         of the subvolumes themselves can be copied out"
    )]
    HiddenSnapshot {
        /// Id of the subvolume.
        subvolume: u64,
        /// The name.
        name: String,
        /// As of [`FsckError::NoSnapshot`].
        names: String,
    },
    /// A repair could not be written.
    #[error("repairing: {0}")]
    Device(#[from] DeviceError),
}

impl FsckError {
    /// Exit code if the check was not possible.
    pub const EXIT_CODE: u8 = 8;
}

/// Checks the volume on `device`, and calls `progress` now and then.
///
/// # Errors
/// If there is no volume, it changes meanwhile, or a repair can't be written. Damage is not an
/// error but a [`Finding`].
pub fn check(
    device: &dyn BlockDevice,
    options: &CheckOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Report, FsckError> {
    check_accepting(device, options, &[], progress)
}

/// As [`check`]. When it repairs after reading the data, the damaged blocks of the files among
/// `names_given_up` become holes. The files are given by the paths of the findings,
/// [`Finding::path`]. The damaged snapshots among them are dropped: each is given as `ID/NAME`, as
/// the report shows it ([`Report::damaged_snapshots`]); `NAME` alone is one of the first subvolume,
/// and `ID/` stands for all that are damaged in a subvolume.
///
/// # Errors
/// As those of [`check`].
pub fn check_accepting(
    device: &dyn BlockDevice,
    options: &CheckOptions,
    names_given_up: &[String],
    progress: &mut dyn FnMut(Progress),
) -> Result<Report, FsckError> {
    let device = &second_try::SecondTry(device);
    let whole_max = if options.repair { WholeMax::FORKS } else { WholeMax::CHECK };
    let first = CheckOptions { repair: false, ..*options };
    let checker = run(device, first, whole_max, progress)?;
    if !options.repair || checker.report.errors + checker.report.warnings == 0 {
        return Ok(checker.report);
    }
    // A killed process may have left a superblock that can be read and is lost at a power failure.
    // Then the blocks that the previous superblock refers to must not be overwritten.
    device.flush()?;
    let is_given_up = |finding: &&Finding| {
        finding.is_lost_data()
            && finding.path.as_ref().is_some_and(|path| names_given_up.contains(path))
    };
    let given_up: BTreeSet<ObjectId> =
        checker.report.findings.iter().filter(is_given_up).filter_map(Finding::object).collect();
    let to_drop = snapshots::to_drop(&checker, names_given_up);
    if !checker.needs_rebuild && given_up.is_empty() && to_drop.is_empty() {
        drop(checker);
        return Ok(run(device, *options, whole_max, progress)?.report);
    }
    let result = repair::rebuild(&checker, &given_up, &to_drop)?;
    let before = checker.report;
    match result {
        repair::RepairResult::Impossible(obstacle) => Ok(before.not_repaired(obstacle)),
        repair::RepairResult::Repaired(summary) => {
            let after = run(device, *options, whole_max, progress)?.report;
            Ok(before.repaired_to(after, *summary))
        }
    }
}

/// One run of all passes.
fn run<'a>(
    device: &'a dyn BlockDevice,
    options: CheckOptions,
    whole_max: WholeMax,
    progress: &'a mut dyn FnMut(Progress),
) -> Result<checker::Checker<'a>, FsckError> {
    let superblocks = superblocks::read(device)?;
    let mut checker = checker::Checker::new(device, options, superblocks, progress);
    checker.whole_max = whole_max;
    passes::run(&mut checker)?;
    paths::add(&mut checker)?;
    checker.report.damaged_snapshots = snapshots::damaged(&checker);
    if checker.report.errors + checker.report.warnings > 0 {
        let obstacle = repair::obstacle(&checker);
        if checker.needs_rebuild {
            checker.report.is_repairable = !options.repair && obstacle.is_none();
        }
        checker.report.rebuild_obstacle = obstacle;
    }
    Ok(checker)
}

#[cfg(test)]
mod copy_tests;
#[cfg(test)]
mod damage_tests;
#[cfg(test)]
mod dropped_snapshot_tests;
#[cfg(test)]
mod fork_history_tests;
#[cfg(test)]
mod fork_log_tests;
#[cfg(test)]
mod fork_tests;
#[cfg(test)]
mod give_up_tests;
#[cfg(test)]
mod joining_tests;
#[cfg(test)]
mod lineage_end_tests;
#[cfg(test)]
mod log_tests;
#[cfg(test)]
mod logic_tests;
#[cfg(test)]
mod many_forks_tests;
#[cfg(test)]
mod many_snapshots_tests;
#[cfg(test)]
mod repair_tests;
#[cfg(test)]
mod salvage_tests;
#[cfg(test)]
mod snapshot_tests;
#[cfg(test)]
mod subvolume_tests;
#[cfg(test)]
mod test_forks;
#[cfg(test)]
mod test_lineage_ends;
#[cfg(test)]
mod test_snapshots;
#[cfg(test)]
mod test_volume;
