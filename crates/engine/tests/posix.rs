//! What programs expect.
use cairn_blockdev::MemoryDevice;
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, FsyncKind, InodeId, NewInode, RenameMode,
    SeekTarget, Volume, VolumeOptions, XattrMode, mkfs,
};
use cairn_environment::thread;
use std::sync::{Arc, Barrier};

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };

fn volume() -> Volume {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    Volume::open(device, VolumeOptions { background: false, ..VolumeOptions::default() }).unwrap()
}

/// PATH_MAX is 4096 with the terminating zero.
#[test]
fn a_symbolic_link_may_be_as_long_as_a_path() {
    let volume = volume();
    let target = vec![b'x'; 4095];
    let link = NewInode { file_type: FileType::Symlink, target: Some(&target), ..FILE };
    let link = volume.create(volume.root(), b"link", &link);
    assert!(link.is_ok(), "{link:?}");
    assert_eq!(volume.read_link(link.unwrap().inode).unwrap(), target);
}

/// Asking for an inode that does not exist yet must not disturb its later creation.
#[test]
fn a_number_that_was_asked_for_can_be_created() {
    let volume = volume();
    let next = volume.create(volume.root(), b"1", &FILE).unwrap().inode.0 + 1;
    assert!(volume.attributes(InodeId(next)).is_err());
    assert_eq!(volume.create(volume.root(), b"2", &FILE).unwrap().inode.0, next);
}

type Call<'a> = &'a dyn Fn() -> Result<(), Error>;

/// A file without names and references is removed, now or a little later: what is done to it would
/// be lost without a word.
#[test]
fn a_file_that_nobody_can_reach_any_more_is_gone_for_every_call() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = Volume::open(device, VolumeOptions::default()).unwrap();
    let longer = AttributeChange { size: Some(1 << 20), ..AttributeChange::default() };
    let mode = AttributeChange { mode: Some(0o600), ..AttributeChange::default() };
    // Until it is removed, which may be at once, it still is in memory: many rounds meet that.
    for round in 0..300 {
        let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
        volume.write(file, 0, b"content").unwrap();
        let forget_first = round % 2 == 0;
        if forget_first {
            volume.forget(file, 1);
        }
        volume.unlink(volume.root(), b"file").unwrap();
        if !forget_first {
            volume.write(file, 0, b"without a name, but in use").unwrap();
            volume.forget(file, 1);
        }
        let calls: [(&str, Call<'_>); 11] = [
            ("write", &|| volume.write(file, 4096, b"lost")),
            ("read", &|| volume.read(file, 0, 10, &mut Vec::new())),
            ("attributes", &|| volume.attributes(file).map(drop)),
            ("truncate", &|| volume.set_attributes(file, &longer).map(drop)),
            ("chmod", &|| volume.set_attributes(file, &mode).map(drop)),
            ("allocate", &|| {
                volume.allocate(file, 0, 4096, AllocateMode::Allocate { keep_size: false })
            }),
            ("seek", &|| volume.seek(file, 0, SeekTarget::Hole).map(drop)),
            ("set xattr", &|| volume.set_xattr(file, b"user.a", b"b", XattrMode::Any)),
            ("list xattrs", &|| volume.list_xattrs(file).map(drop)),
            ("fsync", &|| volume.fsync_blocking(file, FsyncKind::Full)),
            ("link", &|| volume.link(file, volume.root(), b"again").map(drop)),
        ];
        let (name, call) = calls[round % calls.len()];
        let result = call();
        assert!(matches!(result, Err(Error::NotFound)), "round {round}, {name}: {result:?}");
    }
    volume.close().unwrap();
}

/// The source always exists, under one inode or under the next: a rename moves the one or the
/// other.
#[test]
fn a_source_that_is_replaced_meanwhile_can_still_be_renamed() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = Volume::open(device, VolumeOptions::default()).unwrap();
    let root = volume.root();
    for round in 0..500 {
        for name in [&b"source"[..], b"replacement", b"target"] {
            let made = volume.create(root, name, &FILE).unwrap().inode;
            volume.write(made, 0, &[round as u8; 20_000]).unwrap();
            volume.forget(made, 1);
        }
        let start = Arc::new(Barrier::new(2));
        let replacing = {
            let (volume, start) = (volume.clone(), Arc::clone(&start));
            thread::spawn("replace", move || {
                start.wait();
                volume.rename(
                    volume.root(),
                    b"replacement",
                    volume.root(),
                    b"source",
                    RenameMode::Replace,
                )
            })
        };
        start.wait();
        let moved = volume.rename(root, b"source", root, b"target", RenameMode::Replace);
        let replaced = replacing.join().expect("no panic");
        assert!(
            moved.is_ok() && replaced.is_ok(),
            "round {round}: moved {moved:?}, replaced {replaced:?}"
        );
        let target = volume.lookup(root, b"target").expect("it was moved there").inode;
        volume.forget(target, 1);
        volume.unlink(root, b"target").unwrap();
        match volume.unlink(root, b"source") {
            Ok(()) | Err(Error::NotFound) => {}
            Err(error) => panic!("round {round}: {error}"),
        }
    }
    volume.close().unwrap();
}

/// Neither what fills preallocated blocks nor what replaces data is counted on top of what is
/// allocated.
#[test]
fn delayed_data_is_counted_where_nothing_is_allocated() {
    let volume = volume();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    let blocks = || volume.attributes(file).unwrap().blocks_512 / 8;
    let write = |block: u64, blocks: usize| {
        volume.write(file, block * 4096, &vec![7; blocks * 4096]).unwrap()
    };
    volume
        .allocate(file, 10 * 4096, 100 * 4096, AllocateMode::Allocate { keep_size: true })
        .unwrap();
    assert_eq!(blocks(), 100);
    write(10, 50);
    assert_eq!(blocks(), 100);
    // Five blocks before the range and five in it, ten behind it, one of two far away.
    write(5, 10);
    write(110, 10);
    (0..2).for_each(|_| write(1000, 1));
    assert_eq!(blocks(), 116);
    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    assert_eq!(blocks(), 116);
    (0..116).for_each(|block| write(5 + block, 1));
    assert_eq!(blocks(), 117, "only block 120 is new");
    volume.commit().unwrap();
    assert_eq!(blocks(), 117);
    volume.close().unwrap();
}

#[test]
fn an_inode_is_found_by_its_number_as_long_as_it_has_a_name() {
    let volume = volume();
    let root = volume.root();
    let file = volume.create(root, b"file", &FILE).unwrap().inode;
    volume.forget(file, 1);
    assert_eq!(volume.lookup_inode(file).unwrap().inode, file);
    volume.unlink(root, b"file").unwrap();
    // It is in use, but cannot be had anew.
    assert!(volume.attributes(file).is_ok());
    assert!(matches!(volume.lookup_inode(file), Err(Error::NotFound)));
    volume.forget(file, 1);
    assert!(matches!(volume.attributes(file), Err(Error::NotFound)));
    assert_eq!(volume.lookup_inode(root).unwrap().inode, root);
    for number in [0, 2, 3, file.0 + 100, u64::MAX] {
        assert!(matches!(volume.lookup_inode(InodeId(number)), Err(Error::NotFound)), "{number}");
    }
    volume.close().unwrap();
}

#[test]
fn a_rename_can_leave_something_at_the_old_name() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let open = || {
        Volume::open(
            device.clone(),
            VolumeOptions { background: false, ..VolumeOptions::default() },
        )
        .unwrap()
    };
    let volume = open();
    let root = volume.root();
    let directory = NewInode { file_type: FileType::Directory, mode: 0o2755, gid: 77, ..FILE };
    let other = volume.create(root, b"other", &directory).unwrap().inode;
    for name in [&b"a"[..], b"b", b"kept"] {
        volume.create(root, name, &FILE).unwrap();
    }
    let [a, b, kept] =
        [&b"a"[..], b"b", b"kept"].map(|name| volume.lookup(root, name).unwrap().inode);
    let whiteout = NewInode { file_type: FileType::CharacterDevice, mode: 0, ..FILE };
    let leave = |from: (InodeId, &[u8]), to: (InodeId, &[u8]), mode| {
        volume.rename_leaving(from.0, from.1, to.0, to.1, mode, &whiteout)
    };
    leave((root, b"a"), (root, b"b"), RenameMode::Replace).unwrap();
    leave((root, b"b"), (other, b"new"), RenameMode::NoReplace).unwrap();
    assert!(matches!(
        leave((other, b"new"), (root, b"kept"), RenameMode::NoReplace),
        Err(Error::Exists)
    ));
    assert!(matches!(
        leave((other, b"new"), (root, b"kept"), RenameMode::Exchange),
        Err(Error::InvalidArgument(_))
    ));
    leave((other, b"new"), (other, b"last"), RenameMode::Replace).unwrap();
    let wrong =
        volume.rename_leaving(root, b"kept", other, b"moved", RenameMode::Replace, &directory);
    assert!(matches!(wrong, Err(Error::InvalidArgument(_))));
    let check = |volume: &Volume| {
        assert_eq!(volume.lookup(other, b"last").unwrap().inode, a);
        assert_eq!(volume.lookup(root, b"kept").unwrap().inode, kept);
        for (parent, name, gid) in [(root, &b"a"[..], 8), (root, b"b", 8), (other, b"new", 77)] {
            let left = volume.lookup(parent, name).unwrap();
            assert_eq!(
                (left.file_type, left.mode & 0o7777, left.device),
                (FileType::CharacterDevice, 0, 0)
            );
            assert_eq!(
                (left.links, left.uid, left.gid),
                (1, 7, gid),
                "{}",
                String::from_utf8_lossy(name)
            );
            volume.forget(left.inode, 1);
        }
    };
    check(&volume);
    volume.fsync_blocking(root, FsyncKind::Full).unwrap();
    // As after a power failure.
    drop(volume);
    let volume = open();
    check(&volume);
    assert!(matches!(volume.attributes(b), Err(Error::NotFound)));
    for (parent, name) in [(root, &b"a"[..]), (root, b"b"), (other, b"new"), (other, b"last")] {
        volume.unlink(parent, name).unwrap();
    }
    volume.remove_directory(root, b"other").unwrap();
    volume.close().unwrap();
}

/// The number of inodes is that of the tree, whatever was committed or replayed.
#[test]
fn inodes_are_counted() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let open = || {
        Volume::open(
            device.clone(),
            VolumeOptions { background: false, ..VolumeOptions::default() },
        )
        .unwrap()
    };
    let count = |volume: &Volume| volume.space().inodes;
    let volume = open();
    let root = volume.root();
    assert_eq!(count(&volume), 1, "the root");
    assert!(volume.space().inodes_available > 50_000);
    for number in 0..100 {
        let made = volume.create(root, format!("file {number}").as_bytes(), &FILE).unwrap().inode;
        volume.forget(made, 1);
        if number == 50 {
            volume.commit().unwrap();
        }
    }
    let held = volume.lookup(root, b"file 7").unwrap().inode;
    volume.forget(volume.link(held, root, b"link").unwrap().inode, 1);
    let unnamed = volume.create_unnamed(root, &FILE).unwrap().inode;
    assert_eq!(count(&volume), 102);
    for name in ["file 7", "link", "file 99", "file 3"] {
        volume.unlink(root, name.as_bytes()).unwrap();
    }
    assert_eq!(count(&volume), 100, "one without a name is in use");
    volume.rename(root, b"file 1", root, b"file 2", RenameMode::Replace).unwrap();
    volume.forget(unnamed, 1);
    assert_eq!(count(&volume), 98);
    volume.fsync_blocking(root, FsyncKind::Full).unwrap();
    // As after a power failure: the log says it, and the one that was in use has no name.
    drop(volume);
    let volume = open();
    assert_eq!(count(&volume), 97);
    volume.close().unwrap();
    let volume = open();
    assert_eq!(count(&volume), 97);
    volume.close().unwrap();
}
