//! Decides which of several versions of a tree's nodes are in use, when no bitmap shows it.
//!
//! Nodes are never changed in place, so a node that is out of use never comes back into use. So
//! what a node shows about its time refutes older nodes for ever:
//! - of two leaves whose keys overlap, the older one is out of use;
//! - a leaf is out of use if an inner node that is not older leads to another leaf for its keys.
//!
//! Nodes of an unfinished transaction look like all others if a later transaction has its number.
//! Then a node in use may seem out of use. The account of blocks shows that something is missing.
use super::found::{FoundLeaf, FoundNodes, Version, children};
use crate::bitmaps::Allocation;
use crate::checker::{Checker, LostNode};
use cairn_format::{BlockNumber, BlockRange, Generation, Key, NODE_BLOCKS, Node};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The leaves of the tree that takes exactly the blocks that the superblock counts as used and that
/// nothing else refers to, if its root is a node of the newest transaction: only this version can
/// be in use.
pub(super) fn whole_tree(
    checker: &Checker<'_>,
    found: &FoundNodes,
) -> Option<HashSet<BlockNumber>> {
    let needed = checker.superblock.used_blocks.checked_sub(checker.referenced.count())?;
    let generations = found
        .leaves
        .values()
        .map(|leaf| leaf.generation)
        .chain(found.inner.values().map(Node::generation));
    let newest = generations.max()?;
    let mut roots: Vec<&Node> =
        found.inner.values().filter(|node| node.generation() == newest).collect();
    roots.sort_by_key(|node| std::cmp::Reverse(node.level()));
    let single = found
        .leaves
        .values()
        .filter(|leaf| leaf.generation == newest && NODE_BLOCKS + leaf.extent_blocks == needed);
    let single = single.map(|leaf| HashSet::from([leaf.block])).next();
    roots.into_iter().find_map(|root| tree_of(found, root, needed)).or(single)
}

/// The leaves below `root`, if all are present and the tree takes `needed` blocks.
fn tree_of(found: &FoundNodes, root: &Node, needed: u64) -> Option<HashSet<BlockNumber>> {
    let (mut leaves, mut blocks, mut todo) = (HashSet::new(), 0u64, vec![root]);
    while let Some(node) = todo.pop() {
        blocks += NODE_BLOCKS;
        for (.., (block, generation)) in children(node) {
            if node.level() > 1 {
                let is_child = |inner: &&Node| {
                    inner.generation() == generation && inner.level() + 1 == node.level()
                };
                todo.push(found.inner.get(&block.0).filter(is_child)?);
            } else {
                let leaf =
                    found.leaves.get(&block.0).filter(|leaf| leaf.generation == generation)?;
                blocks += NODE_BLOCKS + leaf.extent_blocks;
                leaves.insert(leaf.block);
            }
            if blocks > needed {
                return None;
            }
        }
    }
    (blocks == needed).then_some(leaves)
}

/// The claim that these keys belonged to this leaf at the time of some transaction.
#[derive(Clone, Copy)]
pub(super) struct KeyClaim {
    pub(super) generation: Generation,
    pub(super) lower: Key,
    pub(super) upper: Option<Key>,
    pub(super) leaf: Version,
}

/// The newest claim for each key.
#[derive(Default)]
pub(super) struct KeyClaims {
    /// By lower key; they don't overlap.
    segments: BTreeMap<Key, (Option<Key>, Version)>,
}

impl KeyClaims {
    pub(super) fn overlapping(
        &self,
        lower: Key,
        upper: Option<Key>,
    ) -> impl Iterator<Item = (Key, Option<Key>, Version)> {
        let before = self.segments.range(..lower).next_back();
        let reaches = before.filter(|(_, (end, _))| end.is_none_or(|end| lower < end));
        let within = self
            .segments
            .range(lower..)
            .take_while(move |(start, _)| upper.is_none_or(|upper| **start < upper));
        reaches.into_iter().chain(within).map(|(start, (end, leaf))| (*start, *end, *leaf))
    }

    /// Adds the claim for the keys that no newer claim covers.
    pub(super) fn add_older(&mut self, claim: &KeyClaim) {
        let (mut at, mut gaps) = (Some(claim.lower), Vec::new());
        for (start, end, _) in self.overlapping(claim.lower, claim.upper) {
            gaps.extend(at.filter(|at| *at < start).map(|at| (at, Some(start))));
            at = end;
        }
        gaps.extend(
            at.filter(|at| claim.upper.is_none_or(|upper| *at < upper)).map(|at| (at, claim.upper)),
        );
        self.segments.extend(gaps.into_iter().map(|(from, to)| (from, (to, claim.leaf))));
    }
}

/// Leaves that may be in use, as far as bitmaps and other nodes show.
pub(super) fn current<'f>(
    lost_nodes: &[&LostNode],
    allocation: &Allocation,
    found: &'f FoundNodes,
) -> Vec<&'f FoundLeaf> {
    let mut claims = claims_of_inner_nodes(found);
    claims.extend(lost_nodes.iter().filter_map(|lost| {
        let pointer = lost.leaf()?;
        let (lower, upper) = lost.keys;
        Some(KeyClaim {
            generation: lost.parent_generation,
            lower,
            upper,
            leaf: (pointer.block, pointer.generation),
        })
    }));
    claims.sort_by_key(|claim| claim.generation);
    let mut leaves: Vec<&FoundLeaf> = found.leaves.values().collect();
    leaves.sort_by_key(|leaf| std::cmp::Reverse(leaf.generation));
    let (mut newest, mut current) = (KeyClaims::default(), Vec::new());
    for together in leaves.chunk_by(|one, other| one.generation == other.generation) {
        while let Some(claim) = claims.pop_if(|claim| claim.generation >= together[0].generation) {
            newest.add_older(&claim);
        }
        current.extend(together.iter().copied().filter(|leaf| {
            let contradicted = newest
                .overlapping(leaf.first, leaf.last.successor())
                .any(|(.., claimed)| claimed != leaf.version());
            let belongs =
                lost_nodes.iter().any(|lost| lost.holds(&leaf.first) && lost.holds(&leaf.last));
            !contradicted
                && belongs
                && allocation.may_hold(BlockRange::node(leaf.block), leaf.generation)
        }));
        together.iter().for_each(|leaf| newest.add_older(&leaf.claim()));
    }
    current
}

/// The claims of the inner nodes above the leaves. Only a node above knows where the last child's
/// keys end.
fn claims_of_inner_nodes(found: &FoundNodes) -> Vec<KeyClaim> {
    let mut nodes: Vec<&Node> = found.inner.values().collect();
    nodes.sort_by_key(|node| (std::cmp::Reverse(node.level()), node.generation()));
    let mut ends: HashMap<BlockNumber, Option<Key>> = HashMap::new();
    let mut claims = Vec::new();
    for node in nodes {
        let end = ends.get(&node.address()).copied();
        for (lower, next, child) in children(node) {
            let Some(upper) = next.map(Some).or(end) else { continue };
            if node.level() == 1 {
                claims.push(KeyClaim { generation: node.generation(), lower, upper, leaf: child });
            } else if found.inner.get(&child.0.0).is_some_and(|inner| inner.generation() == child.1)
            {
                ends.insert(child.0, upper);
            }
        }
    }
    claims
}
