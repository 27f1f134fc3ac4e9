//! Each switch of [`Baselines`] replaces its mechanism, and no other.
use super::Baselines;
use crate::mkfs::{MkfsOptions, mkfs};
use crate::options::VolumeOptions;
use crate::store::Store;
use crate::volume::Volume;
use crate::{FileType, FsyncKind, NewInode};
use cairn_blockdev::MemoryDevice;
use cairn_environment::waking::waking_held;
use cairn_format::{INODE_ROOT, ItemKind, Key};
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };

/// An item that every volume has.
fn root_key() -> Key {
    Key::new(INODE_ROOT, ItemKind::Inode, 0)
}

/// Which mechanisms are found to be replaced.
fn replaced(baselines: Baselines) -> Baselines {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let options = VolumeOptions { background: false, baselines, ..VolumeOptions::default() };
    let volume = Volume::open(device, options).unwrap();
    let store = volume.store();
    let created = volume.create(volume.root(), b"file", &FILE).unwrap();
    // Before the fsync, which empties the list.
    let two_pass_insertion = store.log.two_pass_items() > 0;
    volume.fsync_blocking(created.inode, FsyncKind::Full).unwrap();
    let found = Baselines {
        waking_locks: leaf_lock_wakes(store),
        locked_descents: !descends_by_routes(store),
        shared_flusher: store.space.has_shared_flusher(),
        two_pass_insertion,
        commits_only: volume.statistics().log.committed > 0,
    };
    volume.forget(created.inode, 1);
    volume.close().unwrap();
    found
}

fn leaf_lock_wakes(store: &Store) -> bool {
    assert_eq!(waking_held(), 0);
    store.trees.shown().get_with(&root_key(), |_| waking_held() > 0).unwrap().unwrap()
}

fn descends_by_routes(store: &Store) -> bool {
    let before = store.cache.statistics().quick_descents;
    store.trees.shown().get(&root_key()).unwrap().unwrap();
    store.cache.statistics().quick_descents > before
}

#[test]
fn a_switch_replaces_its_mechanism_alone() {
    let none = Baselines::default();
    assert_eq!(replaced(none), none);
    for one in [
        Baselines { waking_locks: true, ..none },
        Baselines { locked_descents: true, ..none },
        Baselines { shared_flusher: true, ..none },
        Baselines { two_pass_insertion: true, ..none },
        Baselines { commits_only: true, ..none },
    ] {
        assert_eq!(replaced(one), one);
    }
}
