//! Cleanups: what the deletion of a snapshot leaves to do.
//!
//! Runs of certain births leave certain dead lists, some at a time, and their blocks become free.
//! That begins when the deletion's transaction is cut: only then everything is in the lists. *A
//! crash: runs are named and referenced, or neither, since each batch is of one transaction; the
//! next mount goes on.*
use super::Store;
use super::list_births::ItemBirths;
use super::operation::Operation;
use crate::{Error, InodeId, Result};
use cairn_btree::Tree;
use cairn_environment::clock::{self, Monotonic};
use cairn_format::{DeadRun, Generation, ItemKind, Key, LogSeq, TreeId};
use cairn_space::SpaceError;
use std::ops::RangeInclusive;
use std::time::Duration;

/// How long a cleanup works before it looks whether others work, too.
const SLICE: Duration = Duration::from_micros(150);
/// It rests so many times as long then, but not longer than that.
const REST: u32 = 4;
const REST_MAX: Duration = Duration::from_millis(20);
/// It does not rest if less than this part of the volume is free.
const SCARCE_PART: u64 = 8;

/// How a cleanup shares the processors with others.
pub(crate) enum Pace<'a> {
    /// Somebody waits for it.
    Hurried,
    /// It leaves most of the time to others, as long as they change the volume, space is not
    /// scarce, and nobody waits for what it or its thread does.
    Leisurely {
        /// Whether somebody does.
        is_wanted: &'a dyn Fn() -> bool,
        /// When it began to work.
        since: Monotonic,
        /// What others had logged then.
        logged: LogSeq,
    },
}

impl Store {
    /// Subvolumes of which dead runs are to be freed, or of which that cannot be read, by their
    /// root directories.
    pub(crate) fn with_cleanups(&self) -> Vec<InodeId> {
        if self.trees.dead_runs().is_none() {
            return Vec::new();
        }
        let ids = self.trees.readable_records(&self.superblock).into_iter().map(|(id, _)| id);
        let due = ids.filter(|id| self.trees.cleanups(*id).next().is_some());
        let report = |error: &Error| {
            tracing::warn!("what deleted snapshots had stays for now: {error}");
        };
        let slots = due.filter_map(|id| self.trees.slot_for_work(id).inspect_err(report).ok());
        slots.map(InodeId::root_of).collect()
    }

    /// A pace beside which others are not slowed down much.
    pub(crate) fn leisurely<'a>(&self, is_wanted: &'a dyn Fn() -> bool) -> Pace<'a> {
        Pace::Leisurely { is_wanted, since: clock::now_monotonic(), logged: self.log.last() }
    }

    /// A part of the work is done, and no lock is held. Whether it has rested.
    fn rest(&self, pace: &mut Pace<'_>) -> bool {
        let Pace::Leisurely { is_wanted, since, logged } = *pace else { return false };
        let worked = since.elapsed();
        if worked < SLICE {
            return false;
        }
        let space = self.space.report();
        let is_scarce = space.available_blocks < space.total_blocks / SCARCE_PART
            || space.tickets_waiting > 0
            || self.storage_room.is_tight();
        let rests = logged != self.log.last() && !is_scarce && !is_wanted();
        if rests {
            clock::sleep((worked * REST).min(REST_MAX));
        }
        *pace = self.leisurely(is_wanted);
        rests
    }

    /// Frees what the cleanups of the subvolume with the root directory `root` name, unless
    /// `interrupted` says that the volume is being closed: then the next mount goes on. First
    /// `unload` waits for those who still read the snapshot with this root directory.
    ///
    /// # Errors
    /// [`Error::NoSpace`]: it is to be tried again after a commit. Those of `unload`.
    pub(crate) fn clean_up(
        &self,
        root: InodeId,
        mut pace: Pace<'_>,
        interrupted: impl Fn() -> bool,
        unload: impl Fn(InodeId) -> Result<()>,
    ) -> Result<()> {
        let id = self.trees.subvolume(root)?.id;
        'cleanups: while let Some((newest, cleanup)) = self.trees.cleanups(id).next().transpose()? {
            if self.transactions.generation() <= self.cut_work.last_deletion() {
                // What died before the deletion enters the lists with the cut.
                self.commit()?;
            }
            self.cut_work.wait_for_readers(id, &unload)?;
            let births = cleanup.oldest.next()..=newest;
            let lists = self.trees.dead_lists_begun_in(id, cleanup.lists_from..cleanup.lists_to);
            let lists: Vec<_> = lists.collect::<Result<_>>()?;
            // While it rests, another thread may end it.
            let mut goes_on =
                || !interrupted() && (!self.rest(&mut pace) || self.has_cleanup(id, newest));
            for (since, list) in lists {
                if !self.clean_list(id, list, &births, &mut goes_on)? {
                    if interrupted() {
                        return Ok(());
                    }
                    continue 'cleanups;
                }
                self.drop_list_if_unneeded(id, since, list)?;
            }
            let mut operation = self.begin_on_snapshots(id)?;
            let records = self.trees.lock_records();
            operation.note_unlogged_change();
            let key = Key::of_subvolume(id, ItemKind::Cleanup, newest);
            records.tree()?.remove(&operation.change(), &key)?;
            drop(records);
            operation.leave_unlogged();
        }
        Ok(())
    }

    /// Frees the runs of a list that were born in `births`, as long as it `goes_on`; whether it
    /// still does.
    fn clean_list(
        &self,
        id: TreeId,
        list: u64,
        births: &RangeInclusive<Generation>,
        goes_on: &mut impl FnMut() -> bool,
    ) -> Result<bool> {
        let is_due = |run: &DeadRun| births.contains(&run.birth);
        let free_due = |key: Key, runs: &[DeadRun]| {
            if runs.iter().any(is_due) {
                let mut operation = self.begin_on_snapshots(id)?;
                operation.free_runs(key, is_due)?;
                operation.leave_unlogged();
            }
            Result::Ok(())
        };
        if let Some(items) = self.list_births.of(list) {
            for item in items.iter().filter(|item| item.meets(births)) {
                match self.trees.runs_from(item.key)? {
                    Some((key, runs)) if key == item.key => free_due(key, &runs)?,
                    _ => {}
                }
                if !goes_on() {
                    return Ok(false);
                }
            }
            return Ok(goes_on());
        }
        let (reading, mut left) = (self.list_births.begin(list), Vec::new());
        let mut from = Some(Key::dead_runs(list, Generation(0), 0));
        while let Some(first) = from
            && let Some((key, runs)) = self.trees.runs_from(first)?
        {
            free_due(key, &runs)?;
            let births = runs.iter().filter(|run| !is_due(run)).map(|run| run.birth);
            if let Some((oldest, newest)) = births.clone().min().zip(births.max()) {
                left.push(ItemBirths { key, births: oldest..=newest });
            }
            if !goes_on() {
                return Ok(false);
            }
            from = key.successor();
        }
        self.list_births.end(reading, left);
        Ok(goes_on())
    }

    fn has_cleanup(&self, id: TreeId, newest: Generation) -> bool {
        self.trees.cleanups(id).any(|found| found.is_ok_and(|(at, _)| at == newest))
    }

    /// Removes a list in which nothing is, and nothing will be.
    fn drop_list_if_unneeded(&self, id: TreeId, since: Generation, list: u64) -> Result<()> {
        if self.trees.runs_from(Key::dead_runs(list, Generation(0), 0))?.is_some() {
            return Ok(());
        }
        let mut operation = self.begin_on_snapshots(id)?;
        let boundary = operation.subvolume().open_tree().map(Tree::boundary);
        let records = self.trees.lock_records();
        let is_open =
            boundary.is_some_and(|boundary| boundary.notes_deaths() && boundary.list() == list);
        let has_snapshot = self.trees.has_snapshot(id, since)?;
        // What died in this transaction is not in the list yet.
        let is_empty = !self.space.has_dead(list)
            && self.trees.runs_from(Key::dead_runs(list, Generation(0), 0))?.is_none();
        if !is_open && !has_snapshot && is_empty {
            operation.note_unlogged_change();
            let key = Key::of_subvolume(id, ItemKind::DeadList, since);
            records.tree()?.remove(&operation.change(), &key)?;
            self.list_births.forget(list);
        }
        drop(records);
        operation.leave_unlogged();
        Ok(())
    }

    /// Whether anything of deleted snapshots of the subvolume with the root directory `root` is to
    /// be freed.
    pub(crate) fn has_cleanups(&self, root: InodeId) -> Result<bool> {
        let id = self.trees.subvolume(root)?.id;
        Ok(self.trees.cleanups(id).next().transpose()?.is_some())
    }
}

impl Operation<'_> {
    /// Frees those runs of an item that are due; the others stay.
    fn free_runs(&mut self, key: Key, is_due: impl Fn(&DeadRun) -> bool) -> Result<()> {
        let store = self.store();
        let _records = store.trees.lock_records();
        let Some((found, runs)) = store.trees.runs_from(key)? else { return Ok(()) };
        if found != key {
            return Ok(());
        }
        let (due, kept): (Vec<_>, Vec<_>) = runs.into_iter().partition(is_due);
        let tree = store.trees.dead_runs().ok_or_else(|| store.trees.damaged_dead_runs())?;
        let ranges: Vec<_> = due.iter().map(|run| run.range).collect();
        // Damage is found before anything is changed. The lock is taken once: others, who write,
        // need it, too.
        store.space.free_all(&ranges, self.generation()).map_err(|error| match error {
            SpaceError::Conflict { range, .. } => {
                store.trees.damaged(format!("a dead run at {} not in use", range.start))
            }
            error => error.into(),
        })?;
        self.note_unlogged_change();
        if kept.is_empty() {
            tree.remove(&self.change(), &key)?;
        } else {
            tree.insert(&self.change(), key, &DeadRun::encode_all(&kept))?;
        }
        let blocks = ranges.iter().map(|range| range.blocks).sum();
        store.snapshot_counts.note_freed(ranges.len() as u64, blocks);
        Ok(())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "cleanups_tests.rs"]
mod tests;
