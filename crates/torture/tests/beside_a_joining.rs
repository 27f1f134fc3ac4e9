//! A fork writes into preallocated blocks that it has inherited, while it is joined with its origin
//! and the commit that makes this durable is held up. A power failure then finds the origin as it
//! was, on its way out, with all that it had written into the same blocks.
//!
//! A commit follows a joining at once, so random and systematic runs hardly write in between.
use cairn_blockdev::simulated::GatedDevice;
use cairn_engine::{AllocateMode, FsyncKind, InodeId, NewInode, Volume, VolumeOptions};
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use cairn_format::FileType;
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{NEW_FILE, format};
use cairn_torture::seed_from_environment;
use std::sync::Arc;
use std::time::Duration;

const VOLUMES: u64 = 8;
const VOLUME_BYTES: u64 = 64 << 20;
const BLOCK_BYTES: u64 = 4096;
/// Preallocated blocks of the file.
const FILE_BLOCKS: u64 = 200;
/// An fsync of more blocks than this writes them itself, and leaves none to the log.
const LITTLE_BLOCKS: u64 = 64;
const WAIT: Duration = Duration::from_millis(1);
const WAITS: usize = 100;

/// Writes a random part of the preallocated blocks.
fn write(volume: &Volume, file: InodeId, byte: u8, random: &mut Seeded) {
    let blocks = LITTLE_BLOCKS + 1 + random.below(100);
    let first = random.below(FILE_BLOCKS - blocks);
    let data = vec![byte; (blocks * BLOCK_BYTES) as usize];
    volume.write(file, first * BLOCK_BYTES, &data).expect("it can be written");
}

/// Whether a fork of `volume` has an origin.
fn has_origin(volume: &Volume) -> bool {
    let subvolumes = volume.subvolumes().expect("they are known");
    subvolumes.iter().any(|one| one.origin.is_some())
}

/// Whether the fork was joined, and no superblock says so.
fn one_volume(random: &mut Seeded, when: &str) -> bool {
    let device = Arc::new(GatedDevice::new(VOLUME_BYTES));
    format(&*device, 1 << 20).expect("a new volume");
    let options =
        VolumeOptions { commit_interval: Duration::from_secs(1000), ..VolumeOptions::default() };
    let volume = Volume::open(device.clone(), options).expect("it opens");
    let root = volume.root();
    let directory = NewInode { file_type: FileType::Directory, mode: 0o755, ..NEW_FILE };
    let origin = volume.create_subvolume(root, b"origin", &directory).expect("a subvolume").inode;
    let file = volume.create(origin, b"file", &NEW_FILE).expect("a file").inode;
    let mode = AllocateMode::Allocate { keep_size: random.chance(1, 2) };
    volume.allocate(file, 0, FILE_BLOCKS * BLOCK_BYTES, mode).expect("there is space");
    let fork = volume.fork(origin, root, b"fork").expect("a fork").inode;
    write(&volume, file, 1, random);
    volume.fsync_blocking(file, FsyncKind::Full).expect("it is durable");
    volume.forget(file, 1);
    volume.forget(origin, 1);
    let file = volume.lookup(fork, b"file").expect("it has it, too").inode;
    volume.remove_subvolume(root, b"origin").expect("it goes");
    device.set_shut(true);
    let joined = (0..WAITS).any(|_| {
        clock::sleep(WAIT);
        !has_origin(&volume)
    });
    write(&volume, file, 2, random);
    let syncing = {
        let volume = volume.clone();
        thread::spawn("client", move || volume.fsync_blocking(file, FsyncKind::Full))
    };
    clock::sleep(10 * WAIT);
    let read_only = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let found = expect_clean(&*device);
    let crashed = Volume::open(device.clone(), read_only).expect("a crash leaves a volume");
    let is_met = joined && has_origin(&crashed);
    crashed.close().expect("it closes");
    device.set_shut(false);
    syncing.join().expect("no panic").expect("it is durable");
    volume.close().expect("it closes");
    found.unwrap_or_else(|error| panic!("{when}, a crash meanwhile: {error}"));
    expect_clean(&*device).unwrap_or_else(|error| panic!("{when}: {error}"));
    is_met
}

#[test]
fn a_joined_fork_leaves_what_its_origin_has_until_that_is_durable() {
    let (seed, mut met) = (seed_from_environment(), 0);
    for number in 0..VOLUMES {
        let mut random = Seeded::new(seed.wrapping_add(number));
        met += u64::from(one_volume(&mut random, &format!("CAIRN_SEED={seed}, volume {number}")));
    }
    println!("{met} of {VOLUMES} forks were written between their joining and its superblock");
    assert!(met > 0, "no fork was written between its joining and the superblock of that");
}
