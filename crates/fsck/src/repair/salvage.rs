//! Finds leaves of the file tree that no inner node leads to any more, because one of those is damaged.
//!
//! A leaf counts if it lies in blocks that the bitmaps call used, or if they say nothing, if its keys belong where a node is
//! missing, and if no other leaf has the same key in a newer version.
use crate::block_set::BlockSet;
use crate::checker::Checker;
use cairn_format::{BlockNumber, BlockRange, Generation, Key, NODE_BLOCKS, Node, TREE_FILES};
use std::collections::BTreeMap;

/// Adds to `items` what such leaves hold, unless it is there; returns the leaves that helped.
pub(super) fn lost_leaves(checker: &Checker<'_>, allocated: &BlockSet, items: &mut BTreeMap<Key, Vec<u8>>) -> Vec<BlockNumber> {
    if checker.lost_keys.is_empty() {
        return Vec::new();
    }
    let mut leaves = candidates(checker, allocated);
    leaves.sort_by_key(|leaf| std::cmp::Reverse(leaf.generation()));
    let mut helpful = Vec::new();
    // Of two leaves that overlap, the newer one says what there is between its first and its last key. A transaction writes no leaf
    // twice: of two of the same generation neither is a version of the other, and one of them has a key that does not belong there.
    let mut known: Vec<(Generation, Key, Key)> = Vec::new();
    for leaf in leaves {
        let (Some(first), Some(last)) = (leaf.items().next().map(|(key, _)| key), leaf.items().last().map(|(key, _)| key)) else {
            continue;
        };
        let mut helped = false;
        for (key, value) in leaf.items() {
            let missing = checker.lost_keys.iter().any(|(lower, upper)| *lower <= key && upper.is_none_or(|upper| key < upper));
            let superseded = known.iter().any(|(newer, first, last)| *newer > leaf.generation() && (*first..=*last).contains(&key));
            if missing && !superseded && !items.contains_key(&key) {
                items.insert(key, value.to_vec());
                helped = true;
            }
        }
        known.push((leaf.generation(), first, last));
        helpful.extend(helped.then_some(leaf.address()));
    }
    helpful
}

fn candidates(checker: &Checker<'_>, allocated: &BlockSet) -> Vec<Node> {
    let reader = &checker.reader;
    let allocatable = checker.superblock.geometry.allocatable().range();
    let clusters = (allocatable.start..allocatable.end.min(reader.blocks_present())).step_by(NODE_BLOCKS as usize);
    let trusted = allocated.count() > 0;
    let possible = |start: &u64| {
        let range = BlockRange::node(BlockNumber(*start));
        let used = !trusted || range.range().all(|block| allocated.contains(block));
        // A node that is damaged or an older version counts as referred to.
        used && reader.contains(range) && (checker.doubtful_nodes.contains(start) || !checker.referenced.contains(*start))
    };
    let nodes = clusters.filter(possible).filter_map(|start| reader.node(BlockNumber(start)).ok());
    nodes.filter(|node| node.tree() == TREE_FILES && node.level() == 0 && node.generation() <= checker.superblock.generation).collect()
}
