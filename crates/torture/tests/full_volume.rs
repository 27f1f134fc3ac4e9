//! A volume that is full: errors instead of aborts, deletion always works, and the space comes
//! back.
use cairn_blockdev::{BlockDevice, MemoryDevice, Operation, SimulatedDevice};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{Error, FileType, FsyncKind, NewInode, Volume, VolumeOptions};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use cairn_format::Geometry;
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{create, expect_files, format};
use cairn_torture::seed_from_environment;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

#[path = "full_volume/giving_back.rs"]
mod giving_back;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };

type Files = BTreeMap<Vec<u8>, Vec<u8>>;

fn open(device: &Arc<MemoryDevice>, background: bool) -> Volume {
    let options = VolumeOptions {
        background,
        commit_interval: Duration::from_millis(50),
        dirty_data_bytes_max: 4 << 20,
        ..VolumeOptions::default()
    };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens")
}

/// Fills the volume until even small files don't fit; the files that were written whole.
fn fill(volume: &Volume, client: u8, random: &mut Seeded, files: &mut Files) {
    let mut largest = 400_000;
    while largest > 1000 {
        let operation = random.next_u64() as u32;
        let name = format!("{client}-{operation}").into_bytes();
        let data = pattern(Tag { client, operation }, 0, 1 + random.below(largest));
        match create(volume, &name, &data) {
            Ok(inode) => {
                volume.forget(inode, 1);
                files.insert(name, data);
            }
            Err(Error::NoSpace) => {
                largest /= 2;
                // The file may exist, with a part of its data.
                match volume.unlink(volume.root(), &name) {
                    Ok(()) | Err(Error::NotFound) => {}
                    Err(error) => panic!("deleting on a full volume: {error}"),
                }
            }
            Err(error) => panic!("filling: {error}"),
        }
    }
}

fn remove_some(volume: &Volume, files: &mut Files, random: &mut Seeded) {
    let names: Vec<Vec<u8>> = files.keys().filter(|_| random.chance(2, 3)).cloned().collect();
    for name in names {
        volume.unlink(volume.root(), &name).expect("deleting works on a full volume");
        files.remove(&name);
    }
}

/// Removes all files of the root directory.
fn remove_everything(volume: &Volume) {
    let mut names = Vec::new();
    volume
        .read_directory(volume.root(), 0, &mut |item| {
            names.push(item.name.to_vec());
            true
        })
        .expect("it can be listed");
    for name in names {
        volume.unlink(volume.root(), &name).expect("deleting works on a full volume");
    }
}

fn check(device: &Arc<MemoryDevice>, background: bool) {
    let mut random = Seeded::new(seed_from_environment());
    format(&**device, 1 << 20).expect("a new volume");
    let mut files = Files::new();
    let mut written = Vec::new();
    for round in 0..4 {
        let volume = open(device, background);
        fill(&volume, round, &mut random, &mut files);
        written.push(files.values().map(Vec::len).sum::<usize>());
        volume.sync().expect("what write accepted has its space");
        expect_files(&volume, &files)
            .unwrap_or_else(|error| panic!("round {round}, full: {error}"));
        let space = volume.space();
        assert!(space.available_blocks < space.total_blocks / 10, "{space:?} is not full");
        remove_some(&volume, &mut files, &mut random);
        volume.close().expect("it closes");
        expect_clean(&**device).unwrap_or_else(|error| panic!("round {round}: {error}"));
        let volume = open(device, background);
        expect_files(&volume, &files)
            .unwrap_or_else(|error| panic!("round {round}, opened again: {error}"));
        volume.close().expect("it closes");
    }
    // Each filling must reach what the first one did, or space leaks.
    assert!(
        written.iter().all(|bytes| *bytes >= written[0] * 9 / 10),
        "the volume shrinks: {written:?} bytes fitted"
    );
    assert!(
        written[0] as u64 >= device.length_bytes() * 7 / 10,
        "only {} bytes fitted",
        written[0]
    );
}

#[test]
fn without_background_work() {
    check(&Arc::new(MemoryDevice::new(32 << 20)), false);
}

#[test]
fn with_background_work() {
    check(&Arc::new(MemoryDevice::new(48 << 20)), true);
}

#[test]
fn overwriting_a_full_volume_with_fsync_keeps_what_was_there() {
    let device = Arc::new(MemoryDevice::new(32 << 20));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device, true);
    let (mut random, mut files) = (Seeded::new(seed_from_environment()), Files::new());
    fill(&volume, 0, &mut random, &mut files);
    volume.sync().expect("what write accepted has its space");
    let names: Vec<Vec<u8>> = files.keys().cloned().collect();
    for (operation, name) in (0..).zip(names) {
        let inode = volume.lookup(volume.root(), &name).expect("it exists").inode;
        let data = pattern(Tag { client: 9, operation }, 0, files[&name].len() as u64);
        // Copying needs space: an error is all right, a lost or half-written file isn't.
        match volume.write(inode, 0, &data) {
            Ok(()) => {
                volume
                    .fsync_blocking(inode, FsyncKind::Full)
                    .expect("what write accepted has its space");
                files.insert(name, data);
            }
            Err(Error::NoSpace) => drop(files.remove(&name)),
            Err(error) => panic!("overwriting: {error}"),
        }
        volume.forget(inode, 1);
    }
    expect_files(&volume, &files).unwrap_or_else(|error| panic!("{error}"));
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
}

/// Discards what is free again and again, until `done`. In the end no writer lacks what is being
/// discarded.
fn trim_until(volume: &Volume, done: &Arc<AtomicBool>) -> thread::JoinHandle<()> {
    let (volume, done) = (volume.clone(), Arc::clone(done));
    thread::spawn("trimmer", move || {
        while !done.load(Ordering::Acquire) {
            volume.trim(0..u64::MAX, 0).expect("it trims");
            let space = volume.space();
            assert!(space.free_blocks <= space.total_blocks, "{space:?}");
        }
    })
}

#[test]
fn clients_that_fill_and_delete_at_once_are_never_stuck() {
    let device = Arc::new(MemoryDevice::new(48 << 20));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device, true);
    let seed = seed_from_environment();
    let handles: Vec<_> = (0..16)
        .map(|client| {
            let volume = volume.clone();
            thread::spawn("fill", move || {
                let (mut random, mut files) = (Seeded::new(seed ^ u64::from(client)), Files::new());
                for _ in 0..4 {
                    fill(&volume, client, &mut random, &mut files);
                    remove_some(&volume, &mut files, &mut random);
                }
                files
            })
        })
        .collect();
    let done = Arc::new(AtomicBool::new(false));
    let trimmer = trim_until(&volume, &done);
    let mut files = Files::new();
    handles.into_iter().for_each(|handle| files.extend(handle.join().expect("no thread panics")));
    done.store(true, Ordering::Release);
    trimmer.join().expect("no thread panics");
    expect_files(&volume, &files).unwrap_or_else(|error| panic!("{error}"));
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
}

/// Clients that make names on a full volume until there is no room for one, and remove them: a
/// removal never fails, and data that another client writes meanwhile is stored or refused.
#[test]
fn names_and_removals_at_once_on_a_full_volume() {
    let device = Arc::new(MemoryDevice::new(96 << 20));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device, true);
    let (mut random, mut files) = (Seeded::new(seed_from_environment()), Files::new());
    fill(&volume, 0, &mut random, &mut files);
    volume.sync().expect("what write accepted has its space");
    let writing =
        volume.create(volume.root(), b"written", &FILE).expect("a full volume takes a name").inode;
    let handles: Vec<_> = (0..8)
        .map(|client| {
            let volume = volume.clone();
            thread::spawn("names", move || {
                let directory = NewInode { file_type: FileType::Directory, mode: 0o755, ..FILE };
                let mut made = 0;
                for round in 0..5 {
                    let name = format!("{client} {round}").into_bytes();
                    let Ok(parent) = volume.create(volume.root(), &name, &directory) else {
                        continue;
                    };
                    let mut names = Vec::new();
                    for number in 0..400 {
                        let name = format!("a name of some length {number}").into_bytes();
                        match volume.create(parent.inode, &name, &FILE) {
                            Ok(file) => volume.forget(file.inode, 1),
                            Err(Error::NoSpace) => break,
                            Err(error) => panic!("{error}"),
                        }
                        names.push(name);
                    }
                    made += names.len();
                    for name in names {
                        volume
                            .unlink(parent.inode, &name)
                            .expect("removing works on a volume full of names");
                    }
                    volume.forget(parent.inode, 1);
                    volume.remove_directory(volume.root(), &name).expect("it is empty");
                }
                made
            })
        })
        .collect();
    for step in 0..200_u64 {
        match volume.write(writing, step % 16 * 40_000, &[step as u8; 10_000]) {
            Ok(()) | Err(Error::NoSpace) => {}
            Err(error) => panic!("{error}"),
        }
        volume.fsync_blocking(writing, FsyncKind::Full).expect("what write accepted has its space");
    }
    let made: usize =
        handles.into_iter().map(|handle| handle.join().expect("no thread panics")).sum();
    assert!(made > 0, "a full volume takes names");
    volume.forget(writing, 1);
    volume.unlink(volume.root(), b"written").expect("it exists");
    expect_files(&volume, &files).unwrap_or_else(|error| panic!("{error}"));
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
}

/// Tiny files until the smallest volume there is has no room; then none, and the same again.
fn fill_the_smallest_volume(background: bool) {
    let device = Arc::new(MemoryDevice::new(Geometry::VOLUME_BYTES_MIN));
    mkfs(&*device, &MkfsOptions::default()).expect("the smallest volume that mkfs allows");
    let mut counts = Vec::new();
    for round in 0..3 {
        let volume = open(&device, background);
        let mut files = Files::new();
        for number in 0.. {
            let name = format!("{round} {number}").into_bytes();
            let data = if number % 3 == 0 {
                pattern(Tag { client: round, operation: number }, 0, 10)
            } else {
                Vec::new()
            };
            match create(&volume, &name, &data) {
                Ok(inode) => volume.forget(inode, 1),
                Err(Error::NoSpace) => match volume.unlink(volume.root(), &name) {
                    Ok(()) | Err(Error::NotFound) => break,
                    Err(error) => panic!("deleting on a full volume: {error}"),
                },
                Err(error) => panic!("filling: {error}"),
            }
            files.insert(name, data);
        }
        volume.sync().expect("what write accepted has its space");
        let space = volume.space();
        assert!(
            space.available_blocks * 50 <= space.total_blocks,
            "{space:?} with {} files is not full",
            files.len()
        );
        volume.close().expect("it closes");
        expect_clean(&*device).unwrap_or_else(|error| panic!("round {round}, full: {error}"));
        let volume = open(&device, background);
        expect_files(&volume, &files).unwrap_or_else(|error| panic!("round {round}: {error}"));
        for name in files.keys() {
            volume.unlink(volume.root(), name).expect("deleting works on a full volume");
        }
        volume.close().expect("it closes");
        expect_clean(&*device).unwrap_or_else(|error| panic!("round {round}, empty: {error}"));
        counts.push(files.len());
    }
    assert!(
        counts.iter().all(|count| count * 100 >= counts[0] * 95),
        "the volume shrinks: {counts:?} files fitted"
    );
    assert!(counts[0] > 5_000, "only {} files fitted", counts[0]);
}

#[test]
fn the_smallest_volume_full_of_tiny_files() {
    fill_the_smallest_volume(true);
}

#[test]
fn the_smallest_volume_full_of_tiny_files_without_background_work() {
    fill_the_smallest_volume(false);
}

/// The device fails while many wait for space: each of them gets an answer, and what was durable is
/// still there.
#[test]
fn nobody_waits_for_reclaim_that_meets_a_write_error() {
    let device = Arc::new(SimulatedDevice::new(32 << 20));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = Volume::open(device.clone() as Arc<dyn BlockDevice>, VolumeOptions::default())
        .expect("it opens");
    let (mut random, mut files) = (Seeded::new(seed_from_environment()), Files::new());
    fill(&volume, 0, &mut random, &mut files);
    volume.sync().expect("what write accepted has its space");
    // Room for a few, so that the others find none while those are still at work.
    let freed: Vec<Vec<u8>> = files.keys().take(files.len() / 8).cloned().collect();
    for name in freed {
        volume.unlink(volume.root(), &name).expect("deleting works on a full volume");
        files.remove(&name);
    }
    volume.sync().expect("sync");
    device.fail_when(|request| request.operation == Operation::Write);
    let handles: Vec<_> = (1..17)
        .map(|client| {
            let volume = volume.clone();
            thread::spawn("fill", move || {
                for operation in 0.. {
                    match create(
                        &volume,
                        format!("{client} {operation}").as_bytes(),
                        &[client; 40_000],
                    ) {
                        Ok(inode) => volume.forget(inode, 1),
                        Err(Error::NoSpace | Error::Aborted(_) | Error::Device(_)) => break,
                        Err(error) => panic!("filling: {error}"),
                    }
                }
            })
        })
        .collect();
    handles.into_iter().for_each(|handle| handle.join().expect("no thread panics"));
    drop(volume);
    device.clear_failures();
    let volume = Volume::open(device.clone() as Arc<dyn BlockDevice>, VolumeOptions::default())
        .expect("it opens again");
    expect_files(&volume, &files).unwrap_or_else(|error| panic!("{error}"));
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
}

/// Removal goes on in the background; a writer that needs the space meanwhile waits for it, and
/// `df` counts it.
#[test]
fn what_a_removed_file_held_can_be_written_at_once() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device, true);
    let whole = volume.space();
    let data = pattern(Tag { client: 1, operation: 1 }, 0, whole.available_blocks * 4096 * 9 / 10);
    for round in 0..5 {
        let inode = create(&volume, b"large", &data)
            .unwrap_or_else(|error| panic!("round {round}: {error}, {:?}", volume.space()));
        volume.fsync_blocking(inode, FsyncKind::Full).expect("what write accepted has its space");
        volume.forget(inode, 1);
        volume.unlink(volume.root(), b"large").expect("it exists");
        let space = volume.space();
        let missing = whole.available_blocks.abs_diff(space.available_blocks);
        assert!(
            missing * 50 <= whole.total_blocks,
            "round {round}: {space:?} right after the removal"
        );
    }
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
}
