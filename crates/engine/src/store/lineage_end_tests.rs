//! Two threads that remove what is left of one subvolume.
use super::*;
use crate::mkfs::{MkfsOptions, mkfs};
use crate::{Error, FileType, NewInode, Volume, VolumeOptions};
use cairn_blockdev::MemoryDevice;
use std::cell::Cell;
use std::sync::Arc;

const DIRECTORY: NewInode<'_> = NewInode {
    file_type: FileType::Directory,
    mode: 0o755,
    uid: 0,
    gid: 0,
    device: 0,
    target: None,
};

/// A reader postpones the removal, and ends before the thread that was to remove has ended its
/// turn.
#[test]
fn a_removal_goes_on_when_its_reader_ends_at_once() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    let volume = Volume::open(device, options).unwrap();
    let (root, store) = (volume.root(), volume.store());
    let home = volume.create_subvolume(root, b"home", &DIRECTORY).unwrap().inode;
    let snapshot = volume.create_snapshot(home, b"one").unwrap();
    volume.create(home, b"directory", &DIRECTORY).unwrap();
    // The snapshot is hidden, and stays.
    volume.fork(snapshot.root, root, b"fork").unwrap();
    let id = TreeId(snapshot.subvolume);
    // Once it is headless, the fork is joined with it.
    let item = || store.trees.lock_records().find(id).unwrap();
    let is_dying = || item().is_some_and(|item| item.is_dying);
    let reading = volume.files().begin_long_read([snapshot.root]).unwrap();
    volume.delete_snapshot(id.0, b"one").unwrap();
    volume.remove_subvolume(root, b"home").unwrap();
    assert!(is_dying(), "the reader is not waited for");

    let is_interrupted = || false;
    let is_first = Cell::new(true);
    let unload = |_| {
        if !is_first.replace(false) {
            return Ok(());
        }
        // As the reader's thread.
        let ending = Ending {
            is_interrupted: &is_interrupted,
            unload: &|_| Ok(()),
            is_applied: &|_| false,
            due: &|_| (),
        };
        store.remove_subvolume(home, &ending).unwrap();
        assert!(is_dying());
        Err(Error::Busy)
    };
    let ending = Ending {
        is_interrupted: &is_interrupted,
        unload: &unload,
        is_applied: &|_| false,
        due: &|_| (),
    };
    let removed = store.remove_subvolume(home, &ending);
    assert!(!is_first.get() && !is_dying(), "{removed:?}");
    removed.unwrap();
    drop(reading);
    volume.close().unwrap();
}
