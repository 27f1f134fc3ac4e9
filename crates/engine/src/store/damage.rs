//! Errors about items that are damaged: each names the item's key, and the node it stands in.
use super::Store;
use crate::{Error, InodeId, Result};
use cairn_btree::Tree;
use cairn_format::{BlockNumber, FormatError, Key, Structure};

/// `error` as one about the item under `key` of `tree`. No leaf is locked.
pub(super) fn of_item(tree: &Tree, key: &Key, error: FormatError) -> Error {
    // If the leaf can't be read any more, the error still names the item.
    let block = tree.leaf_block(key).unwrap_or(error.block);
    error.of_item(key, block).into()
}

impl Store {
    /// What was decoded from the item under `key` in the tree of `inode`, or an error that names
    /// the item. No leaf is locked.
    pub(crate) fn of_item<T>(
        &self,
        inode: InodeId,
        key: &Key,
        decoded: std::result::Result<T, FormatError>,
    ) -> Result<T> {
        decoded.map_err(|error| self.damaged(inode, key, error))
    }

    /// `error` as one about the item under `key`. No leaf is locked.
    pub(crate) fn damaged(&self, inode: InodeId, key: &Key, error: FormatError) -> Error {
        of_item(self.trees.of(inode), key, error)
    }

    /// The error that the item under `key` has this problem.
    pub(crate) fn damaged_item(&self, inode: InodeId, key: &Key, problem: String) -> Error {
        self.damaged(inode, key, FormatError::new(Structure::Item, BlockNumber(0), problem))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "damage_tests.rs"]
mod tests;
