//! Snapshots, dead lists and cleanups: their items against each other, dead runs against them, and
//! the trees of the snapshots.
//!
//! [`add_item`], [`check_items`] and `dead_runs` belong to pass `Trees`, which finds out what is
//! referred to. `walk` is pass `Snapshots`. That a snapshot's references are all kept, and nothing
//! else is kept for it, is compared by fingerprints (`fingerprint`); `compare` then looks for an
//! example.
mod balance;
mod compare;
pub(crate) mod dead_runs;
pub(crate) mod fingerprint;
mod given_up;
mod readable;
mod walk;

pub(crate) use balance::{Balance, ancestors, lead_to_root};
pub(crate) use compare::visit_nodes;
pub(crate) use given_up::{damaged, to_drop};
pub(crate) use readable::readable;
pub(crate) use walk::{check, shown};

use crate::checker::Checker;
use crate::file_group::GroupRules;
use crate::forks::{Lineage, firsts_of_lines};
use crate::report::{Finding, PassId, Severity, Structure};
use crate::trees::ExpectedNode;
use cairn_format::{
    BlockNumber, BlockRange, CleanupItem, DeadListItem, DeadRun, Generation, ItemKind, Key, Node,
    NodePointer, SnapshotItem, SubvolumeItem, TreeId,
};
use fingerprint::{Fingerprint, Subtree};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The snapshots of one subvolume, and what is kept for them.
#[derive(Default)]
pub(crate) struct SubvolumeSnapshots {
    /// By the transaction that made them.
    pub(crate) snapshots: BTreeMap<Generation, SnapshotItem>,
    /// The ids of the dead lists, by the transaction that began them.
    pub(crate) lists: BTreeMap<Generation, u64>,
    /// By the newest birth.
    pub(crate) cleanups: BTreeMap<Generation, CleanupItem>,
    /// What is kept for each snapshot, less what is kept for the one before.
    kept: BTreeMap<Generation, Fingerprint>,
    /// Whether a reference could not be counted among those kept.
    is_uncountable: bool,
    /// The subvolume has lost its name: the newest snapshot counts as its tree did.
    pub(crate) is_nameless: bool,
}

impl SubvolumeSnapshots {
    /// The generation of the newest snapshot, or 0.
    pub(crate) fn boundary(&self) -> Generation {
        self.snapshots.last_key_value().map_or(Generation(0), |(generation, _)| *generation)
    }

    /// Whether a dead list is discarded: what is in it is the newest snapshot's.
    fn discards(&self, since: Generation) -> bool {
        self.is_nameless && since >= self.boundary()
    }

    /// Counts a reference as kept for the snapshots from its birth to `last`. Returns whether there
    /// are any.
    fn keep(&mut self, range: BlockRange, birth: Generation, last: Option<Generation>) -> bool {
        let first = self.snapshots.range(birth..).next().map(|(generation, _)| *generation);
        let Some(first) = first.filter(|first| last.is_none_or(|last| *first <= last)) else {
            return false;
        };
        let fingerprint = Fingerprint::of(range, birth);
        self.kept.entry(first).or_default().add(fingerprint);
        let behind = last.and_then(|last| self.snapshots.range(last.next()..).next());
        if let Some((behind, _)) = behind {
            self.kept.entry(*behind).or_default().remove(fingerprint);
        }
        true
    }

    /// Whether a cleanup will free a run.
    fn is_to_be_freed(&self, birth: Generation, since: Generation) -> bool {
        self.cleanups.iter().any(|(newest, cleanup)| {
            cleanup.oldest < birth
                && birth <= *newest
                && (cleanup.lists_from..cleanup.lists_to).contains(&since)
        })
    }
}

/// A node of a tree with snapshots, and what is below it.
#[derive(Clone, Copy)]
struct KnownNode {
    tree: TreeId,
    generation: Generation,
    level: u8,
    below: Subtree,
}

/// A leaf, and the first snapshot that has it.
#[derive(Clone, Copy)]
pub(crate) struct SnapshotLeaf {
    pub(crate) subvolume: TreeId,
    pub(crate) generation: Generation,
    pub(crate) block: BlockNumber,
}

/// The snapshots of all subvolumes.
#[derive(Default)]
pub(crate) struct Snapshots {
    /// Subvolumes with anything of snapshots.
    pub(crate) of: BTreeMap<TreeId, SubvolumeSnapshots>,
    /// Items of snapshots that can't be decoded, or don't belong where they are.
    pub(crate) undecodable: u64,
    /// Subvolume and beginning of each dead list.
    list_owners: BTreeMap<u64, (TreeId, Generation)>,
    /// Lists that have runs.
    lists_used: BTreeSet<u64>,
    /// What forks have noted that they gave up of what they had from their origins.
    inherited_dead: Vec<(TreeId, DeadRun)>,
    /// Roots of the superblock's trees.
    roots: BTreeMap<TreeId, NodePointer>,
    /// Nodes that have been read and are in a snapshot, or may be.
    known: HashMap<u64, KnownNode>,
    /// Leaves that only snapshots have.
    pub(crate) leaves: Vec<SnapshotLeaf>,
    /// Whether the leaves of the superblock's trees are among them, because the data pass reads
    /// these with what the log has in place of their items.
    pub(crate) needs_all_leaves: bool,
    /// Whether there are too many snapshots to check each as a whole.
    pub(crate) are_many: bool,
    /// Snapshots with damaged trees, or whose references are not those kept.
    pub(crate) damaged: BTreeSet<(TreeId, Generation)>,
    /// Snapshots whose trees or data are damaged; from pass `Data`, too.
    pub(crate) spoilt: BTreeSet<(TreeId, Generation)>,
}

impl Snapshots {
    /// Notes where a tree of the superblock begins.
    pub(crate) fn add_root(&mut self, tree: TreeId, root: NodePointer) {
        self.roots.entry(tree).or_insert(root);
    }

    /// Where a tree of the superblock begins.
    pub(crate) fn root_of(&self, tree: TreeId) -> Option<NodePointer> {
        self.roots.get(&tree).copied()
    }

    /// Subvolume and beginning of a dead list.
    pub(crate) fn owner_of(&self, list: u64) -> Option<(TreeId, Generation)> {
        self.list_owners.get(&list).copied()
    }

    /// Whether a snapshot of the subvolume has a name.
    pub(crate) fn has_names_in(&self, subvolume: TreeId) -> bool {
        let of = self.of.get(&subvolume);
        of.is_some_and(|of| of.snapshots.values().any(|snapshot| !snapshot.is_hidden))
    }

    /// Counts a reference of the superblock's tree `tree`.
    pub(crate) fn add_reference(&mut self, tree: TreeId, range: BlockRange, birth: Generation) {
        if let Some(subvolume) = self.of.get_mut(&tree) {
            subvolume.keep(range, birth, None);
        }
    }

    /// A reference of `tree` can't be counted.
    pub(crate) fn add_uncountable(&mut self, tree: TreeId) {
        if let Some(subvolume) = self.of.get_mut(&tree) {
            subvolume.is_uncountable = true;
        }
    }

    /// Remembers a node of the superblock's tree `tree` if a snapshot may have it too. A fork's
    /// nodes that are its origin's are not remembered as the fork's. One above such nodes is read
    /// again with the snapshot if their names matter: then they are known from the origin's.
    pub(crate) fn remember(&mut self, tree: TreeId, node: &Node, below: Subtree) {
        let lacks_names = self.are_many && node.level() > 0 && !below.names.is_known();
        if below.is_whole && !lacks_names && self.may_have(tree, node) {
            self.insert_known(node, below);
        }
    }

    fn may_have(&self, tree: TreeId, node: &Node) -> bool {
        let boundary = self.of.get(&tree).map(SubvolumeSnapshots::boundary);
        !self.needs_all_leaves && boundary.is_some_and(|boundary| node.generation() <= boundary)
    }

    fn insert_known(&mut self, node: &Node, below: Subtree) {
        let (tree, generation, level) = (node.tree(), node.generation(), node.level());
        self.known.insert(node.address().0, KnownNode { tree, generation, level, below });
    }
}

fn finding(structure: Structure, problem: impl Into<String>) -> Finding {
    Finding::new(PassId::Trees, Severity::Error, structure, problem)
}

/// Adds an item of the tree of subvolumes; `None` if it is of no kind that belongs to snapshots.
///
/// # Errors
/// It can't be decoded; the problem in words.
pub(crate) fn add_item(
    checker: &mut Checker<'_>,
    key: Key,
    value: &[u8],
) -> Option<Result<(), String>> {
    let (id, generation) = (TreeId(key.inode), Generation(key.offset));
    let kind = ItemKind::from_u8(key.kind)?;
    let snapshots = &mut checker.snapshots;
    let added = match kind {
        ItemKind::Snapshot => SnapshotItem::decode(value).map(|item| {
            snapshots.of.entry(id).or_default().snapshots.insert(generation, item);
        }),
        ItemKind::DeadList => DeadListItem::decode(value).map(|item| {
            snapshots.of.entry(id).or_default().lists.insert(generation, item.list);
            snapshots.list_owners.entry(item.list).or_insert((id, generation));
        }),
        ItemKind::Cleanup => CleanupItem::decode(value).map(|item| {
            snapshots.of.entry(id).or_default().cleanups.insert(generation, item);
        }),
        _ => return None,
    };
    Some(added.map_err(|error| error.problem))
}

/// What the items in a leaf of a superblock's tree say of names and counters, if snapshots have it
/// and are too many to check each as a whole.
pub(crate) fn names_in(checker: &Checker<'_>, expected: &ExpectedNode, leaf: &Node) -> Balance {
    let snapshots = &checker.snapshots;
    match snapshots.are_many && snapshots.may_have(expected.tree, leaf) {
        true => balance_of(checker, expected.lineage, leaf.generation(), leaf.items()),
        false => Balance::UNKNOWN,
    }
}

/// What items that follow each other say; none of them may be younger than `generation_max`.
pub(crate) fn balance_of<'i>(
    checker: &Checker<'_>,
    lineage: Lineage,
    generation_max: Generation,
    items: impl Iterator<Item = (Key, &'i [u8])>,
) -> Balance {
    let rules = GroupRules {
        hash_seed: checker.superblock.hash_seed,
        generation_max,
        has_long_extents: true,
        has_parents: checker.superblock.features.has_parents(),
        lineage,
    };
    Balance::of_items(items, &rules, checker.counters.next_inode)
}

/// Once the tree of subvolumes is read: which ones have lost their names.
pub(crate) fn note_nameless(checker: &mut Checker<'_>) {
    let total: usize = checker.snapshots.of.values().map(|of| of.snapshots.len()).sum();
    checker.snapshots.are_many = total > checker.whole_max.snapshots;
    for (id, of) in &mut checker.snapshots.of {
        of.is_nameless = checker.subvolumes.get(id).is_some_and(SubvolumeItem::is_nameless);
    }
}

/// Once all trees are read: compares the items with those of subvolumes, the superblock, and each
/// other. If all subvolumes are known, one that is missing does not exist.
pub(crate) fn check_items(checker: &mut Checker<'_>, all_known: bool) {
    let mut problems = Vec::new();
    let mut lists: BTreeMap<u64, TreeId> = BTreeMap::new();
    for (&id, of) in &checker.snapshots.of {
        match checker.subvolumes.get(&id) {
            None if all_known => {
                problems.push((id, "has snapshots or dead lists, but does not exist".into()));
            }
            item => {
                let mut found = of_subvolume(checker, of, item, all_known);
                if let Some(item) = item.filter(|item| item.is_nameless()) {
                    found.extend(of_nameless(of, item, all_known));
                }
                problems.extend(found.into_iter().map(|problem| (id, problem)));
            }
        }
        for &list in of.lists.values() {
            if let Some(other) = lists.insert(list, id) {
                problems.push((id, format!("has dead list {list}, as subvolume {other} has")));
            }
        }
    }
    let all_read = checker.lost_nodes.is_empty();
    for (id, run) in std::mem::take(&mut checker.snapshots.inherited_dead) {
        let mut blocks = run.range.range();
        if all_read && !blocks.all(|block| checker.referenced.contains(block)) {
            let (blocks, start) = (run.range.blocks, run.range.start);
            let problem = format!("{blocks} blocks at {start} that its origin no longer has");
            problems.push((id, format!("is a fork, and gave up {problem}")));
        }
    }
    for (id, problem) in problems {
        let problem = format!("subvolume {id} {problem}");
        checker.found(finding(Structure::Item, problem).in_subvolume(id));
    }
}

/// What in the items of one subvolume contradicts the superblock or each other.
fn of_subvolume(
    checker: &Checker<'_>,
    of: &SubvolumeSnapshots,
    item: Option<&SubvolumeItem>,
    all_known: bool,
) -> Vec<String> {
    let newest = checker.superblock.generation;
    let made = item.map_or(Generation(0), |item| item.generation);
    let is_possible =
        |generation: Generation| generation.0 > 0 && made <= generation && generation <= newest;
    let mut problems = Vec::new();
    let mut names: BTreeMap<&[u8], Generation> = BTreeMap::new();
    for (&generation, snapshot) in &of.snapshots {
        if !is_possible(generation) {
            problems.push(format!(
                "of generation {made} has a snapshot of generation {generation}; the newest is \
                 {newest}"
            ));
        }
        if !snapshot.is_hidden
            && let Some(other) = names.insert(&snapshot.name, generation)
        {
            let name = String::from_utf8_lossy(&snapshot.name);
            problems
                .push(format!("has two snapshots named {name:?}, of {other} and of {generation}"));
        }
        if all_known && !of.lists.contains_key(&generation) && !of.discards(generation) {
            problems.push(format!("has a snapshot of {generation}, but no dead list since then"));
        }
    }
    let inheritance = item.map(SubvolumeItem::inheritance).unwrap_or_default();
    // A fork's lists begin with its origin, and with that of one that it was joined with.
    let is_fork = inheritance.made_until.0 > 0;
    let may_begin = |since| is_possible(since) || is_fork && (1..=newest.0).contains(&since.0);
    for (since, list) in &of.lists {
        if !may_begin(*since) {
            problems.push(format!("has dead list {list} since {since}; the newest is {newest}"));
        }
        let next = checker.superblock.next_list;
        if *list >= next {
            problems.push(format!("has dead list {list}, but the next one is {next}"));
        }
    }
    for (&birth, cleanup) in &of.cleanups {
        let CleanupItem { oldest, lists_from, lists_to } = *cleanup;
        let shown = format!(
            "a cleanup of births above {oldest} up to {birth}, in lists from {lists_from} to \
             below {lists_to}"
        );
        if oldest >= birth || birth > lists_from || lists_to > newest.next() {
            problems.push(format!("has {shown}: that is impossible"));
        } else if let Some((held, _)) =
            of.snapshots.range(oldest.next()..).next().filter(|(held, _)| **held < lists_to)
        {
            problems
                .push(format!("has {shown}: the snapshot of {held} may need what it would free"));
        }
    }
    problems
}

/// What in the items contradicts that the subvolume has lost its name.
fn of_nameless(of: &SubvolumeSnapshots, item: &SubvolumeItem, all_known: bool) -> Vec<String> {
    let newest = of.boundary();
    let mut problems = Vec::new();
    if let Some((made, _)) = of.snapshots.iter().find(|(_, item)| !item.is_hidden) {
        problems.push(format!("has lost its name, but has a snapshot of {made} with a name"));
    }
    let notes_inherited = item.inheritance().is_noted;
    if all_known && of.snapshots.is_empty() && !item.is_headless && !notes_inherited {
        problems.push("is being removed, but has dead lists without snapshots".into());
    }
    if let Some((since, _)) = of.lists.range(newest..).next().filter(|_| !item.is_dying) {
        problems.push(format!("is headless, but has a dead list since {since}"));
    }
    let is_late = |(_, cleanup): &(&Generation, &CleanupItem)| cleanup.lists_to > newest;
    if all_known && of.cleanups.iter().any(|cleanup| is_late(&cleanup)) {
        problems.push(format!(
            "has lost its name, but has a cleanup in lists since its snapshot of {newest}"
        ));
    }
    problems
}

/// The snapshots that a subvolume shows: its own, and those of the subvolumes that it continues.
fn shown_by<'c>(
    checker: &'c Checker<'_>,
    subvolume: TreeId,
) -> impl Iterator<Item = (TreeId, Generation, &'c SnapshotItem)> {
    let firsts = firsts_of_lines(&checker.subvolumes);
    let first_of = move |id: TreeId| firsts.get(&id).copied().unwrap_or(id);
    let line = first_of(subvolume);
    let ids =
        checker.snapshots.of.range(..=subvolume).filter(move |(id, _)| first_of(**id) == line);
    let all = ids.flat_map(|(id, of)| of.snapshots.iter().map(|(at, item)| (*id, *at, item)));
    all.filter(|(_, _, item)| !item.is_hidden)
}

/// The numbers of all snapshots.
pub(crate) fn numbers(checker: &Checker<'_>) -> Vec<(TreeId, Generation, u32)> {
    let of = checker.snapshots.of.iter();
    let numbers = of.flat_map(|(&id, of)| {
        let numbered = of.snapshots.iter().filter(|(_, item)| item.number > 0);
        numbered.map(move |(&generation, item)| (id, generation, item.number))
    });
    numbers.collect()
}
