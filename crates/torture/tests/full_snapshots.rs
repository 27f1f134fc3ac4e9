//! Space and deletion with snapshots: volumes are filled between snapshots, until what was removed
//! gives nothing back. Each deletion of a snapshot works then, and gives back all that only that
//! one had, also by power failures in the middle. Without snapshots the volume is as empty as it
//! was, each time.
//!
//! `CAIRN_FULL_SNAPSHOTS` sets the number of rounds: `CAIRN_FULL_SNAPSHOTS=500 scripts/test -p
//! cairn-torture --test full_snapshots`.
#[path = "full_snapshots/small.rs"]
mod small;

use cairn_blockdev::SimulatedDevice;
use cairn_engine::{Error, FsyncKind, InodeId, SnapshotInfo, Volume};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use cairn_torture::cleanups::{counts, delete_all};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{NEW_FILE, fill, format};
use cairn_torture::volume_snapshots::{FoundSnapshot, listed};
use cairn_torture::{number_from_environment, seed_from_environment};
use small::{
    DIRECTORY, VOLUME_BYTES, change_some, expect_used, files_in, open, remove_files, used,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

const ROUNDS: u64 = 5;
/// Snapshots of a round, at most.
const SNAPSHOTS: u64 = 8;
/// Snapshots of a volume with many.
const MANY_SNAPSHOTS: u64 = 300;
/// Threads that change files while snapshots are made; how many are made, and stay at once.
const CHANGERS: u64 = 3;
const SNAPSHOTS_BESIDE: u64 = 120;
const KEPT_BESIDE: usize = 4;

/// A volume, with the root directories of its subvolumes.
type Opened = (Volume, Vec<InodeId>);

/// The volume and the root directories of both subvolumes, with nothing under way in the
/// background.
fn open_again(volume: Volume, device: &Arc<SimulatedDevice>, background: bool) -> Opened {
    volume.close().expect("it closes");
    expect_clean(&**device).unwrap_or_else(|error| panic!("{error}"));
    let volume = open(device, background);
    let subvolume = volume.lookup(volume.root(), b"subvolume").expect("it exists").inode;
    let roots = vec![volume.root(), subvolume];
    (volume, roots)
}

/// A volume that has never a snapshot, but all that stays for ever once there was one.
fn start(background: bool) -> (Arc<SimulatedDevice>, (u64, u64)) {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device, background);
    let other = volume.create_subvolume(volume.root(), b"first", &DIRECTORY).expect("it fits");
    for root in [volume.root(), other.inode] {
        volume.create_snapshot(root, b"first").expect("it fits");
    }
    delete_all(&volume).expect("they are not held");
    volume.remove_subvolume(volume.root(), b"first").expect("it exists");
    let before = used(&volume, &device);
    volume.close().expect("it closes");
    (device, before)
}

/// Fills a volume with snapshots of two subvolumes in between; their root directories.
fn fill_between_snapshots(volume: &Volume, random: &mut Seeded) -> Vec<InodeId> {
    let new = volume.create_subvolume(volume.root(), b"subvolume", &DIRECTORY).expect("it fits");
    let roots = vec![volume.root(), new.inode];
    let snapshots = 2 + random.below(SNAPSHOTS - 1);
    for number in 0..snapshots {
        // Files of several lengths, some of which go or change later.
        for file in 0..4 + random.below(20) {
            let directory = roots[random.below(2) as usize];
            let name = format!("{number}-{file}").into_bytes();
            let Ok(made) = volume.create(directory, &name, &NEW_FILE) else { break };
            let written = volume.write(made.inode, 0, &vec![3; 1 + random.below(150_000) as usize]);
            volume.forget(made.inode, 1);
            if written.is_err() {
                break;
            }
        }
        change_some(volume, &roots, random);
        let root = roots[random.below(2) as usize];
        let name = format!("snapshot {number}").into_bytes();
        match volume.create_snapshot(root, &name) {
            Ok(info) if random.chance(1, 5) => {
                volume.hold_snapshot(info.subvolume, &name, true).expect("it exists");
            }
            Ok(_) | Err(Error::NoSpace) => {}
            Err(error) => panic!("making a snapshot: {error}"),
        }
        change_some(volume, &roots, random);
    }
    fill(volume, &roots, 99, random);
    let space = volume.space();
    assert!(space.available_blocks < space.total_blocks / 10, "{space:?} is not full");
    roots
}

/// All snapshots, as their subvolumes and names.
fn all_snapshots(volume: &Volume) -> Vec<(u64, Vec<u8>)> {
    let subvolumes = volume.snapshotted_subvolumes().expect("they can be listed");
    let of = |id| volume.snapshots(id).expect("they can be listed").into_iter();
    subvolumes.into_iter().flat_map(|id| of(id).map(move |info| (id, info.name))).collect()
}

/// By generation, the blocks that only one snapshot holds.
fn alone(volume: &Volume, subvolume: u64) -> BTreeMap<u64, u64> {
    let usage = volume.snapshot_usage(subvolume).expect("it can be read");
    usage.into_iter().map(|one| (one.generation, one.unique_blocks)).collect()
}

/// Deletes all snapshots in a random order, some of them at once. Each deletion works, and gives
/// back what only the deleted snapshots have. The files in `changing` change in between: what died
/// meanwhile enters lists that deletions before have read. Nothing may go on with these changes in
/// the background. Where each deletion stands in the device's history.
fn delete_each(
    volume: &Volume,
    changing: &[InodeId],
    device: &SimulatedDevice,
    random: &mut Seeded,
) -> Vec<Range<usize>> {
    let (mut left, mut deletions) = (all_snapshots(volume), Vec::new());
    while !left.is_empty() {
        let mut chosen = Vec::new();
        for _ in 0..(1 + random.below(3)).min(left.len() as u64) {
            chosen.push(left.swap_remove(random.below(left.len() as u64) as usize));
        }
        let mut generations = Vec::new();
        for (subvolume, name) in &chosen {
            let info = volume.snapshot_named(*subvolume, name).expect("it is listed");
            generations.push((*subvolume, info.generation));
            if info.is_held {
                let refused = volume.delete_snapshot(*subvolume, name);
                assert!(matches!(refused, Err(Error::Busy)), "{refused:?}");
                volume.hold_snapshot(*subvolume, name, false).expect("releasing needs no space");
            }
        }
        let before = used(volume, device).0;
        let alone = |(subvolume, generation): &(u64, u64)| alone(volume, *subvolume)[generation];
        let alone: u64 = generations.iter().map(alone).sum();
        let begin = device.history_len();
        delete_at_once(volume, &chosen);
        deletions.push(begin..device.history_len());
        let after = used(volume, device).0;
        let shown = |(of, name): &(u64, Vec<u8>)| format!("{of}/{}", String::from_utf8_lossy(name));
        let chosen: Vec<String> = chosen.iter().map(shown).collect();
        assert!(
            after + alone <= before,
            "{before} blocks were in use, {alone} of them only by {chosen:?}, and then {after}"
        );
        change_some(volume, changing, random);
    }
    deletions
}

/// Deletes these snapshots by as many threads, each of which tries all, from another one on.
fn delete_at_once(volume: &Volume, chosen: &[(u64, Vec<u8>)]) {
    let delete = |first: usize| {
        let (volume, mut chosen) = (volume.clone(), chosen.to_vec());
        chosen.rotate_left(first);
        thread::spawn("deleting", move || {
            let delete = |(subvolume, name): &(u64, Vec<u8>)| {
                match volume.delete_snapshot(*subvolume, name) {
                    Ok(()) => true,
                    // Another thread was earlier.
                    Err(Error::NotFound) => false,
                    Err(error) => panic!("deleting works on a full volume: {error}"),
                }
            };
            chosen.iter().filter(|one| delete(one)).count()
        })
    };
    let threads: Vec<_> = (0..chosen.len()).map(delete).collect();
    let deleted = threads.into_iter().map(|thread| thread.join().expect("no panic"));
    assert_eq!(deleted.sum::<usize>(), chosen.len(), "each is deleted once");
}

/// Removes all that was made on a volume; nothing may be refused.
fn remove_all(volume: &Volume, roots: &[InodeId]) {
    remove_files(volume, roots).expect("removing works without snapshots");
    volume.forget(roots[1], 1);
    volume.remove_subvolume(volume.root(), b"subvolume").expect("it has no snapshots");
}

fn fills_and_deletes(background: bool) {
    let mut random = Seeded::new(seed_from_environment());
    let (device, before) = start(background);
    for round in 0..number_from_environment("CAIRN_FULL_SNAPSHOTS").unwrap_or(ROUNDS) {
        let volume = open(&device, background);
        let roots = fill_between_snapshots(&volume, &mut random);
        if random.chance(1, 2) {
            match remove_files(&volume, &roots) {
                Ok(()) | Err(Error::NoSpace) => {}
                Err(error) => panic!("round {round}, removing files: {error}"),
            }
        }
        let (volume, roots) = if random.chance(1, 2) {
            let (volume, roots) = open_again(volume, &device, background);
            let changing = if background { &[][..] } else { &roots };
            delete_each(&volume, changing, &device, &mut random);
            (volume, roots)
        } else {
            delete_all(&volume).expect("deleting works on a full volume");
            // In the middle of it.
            open_again(volume, &device, background)
        };
        used(&volume, &device);
        remove_all(&volume, &roots);
        expect_used(&volume, &device, before, &format!("round {round}"));
        volume.close().expect("it closes");
        expect_clean(&*device).unwrap_or_else(|error| panic!("round {round}: {error}"));
        let counts = counts(&*device).unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert_eq!((counts.snapshots, counts.cleanups, counts.dead_runs), (0, 0, 0));
    }
}

#[test]
fn deleting_snapshots_gives_all_back() {
    fills_and_deletes(false);
}

#[test]
fn the_same_with_background_work() {
    fills_and_deletes(true);
}

/// The power fails at points of the deletions on a full volume.
#[test]
fn a_deletion_that_was_interrupted_gives_all_back() {
    let mut random = Seeded::new(seed_from_environment());
    let (device, before) = start(false);
    let volume = open(&device, false);
    let roots = fill_between_snapshots(&volume, &mut random);
    match remove_files(&volume, &roots) {
        Ok(()) | Err(Error::NoSpace) => {}
        Err(error) => panic!("removing files: {error}"),
    }
    volume.sync().expect("what write accepted has its space");
    device.start_recording();
    let deletions = delete_each(&volume, &roots, &device, &mut random);
    volume.close().expect("it closes");
    let mut explorer = device.explorer();
    let (events, mut interrupted) = (explorer.history_len(), 0);
    let mut points: Vec<usize> =
        (0..20).map(|_| random.below(events as u64 + 1) as usize).collect();
    // The deletion itself is the first commit, and the last one ends its cleanup.
    points.extend((0..10).map(|_| {
        let chosen = &deletions[random.below(deletions.len() as u64) as usize];
        chosen.end - random.below(chosen.len() as u64 / 2 + 1) as usize
    }));
    points.sort_unstable();
    for point in points {
        explorer.advance_to(point);
        let state = Arc::new(explorer.state(&mut random));
        let when = format!("after {point} of {events} events");
        expect_clean(&*state).unwrap_or_else(|error| panic!("{when}: {error}"));
        let counts = counts(&*state).unwrap_or_else(|error| panic!("{when}: {error}"));
        interrupted += u32::from(counts.cleanups > 0);
        let volume = open(&state, random.chance(1, 2));
        delete_all(&volume).expect("deleting works on a full volume");
        let volume = if random.chance(1, 2) {
            // Again in the middle.
            volume.close().expect("it closes");
            open(&state, false)
        } else {
            volume
        };
        used(&volume, &state);
        let subvolume = volume.lookup(volume.root(), b"subvolume").expect("it exists").inode;
        remove_all(&volume, &[volume.root(), subvolume]);
        expect_used(&volume, &state, before, &when);
        volume.close().expect("it closes");
        expect_clean(&*state).unwrap_or_else(|error| panic!("{when}: {error}"));
    }
    eprintln!("{interrupted} of 30 states have a deletion that was interrupted");
    assert!(interrupted > 0, "no state has a deletion that was interrupted");
}

/// Each snapshot holds what it held when it was made, while others come and go.
#[test]
fn hundreds_of_snapshots_keep_what_they_have() {
    let mut random = Seeded::new(seed_from_environment());
    let (device, before) = start(false);
    let mut volume = open(&device, false);
    let new = volume.create_subvolume(volume.root(), b"subvolume", &DIRECTORY).expect("it fits");
    let mut roots = vec![volume.root(), new.inode];
    let mut lives: BTreeMap<(u64, Vec<u8>), u64> = BTreeMap::new();
    let read = |volume: &Volume, info| {
        FoundSnapshot::read(volume, info).expect("a snapshot can be read").digest
    };
    let mut made = 0;
    while made < MANY_SNAPSHOTS || !lives.is_empty() {
        let is_growing = made < MANY_SNAPSHOTS;
        if is_growing {
            let root = roots[random.below(2) as usize];
            for file in 0..random.below(3) {
                let name = format!("{made}-{file}").into_bytes();
                let new = volume.create(root, &name, &NEW_FILE).expect("it fits").inode;
                let data = vec![3; 1 + random.below(20_000) as usize];
                volume.write(new, 0, &data).expect("it fits");
                volume.forget(new, 1);
            }
            change_some(&volume, &roots, &mut random);
            let name = format!("snapshot {made}").into_bytes();
            made += 1;
            match volume.create_snapshot(root, &name) {
                Ok(info) => {
                    let key = (info.subvolume, name);
                    let others = lives.keys().filter(|(id, _)| *id == info.subvolume);
                    if let Some((id, name)) = others.max_by_key(|_| random.next_u64()) {
                        let other = volume.snapshot_named(*id, name).expect("it exists");
                        volume.differences(other.root, info.root).expect("both are whole");
                    }
                    let digest = read(&volume, info);
                    lives.insert(key, digest);
                }
                Err(Error::NoSpace) => {}
                Err(error) => panic!("making a snapshot: {error}"),
            }
        }
        let is_full = volume.space().available_blocks < 1200;
        for _ in 0..if is_full { 8 } else { u64::from(!is_growing || random.chance(1, 3)) } {
            let keys: Vec<_> = lives.keys().cloned().collect();
            if keys.is_empty() {
                break;
            }
            let key = &keys[random.below(keys.len() as u64) as usize];
            let info = volume.snapshot_named(key.0, &key.1).expect("it exists");
            assert_eq!(read(&volume, info), lives[key], "{key:?}");
            volume.delete_snapshot(key.0, &key.1).expect("it is not held");
            lives.remove(key);
        }
        if random.chance(1, 30) {
            (volume, roots) = open_again(volume, &device, false);
            for info in listed(&volume).expect("they can be listed") {
                let life = lives[&(info.subvolume, info.name.clone())];
                assert_eq!(read(&volume, info), life);
            }
        }
    }
    remove_all(&volume, &roots);
    expect_used(&volume, &device, before, "at the end");
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
}

/// Changes files of its own until `done`.
fn change_until(volume: &Volume, directory: InodeId, done: &AtomicBool, mut random: Seeded) {
    for number in 0_u64.. {
        if done.load(Ordering::Acquire) {
            break;
        }
        if files_in(volume, directory).len() < 6 {
            let name = format!("{number}").into_bytes();
            let Ok(new) = volume.create(directory, &name, &NEW_FILE) else { continue };
            let written = volume.write(new.inode, 0, &vec![7; 60_000]);
            volume.forget(new.inode, 1);
            assert!(matches!(written, Ok(()) | Err(Error::NoSpace)), "{written:?}");
        }
        change_some(volume, &[directory], &mut random);
        for (_, inode) in files_in(volume, directory) {
            if random.chance(1, 4) {
                volume.fsync_blocking(inode, FsyncKind::Full).expect("it is healthy");
            }
        }
    }
}

/// What dies while a cut makes a snapshot is that snapshot's, or no snapshot's; and a crash that
/// undoes a deletion finds what the snapshot had, whatever was written and fsynced since.
#[test]
fn snapshots_beside_changes_keep_what_they_have() {
    let mut random = Seeded::new(seed_from_environment());
    let (device, before) = start(false);
    let volume = open(&device, true);
    device.start_recording();
    let root = volume.root();
    let done = Arc::new(AtomicBool::new(false));
    let directories: Vec<InodeId> = (0..CHANGERS)
        .map(|number| format!("directory {number}").into_bytes())
        .map(|name| volume.create(root, &name, &DIRECTORY).expect("it fits").inode)
        .collect();
    let changers: Vec<_> = directories
        .iter()
        .map(|directory| {
            let (volume, directory, done) = (volume.clone(), *directory, Arc::clone(&done));
            let random = Seeded::new(random.next_u64());
            thread::spawn("changer", move || change_until(&volume, directory, &done, random))
        })
        .collect();
    let (mut lives, mut points) = (Vec::<(SnapshotInfo, u64)>::new(), BTreeSet::new());
    let digest = |info| FoundSnapshot::read(&volume, info).expect("it can be read").digest;
    for number in 0..SNAPSHOTS_BESIDE {
        let name = format!("snapshot {number}").into_bytes();
        match volume.create_snapshot(root, &name) {
            Ok(info) => {
                if let Some((other, _)) = lives.first() {
                    volume.differences(other.root, info.root).expect("both are whole");
                }
                lives.push((info.clone(), digest(info)));
            }
            Err(Error::NoSpace) => {}
            Err(error) => panic!("making a snapshot: {error}"),
        }
        while lives.len() > KEPT_BESIDE {
            let newest = lives.len() - 1;
            let chosen =
                if random.chance(1, 2) { newest } else { random.below(newest as u64) as usize };
            let (info, life) = lives.remove(chosen);
            assert_eq!(digest(info.clone()), life, "{info:?}");
            let begin = device.history_len();
            volume.delete_snapshot(info.subvolume, &info.name).expect("it is not held");
            let events = (device.history_len() - begin) as u64;
            points.extend((0..2).map(|_| begin + random.below(events + 1) as usize));
        }
    }
    done.store(true, Ordering::Release);
    changers.into_iter().for_each(|changer| changer.join().expect("no panic"));
    lives.into_iter().for_each(|(info, life)| assert_eq!(digest(info.clone()), life, "{info:?}"));
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
    let mut explorer = device.explorer();
    for point in points {
        explorer.advance_to(point);
        let state = explorer.state(&mut random);
        expect_clean(&state).unwrap_or_else(|error| panic!("after {point} events: {error}"));
    }
    let volume = open(&device, false);
    delete_all(&volume).expect("they are not held");
    remove_files(&volume, &directories).expect("removing works without snapshots");
    for number in 0..CHANGERS {
        let name = format!("directory {number}").into_bytes();
        volume.remove_directory(volume.root(), &name).expect("it is empty");
    }
    expect_used(&volume, &device, before, "at the end");
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
}
