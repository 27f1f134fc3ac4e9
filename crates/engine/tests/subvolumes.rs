//! Subvolumes: inodes of their own, names like directories, removal in the background, and what a
//! crash at each point leaves.
mod small_volume;

use cairn_blockdev::BlockDevice;
use cairn_engine::{Error, FileType, FsyncKind, InodeId, RenameMode, Volume, VolumeOptions};
use small_volume::{DIRECTORY, FILE, FIRST, device, get, open, put, used};
use std::sync::Arc;

#[test]
fn a_subvolume_is_a_directory_with_inodes_of_its_own() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let made = volume.create_subvolume(root, b"sub", &DIRECTORY).unwrap();
    assert_eq!((made.file_type, made.links, made.mode & 0o777), (FileType::Directory, 2, 0o755));
    assert_eq!(volume.attributes(root).unwrap().links, 3);
    assert!(matches!(volume.create_subvolume(root, b"sub", &DIRECTORY), Err(Error::Exists)));
    put(&volume, made.inode, b"inside", b"of the subvolume");
    let nested = volume.create(made.inode, b"directory", &DIRECTORY).unwrap().inode;
    put(&volume, nested, b"deep", b"deeper");
    let inner = volume.create_subvolume(nested, b"inner", &DIRECTORY).unwrap().inode;
    put(&volume, inner, b"innermost", b"third tree");
    assert_eq!(volume.parent(inner).unwrap(), nested);
    assert_eq!(volume.parent(made.inode).unwrap(), root);
    let infos = volume.subvolumes().unwrap();
    assert_eq!((made.inode.0, inner.0), (1 << 44 | 1, 2 << 44 | 1));
    let told: Vec<_> =
        infos.iter().map(|info| (info.id, info.parent, info.is_default, info.is_dying)).collect();
    assert_eq!(told, [(256, 256, true, false), (257, 256, false, false), (258, 257, false, false)]);
    assert_eq!(volume.subvolume_of(inner).unwrap(), (258, true));
    volume.close().unwrap();

    let volume = open(&device, None);
    // As an NFS server finds it by a handle.
    assert_eq!(volume.lookup_inode(inner).unwrap().inode, inner);
    assert!(matches!(volume.lookup_inode(InodeId(77 << 44 | 1)), Err(Error::NotFound)));
    let sub = volume.lookup(volume.root(), b"sub").unwrap().inode;
    let nested = volume.lookup(sub, b"directory").unwrap().inode;
    let inner = volume.lookup(nested, b"inner").unwrap().inode;
    assert_eq!((sub.0, inner.0), (1 << 44 | 1, 2 << 44 | 1));
    assert_eq!(get(&volume, sub, b"inside").unwrap(), b"of the subvolume");
    assert_eq!(get(&volume, inner, b"innermost").unwrap(), b"third tree");
    assert_eq!(volume.parent(inner).unwrap(), nested);
    let mut names = Vec::new();
    volume
        .read_directory_plus(nested, 0, &mut |item, attributes| {
            names.push((item.name.to_vec(), item.inode == attributes.inode, item.file_type));
            true
        })
        .unwrap();
    names.sort_by(|one, other| one.0.cmp(&other.0));
    assert_eq!(
        names,
        [
            (b"deep".to_vec(), true, FileType::Regular),
            (b"inner".to_vec(), true, FileType::Directory)
        ]
    );
    volume.close().unwrap();

    // Shown at the root, it has no way up, and its inodes are the same.
    let volume = open(&device, Some(257));
    assert_eq!(get(&volume, volume.root(), b"inside").unwrap(), b"of the subvolume");
    assert_eq!(volume.parent(volume.root()).unwrap(), volume.root());
    volume.set_default_subvolume(257).unwrap();
    assert!(matches!(volume.set_default_subvolume(900), Err(Error::NotFound)));
    volume.close().unwrap();
    let volume = open(&device, None);
    assert_eq!(get(&volume, volume.root(), b"inside").unwrap(), b"of the subvolume");
    let missing = Volume::open(
        Arc::clone(&device) as Arc<dyn BlockDevice>,
        VolumeOptions { subvolume: Some(300), ..VolumeOptions::default() },
    );
    assert!(matches!(missing, Err(Error::NoSubvolume(300))));
}

#[test]
fn names_of_subvolumes_move_like_directories() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let sub = volume.create_subvolume(root, b"sub", &DIRECTORY).unwrap().inode;
    let other = volume.create_subvolume(root, b"other", &DIRECTORY).unwrap().inode;
    let folder = volume.create(root, b"folder", &DIRECTORY).unwrap().inode;
    let file = put(&volume, sub, b"file", b"content");
    let rename = |from: InodeId, name: &[u8], to: InodeId, new: &[u8], mode| {
        volume.rename(from, name, to, new, mode)
    };
    use RenameMode::{Exchange, Replace};
    assert!(matches!(rename(sub, b"file", root, b"file", Replace), Err(Error::CrossDevice)));
    assert!(matches!(rename(root, b"other", root, b"folder", Exchange), Err(Error::CrossDevice)));
    assert!(matches!(rename(root, b"folder", root, b"other", Replace), Err(Error::NotEmpty)));
    assert!(matches!(volume.link(file, root, b"link"), Err(Error::CrossDevice)));
    rename(root, b"other", folder, b"moved", Replace).unwrap();
    assert_eq!(volume.parent(other).unwrap(), folder);
    assert_eq!(volume.attributes(root).unwrap().links, 4);
    assert_eq!(volume.attributes(folder).unwrap().links, 3);
    // Over an empty directory, as a directory.
    volume.create(root, b"empty", &DIRECTORY).unwrap();
    rename(folder, b"moved", root, b"empty", Replace).unwrap();
    // Into another subvolume, and not into itself or below.
    let inside = volume.create(sub, b"inside", &DIRECTORY).unwrap().inode;
    rename(root, b"empty", inside, b"other", Replace).unwrap();
    assert_eq!(volume.parent(other).unwrap(), inside);
    assert_eq!(volume.attributes(inside).unwrap().links, 3);
    assert!(matches!(rename(root, b"sub", other, b"sub", Replace), Err(Error::InvalidArgument(_))));
    assert!(matches!(rename(root, b"sub", sub, b"sub", Replace), Err(Error::InvalidArgument(_))));
    assert!(matches!(volume.remove_subvolume(root, b"sub"), Err(Error::NotEmpty)));
    let parent = volume.subvolumes().unwrap().iter().find(|info| info.id == 258).unwrap().parent;
    assert_eq!(parent, 257);
    rename(inside, b"other", root, b"empty", RenameMode::NoReplace).unwrap();
    volume.fsync_blocking(root, FsyncKind::Full).unwrap();
    drop(volume);
    let volume = open(&device, None);
    let moved = volume.lookup(volume.root(), b"empty").unwrap().inode;
    assert_eq!(volume.parent(moved).unwrap(), volume.root());
    assert_eq!(volume.subvolume_of(moved).unwrap(), (258, true));
}

#[test]
fn what_a_removed_subvolume_held_is_free_again() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    // The tree of subvolumes stays.
    volume.create_subvolume(root, b"first", &DIRECTORY).unwrap();
    volume.remove_subvolume(root, b"first").unwrap();
    let before = used(&volume);
    let inodes = volume.space().inodes;
    let sub = volume.create_subvolume(root, b"sub", &DIRECTORY).unwrap().inode;
    for index in 0..300_u32 {
        put(&volume, sub, format!("file-{index}").as_bytes(), &[7; 9000]);
    }
    volume.sync().unwrap();
    let open_file = put(&volume, sub, b"open", b"dirty");
    assert!(used(&volume) > before + 600);
    let inner = volume.create_subvolume(sub, b"inner", &DIRECTORY).unwrap().inode;
    assert!(matches!(volume.remove_subvolume(root, b"sub"), Err(Error::NotEmpty)));
    volume.remove_directory(sub, b"inner").unwrap();
    assert!(matches!(volume.attributes(inner), Err(Error::Stale)));
    assert!(matches!(volume.remove_directory(root, b"sub"), Err(Error::NotEmpty)));
    assert!(matches!(volume.unlink(root, b"sub"), Err(Error::IsDirectory)));
    volume.remove_subvolume(root, b"sub").unwrap();
    assert!(matches!(volume.lookup(root, b"sub"), Err(Error::NotFound)));
    assert!(matches!(volume.write(open_file, 0, b"late"), Err(Error::Stale)));
    assert!(matches!(volume.create(sub, b"late", &FILE), Err(Error::Stale)));
    volume.sync().unwrap();
    assert_eq!((used(&volume), volume.space().inodes), (before, inodes));
    assert_eq!(volume.attributes(root).unwrap().links, 2);
    assert_eq!(volume.subvolumes().unwrap().len(), 1);
    volume.forget(open_file, 1);
    volume.close().unwrap();
}

/// Whoever holds an id of a removed one must not meet another one, and space for numbers is finite.
#[test]
fn the_number_of_a_removed_subvolume_is_used_again_after_the_next_mount() {
    let device = device();
    let number = |inode: InodeId| inode.0 >> 44;
    let volume = open(&device, None);
    let make = |volume: &Volume, name: &[u8]| {
        number(volume.create_subvolume(volume.root(), name, &DIRECTORY).unwrap().inode)
    };
    assert_eq!([make(&volume, b"a"), make(&volume, b"b"), make(&volume, b"c")], [1, 2, 3]);
    volume.remove_subvolume(volume.root(), b"b").unwrap();
    assert_eq!(make(&volume, b"d"), 4);
    drop(volume);
    let volume = open(&device, None);
    volume.lookup(volume.root(), b"c").unwrap();
    volume.remove_subvolume(volume.root(), b"c").unwrap();
    assert_eq!([make(&volume, b"e"), make(&volume, b"f")], [2, 5]);
}

/// A number that is used again may be below those of the subvolumes above.
#[test]
fn a_subvolume_is_made_in_one_with_a_higher_number() {
    let device = device();
    let volume = open(&device, None);
    for name in [b"a", b"b", b"c"] {
        volume.create_subvolume(volume.root(), name, &DIRECTORY).unwrap();
    }
    volume.remove_subvolume(volume.root(), b"a").unwrap();
    volume.close().unwrap();
    let volume = open(&device, None);
    let c = volume.lookup(volume.root(), b"c").unwrap().inode;
    let x = volume.create_subvolume(c, b"x", &DIRECTORY).unwrap().inode;
    assert!(x < c);
    put(&volume, x, b"file", b"content");
    volume.rename(c, b"x", volume.root(), b"y", RenameMode::Replace).unwrap();
    volume.rename(volume.root(), b"y", c, b"x", RenameMode::NoReplace).unwrap();
    assert_eq!(get(&volume, x, b"file").unwrap(), b"content");
}

/// Whatever clients do to one another's subvolumes, the volume goes on.
#[test]
fn moves_meet_removals() {
    const ROUNDS: u64 = 800;
    let device = device();
    let options = VolumeOptions::default();
    let volume = Volume::open(Arc::clone(&device) as Arc<dyn BlockDevice>, options).unwrap();
    let root = volume.root();
    volume.create_subvolume(root, b"wanderer", &DIRECTORY).unwrap();
    let removed = |name: &'static [u8]| {
        let volume = volume.clone();
        move || {
            for _ in 0..ROUNDS {
                if let Ok(made) = volume.create_subvolume(root, name, &DIRECTORY) {
                    let _ = volume.create(made.inode, b"file", &FILE);
                }
                match volume.remove_subvolume(root, name) {
                    Ok(()) | Err(Error::NotEmpty | Error::NotFound) => {}
                    Err(error) => panic!("removing: {error}"),
                }
            }
        }
    };
    let moved = || {
        let volume = volume.clone();
        move || {
            for round in 0..4 * ROUNDS {
                let name: &[u8] = if round % 2 == 0 { b"one" } else { b"two" };
                let Ok(there) = volume.lookup(root, name) else { continue };
                let moves = [
                    (root, &b"wanderer"[..], there.inode, &b"inside"[..]),
                    (there.inode, b"inside", root, b"wanderer"),
                ];
                for (from, old, to, new) in moves {
                    match volume.rename(from, old, to, new, RenameMode::NoReplace) {
                        Ok(()) | Err(Error::NotFound | Error::Stale | Error::Exists) => {}
                        Err(error) => panic!("moving: {error}"),
                    }
                }
                volume.forget(there.inode, 1);
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(removed(b"one"));
        scope.spawn(removed(b"two"));
        scope.spawn(moved());
        scope.spawn(moved());
    });
    volume.sync().unwrap();
    let known = volume.subvolumes().unwrap();
    assert_eq!(known.iter().filter(|info| !info.is_dying && info.id == 257).count(), 1);
    assert!(volume.paths_of_subvolumes().unwrap().contains_key(&257));
    volume.close().unwrap();
}

#[test]
fn the_default_subvolume_can_not_be_removed() {
    let device = device();
    let volume = open(&device, None);
    volume.create_subvolume(volume.root(), b"sub", &DIRECTORY).unwrap();
    volume.set_default_subvolume(257).unwrap();
    assert!(matches!(volume.remove_subvolume(volume.root(), b"sub"), Err(Error::Busy)));
    volume.set_default_subvolume(256).unwrap();
    volume.remove_subvolume(volume.root(), b"sub").unwrap();
}

#[test]
fn an_fsync_in_a_subvolume_that_no_superblock_has_is_durable() {
    let device = device();
    let volume = open(&device, None);
    let sub = volume.create_subvolume(volume.root(), b"sub", &DIRECTORY).unwrap().inode;
    let file = put(&volume, sub, b"file", b"synced");
    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    let beside = put(&volume, volume.root(), b"beside", b"synced, too");
    volume.fsync_blocking(beside, FsyncKind::Full).unwrap();
    // As a crash.
    drop(volume);
    let volume = open(&device, None);
    let sub = volume.lookup(volume.root(), b"sub").unwrap().inode;
    assert_eq!(get(&volume, sub, b"file").unwrap(), b"synced");
    assert_eq!(get(&volume, volume.root(), b"beside").unwrap(), b"synced, too");
}

#[test]
fn what_was_logged_of_the_first_subvolume_is_replayed_where_another_is_shown() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let other = volume.create_subvolume(root, b"other", &DIRECTORY).unwrap().inode;
    let other = volume.subvolume_of(other).unwrap().0;
    volume.commit().unwrap();
    let file = put(&volume, root, b"file", b"logged");
    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    drop(volume);
    drop(open(&device, Some(other)));
    let volume = open(&device, None);
    assert_eq!(get(&volume, volume.root(), b"file").unwrap(), b"logged");
}

#[test]
fn snapshots_of_the_first_subvolume_are_deleted_where_another_is_shown() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let other = volume.create_subvolume(root, b"other", &DIRECTORY).unwrap().inode;
    let other = volume.subvolume_of(other).unwrap().0;
    let file = put(&volume, root, b"file", &[1; 200_000]);
    volume.create_snapshot(root, b"one").unwrap();
    volume.write(file, 0, &[2; 200_000]).unwrap();
    volume.fork(root, root, b"fork").unwrap();
    volume.close().unwrap();
    let volume = open(&device, Some(other));
    let before = used(&volume);
    volume.delete_snapshot(FIRST, b"one").unwrap();
    let after = used(&volume);
    assert!(after + 40 < before, "{before} blocks were in use, {after} are");
    assert!(matches!(volume.root_of_subvolume(FIRST), Err(Error::NotFound)));
    volume.close().unwrap();
    let volume = open(&device, None);
    assert_eq!(get(&volume, volume.root(), b"file").unwrap(), [2; 200_000]);
    assert!(volume.snapshots(FIRST).unwrap().is_empty());
    // Of what only a fork keeps, too.
    volume.remove_subvolume(volume.root(), b"fork").unwrap();
}
