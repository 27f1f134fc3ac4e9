//! How many nodes a tree has, found out from its inner nodes alone.
//!
//! Lock discipline: one node's shared lock, while its children are noted. Nothing may change the
//! tree meanwhile.
use crate::error::TreeError;
use crate::expected::Expected;
use crate::tree::Tree;

impl Tree {
    /// The tree's nodes. Reads the inner ones; nothing may change the tree meanwhile.
    ///
    /// # Errors
    /// An inner node is damaged or can't be read.
    pub fn count_nodes(&self) -> Result<u64, TreeError> {
        let (mut count, mut inner) = (1, Vec::new());
        let root = self.expected_root(self.root());
        if root.level > 0 {
            inner.push(root);
        }
        while let Some(expected) = inner.pop() {
            let node = self.cache.fetch(&expected)?.read(&self.cache.waits);
            expected.check_keys(&node)?;
            count += node.count() as u64;
            if expected.level > 1 {
                let child = |index| Expected::child(self.owner(), &node, expected.bounds, index);
                inner.extend((0..node.count()).map(child));
            }
        }
        Ok(count)
    }

    /// Bound on the nodes that one operation allocates which nobody else works beside, in a tree of
    /// `nodes` nodes: it copies each of them once at most. A full inner node may be split by the
    /// first descent through it; apart from that only what makes a leaf larger, `growing` items,
    /// splits nodes: a leaf each, and on each level above half as many.
    pub fn worst_case_alone(nodes: u64, growing: u64) -> u64 {
        nodes
            .saturating_add(nodes / 16)
            .saturating_add(growing.saturating_mul(2))
            .saturating_add(64)
    }
}
