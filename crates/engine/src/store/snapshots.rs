//! Snapshots: made at a cut, deleted, and what their deletion leaves to do.
//!
//! A snapshot is the root pointer of a subvolume's tree at a cut; making one copies nothing. From
//! then on the subvolume keeps what it gives up and the snapshot has: such a *dead run* stays
//! referenced and enters a *dead list* at the next cut. Each snapshot begins a list. So a run born
//! at b, in a list begun at s, is of exactly those snapshots that were made in [b, s].
//!
//! - **Creation** is requested, and done by the next cut ([`Store::make_requested_snapshots`]).
//!   Nothing shows the snapshot before its superblock is durable: its nodes are read from the
//!   device. *A crash before that: there is no snapshot, and what died later is freed by replay.*
//! - **Deletion** of the snapshot j, with p before it (or 0) and n behind it, is one operation: its
//!   item goes, a *cleanup* says that births in (p, j] of lists begun in [j, n) are nobody's.
//!   Without n it is the lists begun before now, since a snapshot to come may have such births,
//!   too. *A crash before the superblock: the snapshot is there. After it: the next mount goes on.*
//! - **Cleanup** (`cleanups.rs`): the runs leave the lists, and their blocks become free.
//!
//! None of this is logged. Whoever uses an inode of a deleted snapshot gets [`Error::Stale`].
//!
//! Invariant: the boundary is raised by a cut, and lowered with the lock of the tree of subvolumes
//! held, together with the item.
use super::Store;
use super::cut_work::{Source, Wanted};
use super::operation::{Effort, Operation};
use super::trees::Records;
use super::trees::snapshot_names::Named;
use crate::types::now_ns;
use crate::{Error, InodeId, Result};
use cairn_btree::{Change, Tree};
use cairn_environment::random;
use cairn_format::{CleanupItem, DeadRun, Generation, ItemKind, Key, Origin, SnapshotItem, TreeId};
use cairn_space::{DeadCount, Request, Reservation, Urgency};
use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

/// Dead runs in memory from which on a commit is asked for, and from which on operations wait for
/// one.
const DEAD_RUNS_MANY: u64 = 1 << 16;
const DEAD_RUNS_MAX: u64 = 1 << 20;

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

impl SnapshotInfo {
    /// Whether it exists only while a subvolume is read that others change
    /// ([`Volume::differences`](crate::Volume::differences)).
    pub fn is_temporary(&self) -> bool {
        is_temporary_name(&self.name)
    }
}

/// Temporary snapshots have names of this beginning and so many digits; no others have.
const TEMPORARY: &str = ".diff-";
const TEMPORARY_DIGITS: usize = 16;

/// A name for a temporary snapshot.
pub(crate) fn temporary_name() -> Vec<u8> {
    format!("{TEMPORARY}{:0TEMPORARY_DIGITS$x}", random::u64()).into_bytes()
}

/// Whether a snapshot with this name is a temporary one: it exists while a subvolume is read that
/// others change, and if a crash left it, the next mount deletes it.
///
/// ```
/// assert!(cairn_engine::is_temporary_name(b".diff-0123456789abcdef"));
/// assert!(!cairn_engine::is_temporary_name(b".diff-today"));
/// ```
pub fn is_temporary_name(name: &[u8]) -> bool {
    let digits = name.strip_prefix(TEMPORARY.as_bytes()).unwrap_or_default();
    digits.len() == TEMPORARY_DIGITS
        && digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// How a snapshot of a subvolume is called.
#[derive(Clone, Copy)]
pub(crate) enum Which<'n> {
    Named(&'n [u8]),
    MadeBy(Generation),
}

/// Nodes that writing `dead` at the cut takes at most: on each place of the tree of dead runs that
/// is changed a path, and a node for each item, which follows its neighbour.
fn nodes_for(dead: DeadCount, tree: &Tree) -> u64 {
    let items = dead.runs / DeadRun::PER_ITEM as u64 + dead.lists;
    (dead.lists + 1) * tree.worst_case_joined(1) + items
}

fn info_of(id: TreeId, generation: Generation, item: SnapshotItem) -> SnapshotInfo {
    SnapshotInfo {
        subvolume: id.0,
        generation: generation.0,
        created_ns: item.created_ns,
        uuid: item.uuid,
        is_held: item.is_held,
        root: InodeId::root_of(item.number),
        name: item.name,
    }
}

impl Store {
    /// Nodes that an operation with up to `references` deaths brings for the cut.
    pub(super) fn nodes_for_cut(&self, references: u64) -> u64 {
        let Some(tree) = self.trees.dead_runs() else { return 0 };
        // It may change two subvolumes, and each of them alone fills an item.
        nodes_for(DeadCount { runs: references, lists: 2 }, tree)
    }

    /// An operation ends: leaves of its reservation what the cut lacks for what has died.
    pub(super) fn keep_for_cut(&self, reservation: &Reservation) {
        let Some(tree) = self.trees.dead_runs() else { return };
        let dead = self.space.count_dead();
        if dead.runs == 0 {
            return;
        }
        let wanted = nodes_for(dead, tree);
        let mut room = self.cut_work.room.lock();
        let held = room.as_ref().map_or(0, Reservation::nodes);
        let more = wanted.saturating_sub(held).min(reservation.nodes());
        if more > 0 {
            let part = reservation.split(0, more);
            match &*room {
                Some(room) => room.merge(part),
                None => *room = Some(part),
            }
        }
    }

    /// Dead runs stay in memory until a commit: asks for one early, and when that is not enough
    /// waits for one.
    pub(super) fn throttle_dead_runs(&self) -> Result<()> {
        if self.trees.dead_runs().is_none() {
            return Ok(());
        }
        let dead = self.space.count_dead();
        if dead.runs > DEAD_RUNS_MAX {
            return self.wait_for_commit();
        }
        if dead.runs > DEAD_RUNS_MANY {
            self.signal.request();
        }
        Ok(())
    }

    /// At the cut: what has died since the one before enters the dead lists.
    pub(super) fn write_dead_runs(&self, generation: Generation) -> Result<()> {
        let dead = self.space.take_dead();
        let room = self.cut_work.room.lock().take();
        let Some(tree) = self.trees.dead_runs().filter(|_| !dead.is_empty()) else { return Ok(()) };
        let insert = |list: u64, runs: &[DeadRun]| {
            for (runs, count) in runs.chunks(DeadRun::PER_ITEM).zip(0..) {
                // Recovery has no operations that bring room.
                let nodes = tree.worst_case_joined(1);
                let reservation = match room.as_ref().filter(|room| room.nodes() >= nodes) {
                    Some(room) => room.split(0, nodes),
                    None => {
                        self.space.reserve(Request { data_blocks: 0, nodes }, Urgency::Commit)?
                    }
                };
                let key = Key::dead_runs(list, generation, count);
                let change = Change { generation, reservation: &reservation };
                tree.insert(&change, key, &DeadRun::encode_all(runs))?;
                if let Some(room) = &room {
                    room.merge(reservation);
                }
            }
            Result::Ok(())
        };
        for (list, mut runs) in dead {
            // A cleanup takes runs of neighbouring births: few items have them.
            runs.sort_unstable_by_key(|run| (run.birth, run.range.start));
            self.list_births.while_adding(list, || insert(list, &runs))?;
        }
        Ok(())
    }

    /// At the cut, when what died before is in the lists: makes the snapshots that are wanted, one
    /// of each subvolume.
    pub(super) fn make_requested_snapshots(&self, generation: Generation) -> Result<()> {
        // Until all are made: a thread that asks for a name finds it among those that are wanted,
        // or in the tree.
        let records = self.trees.lock_records();
        let wanted = std::mem::take(&mut *self.cut_work.wanted.lock());
        let mut done = HashSet::new();
        for wanted in wanted {
            if !done.insert(wanted.subvolume) {
                self.cut_work.wanted.lock().push(wanted);
                continue;
            }
            let nodes = self.nodes_for_snapshot();
            let made = if nodes <= wanted.reservation.nodes() {
                let change = Change { generation, reservation: &wanted.reservation };
                let id = self.trees.subvolume(InodeId::root_of(wanted.subvolume))?.id;
                let names_none = !self.cut_work.wants_name_in(id) && !records.may_name(id)?;
                let item = SnapshotItem { names_none, ..wanted.item };
                records.put_snapshot(&change, &self.superblock, wanted.subvolume, item)?;
                Ok(generation)
            } else {
                // The tree grew by two levels since the reservation.
                Err(Error::NoSpace)
            };
            let _first = wanted.done.set(made);
        }
        Ok(())
    }

    /// Nodes that making a snapshot takes: two items, or four with the tree's first; two trees may
    /// have to be made.
    fn nodes_for_snapshot(&self) -> u64 {
        2 + Tree::worst_case_nodes(4, self.trees.records_height())
    }

    /// Makes snapshots with these names of the subvolumes with these root directories, which are
    /// open, at one cut if others make none of them. An error in the list says that one is missing.
    pub(crate) fn take_snapshots(
        &self,
        of: &[(InodeId, &[u8])],
    ) -> Result<Vec<Result<SnapshotInfo>>> {
        self.check_writable()?;
        // The tree may grow by a level until the cut.
        let nodes = 2 * self.nodes_for_snapshot();
        let request = Request { data_blocks: 0, nodes: nodes * of.len() as u64 };
        let room = self.reserve(request, Effort::Ordinary)?;
        let (mut wanted, mut made) = (Vec::new(), Vec::new());
        {
            let records = self.trees.lock_records();
            for (root, name) in of {
                let subvolume = self.trees.subvolume(*root)?;
                subvolume.check_alive()?;
                self.expect_new_name(subvolume.id, name)?;
                let item = SnapshotItem {
                    root: Default::default(),
                    created_ns: now_ns(),
                    is_held: false,
                    is_hidden: false,
                    names_none: false,
                    number: records.take_number()?,
                    uuid: random::bytes16(),
                    name: name.to_vec(),
                };
                let (done, reservation) = (Arc::new(OnceLock::new()), room.split(0, nodes));
                made.push((subvolume.id, Arc::clone(&done)));
                wanted.push(Wanted { subvolume: subvolume.slot, item, reservation, done });
            }
            self.cut_work.wanted.lock().extend(wanted);
        }
        let made = made.into_iter().map(|(id, done)| {
            let generation = loop {
                if let Some(made) = done.get() {
                    break made.clone()?;
                }
                self.commit()?;
            };
            self.transactions.wait_super_committed(generation)?;
            Ok(info_of(id, generation, self.trees.snapshot_item(id, generation)?))
        });
        Ok(made.collect())
    }

    /// Fails unless there is a subvolume with this id.
    pub(super) fn expect_subvolume(&self, id: u64) -> Result<TreeId> {
        if self.trees.lacks(TreeId(id))? { Err(Error::NotFound) } else { Ok(TreeId(id)) }
    }

    pub(crate) fn snapshots(&self, id: u64) -> Result<Vec<SnapshotInfo>> {
        let mut found = Vec::new();
        for id in self.trees.continued_by(self.expect_subvolume(id)?)? {
            for item in self.trees.snapshot_items(id) {
                let (generation, item) = item?;
                self.trees.know_snapshot(id, generation, item.number);
                found.push(info_of(id, generation, item));
            }
        }
        found.sort_by_key(|info| (info.generation, info.subvolume));
        Ok(found)
    }

    pub(crate) fn snapshot_named(&self, id: u64, name: &[u8]) -> Result<SnapshotInfo> {
        let (id, generation, item) = self.expect_shown(id, name)?;
        self.trees.know_snapshot(id, generation, item.number);
        Ok(info_of(id, generation, item))
    }

    pub(super) fn find_snapshot(
        &self,
        id: TreeId,
        which: Which<'_>,
    ) -> Result<(Generation, SnapshotItem)> {
        match which {
            Which::Named(name) => self.trees.snapshot_named(id, name)?.ok_or(Error::NotFound),
            Which::MadeBy(generation) => match self.trees.snapshot_item(id, generation) {
                Err(Error::Stale) => Err(Error::NotFound),
                item => Ok((generation, item?)),
            },
        }
    }

    /// Whether the tree of the subvolume with the root directory `root`, which is open, is another
    /// one than that of its snapshot `made`: each change gives it another root.
    pub(crate) fn differs_from(&self, root: InodeId, made: Generation) -> Result<bool> {
        let subvolume = self.trees.subvolume(root)?;
        Ok(self.trees.snapshot_item(subvolume.id, made)?.root != subvolume.tree().root())
    }

    pub(crate) fn snapshotted_subvolumes(&self) -> Result<Vec<u64>> {
        let ids = self.trees.with_items(ItemKind::Snapshot)?.into_iter();
        let is_lasting = |item: Result<(_, SnapshotItem)>| {
            item.map_or(true, |(_, item)| !is_temporary_name(&item.name))
        };
        let has_durable = |id: &TreeId| self.trees.snapshot_items(*id).any(is_lasting);
        Ok(ids.filter(has_durable).map(|id| id.0).collect())
    }

    /// Subvolumes and names of the temporary snapshots that may be deleted.
    pub(crate) fn temporary_snapshots(&self) -> Result<Vec<(u64, Vec<u8>)>> {
        let mut found = Vec::new();
        for id in self.trees.with_items(ItemKind::Snapshot)? {
            for item in self.trees.snapshot_items(id) {
                let (_, item) = item?;
                if is_temporary_name(&item.name) && !item.is_held {
                    found.push((id.0, item.name));
                }
            }
        }
        Ok(found)
    }

    /// Begins an operation on the snapshots of the subvolume `id`, which is opened unless it is
    /// headless.
    pub(super) fn begin_on_snapshots(&self, id: TreeId) -> Result<Operation<'_>> {
        let slot = self.trees.slot_for_work(id)?;
        if !self.trees.is_headless(id)? {
            self.open_subvolume(slot, |_| Ok(()))?;
        }
        let nodes = || {
            let dead_runs = self.trees.dead_runs().map_or(0, |tree| tree.worst_case_joined(1));
            dead_runs + Tree::worst_case_nodes(3, self.trees.records_height())
        };
        self.begin_with(InodeId::root_of(slot), 0, 0, Effort::Cleanup, nodes)
    }

    /// Deletes a snapshot, which is durable after a commit, and returns the root directories of the
    /// subvolume and of the snapshot: that one's inodes are to be unloaded then, and after that its
    /// cleanup is due.
    pub(crate) fn delete_snapshot(&self, id: u64, which: Which<'_>) -> Result<[InodeId; 2]> {
        self.check_writable()?;
        let id = match which {
            Which::Named(name) => self.expect_shown(id, name)?.0,
            Which::MadeBy(_) => self.expect_subvolume(id)?,
        };
        let mut operation = self.begin_on_snapshots(id)?;
        let roots = operation.delete_snapshot(which)?;
        operation.leave_unlogged();
        Ok(roots)
    }

    /// Fails unless there are these snapshots, and none is held.
    pub(crate) fn expect_deletable(&self, id: u64, snapshots: &[u64]) -> Result<()> {
        let id = self.expect_subvolume(id)?;
        for generation in snapshots {
            let (_, item) = self.find_snapshot(id, Which::MadeBy(Generation(*generation)))?;
            if item.is_held {
                return Err(Error::Busy);
            }
        }
        Ok(())
    }

    /// Lets a snapshot be deleted or not.
    pub(crate) fn hold_snapshot(&self, id: u64, name: &[u8], held: bool) -> Result<()> {
        self.check_writable()?;
        let (id, ..) = self.expect_shown(id, name)?;
        {
            let mut operation = self.begin_on_snapshots(id)?;
            let records = self.trees.lock_records();
            let (generation, item) = self.find_snapshot(id, Which::Named(name))?;
            let key = Key::of_subvolume(id, ItemKind::Snapshot, generation);
            operation.note_unlogged_change();
            let item = SnapshotItem { is_held: held, ..item };
            records.tree()?.insert(&operation.change(), key, &item.encode())?;
            drop(records);
            operation.leave_unlogged();
        }
        self.commit()
    }

    /// Whether there are forks of this snapshot, wanted ones too.
    pub(super) fn has_forks(&self, records: &Records<'_>, snapshot: Origin) -> Result<bool> {
        let is_wanted = self.cut_work.wants_fork_of(Source::Snapshot(snapshot));
        Ok(is_wanted || records.any_fork_of(snapshot)?)
    }
}

impl Operation<'_> {
    /// Removes a snapshot of the operation's subvolume; its cleanup is noted. Returns the root
    /// directories of the subvolume and of the snapshot.
    fn delete_snapshot(&mut self, which: Which<'_>) -> Result<[InodeId; 2]> {
        let (store, id) = (self.store(), self.subvolume().id);
        let records = store.trees.lock_records();
        let (generation, item) = store.find_snapshot(id, which)?;
        if item.is_held {
            return Err(Error::Busy);
        }
        let has_forks = store.has_forks(&records, Origin { subvolume: id, generation })?;
        let root = InodeId::root_of(store.trees.know_snapshot(id, generation, item.number));
        let roots = [InodeId::root_of(store.trees.slot_for_work(id)?), root];
        let snapshot = Named { subvolume: id, made: generation, name: &item.name };
        records.while_deleting(snapshot, || {
            if !has_forks {
                return self.drop_snapshot(&records, generation);
            }
            // They need it; it goes with the last of them.
            let key = Key::of_subvolume(id, ItemKind::Snapshot, generation);
            self.note_unlogged_change();
            let item = SnapshotItem { is_hidden: true, name: Vec::new(), ..item.clone() };
            records.tree()?.insert(&self.change(), key, &item.encode())?;
            Ok(())
        })?;
        // Not before a change has failed: it is as it was then.
        store.trees.subvolume(root)?.end();
        // Who frees its blocks waits for this operation before.
        store.cut_work.note_readers(id, root);
        Ok(roots)
    }

    /// Removes a snapshot of the operation's subvolume; its cleanup is noted.
    pub(super) fn drop_snapshot(
        &mut self,
        records: &Records<'_>,
        generation: Generation,
    ) -> Result<()> {
        let (store, id) = (self.store(), self.subvolume().id);
        let (before, after) = store.trees.snapshots_beside(id, generation)?;
        let lists_to = after.unwrap_or(self.generation());
        // What a fork has given up of its origin's is in its lists, too.
        let oldest = before.max(records.item(id)?.inheritance().origin);
        let cleanup = CleanupItem { oldest, lists_from: generation, lists_to };
        self.note_unlogged_change();
        store.cut_work.note_deletion(self.generation());
        let (tree, change) = (records.tree()?, self.change());
        tree.remove(&change, &Key::of_subvolume(id, ItemKind::Snapshot, generation))?;
        let key = Key::of_subvolume(id, ItemKind::Cleanup, generation);
        tree.insert(&change, key, &cleanup.encode())?;
        if after.is_none() {
            self.tree().boundary().set_newest(before);
        }
        Ok(())
    }
}
