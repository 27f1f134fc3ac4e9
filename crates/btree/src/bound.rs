//! How many nodes a change can allocate at most: what an operation reserves before it joins.
//!
//! On each level below the root a change copies the node on its path, and allocates one more: an
//! insertion the right half of a split, a removal the copy of a sibling that it merges or balances
//! with. At the root it copies the root and, when that is full, splits it under a new one.
//!
//! A change may descend several times, for a node that isn't in memory or a lock that is taken, and
//! allocates no more for it: an inner node on its path that was copied, split or merged belongs to
//! the running transaction from then on and has room, and the leaf is copied, split or merged only
//! when no lock is left to be taken. Others would have to fill a half, or to drain it, in between.
//!
//! A bound that is computed before the operation joins its transaction allows for others that make
//! the tree grow by one level meanwhile (the next one would take tens of thousands of changes).
//! Computed again after joining it need not: from then on the root's halves belong to the running
//! transaction, so growth by others leaves nothing to copy, and a half must fill up again before it
//! costs a split.
//!
//! Changes of one operation can make the tree grow, too: a new level needs a full root, which takes
//! more changes than `CHANGES_PER_LEVEL` for each of its children. Only a root that is a leaf may
//! be split by the first change and again by the next.
use crate::tree::Tree;

/// Fewer than the children that a root gains from one growth to the next.
const CHANGES_PER_LEVEL: u64 = 128;

impl Tree {
    /// Bound on the nodes that `changes` insertions and removals allocate in a tree whose root has
    /// the level `height` when the bound is computed.
    pub fn worst_case_nodes(changes: u64, height: u8) -> u64 {
        Tree::worst_case_nodes_joined(changes, height.saturating_add(1))
    }

    /// As [`Tree::worst_case_nodes`], for a `height` read in the transaction that makes the
    /// changes.
    pub fn worst_case_nodes_joined(changes: u64, height: u8) -> u64 {
        if changes == 0 {
            return 0;
        }
        let mut growth = 0;
        let mut changes_left = changes / CHANGES_PER_LEVEL;
        while changes_left > 0 {
            growth += 1;
            changes_left /= CHANGES_PER_LEVEL;
        }
        let levels_below_root = u64::from(height.max(1)) + growth;
        // Its copy, and for each growth its right half and the new root above.
        let root = 1 + 2 * (1 + growth);
        changes.saturating_mul(2 * levels_below_root).saturating_add(root)
    }

    /// [`Tree::worst_case_nodes_joined`] for this tree as it is.
    pub fn worst_case_joined(&self, changes: u64) -> u64 {
        Tree::worst_case_nodes_joined(changes, self.root().level)
    }

    /// [`Tree::worst_case_nodes`] for this tree as it is.
    pub fn worst_case(&self, changes: u64) -> u64 {
        Tree::worst_case_nodes(changes, self.root().level)
    }
}
