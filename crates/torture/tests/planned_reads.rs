//! Reads that are planned by the engine and done by the reader itself, while other clients
//! overwrite, cut, punch and remove the files, and fill the freed blocks with data of others, and
//! while the volume commits and discards.
//!
//! Required: what a planned read returns when it is finished is a content that the file had while
//! it was being finished, all of it at one moment; or the reader is told to read again. What was
//! read at once, or again, is a content that the file had meanwhile.
//!
//! Each file has one writer, which keeps all versions of it. Readers wait between their steps until
//! the writers have done something, so that plans are disturbed however fast the machine is.
use cairn_blockdev::{AlignedBuffer, FileDevice};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FsyncKind, InodeId, PlannedRead, ReadAtOnce, Volume,
    VolumeOptions,
};
use cairn_environment::atomic::{AtomicU64, AtomicUsize, Ordering};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, thread};
use cairn_torture::contents::{Contents, Tag, describe, pattern};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::NEW_FILE;
use cairn_torture::seed_from_environment;
use std::fs::File;
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = 4096;
const VOLUME_BYTES: u64 = 24 << 20;
const FILE_BLOCKS: u64 = 48;
const WRITERS: u8 = 4;
const READERS: u64 = 2;
const OPERATIONS: u32 = 250;
/// Steps of the writers that a reader waits for at most.
const STEPS_MAX: u64 = 4;
/// Reads that a reader tries to plan before it finishes them.
const PLANS: u64 = 8;

/// A file and all contents that it has had.
struct History {
    inode: InodeId,
    versions: Mutex<Vec<Contents>>,
    /// Versions that may have begun to be there, and that are there, counted.
    begun: AtomicUsize,
    done: AtomicUsize,
}

impl History {
    fn new(inode: InodeId) -> Self {
        let versions = Mutex::new(Rank::LEAF, vec![Contents::default()]);
        Self { inode, versions, begun: AtomicUsize::new(0), done: AtomicUsize::new(0) }
    }

    /// Changes the model, and then the file.
    fn change(
        &self,
        model: impl FnOnce(&mut Contents),
        volume: impl FnOnce(InodeId) -> Result<(), Error>,
    ) {
        let number = {
            let mut versions = self.versions.lock();
            let mut next = versions[versions.len() - 1].clone();
            model(&mut next);
            versions.push(next);
            versions.len() - 1
        };
        self.begun.store(number, Ordering::SeqCst);
        volume(self.inode).expect("a healthy volume with room");
        self.done.store(number, Ordering::SeqCst);
    }

    /// The bytes are those of one of the versions.
    fn expect(&self, offset: u64, wanted: usize, bytes: &[u8], versions: RangeInclusive<usize>) {
        let known = self.versions.lock();
        let possible = &known[versions.clone()];
        assert!(
            possible.iter().any(|version| version.read(offset, wanted as u64) == bytes),
            "inode {}, {offset}: {}, which none of its versions {versions:?} held; it held {}",
            self.inode,
            describe(offset, bytes),
            describe(offset, &possible[0].read(offset, wanted as u64)),
        );
    }
}

/// What all clients share.
struct Shared {
    volume: Volume,
    files: Mutex<Vec<Arc<History>>>,
    steps: AtomicU64,
    writers_left: AtomicU64,
}

impl Shared {
    fn step(&self) {
        self.steps.fetch_add(1, Ordering::SeqCst);
    }

    fn is_over(&self) -> bool {
        self.writers_left.load(Ordering::SeqCst) == 0
    }

    /// Until the writers have done this much more.
    fn wait_for_steps(&self, steps: u64) {
        let until = self.steps.load(Ordering::SeqCst) + steps;
        while self.steps.load(Ordering::SeqCst) < until && !self.is_over() {
            std::thread::yield_now();
        }
    }
}

fn create(shared: &Shared, client: u8, number: u32) -> (Vec<u8>, Arc<History>) {
    let name = format!("{client} {number}").into_bytes();
    let volume = &shared.volume;
    let inode = volume.create(volume.root(), &name, &NEW_FILE).expect("there is room").inode;
    (name, Arc::new(History::new(inode)))
}

/// Changes one file after the other.
fn write(shared: &Shared, client: u8, seed: u64) {
    let mut random = Seeded::new(seed ^ u64::from(client) << 32);
    let volume = &shared.volume;
    let mut named = create(shared, client, 0);
    shared.files.lock().push(Arc::clone(&named.1));
    for operation in 1..=OPERATIONS {
        let file = Arc::clone(&named.1);
        let offset = random.below(FILE_BLOCKS) * BLOCK;
        let length = (1 + random.below(8)) * BLOCK;
        let size = random.below(FILE_BLOCKS * BLOCK);
        match random.below(16) {
            0..6 => {
                let whole = random.chance(3, 4);
                let length = if whole { length } else { random.below(length) + 1 };
                let data = pattern(Tag { client, operation }, offset, length);
                file.change(
                    |model| model.write(offset, &data),
                    |inode| volume.write(inode, offset, &data),
                );
            }
            6 => {
                let size = if random.chance(1, 3) { 0 } else { size };
                let change = AttributeChange { size: Some(size), ..AttributeChange::default() };
                file.change(
                    |model| model.truncate(size),
                    |inode| volume.set_attributes(inode, &change).map(drop),
                );
            }
            7 => file.change(
                |model| model.zero(offset, length),
                |inode| volume.allocate(inode, offset, length, AllocateMode::PunchHole),
            ),
            8 => file.change(
                |model| model.zero(offset, length),
                |inode| {
                    let mode = AllocateMode::ZeroRange { keep_size: true };
                    volume.allocate(inode, offset, length, mode)
                },
            ),
            9 if random.chance(1, 4) => {
                // Blocks that go at once are soon others'.
                volume.unlink(volume.root(), &named.0).expect("it is there");
                shared.files.lock().retain(|other| !Arc::ptr_eq(other, &file));
                volume.forget(file.inode, 1);
                named = create(shared, client, operation);
                shared.files.lock().push(Arc::clone(&named.1));
            }
            // Refilled as a whole: the old blocks are freed together.
            9 | 10 => {
                let data = pattern(Tag { client, operation }, 0, FILE_BLOCKS * BLOCK);
                file.change(|model| model.write(0, &data), |inode| volume.write(inode, 0, &data));
                volume.fsync_blocking(file.inode, FsyncKind::Full).expect("it is healthy");
            }
            11 | 12 => volume.commit().expect("it is healthy"),
            13 => volume.sync().expect("it is healthy"),
            14 => drop(volume.trim(0..u64::MAX, 0).expect("it trims")),
            _ => volume.fsync_blocking(file.inode, FsyncKind::Full).expect("it is healthy"),
        }
        shared.step();
    }
    shared.writers_left.fetch_sub(1, Ordering::SeqCst);
}

/// What came of the reads.
#[derive(Clone, Copy, Default, Debug)]
struct Count {
    at_once: u64,
    planned: u64,
    /// Plans whose file was changed before they were finished.
    disturbed: u64,
    finished: u64,
    finished_disturbed: u64,
    read_again: u64,
}

/// What a kernel is asked to do.
fn read_from_device(planned: &PlannedRead, buffer: &mut [u8]) {
    let file = File::from(planned.file().as_fd().try_clone_to_owned().expect("a descriptor"));
    file.read_exact_at(&mut buffer[planned.bytes()], planned.device_offset_bytes())
        .expect("the device is healthy");
}

/// A read that is planned, and not finished.
struct Pending {
    file: Arc<History>,
    offset: u64,
    buffer: AlignedBuffer,
    planned: PlannedRead,
    /// The version that was there before it was planned.
    before: usize,
    is_read: bool,
}

/// Plans a read; what does not come from the device is judged at once.
fn plan(shared: &Shared, random: &mut Seeded, count: &mut Count) -> Option<Pending> {
    let file = {
        let files = shared.files.lock();
        let chosen = random.below(files.len().max(1) as u64) as usize;
        files.get(chosen).cloned()?
    };
    let offset = random.below(FILE_BLOCKS) * BLOCK;
    let mut buffer = AlignedBuffer::zeroed(((1 + random.below(8)) * BLOCK) as usize);
    let before = file.done.load(Ordering::SeqCst);
    match shared.volume.read_at_once(file.inode, offset, &mut buffer) {
        Some(ReadAtOnce::Planned(planned)) => {
            count.planned += 1;
            Some(Pending { file, offset, buffer, planned, before, is_read: false })
        }
        Some(ReadAtOnce::Done(length)) => {
            let after = file.begun.load(Ordering::SeqCst);
            file.expect(offset, buffer.len(), &buffer[..length], before..=after);
            count.at_once += 1;
            None
        }
        None => {
            read_again(shared, &file, offset, &mut buffer);
            None
        }
    }
}

fn finish(shared: &Shared, mut one: Pending, count: &mut Count) {
    if !one.is_read {
        read_from_device(&one.planned, &mut one.buffer);
    }
    let wanted = one.buffer.len();
    let finishing = one.file.done.load(Ordering::SeqCst);
    let finished = shared.volume.finish_read(&one.planned, &one.buffer);
    let after = one.file.begun.load(Ordering::SeqCst);
    let is_disturbed = after > one.before;
    count.disturbed += u64::from(is_disturbed);
    match finished {
        Some(length) => {
            one.file.expect(one.offset, wanted, &one.buffer[..length], finishing..=after);
            count.finished += 1;
            count.finished_disturbed += u64::from(is_disturbed);
        }
        None => {
            count.read_again += 1;
            read_again(shared, &one.file, one.offset, &mut one.buffer);
        }
    }
}

fn read(shared: &Shared, number: u64, seed: u64) -> Count {
    let mut random = Seeded::new(!seed ^ number << 40);
    let (mut count, mut pending) = (Count::default(), Vec::new());
    while !shared.is_over() {
        // Several at a time, so that a step of a writer disturbs several.
        for _ in 0..PLANS {
            pending.extend(plan(shared, &mut random, &mut count));
        }
        shared.wait_for_steps(random.below(STEPS_MAX));
        pending.iter_mut().filter(|_| random.chance(1, 2)).for_each(|one: &mut Pending| {
            read_from_device(&one.planned, &mut one.buffer);
            one.is_read = true;
        });
        shared.wait_for_steps(1 + random.below(STEPS_MAX));
        pending.drain(..).for_each(|one| finish(shared, one, &mut count));
    }
    count
}

fn read_again(shared: &Shared, file: &History, offset: u64, buffer: &mut AlignedBuffer) {
    let (before, wanted) = (file.done.load(Ordering::SeqCst), buffer.len());
    match shared.volume.read_into(file.inode, offset, buffer) {
        Ok(length) => {
            let after = file.begun.load(Ordering::SeqCst);
            file.expect(offset, wanted, &buffer[..length], before..=after);
        }
        Err(Error::NotFound) => {
            let files = shared.files.lock();
            let is_there = files.iter().any(|other| other.inode == file.inode);
            assert!(!is_there, "inode {} is gone, and nobody removed it", file.inode);
        }
        Err(error) => panic!("inode {}: {error}", file.inode),
    }
}

fn check(data_cache_bytes: u64, discard: bool) {
    let seed = seed_from_environment();
    // /tmp may have no direct I/O.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let device = FileDevice::create(&directory.path().join("image"), VOLUME_BYTES).expect("a file");
    let device = Arc::new(device);
    if !device.is_direct() {
        eprintln!("NOTE: left out: there is no direct I/O here");
        return;
    }
    mkfs(&*device, &MkfsOptions::default()).expect("a new volume");
    let options = VolumeOptions {
        data_cache_bytes,
        discard,
        commit_interval: Duration::from_millis(20),
        ..VolumeOptions::default()
    };
    let shared = Arc::new(Shared {
        volume: Volume::open(device.clone(), options).expect("it opens"),
        files: Mutex::new(Rank::LEAF, Vec::new()),
        steps: AtomicU64::new(0),
        writers_left: AtomicU64::new(u64::from(WRITERS)),
    });
    let writers = (0..WRITERS).map(|client| {
        let shared = Arc::clone(&shared);
        thread::spawn("writer", move || write(&shared, client, seed))
    });
    let writers: Vec<_> = writers.collect();
    let readers = (0..READERS).map(|number| {
        let shared = Arc::clone(&shared);
        thread::spawn("reader", move || read(&shared, number, seed))
    });
    let readers: Vec<_> = readers.collect();
    writers.into_iter().for_each(|writer| writer.join().expect("no thread panics"));
    let mut all = Count::default();
    for reader in readers {
        let count = reader.join().expect("no thread panics");
        all.at_once += count.at_once;
        all.planned += count.planned;
        all.disturbed += count.disturbed;
        all.finished += count.finished;
        all.finished_disturbed += count.finished_disturbed;
        all.read_again += count.read_again;
    }
    eprintln!("counted: {all:?}");
    assert!(
        all.disturbed >= 50 && all.finished >= 50 && all.read_again >= 30,
        "too few plans were disturbed: {all:?}"
    );
    shared.volume.close().expect("it closes");
    drop(shared);
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn planned_reads_without_a_cache() {
    check(0, true);
}

#[test]
fn planned_reads_with_a_small_cache() {
    check(256 << 10, false);
}
