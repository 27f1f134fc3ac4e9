//! Lookups: the leaf for a key, and what stands in it.
//!
//! Lock discipline: one leaf's shared lock at the end. Routes lead there without another lock
//! (`quick.rs`); where they aren't known the lookup walks (`walk.rs`).
use crate::error::TreeError;
use crate::expected::Bounds;
use crate::handle::ReadNode;
use crate::tree::Tree;
use crate::walk::unseen;
use cairn_format::{BlockNumber, Key};

/// A leaf under its shared lock.
pub(crate) struct Leaf {
    pub(crate) node: ReadNode,
    pub(crate) bounds: Bounds,
}

impl Tree {
    /// The value under `key`.
    ///
    /// # Errors
    /// When a node on the way can't be read.
    pub fn get(&self, key: &Key) -> Result<Option<Vec<u8>>, TreeError> {
        self.get_with(key, <[u8]>::to_vec)
    }

    /// What `read` makes of the value under `key`. It runs under the leaf's shared lock, so it must
    /// not use a tree.
    ///
    /// # Errors
    /// When a node on the way can't be read.
    pub fn get_with<R>(
        &self,
        key: &Key,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>, TreeError> {
        let leaf = self.leaf(key)?.node;
        Ok(leaf.search(key).ok().map(|index| read(leaf.value(index))))
    }

    /// The block of the leaf in which `key` has its place, for messages about its item.
    ///
    /// # Errors
    /// When a node on the way can't be read.
    pub fn leaf_block(&self, key: &Key) -> Result<BlockNumber, TreeError> {
        Ok(self.leaf(key)?.node.handle.root_pointer().block)
    }

    /// Whether the leaf for `key` can be reached without the device, now.
    pub fn is_in_memory(&self, key: &Key) -> bool {
        self.quick_leaf(key).is_some()
    }

    /// The leaf that holds `key` if the tree does, under its shared lock.
    pub(crate) fn leaf(&self, key: &Key) -> Result<Leaf, TreeError> {
        if let Some((node, bounds)) = self.quick_leaf(key) {
            return Ok(Leaf { node, bounds });
        }
        let (node, bounds) =
            self.with_retries(|policy| self.walk(key, 0, policy, &mut unseen)?.read(&mut unseen))?;
        self.cache.locks.before_sleep();
        Ok(Leaf { node, bounds })
    }
}
