//! What is worked off in the background, batch by batch: cleanups, dying records, lists.
use crate::mistakes::Mistake;
use crate::volume::{List, Outcome, Reference, Stage, Volume};

impl Volume {
    /// Nothing refers to it any more.
    fn finish(&mut self, run: Reference) -> Outcome {
        if self.has(Mistake::CleanupWithoutPin) {
            self.free(run.block)
        } else {
            self.pin(run.block)
        }
    }

    /// Whether the next list has more than one run for a cleanup.
    pub fn has_batches(&self, number: usize) -> bool {
        let cleanup = &self.cleanups[number];
        let count = |list: &List| {
            let taken = |run: &&Reference| cleanup.takes(list, **run, self.mistake);
            list.runs.iter().filter(taken).count()
        };
        self.lists.iter().map(count).find(|&count| count > 0).is_some_and(|count| count > 1)
    }

    /// Finishes one run of a cleanup, or all of one list. A cleanup without runs goes.
    pub fn clean(&mut self, number: usize, one: bool) -> Outcome {
        let cleanup = self.cleanups[number].clone();
        let mistake = self.mistake;
        let taken = |list: &_, run: &Reference| cleanup.takes(list, *run, mistake);
        let next = |volume: &Volume| {
            let has_some = |list: &List| list.runs.iter().any(|run| taken(list, run));
            volume.lists.iter().position(has_some)
        };
        if let Some(place) = next(self) {
            let list = &mut self.lists[place];
            let (mut batch, mut kept): (Vec<_>, Vec<_>) =
                std::mem::take(&mut list.runs).into_iter().partition(|run| taken(list, run));
            if one {
                kept.extend(batch.drain(1..));
            }
            list.runs = kept;
            batch.into_iter().try_for_each(|run| self.finish(run))?;
        }
        if next(self).is_none() {
            self.cleanups.remove(number);
        }
        Ok(())
    }

    /// Goes on in a dying tree by one leaf, at last by its top.
    pub fn walk(&mut self, number: usize) -> Outcome {
        let mut dying = self.dying[number].clone();
        let leaf = dying.tree.leaves.iter_mut().find_map(Option::take);
        let passed = match leaf {
            Some(leaf) => vec![leaf.extent, leaf.node],
            None => dying.tree.top.take().into_iter().collect(),
        };
        let ignores_boundary = self.has(Mistake::WalkIgnoresBoundary);
        for run in passed {
            if run.birth > dying.boundary || ignores_boundary {
                self.finish(run)?;
            }
        }
        let id = dying.subvolume;
        if self.has(Mistake::WalkWithoutCursor) && leaf.is_some() {
            return Ok(());
        }
        if dying.tree.references().next().is_some() {
            self.dying[number] = dying;
            return Ok(());
        }
        self.dying.remove(number);
        let is_last = !self.dying.iter().any(|other| other.subvolume == id);
        if is_last && self.subvolume(id)?.stage == Stage::Gone {
            self.release_origin(id)?;
            self.lists.retain(|list| list.subvolume != id);
            self.subvolumes.retain(|subvolume| subvolume.id != id);
        }
        Ok(())
    }

    /// Removes a discarded list. Its runs live.
    pub fn remove_discarded(&mut self, number: usize) -> Outcome {
        let list = self.lists.remove(number);
        if self.has(Mistake::DiscardedFreed) {
            list.runs.into_iter().try_for_each(|run| self.finish(run))?;
        }
        Ok(())
    }

    /// Whether two lists may become one: no snapshot stands between their beginnings, so the same
    /// snapshots hold what is in them.
    pub fn may_join_lists(&self, older: usize, newer: usize) -> bool {
        let (older, newer) = (&self.lists[older], &self.lists[newer]);
        let between = |generation: &u8| older.since < *generation && *generation <= newer.since;
        older.id != newer.id
            && older.subvolume == newer.subvolume
            && !older.discarded
            && !newer.discarded
            && older.since <= newer.since
            && !self.subvolumes.iter().any(|subvolume| subvolume.list == older.id)
            && (!self.has_cleanups(older.subvolume) || self.has(Mistake::ListsJoinedUnderCleanup))
            && (!self.members(older.subvolume).iter().any(between)
                || self.has(Mistake::ListsJoinedOverSnapshot))
    }

    pub fn join_lists(&mut self, older: usize, newer: usize) {
        let runs = std::mem::take(&mut self.lists[older].runs);
        self.lists[newer].runs.extend(runs);
        self.lists.remove(older);
    }
}
