//! The engine: a mounted volume as a library.
//!
//! Layers, imports pointing down:
//! - [`Volume`], with `statistics` and `shutdown`: what users hold, and the background threads;
//! - `names`: directories, entries, renames, paths;
//! - `file`: inodes, their attributes and data in memory, and how these are written;
//! - `store`: transactions, trees, log, free space, recovery; knows nothing of inodes;
//! - the crates for trees, log, space and devices.
//!
//! Start at [`Volume`]. `ARCHITECTURE.md` has the order of locks and the steps of commit, fsync and
//! recovery.
#![forbid(unsafe_code)]

#[cfg_attr(not(feature = "baselines"), path = "no_baselines.rs")]
mod baselines;
mod error;
mod file;
mod fsync_stage;
mod inode_id;
mod layers;
pub mod mkfs;
mod names;
mod options;
mod shutdown;
#[cfg(all(test, feature = "shuttle"))]
mod shuttle_tests;
mod statistics;
mod store;
#[cfg(all(test, not(feature = "shuttle")))]
mod test_space;
mod types;
mod volume;

pub use baselines::Baselines;
pub use cairn_btree::CacheStatistics;
pub use cairn_format::{FileBlock, FileType, Generation, LogSeq, Superblock, Timestamp};
pub use cairn_log::FlushPolicy;
pub use cairn_log::LogStatistics;
pub use cairn_space::{Caller, on_behalf_of};
pub use error::Error;
pub use file::planned_read::{PlannedRead, ReadAtOnce};
pub use fsync_stage::FsyncStage;
pub use inode_id::InodeId;
pub use names::held_space::{SnapshotShare, SnapshotStatistics};
pub use names::rollback::{CarriedValue, Rollback, RollbackOptions, is_name_before_rollback};
pub use options::{FsyncWait, VolumeOptions};
pub use shutdown::ShutdownLog;
pub use statistics::{ComposedDevice, DeviceMember, Statistics};
pub use store::failures::{Failure, Failures};
pub use store::recovery::meter::{RecoveryPhase, RecoveryProgress};
pub use store::snapshot_space::SnapshotUsage;
pub use store::snapshots::{SnapshotInfo, is_temporary_name};
pub use store::storage_room::STORAGE_ROOM_BYTES;
pub use store::subvolumes::SubvolumeInfo;
pub use types::{
    AllocateMode, Applied, Apply, ApplyOptions, AttributeChange, Attributes, Changes, Compared,
    Completion, Conflict, ConflictKind, Difference, DifferenceKind, DirectoryItem, ForkOptions,
    FsyncKind, NewInode, RenameMode, SeekTarget, SpaceInfo, TimeChange, Winner, WritePlace,
    WriteTimes, XattrMode,
};
pub use volume::Volume;

/// Result of the engine's operations.
pub type Result<T> = std::result::Result<T, Error>;
