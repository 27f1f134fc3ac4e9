//! Errors about damaged items name them.
use crate::mkfs::{MkfsOptions, mkfs};
use crate::store::operation::Effort;
use crate::{Error, InodeId, Volume, VolumeOptions};
use cairn_blockdev::MemoryDevice;
use cairn_format::ItemKind;
use std::sync::Arc;

#[test]
fn an_error_names_the_item_and_its_node() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    let volume = Volume::open(device, options).unwrap();
    let (store, inode) = (volume.store(), InodeId(900));
    let mut operation = store.begin(inode, 2, 0, Effort::Ordinary).unwrap();
    for kind in [ItemKind::Inode, ItemKind::DirectoryEntry] {
        operation.put(inode.key(kind, 0), &[1, 2, 3]).unwrap();
    }
    operation.log();
    drop(operation);
    let key = inode.key(ItemKind::Inode, 0);
    let block = store.trees.shown().leaf_block(&key).unwrap();
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
