//! What forks have inherited must be in the snapshots that they began as, which keep it. The fork
//! gets copies of the rest, if possible (`copies`).
use super::copies::Copier;
use super::extents::verifies;
use super::forks::Forks;
use super::gather::GatheredTrees;
use super::held_runs::{add, overlapping};
use super::snapshots::References;
use crate::checker::Checker;
use cairn_format::{BlockNumber, BlockRange, DeadRun, Extent, InodeNumber, ItemKind, Key, Origin};
use std::collections::{BTreeMap, BTreeSet};

impl References {
    /// Step 2.
    pub(super) fn leave_foreign(
        &mut self,
        trees: &mut GatheredTrees,
        checker: &Checker<'_>,
        forks: &Forks,
        copier: &mut Copier<'_>,
    ) {
        for (&id, tree) in trees.iter_mut().filter(|(id, _)| forks.origin_of(**id).is_some()) {
            let foreign = checker.foreign.get(&id).into_iter().flatten();
            let foreign: BTreeSet<Key> = foreign.filter_map(|foreign| foreign.extent).collect();
            // Within a fork nothing is there twice.
            let mut claimed = BTreeMap::new();
            for (&number, inode) in &mut tree.inodes {
                let inherited = |extent: &Extent| forks.has_inherited(id, extent.generation);
                let blocks: Vec<u64> = inode
                    .extents
                    .iter()
                    .filter(|(_, extent)| inherited(extent))
                    .map(|(block, _)| *block)
                    .collect();
                for block in blocks {
                    let Some(extent) = inode.extents.remove(&block) else { continue };
                    let key = Key::new(InodeNumber(number), ItemKind::Extent, block);
                    let source = forks.source_of(id, extent.generation);
                    let source = source.filter(|_| !foreign.contains(&key));
                    let parts = source.map_or(Vec::new(), |source| {
                        self.parts_of_source(&extent, source, checker)
                    });
                    let (start, end) = (extent.start.0, extent.range().end().0);
                    let (mut missing, mut at) = (Vec::new(), start);
                    for (from, to) in parts {
                        let is_free = claimed
                            .range(..to)
                            .next_back()
                            .is_none_or(|(_, end): (&u64, &u64)| *end <= from);
                        if is_free {
                            claimed.insert(from, to);
                            let skip = from - start;
                            inode.extents.insert(block + skip, extent.slice(skip, to - from));
                            missing.push((at, from));
                            at = to;
                        }
                    }
                    missing.push((at, end));
                    for (from, to) in missing.into_iter().filter(|(from, to)| from < to) {
                        let skip = from - start;
                        let copies = copier.copy(&extent.slice(skip, to - from)).into_iter();
                        let copies = copies.map(|(at, copy)| (block + skip + at, copy));
                        inode.extents.extend(copies);
                    }
                }
            }
        }
    }

    /// The parts of an inherited extent that the snapshot `source` has, as ranges of blocks. Where
    /// that can't be read, the extent itself shows what it has, if the data matches, or if there
    /// are no errors but in snapshots and data.
    fn parts_of_source(
        &mut self,
        extent: &Extent,
        source: Origin,
        checker: &Checker<'_>,
    ) -> Vec<(u64, u64)> {
        let (start, end) = (extent.start.0, extent.range().end().0);
        let birth = extent.generation;
        let (mut parts, mut unknown, mut at) = (Vec::new(), Vec::new(), start);
        for (first, run) in overlapping(&self.runs, start, end) {
            let (from, to) = (first.max(start), run.end.min(end));
            unknown.extend((at < from).then_some((at, from)));
            at = to;
            if (run.subvolume, run.birth, run.is_node) == (source.subvolume, birth, false)
                && run.last >= source.generation
            {
                parts.push((from, to));
            }
        }
        unknown.extend((at < end).then_some((at, end)));
        let snapshot = self.snapshots.get(&(source.subvolume, source.generation));
        if snapshot.is_some_and(|snapshot| !snapshot.is_whole) {
            for (from, to) in unknown {
                let part = extent.slice(from - start, to - from);
                if !checker.needs_rebuild || verifies(&checker.reader, &part) {
                    let range = BlockRange::new(BlockNumber(from), to - from);
                    let run = DeadRun { range, birth, is_node: false };
                    add(&mut self.runs, source.subvolume, source.generation, &run);
                    parts.push((from, to));
                }
            }
        }
        // Neighbours are one extent again.
        parts.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (from, to) in parts {
            match joined.last_mut() {
                Some(last) if last.1 == from => last.1 = to,
                _ => joined.push((from, to)),
            }
        }
        joined
    }
}
