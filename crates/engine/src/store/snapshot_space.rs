//! The space of snapshots: what a snapshot refers to in all, what only some of them have, and what
//! was freed.
//!
//! A dead run born at b, in a list begun at s, is of exactly the snapshots made in [b, s]. So dead
//! lists say what a deletion frees: a run of which no other snapshot has anything. What a cleanup
//! is about to free is in no such interval, and counts for nobody. What a snapshot with forks has,
//! these have, too, as far as anybody has counted.
//!
//! What a snapshot j *refers to* is what a younger one, n, refers to and was born up to j, and the
//! runs of lists begun in [j, n) that were born up to j. So a walk of the newest snapshot's tree
//! answers for all. That never changes while a snapshot exists: what was found is remembered, and
//! from then on a walk reads only nodes that are younger than the newest snapshot that is known.
//! Of a fork that does not note what it gives up of its origin, each snapshot's tree is walked.
use super::Store;
use super::snapshot_counts::BySnapshot;
use crate::{Error, Result};
use cairn_format::{DeadRun, Extent, Generation, ItemKind, NODE_BLOCKS, Node, TreeId};
use std::collections::HashSet;

/// Times that a count begins again because a snapshot was deleted meanwhile.
const TRIES: usize = 8;

/// How much space a snapshot holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SnapshotUsage {
    /// Transaction that made it.
    pub generation: u64,
    /// Blocks that nothing else has: its deletion makes these free.
    pub unique_blocks: u64,
}

/// Snapshots in [`HeldSpace`].
const MOST_SPACE_COUNT: usize = 5;

/// What snapshots hold of a volume.
#[derive(Default)]
pub(crate) struct HeldSpace {
    /// Blocks that no subvolume has.
    pub(crate) blocks: u64,
    /// The snapshots that have the most blocks alone, if any, the most first: subvolume, name and
    /// blocks.
    pub(crate) most: Vec<(u64, Vec<u8>, u64)>,
}

/// The newest of `snapshots`, which ascend, that was made by `since` or before.
fn newest_up_to(snapshots: &[Generation], since: Generation) -> Option<usize> {
    snapshots.partition_point(|one| *one <= since).checked_sub(1)
}

/// Blocks of a node and of its extents, by their births.
fn references(node: &Node) -> Result<Vec<(Generation, u64)>> {
    let mut found = vec![(node.generation(), NODE_BLOCKS)];
    if node.level() == 0 {
        for (_, value) in node.items().filter(|(key, _)| key.kind == ItemKind::Extent as u8) {
            let extent = Extent::decode(value)?;
            found.push((extent.generation, extent.blocks));
        }
    }
    Ok(found)
}

impl Store {
    /// Of the snapshots with names.
    fn snapshot_generations(&self, id: TreeId) -> Result<Vec<Generation>> {
        self.trees.snapshot_items(id).map(|item| Ok(item?.0)).collect()
    }

    /// Of all snapshots, and those of them that are hidden.
    fn all_generations(&self, id: TreeId) -> Result<(Vec<Generation>, HashSet<u64>)> {
        let all: Vec<_> = self.trees.durable_snapshots(id).collect::<Result<_>>()?;
        let hidden = all.iter().filter(|(_, is_hidden)| *is_hidden).map(|(made, _)| made.0);
        Ok((all.iter().map(|(made, _)| *made).collect(), hidden.collect()))
    }

    /// Shows `visit` the dead runs of a subvolume that a snapshot made by `from` or later may have,
    /// each with the index of the newest one of `snapshots` that may.
    fn visit_dead_runs(
        &self,
        id: TreeId,
        snapshots: &[Generation],
        from: Generation,
        visit: &mut dyn FnMut(usize, &DeadRun),
    ) -> Result<()> {
        let to = self.trees.discarded_since(id)?.unwrap_or(Generation(u64::MAX));
        for list in self.trees.dead_lists_begun_in(id, from..to) {
            let (since, list) = list?;
            let Some(newest) = newest_up_to(snapshots, since) else { continue };
            for item in self.trees.runs_of(list) {
                let runs = item?.1;
                let held = runs.iter().filter(|run| run.birth <= snapshots[newest]);
                held.for_each(|run| visit(newest, run));
            }
        }
        Ok(())
    }

    /// What died before now enters the lists.
    fn write_down_deaths(&self) -> Result<()> {
        if self.options.read_only { Ok(()) } else { self.commit() }
    }

    pub(crate) fn snapshot_usage(&self, id: u64) -> Result<Vec<SnapshotUsage>> {
        let id = self.expect_subvolume(id)?;
        self.write_down_deaths()?;
        Ok(self.known_usage(id)?.0)
    }

    /// As [`Store::snapshot_usage`], without what died since the last cut; and the blocks that all
    /// of them have together.
    fn known_usage(&self, id: TreeId) -> Result<(Vec<SnapshotUsage>, u64)> {
        let (snapshots, hidden) = self.all_generations(id)?;
        let forked = self.trees.lock_records().forked_snapshots(id)?;
        let (mut unique, mut all) = (vec![0; snapshots.len()], 0);
        let origin = self.trees.recorded_inheritance(id)?.origin;
        self.visit_dead_runs(id, &snapshots, Generation(0), &mut |newest, run| {
            if run.birth <= origin {
                return;
            }
            all += run.range.blocks;
            let is_alone = newest == 0 || run.birth > snapshots[newest - 1];
            if is_alone && !forked.contains(&snapshots[newest].0) {
                unique[newest] += run.range.blocks;
            }
        })?;
        let usage = snapshots.iter().zip(unique).map(|(generation, unique_blocks)| SnapshotUsage {
            generation: generation.0,
            unique_blocks,
        });
        let usage = usage.filter(|one| !hidden.contains(&one.generation));
        Ok((usage.collect(), all))
    }

    /// What snapshots hold, without what died since the last cut.
    pub(crate) fn held_space(&self) -> Result<HeldSpace> {
        let (mut held, mut most) = (HeldSpace::default(), Vec::new());
        for id in self.trees.with_items(ItemKind::Snapshot)? {
            let (usage, blocks) = self.known_usage(id)?;
            held.blocks += blocks;
            let alone = usage.into_iter().filter(|one| one.unique_blocks > 0);
            most.extend(alone.map(|one| (one.unique_blocks, id, one.generation)));
            most.sort_unstable_by(|one, other| other.cmp(one));
            most.truncate(MOST_SPACE_COUNT);
        }
        for (blocks, id, generation) in most {
            // One may be deleted meanwhile.
            if let Ok(item) = self.trees.snapshot_item(id, Generation(generation)) {
                held.most.push((id.0, item.name, blocks));
            }
        }
        Ok(held)
    }

    /// How many deleted snapshots are being cleaned up, and in how many dead lists.
    pub(crate) fn count_cleanups(&self) -> Result<(u64, u64)> {
        let (mut cleanups, mut lists) = (0, 0);
        for id in self.trees.with_items(ItemKind::Cleanup)? {
            for cleanup in self.trees.cleanups(id) {
                let (_, cleanup) = cleanup?;
                cleanups += 1;
                let begun_in = cleanup.lists_from..cleanup.lists_to;
                for list in self.trees.dead_lists_begun_in(id, begun_in) {
                    list?;
                    lists += 1;
                }
            }
        }
        Ok((cleanups, lists))
    }

    /// Blocks that only the snapshots made by these transactions have: what the deletion of all of
    /// them makes free.
    pub(crate) fn space_of_snapshots(&self, id: u64, of: &[u64]) -> Result<u64> {
        let id = self.expect_subvolume(id)?;
        self.write_down_deaths()?;
        let (snapshots, hidden) = self.all_generations(id)?;
        let forked = self.trees.lock_records().forked_snapshots(id)?;
        let of: HashSet<u64> = of.iter().copied().collect();
        // For each of them, the newest one below it that stays, or the origin, or 0.
        let mut stays = self.trees.recorded_inheritance(id)?.origin;
        let mut below = Vec::new();
        for generation in &snapshots {
            // One with forks stays when its name goes.
            let goes = of.contains(&generation.0) && !forked.contains(&generation.0);
            below.push(goes.then_some(stays));
            if !goes {
                stays = *generation;
            }
        }
        let is_shown = |made: &u64| {
            snapshots.binary_search(&Generation(*made)).is_ok() && !hidden.contains(made)
        };
        if !of.iter().all(is_shown) {
            return Err(Error::NotFound);
        }
        let mut blocks = 0;
        self.visit_dead_runs(id, &snapshots, Generation(0), &mut |newest, run| {
            if below[newest].is_some_and(|below| run.birth > below) {
                blocks += run.range.blocks;
            }
        })?;
        Ok(blocks)
    }

    /// Blocks that each snapshot refers to, by the transaction that made it.
    pub(crate) fn referenced_by_snapshots(&self, id: u64) -> Result<Vec<(u64, u64)>> {
        let id = self.expect_subvolume(id)?;
        for _ in 0..TRIES {
            let snapshots = self.snapshot_generations(id)?;
            let known = self.snapshot_counts.referenced.lock().get(&id.0).cloned();
            let counted = self.count_references(id, &snapshots, known.unwrap_or_default());
            // What one had that is deleted now may have been missing.
            let now = self.snapshot_generations(id)?;
            if snapshots.iter().any(|generation| now.binary_search(generation).is_err()) {
                continue;
            }
            let counted = counted?;
            let found = counted.iter().map(|(generation, blocks)| (generation.0, *blocks));
            let found = found.collect();
            self.snapshot_counts.referenced.lock().insert(id.0, counted);
            return Ok(found);
        }
        Err(Error::Stale)
    }

    /// What each of `snapshots`, which are all that there are, refers to; `known` says it of some
    /// that there are or were.
    fn count_references(
        &self,
        id: TreeId,
        snapshots: &[Generation],
        mut known: BySnapshot,
    ) -> Result<BySnapshot> {
        known.retain(|generation, _| snapshots.binary_search(generation).is_ok());
        let inheritance = self.trees.recorded_inheritance(id)?;
        if inheritance.origin > Generation(0) && !inheritance.is_noted {
            // The dead lists of an older fork leave out what it had inherited.
            for generation in snapshots {
                if !known.contains_key(generation) {
                    let mut blocks = 0;
                    self.visit_references(id, *generation, Generation(0), &mut |_, more| {
                        blocks += more;
                    })?;
                    known.insert(*generation, blocks);
                }
            }
            return Ok(known);
        }
        let Some(newest) = snapshots.last().filter(|newest| !known.contains_key(newest)) else {
            return Ok(known);
        };
        let (base, of_base) = known.last_key_value().map_or((Generation(0), 0), |(g, n)| (*g, *n));
        let old = snapshots.partition_point(|one| *one <= base);
        let young = &snapshots[old..];
        let first_with = |birth: Generation| young.partition_point(|one| *one < birth);
        // Of each of the young ones, what it has more than the one before it.
        let mut more = vec![0_i64; young.len() + 1];
        more[0] = of_base as i64;
        self.visit_dead_runs(id, snapshots, base, &mut |last, run| {
            let blocks = run.range.blocks as i64;
            // Otherwise the newest snapshot has it, and its tree says so.
            if last + 1 < snapshots.len() {
                if run.birth <= base {
                    more[0] -= blocks;
                }
                let (first, end) = (first_with(run.birth), (last + 1).saturating_sub(old));
                if first < end {
                    more[first] += blocks;
                    more[end] -= blocks;
                }
            }
        })?;
        self.visit_references(id, *newest, base, &mut |birth, blocks| {
            more[first_with(birth)] += blocks as i64;
        })?;
        let mut blocks = 0;
        for (generation, more) in young.iter().zip(more) {
            blocks += more;
            known.insert(*generation, u64::try_from(blocks).unwrap_or(0));
        }
        Ok(known)
    }

    /// Shows `visit` the references of a snapshot that were born after `oldest`: birth and blocks.
    fn visit_references(
        &self,
        id: TreeId,
        snapshot: Generation,
        oldest: Generation,
        visit: &mut dyn FnMut(Generation, u64),
    ) -> Result<()> {
        let number = self.trees.snapshot_item(id, snapshot)?.number;
        let slot = self.trees.know_snapshot(id, snapshot, number);
        let subvolume = self.trees.open_slot(slot, |_| Ok(()))?;
        let mut visited = Ok(());
        subvolume.tree().visit_younger(oldest, &mut |node| {
            // From its deletion on, its blocks may come to hold something else.
            visited = subvolume.check_alive().and_then(|()| references(node)).map(|found| {
                found.iter().filter(|(birth, _)| *birth > oldest).for_each(|(birth, blocks)| {
                    visit(*birth, *blocks);
                });
            });
            visited.is_ok()
        })?;
        visited
    }
}
