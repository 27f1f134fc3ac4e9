//! Each switch of [`Baselines`] replaces its mechanism, and no other.
use crate::mkfs::{MkfsOptions, mkfs};
use crate::options::{Baselines, VolumeOptions};
use crate::volume::{Volume, VolumeInner};
use crate::{FileType, NewInode};
use cairn_blockdev::MemoryDevice;
use cairn_environment::lock::waking_held;
use cairn_format::{Key, TREE_FILES};
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };

/// Which mechanisms are found to be replaced.
fn replaced(baselines: Baselines) -> Baselines {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let options = VolumeOptions { background: false, baselines, ..VolumeOptions::default() };
    let volume = Volume::open(device, options).unwrap();
    let inner = &*volume.shared.inner;
    let created = volume.create(volume.root(), b"file", &FILE).unwrap();
    let found = Baselines {
        waking_locks: leaf_lock_wakes(inner),
        locked_descents: !descends_by_routes(inner),
        shared_flusher: inner.space.has_shared_flusher(),
        two_pass_insertion: inner.log.two_pass_items() > 0,
    };
    volume.forget(created.inode, 1);
    volume.close().unwrap();
    found
}

fn leaf_lock_wakes(inner: &VolumeInner) -> bool {
    assert_eq!(waking_held(), 0);
    inner.roots.get_with(&Key::root(TREE_FILES), |_| waking_held() > 0).unwrap().unwrap()
}

fn descends_by_routes(inner: &VolumeInner) -> bool {
    let before = inner.cache.statistics().quick_descents;
    inner.roots.get(&Key::root(TREE_FILES)).unwrap().unwrap();
    inner.cache.statistics().quick_descents > before
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
    ] {
        assert_eq!(replaced(one), one);
    }
}
