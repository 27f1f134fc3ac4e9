//! Joining: the last fork of a subvolume of which nothing else is left takes over what it has
//! inherited. Otherwise what the fork gives up of that would stay in use until the fork goes.
//!
//! When a subvolume is headless, and a hidden snapshot that has one fork is all that it has, no
//! name leads to what that snapshot has and the fork does not. The fork has noted what it gave up
//! of it in its dead lists. So one operation removes the snapshot's item and the subvolume's,
//! takes the fork's origin away, or makes that of the subvolume its origin, and notes a *cleanup*
//! of the fork: runs born after that origin and up to the snapshot, in lists begun since it and
//! before the fork's first snapshot. They count from now on. Later ones are snapshots' of the
//! fork. *A crash: both subvolumes are as before, or the fork is joined and its cleanup is noted.*
//!
//! Before that, dead lists that the subvolume itself has left go to the fork, one at a time, but
//! for empty ones, which only go: what is in them was its own origin's, so it counts for nothing in
//! either of them, until the fork is joined with that origin, too. *A crash: some have gone; the
//! next mount goes on.*
//!
//! Nothing is joined
//! - while one of both is dying, or the subvolume without a head has a cleanup;
//! - if one of them is a fork that notes nothing, as older versions made them;
//! - while names of other subvolumes in the fork are its origin's;
//! - while an application reads that snapshot;
//! - while the fork can be applied to another subvolume, which has come into the place of the one
//!   without a head: what the fork has changed is told by comparing it with that snapshot.
//!
//! Invariant: a fork that is joined reads nodes that others have made, up to the transaction that
//! made it.
use super::Store;
use super::cleanups::Pace;
use super::cut_work::Source;
use super::lineage_end::Ending;
use super::operation::{Effort, Operation};
use super::trees::{Records, Subvolume};
use crate::{InodeId, Result};
use cairn_btree::Tree;
use cairn_format::{
    CleanupItem, DeadListItem, Generation, ItemKind, Key, Origin, SubvolumeItem, TreeId,
};

/// A fork that can be joined, and the snapshot that it began as.
#[derive(Clone, Copy)]
struct Heir {
    fork: TreeId,
    snapshot: Generation,
}

impl Store {
    /// Whether a fork can be joined with the headless subvolume `id`.
    pub(super) fn can_be_joined(&self, records: &Records<'_>, id: TreeId) -> Result<bool> {
        Ok(self.heir_of(records, id)?.is_some())
    }

    /// The fork that can be joined with the headless subvolume `id`.
    fn heir_of(&self, records: &Records<'_>, id: TreeId) -> Result<Option<Heir>> {
        let Some(item) = records.find(id)? else { return Ok(None) };
        let mut snapshots = self.trees.all_snapshot_items(id);
        let (Some(only), None) = (snapshots.next().transpose()?, snapshots.next()) else {
            return Ok(None);
        };
        let (snapshot, is_hidden) = (only.0, only.1.is_hidden);
        let origin = Origin { subvolume: id, generation: snapshot };
        let Some(fork) = records.only_fork_of(origin)? else { return Ok(None) };
        let of_fork = records.item(fork)?;
        let can_be = item.is_headless
            && !item.is_dying
            && is_hidden
            && (item.origin.is_none() || item.notes_inherited)
            && !self.cut_work.wants_fork_of(Source::Snapshot(origin))
            && of_fork.notes_inherited
            && !of_fork.is_dying
            && !of_fork.names_others
            && !self.has_others_in_line(records, id, fork)?;
        Ok(can_be.then_some(Heir { fork, snapshot }))
    }

    /// Whether a subvolume with a name but `fork` is in the line of `id`: it would get the changes
    /// of an application of `fork`.
    fn has_others_in_line(&self, records: &Records<'_>, id: TreeId, fork: TreeId) -> Result<bool> {
        for other in self.trees.line_of(id)? {
            if other != id && other != fork && !records.item(other)?.is_nameless() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Joins the headless `subvolume` with its last fork, if that can be, and names the fork as
    /// due, which has a cleanup then. Whether it has.
    ///
    /// # Errors
    /// [`Error::NoSpace`](crate::Error::NoSpace): it is to be tried again after a commit.
    pub(super) fn join_last_fork(
        &self,
        subvolume: &Subvolume,
        ending: &Ending<'_>,
    ) -> Result<bool> {
        loop {
            let heir = self.heir_of(&self.trees.lock_records(), subvolume.id)?;
            let Some(heir) = heir.filter(|_| !(ending.is_interrupted)()) else { return Ok(false) };
            // It may look for runs in lists that would go.
            let root = InodeId::root_of(subvolume.slot);
            self.clean_up(root, Pace::Hurried, ending.is_interrupted, ending.unload)?;
            self.cut_work.wait_for_readers(subvolume.id, ending.unload)?;
            let mut operation = self.begin_for_join(heir.fork)?;
            let step = operation.join(subvolume, ending)?;
            operation.leave_unlogged();
            match step {
                Step::ListMoved => {}
                Step::Joined => {
                    (ending.due)(InodeId::root_of(self.trees.slot_for_work(heir.fork)?));
                    return Ok(true);
                }
                Step::Impossible => return Ok(false),
            }
        }
    }

    fn begin_for_join(&self, fork: TreeId) -> Result<Operation<'_>> {
        let slot = self.trees.slot_for_work(fork)?;
        if !self.trees.is_headless(fork)? {
            self.open_subvolume(slot, |_| Ok(()))?;
        }
        let nodes = || Tree::worst_case_nodes(4, self.trees.records_height());
        self.begin_with(InodeId::root_of(slot), 0, 0, Effort::Cleanup, nodes)
    }
}

enum Step {
    ListMoved,
    Joined,
    Impossible,
}

impl Operation<'_> {
    /// A step of the operation's subvolume, which is a fork, towards being joined with the last
    /// snapshot of the headless subvolume `of`.
    fn join(&mut self, of: &Subvolume, ending: &Ending<'_>) -> Result<Step> {
        let (store, fork) = (self.store(), self.subvolume().id);
        let records = store.trees.lock_records();
        let heir = store.heir_of(&records, of.id)?.filter(|heir| heir.fork == fork);
        let Some(Heir { snapshot, .. }) = heir else { return Ok(Step::Impossible) };
        if store.trees.cleanups(of.id).next().transpose()?.is_some() {
            return Ok(Step::Impossible);
        }
        if (ending.is_applied)(InodeId::root_of(self.subvolume().slot)) {
            return Ok(Step::Impossible);
        }
        // Damage is found before anything is changed.
        let (item, of_fork) = (records.item(of.id)?, records.item(fork)?);
        let first = store.trees.all_snapshot_items(fork).next().transpose()?;
        let list = store.trees.dead_lists(of.id).next().transpose()?;
        // What can't be read is moved as what is there.
        let is_empty = list.is_some_and(|(_, list)| {
            let first = store.trees.runs_from(Key::dead_runs(list, Generation(0), 0));
            matches!(first, Ok(None)) && !store.space.has_dead(list)
        });
        let tree = records.tree()?;
        self.note_unlogged_change();
        let change = self.change();
        if let Some((since, list)) = list {
            let [from, to] =
                [of.id, fork].map(|id| Key::of_subvolume(id, ItemKind::DeadList, since));
            tree.remove(&change, &from)?;
            if is_empty {
                store.list_births.forget(list);
            } else {
                tree.insert(&change, to, &DeadListItem { list }.encode())?;
            }
            return Ok(Step::ListMoved);
        }
        let oldest = item.inheritance().origin;
        store.cut_work.note_deletion(self.generation());
        tree.remove(&change, &Key::of_subvolume(of.id, ItemKind::Snapshot, snapshot))?;
        let lists_to = first.map_or(self.generation(), |(made, _)| made);
        let cleanup = CleanupItem { oldest, lists_from: snapshot, lists_to };
        let key = Key::of_subvolume(fork, ItemKind::Cleanup, snapshot);
        tree.insert(&change, key, &cleanup.encode())?;
        records.remove(&change, of.id)?;
        // Without an origin it is the first one of its line.
        let continues = of_fork.continues && (item.continues || item.origin.is_none());
        let notes_inherited = of_fork.notes_inherited && item.notes_inherited;
        let joined = SubvolumeItem {
            origin: item.origin,
            continues,
            notes_inherited,
            is_joined: true,
            ..of_fork
        };
        records.put(&change, &store.superblock, fork, &joined)?;
        store.trees.note_joined(of.id);
        if let Some(tree) = self.subvolume().open_tree() {
            tree.boundary().join(oldest);
        }
        Ok(Step::Joined)
    }
}
