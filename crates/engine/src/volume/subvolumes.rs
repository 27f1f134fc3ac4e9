//! Operations on subvolumes.
use super::Volume;
#[cfg(doc)]
use crate::Error;
use crate::types::{Attributes, NewInode};
use crate::{InodeId, Result, SubvolumeInfo};
use cairn_format::TreeId;
use std::collections::HashMap;

/// Subvolumes: directories with inodes of their own.
///
/// ```
/// # use std::sync::Arc;
/// # let device = Arc::new(cairn_blockdev::MemoryDevice::new(32 << 20));
/// # cairn_engine::mkfs::mkfs(&*device, &Default::default())?;
/// # let volume = cairn_engine::Volume::open(device, Default::default())?;
/// use cairn_engine::{Error, FileType, NewInode, RenameMode};
///
/// let new = NewInode {
///     file_type: FileType::Directory,
///     mode: 0o755,
///     uid: 0,
///     gid: 0,
///     device: 0,
///     target: None,
/// };
/// let home = volume.create_subvolume(volume.root(), b"home", &new)?.inode;
/// let file = NewInode { file_type: FileType::Regular, ..new };
/// let notes = volume.create(home, b"notes", &file)?.inode;
/// volume.write(notes, 0, b"in a subvolume")?;
/// assert_eq!(volume.subvolumes()?.len(), 2);
///
/// // An inode belongs to one subvolume.
/// let moved = volume.rename(home, b"notes", volume.root(), b"notes", RenameMode::Replace);
/// assert!(matches!(moved, Err(Error::CrossDevice)));
///
/// volume.remove_subvolume(volume.root(), b"home")?;
/// assert!(matches!(volume.attributes(notes), Err(Error::Stale)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl Volume {
    /// Makes a subvolume: a directory with this name, mode and owner, whose inodes have numbers of
    /// their own. Durable when this returns. Takes a reference on the directory.
    ///
    /// # Errors
    /// Those of [`Volume::create`], and the failure that stopped the volume.
    pub fn create_subvolume(
        &self,
        parent: InodeId,
        name: &[u8],
        new: &NewInode<'_>,
    ) -> Result<Attributes> {
        self.names().create_subvolume(parent, name, new)
    }

    /// Removes a subvolume with everything in it. Durable when this returns; its space comes back
    /// later, but for what forks of it have, which stays as long as they do. A user of one of its
    /// inodes gets [`Error::Stale`].
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InvalidArgument`] for what is no subvolume,
    /// [`Error::NotEmpty`] if it holds other subvolumes, [`Error::Busy`] for the one that is shown
    /// by default or now, and for one that has snapshots.
    pub fn remove_subvolume(&self, parent: InodeId, name: &[u8]) -> Result<()> {
        self.remove_subvolume_if(parent, name, &|_| Ok(()))
    }

    /// As [`Volume::remove_subvolume`], if `permits` its root directory; nobody changes that or its
    /// name meanwhile.
    ///
    /// # Errors
    /// That of `permits`, too.
    pub fn remove_subvolume_if(
        &self,
        parent: InodeId,
        name: &[u8],
        permits: &dyn Fn(&Attributes) -> Result<()>,
    ) -> Result<()> {
        self.names().remove_subvolume(parent, name, permits)
    }

    /// All subvolumes, by ascending id; also those that are being removed, or parts of which are,
    /// which forks had needed. A volume that never had a second one has one.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Device`].
    pub fn subvolumes(&self) -> Result<Vec<SubvolumeInfo>> {
        self.store().subvolumes()
    }

    /// The id of the subvolume that an inode belongs to, and whether the inode is its root
    /// directory. An inode of a snapshot belongs to the subvolume that this is a snapshot of.
    ///
    /// # Errors
    /// [`Error::NotFound`] for an id that no inode has had, [`Error::Stale`] in one that was
    /// removed.
    pub fn subvolume_of(&self, inode: InodeId) -> Result<(u64, bool)> {
        self.files().enter(inode)?;
        let subvolume = self.store().trees.subvolume(inode)?;
        let is_root = subvolume.snapshot.is_none() && inode.is_subvolume_root();
        Ok((subvolume.id.0, is_root))
    }

    /// Of an inode of a snapshot, the transaction that made this.
    pub fn snapshot_with(&self, inode: InodeId) -> Option<u64> {
        let subvolume = self.store().trees.subvolume(inode).ok()?;
        subvolume.snapshot.map(|made| made.0)
    }

    /// The root directory of a subvolume.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is none with this id, or it can't be reached: the first one has
    /// no name.
    pub fn root_of_subvolume(&self, id: u64) -> Result<InodeId> {
        Ok(InodeId::root_of(self.store().trees.slot_of(TreeId(id))?))
    }

    /// A number that grows whenever subvolumes with snapshots, these, or the directories above them
    /// may have changed: when a subvolume or a snapshot comes or goes, a directory moves to another
    /// one, a subvolume is rolled back, or a fork is applied. So what was made of
    /// [`Volume::snapshotted_subvolumes`], [`Volume::snapshots`], [`Volume::line_of_subvolume`],
    /// [`Volume::root_of_subvolume`] and the [`Volume::parent`]s of those holds as long as this is
    /// what it was before; of a snapshot it says nothing of whether that is held.
    pub fn moves(&self) -> u64 {
        self.store().trees.moves()
    }

    /// Paths of subvolumes from the root, by id, as far as they can be found.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Device`].
    pub fn paths_of_subvolumes(&self) -> Result<HashMap<u64, Vec<u8>>> {
        self.names().paths_of_subvolumes()
    }

    /// Shows the subvolume `id` at the root of later mounts. Durable when this returns.
    ///
    /// # Errors
    /// [`Error::NotFound`], and the failure that stopped the volume.
    pub fn set_default_subvolume(&self, id: u64) -> Result<()> {
        self.store().set_default_subvolume(id)
    }

    /// The subvolumes whose root directories have an extended attribute with a short value: ids,
    /// root directories, and values. Those that can't be read are left out.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Device`].
    pub fn subvolumes_with_attribute(&self, name: &[u8]) -> Result<Vec<(u64, InodeId, Vec<u8>)>> {
        self.files().subvolumes_with_xattr(name)
    }
}
