//! Removals that lack space.
use crate::mkfs::{MkfsOptions, mkfs};
use crate::{FileType, NewInode, Volume, VolumeOptions};
use cairn_blockdev::MemoryDevice;
use cairn_space::{Request, Urgency};
use std::sync::Arc;

const BLOCKS: u64 = 40;

#[test]
fn nobody_waits_for_a_removal_that_lacks_space_itself() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let volume = Volume::open(device, VolumeOptions::default()).unwrap();
    let new = NewInode {
        file_type: FileType::Regular,
        mode: 0o644,
        uid: 0,
        gid: 0,
        device: 0,
        target: None,
    };
    let file = volume.create(volume.root(), b"file", &new).unwrap().inode;
    volume.write(file, 0, &[7; BLOCKS as usize * 4096]).unwrap();
    volume.sync().unwrap();
    volume.unlink(volume.root(), b"file").unwrap();
    (0..3).for_each(|_| volume.commit().unwrap());
    let space = &volume.store().space;
    let used = space.report().used;

    // Others hold all that a removal may have.
    let mut held = Vec::new();
    let mut nodes = 1 << 20;
    while nodes > 0 {
        match space.try_reserve(Request { data_blocks: 0, nodes }, Urgency::Removal) {
            Ok(reservation) => held.push(reservation),
            Err(_) => nodes /= 2,
        }
    }
    volume.forget(file, 1);
    volume.files().drain_orphans();
    let report = space.report();
    assert_eq!((report.used, report.returning), (used, 0), "it is postponed");
    let again = || {
        volume.files().orphans.queue.retry_postponed(|blocks| space.announce(blocks));
        volume.files().drain_orphans();
    };
    again();
    assert_eq!(space.report().returning, 0, "it was tried again in vain");

    drop(held);
    again();
    (0..3).for_each(|_| volume.commit().unwrap());
    let report = space.report();
    assert!(report.used + BLOCKS / 2 <= used, "{} of {used} blocks are used", report.used);
    assert_eq!(report.returning, 0);
    volume.close().unwrap();
}
