//! Operations on names and directories.
use super::Volume;
#[cfg(doc)]
use crate::Error;
use crate::InodeId;
use crate::Result;
use crate::types::{Attributes, DirectoryItem, NewInode, RenameMode};

/// Names and directories.
///
/// ```
/// # use std::sync::Arc;
/// # let device = Arc::new(cairn_blockdev::MemoryDevice::new(32 << 20));
/// # cairn_engine::mkfs::mkfs(&*device, &Default::default())?;
/// # let volume = cairn_engine::Volume::open(device, Default::default())?;
/// use cairn_engine::{FileType, NewInode, RenameMode};
///
/// let file = NewInode {
///     file_type: FileType::Regular,
///     mode: 0o644,
///     uid: 0,
///     gid: 0,
///     device: 0,
///     target: None,
/// };
/// let folder = NewInode { file_type: FileType::Directory, mode: 0o755, ..file };
/// let (root, letters) = (volume.root(), volume.create(volume.root(), b"letters", &folder)?.inode);
/// let draft = volume.create(letters, b"draft", &file)?.inode;
/// volume.rename(letters, b"draft", root, b"sent", RenameMode::NoReplace)?;
/// volume.link(draft, letters, b"copy")?;
/// assert_eq!(volume.lookup(letters, b"copy")?.links, 2);
///
/// let mut names = Vec::new();
/// volume.read_directory(root, 0, &mut |item| {
///     names.push(item.name.to_vec());
///     true
/// })?;
/// names.sort();
/// assert_eq!(names, [&b"letters"[..], b"sent"]);
///
/// volume.unlink(letters, b"copy")?;
/// volume.remove_directory(root, b"letters")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl Volume {
    /// Finds a name in a directory; takes a reference on what it names, to be given back by
    /// [`Volume::forget`].
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotDirectory`], [`Error::NameLength`].
    pub fn lookup(&self, parent: InodeId, name: &[u8]) -> Result<Attributes> {
        self.names().lookup(parent, name)
    }

    /// Creates an object with a name; takes a reference on it.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NotFound`] and [`Error::NotDirectory`] for the parent,
    /// [`Error::NameLength`], [`Error::InvalidArgument`], [`Error::NoSpace`],
    /// [`Error::HashCollisions`].
    pub fn create(&self, parent: InodeId, name: &[u8], new: &NewInode<'_>) -> Result<Attributes> {
        self.names().create(parent, name, new)
    }

    /// Creates a file without a name; takes a reference on it, and without a link it ends with
    /// that.
    ///
    /// # Errors
    /// [`Error::NotFound`] and [`Error::NotDirectory`] for the parent, [`Error::NoSpace`].
    pub fn create_unnamed(&self, parent: InodeId, new: &NewInode<'_>) -> Result<Attributes> {
        self.names().create_unnamed(parent, new)
    }

    /// Gives a file one more name; takes a reference on it.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NotFound`], [`Error::NotPermitted`] for a directory,
    /// [`Error::TooManyLinks`], [`Error::NoSpace`], [`Error::HashCollisions`].
    pub fn link(&self, inode: InodeId, parent: InodeId, name: &[u8]) -> Result<Attributes> {
        self.names().link(inode, parent, name)
    }

    /// Removes a name of something that is not a directory.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::IsDirectory`].
    pub fn unlink(&self, parent: InodeId, name: &[u8]) -> Result<()> {
        self.names().unlink(parent, name)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotDirectory`], [`Error::NotEmpty`].
    pub fn remove_directory(&self, parent: InodeId, name: &[u8]) -> Result<()> {
        self.names().remove_directory(parent, name)
    }

    /// Moves an entry.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Exists`] with [`RenameMode::NoReplace`], [`Error::NotEmpty`],
    /// [`Error::IsDirectory`], [`Error::NotDirectory`], [`Error::InvalidArgument`] for a directory
    /// into itself, [`Error::NoSpace`].
    pub fn rename(
        &self,
        old_parent: InodeId,
        old_name: &[u8],
        new_parent: InodeId,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        self.names().rename(old_parent, old_name, new_parent, new_name, mode)
    }

    /// Moves an entry and creates `left` at its old name, in one step: with a character device 0/0
    /// that is what overlay file systems call a whiteout.
    ///
    /// # Errors
    /// Those of [`Volume::rename`].
    pub fn rename_leaving(
        &self,
        old_parent: InodeId,
        old_name: &[u8],
        new_parent: InodeId,
        new_name: &[u8],
        mode: RenameMode,
        left: &NewInode<'_>,
    ) -> Result<()> {
        self.names().rename_leaving(old_parent, old_name, new_parent, new_name, mode, left)
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InvalidArgument`] for what is no symbolic link.
    pub fn read_link(&self, inode: InodeId) -> Result<Vec<u8>> {
        self.names().read_link(inode)
    }

    /// The directory that contains a directory; the root contains itself.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotDirectory`].
    pub fn parent(&self, directory: InodeId) -> Result<InodeId> {
        self.names().parent(directory)
    }

    /// Lists the entries after `cookie` (0: from the start, without `.` and `..`) until `take`
    /// returns false.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotDirectory`], [`Error::Damaged`].
    pub fn read_directory(
        &self,
        directory: InodeId,
        cookie: u64,
        take: &mut dyn FnMut(DirectoryItem<'_>) -> bool,
    ) -> Result<()> {
        self.names().read_directory(directory, cookie, take)
    }

    /// As [`Volume::read_directory`], with attributes; each entry for which `take` returns true
    /// gets a reference.
    ///
    /// # Errors
    /// Those of [`Volume::read_directory`].
    pub fn read_directory_plus(
        &self,
        directory: InodeId,
        cookie: u64,
        take: &mut dyn FnMut(DirectoryItem<'_>, &Attributes) -> bool,
    ) -> Result<()> {
        self.names().read_directory_plus(directory, cookie, take)
    }
}
