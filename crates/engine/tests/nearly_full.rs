//! What a full volume must still do.
use cairn_blockdev::MemoryDevice;
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, FsyncKind, InodeId, NewInode, RenameMode,
    Volume, VolumeOptions, XattrMode, mkfs,
};
use cairn_environment::random::Seeded;
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };

fn volume(bytes: u64) -> (Arc<MemoryDevice>, Volume) {
    let device = Arc::new(MemoryDevice::new(bytes));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = open(&device).unwrap();
    (device, volume)
}

fn open(device: &Arc<MemoryDevice>) -> Result<Volume, Error> {
    Volume::open(device.clone(), VolumeOptions { background: false, ..VolumeOptions::default() })
}

fn fill(volume: &Volume, file: InodeId) -> u64 {
    let mut end = 0;
    let mut step = 1 << 20;
    while step >= 4096 {
        match volume.allocate(file, end, step, AllocateMode::Allocate { keep_size: false }) {
            Ok(()) => end += step,
            Err(Error::NoSpace) => step /= 2,
            Err(error) => panic!("{error}"),
        }
    }
    // What allocate leaves: block by block, as long as a writer gets one.
    let data = vec![7; 4096];
    loop {
        match volume.write(file, end, &data) {
            Ok(()) => end += 4096,
            Err(Error::NoSpace) => break,
            Err(error) => panic!("{error}"),
        }
    }
    end
}

/// A write was accepted, so it has its space: fsync must not report that there is none.
#[test]
fn scattered_pages_accepted_on_a_nearly_full_volume_can_be_written() {
    let (_device, volume) = volume(64 << 20);
    let root = volume.root();
    for i in 0..400 {
        volume.create(root, format!("some file {i}").as_bytes(), &FILE).unwrap();
    }
    let a = volume.create(root, b"a", &FILE).unwrap().inode;
    let b = volume.create(root, b"b", &FILE).unwrap().inode;
    let end = fill(&volume, b);
    volume.sync().unwrap();
    volume
        .set_attributes(
            b,
            &AttributeChange { size: Some(end - 140 * 4096), ..AttributeChange::default() },
        )
        .unwrap();
    volume.commit().unwrap();
    // Each takes one block of data and one node: they fit, so nothing is reclaimed.
    let accepted = 20;
    for i in 0..accepted {
        volume.write(a, i * 16 * 4096, b"scattered").unwrap();
    }
    let synced = volume.fsync_blocking(a, FsyncKind::Full);
    assert!(
        synced.is_ok(),
        "{accepted} writes were accepted, then fsync: {synced:?}; {:?}",
        volume.space()
    );
    volume.close().unwrap();
}

fn deleting_frees_space(bytes: u64) {
    let (device, volume) = volume(bytes);
    let root = volume.root();
    let file = volume.create(root, b"big", &FILE).unwrap().inode;
    let end = fill(&volume, file);
    let before = volume.space().available_blocks;
    volume.unlink(root, b"big").unwrap();
    volume.forget(file, 1);
    volume.commit().unwrap();
    let after = volume.space().available_blocks;
    drop(volume);
    let again = open(&device);
    assert!(again.is_ok(), "mounting after deleting on a full volume: {:?}", again.err());
    assert!(
        after > before + end / 4096 / 2,
        "{bytes}: a file of {end} bytes was deleted; available blocks before {before}, after {after}"
    );
}

#[test]
fn deleting_frees_space_on_a_full_volume_of_16_mib() {
    deleting_frees_space(16 << 20);
}

#[test]
fn deleting_frees_space_on_a_full_volume_of_32_mib() {
    deleting_frees_space(32 << 20);
}

#[test]
fn deleting_frees_space_on_a_full_volume_of_64_mib() {
    deleting_frees_space(64 << 20);
}

/// Random writes to random files at random fill levels, each step's acceptance a promise: fsync
/// stores it, or the write said no.
#[test]
fn what_write_accepted_fsync_stores_at_any_level() {
    for seed in 0..12 {
        let (device, volume) = volume(48 << 20);
        let mut random = Seeded::new(seed);
        let root = volume.root();
        let filler = volume.create(root, b"filler", &FILE).unwrap().inode;
        let end = fill(&volume, filler);
        // From the brim to a few MiB below it.
        let freed = random.below(if seed % 3 == 0 { 64 } else { 1500 }) * 4096;
        volume
            .set_attributes(
                filler,
                &AttributeChange {
                    size: Some(end.saturating_sub(freed)),
                    ..AttributeChange::default()
                },
            )
            .unwrap();
        let (mut files, mut refused) = (Vec::<(InodeId, Vec<u8>)>::new(), 0);
        for number in 0..12 {
            match volume.create(root, format!("file {number}").as_bytes(), &FILE) {
                Ok(made) => files.push((made.inode, Vec::new())),
                Err(error) => {
                    assert!(matches!(error, Error::NoSpace), "{error}");
                    refused += 1;
                }
            }
        }
        for step in 0..300_u64 {
            // Names may take a part of the reserve: what writeback needs of it stays.
            if seed % 2 == 1 {
                match volume.create(root, format!("name {step}").as_bytes(), &FILE) {
                    Ok(made) => volume.forget(made.inode, 1),
                    Err(error) => assert!(matches!(error, Error::NoSpace), "{error}"),
                }
            }
            let Some(index) =
                (!files.is_empty()).then(|| random.below(files.len() as u64) as usize)
            else {
                break;
            };
            let (inode, content) = &mut files[index];
            let (at, length) = (random.below(1 << 20) as usize, 1 + random.below(20_000) as usize);
            let data = vec![step as u8 | 1; length];
            match volume.write(*inode, at as u64, &data) {
                Ok(()) => {
                    content.resize(content.len().max(at + length), 0);
                    content[at..at + length].copy_from_slice(&data);
                }
                Err(error) => {
                    assert!(matches!(error, Error::NoSpace), "{error}");
                    refused += 1;
                }
            }
            if random.chance(1, 20) {
                volume
                    .fsync_blocking(*inode, FsyncKind::Full)
                    .unwrap_or_else(|error| panic!("seed {seed}, step {step}: {error}"));
            }
        }
        for (inode, _) in &files {
            volume
                .fsync_blocking(*inode, FsyncKind::Full)
                .unwrap_or_else(|error| panic!("seed {seed}, in the end: {error}"));
        }
        assert!(refused > 0 || freed > 64 * 4096, "seed {seed}: the volume was not nearly full");
        // As after a power failure.
        drop(volume);
        let volume = open(&device).unwrap();
        for (inode, content) in &files {
            let mut read = Vec::new();
            volume.read(*inode, 0, content.len() + 1, &mut read).unwrap();
            assert!(read == *content, "seed {seed}: a file holds other bytes than were accepted");
        }
        volume.close().unwrap();
    }
}

fn open_with_background(device: &Arc<MemoryDevice>) -> Volume {
    Volume::open(device.clone(), VolumeOptions::default()).expect("it opens")
}

/// One name of each kind, and an attribute; what the attempt did.
fn make_names(volume: &Volume, files: InodeId, number: usize) -> Result<(), Error> {
    let root = volume.root();
    let name = |kind: &str| format!("{kind} {number}").into_bytes();
    let made = volume.create(root, &name("empty"), &FILE)?.inode;
    volume.forget(made, 1);
    volume.set_xattr(made, b"user.color", b"green", XattrMode::Any)?;
    let symlink = NewInode { file_type: FileType::Symlink, target: Some(b"somewhere"), ..FILE };
    volume.forget(volume.create(root, &name("symlink"), &symlink)?.inode, 1);
    volume.forget(volume.link(made, root, &name("link"))?.inode, 1);
    volume.rename(root, &name("link"), files, &name("renamed"), RenameMode::Replace)
}

/// Removes everything, as `rm -rf` does.
fn remove_all(volume: &Volume, directory: InodeId) -> usize {
    let mut entries = Vec::new();
    let mut take = |entry: cairn_engine::DirectoryItem<'_>| {
        entries.push((entry.name.to_vec(), entry.inode, entry.file_type));
        true
    };
    volume.read_directory(directory, 0, &mut take).unwrap();
    let mut removed = 0;
    for (name, inode, file_type) in
        entries.into_iter().filter(|(name, _, _)| name != b"." && name != b"..")
    {
        if file_type == FileType::Directory {
            removed += remove_all(volume, inode);
            volume
                .remove_directory(directory, &name)
                .expect("removing works on a volume full of names");
        } else {
            volume.unlink(directory, &name).expect("removing works on a volume full of names");
        }
        removed += 1;
    }
    removed
}

/// Data has all of the volume but the reserve: names get a part of that, and all can be removed
/// again.
fn a_full_volume_takes_names(bytes: u64, rounds: usize, close: bool) {
    let (device, volume) = volume(bytes);
    drop(volume);
    let volume = open_with_background(&device);
    let root = volume.root();
    let empty = volume.space().available_blocks;
    let directory = NewInode { file_type: FileType::Directory, ..FILE };
    let files = volume.create(root, b"files", &directory).unwrap().inode;
    let big = volume.create(root, b"big", &FILE).unwrap().inode;
    let end = fill(&volume, big);
    volume.sync().unwrap();
    for number in 0..rounds {
        make_names(&volume, files, number).unwrap_or_else(|error| {
            panic!("{bytes}, round {number}: {error}; {:?}", volume.space())
        });
        let more = volume.write(big, end, &[7; 4096]);
        assert!(matches!(more, Err(Error::NoSpace)), "the reserve is not for data: {more:?}");
    }
    // To the last name.
    let mut number = rounds;
    loop {
        match make_names(&volume, files, number) {
            Ok(()) => number += 1,
            Err(Error::NoSpace) => break,
            Err(error) => panic!("{bytes}, round {number}: {error}"),
        }
    }
    volume.fsync_blocking(big, FsyncKind::Full).expect("what was accepted has its space");
    if close {
        volume.close().unwrap();
    }
    // Otherwise as after a power failure.
    drop(volume);
    let volume = open_with_background(&device);
    let size = volume.attributes(big).unwrap().size_bytes;
    assert_eq!(size, end);
    volume
        .set_attributes(
            big,
            &AttributeChange {
                size: Some(size / 2),
                mode: Some(0o600),
                ..AttributeChange::default()
            },
        )
        .unwrap();
    let removed = remove_all(&volume, root);
    assert!(removed > 3 * rounds, "{removed} names, {number} rounds");
    volume.close().unwrap();
    drop(volume);
    let volume = open_with_background(&device);
    let left = volume.space().available_blocks;
    assert!(
        left + 64 >= empty,
        "{bytes}: {empty} blocks were available, after all was removed {left}"
    );
    volume.close().unwrap();
}

#[test]
fn a_full_volume_of_64_mib_takes_names() {
    a_full_volume_takes_names(64 << 20, 100, true);
}

#[test]
fn a_full_volume_of_128_mib_takes_names() {
    a_full_volume_takes_names(128 << 20, 1000, true);
}

#[test]
fn a_volume_full_of_names_survives_a_crash() {
    a_full_volume_takes_names(128 << 20, 1000, false);
}

/// Data, and what may be large, is refused on a full volume, again and again, before and after
/// names: the reserve is for names and small attributes alone.
#[test]
fn only_names_and_small_attributes_take_from_the_reserve() {
    let (device, volume) = volume(128 << 20);
    drop(volume);
    let volume = open_with_background(&device);
    let root = volume.root();
    let file = volume.create(root, b"file", &FILE).unwrap().inode;
    let end = fill(&volume, file);
    volume.sync().unwrap();
    let large = vec![7; 5000];
    for number in 0..20 {
        let name = |kind: &str| format!("{kind} {number}").into_bytes();
        let (directory, fifo) = (
            NewInode { file_type: FileType::Directory, ..FILE },
            NewInode { file_type: FileType::Fifo, ..FILE },
        );
        let made = volume.create(root, &name("made"), &FILE).expect("a file").inode;
        for new in [
            &directory,
            &fifo,
            &NewInode { file_type: FileType::Symlink, target: Some(&large[..3000]), ..FILE },
        ] {
            volume.forget(
                volume
                    .create(root, &name(&format!("{:?}", new.file_type)), new)
                    .expect("a name")
                    .inode,
                1,
            );
        }
        volume.forget(volume.link(made, root, &name("link")).expect("a link").inode, 1);
        volume
            .rename(root, &name("link"), root, &name("moved"), RenameMode::Replace)
            .expect("a rename");
        let whiteout = NewInode { file_type: FileType::CharacterDevice, mode: 0, ..FILE };
        let left = volume.rename_leaving(
            root,
            &name("moved"),
            root,
            &name("again"),
            RenameMode::Replace,
            &whiteout,
        );
        left.expect("a rename that leaves something");
        volume.set_xattr(made, b"user.small", b"green", XattrMode::Any).expect("a small attribute");
        let refused = [
            ("a large attribute", volume.set_xattr(made, b"user.large", &large, XattrMode::Any)),
            (
                "an attribute that grows",
                volume.set_xattr(made, b"user.small", &large, XattrMode::Replace),
            ),
            ("data", volume.write(made, 0, &large)),
            ("data at an end", volume.write(file, end, &large)),
            (
                "preallocation",
                volume.allocate(made, 0, 1 << 20, AllocateMode::Allocate { keep_size: true }),
            ),
        ];
        for (what, result) in refused {
            assert!(matches!(result, Err(Error::NoSpace)), "round {number}, {what}: {result:?}");
        }
        volume.forget(made, 1);
    }
    volume.close().unwrap();
}

/// Small volumes have a small reserve: how many names fit is not promised, that all can be removed
/// is.
#[test]
fn a_small_volume_full_of_names_can_be_emptied() {
    for bytes in [16 << 20, 24 << 20, 32 << 20, 48 << 20] {
        a_full_volume_takes_names(bytes, 0, true);
        a_full_volume_takes_names(bytes, 0, false);
    }
}

/// Of a tree that a snapshot has, removals get a part of the reserve that names leave.
#[test]
fn a_file_that_no_snapshot_has_is_removed_when_no_name_fits_any_more() {
    let (_device, volume) = volume(128 << 20);
    let root = volume.root();
    let directory = NewInode { file_type: FileType::Directory, mode: 0o755, ..FILE };
    let live = volume.create_subvolume(root, b"live", &directory).unwrap().inode;
    for number in 0..200 {
        let name = format!("old {number}");
        let file = volume.create(live, name.as_bytes(), &FILE).unwrap().inode;
        volume.write(file, 0, &[3; 4096]).unwrap();
    }
    volume.create_snapshot(live, b"old").unwrap();
    let new = volume.create(live, b"new", &FILE).unwrap().inode;
    volume.write(new, 0, &[4; 4096]).unwrap();
    volume.forget(new, 1);
    let large = volume.create(root, b"large", &FILE).unwrap().inode;
    fill(&volume, large);
    volume.sync().unwrap();
    for number in 0.. {
        match volume.create(root, format!("name {number}").as_bytes(), &directory) {
            Ok(made) => volume.forget(made.inode, 1),
            Err(Error::NoSpace) => break,
            Err(error) => panic!("{error}"),
        }
    }
    volume.unlink(live, b"new").unwrap();
    volume.close().unwrap();
}
