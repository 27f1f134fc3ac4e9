//! The end of a subvolume that shares blocks: of one that has snapshots, is a fork, or both.
//!
//! When a subvolume loses its name, its snapshots are *hidden*: they stay as long as there are
//! forks of them. What only its own tree has becomes free at once, and the newest snapshot stands
//! in for that tree. When that snapshot goes, so does what only it has, and so on. States, by the
//! subvolume's item:
//! - *Dying.* The tree is removed. Its *boundary* is the newest snapshot, or else the origin: what
//!   was born up to there is theirs. Dead lists begun since the newest snapshot are *discarded*:
//!   what is in them is that snapshot's, which counts now as the subvolume's tree did.
//! - *Headless.* The tree is gone, there are snapshots. No list is discarded: those are gone, too.
//! - *Headless and dying.* The newest snapshot's item is gone, its root stands in the subvolume's,
//!   and that tree is removed as the subvolume's own was: the snapshot before it is the boundary.
//!
//! Steps, each an operation or many:
//! 1. The item says *dying* ([`Operation::begin_removal`], [`Operation::bury_newest`]). No cleanup
//!    of the subvolume is left then: it might look for runs in a list that is discarded. One that
//!    comes later is for lists begun before the newest snapshot.
//! 2. A commit waits for operations that joined before, so nobody else changes the tree, and all
//!    that died is in the lists. Whoever reads the tree is waited for.
//! 3. Discarded lists go, with their runs, whose blocks stay.
//! 4. The tree's own nodes are given back, some at a time, and with them what their items refer to
//!    ([`Tree::own_nodes`]). The *cursor* moves in the same transaction.
//! 5. With the last of them the item says *headless*, or goes if no snapshot is left. Then a fork
//!    lets go of its origin: if that is the newest snapshot of a subvolume without a name, it has
//!    to wait for the removal that is under way there, otherwise it is deleted.
//!
//! Each step is of one transaction, and the item says what is left to do. *A crash: the next mount
//! goes on.* A snapshot that waits in step 5 is found by looking for one that no fork needs.
//!
//! The number of inodes leaves out forks. Of another subvolume it leaves out the inodes from the
//! moment that the cursor moves, so they are counted before: what the snapshots have is not read
//! otherwise.
//!
//! Lock discipline: one thread at a time works on a subvolume (`turns.rs`). It holds no lock while
//! it waits.
use super::Store;
use super::cleanups::Pace;
use super::cut_work::Source;
use super::operation::Operation;
use super::trees::{Records, Subvolume};
use crate::{Error, InodeId, Result};
use cairn_btree::{OwnNodes, Tree};
use cairn_format::{
    DeadRun, Extent, Generation, ItemKind, Key, Origin, SnapshotItem, SubvolumeItem, TreeId,
};

/// What the thread that removes subvolumes does for [`Store::end_lineage`].
pub(crate) struct Ending<'f> {
    /// Whether the volume is being closed: the next mount goes on.
    pub(crate) is_interrupted: &'f dyn Fn() -> bool,
    /// Waits for those who still read the snapshot with this root directory, or fails.
    pub(crate) unload: &'f dyn Fn(InodeId) -> Result<()>,
    /// Whether somebody reads what the fork with this root directory began as. Then the work is
    /// done later.
    pub(crate) is_applied: &'f dyn Fn(InodeId) -> bool,
    /// There may be something to do now in the subvolume with this root directory.
    pub(crate) due: &'f dyn Fn(InodeId),
}

impl Store {
    /// Whether anything of snapshots keeps the subvolume from being removed: a wanted one, one with
    /// a name, or runs that are to be freed first. Hidden snapshots stay when it goes.
    pub(super) fn keeps_its_name(&self, subvolume: &Subvolume) -> Result<bool> {
        let (id, mut has_hidden) = (subvolume.id, false);
        for item in self.trees.all_snapshot_items(id) {
            if !item?.1.is_hidden {
                return Ok(true);
            }
            has_hidden = true;
        }
        let has_lists = self.trees.dead_lists(id).next().transpose()?.is_some();
        let notes_inherited = self.trees.recorded_inheritance(id)?.is_noted;
        Ok(has_lists && !has_hidden && !notes_inherited
            || self.trees.cleanups(id).next().transpose()?.is_some()
            || self.cut_work.wants(subvolume.slot, None)
            || self.cut_work.wants_fork_of(Source::Head(subvolume.slot, id)))
    }

    /// Whether `item` describes a subvolume that ends as this file says.
    pub(super) fn shares_blocks(&self, id: TreeId, item: &SubvolumeItem) -> Result<bool> {
        let is_part = item.origin.is_some() || item.is_headless;
        Ok(is_part || self.trees.newest_snapshot(id)?.is_some())
    }

    /// Does what there is to do in a subvolume without a name. Others are due then: its origin, if
    /// the last of it is gone, the fork that it was joined with, and others in its line.
    ///
    /// # Errors
    /// [`Error::NoSpace`]: it is to be tried again after a commit. Those of [`Ending::unload`].
    pub(super) fn end_lineage(&self, subvolume: &Subvolume, ending: &Ending<'_>) -> Result<()> {
        let id = subvolume.id;
        if !self.turns.take(id) {
            return Ok(());
        }
        loop {
            let done = self.end_parts(subvolume, ending);
            // Who was waited for may have ended meanwhile, and wanted a turn for the last time.
            let may_go_on = matches!(done, Ok(()) | Err(Error::Busy));
            if !may_go_on || (ending.is_interrupted)() {
                self.turns.give_up(id);
                return done;
            }
            if self.turns.end(id) {
                return done;
            }
        }
    }

    fn end_parts(&self, subvolume: &Subvolume, ending: &Ending<'_>) -> Result<()> {
        let id = subvolume.id;
        loop {
            let item = self.trees.lock_records().find(id)?;
            let Some(item) = item.filter(SubvolumeItem::is_nameless) else { return Ok(()) };
            let origin_is_due = || {
                if let Some(origin) = item.origin {
                    let slot = self.trees.slot_for_work(origin.subvolume)?;
                    (ending.due)(InodeId::root_of(slot));
                }
                Result::Ok(())
            };
            if item.is_dying {
                let in_line = self.headless_in_line(id)?;
                if !self.remove_part(subvolume, ending)? {
                    return Ok(());
                }
                in_line.into_iter().for_each(ending.due);
                if self.trees.lock_records().find(id)?.is_none() {
                    return origin_is_due();
                }
            } else if self.is_newest_needed(&self.trees.lock_records(), id)? {
                return match self.join_last_fork(subvolume, ending)? {
                    true => origin_is_due(),
                    false => Ok(()),
                };
            } else {
                let root = InodeId::root_of(subvolume.slot);
                self.clean_up(root, Pace::Hurried, ending.is_interrupted, ending.unload)?;
                if (ending.is_interrupted)() {
                    return Ok(());
                }
                let mut operation = self.begin_on_snapshots(id)?;
                operation.bury_newest()?;
                operation.leave_unlogged();
            }
        }
    }

    /// The root directories of headless subvolumes in the line of `id`. Without that, one of them
    /// may be joined.
    fn headless_in_line(&self, id: TreeId) -> Result<Vec<InodeId>> {
        let mut found = Vec::new();
        for other in self.trees.line_of(id)? {
            let item = self.trees.lock_records().find(other)?;
            if other != id && item.is_some_and(|item| item.is_headless) {
                found.push(InodeId::root_of(self.trees.slot_for_work(other)?));
            }
        }
        Ok(found)
    }

    /// Whether the newest snapshot of the headless subvolume `id` has to stay.
    fn is_newest_needed(&self, records: &Records<'_>, id: TreeId) -> Result<bool> {
        match self.trees.newest_snapshot(id)? {
            Some((made, item)) => {
                let snapshot = Origin { subvolume: id, generation: made };
                Ok(!item.is_hidden || self.has_forks(records, snapshot)?)
            }
            None => Err(self.trees.damaged(format!("nothing is left of the subvolume {id}"))),
        }
    }

    /// Steps 2 to 5; whether it was not interrupted.
    fn remove_part(&self, subvolume: &Subvolume, ending: &Ending<'_>) -> Result<bool> {
        let id = subvolume.id;
        if self.transactions.generation() <= self.cut_work.last_deletion() {
            self.commit()?;
        }
        self.cut_work.wait_for_readers(id, ending.unload)?;
        if !self.discard_lists(id, ending)? {
            return Ok(false);
        }
        let item = self.trees.item(id)?;
        let tree = self.trees.dying_tree(subvolume, &item)?;
        let mut inodes = match self.counts_inodes_of(&item) {
            true => self.count_inodes(&tree, ending)?,
            false => 0,
        };
        loop {
            if (ending.is_interrupted)() {
                return Ok(false);
            }
            let cursor = self.trees.item(id)?.cursor;
            let own = tree.own_nodes(cursor)?;
            let is_last = own.next.is_none();
            let mut operation =
                self.begin_on_snapshots(item.origin.map_or(id, |origin| origin.subvolume))?;
            operation.release_own(id, &tree, own)?;
            self.inode_count.note_all_gone(std::mem::take(&mut inodes));
            if is_last {
                operation.end_part(subvolume)?;
            }
            operation.leave_unlogged();
            if is_last {
                return Ok(true);
            }
        }
    }

    /// Whether the number of inodes has those of a subvolume that is being removed.
    fn counts_inodes_of(&self, item: &SubvolumeItem) -> bool {
        let is_counted = item.origin.is_none()
            && !item.is_joined
            && !item.is_headless
            && item.cursor == Key::MIN;
        is_counted && self.inode_count.get() > 0
    }

    /// How many inodes `tree` has; anything once it is interrupted.
    fn count_inodes(&self, tree: &Tree, ending: &Ending<'_>) -> Result<u64> {
        let mut inodes = 0;
        tree.scan(Key::MIN..=Key::MAX, |key, _| {
            inodes += u64::from(key.kind == ItemKind::Inode as u8);
            !(ending.is_interrupted)()
        })?;
        Ok(inodes)
    }

    /// Step 3; whether it was not interrupted.
    fn discard_lists(&self, id: TreeId, ending: &Ending<'_>) -> Result<bool> {
        let Some(from) = self.trees.discarded_since(id)? else { return Ok(true) };
        let lists = self.trees.dead_lists_begun_in(id, from..Generation(u64::MAX));
        let lists: Vec<_> = lists.collect::<Result<_>>()?;
        for (since, list) in lists {
            let first = Key::dead_runs(list, Generation(0), 0);
            while let Some((key, _)) = self.trees.runs_from(first)? {
                let mut operation = self.begin_on_snapshots(id)?;
                let _records = self.trees.lock_records();
                let tree = self.trees.dead_runs().ok_or_else(|| self.trees.damaged_dead_runs())?;
                operation.note_unlogged_change();
                tree.remove(&operation.change(), &key)?;
                operation.leave_unlogged();
                if (ending.is_interrupted)() {
                    return Ok(false);
                }
            }
            let mut operation = self.begin_on_snapshots(id)?;
            let records = self.trees.lock_records();
            operation.note_unlogged_change();
            let key = Key::of_subvolume(id, ItemKind::DeadList, since);
            records.tree()?.remove(&operation.change(), &key)?;
            self.list_births.forget(list);
            operation.leave_unlogged();
        }
        Ok(true)
    }
}

impl Operation<'_> {
    /// The newest snapshot of the operation's subvolume, which is headless, begins to be removed,
    /// unless it is needed, or has to wait.
    fn bury_newest(&mut self) -> Result<()> {
        let (store, id) = (self.store(), self.subvolume().id);
        let records = store.trees.lock_records();
        let item = records.item(id)?;
        if item.is_dying
            || store.is_newest_needed(&records, id)?
            || store.trees.cleanups(id).next().transpose()?.is_some()
        {
            return Ok(());
        }
        let newest = store.trees.newest_snapshot(id)?;
        let (made, newest) =
            newest.ok_or_else(|| store.trees.damaged("a snapshot has vanished".into()))?;
        self.note_unlogged_change();
        let key = Key::of_subvolume(id, ItemKind::Snapshot, made);
        records.tree()?.remove(&self.change(), &key)?;
        let item = SubvolumeItem { is_dying: true, dying_root: Some(newest.root), ..item };
        records.put(&self.change(), &store.superblock, id, &item)
    }

    /// Gives back nodes of a tree that is being removed, and what the items in them refer to.
    fn release_own(&mut self, id: TreeId, tree: &Tree, own: OwnNodes) -> Result<()> {
        let store = self.store();
        let records = store.trees.lock_records();
        let mut runs = Vec::new();
        for (key, value) in &own.items {
            if key.kind == ItemKind::Extent as u8 {
                let extent = Extent::decode(value)?;
                let birth = extent.generation;
                runs.push(DeadRun { range: extent.range(), birth, is_node: false });
            }
        }
        runs.retain(|run| run.birth > tree.boundary().shared_until());
        // Damage is found before anything is changed.
        if let Some(run) = runs.iter().find(|run| !store.space.is_referenced(run.range)) {
            let problem = format!("an extent at {} that is not in use", run.range.start);
            return Err(store.trees.damaged(problem));
        }
        self.note_unlogged_change();
        if let Some(cursor) = own.next {
            let item = SubvolumeItem { cursor, ..records.item(id)? };
            records.put(&self.change(), &store.superblock, id, &item)?;
        }
        tree.release_own(&self.change(), own)?;
        for run in runs {
            store.space.give_up(run, tree.boundary(), self.generation())?;
        }
        Ok(())
    }

    /// Step 5. If the subvolume is a fork, the operation is on its origin's.
    fn end_part(&mut self, subvolume: &Subvolume) -> Result<()> {
        let (store, id) = (self.store(), subvolume.id);
        let records = store.trees.lock_records();
        let item = records.item(id)?;
        if !item.is_headless {
            records.note_ended(subvolume);
        }
        if store.trees.newest_snapshot(id)?.is_some() {
            let item = SubvolumeItem {
                is_dying: false,
                is_headless: true,
                names_others: false,
                cursor: Key::MIN,
                dying_root: None,
                ..item
            };
            return records.put(&self.change(), &store.superblock, id, &item);
        }
        records.remove(&self.change(), id)?;
        match item.origin {
            Some(origin) => self.release_origin(&records, id, origin),
            None => Ok(()),
        }
    }

    /// The fork `fork` of `origin`, a snapshot of the operation's subvolume, is gone.
    fn release_origin(
        &mut self,
        records: &Records<'_>,
        fork: TreeId,
        origin: Origin,
    ) -> Result<()> {
        let store = self.store();
        let key = Key::of_subvolume(origin.subvolume, ItemKind::Snapshot, origin.generation);
        let missing = || store.trees.damaged(format!("the fork {fork} had no origin"));
        let item = SnapshotItem::decode(&records.tree()?.get(&key)?.ok_or_else(missing)?)?;
        if !item.is_hidden || store.has_forks(records, origin)? {
            return Ok(());
        }
        let (_, after) = store.trees.snapshots_beside(origin.subvolume, origin.generation)?;
        let is_in_place_of_head = after.is_none() && records.item(origin.subvolume)?.is_nameless();
        if is_in_place_of_head { Ok(()) } else { self.drop_snapshot(records, origin.generation) }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "lineage_end_tests.rs"]
mod tests;
