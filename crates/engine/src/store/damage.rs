//! Errors about items that are damaged: each names the item's key, and the node it stands in.
use super::Store;
use crate::{Error, Result};
use cairn_btree::Tree;
use cairn_format::{BlockNumber, FormatError, Key, Structure};

/// `error` as one about the item under `key` of `tree`. No leaf is locked.
pub(super) fn of_item(tree: &Tree, key: &Key, error: FormatError) -> Error {
    match tree.leaf_block(key) {
        Ok(block) => error.of_item(key, block).into(),
        Err(unreadable) => unreadable.into(),
    }
}

impl Store {
    /// What was decoded from the item under `key`, or an error that names the item. No leaf is
    /// locked.
    pub(crate) fn of_item<T>(
        &self,
        key: &Key,
        decoded: std::result::Result<T, FormatError>,
    ) -> Result<T> {
        decoded.map_err(|error| self.damaged(key, error))
    }

    /// `error` as one about the item under `key`. No leaf is locked.
    pub(crate) fn damaged(&self, key: &Key, error: FormatError) -> Error {
        of_item(&self.file_tree, key, error)
    }

    /// The error that the item under `key` has this problem.
    pub(crate) fn damaged_item(&self, key: &Key, problem: String) -> Error {
        self.damaged(key, FormatError::new(Structure::Item, BlockNumber(0), problem))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use crate::mkfs::{MkfsOptions, mkfs};
    use crate::store::operation::Effort;
    use crate::{Error, Volume, VolumeOptions};
    use cairn_blockdev::MemoryDevice;
    use cairn_format::{InodeNumber, ItemKind, Key};
    use std::sync::Arc;

    #[test]
    fn an_error_names_the_item_and_its_node() {
        let device = Arc::new(MemoryDevice::new(64 << 20));
        mkfs(&*device, &MkfsOptions::default()).unwrap();
        let options = VolumeOptions { background: false, ..VolumeOptions::default() };
        let volume = Volume::open(device, options).unwrap();
        let (store, inode) = (volume.store(), InodeNumber(900));
        let mut operation = store.begin(2, 0, Effort::Ordinary).unwrap();
        for kind in [ItemKind::Inode, ItemKind::DirectoryEntry] {
            operation.put(Key::new(inode, kind, 0), &[1, 2, 3]).unwrap();
        }
        operation.log();
        drop(operation);
        let key = Key::new(inode, ItemKind::Inode, 0);
        let block = store.file_tree.leaf_block(&key).unwrap();
        assert_ne!(block.0, 0);
        let Err(Error::Damaged(error)) = volume.attributes(inode) else { panic!("it is damaged") };
        assert_eq!(error.block, block);
        assert!(error.to_string().contains(&format!("{key:?}")), "{error}");
        // Found in the middle of a scan, under the leaf's lock.
        let found = volume.names().find_entry(inode, b"name").map(drop);
        let listed = volume.read_directory(inode, 0, &mut |_| true);
        for result in [found, listed] {
            assert!(matches!(&result, Ok(()) | Err(Error::Damaged(_))), "{result:?}");
        }
    }
}
