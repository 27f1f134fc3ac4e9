//! Stub.
use super::Store;
use crate::{Error, InodeId, Result};

/// A snapshot of a subvolume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotInfo {
    /// Id of the subvolume.
    pub subvolume: u64,
    /// Its name.
    pub name: Vec<u8>,
    /// Transaction that made it: the younger one of two has the greater.
    pub generation: u64,
    /// When it was made, in nanoseconds since 1970.
    pub created_ns: u64,
    /// Identity, random.
    pub uuid: [u8; 16],
    /// It can't be deleted.
    pub is_held: bool,
    /// Its root directory.
    pub root: InodeId,
}

/// How much space a snapshot holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SnapshotUsage {
    /// Transaction that made it.
    pub generation: u64,
    /// Blocks that nothing else has: its deletion makes these free.
    pub unique_blocks: u64,
}

const LATER: Error = Error::InvalidArgument("not yet");

impl Store {
    pub(crate) fn snapshots(&self, _: u64) -> Result<Vec<SnapshotInfo>> {
        Err(LATER)
    }
    pub(crate) fn snapshot_named(&self, _: u64, _: &[u8]) -> Result<SnapshotInfo> {
        Err(LATER)
    }
    pub(crate) fn snapshotted_subvolumes(&self) -> Result<Vec<u64>> {
        Err(LATER)
    }
    pub(crate) fn hold_snapshot(&self, _: u64, _: &[u8], _: bool) -> Result<()> {
        Err(LATER)
    }
    pub(crate) fn snapshot_usage(&self, _: u64) -> Result<Vec<SnapshotUsage>> {
        Err(LATER)
    }
}

impl crate::file::Files {
    pub(crate) fn create_snapshot(&self, _: InodeId, _: &[u8]) -> Result<SnapshotInfo> {
        Err(LATER)
    }
    pub(crate) fn delete_snapshot(&self, _: u64, _: &[u8]) -> Result<()> {
        Err(LATER)
    }
}
