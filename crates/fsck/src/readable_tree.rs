//! The items of one tree of files, found by key: for readers of single files.
use crate::file_tree::FileTree;
use crate::overlay::TreeChanges;
use crate::reader::Reader;
use cairn_format::{BlockNumber, Key, NODE_BLOCKS, Node};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Leaves kept in memory: 2 MiB.
const LEAVES_KEPT: usize = 128;

/// The leaves of all trees, some of them in memory.
pub(crate) struct Leaves<'a> {
    pub(crate) reader: Reader<'a>,
    /// Each in the place that its block gives.
    kept: RefCell<Vec<Option<Rc<Node>>>>,
}

impl<'a> Leaves<'a> {
    pub(crate) fn new(reader: Reader<'a>) -> Self {
        Self { reader, kept: RefCell::new(vec![None; LEAVES_KEPT]) }
    }

    /// A leaf that could be read before. If the device fails now, its items are missing; the counts
    /// of the inodes show that.
    fn get(&self, block: BlockNumber) -> Option<Rc<Node>> {
        let place = (block.0 / NODE_BLOCKS) as usize % LEAVES_KEPT;
        if let Some(node) = &self.kept.borrow()[place]
            && node.address() == block
        {
            return Some(node.clone());
        }
        let node = Rc::new(self.reader.node(block).ok()?);
        self.kept.borrow_mut()[place] = Some(node.clone());
        Some(node)
    }
}

/// See the [module](self).
pub(crate) enum ReadableTree {
    /// All nodes can be read.
    Whole {
        /// Its leaves, each with a key that none of its keys is below; in key order.
        leaves: Vec<(Key, BlockNumber)>,
        /// What the log changes.
        changes: TreeChanges,
    },
    /// Nodes are lost.
    Damaged {
        /// What is left, after replay.
        items: BTreeMap<Key, Vec<u8>>,
        /// Keys of items that may be lost.
        gaps: Vec<(Key, Option<Key>)>,
    },
}

impl ReadableTree {
    pub(crate) fn whole(tree: FileTree) -> Self {
        let leaves = tree.leaf_bounds.into_iter().zip(tree.leaves).collect();
        Self::Whole { leaves, changes: tree.changes }
    }

    /// With these leaves, each with a key that none of its keys is below; in key order.
    pub(crate) fn of_leaves(leaves: Vec<(Key, BlockNumber)>) -> Self {
        Self::Whole { leaves, changes: TreeChanges::default() }
    }

    pub(crate) fn damaged(items: BTreeMap<Key, Vec<u8>>, gaps: Vec<(Key, Option<Key>)>) -> Self {
        Self::Damaged { items, gaps }
    }

    pub(crate) fn is_damaged(&self) -> bool {
        matches!(self, Self::Damaged { .. })
    }

    /// Whether items of these keys may be lost.
    pub(crate) fn may_have_lost(&self, first: Key, last: Key) -> bool {
        let touches = |(lower, upper): &(Key, Option<Key>)| {
            *lower <= last && upper.is_none_or(|upper| first < upper)
        };
        matches!(self, Self::Damaged { gaps, .. } if gaps.iter().any(touches))
    }

    /// The first item between the keys, both included; none if `from` is above `last`.
    pub(crate) fn next_item(
        &self,
        kept: &Leaves<'_>,
        mut from: Key,
        last: Key,
    ) -> Option<(Key, Vec<u8>)> {
        if from > last {
            return None;
        }
        let (leaves, changes) = match self {
            Self::Whole { leaves, changes } => (leaves, changes),
            Self::Damaged { items, .. } => {
                let (key, value) = items.range(from..=last).next()?;
                return Some((*key, value.clone()));
            }
        };
        let mut in_leaves = next_in_leaves(kept, leaves, from, last);
        for (key, change) in changes.items.range(from..=last) {
            if in_leaves.as_ref().is_some_and(|(found, _)| found < key) {
                break;
            }
            if let Some(value) = &change.value {
                return Some((*key, value.clone()));
            }
            if in_leaves.as_ref().is_some_and(|(found, _)| found == key) {
                from = key.successor().filter(|next| *next <= last)?;
                in_leaves = next_in_leaves(kept, leaves, from, last);
            }
        }
        in_leaves
    }
}

fn next_in_leaves(
    kept: &Leaves<'_>,
    leaves: &[(Key, BlockNumber)],
    from: Key,
    last: Key,
) -> Option<(Key, Vec<u8>)> {
    let first = leaves.partition_point(|(bound, _)| *bound <= from).saturating_sub(1);
    for (bound, block) in &leaves[first..] {
        if *bound > last {
            return None;
        }
        let Some(node) = kept.get(*block) else { continue };
        let (Ok(at) | Err(at)) = node.search(&from);
        if at < node.count() {
            let key = node.key(at);
            return (key <= last).then(|| (key, node.value(at).to_vec()));
        }
    }
    None
}
