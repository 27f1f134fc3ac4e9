//! Which directories' operations meet, and which don't. Whoever is in the way here stays there
//! until the other one has finished: if they met, both would wait for ever.
use cairn_blockdev::MemoryDevice;
use cairn_engine::{FileType, InodeId, NewInode, RenameMode, Volume, VolumeOptions, mkfs};
use cairn_environment::thread;
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };
const DIRECTORY: NewInode<'static> =
    NewInode { file_type: FileType::Directory, mode: 0o755, ..FILE };

/// A volume with the directories `busy` and `other`, each with a file `a`.
fn volume() -> (Volume, InodeId, InodeId) {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume =
        Volume::open(device, VolumeOptions { background: false, ..VolumeOptions::default() })
            .unwrap();
    let make = |name: &[u8]| {
        let directory = volume.create(volume.root(), name, &DIRECTORY).unwrap().inode;
        volume.create(directory, b"a", &FILE).unwrap();
        directory
    };
    let directories = (make(b"busy"), make(b"other"));
    (volume, directories.0, directories.1)
}

/// Lists `busy`, whose lock is held meanwhile, and lets another thread do `work` to its end in the
/// midst.
fn during_a_listing<T: Send + 'static>(
    volume: &Volume,
    busy: InodeId,
    work: impl FnOnce(&Volume) -> T + Send + 'static,
) -> T {
    let (mut work, mut result) = (Some(work), None);
    volume
        .read_directory(busy, 0, &mut |_| {
            if let Some(work) = work.take() {
                let volume = volume.clone();
                result =
                    Some(thread::spawn("other", move || work(&volume)).join().expect("no panic"));
            }
            true
        })
        .unwrap();
    result.expect("the directory has an entry")
}

#[test]
fn lookups_in_one_directory_run_side_by_side() {
    let (volume, busy, _) = volume();
    let found = during_a_listing(&volume, busy, move |volume| {
        let found = volume.lookup(busy, b"a").unwrap();
        let mut names = 0;
        volume
            .read_directory(busy, 0, &mut |_| {
                names += 1;
                true
            })
            .unwrap();
        assert_eq!(names, 1);
        assert_eq!(volume.attributes(busy).unwrap().file_type, FileType::Directory);
        found.inode
    });
    assert_eq!(volume.lookup(busy, b"a").unwrap().inode, found);
    volume.close().unwrap();
}

#[test]
fn changes_in_another_directory_do_not_wait() {
    let (volume, busy, other) = volume();
    during_a_listing(&volume, busy, move |volume| {
        for number in 0..300 {
            volume.create(other, format!("file {number}").as_bytes(), &FILE).unwrap();
        }
        volume.rename(other, b"file 7", other, b"renamed", RenameMode::Replace).unwrap();
        volume.create(other, b"directory", &DIRECTORY).unwrap();
        volume.unlink(other, b"a").unwrap();
    });
    assert_eq!(volume.attributes(other).unwrap().inode, other);
    assert!(volume.lookup(other, b"renamed").is_ok() && volume.lookup(other, b"a").is_err());
    volume.close().unwrap();
}
