//! Operations on snapshots.
use super::Volume;
#[cfg(doc)]
use crate::Error;
use crate::names::entries::check_name;
use crate::{InodeId, Result, SnapshotInfo, SnapshotUsage};

/// Snapshots: subvolumes as they were, to read.
impl Volume {
    /// Makes a snapshot of the subvolume with the root directory `root`. Durable when this returns.
    /// It has every change that was complete before this was called.
    ///
    /// # Errors
    /// [`Error::Exists`] if one of the subvolume's snapshots has this name;
    /// [`Error::InvalidArgument`] for an inode that is no root directory of a subvolume, and for a
    /// snapshot; [`Error::NoSpace`]; the failure that stopped the volume.
    pub fn create_snapshot(&self, root: InodeId, name: &[u8]) -> Result<SnapshotInfo> {
        check_name(name)?;
        self.files().create_snapshot(root, name)
    }

    /// The snapshots of a subvolume, by age, the oldest first.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no such subvolume; [`Error::Damaged`], [`Error::Device`].
    pub fn snapshots(&self, subvolume: u64) -> Result<Vec<SnapshotInfo>> {
        self.store().snapshots(subvolume)
    }

    /// The snapshot of a subvolume with this name.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Damaged`], [`Error::Device`].
    pub fn snapshot_named(&self, subvolume: u64, name: &[u8]) -> Result<SnapshotInfo> {
        self.store().snapshot_named(subvolume, name)
    }

    /// The subvolumes that have snapshots, by ascending id.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Device`].
    pub fn snapshotted_subvolumes(&self) -> Result<Vec<u64>> {
        self.store().snapshotted_subvolumes()
    }

    /// Deletes a snapshot. Durable when this returns; its space comes back later. Who uses an inode
    /// of it gets [`Error::Stale`].
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Busy`] if it is held; the failure that stopped the volume.
    pub fn delete_snapshot(&self, subvolume: u64, name: &[u8]) -> Result<()> {
        self.files().delete_snapshot(subvolume, name)
    }

    /// Holds a snapshot, so that it can't be deleted, or releases it. Durable when this returns.
    ///
    /// # Errors
    /// [`Error::NotFound`]; the failure that stopped the volume.
    pub fn hold_snapshot(&self, subvolume: u64, name: &[u8], held: bool) -> Result<()> {
        self.store().hold_snapshot(subvolume, name, held)
    }

    /// How much space each snapshot of a subvolume holds, the oldest first.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Damaged`], [`Error::Device`].
    pub fn snapshot_usage(&self, subvolume: u64) -> Result<Vec<SnapshotUsage>> {
        self.store().snapshot_usage(subvolume)
    }

    /// Deletes the snapshots that these transactions made, in one commit, as
    /// [`Volume::delete_snapshot`] does. If one is missing or held, none is deleted.
    ///
    /// # Errors
    /// As of [`Volume::delete_snapshot`].
    pub fn delete_snapshots(&self, subvolume: u64, snapshots: &[u64]) -> Result<()> {
        self.files().delete_snapshots(subvolume, snapshots)
    }

    /// Blocks that no others have but the snapshots that these transactions made: the deletion of
    /// all of them makes so many free, and some nodes that say what is kept for them.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no such subvolume or snapshot; [`Error::Damaged`],
    /// [`Error::Device`].
    pub fn space_of_snapshots(&self, subvolume: u64, snapshots: &[u64]) -> Result<u64> {
        self.store().space_of_snapshots(subvolume, snapshots)
    }

    /// Blocks that each snapshot of a subvolume refers to in all, its data and its nodes, by the
    /// transaction that made it. The first time since the volume was opened, this reads all nodes
    /// of the newest snapshot, later those that were made since then.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Stale`] if snapshots are deleted all the time;
    /// [`Error::Damaged`], [`Error::Device`].
    pub fn referenced_by_snapshots(&self, subvolume: u64) -> Result<Vec<(u64, u64)>> {
        self.store().referenced_by_snapshots(subvolume)
    }

    /// Whether the subvolume with the root directory `root` differs from its snapshot that this
    /// transaction made, in files or in metadata. Writes what is dirty, and reads nothing.
    ///
    /// # Errors
    /// [`Error::Stale`] if there is no such snapshot; [`Error::NoSpace`]; the failure that stopped
    /// the volume.
    pub fn differs_from_snapshot(&self, root: InodeId, snapshot: u64) -> Result<bool> {
        self.files().differs_from(root, snapshot)
    }
}
