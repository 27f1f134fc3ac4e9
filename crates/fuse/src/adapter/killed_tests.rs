//! A program on a real mount is killed while it waits for space: it ends at once, and leaves
//! nothing behind.
use crate::mount;
use crate::tiny_file_system::options_of_tests;
use cairn_blockdev::FileDevice;
use cairn_blockdev::simulated::GatedDevice;
use cairn_engine::{AllocateMode, Error, FileType, InodeId, NewInode, Volume, VolumeOptions, mkfs};
use cairn_environment::{clock, thread};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const VOLUME_BYTES: u64 = 64 << 20;

fn create(volume: &Volume, name: &[u8]) -> InodeId {
    let new = NewInode {
        file_type: FileType::Regular,
        mode: 0o644,
        uid: 0,
        gid: 0,
        device: 0,
        target: None,
    };
    let inode = volume.create(volume.root(), name, &new).unwrap().inode;
    volume.forget(inode, 1);
    inode
}

fn fill(volume: &Volume) {
    let file = create(volume, b"filling");
    let (mut end, mut step) = (0, 1 << 20);
    while step >= 4096 {
        match volume.allocate(file, end, step, AllocateMode::Allocate { keep_size: false }) {
            Ok(()) => end += step,
            Err(Error::NoSpace) => step /= 2,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_program_killed_while_it_waits_for_space_ends_and_leaves_nothing_behind() {
    if !crate::session_tests::can_mount() {
        return;
    }
    let directory = tempfile::Builder::new().prefix("cairn-fuse-test-").tempdir().unwrap();
    let (image, mountpoint) = (directory.path().join("image"), directory.path().join("mnt"));
    // The kernel needs an image to mount; the content is in memory.
    drop(FileDevice::create(&image, VOLUME_BYTES).unwrap());
    std::fs::create_dir(&mountpoint).unwrap();
    let device = Arc::new(GatedDevice::new(VOLUME_BYTES));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let options =
        VolumeOptions { commit_interval: Duration::from_secs(1000), ..VolumeOptions::default() };
    let volume = Volume::open(device.clone(), options).unwrap();
    let mounted = mount(volume.clone(), &image, &mountpoint, &options_of_tests()).unwrap();
    let unmounter = mounted.unmounter();
    let server = thread::spawn("mounted", move || mounted.run().unwrap());
    let before = volume.space();
    create(&volume, b"extra");
    create(&volume, b"written");
    fill(&volume);
    device.set_shut(true);

    // The commit needs a change, or the wait would end at once.
    volume.unlink(volume.root(), b"extra").unwrap();
    let target = format!("of={}", mountpoint.join("written").display());
    let mut child = Command::new("dd")
        .args(["if=/dev/zero", &target, "bs=1M", "count=1", "conv=notrunc"])
        .spawn()
        .unwrap();
    while volume.statistics().tickets_waiting == 0 {
        clock::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    // The device is shut until then: only the cancelled request ends this wait.
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    while volume.statistics().tickets_waiting > 0 {
        clock::sleep(Duration::from_millis(1));
    }

    device.set_shut(false);
    std::fs::remove_file(mountpoint.join("filling")).unwrap();
    assert_eq!(std::fs::metadata(mountpoint.join("written")).unwrap().len(), 0);
    volume.sync().unwrap();
    volume.commit().unwrap();
    // The kernel forgets the removed file at a time of its choice; what this frees and reserves is
    // then in progress.
    let settled = || {
        volume.space().free_blocks + 64 >= before.free_blocks
            && volume.statistics().reserved_bytes == 0
    };
    // Once is enough, since background work reserves blocks now and then.
    let has_settled = (0..30_000).any(|_| {
        let settled = settled();
        if !settled {
            clock::sleep(Duration::from_millis(1));
        }
        settled
    });
    assert!(has_settled, "{:?}", volume.statistics());
    unmounter.unmount().unwrap();
    server.join().unwrap();
    let again = Volume::open(device, VolumeOptions { read_only: true, ..VolumeOptions::default() });
    assert!(again.is_ok(), "{:?}", again.err());
}
