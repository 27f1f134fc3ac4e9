//! What a repair makes of the snapshots.
//!
//! A repair changes no snapshot: their trees stay where they are, readable or not, unless a damaged
//! one is to be dropped. Then what only that has is free; if forks need it, it stays without a
//! name. The repair makes the dead lists anew, so that everything that can be reached in a snapshot
//! stays in use, and what no snapshot has becomes free. Cleanups are done by that.
//!
//! 1. Find all references of the snapshots, the newest first, so that each is kept in the list of
//!    the last one that has it ([`References::of_snapshots`]). Where a snapshot's nodes can't be
//!    read, the runs that stood in its lists are kept, too.
//! 2. What forks have inherited must be among them (`inherited`).
//! 3. Blocks that a subvolume has otherwise than its snapshots, or that those of another one have:
//!    it gets copies, or keeps them only if its data matches the checksums
//!    ([`References::cut_conflicts`]).
//! 4. What a subvolume still has is no dead run ([`References::leave_to_subvolumes`]).
//! 5. The rest makes the new lists ([`References::settle`]).
//!
//! If references contradict each other, a run is kept for more snapshots than have it; never for
//! fewer. Memory: a few words for each run of blocks that snapshots have, and for each node.
use super::copies::Copier;
use super::extents::verifies;
use super::forks::{Forks, can_stay};
use super::gather::GatheredTrees;
use super::held_runs::{HeldRun, HeldRuns, add, overlapping, take};
use super::subvolumes::Subvolumes;
use crate::block_set::BlockSet;
use crate::checker::Checker;
use crate::forks::{Lineage, firsts_of_lines};
use crate::object::ObjectId;
use crate::reader::Reader;
use crate::report::{Finding, PassId, Severity, Structure};
use crate::snapshots::{shown, visit_nodes};
use cairn_format::{
    BlockNumber, BlockRange, DeadListItem, DeadRun, Extent, ExtentKind, Generation, ItemKind, Key,
    NodePointer, Origin, SnapshotItem, SubvolumeItem, TREE_DEAD, TreeId, node::LEVELS_MAX,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A snapshot that stays.
pub(super) struct KeptSnapshot {
    item: SnapshotItem,
    /// Whether all of its tree can be read.
    pub(super) is_whole: bool,
}

/// See the [module](self).
#[derive(Default)]
pub(super) struct References {
    pub(super) snapshots: BTreeMap<(TreeId, Generation), KeptSnapshot>,
    pub(super) runs: HeldRuns,
    /// Snapshots that could not stay, or were given up.
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
    /// Snapshots that got another name, in words.
    pub(super) renamed: Vec<String>,
}

/// Blocks of an extent that snapshots have otherwise.
struct Conflict {
    from: u64,
    to: u64,
    /// Whether they are a node, or those of another subvolume's snapshots.
    is_of_others: bool,
}

/// Walks through the trees of one subvolume's snapshots.
struct Walk<'w, 'a> {
    reader: &'w Reader<'a>,
    id: TreeId,
    /// Births up to this one are inherited, and whether all of that can be read.
    inherited: (Generation, bool),
    lineage: Lineage,
    last: Generation,
    runs: &'w mut HeldRuns,
    /// Nodes met, and whether all below them can be read.
    nodes: HashMap<u64, bool>,
}

impl References {
    /// Step 1, for the snapshots of subvolumes that stay.
    pub(super) fn of_snapshots(
        checker: &Checker<'_>,
        trees: &GatheredTrees,
        forks: &Forks,
        to_drop: &BTreeSet<(TreeId, Generation)>,
    ) -> Self {
        let mut this = Self::default();
        for (&id, of) in &checker.snapshots.of {
            let (reader, runs) = (&checker.reader, &mut this.runs);
            // Origins have lower ids.
            let inherited = forks.origin_of(id).map_or((Generation(0), true), |origin| {
                let snapshot = this.snapshots.get(&(origin.subvolume, origin.generation));
                (origin.generation, snapshot.is_some_and(|snapshot| snapshot.is_whole))
            });
            let (last, nodes) = (Generation(0), HashMap::new());
            let lineage = checker.lineage_of(id);
            let mut walk = Walk { reader, id, inherited, lineage, last, runs, nodes };
            for (&generation, item) in of.snapshots.iter().rev() {
                if item.is_hidden && !forks.need(id, generation) {
                    continue;
                }
                let has_subvolume = trees.contains_key(&id) || forks.is_nameless(id);
                if !can_stay(checker, generation) || !has_subvolume {
                    let problem = shown(item, generation);
                    let finding =
                        Finding::new(PassId::Trees, Severity::Error, Structure::Item, problem);
                    let what = "dropped: there is no subvolume that it could belong to";
                    this.dropped.push(finding.in_subvolume(id).lost(what));
                    continue;
                }
                let mut item = item.clone();
                if to_drop.contains(&(id, generation)) {
                    let is_needed = forks.need(id, generation);
                    let what = match is_needed {
                        true => "dropped: it was damaged; what forks began as goes with them",
                        false => "dropped: it was damaged; what only it had is free",
                    };
                    let (pass, structure) = (PassId::Snapshots, Structure::Item);
                    let problem = shown(&item, generation);
                    let finding = Finding::new(pass, Severity::Error, structure, problem);
                    this.dropped.push(finding.of(ObjectId::root_of(id)).lost(what));
                    if !is_needed {
                        continue;
                    }
                    (item.is_hidden, item.is_held, item.name) = (true, false, Vec::new());
                }
                walk.last = generation;
                let is_whole = walk.visit(item.root, generation, LEVELS_MAX);
                let kept = KeptSnapshot { item, is_whole };
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
            // What a fork has noted of its origin's is kept there.
            if checker.lineage_of(id).is_of_origin(run.birth) {
                continue;
            }
            let mut having = self.snapshots.range((id, run.birth)..=(id, since));
            let Some((&(_, last), _)) = having.next_back() else { continue };
            if self.snapshots.range((id, run.birth)..=(id, since)).all(|(_, one)| !one.is_whole) {
                add(&mut self.runs, id, last, &run);
            }
        }
    }

    /// Step 3.
    pub(super) fn cut_conflicts(
        &self,
        trees: &mut GatheredTrees,
        reader: &Reader<'_>,
        forks: &Forks,
        copier: &mut Copier<'_>,
    ) {
        for (&id, tree) in trees.iter_mut() {
            for inode in tree.inodes.values_mut() {
                let conflicts = |(&block, extent): (&u64, &Extent)| {
                    let is_own = !forks.has_inherited(id, extent.generation);
                    let conflicts = if is_own { self.conflicts(id, extent) } else { Vec::new() };
                    (!conflicts.is_empty()).then_some((block, conflicts))
                };
                let of_inode: Vec<_> = inode.extents.iter().filter_map(conflicts).collect();
                for (block, conflicts) in of_inode {
                    let Some(extent) = inode.extents.remove(&block) else { continue };
                    let mut keep = |from: u64, to: u64| {
                        if from < to {
                            let skip = from - extent.start.0;
                            inode.extents.insert(block + skip, extent.slice(skip, to - from));
                        }
                    };
                    let (mut at, mut copies) = (extent.start.0, Vec::new());
                    for Conflict { from, to, is_of_others } in conflicts {
                        let skip = from - extent.start.0;
                        let part = extent.slice(skip, to - from);
                        let is_good = verifies(reader, &part);
                        if is_good && !is_of_others {
                            continue;
                        }
                        let copied = copier.copy(&part);
                        if is_good && copied.is_empty() {
                            continue;
                        }
                        keep(at, from);
                        at = to;
                        copies
                            .extend(copied.into_iter().map(|(at, copy)| (block + skip + at, copy)));
                    }
                    keep(at, extent.range().end().0);
                    inode.extents.extend(copies);
                }
            }
        }
    }

    /// The parts of an extent that snapshots have otherwise.
    fn conflicts(&self, id: TreeId, extent: &Extent) -> Vec<Conflict> {
        let (start, end) = (extent.start.0, extent.range().end().0);
        let other = |(_, run): &(u64, HeldRun)| {
            (run.subvolume, run.birth, run.is_node) != (id, extent.generation, false)
        };
        let overlapping = overlapping(&self.runs, start, end).filter(other);
        let conflict = |(from, run): (u64, HeldRun)| Conflict {
            from: from.max(start),
            to: run.end.min(end),
            is_of_others: run.subvolume != id || run.is_node,
        };
        overlapping.map(conflict).collect()
    }

    /// Step 4, when it is settled what the subvolumes have.
    pub(super) fn leave_to_subvolumes(
        &mut self,
        trees: &mut GatheredTrees,
        repair: Generation,
        forks: &Forks,
    ) {
        for (&id, tree) in trees.iter_mut() {
            let of_id = (id, Generation(0))..=(id, Generation(u64::MAX));
            let Some((&(_, boundary), _)) = self.snapshots.range(of_id).next_back() else {
                continue;
            };
            let extents = tree.inodes.values_mut().flat_map(|inode| inode.extents.values_mut());
            for extent in extents.filter(|extent| !forks.has_inherited(id, extent.generation)) {
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
            let extents = inodes.flat_map(|inode| inode.extents.values());
            for extent in extents.filter(|extent| !forks.has_inherited(*id, extent.generation)) {
                take(&mut self.runs, extent.range());
            }
        }
    }

    /// Adds what these snapshots have, and what could not be read of them.
    pub(super) fn keep(&mut self, inherited: &[(Origin, DeadRun)]) {
        for (source, run) in inherited {
            add(&mut self.runs, source.subvolume, source.generation, run);
        }
    }

    /// As [`Self::leave_to_subvolumes`], of nodes of trees that stay.
    pub(super) fn leave_nodes(&mut self, nodes: &[BlockRange]) {
        for node in nodes {
            take(&mut self.runs, *node);
        }
    }

    /// Whether all of this snapshot can be read.
    pub(super) fn is_whole(&self, snapshot: Origin) -> bool {
        let found = self.snapshots.get(&(snapshot.subvolume, snapshot.generation));
        found.is_some_and(|snapshot| snapshot.is_whole)
    }

    /// The subvolumes whose newest snapshots can't be read completely.
    pub(super) fn with_damaged_newest(&self) -> Vec<TreeId> {
        let mut newest = BTreeMap::new();
        for (&(id, _), snapshot) in &self.snapshots {
            newest.insert(id, snapshot.is_whole);
        }
        newest.into_iter().filter(|(_, is_whole)| !is_whole).map(|(id, _)| id).collect()
    }

    /// Whether a snapshot of the subvolume stays.
    pub(super) fn has_snapshots(&self, id: TreeId) -> bool {
        let of_id = (id, Generation(0))..=(id, Generation(u64::MAX));
        self.snapshots.range(of_id).next().is_some()
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

    /// Step 5: each snapshot begins a new list. `None` if there are more runs than a list takes.
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
        let firsts = subvolumes.as_ref().map(firsts_of_lines).unwrap_or_default();
        let name_of = |((id, _), KeptSnapshot { item, .. }): (&(TreeId, _), &KeptSnapshot)| {
            let first = firsts.get(id).copied().unwrap_or(*id);
            (!item.is_hidden).then(|| (first, item.name.clone()))
        };
        let mut taken: BTreeSet<_> = self.snapshots.iter().filter_map(name_of).collect();
        let (mut items, mut names, mut renamed) = (Vec::new(), BTreeSet::new(), Vec::new());
        let mut lists: BTreeMap<(TreeId, Generation), u64> = BTreeMap::new();
        for (&(id, generation), KeptSnapshot { item, .. }) in &self.snapshots {
            let mut item = item.clone();
            let first = firsts.get(&id).copied().unwrap_or(id);
            if !item.is_hidden && !names.insert((first, item.name.clone())) {
                let before = shown(&item, generation);
                let wanted = std::mem::take(&mut item.name);
                let mut others = other_names(&wanted, generation).take(taken.len() + 1);
                item.name = others.find(|name| taken.insert((first, name.clone())))?;
                let now = crate::names::shown(&item.name);
                renamed.push(format!("{before} of subvolume {id} is named \"{now}\" now"));
            }
            if item.is_hidden {
                item.number = 0;
            } else if !numbers.insert(item.number) {
                item.number =
                    (1..SubvolumeItem::NUMBER_END).find(|number| !numbers.contains(number))?;
                numbers.insert(item.number);
            }
            let key = |kind| Key::of_subvolume(id, kind, generation);
            items.push((key(ItemKind::Snapshot), item.encode()));
            // The newest snapshot of a subvolume without a head counts as that.
            let mut later = self.snapshots.range((id, generation.next())..);
            let is_newest = later.next().is_none_or(|((of, _), _)| *of != id);
            let of_id = subvolumes.as_ref().and_then(|items| items.get(&id));
            if is_newest && of_id.is_some_and(|item| item.is_headless) {
                continue;
            }
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
        Some(NewLists { items, dead: Some(dead), next_list, renamed })
    }
}

/// Names for a snapshot whose own name another one has, all different.
fn other_names(name: &[u8], generation: Generation) -> impl Iterator<Item = Vec<u8>> + '_ {
    (1_u64..).map(move |attempt| {
        let suffix = match attempt {
            1 => format!(".{generation}"),
            _ => format!(".{generation}-{attempt}"),
        };
        let kept = name.len().min(SnapshotItem::NAME_BYTES_MAX - suffix.len());
        [&name[..kept], suffix.as_bytes()].concat()
    })
}

impl Walk<'_, '_> {
    /// Adds a node and all below it. Returns whether all can be read.
    fn visit(&mut self, pointer: NodePointer, above: Generation, levels: u8) -> bool {
        let NodePointer { block, generation, level } = pointer;
        let range = BlockRange::node(block);
        let is_possible =
            self.reader.has_node(block) && (1..=above.0).contains(&generation.0) && level < levels;
        if !is_possible {
            return false;
        }
        if generation <= self.inherited.0 {
            return self.inherited.1;
        }
        if let Some(is_whole) = self.nodes.get(&block.0) {
            return *is_whole;
        }
        self.add(DeadRun { range, birth: generation, is_node: true });
        let mut is_whole = false;
        if let Ok(node) = self.reader.node(block)
            && self.lineage.accepts(&node, self.id)
            && (node.generation(), node.level()) == (generation, level)
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
                            if birth > self.inherited.0 {
                                self.add(DeadRun { range, birth, is_node: false });
                            }
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
