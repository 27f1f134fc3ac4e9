//! Nodes of damaged trees anywhere on the volume, whether a pointer leads to them or not.
use super::versions::KeyClaim;
use crate::bitmaps::Allocation;
use crate::checker::Checker;
use crate::reader::NODES_PER_READ;
use cairn_format::{
    BlockNumber, BlockRange, Extent, Generation, ItemKind, Key, NODE_BLOCKS, Node, TreeId,
};
use std::collections::BTreeMap;

/// A node as a pointer names it.
pub(super) type Version = (BlockNumber, Generation);

/// The children of an inner node: the smallest key of each, the key where the next one begins, and
/// the node pointed to.
pub(super) fn children(node: &Node) -> impl Iterator<Item = (Key, Option<Key>, Version)> {
    (0..node.count()).map(|index| {
        let child = node.child(index);
        (
            node.key(index),
            (index + 1 < node.count()).then(|| node.key(index + 1)),
            (child.block, child.generation),
        )
    })
}

/// The facts kept of a leaf.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoundLeaf {
    pub(super) block: BlockNumber,
    pub(super) generation: Generation,
    pub(super) first: Key,
    pub(super) last: Key,
    /// Blocks of its extents.
    pub(super) extent_blocks: u64,
}

impl FoundLeaf {
    fn of(node: &Node) -> Option<Self> {
        let (first, last) = (node.items().next()?.0, node.items().last()?.0);
        let extents = node.items().filter(|(key, _)| key.kind == ItemKind::Extent as u8);
        let extent_blocks = extents
            .filter_map(|(_, value)| Extent::decode(value).ok())
            .map(|extent| extent.blocks)
            .sum();
        Some(Self {
            block: node.address(),
            generation: node.generation(),
            first,
            last,
            extent_blocks,
        })
    }

    pub(super) fn version(&self) -> Version {
        (self.block, self.generation)
    }

    /// The claim that its keys were its own when it was written.
    pub(super) fn claim(&self) -> KeyClaim {
        KeyClaim {
            generation: self.generation,
            lower: self.first,
            upper: self.last.successor(),
            leaf: self.version(),
        }
    }
}

/// The nodes of one tree that a search found, by block.
#[derive(Default)]
pub(super) struct FoundNodes {
    pub(super) leaves: BTreeMap<u64, FoundLeaf>,
    pub(super) inner: BTreeMap<u64, Node>,
}

impl FoundNodes {
    /// Finds all nodes of the trees with lost nodes, except those that the check has used and those
    /// newer than the superblock. A fork that was joined has nodes that its origin made, which is
    /// gone. If the bitmaps can be trusted, it searches only blocks that they mark used.
    pub(super) fn search(checker: &Checker<'_>, allocation: &Allocation) -> BTreeMap<TreeId, Self> {
        let reader = &checker.reader;
        let allocatable = checker.superblock.geometry.allocatable().range();
        let clusters = (allocatable.start..allocatable.end.min(reader.blocks_present()))
            .step_by(NODE_BLOCKS as usize);
        let possible = |start: &u64| {
            let range = BlockRange::node(BlockNumber(*start));
            let used =
                !allocation.trusted || range.range().all(|block| allocation.used.contains(block));
            // A damaged node or an older version counts as referred to.
            used && reader.contains(range)
                && (checker.doubtful_nodes.contains(start) || !checker.referenced.contains(*start))
        };
        let addresses: Vec<BlockNumber> = clusters.filter(possible).map(BlockNumber).collect();
        let wanted = |tree: TreeId| {
            checker.has_items_in(tree) && checker.lost_nodes.iter().any(|lost| lost.concerns(tree))
        };
        let mut trees = BTreeMap::<TreeId, Self>::new();
        for chunk in addresses.chunks(NODES_PER_READ) {
            for node in reader.nodes(chunk).into_iter().flatten() {
                let tree = checker.owner_of(&node);
                if !wanted(tree) || node.generation() > checker.superblock.generation {
                    continue;
                }
                let found = trees.entry(tree).or_default();
                if node.level() > 0 {
                    found.inner.insert(node.address().0, node);
                } else if let Some(leaf) = FoundLeaf::of(&node) {
                    found.leaves.insert(leaf.block.0, leaf);
                }
            }
        }
        trees
    }
}
