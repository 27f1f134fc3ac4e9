//! Operations on snapshots.
use super::Volume;
use crate::names::entries::check_name;
use crate::store::snapshots::is_temporary_name;
use crate::types::{Apply, ApplyOptions, Attributes, Compared, Difference, ForkOptions, Winner};
use crate::{Error, InodeId, Result, Rollback, RollbackOptions, SnapshotInfo, SnapshotUsage};

/// Snapshots: subvolumes as they were, to read.
impl Volume {
    /// Makes a snapshot of the subvolume with the root directory `root`. Durable when this returns.
    /// It has every change that was complete before this was called.
    ///
    /// # Errors
    /// [`Error::Exists`] if one of the subvolume's snapshots has this name;
    /// [`Error::InvalidArgument`] for an inode that is no root directory of a subvolume, for a
    /// snapshot, and for a name that only temporary snapshots have (`.diff-` and 16 hexadecimal
    /// digits); [`Error::NoSpace`]; the failure that stopped the volume.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # let device = Arc::new(cairn_blockdev::MemoryDevice::new(32 << 20));
    /// # cairn_engine::mkfs::mkfs(&*device, &Default::default())?;
    /// # let volume = cairn_engine::Volume::open(device, Default::default())?;
    /// # let new = cairn_engine::NewInode {
    /// #     file_type: cairn_engine::FileType::Regular,
    /// #     mode: 0o644,
    /// #     uid: 0,
    /// #     gid: 0,
    /// #     device: 0,
    /// #     target: None,
    /// # };
    /// let notes = volume.create(volume.root(), b"notes", &new)?.inode;
    /// volume.write(notes, 0, b"first")?;
    /// let then = volume.create_snapshot(volume.root(), b"then")?;
    /// volume.write(notes, 0, b"other")?;
    ///
    /// let kept = volume.lookup(then.root, b"notes")?.inode;
    /// let mut text = Vec::new();
    /// volume.read(kept, 0, 5, &mut text)?;
    /// assert_eq!(text, b"first");
    /// let refused = volume.write(kept, 0, b"third");
    /// assert!(matches!(refused, Err(cairn_engine::Error::ReadOnly)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn create_snapshot(&self, root: InodeId, name: &[u8]) -> Result<SnapshotInfo> {
        check_name(name)?;
        if is_temporary_name(name) {
            return Err(Error::InvalidArgument("the name is that of a temporary snapshot"));
        }
        self.files().create_snapshot(root, name)
    }

    /// Makes a fork of the subvolume or snapshot with the root directory `source`: a writable
    /// subvolume with this name, which begins as that one and shares its blocks until one of them
    /// changes. Durable when this returns. It has every change that was complete before this was
    /// called. Takes a reference on its root directory.
    ///
    /// A fork's files have the numbers of those that they come from. Subvolumes that are named in
    /// the source aren't in the fork. A snapshot that is deleted keeps its space as long as there
    /// are forks of it.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NameLength`], [`Error::InvalidArgument`] for a source that is no
    /// root directory of a subvolume; [`Error::NoSpace`]; the failure that stopped the volume.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # let device = Arc::new(cairn_blockdev::MemoryDevice::new(32 << 20));
    /// # cairn_engine::mkfs::mkfs(&*device, &Default::default())?;
    /// # let volume = cairn_engine::Volume::open(device, Default::default())?;
    /// # let new = cairn_engine::NewInode {
    /// #     file_type: cairn_engine::FileType::Directory,
    /// #     mode: 0o755,
    /// #     uid: 0,
    /// #     gid: 0,
    /// #     device: 0,
    /// #     target: None,
    /// # };
    /// let base = volume.create_subvolume(volume.root(), b"base", &new)?.inode;
    /// let file = cairn_engine::NewInode { file_type: cairn_engine::FileType::Regular, ..new };
    /// let notes = volume.create(base, b"notes", &file)?.inode;
    /// volume.write(notes, 0, b"first")?;
    ///
    /// let fork = volume.fork(base, volume.root(), b"trial")?.inode;
    /// let copy = volume.lookup(fork, b"notes")?.inode;
    /// volume.write(copy, 0, b"other")?;
    /// let mut text = Vec::new();
    /// volume.read(notes, 0, 5, &mut text)?;
    /// assert_eq!(text, b"first");
    /// volume.remove_subvolume(volume.root(), b"trial")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fork(&self, source: InodeId, parent: InodeId, name: &[u8]) -> Result<Attributes> {
        self.fork_with(source, parent, name, ForkOptions::default())
    }

    /// As [`Volume::fork`], with [`ForkOptions`].
    ///
    /// # Errors
    /// As there.
    pub fn fork_with(
        &self,
        source: InodeId,
        parent: InodeId,
        name: &[u8],
        options: ForkOptions,
    ) -> Result<Attributes> {
        self.names().fork(source, parent, name, options)
    }

    /// Has the subvolume `name` in the directory `parent` become what its snapshot with the root
    /// directory `snapshot` holds. Durable when this returns; after a crash before that, nothing or
    /// all of it has happened. The work is that of two commits, whatever the size.
    ///
    /// A fork of the snapshot gets the name. What had it keeps its content, with all that others
    /// have changed meanwhile, the subvolumes that are nested in it and its snapshots, and stands
    /// beside it as `name~before-rollback-1`, or the next number that is free: so inodes that
    /// somebody uses stay what they were, and are found under another name. The fork *continues*
    /// it: its snapshots are shown by both, and the fork may be rolled back to any of them. If it
    /// is the subvolume that mounts show by default, the fork is from then on.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::InvalidArgument`] for what is no subvolume, and for no
    /// snapshot of it; [`Error::Stale`] if that is deleted at the same time;
    /// [`Error::TooManyLinks`]; [`Error::NoSpace`]; the failure that stopped the volume.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # let device = Arc::new(cairn_blockdev::MemoryDevice::new(32 << 20));
    /// # cairn_engine::mkfs::mkfs(&*device, &Default::default())?;
    /// # let volume = cairn_engine::Volume::open(device, Default::default())?;
    /// # let new = cairn_engine::NewInode {
    /// #     file_type: cairn_engine::FileType::Directory,
    /// #     mode: 0o755,
    /// #     uid: 0,
    /// #     gid: 0,
    /// #     device: 0,
    /// #     target: None,
    /// # };
    /// let home = volume.create_subvolume(volume.root(), b"home", &new)?.inode;
    /// let file = cairn_engine::NewInode { file_type: cairn_engine::FileType::Regular, ..new };
    /// let notes = volume.create(home, b"notes", &file)?.inode;
    /// volume.write(notes, 0, b"first")?;
    /// let then = volume.create_snapshot(home, b"then")?;
    /// volume.write(notes, 0, b"other")?;
    ///
    /// let rolled_back = volume.rollback(volume.root(), b"home", then.root)?;
    /// let text = |inode| {
    ///     let mut text = Vec::new();
    ///     volume.read(inode, 0, 5, &mut text).map(|_| text)
    /// };
    /// let home = volume.lookup(volume.root(), b"home")?.inode;
    /// assert_eq!(home, rolled_back.root);
    /// assert_eq!(text(volume.lookup(home, b"notes")?.inode)?, b"first");
    /// assert_eq!(text(notes)?, b"other");
    /// assert_eq!(rolled_back.old_name, b"home~before-rollback-1");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rollback(&self, parent: InodeId, name: &[u8], snapshot: InodeId) -> Result<Rollback> {
        let options = RollbackOptions { permits: &|_| Ok(()), carried: None };
        self.rollback_with(parent, name, snapshot, options)
    }

    /// As [`Volume::rollback`], with [`RollbackOptions`]. Nobody changes the root directory of what
    /// is rolled back, or its name, between a look and the rollback.
    ///
    /// # Errors
    /// That of [`RollbackOptions::permits`], too.
    pub fn rollback_with(
        &self,
        parent: InodeId,
        name: &[u8],
        snapshot: InodeId,
        options: RollbackOptions<'_>,
    ) -> Result<Rollback> {
        self.names().rollback(parent, name, snapshot, options)
    }

    /// The subvolumes that have stood in the place of this one, one after the other, itself
    /// included, by ascending id: each was put there by a [`rollback`](Volume::rollback), and shows
    /// the snapshots of those before it, too. Some of them may be without a name.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Device`].
    pub fn line_of_subvolume(&self, subvolume: u64) -> Result<Vec<u64>> {
        self.store().line_of(subvolume)
    }

    /// The snapshots of a subvolume, by age, the oldest first. Of one that
    /// [continues](Volume::rollback) others, also theirs: [`SnapshotInfo::subvolume`] says whose a
    /// snapshot is.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no such subvolume; [`Error::Damaged`], [`Error::Device`].
    pub fn snapshots(&self, subvolume: u64) -> Result<Vec<SnapshotInfo>> {
        self.store().snapshots(subvolume)
    }

    /// The snapshot of a subvolume with this name, or of one that it continues.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Damaged`], [`Error::Device`].
    pub fn snapshot_named(&self, subvolume: u64, name: &[u8]) -> Result<SnapshotInfo> {
        self.store().snapshot_named(subvolume, name)
    }

    /// The subvolumes that have snapshots of their own, by ascending id.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Device`].
    pub fn snapshotted_subvolumes(&self) -> Result<Vec<u64>> {
        self.store().snapshotted_subvolumes()
    }

    /// Deletes a snapshot, as [`Volume::snapshot_named`] finds it. Durable when this returns; its
    /// space comes back later. Who uses an inode of it gets [`Error::Stale`].
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Busy`] if it is held; the failure that stopped the volume.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # let device = Arc::new(cairn_blockdev::MemoryDevice::new(32 << 20));
    /// # cairn_engine::mkfs::mkfs(&*device, &Default::default())?;
    /// # let volume = cairn_engine::Volume::open(device, Default::default())?;
    /// let then = volume.create_snapshot(volume.root(), b"then")?;
    /// volume.hold_snapshot(then.subvolume, b"then", true)?;
    /// let refused = volume.delete_snapshot(then.subvolume, b"then");
    /// assert!(matches!(refused, Err(cairn_engine::Error::Busy)));
    ///
    /// volume.hold_snapshot(then.subvolume, b"then", false)?;
    /// volume.delete_snapshot(then.subvolume, b"then")?;
    /// assert!(volume.snapshots(then.subvolume)?.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn delete_snapshot(&self, subvolume: u64, name: &[u8]) -> Result<()> {
        self.files().delete_snapshot(subvolume, name)
    }

    /// Holds a snapshot, so that it can't be deleted, or releases it, as [`Volume::snapshot_named`]
    /// finds it. Durable when this returns.
    ///
    /// # Errors
    /// [`Error::NotFound`]; the failure that stopped the volume.
    pub fn hold_snapshot(&self, subvolume: u64, name: &[u8], held: bool) -> Result<()> {
        self.store().hold_snapshot(subvolume, name, held)
    }

    /// How much space each snapshot of a subvolume's own holds, the oldest first.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Damaged`], [`Error::Device`].
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # let device = Arc::new(cairn_blockdev::MemoryDevice::new(32 << 20));
    /// # cairn_engine::mkfs::mkfs(&*device, &Default::default())?;
    /// # let volume = cairn_engine::Volume::open(device, Default::default())?;
    /// # let new = cairn_engine::NewInode {
    /// #     file_type: cairn_engine::FileType::Regular,
    /// #     mode: 0o644,
    /// #     uid: 0,
    /// #     gid: 0,
    /// #     device: 0,
    /// #     target: None,
    /// # };
    /// let file = volume.create(volume.root(), b"file", &new)?.inode;
    /// volume.write(file, 0, &[1; 400_000])?;
    /// let then = volume.create_snapshot(volume.root(), b"then")?;
    /// volume.write(file, 0, &[2; 400_000])?;
    /// volume.sync()?;
    ///
    /// // What the file held, 98 blocks, and nodes: the deletion of the snapshot frees them.
    /// let usage = volume.snapshot_usage(then.subvolume)?;
    /// assert!(usage[0].unique_blocks >= 98);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn snapshot_usage(&self, subvolume: u64) -> Result<Vec<SnapshotUsage>> {
        self.store().snapshot_usage(subvolume)
    }

    /// What differs between a subvolume at two times, by path: `old` and `new` are the root
    /// directories of snapshots of it, or its own. The work is in proportion to what differs, but
    /// for the paths of changed files (see below).
    ///
    /// - Directories are listed with all that is in them when they come or go, but not when they
    ///   move: what is in them is then found by its new path, if it has changed.
    /// - A changed inode is listed with each of its names, but for those that are new.
    /// - Data counts as changed when it was written, also if it was the same before. Times of last
    ///   access and of last change of attributes don't count.
    /// - Subvolumes that are nested in this one are left out.
    ///
    /// Of a subvolume that can change, a temporary snapshot is made, and deleted before this
    /// returns: two commits. After a crash the next mount deletes it.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # let device = Arc::new(cairn_blockdev::MemoryDevice::new(32 << 20));
    /// # cairn_engine::mkfs::mkfs(&*device, &Default::default())?;
    /// # let volume = cairn_engine::Volume::open(device, Default::default())?;
    /// use cairn_engine::{DifferenceKind, FileType, NewInode, RenameMode};
    ///
    /// let new = NewInode {
    ///     file_type: FileType::Regular,
    ///     mode: 0o644,
    ///     uid: 0,
    ///     gid: 0,
    ///     device: 0,
    ///     target: None,
    /// };
    /// let root = volume.root();
    /// let notes = volume.create(root, b"notes", &new)?.inode;
    /// volume.create(root, b"draft", &new)?;
    /// let before = volume.create_snapshot(root, b"before")?;
    ///
    /// volume.write(notes, 0, b"more")?;
    /// volume.rename(root, b"draft", root, b"letter", RenameMode::Replace)?;
    ///
    /// let found = volume.differences(before.root, root)?;
    /// assert_eq!(found[0].path, b"letter");
    /// assert_eq!(found[0].kind, DifferenceKind::Moved { from: b"draft".to_vec() });
    /// assert_eq!(found[1].path, b"notes");
    /// assert!(matches!(found[1].kind, DifferenceKind::Changed(changes) if changes.data));
    /// assert_eq!(found.len(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # The work
    /// Nodes of the trees that both have are not read. A directory knows its parent, but a file
    /// does not know where its name is: for a file that has changed and kept its name, directories
    /// are searched, those first that were made shortly before it. One that was moved there, or
    /// that has several names, may cost a look at all directories.
    ///
    /// # Errors
    /// [`Error::CrossDevice`] if they are not of one subvolume or forks of it;
    /// [`Error::InvalidArgument`] for an inode that is no root of a subvolume or snapshot;
    /// [`Error::Stale`] if a snapshot was deleted; [`Error::NoSpace`] and the failure that stopped
    /// the volume, if a snapshot has to be made; [`Error::Damaged`], [`Error::Device`].
    pub fn differences(&self, old: InodeId, new: InodeId) -> Result<Vec<Difference>> {
        let Compared { differences, damage } = self.compare(old, new)?;
        damage.into_iter().next().map_or(Ok(differences), Err)
    }

    /// As [`Volume::differences`], but goes on where damage hides a path.
    ///
    /// # Errors
    /// As there, but for damage that only hides paths.
    pub fn compare(&self, old: InodeId, new: InodeId) -> Result<Compared> {
        self.names().compare(old, new)
    }

    /// The root directory of the subvolume that a fork came from, or of what has its place since it
    /// was rolled back: [`Volume::apply`] changes it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what is no root directory of a fork; [`Error::NotFound`] if
    /// the subvolume is gone.
    pub fn origin_of_fork(&self, fork: InodeId) -> Result<InodeId> {
        self.origins_of_fork(fork)?.first().copied().ok_or(Error::NotFound)
    }

    /// The root directories of the subvolume that a fork came from, and of those that rollbacks
    /// have put into its place, as far as they are there, the last one first: each may be the
    /// [target](ApplyOptions::target) of an application.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what is no root directory of a fork.
    pub fn origins_of_fork(&self, fork: InodeId) -> Result<Vec<InodeId>> {
        self.names().origins_of_fork(fork)
    }

    /// Applies what has changed in a fork since it was made to the subvolume that it came from,
    /// which may have changed, too: all of it or nothing, also after a crash. Durable when this
    /// returns. The fork stays as it is.
    ///
    /// - A file counts as one thing. If only the fork has changed it, it gets the fork's data,
    ///   attributes, times and extended attributes, and stays the same inode; who has it open sees
    ///   that. Of its names the same holds apart from that.
    /// - Of a directory, its entries count, one by one, and its attributes.
    /// - What both have changed, and not in the same way, is a conflict. With one of them nothing
    ///   is changed, unless `winner` decides all. If the origin wins, what belongs together in the
    ///   fork is left out together: a new directory with what is in it, both ends of a move.
    /// - Subvolumes that are nested in either are left out. Preallocated space is not applied.
    ///
    /// What the fork writes was copied before, so it takes space of its own in both. The work is in
    /// proportion to what differs; others can't change the volume while the trees are changed.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # let device = Arc::new(cairn_blockdev::MemoryDevice::new(32 << 20));
    /// # cairn_engine::mkfs::mkfs(&*device, &Default::default())?;
    /// # let volume = cairn_engine::Volume::open(device, Default::default())?;
    /// # let new = cairn_engine::NewInode {
    /// #     file_type: cairn_engine::FileType::Directory,
    /// #     mode: 0o755,
    /// #     uid: 0,
    /// #     gid: 0,
    /// #     device: 0,
    /// #     target: None,
    /// # };
    /// use cairn_engine::{Apply, Winner};
    ///
    /// let base = volume.create_subvolume(volume.root(), b"base", &new)?.inode;
    /// let file = cairn_engine::NewInode { file_type: cairn_engine::FileType::Regular, ..new };
    /// let notes = volume.create(base, b"notes", &file)?.inode;
    /// volume.write(notes, 0, b"first")?;
    ///
    /// let fork = volume.fork(base, volume.root(), b"trial")?.inode;
    /// let copy = volume.lookup(fork, b"notes")?.inode;
    /// volume.write(copy, 0, b"other")?;
    /// assert!(matches!(volume.apply(fork, Winner::Neither)?, Apply::Done(_)));
    /// let mut text = Vec::new();
    /// volume.read(notes, 0, 5, &mut text)?;
    /// assert_eq!(text, b"other");
    ///
    /// volume.write(copy, 0, b"fork ")?;
    /// volume.write(notes, 0, b"base ")?;
    /// let Apply::Conflicts(conflicts) = volume.apply(fork, Winner::Neither)? else { panic!() };
    /// assert_eq!(conflicts[0].path, b"notes");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As of [`Volume::origin_of_fork`]; [`Error::Busy`] if the subvolume changes all the time;
    /// [`Error::TooMuchAtOnce`], [`Error::NoSpace`]; the failure that stopped the volume;
    /// [`Error::Damaged`], [`Error::Device`], [`Error::DataChecksum`].
    pub fn apply(&self, fork: InodeId, winner: Winner) -> Result<Apply> {
        self.apply_with(fork, ApplyOptions { winner, ..ApplyOptions::default() })
    }

    /// As [`Volume::apply`], with [`ApplyOptions`].
    ///
    /// # Errors
    /// As there.
    pub fn apply_with(&self, fork: InodeId, options: ApplyOptions<'_>) -> Result<Apply> {
        self.names().apply(fork, options)
    }

    /// Deletes a subvolume's own snapshots that these transactions made, in one commit, as
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
