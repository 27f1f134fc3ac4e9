//! Removals that lack space.
use crate::mkfs::{MkfsOptions, mkfs};
use crate::test_space::hold_all;
use crate::{FileType, NewInode, Volume, VolumeOptions};
use cairn_blockdev::MemoryDevice;
use cairn_environment::clock;
use cairn_space::{Reservation, Urgency};
use std::sync::Arc;
use std::time::Duration;

const BLOCKS: u64 = 40;
/// Looks at what a thread is to do, a millisecond apart.
const LOOKS_MAX: u32 = 20_000;

/// A volume with a file that is to be removed, the blocks in use, and all that a removal may have.
fn with_a_removal_that_lacks_space(interval: Duration) -> (Volume, u64, Vec<Reservation>) {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let options = VolumeOptions { commit_interval: interval, ..VolumeOptions::default() };
    let volume = Volume::open(device, options).unwrap();
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
    let held = hold_all(space, Urgency::Removal);
    volume.forget(file, 1);
    volume.files().drain_orphans();
    (volume, used, held)
}

#[test]
fn nobody_waits_for_a_removal_that_lacks_space_itself() {
    let (volume, used, held) = with_a_removal_that_lacks_space(Duration::from_secs(3600));
    let space = &volume.store().space;
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

#[test]
fn a_removal_that_lacked_space_goes_on_without_a_commit() {
    let (volume, used, held) = with_a_removal_that_lacks_space(Duration::from_millis(5));
    // Nothing changes any more.
    drop(held);
    let is_done = || volume.store().space.report().used + BLOCKS / 2 <= used;
    for _ in 0..LOOKS_MAX {
        if is_done() {
            break;
        }
        clock::sleep(Duration::from_millis(1));
    }
    assert!(is_done(), "it was not tried again");
    volume.close().unwrap();
}
