//! Forks that lack space.
use crate::mkfs::{MkfsOptions, mkfs};
use crate::store::operation::Effort;
use crate::test_space::hold_all;
use crate::{Error, FileType, NewInode, Volume, VolumeOptions};
use cairn_blockdev::MemoryDevice;
use cairn_environment::clock;
use cairn_space::Urgency;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Otherwise it could wait for what another one holds that waits for this one.
#[test]
fn who_waits_for_space_for_a_fork_holds_none() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let volume = Volume::open(device, VolumeOptions::default()).unwrap();
    let new = NewInode {
        file_type: FileType::Directory,
        mode: 0o755,
        uid: 0,
        gid: 0,
        device: 0,
        target: None,
    };
    let live = volume.create_subvolume(volume.root(), b"live", &new).unwrap().inode;
    let snapshot = volume.create_snapshot(live, b"first").unwrap().root;
    volume.files().enter(snapshot).unwrap();
    (0..3).for_each(|_| volume.commit().unwrap());
    let space = &volume.store().space;
    let (mut looks, mut refusals) = (0, 0);
    // More and more is left for it.
    for left in (0..).step_by(3) {
        let held = hold_all(space, Urgency::Name);
        held[0].give_back(0, left);
        let before = space.report();
        let begin =
            || volume.store().begin_fork(snapshot, volume.root(), 0, Effort::Name).map(drop);
        let begun = thread::scope(|scope| {
            let caller = scope.spawn(begin);
            while !caller.is_finished() {
                let report = space.report();
                if report.tickets_waiting > 0 {
                    looks += 1;
                    assert!(report.reserved_nodes <= before.reserved_nodes, "{left} are left");
                }
                clock::sleep(Duration::from_millis(1));
            }
            caller.join().unwrap()
        });
        match begun {
            Err(Error::NoSpace) => refusals += 1,
            begun => {
                begun.unwrap();
                break;
            }
        }
    }
    assert!(looks > 0 && refusals > 1, "{looks} looks, {refusals} refusals");
    volume.close().unwrap();
}
