//! Finds leaves of trees that no inner node leads to any more, because one of those is damaged.
//!
//! 1. Find all nodes of such trees where one may be according to the bitmaps; everywhere if the
//!    bitmaps can't be trusted (`found`).
//! 2. Decide which of the leaves are in use (`versions`). If the root tree is damaged: those of a
//!    whole tree that accounts for every block in use. Otherwise: those that the bitmaps mark used,
//!    or, if they can't be trusted, those that no newer node contradicts. Some of these may hold
//!    removed items; restoring those is better than leaving out items in use, and is reported.
//! 3. Of these leaves, take the items whose keys belong where a node is missing, unless a newer
//!    leaf holds that range.
//! 4. A fork that shares a lost node with a tree where it is lost, too, gets the same items. Where
//!    a fork alone lacks a node that it has inherited, nothing is looked for.
//! 5. Check whether that is all: compare the blocks found with the number of blocks in use that the
//!    superblock states.
use super::found::{FoundLeaf, FoundNodes, Version, children};
use super::versions::{self, KeyClaims};
use crate::bitmaps::Allocation;
use crate::block_set::BlockSet;
use crate::checker::{Checker, LostNode};
use crate::reader::Reader;
use cairn_format::node::LEVELS_MAX;
use cairn_format::{BlockNumber, BlockRange, Key, NODE_BLOCKS, Node, TREE_DEAD, TreeId};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// The replacement for the lost nodes.
pub(super) struct Salvaged {
    /// Leaves that contributed items.
    pub(super) leaves: u64,
    /// The blocks of the leaves, whatever was taken from them.
    pub(super) nodes: BlockSet,
    /// All nodes that the decision used, and those that contributed nothing.
    pub(super) found: BlockSet,
    /// Whether nothing is missing.
    pub(super) complete: bool,
    /// Lost leaves: the block of each, its tree, and the keys that it may have held.
    pub(super) lost_leaves: BTreeMap<BlockNumber, (TreeId, (Key, Option<Key>))>,
    /// Those of them that an older version replaces.
    pub(super) older_versions: HashSet<BlockNumber>,
    /// Blocks in use that belong to no node or extent found.
    pub(super) missing_blocks: u64,
    /// Blocks of the items found that were not in use: some of these items had been removed.
    pub(super) surplus_blocks: u64,
    /// Leaves that were taken because none newer was found, with no bitmap and no node that shows
    /// them in use. A damaged one may have been newer; with as many blocks, no account shows it.
    pub(super) unconfirmed_leaves: u64,
}

/// Items by tree.
pub(super) type ItemsByTree = BTreeMap<TreeId, BTreeMap<Key, Vec<u8>>>;

/// The nodes of one tree to decide about.
struct DamagedTree<'t> {
    id: TreeId,
    /// Lost nodes, in place of which others may be found.
    lost: Vec<&'t LostNode>,
    found: &'t FoundNodes,
    /// Whether nothing points to the tree's root.
    is_lost: bool,
}

/// Adds the items of such leaves to `items`, unless they are there already.
pub(super) fn lost_leaves(
    checker: &Checker<'_>,
    allocation: &Allocation,
    items: &mut ItemsByTree,
) -> Salvaged {
    let mut salvaged = Salvaged {
        leaves: 0,
        nodes: BlockSet::new(checker.reader.blocks_present()),
        found: BlockSet::new(checker.reader.blocks_present()),
        complete: true,
        lost_leaves: BTreeMap::new(),
        older_versions: HashSet::new(),
        missing_blocks: 0,
        surplus_blocks: 0,
        unconfirmed_leaves: 0,
    };
    // Dead runs are found by other means.
    if checker.lost_nodes.iter().all(|lost| lost.tree == TREE_DEAD) {
        return salvaged;
    }
    let found = FoundNodes::search(checker, allocation);
    for nodes in found.values() {
        for &block in nodes.leaves.keys().chain(nodes.inner.keys()) {
            salvaged.found.insert(BlockRange::node(BlockNumber(block)));
        }
    }
    // Trees of which nothing was found have lost nodes, too.
    let nothing = FoundNodes::default();
    let damaged = checker.lost_nodes.iter().map(|lost| lost.tree);
    let damaged = damaged.filter(|id| checker.has_items_in(*id));
    let ids: BTreeSet<TreeId> = damaged.chain(found.keys().copied()).collect();
    let trees: Vec<DamagedTree<'_>> = ids
        .into_iter()
        .map(|id| {
            let of_tree = checker.lost_nodes.iter().filter(|lost| lost.concerns(id));
            let lost: Vec<_> = of_tree.filter(|lost| !is_inherited(checker, lost)).collect();
            let is_lost = lost.iter().any(|lost| lost.pointer.is_none());
            DamagedTree { id, lost, found: found.get(&id).unwrap_or(&nothing), is_lost }
        })
        .collect();
    // Of several trees, none accounts for all blocks.
    let whole = match &trees[..] {
        [tree] if tree.is_lost => versions::whole_tree(checker, tree.found),
        _ => None,
    };
    let inherited: Vec<&LostNode> =
        checker.lost_nodes.iter().filter(|lost| is_inherited(checker, lost)).collect();
    let mut account = Account::default();
    for tree in &trees {
        let leaves = tree.found.leaves.values();
        let mut leaves: Vec<&FoundLeaf> = match &whole {
            Some(blocks) => leaves.filter(|leaf| blocks.contains(&leaf.block)).collect(),
            None if allocation.trusted => leaves.collect(),
            None => versions::current(&tree.lost, allocation, tree.found),
        };
        leaves.sort_by_key(|leaf| std::cmp::Reverse(leaf.generation));
        let of_tree = items.entry(tree.id).or_default();
        let in_use = merge(&checker.reader, tree, &leaves, of_tree, &mut salvaged);
        give_to_forks(checker, tree, &in_use, &inherited, items);
        if whole.is_none() && !allocation.trusted {
            let no_pointer_left = |leaf: &&&FoundLeaf| {
                let mut lost = tree.lost.iter().filter(|lost| lost.leaf().is_none());
                lost.any(|lost| lost.touches(&leaf.first, &leaf.last))
            };
            salvaged.unconfirmed_leaves += in_use.iter().filter(no_pointer_left).count() as u64;
        }
        if whole.is_none() {
            account.add(checker, tree, &in_use, &mut salvaged);
        }
    }
    for lost in inherited {
        let is_shared = trees.iter().flat_map(|tree| &tree.lost).any(|other| is_same(lost, other));
        if let Some(pointer) = lost.pointer.filter(|_| !is_shared) {
            salvaged.lost_leaves.insert(pointer.block, (lost.tree, lost.keys));
        }
    }
    if whole.is_none() {
        account.finish(checker, &mut salvaged);
    }
    salvaged
}

/// Whether a fork has inherited a lost node.
fn is_inherited(checker: &Checker<'_>, lost: &LostNode) -> bool {
    let lineage = checker.lineage_of(lost.tree);
    lost.pointer.is_some_and(|pointer| lineage.is_of_origin(pointer.generation))
}

/// Whether both pointers lead to the same node.
fn is_same(one: &LostNode, other: &LostNode) -> bool {
    let version = |lost: &LostNode| lost.pointer.map(|pointer| (pointer.block, pointer.generation));
    one.pointer.is_some() && version(one) == version(other)
}

/// Step 4, for what was found of `tree`: leaves `in_use`.
fn give_to_forks(
    checker: &Checker<'_>,
    tree: &DamagedTree<'_>,
    in_use: &[&FoundLeaf],
    inherited: &[&LostNode],
    items: &mut ItemsByTree,
) {
    let is_shared = |lost: &&LostNode| tree.lost.iter().any(|other| is_same(lost, other));
    let shared: Vec<&LostNode> = inherited.iter().copied().filter(is_shared).collect();
    if shared.is_empty() {
        return;
    }
    for leaf in in_use {
        let Ok(node) = checker.reader.node(leaf.block) else { continue };
        for lost in shared.iter().filter(|lost| lost.touches(&leaf.first, &leaf.last)) {
            let pointer = lost.pointer.map(|pointer| pointer.generation);
            if pointer.is_none_or(|generation| leaf.generation > generation) {
                continue;
            }
            let of_fork = items.entry(lost.tree).or_default();
            for (key, value) in node.items().filter(|(key, _)| lost.holds(key)) {
                of_fork.entry(key).or_insert_with(|| value.to_vec());
            }
        }
    }
}

/// Step 3. Returns the leaves that are in use where a node is missing.
fn merge<'f>(
    reader: &Reader<'_>,
    tree: &DamagedTree<'_>,
    leaves: &[&'f FoundLeaf],
    items: &mut BTreeMap<Key, Vec<u8>>,
    salvaged: &mut Salvaged,
) -> Vec<&'f FoundLeaf> {
    // Of two leaves that overlap, the newer one holds the range from its first to its last key.
    // A transaction writes no leaf twice: of two leaves of one generation neither is a version
    // of the other, and one of them has a key that does not belong there.
    let (mut newer, mut in_use) = (KeyClaims::default(), Vec::new());
    for together in leaves.chunk_by(|one, other| one.generation == other.generation) {
        for &leaf in together {
            let Ok(node) = reader.node(leaf.block) else { continue };
            let lost: Vec<_> =
                tree.lost.iter().filter(|lost| lost.touches(&leaf.first, &leaf.last)).collect();
            let (mut helped, mut counts) = (false, false);
            for (key, value) in node.items() {
                let missing = lost.iter().any(|lost| lost.holds(&key));
                if !missing || newer.overlapping(key, key.successor()).next().is_some() {
                    continue;
                }
                counts = true;
                items.entry(key).or_insert_with(|| {
                    helped = true;
                    value.to_vec()
                });
            }
            if counts {
                salvaged.nodes.insert(BlockRange::node(leaf.block));
                in_use.push(leaf);
            }
            salvaged.leaves += u64::from(helped);
        }
        together.iter().for_each(|leaf| newer.add_older(&leaf.claim()));
    }
    in_use
}

/// Leaves in the order of their first keys. Some may overlap.
struct LeavesByKey<'f> {
    leaves: Vec<&'f FoundLeaf>,
    /// For each leaf, the greatest last key of it and its predecessors.
    reach: Vec<Key>,
}

impl<'f> LeavesByKey<'f> {
    fn new(leaves: &[&'f FoundLeaf]) -> Self {
        let mut leaves = leaves.to_vec();
        leaves.sort_by_key(|leaf| leaf.first);
        let mut reach: Vec<Key> = leaves.iter().map(|leaf| leaf.last).collect();
        for index in 1..reach.len() {
            reach[index] = reach[index].max(reach[index - 1]);
        }
        Self { leaves, reach }
    }

    /// The number of leaves that begin before `upper`.
    fn beginning_before(&self, upper: Option<Key>) -> usize {
        upper.map_or(self.leaves.len(), |upper| {
            self.leaves.partition_point(|leaf| leaf.first < upper)
        })
    }

    /// Whether a leaf has keys in the range.
    fn touches(&self, (lower, upper): (Key, Option<Key>)) -> bool {
        self.beginning_before(upper).checked_sub(1).is_some_and(|last| self.reach[last] >= lower)
    }

    /// The leaves whose keys all lie in the range.
    fn within(&self, (lower, upper): (Key, Option<Key>)) -> impl Iterator<Item = &'f FoundLeaf> {
        let begin = self.beginning_before(Some(lower));
        let candidates = &self.leaves[begin..self.beginning_before(upper).max(begin)];
        candidates.iter().copied().filter(move |leaf| upper.is_none_or(|upper| leaf.last < upper))
    }
}

/// The number of blocks in use that the check has not met.
fn needed_blocks(checker: &Checker<'_>) -> u64 {
    checker.superblock.used_blocks.saturating_sub(checker.referenced.count())
}

/// Step 5: the blocks of the trees with lost nodes.
#[derive(Default)]
struct Account {
    present_blocks: u64,
}

impl Account {
    /// Counts what a tree has of them, and records its lost leaves.
    fn add(
        &mut self,
        checker: &Checker<'_>,
        tree: &DamagedTree<'_>,
        in_use: &[&FoundLeaf],
        salvaged: &mut Salvaged,
    ) {
        let by_key = LeavesByKey::new(in_use);
        for lost in &tree.lost {
            let Some(pointer) = lost.leaf() else { continue };
            match by_key.within(lost.keys).map(|leaf| leaf.generation).max() {
                Some(generation) if generation == pointer.generation => continue,
                Some(_) => drop(salvaged.older_versions.insert(pointer.block)),
                None => {}
            }
            salvaged.lost_leaves.insert(pointer.block, (tree.id, lost.keys));
        }
        let leaf_blocks: u64 = in_use.iter().map(|leaf| NODE_BLOCKS + leaf.extent_blocks).sum();
        let inner = inner_nodes(checker, tree, &by_key, &mut salvaged.lost_leaves);
        self.present_blocks += leaf_blocks + inner * NODE_BLOCKS;
    }

    fn finish(&self, checker: &Checker<'_>, salvaged: &mut Salvaged) {
        let (needed, present) = (needed_blocks(checker), self.present_blocks);
        salvaged.missing_blocks = needed.saturating_sub(present);
        salvaged.surplus_blocks = present.saturating_sub(needed);
        // Surplus blocks may hide missing ones.
        salvaged.complete = salvaged.lost_leaves.is_empty()
            && salvaged.missing_blocks == 0
            && salvaged.surplus_blocks == 0;
    }
}

/// The number of inner nodes that must exist below the lost ones, given the leaves in use. Of
/// several versions that lead to the same node, the newest counts; nodes to which none leads need
/// an unreadable one. Leaves that readable inner nodes lead to, but that can't be read, are added
/// to `lost`.
fn inner_nodes(
    checker: &Checker<'_>,
    tree: &DamagedTree<'_>,
    in_use: &LeavesByKey<'_>,
    lost: &mut BTreeMap<BlockNumber, (TreeId, (Key, Option<Key>))>,
) -> u64 {
    let found = tree.found;
    let levels = if tree.is_lost {
        LEVELS_MAX
    } else {
        tree.lost
            .iter()
            .filter_map(|lost| lost.pointer)
            .map(|pointer| pointer.level)
            .max()
            .unwrap_or(0)
    };
    let mut below: HashMap<Version, Key> =
        in_use.leaves.iter().map(|leaf| (leaf.version(), leaf.first)).collect();
    let (mut unreadable, mut count) = (false, 0);
    for level in 1..levels {
        let has_root = tree.is_lost && below.len() + usize::from(unreadable) <= 1;
        if has_root {
            break;
        }
        let mut parents: HashMap<Version, &Node> = HashMap::new();
        for node in found.inner.values().filter(|node| node.level() == level) {
            for (.., child) in children(node).filter(|(.., child)| below.contains_key(child)) {
                let parent = parents.entry(child).or_insert(node);
                if node.generation() > parent.generation() {
                    *parent = node;
                }
            }
        }
        let nodes: BTreeMap<BlockNumber, &Node> =
            parents.values().map(|node| (node.address(), *node)).collect();
        for (lower, upper, child) in
            nodes.values().filter(|_| level == 1).flat_map(|node| children(node))
        {
            let written_again = in_use.touches((lower, upper));
            if !below.contains_key(&child) && !written_again {
                lost.insert(child.0, (tree.id, (lower, upper)));
            }
        }
        // A lost node of this level is the parent of the nodes below it, and counts as referred to.
        let at_level =
            |lost: &&&LostNode| lost.pointer.is_some_and(|pointer| pointer.level == level);
        let has_known_parent =
            |key: &Key| tree.lost.iter().filter(at_level).any(|lost| lost.holds(key));
        let without_parent =
            below.iter().any(|(child, key)| !parents.contains_key(child) && !has_known_parent(key));
        unreadable = without_parent || (unreadable && nodes.is_empty());
        count += nodes.keys().filter(|block| !checker.referenced.contains(block.0)).count() as u64
            + u64::from(unreadable);
        below =
            nodes.values().map(|node| ((node.address(), node.generation()), node.key(0))).collect();
    }
    count
}
