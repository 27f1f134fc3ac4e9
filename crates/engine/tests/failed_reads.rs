//! A device of which one read fails, at each read of an operation on snapshots: what the operation
//! did not do is as it was, what it did is as promised, and nothing waits for the next mount
//! but the blocks of a snapshot that is deleted.
mod small_volume;

use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{Error, InodeId, Result, SnapshotInfo, Volume, VolumeOptions};
use cairn_environment::atomic::{AtomicBool, Ordering};
use small_volume::{DIRECTORY, get, put, used};
use std::sync::Arc;

/// So many that the trees have inner nodes.
const FILES: u32 = 300;
/// No operation here reads as often.
const READS_MAX: u64 = 1000;

/// Bytes of nodes in memory.
fn usual_cache() -> u64 {
    VolumeOptions::default().node_cache_bytes
}

/// Opens it with a cache of nodes as large as usual.
fn open(device: &Arc<SimulatedDevice>) -> Volume {
    open_with(device, usual_cache())
}

fn open_with(device: &Arc<SimulatedDevice>, node_cache_bytes: u64) -> Volume {
    let options = VolumeOptions { background: false, node_cache_bytes, ..VolumeOptions::default() };
    Volume::open(Arc::clone(device) as Arc<dyn BlockDevice>, options).unwrap()
}

fn find(volume: &Volume, name: &[u8]) -> Result<InodeId> {
    let inode = volume.lookup(volume.root(), name)?.inode;
    volume.forget(inode, 1);
    Ok(inode)
}

/// The subvolume `home` with the snapshots `first` and `then`, opened anew: nothing is in memory.
fn prepared(cache_bytes: u64) -> (Arc<SimulatedDevice>, Volume) {
    let device = Arc::new(SimulatedDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let volume = open(&device);
    let home = volume.create_subvolume(volume.root(), b"home", &DIRECTORY).unwrap().inode;
    volume.create_subvolume(home, b"nested", &DIRECTORY).unwrap();
    for number in 0..FILES {
        put(&volume, home, format!("file {number}").as_bytes(), b"old");
    }
    volume.create_snapshot(home, b"first").unwrap();
    put(&volume, home, b"another", b"");
    volume.create_snapshot(home, b"then").unwrap();
    for number in 0..FILES {
        let file = volume.lookup(home, format!("file {number}").as_bytes()).unwrap().inode;
        volume.write(file, 0, b"new").unwrap();
    }
    volume.sync().unwrap();
    volume.close().unwrap();
    (device.clone(), open_with(&device, cache_bytes))
}

fn expect_content(volume: &Volume, root: InodeId, content: &[u8]) {
    for number in 0..FILES {
        assert_eq!(get(volume, root, format!("file {number}").as_bytes()).unwrap(), content);
    }
}

/// Each snapshot that is listed can be read; their names.
fn readable_snapshots(volume: &Volume) -> Vec<Vec<u8>> {
    let (id, _) = volume.subvolume_of(find(volume, b"home").unwrap()).unwrap();
    let names = volume.snapshots(id).unwrap().into_iter().map(|snapshot| snapshot.name);
    names
        .inspect(|name| {
            let root = volume.snapshot_named(id, name).unwrap().root;
            expect_content(volume, root, b"old");
        })
        .collect()
}

/// When the last block is free that an operation frees.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Freed {
    AtOnce,
    /// If the read failed for the thread that frees them.
    NextMount,
}

/// Has the read fail that comes after `good` ones; whether one has failed.
fn fail_one_read(device: &SimulatedDevice, good: u64) -> Arc<AtomicBool> {
    let (mut left, mut has_failed) = (good, false);
    let failed = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&failed);
    device.fail_when(move |request| {
        let fails = request.operation == Operation::Read && !has_failed && left == 0;
        left -= u64::from(request.operation == Operation::Read && left > 0);
        has_failed |= fails;
        told.fetch_or(fails, Ordering::Relaxed);
        fails
    });
    failed
}

/// Has each read of `operation` fail in turn; `check` looks at the volume after each failure.
fn at_each_read<T: std::fmt::Debug>(
    cache_bytes: u64,
    operation: impl Fn(&Volume) -> Result<T>,
    freed: Freed,
    check: impl Fn(&Volume, &Result<T>),
) {
    let mut failures = 0;
    for good in 0..READS_MAX {
        let (device, volume) = prepared(cache_bytes);
        let failed = fail_one_read(&device, good);
        let done = operation(&volume);
        device.clear_failures();
        if !failed.load(Ordering::Relaxed) {
            done.unwrap();
            assert!(failures > 0, "nothing was read");
            return;
        }
        failures += u64::from(done.is_err());
        // A commit in the background may just have met the failed read.
        match volume.sync().and_then(|()| volume.commit()) {
            Ok(()) => {
                check(&volume, &done);
                let blocks = used(&volume);
                volume.close().unwrap();
                let volume = open(&device);
                assert!(used(&volume) == blocks || Freed::NextMount == freed, "{done:?}");
            }
            // A commit could not be made: all goes on with the next mount.
            Err(_) => {
                drop(volume.close());
                readable_snapshots(&open(&device));
            }
        }
    }
    panic!("more than {READS_MAX} reads");
}

#[test]
fn a_snapshot_that_could_not_be_deleted_can_be_read() {
    let delete = |volume: &Volume| {
        let (id, _) = volume.subvolume_of(find(volume, b"home")?)?;
        volume.delete_snapshot(id, b"first")
    };
    at_each_read(usual_cache(), delete, Freed::NextMount, |volume, done| {
        let names = readable_snapshots(volume);
        assert!(names.len() == 2 || done.is_ok() || names == [b"then"], "{names:?}");
        if names.len() == 2 {
            delete(volume).unwrap();
        }
        assert_eq!(readable_snapshots(volume), [b"then"]);
    });
}

/// Of so many snapshots with long names, the items fill several nodes.
const SNAPSHOTS: u64 = 60;

/// No node stays in memory, so a deletion reads between its steps, too: what comes before and after
/// the snapshot may stand in other nodes.
#[test]
fn a_snapshot_that_is_listed_can_be_read() {
    let device = Arc::new(SimulatedDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let volume = open(&device);
    let home = volume.create_subvolume(volume.root(), b"home", &DIRECTORY).unwrap().inode;
    let (id, _) = volume.subvolume_of(home).unwrap();
    let name = |number| format!("{number:0250}").into_bytes();
    let made = (0..SNAPSHOTS).map(|number| volume.create_snapshot(home, &name(number)).unwrap());
    let made: Vec<SnapshotInfo> = made.collect();
    volume.close().unwrap();
    let mut failures = 0;
    for snapshot in &made {
        for good in 0..READS_MAX {
            let volume = open_with(&device, 0);
            volume.attributes(snapshot.root).unwrap();
            let failed = fail_one_read(&device, good);
            let deleted = volume.delete_snapshots(id, &[snapshot.generation]);
            device.clear_failures();
            // In a commit, a failed read stops the volume, and the deletion is in memory only.
            if volume.commit().is_ok() && deleted.is_err() {
                failures += 1;
                volume.attributes(snapshot.root).unwrap();
            }
            drop(volume.close());
            if deleted.is_ok() {
                break;
            }
            assert!(failed.load(Ordering::Relaxed), "{deleted:?}");
        }
    }
    assert!(failures > 0, "nothing was read");
}

#[test]
fn a_fork_has_its_name_or_leaves_it_free() {
    let caches = [usual_cache(), 0];
    for (of_snapshot, cache_bytes) in
        caches.iter().flat_map(|bytes| [(false, *bytes), (true, *bytes)])
    {
        let fork = |volume: &Volume| {
            let home = find(volume, b"home")?;
            let source = match of_snapshot {
                true => volume.snapshot_named(volume.subvolume_of(home)?.0, b"then")?.root,
                false => home,
            };
            volume.fork(source, volume.root(), b"fork")
        };
        at_each_read(cache_bytes, fork, Freed::AtOnce, |volume, _| {
            match find(volume, b"fork") {
                Ok(_) => {}
                Err(Error::NotFound) => drop(fork(volume).unwrap()),
                Err(error) => panic!("{error}"),
            }
            let found = find(volume, b"fork").unwrap();
            expect_content(volume, found, if of_snapshot { b"old" } else { b"new" });
            volume.remove_subvolume(volume.root(), b"fork").unwrap();
            assert!(matches!(find(volume, b"fork"), Err(Error::NotFound)));
            readable_snapshots(volume);
        });
    }
}

#[test]
fn a_rollback_is_done_or_leaves_nothing() {
    let roll_back = |volume: &Volume| {
        let (id, _) = volume.subvolume_of(find(volume, b"home")?)?;
        let snapshot = volume.snapshot_named(id, b"then")?.root;
        volume.rollback(volume.root(), b"home", snapshot)
    };
    at_each_read(usual_cache(), roll_back, Freed::AtOnce, |volume, done| {
        let home = find(volume, b"home").unwrap();
        match find(volume, b"home~before-rollback-1") {
            Ok(old) => {
                expect_content(volume, home, b"old");
                expect_content(volume, old, b"new");
            }
            Err(error) => {
                assert!(matches!(error, Error::NotFound) && done.is_err(), "{error} {done:?}");
                expect_content(volume, home, b"new");
            }
        }
        readable_snapshots(volume);
    });
}

/// Neither a read of the request nor one of the removal stops the volume, also where no node stays
/// in memory; the next mount ends what is left.
#[test]
fn a_subvolume_that_could_not_be_removed_is_whole_or_goes_later() {
    for cache_bytes in [usual_cache(), 0] {
        let mut failures = [0; 2];
        for good in 0..READS_MAX {
            let device = Arc::new(SimulatedDevice::new(64 << 20));
            mkfs(&*device, &MkfsOptions::default()).unwrap();
            let volume = open_with(&device, cache_bytes);
            volume.create_subvolume(volume.root(), b"other", &DIRECTORY).unwrap();
            let before = used(&volume);
            let plain = volume.create_subvolume(volume.root(), b"plain", &DIRECTORY).unwrap().inode;
            for number in 0..FILES {
                put(&volume, plain, format!("file {number}").as_bytes(), b"old");
            }
            volume.close().unwrap();
            let volume = open_with(&device, cache_bytes);
            let failed = fail_one_read(&device, good);
            let removed = volume.remove_subvolume(volume.root(), b"plain");
            device.clear_failures();
            let has_failed = failed.load(Ordering::Relaxed);
            if let Err(error) = volume.sync().and_then(|()| volume.commit()) {
                // A commit could not be made, for which some node has left memory.
                assert!(cache_bytes == 0 && !error.to_string().contains("halfway"), "{error}");
                drop(volume.close());
                continue;
            }
            failures[usize::from(removed.is_ok())] += u32::from(has_failed);
            match removed {
                Ok(()) => assert!(matches!(find(&volume, b"plain"), Err(Error::NotFound))),
                Err(_) => {
                    expect_content(&volume, find(&volume, b"plain").unwrap(), b"old");
                    volume.remove_subvolume(volume.root(), b"plain").unwrap();
                }
            }
            volume.close().unwrap();
            let volume = open_with(&device, cache_bytes);
            assert_eq!(used(&volume), before, "read {good}");
            volume.close().unwrap();
            if !has_failed {
                break;
            }
        }
        assert!(failures.iter().all(|count| *count > 0), "{failures:?}");
    }
}
