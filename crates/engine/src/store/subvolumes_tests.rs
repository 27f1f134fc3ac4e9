//! Removals that a mount goes on with, though it cannot read all of them.
use super::*;
use crate::mkfs::{MkfsOptions, mkfs};
use crate::{NewInode, Volume, VolumeOptions};
use cairn_blockdev::{Operation as Request, SimulatedDevice};
use cairn_format::FileType;
use std::sync::Arc;

const DIRECTORY: NewInode<'_> = NewInode {
    file_type: FileType::Directory,
    mode: 0o755,
    uid: 0,
    gid: 0,
    device: 0,
    target: None,
};
/// So many that a tree has inner nodes.
const DIRECTORIES: u32 = 300;

#[test]
fn a_mount_goes_on_with_the_removals_that_it_can_read() {
    let device = Arc::new(SimulatedDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    let open = || Volume::open(device.clone(), options.clone()).unwrap();
    let volume = open();
    let names = [&b"first"[..], b"second", b"third"];
    let origin = volume.create_subvolume(volume.root(), b"origin", &DIRECTORY).unwrap().inode;
    for name in names {
        let root = volume.fork(origin, volume.root(), name).unwrap().inode;
        for number in 0..DIRECTORIES {
            volume.create(root, number.to_string().as_bytes(), &DIRECTORY).unwrap();
        }
    }
    volume.close().unwrap();
    let volume = open();
    let ids = names.map(|name| {
        let root = volume.lookup(volume.root(), name).unwrap().inode;
        TreeId(volume.subvolume_of(root).unwrap().0)
    });
    // They lose their names, and nothing of them can be read.
    device.fail_when(|request| request.operation == Request::Read);
    for name in names {
        volume.remove_subvolume(volume.root(), name).unwrap();
    }
    device.clear_failures();
    let is_left = |volume: &Volume, id: TreeId| {
        let records = volume.store().trees.lock_records();
        records.find(id).unwrap().is_some()
    };
    assert!(ids.iter().all(|id| is_left(&volume, *id)));
    {
        let store = volume.store();
        let mut operation = store.begin_for_subvolume(InodeId::ROOT, 0, Effort::Name).unwrap();
        let records = store.trees.lock_records();
        operation.note_unlogged_change();
        // Only a snapshot of the second one would be left, of which the item is damaged.
        let item = records.item(ids[1]).unwrap();
        let item = SubvolumeItem { is_dying: false, is_headless: true, ..item };
        records.put(&operation.change(), &store.superblock, ids[1], &item).unwrap();
        let damaged = Key::of_subvolume(ids[1], ItemKind::Snapshot, operation.generation());
        records.tree().unwrap().insert(&operation.change(), damaged, &[1, 2, 3]).unwrap();
        drop(records);
        operation.leave_unlogged();
    }
    volume.close().unwrap();
    let volume = open();
    assert_eq!(ids.map(|id| is_left(&volume, id)), [false, true, false]);
    volume.close().unwrap();
}
