//! A volume that is full: errors instead of aborts, deletion always works, and the space comes back.
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::{Error, FsyncKind, Volume, VolumeOptions};
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{create, expect_files, format};
use cairn_torture::seed_from_environment;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

type Files = BTreeMap<Vec<u8>, Vec<u8>>;

fn open(device: &Arc<MemoryDevice>, background: bool) -> Volume {
    let options =
        VolumeOptions { background, commit_interval: Duration::from_millis(50), dirty_data_bytes_max: 4 << 20, ..VolumeOptions::default() };
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
        expect_files(&volume, &files).unwrap_or_else(|error| panic!("round {round}, full: {error}"));
        let space = volume.space();
        assert!(space.available_blocks < space.total_blocks / 10, "{space:?} is not full");
        remove_some(&volume, &mut files, &mut random);
        volume.close().expect("it closes");
        expect_clean(&**device).unwrap_or_else(|error| panic!("round {round}: {error}"));
        let volume = open(device, background);
        expect_files(&volume, &files).unwrap_or_else(|error| panic!("round {round}, opened again: {error}"));
        volume.close().expect("it closes");
    }
    // Each filling must reach what the first one did, or space leaks.
    assert!(written.iter().all(|bytes| *bytes >= written[0] * 9 / 10), "the volume shrinks: {written:?} bytes fitted");
    assert!(written[0] as u64 >= device.length_bytes() * 7 / 10, "only {} bytes fitted", written[0]);
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
                volume.fsync_blocking(inode, FsyncKind::Full).expect("what write accepted has its space");
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
    let mut files = Files::new();
    handles.into_iter().for_each(|handle| files.extend(handle.join().expect("no thread panics")));
    expect_files(&volume, &files).unwrap_or_else(|error| panic!("{error}"));
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
}
