//! The engine: a mounted volume as a library.
//!
//! Layers, imports pointing down: the operations on files and directories (`directory`, `entries`,
//! `rename`, `file`, `extents`, `writeback`, `throttle`, `truncate`, `preallocate`, `xattr`,
//! `orphans`), over inodes and file data in memory (`inode`, `pages`), over operations joined to a
//! transaction (`operation`, `transaction`), over the crates for trees, log and space.
//!
//! Start at [`Volume`]. `ARCHITECTURE.md` has the order of locks and the steps of commit, fsync and
//! recovery.
#![forbid(unsafe_code)]

mod commit;
mod data_cache;
mod directory;
mod discard;
mod entries;
mod error;
mod extents;
mod failure_report;
mod failures;
mod file;
mod fsync_stage;
mod inode;
mod inode_count;
pub mod mkfs;
mod operation;
mod options;
mod orphans;
mod pages;
mod planned_read;
mod preallocate;
mod recovery;
mod recovery_meter;
mod removal_queue;
mod rename;
mod shutdown;
#[cfg(all(test, feature = "shuttle"))]
mod shuttle_tests;
mod statistics;
mod storage_room;
mod sync;
mod throttle;
mod transaction;
mod truncate;
mod types;
mod volume;
mod writeback;
mod xattr;

pub use cairn_format::{FileType, Generation, InodeNumber, LogSeq, Superblock, Timestamp};
pub use cairn_log::FlushPolicy;
pub use cairn_space::{Caller, on_behalf_of};
pub use error::Error;
pub use failures::{Failure, Failures};
pub use fsync_stage::FsyncStage;
#[cfg(feature = "baselines")]
pub use options::Baselines;
pub use options::{FsyncWait, VolumeOptions};
pub use planned_read::{PlannedRead, ReadAtOnce};
pub use recovery_meter::{RecoveryPhase, RecoveryProgress};
pub use shutdown::ShutdownLog;
pub use statistics::{ComposedDevice, DeviceMember, Statistics};
pub use storage_room::STORAGE_ROOM_BYTES;
pub use types::{
    AllocateMode, AttributeChange, Attributes, Completion, DirectoryItem, FsyncKind, NewInode,
    RenameMode, SeekTarget, SpaceInfo, TimeChange, XattrMode,
};
pub use volume::Volume;

/// Result of the engine's operations.
pub type Result<T> = std::result::Result<T, Error>;
