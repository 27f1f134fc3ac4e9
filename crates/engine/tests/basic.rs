//! The operations of a volume, one after the other, across remounts.
use cairn_blockdev::MemoryDevice;
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, FsyncKind, InodeId, NewInode, RenameMode,
    SeekTarget, Volume, VolumeOptions, XattrMode, mkfs,
};
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };
const DIRECTORY: NewInode<'static> =
    NewInode { file_type: FileType::Directory, mode: 0o755, ..FILE };

fn device(bytes: u64) -> Arc<MemoryDevice> {
    let device = Arc::new(MemoryDevice::new(bytes));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    device
}

fn open(device: &Arc<MemoryDevice>) -> Volume {
    Volume::open(device.clone(), VolumeOptions { background: false, ..VolumeOptions::default() })
        .unwrap()
}

fn content(volume: &Volume, inode: InodeId) -> Vec<u8> {
    let mut bytes = Vec::new();
    volume.read(inode, 0, 1 << 24, &mut bytes).unwrap();
    bytes
}

fn names(volume: &Volume, directory: InodeId) -> Vec<String> {
    let mut names = Vec::new();
    volume
        .read_directory(directory, 0, &mut |item| {
            names.push(String::from_utf8(item.name.to_vec()).unwrap());
            true
        })
        .unwrap();
    names.sort();
    names
}

#[test]
fn files_survive_a_clean_remount_and_a_crash_after_fsync() {
    let device = device(64 << 20);
    let volume = open(&device);
    let root = volume.root();
    let directory = volume.create(root, b"mail", &DIRECTORY).unwrap().inode;
    let file = volume.create(directory, b"1", &FILE).unwrap().inode;
    let data: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
    volume.write(file, 0, &data).unwrap();
    assert_eq!(content(&volume, file), data);
    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    drop(volume);

    let volume = open(&device);
    assert!(volume.statistics().replayed_checkpoints > 0);
    assert_eq!(content(&volume, volume.lookup(directory, b"1").unwrap().inode), data);
    volume.write(file, 1000, b"changed").unwrap();
    volume.close().unwrap();

    let volume = open(&device);
    assert_eq!(volume.statistics().replayed_checkpoints, 0);
    assert_eq!(&content(&volume, file)[1000..1007], b"changed");
    assert_eq!(volume.attributes(file).unwrap().size_bytes, 3_000_000);
    volume.close().unwrap();
}

#[test]
fn names_links_and_renames() {
    let device = device(64 << 20);
    let volume = open(&device);
    let root = volume.root();
    let a = volume.create(root, b"a", &FILE).unwrap().inode;
    assert!(matches!(volume.create(root, b"a", &FILE), Err(Error::Exists)));
    assert!(matches!(volume.create(root, &[b'x'; 256], &FILE), Err(Error::NameLength(256))));
    volume.link(a, root, b"b").unwrap();
    assert_eq!(volume.attributes(a).unwrap().links, 2);
    let d = volume.create(root, b"d", &DIRECTORY).unwrap().inode;
    let e = volume.create(d, b"e", &DIRECTORY).unwrap().inode;
    assert!(matches!(
        volume.rename(root, b"d", e, b"x", RenameMode::Replace),
        Err(Error::InvalidArgument(_))
    ));
    assert!(matches!(volume.remove_directory(root, b"d"), Err(Error::NotEmpty)));
    volume.rename(root, b"a", d, b"moved", RenameMode::Replace).unwrap();
    volume.rename(d, b"e", root, b"e2", RenameMode::NoReplace).unwrap();
    assert_eq!(volume.parent(e).unwrap(), root);
    volume.rename(root, b"b", d, b"moved", RenameMode::Exchange).unwrap();
    assert_eq!(names(&volume, root), ["b", "d", "e2"]);
    assert_eq!(names(&volume, d), ["moved"]);
    assert_eq!(volume.attributes(d).unwrap().links, 2);
    assert_eq!(volume.attributes(root).unwrap().links, 4);
    volume.unlink(d, b"moved").unwrap();
    volume.unlink(root, b"b").unwrap();
    volume.write(a, 0, b"still open").unwrap();
    assert_eq!(content(&volume, a), b"still open");
    volume.forget(a, 10);
    assert!(matches!(volume.attributes(a), Err(Error::NotFound)));
    let target = b"../somewhere".as_slice();
    let link = NewInode { file_type: FileType::Symlink, target: Some(target), ..FILE };
    let symlink = volume.create(root, b"s", &link).unwrap().inode;
    assert_eq!(volume.read_link(symlink).unwrap(), target);
    volume.close().unwrap();
    let volume = open(&device);
    assert_eq!(names(&volume, root), ["d", "e2", "s"]);
    volume.close().unwrap();
}

#[test]
fn holes_preallocation_and_truncation() {
    let device = device(64 << 20);
    let volume = open(&device);
    let file = volume.create(volume.root(), b"f", &FILE).unwrap().inode;
    volume.write(file, 100_000, b"end").unwrap();
    volume.fsync_blocking(file, FsyncKind::DataOnly).unwrap();
    assert_eq!(volume.seek(file, 0, SeekTarget::Data).unwrap(), 98304);
    assert_eq!(volume.seek(file, 0, SeekTarget::Hole).unwrap(), 0);
    volume.allocate(file, 0, 50_000, AllocateMode::Allocate { keep_size: true }).unwrap();
    assert!(volume.attributes(file).unwrap().blocks_512 >= 13 * 8);
    assert!(content(&volume, file)[..100_000].iter().all(|&byte| byte == 0));
    volume.write(file, 4096, &[7; 8192]).unwrap();
    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    volume.allocate(file, 6000, 3000, AllocateMode::PunchHole).unwrap();
    let mut expected = vec![0; 100_003];
    expected[4096..12288].fill(7);
    expected[6000..9000].fill(0);
    expected[100_000..].copy_from_slice(b"end");
    assert_eq!(content(&volume, file), expected);
    let size = |size| AttributeChange { size: Some(size), ..AttributeChange::default() };
    volume.set_attributes(file, &size(5000)).unwrap();
    volume.set_attributes(file, &size(9000)).unwrap();
    expected.truncate(5000);
    expected.resize(9000, 0);
    assert_eq!(content(&volume, file), expected);
    drop(volume);
    let volume = open(&device);
    volume.close().unwrap();
}

#[test]
fn a_large_file_shrinks_in_steps() {
    let device = device(256 << 20);
    let volume = open(&device);
    let file = volume.create(volume.root(), b"f", &FILE).unwrap().inode;
    for i in 0..200u64 {
        volume.write(file, i * 8192, &[i as u8; 4096]).unwrap();
        if i % 20 == 0 {
            volume.fsync_blocking(file, FsyncKind::DataOnly).unwrap();
        }
    }
    volume.sync().unwrap();
    let size = AttributeChange { size: Some(4096 * 3 + 5), ..AttributeChange::default() };
    volume.set_attributes(file, &size).unwrap();
    assert_eq!(volume.attributes(file).unwrap().blocks_512, 16);
    volume.close().unwrap();
}

#[test]
fn extended_attributes_of_every_size() {
    let device = device(64 << 20);
    let volume = open(&device);
    let file = volume.create(volume.root(), b"f", &FILE).unwrap().inode;
    for length in [0usize, 1, 3071, 3072, 3073, 20_000, 65_536, 10] {
        let value: Vec<u8> = (0..length).map(|i| i as u8).collect();
        volume.set_xattr(file, b"user.test", &value, XattrMode::Any).unwrap();
        assert_eq!(volume.get_xattr(file, b"user.test").unwrap(), value);
    }
    assert!(matches!(
        volume.set_xattr(file, b"user.test", b"", XattrMode::Create),
        Err(Error::Exists)
    ));
    assert!(matches!(
        volume.set_xattr(file, b"user.none", b"", XattrMode::Replace),
        Err(Error::NoAttribute)
    ));
    assert_eq!(volume.list_xattrs(file).unwrap(), vec![b"user.test".to_vec()]);
    volume.remove_xattr(file, b"user.test").unwrap();
    assert!(matches!(volume.get_xattr(file, b"user.test"), Err(Error::NoAttribute)));
    volume.close().unwrap();
}

#[test]
fn many_entries_keep_their_cookies() {
    let device = device(128 << 20);
    let volume = open(&device);
    let root = volume.root();
    for i in 0..5000 {
        let inode = volume.create(root, format!("file {i}").as_bytes(), &FILE).unwrap().inode;
        volume.forget(inode, 1);
    }
    let (mut cookie, mut seen) = (0, Vec::new());
    loop {
        let mut count = 0;
        volume
            .read_directory_plus(root, cookie, &mut |item, attributes| {
                assert_eq!(item.inode, attributes.inode);
                seen.push(item.name.to_vec());
                cookie = item.cookie;
                count += 1;
                count < 100
            })
            .unwrap();
        if count < 100 {
            break;
        }
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 5000);
    for i in 0..5000 {
        volume.unlink(root, format!("file {i}").as_bytes()).unwrap();
    }
    assert!(names(&volume, root).is_empty());
    volume.close().unwrap();
}

#[test]
fn each_fsync_counts_in_the_stages_that_it_went_through() {
    let device = device(64 << 20);
    let volume = open(&device);
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    for round in 0..10 {
        volume.write(file, round * 4096, &[1; 4096]).unwrap();
        volume.fsync_blocking(file, FsyncKind::DataOnly).unwrap();
    }
    volume.fsync_blocking(file, FsyncKind::DataOnly).unwrap();
    let statistics = volume.statistics();
    let counts: Vec<_> =
        statistics.fsync_stages.iter().map(|stage| (stage.stage.as_str(), stage.count)).collect();
    let expected = [
        ("data write", 11),
        ("group wait", 10),
        ("checkpoint write", 10),
        ("flush", 10),
        ("wake-up", 10),
        ("total", 11),
    ];
    assert_eq!(counts, expected);
    assert_eq!(statistics.fsyncs(), 11);
    volume.close().unwrap();
}

/// As df shows it.
#[test]
fn data_that_is_not_written_yet_counts_as_used() {
    let volume = open(&device(64 << 20));
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    volume.sync().unwrap();
    let before = volume.space();
    volume.write(file, 0, &[1; 1 << 20]).unwrap();
    assert_eq!(volume.space().free_blocks, before.free_blocks - 256);
    volume.sync().unwrap();
    volume.commit().unwrap();
    assert!(volume.space().free_blocks.abs_diff(before.free_blocks - 256) < 32);
    volume.close().unwrap();
}

/// As an unmount does it: the kernel drops what it had still to give back.
#[test]
fn what_has_no_name_is_removed_when_nobody_has_a_reference_any_more() {
    let device = device(64 << 20);
    for background in [false, true] {
        let volume =
            Volume::open(device.clone(), VolumeOptions { background, ..VolumeOptions::default() })
                .unwrap();
        let root = volume.root();
        let (kept, file) = (b"kept", volume.create(root, b"file", &FILE).unwrap().inode);
        let before = volume.space().inodes;
        volume.create(root, kept, &FILE).unwrap();
        volume.write(file, 0, &[1; 1 << 20]).unwrap();
        volume.sync().unwrap();
        volume.unlink(root, b"file").unwrap();
        volume.forget_all();
        volume.close().unwrap();
        // Without repairing anything.
        let options =
            VolumeOptions { read_only: true, background: false, ..VolumeOptions::default() };
        let volume = Volume::open(device.clone(), options).unwrap();
        assert_eq!(volume.space().inodes, before, "background: {background}");
        assert!(volume.lookup(volume.root(), kept).is_ok());
        volume.close().unwrap();
        let volume = open(&device);
        volume.unlink(volume.root(), kept).unwrap();
        volume.forget_all();
        volume.close().unwrap();
    }
}
