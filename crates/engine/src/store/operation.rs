//! An operation: joined to a transaction, it changes items in the tree and logs them together.
//!
//! 1. [`Store::begin`]: reserve (may sleep), then join. No inode lock is held.
//! 2. Lock inodes; [`Operation::put`], [`Operation::delete`] change the tree and collect the items.
//! 3. [`Operation::log`] with the inode locks still held: the items enter the CIL in one step.
//! 4. Unlock the inodes, drop the operation: it leaves and gives back what it did not use, but for
//!    what the cut needs to write down what died.
//!
//! An operation that changed the tree and is dropped before it logged (an error halfway) has left
//! the tree between two states that no log describes; the volume stops, and the durable state
//! remains what it was.
use crate::store::Store;
use crate::store::transaction::Handle;
use crate::store::trees::Subvolume;
use crate::{Error, InodeId, Result};
use cairn_btree::{Change, Tree, TreeError};
use cairn_format::{
    BlockRange, DeadRun, DirectoryEntry, EntryFlags, EntryTarget, Extent, ExtentKind, FileBlock,
    Generation, InodeItem, ItemKind, Key, LogSeq,
};
use cairn_log::{Batch, DataWrite};
use cairn_space::{Request, Reservation, SpaceError, Urgency};

/// Items that an operation on many of them changes at a time.
pub(crate) const BATCH_ITEMS: usize = 32;

/// What an operation may wait for and what space it may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Effort {
    /// Waits for everything; leaves the global reserve alone.
    Ordinary,
    /// A name or a small attribute: as `Ordinary`, and when nothing is left may use a quarter of
    /// the global reserve.
    Name,
    /// Writes data that was accepted: waits for commits, may use half of the global reserve.
    Writeback,
    /// Gives more back than it takes: waits for commits, may use the global reserve but for the
    /// commit's part.
    Removal,
    /// As `Removal`, also where snapshots or an origin are: what it removes comes back, or it
    /// writes data that was accepted and can't be written otherwise.
    Cleanup,
    /// Runs on a thread of space reclaim, on which others wait: as `Removal`, but waits for
    /// nothing.
    Reclaim,
}

/// A joined operation.
pub(crate) struct Operation<'v> {
    store: &'v Store,
    /// The one whose tree it changes.
    subvolume: &'v Subvolume,
    /// Another one, in which it changes inodes and entries, too.
    other: Option<&'v Subvolume>,
    batch: Batch,
    changed: bool,
    reservation: Reservation,
    /// Nodes that were reserved.
    worst_case_nodes: u64,
    handle: Handle<'v>,
}

impl Store {
    /// Begins an operation that changes at most `items` items in the tree of `inode` and allocates
    /// `data_blocks` blocks of data itself.
    pub(crate) fn begin(
        &self,
        inode: InodeId,
        items: u64,
        data_blocks: u64,
        effort: Effort,
    ) -> Result<Operation<'_>> {
        let operation = self.begin_with(inode, items, data_blocks, effort, || 0)?;
        // The commit that follows the end of a subvolume waits for those who joined before it.
        operation.subvolume.check_alive()?;
        Ok(operation)
    }

    /// As [`Store::begin`], with so many `nodes` more; also for a subvolume that has ended.
    pub(super) fn begin_with(
        &self,
        inode: InodeId,
        items: u64,
        data_blocks: u64,
        effort: Effort,
        nodes_more: impl Fn() -> u64,
    ) -> Result<Operation<'_>> {
        self.check_writable()?;
        if effort != Effort::Reclaim {
            self.throttle()?;
        }
        let subvolume = self.trees.subvolume(inode)?;
        subvolume.check_writable()?;
        let nodes_now = || {
            let own = subvolume.open_tree().map_or(0, |tree| tree.worst_case_joined(items));
            let nodes = own + nodes_more();
            nodes + self.nodes_for_cut(items + nodes)
        };
        loop {
            let nodes = nodes_now();
            let tree = subvolume.open_tree();
            let keeps = tree.is_some_and(|tree| tree.boundary().shared_until().0 > 0);
            let reservation = self.reserve_where(Request { data_blocks, nodes }, effort, keeps)?;
            let handle = self.transactions.join()?;
            if nodes_now() <= nodes {
                return Ok(Operation::new(self, subvolume, reservation, handle));
            }
            // The tree grew by a level meanwhile, which is rare: reserving for it each time would
            // cost more than this.
        }
    }

    /// Begins an operation that changes `fixed_items` items and up to some number of others, which
    /// is returned: on a full volume it may be only one.
    pub(crate) fn begin_batch(
        &self,
        inode: InodeId,
        fixed_items: u64,
        data_blocks: u64,
        effort: Effort,
    ) -> Result<(Operation<'_>, usize)> {
        let mut batch = self.batch_now(inode, fixed_items);
        loop {
            match self.begin(inode, fixed_items + batch as u64, data_blocks, effort) {
                Err(Error::NoSpace) if batch > 1 => batch = (batch / 4).max(1),
                Err(error) => return Err(error),
                Ok(operation) => return Ok((operation, batch)),
            }
        }
    }

    /// How many items beside `fixed_items` an operation may ask for at once. When space is short,
    /// few: the worst case of many would keep most of the reserve from everybody else for as long
    /// as the operation lasts.
    fn batch_now(&self, inode: InodeId, fixed_items: u64) -> usize {
        let tree = self.trees.of(inode);
        let worst = |batch: usize| tree.worst_case_joined(fixed_items + batch as u64);
        let space = self.space.report();
        let spare =
            space.free_clusters.saturating_sub(space.reserved_nodes + space.global_reserve_nodes);
        if spare >= 2 * worst(BATCH_ITEMS) && space.available_blocks > 0 {
            return BATCH_ITEMS;
        }
        let share = space.global_reserve_nodes / 8;
        [BATCH_ITEMS, 8, 2].into_iter().find(|batch| worst(*batch) <= share).unwrap_or(1)
    }

    /// Reserves space with the patience of `effort`.
    pub(crate) fn reserve(&self, request: Request, effort: Effort) -> Result<Reservation> {
        self.reserve_where(request, effort, false)
    }

    /// As [`Store::reserve`]; `keeps`: others have what is removed.
    pub(super) fn reserve_where(
        &self,
        request: Request,
        effort: Effort,
        keeps: bool,
    ) -> Result<Reservation> {
        let removal = if keeps { Urgency::RemovalKept } else { Urgency::Removal };
        if matches!(effort, Effort::Ordinary | Effort::Name) {
            self.check_storage_room()?;
        }
        let reserved = match effort {
            Effort::Ordinary => self.space.reserve(request, Urgency::Ordinary),
            Effort::Name => self.space.reserve(request, Urgency::Name),
            Effort::Writeback => self.space.reserve(request, Urgency::Writeback),
            Effort::Removal => self.space.reserve(request, removal),
            Effort::Cleanup => self.space.reserve(request, Urgency::Removal),
            Effort::Reclaim => return Ok(self.space.try_reserve(request, removal)?),
        };
        if matches!(reserved, Err(SpaceError::NoSpace { .. })) && self.trees.dead_runs().is_some() {
            self.snapshot_counts.refusals.note();
        }
        Ok(reserved?)
    }

    /// Waits while more was changed than a commit or the log should have to write.
    pub(crate) fn throttle(&self) -> Result<()> {
        self.throttle_dirty_nodes()?;
        self.throttle_dead_runs()?;
        Ok(self.log.throttle()?)
    }

    /// Dirty nodes can't leave memory before a commit: asks for one early, and when that is not
    /// enough waits for one. The caller may hold the extents of a file, and a commit calls back
    /// those whose fsyncs it ends: so it does none itself.
    fn throttle_dirty_nodes(&self) -> Result<()> {
        let (dirty, limit) = (self.cache.dirty_bytes(), self.options.node_cache_bytes / 2);
        if dirty > 2 * limit || self.must_write_nodes(dirty) {
            return self.wait_for_commit();
        }
        if dirty > limit {
            self.signal.request();
        }
        Ok(())
    }
}

impl<'v> Operation<'v> {
    pub(super) fn new(
        store: &'v Store,
        subvolume: &'v Subvolume,
        reservation: Reservation,
        handle: Handle<'v>,
    ) -> Self {
        let (batch, worst_case_nodes) = (Batch::new(), reservation.nodes());
        let (other, changed) = (None, false);
        Self { store, subvolume, other, batch, changed, reservation, worst_case_nodes, handle }
    }

    pub(super) fn store(&self) -> &'v Store {
        self.store
    }

    /// The subvolume whose tree or snapshots the operation changes.
    pub(super) fn subvolume(&self) -> &'v Subvolume {
        self.subvolume
    }

    /// The tree that the operation changes.
    pub(super) fn tree(&self) -> &'v Tree {
        self.subvolume.tree()
    }

    /// The tree of an inode.
    fn tree_of(&self, inode: InodeId) -> &'v Tree {
        let other = self.other.filter(|other| other.slot == inode.slot());
        other.unwrap_or(self.subvolume).tree()
    }

    /// Inodes and entries of `other` may change, too.
    pub(super) fn add_subvolume(&mut self, other: &'v Subvolume) {
        self.other = Some(other);
    }

    /// For changes of trees.
    pub(super) fn change(&self) -> Change<'_> {
        Change { generation: self.handle.generation(), reservation: &self.reservation }
    }

    /// Something changes that the log does not know: see [`Batch::need_commit`].
    pub(crate) fn note_unlogged_change(&mut self) {
        self.changed = true;
        self.batch.need_commit();
    }

    /// Nothing of the operation is logged: a crash before the superblock undoes it.
    pub(super) fn leave_unlogged(&mut self) {
        self.changed = false;
        self.batch.clear();
    }

    /// A part of what was reserved, for what is done after the operation.
    pub(super) fn split(&mut self, nodes: u64) -> Reservation {
        self.worst_case_nodes -= nodes;
        self.reservation.split(0, nodes)
    }

    /// The transaction that was joined.
    pub(crate) fn generation(&self) -> Generation {
        self.handle.generation()
    }

    /// The newest snapshot that the subvolume has had since the volume was opened; 0 without one.
    /// What is logged holds for it, too: a crash may undo its deletion, and not the log.
    pub(crate) fn newest_snapshot(&self) -> Generation {
        self.tree().boundary().newest_seen()
    }

    /// What the operation may still allocate.
    pub(crate) fn reservation(&self) -> &Reservation {
        &self.reservation
    }

    /// Changes the tree, and logs the item unless the tree had it as it is: then an earlier
    /// operation has logged it, or a superblock covers it. What the tree did not have need not be
    /// logged at all if it is removed soon. Returns whether the tree had the item already.
    fn insert(&mut self, tree: &Tree, key: Key, value: &[u8], flags: EntryFlags) -> Result<bool> {
        self.changed = true;
        let change = self.change();
        let was_the_same = tree.insert_with(&change, key, value, |old| old == value)?;
        match was_the_same {
            None => {
                self.store.inode_count.note_new(tree, &key);
                self.batch.put_new(tree.id(), key, value, flags);
            }
            Some(false) => self.batch.put(tree.id(), key, value, flags),
            Some(true) => {}
        }
        Ok(was_the_same.is_some())
    }

    /// Inserts or replaces an item.
    pub(crate) fn put(&mut self, key: Key, value: &[u8]) -> Result<()> {
        self.insert(self.tree(), key, value, EntryFlags::default()).map(drop)
    }

    /// Inserts an item that did not exist.
    pub(crate) fn put_new(&mut self, key: Key, value: &[u8]) -> Result<()> {
        let existed = self.insert(self.tree(), key, value, EntryFlags::default())?;
        debug_assert!(!existed, "{key:?} existed");
        Ok(())
    }

    /// Inserts or replaces an inode's attributes.
    pub(crate) fn put_inode(&mut self, inode: InodeId, item: &InodeItem) -> Result<()> {
        let key = inode.key(ItemKind::Inode, 0);
        self.insert(self.tree_of(inode), key, &item.encode(), EntryFlags::default()).map(drop)
    }

    /// Inserts or replaces the entry in `slot` of a directory: `name` stands for `target`.
    pub(crate) fn put_entry(
        &mut self,
        directory: InodeId,
        slot: u64,
        target: EntryTarget,
        name: &[u8],
    ) -> Result<()> {
        let mut buffer = [0; DirectoryEntry::BYTES_MAX];
        let value = DirectoryEntry::encode_in(&mut buffer, target, name);
        let key = directory.key(ItemKind::DirectoryEntry, slot);
        self.insert(self.tree_of(directory), key, value, EntryFlags::default()).map(drop)
    }

    /// Inserts or replaces the item of the extent that begins at `file_block`. Leaves the allocator
    /// alone.
    pub(crate) fn put_extent(
        &mut self,
        inode: InodeId,
        file_block: FileBlock,
        extent: &Extent,
    ) -> Result<()> {
        let key = inode.extent_key(file_block);
        let new_data = extent.kind == ExtentKind::Data && extent.written == self.generation();
        let flags = if new_data { EntryFlags::NEW_DATA } else { EntryFlags::default() };
        if extent.written != extent.generation && !self.store.trees.has_durable_dead_runs() {
            // A program that doesn't know such extents must not come to replay it.
            self.batch.need_commit();
        }
        self.insert(self.tree_of(inode), key, &extent.encode(), flags).map(drop)
    }

    /// Removes an item, if it exists.
    pub(crate) fn delete(&mut self, key: Key) -> Result<()> {
        self.delete_in(self.tree(), key)
    }

    /// Removes an item of an inode, if it exists.
    pub(crate) fn delete_of(&mut self, inode: InodeId, key: Key) -> Result<()> {
        self.delete_in(self.tree_of(inode), key)
    }

    fn delete_in(&mut self, tree: &Tree, key: Key) -> Result<()> {
        self.changed = true;
        let change = self.change();
        if tree.remove_with(&change, &key, |_| ())?.is_some() {
            self.store.inode_count.note_gone(tree, &key);
            self.batch.delete(tree.id(), key);
        }
        Ok(())
    }

    /// Removes an item of the operation's tree, if it exists, without logging it. If a node can't
    /// be read for that, nothing is changed.
    pub(super) fn delete_unlogged(&mut self, key: &Key) -> Result<()> {
        let removed = self.tree().remove_with(&self.change(), key, |_| ());
        let is_unread =
            matches!(removed, Err(TreeError::Device { .. } | TreeError::Damaged { .. }));
        self.changed |= !is_unread;
        if removed?.is_some() {
            self.store.inode_count.note_gone(self.tree(), key);
        }
        Ok(())
    }

    /// Allocated blocks that an item of this operation refers to.
    pub(crate) fn reference(&mut self, range: BlockRange) {
        self.changed = true;
        self.store.space.reference(range);
    }

    /// The blocks of an extent, or of a part of one, that no item refers to any more.
    pub(crate) fn free(&mut self, extent: &Extent) -> Result<()> {
        self.changed = true;
        let run = DeadRun { range: extent.range(), birth: extent.generation, is_node: false };
        let boundary = self.subvolume.tree().boundary();
        Ok(self.store.space.give_up(run, boundary, self.handle.generation())?)
    }

    /// Puts the collected items into the CIL. The locks of all inodes concerned are held.
    pub(crate) fn log(&mut self) -> LogSeq {
        self.changed = false;
        if self.batch.is_empty() {
            self.store.log.last()
        } else {
            self.store.log.insert(&mut self.batch)
        }
    }

    /// As [`Operation::log`]; the items refer to `data`, which the log writes.
    pub(crate) fn log_with_data(&mut self, data: Vec<DataWrite>) -> LogSeq {
        self.changed = false;
        self.store.log.insert_with_data(&mut self.batch, data)
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        let used_nodes = self.worst_case_nodes.saturating_sub(self.reservation.nodes());
        self.store.counters.note_worst_case(used_nodes * 100 / self.worst_case_nodes.max(1));
        self.store.keep_for_cut(&self.reservation);
        if self.changed && self.store.transactions.failure().is_none() {
            // The caller may hold the file's extents.
            self.store.fail_under_locks(&Error::Aborted("an operation failed halfway".into()));
        }
    }
}
