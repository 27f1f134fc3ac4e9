//! Snapshots: what they show, that nothing changes it, and that a deleted one gives its space back,
//! in histories of random changes with crashes in between.
mod small_volume;

use cairn_blockdev::MemoryDevice;
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FsyncKind, InodeId, RenameMode, Volume, VolumeOptions,
    XattrMode,
};
use cairn_environment::random::Seeded;
use small_volume::history::History;
use small_volume::{DIRECTORY, FILE, FIRST, device, get, open, open_with, put, used};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An empty volume, and how many blocks of it are in use: the trees that snapshots need stay.
fn volume_that_had_a_snapshot() -> (Arc<MemoryDevice>, Volume, u64) {
    let device = device();
    let volume = open(&device, None);
    volume.create_snapshot(volume.root(), b"first").unwrap();
    volume.delete_snapshot(FIRST, b"first").unwrap();
    let before = used(&volume);
    (device, volume, before)
}

fn numbered(number: u64) -> Vec<u8> {
    number.to_string().into_bytes()
}

#[test]
fn a_snapshot_shows_what_was_there() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let directory = volume.create(root, b"directory", &DIRECTORY).unwrap().inode;
    let file = put(&volume, directory, b"file", &[1; 10_000]);
    volume.set_xattr(file, b"user.key", b"value", XattrMode::Any).unwrap();
    put(&volume, root, b"gone", b"soon");
    let made = volume.create_snapshot(root, b"one").unwrap();
    assert_eq!((made.subvolume, &made.name[..], made.is_held), (FIRST, &b"one"[..], false));
    assert!(matches!(volume.create_snapshot(root, b"one"), Err(Error::Exists)));
    assert!(matches!(volume.create_snapshot(directory, b"x"), Err(Error::InvalidArgument(_))));
    assert!(matches!(volume.create_snapshot(made.root, b"x"), Err(Error::InvalidArgument(_))));
    volume.write(file, 5000, &[2; 100]).unwrap();
    volume.set_xattr(file, b"user.key", b"other", XattrMode::Any).unwrap();
    volume.unlink(root, b"gone").unwrap();
    volume.rename(directory, b"file", root, b"moved", RenameMode::Replace).unwrap();
    volume.sync().unwrap();
    let check = |volume: &Volume, snapshot: InodeId| {
        assert_eq!(get(volume, snapshot, b"gone").unwrap(), b"soon");
        assert!(matches!(get(volume, snapshot, b"moved"), Err(Error::NotFound)));
        let directory = volume.lookup(snapshot, b"directory").unwrap().inode;
        assert_eq!(volume.parent(directory).unwrap(), snapshot);
        assert_eq!(get(volume, directory, b"file").unwrap(), [1; 10_000]);
        let file = volume.lookup(directory, b"file").unwrap().inode;
        assert_eq!(volume.get_xattr(file, b"user.key").unwrap(), b"value");
        assert_eq!(volume.subvolume_of(file).unwrap(), (FIRST, false));
        assert_eq!(volume.lookup_inode(file).unwrap().inode, file);
        file
    };
    let old = check(&volume, made.root);
    assert_ne!(old, file);
    volume.close().unwrap();
    let volume = open(&device, None);
    let found = volume.snapshot_named(FIRST, b"one").unwrap();
    assert_eq!(found, made);
    assert_eq!(volume.snapshots(FIRST).unwrap(), [found]);
    assert_eq!(volume.snapshotted_subvolumes().unwrap(), [FIRST]);
    assert!(matches!(volume.snapshots(900), Err(Error::NotFound)));
    assert_eq!(check(&volume, made.root), old);
    assert_eq!(get(&volume, volume.root(), b"moved").unwrap()[5000..5100], [2; 100]);
}

#[test]
fn nothing_changes_a_snapshot() {
    let device = device();
    let volume = open(&device, None);
    put(&volume, volume.root(), b"file", &[1; 10_000]);
    let root = volume.create_snapshot(volume.root(), b"one").unwrap().root;
    let file = volume.lookup(root, b"file").unwrap().inode;
    let size = AttributeChange { size: Some(3), ..AttributeChange::default() };
    let mode = AttributeChange { mode: Some(0o600), ..AttributeChange::default() };
    let results = [
        volume.create(root, b"new", &FILE).map(drop),
        volume.create_subvolume(root, b"new", &DIRECTORY).map(drop),
        volume.unlink(root, b"file"),
        volume.remove_directory(root, b"file"),
        volume.rename(root, b"file", root, b"other", RenameMode::Replace),
        volume.link(file, root, b"link").map(drop),
        volume.write(file, 0, b"new").map(drop),
        volume.set_attributes(file, &size).map(drop),
        volume.set_attributes(file, &mode).map(drop),
        volume.set_xattr(file, b"user.key", b"value", XattrMode::Any),
        volume.remove_xattr(file, b"user.key"),
        volume.allocate(file, 0, 100_000, AllocateMode::Allocate { keep_size: false }),
        volume.allocate(file, 0, 4096, AllocateMode::PunchHole),
        volume.allocate(file, 0, 4096, AllocateMode::ZeroRange { keep_size: false }),
    ];
    for (index, result) in results.into_iter().enumerate() {
        assert!(matches!(result, Err(Error::ReadOnly)), "{index}: {result:?}");
    }
    // There is nothing to write.
    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    volume.fsync_blocking(root, FsyncKind::Full).unwrap();
    assert_eq!(get(&volume, root, b"file").unwrap(), [1; 10_000]);
    assert_eq!(volume.attributes(file).unwrap().size_bytes, 10_000);
    volume.close().unwrap();
}

#[test]
fn a_deleted_snapshot_gives_back_what_only_it_had() {
    let (_device, volume, before) = volume_that_had_a_snapshot();
    let root = volume.root();
    let file = put(&volume, root, b"file", &[1; 400_000]);
    volume.forget(file, 1);
    let made = volume.create_snapshot(root, b"one").unwrap();
    volume.hold_snapshot(FIRST, b"one", true).unwrap();
    assert!(volume.snapshot_named(FIRST, b"one").unwrap().is_held);
    assert!(matches!(volume.delete_snapshot(FIRST, b"one"), Err(Error::Busy)));
    volume.hold_snapshot(FIRST, b"one", false).unwrap();
    volume.unlink(root, b"file").unwrap();
    assert!(used(&volume) > before + 98);
    let usage = volume.snapshot_usage(FIRST).unwrap();
    assert_eq!((usage.len(), usage[0].generation), (1, made.generation));
    assert!((98..120).contains(&usage[0].unique_blocks), "{usage:?}");
    let file = volume.lookup(made.root, b"file").unwrap().inode;
    volume.delete_snapshot(FIRST, b"one").unwrap();
    let mut content = Vec::new();
    assert!(matches!(volume.read(file, 0, 100, &mut content), Err(Error::Stale)));
    assert!(matches!(volume.lookup(made.root, b"file"), Err(Error::Stale)));
    assert!(matches!(volume.delete_snapshot(FIRST, b"one"), Err(Error::NotFound)));
    assert_eq!(used(&volume), before);
    volume.close().unwrap();
}

#[test]
fn a_subvolume_with_snapshots_can_not_be_removed() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let sub = volume.create_subvolume(root, b"sub", &DIRECTORY).unwrap().inode;
    let (id, _) = volume.subvolume_of(sub).unwrap();
    put(&volume, sub, b"file", &[1; 40_000]);
    volume.create_snapshot(sub, b"one").unwrap();
    assert!(matches!(volume.remove_subvolume(root, b"sub"), Err(Error::Busy)));
    volume.unlink(sub, b"file").unwrap();
    volume.delete_snapshot(id, b"one").unwrap();
    volume.remove_subvolume(root, b"sub").unwrap();
    volume.close().unwrap();

    // Also while another thread frees what the snapshot had.
    let volume = open_with(&device, VolumeOptions::default());
    for round in 0..20 {
        let sub = volume.create_subvolume(root, b"sub", &DIRECTORY).unwrap().inode;
        let (id, _) = volume.subvolume_of(sub).unwrap();
        for file in 0..20 {
            put(&volume, sub, &numbered(file), &[1; 40_000]);
        }
        volume.create_snapshot(sub, b"one").unwrap();
        for file in 0..20 {
            volume.unlink(sub, &numbered(file)).unwrap();
        }
        volume.create_snapshot(sub, b"two").unwrap();
        volume.delete_snapshot(id, [b"one", b"two"][round % 2]).unwrap();
        assert!(matches!(volume.remove_subvolume(root, b"sub"), Err(Error::Busy)));
        volume.delete_snapshot(id, [b"two", b"one"][round % 2]).unwrap();
        volume.remove_subvolume(root, b"sub").unwrap();
    }
    volume.close().unwrap();
}

/// As many blocks as one write of the test below changes.
const BLOCKS: usize = 5;

/// The versions of a file's blocks, as its writer put them there.
fn versions(content: &[u8]) -> Vec<u64> {
    let version = |block: &[u8]| u64::from_le_bytes(block[..8].try_into().unwrap());
    content.chunks(4096).map(version).collect()
}

/// Ends the writers, also when a test fails.
struct Stop<'a>(&'a [[AtomicU64; 3]]);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|shared| shared[2].store(1, Ordering::Release));
    }
}

/// A writer gives its file new versions; beside it others are made and removed.
fn write_versions(volume: &Volume, file: InodeId, seed: u64, shared: &[AtomicU64; 3]) {
    let [begun, done, stop] = shared;
    let mut random = Seeded::new(seed);
    for version in 1.. {
        if stop.load(Ordering::Acquire) > 0 {
            return;
        }
        begun.store(version, Ordering::Release);
        let block: Vec<u8> = version.to_le_bytes().repeat(512);
        volume.write(file, 0, &block.repeat(BLOCKS)).unwrap();
        done.store(version, Ordering::Release);
        if random.below(4) == 0 {
            volume.fsync_blocking(file, FsyncKind::Full).unwrap();
        }
        let name = format!("{}-{}", file.0, random.below(8)).into_bytes();
        let made = volume.create(volume.root(), &name, &FILE);
        match made {
            Ok(made) => {
                volume.write(made.inode, 0, &vec![1; random.below(20_000) as usize]).unwrap();
                volume.forget(made.inode, 1);
            }
            Err(_) => volume.unlink(volume.root(), &name).unwrap(),
        }
    }
}

#[test]
fn a_snapshot_has_what_was_complete_before_it() {
    const WRITERS: usize = 3;
    let device = device();
    let volume = open_with(&device, VolumeOptions::default());
    let root = volume.root();
    let name = |writer: usize| format!("writer-{writer}").into_bytes();
    let files: Vec<_> =
        (0..WRITERS).map(|writer| put(&volume, root, &name(writer), &[0; BLOCKS * 4096])).collect();
    let shared: Vec<[AtomicU64; 3]> = (0..WRITERS).map(|_| Default::default()).collect();
    let read = |root: InodeId| -> Vec<Vec<u8>> {
        (0..WRITERS).map(|writer| get(&volume, root, &name(writer)).unwrap()).collect()
    };
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (volume, file, shared) = (&volume, files[writer], &shared[writer]);
            scope.spawn(move || write_versions(volume, file, writer as u64, shared));
        }
        let _stop = Stop(&shared);
        let mut kept = Vec::new();
        for round in 0..200_u64 {
            let load =
                |which: usize| shared.iter().map(move |one| one[which].load(Ordering::Acquire));
            let done: Vec<_> = load(1).collect();
            let made = volume.create_snapshot(root, &numbered(round)).unwrap();
            let begun: Vec<_> = load(0).collect();
            let content = read(made.root);
            for writer in 0..WRITERS {
                let found = versions(&content[writer]);
                let range = done[writer]..=begun[writer];
                assert_eq!(found.len(), BLOCKS);
                assert!(found.iter().all(|one| range.contains(one)), "{found:?} in {range:?}");
            }
            kept.push((made, content));
            if kept.len() > 5 {
                let (old, content) = kept.remove(round as usize % 3);
                assert!(read(old.root) == content, "{old:?} has changed");
                volume.delete_snapshot(FIRST, &old.name).unwrap();
            }
        }
        for (old, content) in kept {
            assert!(read(old.root) == content, "{old:?} has changed");
        }
    });
    volume.close().unwrap();
}

/// Deleting works on a full volume; so does removing files, although nothing becomes free.
#[test]
fn a_full_volume_of_snapshots_can_be_emptied() {
    let (_device, volume, before) = volume_that_had_a_snapshot();
    let root = volume.root();
    let (mut made, mut snapshots) = (0_u64, 0_u64);
    'full: loop {
        for _ in 0..20 {
            let Ok(file) = volume.create(root, &numbered(made), &FILE) else { break 'full };
            made += 1;
            let written = volume.write(file.inode, 0, &[made as u8; 50_000]);
            volume.forget(file.inode, 1);
            if written.is_err() || volume.sync().is_err() {
                break 'full;
            }
        }
        match volume.create_snapshot(root, &numbered(snapshots)) {
            Ok(_) => snapshots += 1,
            Err(Error::NoSpace) => break 'full,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(snapshots > 10 && made > 200, "{snapshots} {made}");
    // Whatever else is missing, this is the reason.
    let oldest = volume.snapshot_named(FIRST, b"0").unwrap();
    let file = volume.lookup(oldest.root, b"0").unwrap().inode;
    assert!(matches!(volume.write(file, 0, &[0; 9000]), Err(Error::ReadOnly)));
    let mode = AllocateMode::Allocate { keep_size: false };
    assert!(matches!(volume.allocate(file, 0, 90_000, mode), Err(Error::ReadOnly)));
    assert!(matches!(volume.create(oldest.root, b"new", &FILE), Err(Error::ReadOnly)));
    for file in 0..made {
        volume.unlink(root, &numbered(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    }
    volume.commit().unwrap();
    for snapshot in 0..snapshots {
        let name = numbered(snapshot * 7 % snapshots);
        let deleted = volume.delete_snapshot(FIRST, &name);
        // The number may not be coprime.
        assert!(matches!(deleted, Ok(()) | Err(Error::NotFound)), "{snapshot}: {deleted:?}");
    }
    for snapshot in volume.snapshots(FIRST).unwrap() {
        volume.delete_snapshot(FIRST, &snapshot.name).unwrap();
    }
    assert_eq!(used(&volume), before);
    volume.close().unwrap();
}

#[test]
fn random_histories_keep_their_snapshots() {
    let seed = std::env::var("CAIRN_SEED").map_or(1, |seed| seed.parse().unwrap());
    for run in 0..12 {
        eprintln!("seed {seed}, run {run}");
        let mut history = History::new(seed * 1000 + run);
        let mut before = None;
        if run % 2 == 0 {
            history.volume.create_snapshot(history.volume.root(), b"first").unwrap();
            history.volume.delete_snapshot(FIRST, b"first").unwrap();
            before = Some((used(&history.volume), history.volume.space().inodes));
        }
        for step in 0..300 {
            match history.random.below(40) {
                0 | 1 => history.take_snapshot(),
                2 => history.delete_snapshot(),
                3 => history.volume.commit().unwrap(),
                4 if history.random.below(3) == 0 => history.open_again(step % 2 == 0),
                5 => history.volume.sync().unwrap(),
                6 => history.compare_all(),
                _ => history.change_a_file(),
            }
        }
        history.compare_all();
        history.open_again(false);
        history.compare_all();
        while !history.snapshots.is_empty() {
            history.delete_snapshot();
            history.compare_all();
        }
        history.files.remove_all(&history.volume);
        history.compare_all();
        if let Some(before) = before {
            let now = (used(&history.volume), history.volume.space().inodes);
            assert_eq!(now, before, "blocks in use, and inodes");
        }
        history.volume.close().unwrap();
    }
}
