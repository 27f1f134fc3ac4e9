//! Two threads that free what deleted snapshots of one subvolume had.
use super::*;
use crate::mkfs::{MkfsOptions, mkfs};
use crate::store::snapshots::Which;
use crate::{FileType, NewInode, Volume, VolumeOptions};
use cairn_blockdev::MemoryDevice;
use std::cell::Cell;
use std::sync::Arc;

const FILE: NewInode<'_> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };

/// While a cleaner rests, another one ends the cleanup on which it works, and no other.
#[test]
fn a_cleaner_goes_on_when_another_one_has_ended_a_cleanup() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    let volume = Volume::open(device, options).unwrap();
    let (root, store) = (volume.root(), volume.store());
    let id = volume.subvolume_of(root).unwrap().0;
    let file = volume.create(root, b"file", &FILE).unwrap().inode;
    let made = [1, 2, 3].map(|content| {
        volume.write(file, 0, &[content; 4096]).unwrap();
        Generation(volume.create_snapshot(root, &[b'0' + content]).unwrap().generation)
    });
    // The one in the middle stays: what the others had are two cleanups.
    for made in [made[0], made[2]] {
        store.delete_snapshot(id, Which::MadeBy(made)).unwrap();
    }
    store.commit().unwrap();
    let tree = TreeId(id);
    let is_left = || [made[0], made[2]].map(|made| store.has_cleanup(tree, made));
    assert_eq!(is_left(), [true, true]);

    let unload = |_| Ok(());
    let is_first = Cell::new(true);
    let interrupted = || {
        if is_first.take() {
            let is_ended = || !store.has_cleanup(tree, made[0]);
            store.clean_up(root, Pace::Hurried, is_ended, unload).unwrap();
            assert_eq!(is_left(), [false, true]);
        }
        false
    };
    // It has worked for long, and others have changed the volume meanwhile: it rests.
    let since = clock::now_monotonic();
    clock::sleep(SLICE);
    let pace = Pace::Leisurely { is_wanted: &|| false, since, logged: LogSeq(0) };
    store.clean_up(root, pace, interrupted, unload).unwrap();
    assert_eq!(is_left(), [false, false]);
    volume.close().unwrap();
}
