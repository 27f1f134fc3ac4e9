//! What a repair makes of the snapshots.
//!
//! A repair changes no snapshot: their trees stay where they are, readable or not. It makes the
//! dead lists anew, so that everything that can be reached in a snapshot stays in use, and what no
//! snapshot has becomes free. Cleanups are done by that.
//!
//! 1. Find all references of the snapshots, the newest first, so that each is kept in the list of
//!    the last one that has it ([`References::of_snapshots`]). Where a snapshot's nodes can't be
//!    read, the runs that stood in its lists are kept, too.
//! 2. Blocks that a subvolume has otherwise than its snapshots: it keeps them only if its data
//!    matches the checksums ([`References::cut_conflicts`]).
//! 3. What a subvolume still has is no dead run ([`References::leave_to_subvolumes`]).
//! 4. The rest makes the new lists ([`References::settle`]).
//!
//! If references contradict each other, a run is kept for more snapshots than have it; never for
//! fewer. Memory: a few words for each run of blocks that snapshots have, and for each node.
use super::extents::verifies;
use super::gather::GatheredTrees;
use super::subvolumes::Subvolumes;
use crate::block_set::BlockSet;
use crate::checker::Checker;
use crate::reader::Reader;
use crate::report::{Finding, PassId, Severity, Structure};
use crate::snapshots::{shown, visit_nodes};
use cairn_format::{
    BlockNumber, BlockRange, DeadListItem, DeadRun, Extent, ExtentKind, Generation, ItemKind, Key,
    NODE_BLOCKS, NodePointer, SnapshotItem, SubvolumeItem, TREE_DEAD, TreeId, node::LEVELS_MAX,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Blocks that snapshots of a subvolume have.
#[derive(Clone, Copy)]
struct HeldRun {
    end: u64,
    birth: Generation,
    is_node: bool,
    subvolume: TreeId,
    /// The newest snapshot that has them.
    last: Generation,
}

/// A snapshot that stays.
struct KeptSnapshot {
    item: SnapshotItem,
    /// Whether all of its tree can be read.
    is_whole: bool,
}

/// See the [module](self).
#[derive(Default)]
pub(super) struct References {
    snapshots: BTreeMap<(TreeId, Generation), KeptSnapshot>,
    /// By first block; they don't overlap.
    runs: BTreeMap<u64, HeldRun>,
    /// Snapshots that could not stay.
    dropped: Vec<Finding>,
}

/// What the repaired volume says of snapshots.
#[derive(Default)]
pub(super) struct NewLists {
    /// Items of the tree of subvolumes.
    pub(super) items: Vec<(Key, Vec<u8>)>,
    /// Those of the tree of dead runs; `None` if the volume has none.
    pub(super) dead: Option<Vec<(Key, Vec<u8>)>>,
    pub(super) next_list: u64,
}

/// Walks through the trees of one subvolume's snapshots.
struct Walk<'w, 'a> {
    reader: &'w Reader<'a>,
    id: TreeId,
    last: Generation,
    runs: &'w mut BTreeMap<u64, HeldRun>,
    /// Nodes met, and whether all below them can be read.
    nodes: HashMap<u64, bool>,
}

impl References {
    /// Step 1, for the snapshots of subvolumes that stay.
    pub(super) fn of_snapshots(checker: &Checker<'_>, trees: &GatheredTrees) -> Self {
        let mut this = Self::default();
        for (&id, of) in &checker.snapshots.of {
            let (reader, runs) = (&checker.reader, &mut this.runs);
            let mut walk = Walk { reader, id, last: Generation(0), runs, nodes: HashMap::new() };
            for (&generation, item) in of.snapshots.iter().rev() {
                let is_possible = generation.0 > 0 && generation <= checker.superblock.generation;
                if !is_possible || !trees.contains_key(&id) {
                    let problem = shown(item, generation);
                    let finding =
                        Finding::new(PassId::Trees, Severity::Error, Structure::Item, problem);
                    let what = "dropped: there is no subvolume that it could belong to";
                    this.dropped.push(finding.in_subvolume(id).lost(what));
                    continue;
                }
                walk.last = generation;
                let is_whole = walk.visit(item.root, generation, LEVELS_MAX);
                let kept = KeptSnapshot { item: item.clone(), is_whole };
                this.snapshots.insert((id, generation), kept);
            }
        }
        this.keep_runs_of_damaged(checker);
        this
    }

    /// Adds the dead runs that only snapshots with unreadable nodes may have.
    fn keep_runs_of_damaged(&mut self, checker: &Checker<'_>) {
        let Some(root) = checker.snapshots.root_of(TREE_DEAD) else { return };
        if self.snapshots.values().all(|snapshot| snapshot.is_whole) {
            return;
        }
        let mut runs = Vec::new();
        visit_nodes(&checker.reader, root, &mut |node| {
            for (key, value) in node.items().filter(|_| node.level() == 0) {
                let owner = checker.snapshots.owner_of(key.inode);
                if let (Some((id, since)), Ok(of_item)) = (owner, DeadRun::decode_all(value)) {
                    runs.extend(of_item.into_iter().map(|run| (id, since, run)));
                }
            }
        });
        for (id, since, run) in runs {
            if run.birth.0 == 0 || run.birth > since || !checker.reader.contains(run.range) {
                continue;
            }
            let mut having = self.snapshots.range((id, run.birth)..=(id, since));
            let Some((&(_, last), _)) = having.next_back() else { continue };
            if self.snapshots.range((id, run.birth)..=(id, since)).all(|(_, one)| !one.is_whole) {
                add(&mut self.runs, id, last, &run);
            }
        }
    }

    /// Step 2. Returns how many blocks the subvolumes lose.
    pub(super) fn cut_conflicts(&self, trees: &mut GatheredTrees, reader: &Reader<'_>) -> u64 {
        let mut dropped = 0;
        for (&id, tree) in trees.iter_mut() {
            for inode in tree.inodes.values_mut() {
                let is_bad = |extent: &Extent, (from, to): &(u64, u64)| {
                    !verifies(reader, &extent.slice(from - extent.start.0, to - from))
                };
                let bad_parts = |(&block, extent): (&u64, &Extent)| {
                    let mut conflicts = self.conflicts(id, extent);
                    conflicts.retain(|part| is_bad(extent, part));
                    (!conflicts.is_empty()).then_some((block, conflicts))
                };
                let bad: Vec<_> = inode.extents.iter().filter_map(bad_parts).collect();
                for (block, conflicts) in bad {
                    let Some(extent) = inode.extents.remove(&block) else { continue };
                    let (mut at, end) = (extent.start.0, extent.range().end().0);
                    dropped += conflicts.iter().map(|(from, to)| to - from).sum::<u64>();
                    let mut keep = |from: u64, to: u64| {
                        if from < to {
                            let skip = from - extent.start.0;
                            inode.extents.insert(block + skip, extent.slice(skip, to - from));
                        }
                    };
                    for (from, to) in conflicts {
                        keep(at, from);
                        at = to;
                    }
                    keep(at, end);
                }
            }
        }
        dropped
    }

    /// The parts of an extent that snapshots have otherwise, as ranges of blocks.
    fn conflicts(&self, id: TreeId, extent: &Extent) -> Vec<(u64, u64)> {
        let (start, end) = (extent.start.0, extent.range().end().0);
        let other = |(_, run): &(u64, HeldRun)| {
            (run.subvolume, run.birth, run.is_node) != (id, extent.generation, false)
        };
        let overlapping = overlapping(&self.runs, start, end).filter(other);
        overlapping.map(|(from, run)| (from.max(start), run.end.min(end))).collect()
    }

    /// Step 3, when it is settled what the subvolumes have.
    pub(super) fn leave_to_subvolumes(&mut self, trees: &mut GatheredTrees, repair: Generation) {
        for (&id, tree) in trees.iter_mut() {
            let of_id = (id, Generation(0))..=(id, Generation(u64::MAX));
            let Some((&(_, boundary), _)) = self.snapshots.range(of_id).next_back() else {
                continue;
            };
            let extents = tree.inodes.values_mut().flat_map(|inode| inode.extents.values_mut());
            for extent in extents {
                let birth = extent.generation;
                let taken = take(&mut self.runs, extent.range());
                let own = taken.iter().filter(|run| run.subvolume == id);
                if let Some(oldest) = own.map(|run| run.birth).min() {
                    extent.generation = birth.min(oldest);
                } else if birth <= boundary {
                    let mut may_have = self.snapshots.range((id, birth)..=(id, boundary));
                    if may_have.all(|(_, snapshot)| snapshot.is_whole) {
                        (extent.generation, extent.written) = (repair, repair);
                    }
                }
                if extent.kind == ExtentKind::Unwritten {
                    extent.written = extent.generation;
                }
            }
        }
        // Those of subvolumes without snapshots can only be in conflict.
        for (id, tree) in trees.iter() {
            let has_snapshots = self.snapshots.keys().any(|(of, _)| of == id);
            let inodes = tree.inodes.values().filter(|_| !has_snapshots);
            for extent in inodes.flat_map(|inode| inode.extents.values()) {
                take(&mut self.runs, extent.range());
            }
        }
    }

    /// Adds the blocks of all runs to `kept`.
    pub(super) fn add_blocks(&self, kept: &mut BlockSet) {
        for (&start, run) in &self.runs {
            kept.insert(BlockRange::new(BlockNumber(start), run.end - start));
        }
    }

    /// The snapshots that had to be dropped.
    pub(super) fn take_dropped(&mut self) -> Vec<Finding> {
        std::mem::take(&mut self.dropped)
    }

    /// Step 4: each snapshot begins a new list. `None` if there are more runs than a list takes.
    pub(super) fn settle(
        self,
        checker: &Checker<'_>,
        subvolumes: &mut Subvolumes,
        repair: Generation,
    ) -> Option<NewLists> {
        let mut next_list = checker.superblock.next_list.max(1);
        if !checker.superblock.features.has_snapshots() {
            let next_list = checker.superblock.next_list;
            return Some(NewLists { next_list, ..NewLists::default() });
        }
        let mut numbers = BTreeSet::from([0]);
        for (&id, item) in subvolumes.iter_mut().flatten() {
            let mut of_id = self.snapshots.range((id, Generation(0))..);
            if let Some(((of, oldest), _)) = of_id.next()
                && *of == id
            {
                item.generation = item.generation.min(*oldest);
            }
            numbers.insert(item.number);
        }
        let (mut items, mut names) = (Vec::new(), BTreeSet::new());
        let mut lists: BTreeMap<(TreeId, Generation), u64> = BTreeMap::new();
        for (&(id, generation), KeptSnapshot { item, .. }) in &self.snapshots {
            let mut item = item.clone();
            while !names.insert((id, item.name.clone())) {
                let suffix = format!(".{generation}").into_bytes();
                item.name.truncate(SnapshotItem::NAME_BYTES_MAX - suffix.len());
                item.name.extend(suffix);
            }
            if !numbers.insert(item.number) {
                item.number =
                    (1..SubvolumeItem::NUMBER_END).find(|number| !numbers.contains(number))?;
                numbers.insert(item.number);
            }
            let key = |kind| Key::of_subvolume(id, kind, generation);
            items.push((key(ItemKind::Snapshot), item.encode()));
            let list = DeadListItem { list: next_list };
            items.push((key(ItemKind::DeadList), list.encode().to_vec()));
            lists.insert((id, generation), next_list);
            next_list += 1;
        }
        let mut of_lists: BTreeMap<u64, Vec<DeadRun>> = BTreeMap::new();
        for (&start, run) in &self.runs {
            let Some(list) = lists.get(&(run.subvolume, run.last)) else { continue };
            let range = BlockRange::new(BlockNumber(start), run.end - start);
            let run = DeadRun { range, birth: run.birth, is_node: run.is_node };
            of_lists.entry(*list).or_default().push(run);
        }
        let mut dead = Vec::new();
        for (list, runs) in of_lists {
            for (runs, count) in runs.chunks(DeadRun::PER_ITEM).zip(0..) {
                if count >= 1 << 16 || repair.0 >= 1 << 48 {
                    return None;
                }
                dead.push((Key::dead_runs(list, repair, count), DeadRun::encode_all(runs)));
            }
        }
        Some(NewLists { items, dead: Some(dead), next_list })
    }
}

impl Walk<'_, '_> {
    /// Adds a node and all below it. Returns whether all can be read.
    fn visit(&mut self, pointer: NodePointer, above: Generation, levels: u8) -> bool {
        let NodePointer { block, generation, level } = pointer;
        let range = BlockRange::node(block);
        let is_possible = block.0.is_multiple_of(NODE_BLOCKS)
            && self.reader.contains(range)
            && (1..=above.0).contains(&generation.0)
            && level < levels;
        if !is_possible {
            return false;
        }
        if let Some(is_whole) = self.nodes.get(&block.0) {
            return *is_whole;
        }
        self.add(DeadRun { range, birth: generation, is_node: true });
        let mut is_whole = false;
        if let Ok(node) = self.reader.node(block)
            && (node.tree(), node.generation(), node.level()) == (self.id, generation, level)
        {
            is_whole = true;
            if level > 0 {
                for index in 0..node.count() {
                    let child = node.child(index);
                    let pointer = NodePointer {
                        block: child.block,
                        generation: child.generation,
                        level: level - 1,
                    };
                    is_whole &= self.visit(pointer, generation, level);
                }
            } else {
                let is_extent = |(key, _): &(Key, &[u8])| key.kind == ItemKind::Extent as u8;
                for (_, value) in node.items().filter(is_extent) {
                    match Extent::decode(value) {
                        Ok(extent)
                            if self.reader.contains(extent.range())
                                && (1..=generation.0).contains(&extent.generation.0) =>
                        {
                            let (range, birth) = (extent.range(), extent.generation);
                            self.add(DeadRun { range, birth, is_node: false });
                        }
                        _ => is_whole = false,
                    }
                }
            }
        }
        self.nodes.insert(block.0, is_whole);
        is_whole
    }

    fn add(&mut self, run: DeadRun) {
        add(self.runs, self.id, self.last, &run);
    }
}

/// Those that have one of the blocks, with their first blocks.
fn overlapping(
    runs: &BTreeMap<u64, HeldRun>,
    start: u64,
    end: u64,
) -> impl Iterator<Item = (u64, HeldRun)> {
    let before = runs.range(..start).next_back().filter(move |(_, run)| run.end > start);
    before.into_iter().chain(runs.range(start..end)).map(|(start, run)| (*start, *run))
}

/// Adds what of a run is not there. Where it is there with another birth, the older one counts.
fn add(runs: &mut BTreeMap<u64, HeldRun>, subvolume: TreeId, last: Generation, run: &DeadRun) {
    let (start, end) = (run.range.start.0, run.range.end().0);
    let known: Vec<(u64, HeldRun)> = overlapping(runs, start, end).collect();
    let whole = known.is_empty();
    let new =
        |end| HeldRun { end, birth: run.birth, is_node: run.is_node && whole, subvolume, last };
    let mut at = start;
    for (first, other) in known {
        if at < first {
            runs.insert(at, new(first));
        }
        at = other.end;
        if other.subvolume == subvolume && other.birth > run.birth {
            runs.insert(first, HeldRun { birth: run.birth, ..other });
        }
    }
    if at < end {
        runs.insert(at, new(end));
    }
}

/// Takes these blocks out. Returns the runs that had some.
fn take(runs: &mut BTreeMap<u64, HeldRun>, range: BlockRange) -> Vec<HeldRun> {
    let (start, end) = (range.start.0, range.end().0);
    let known: Vec<(u64, HeldRun)> = overlapping(runs, start, end).collect();
    for &(first, run) in &known {
        runs.remove(&first);
        if first < start {
            runs.insert(first, HeldRun { end: start, is_node: false, ..run });
        }
        if run.end > end {
            runs.insert(end, HeldRun { is_node: false, ..run });
        }
    }
    known.into_iter().map(|(_, run)| run).collect()
}
