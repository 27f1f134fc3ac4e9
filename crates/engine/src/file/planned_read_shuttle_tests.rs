//! Planned reads beside everything that changes files, as a model: a whole volume under a scheduler
//! that tries many interleavings.
//!
//! Two files have a thread each that overwrites, cuts, extends, punches, syncs and removes them;
//! another thread commits. The volume is so full that freed blocks soon belong to the other file.
//! Readers plan, read the device themselves, in halves of blocks, and finish; now and then the
//! device gives them something else than it holds. What is not finished they read with waiting.
//!
//! Invariants:
//! - A finished read is a content of the file between the beginning and the end of `finish_read`;
//!   what was in memory, or is read with waiting, one between the beginning and the end of that
//!   call. Never another file's, never half of two.
//! - What the device gave wrongly is not finished, and no later read finds it in the data cache.
//! - There is no error, but that the file is gone.
//! - A reader holds no lock between plan and finish, and neither waits for somebody who has the
//!   file.
//! - All come to their end.
//!
//! Lock discipline: a history is locked alone. Blocks of the device are locked by halves, so that
//! writes and reads are torn.
use crate::mkfs::{MkfsOptions, mkfs};
use crate::{
    AllocateMode, AttributeChange, Error, FileType, FlushPolicy, FsyncKind, InodeId, NewInode,
    ReadAtOnce, SeekTarget, Volume, VolumeOptions,
};
use cairn_blockdev::{AlignedBuffer, BlockDevice, DeviceError, RawFile};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::simulation::{self, Settings, note_progress, schedules};
use cairn_environment::{Rank, assert_may_block, thread};
use cairn_format::BLOCK_SIZE;
use std::collections::HashMap;
use std::fs::File;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };
const VOLUME_BYTES: u64 = 16 << 20;
/// Of the files that are read.
const FILE_BLOCKS: u64 = 3;
/// Blocks that are left to them.
const FREE_BLOCKS: u64 = 16;
const NAMES: [&[u8]; 2] = [b"one", b"two"];
const HALF: usize = BLOCK_SIZE / 2;
const STEPS_MAX: usize = 3_000_000;

/// Halves of blocks by their number.
type Halves = HashMap<u64, Arc<[u8]>>;

/// A device that has a file, whose reads and writes others can come between.
struct ModelDevice {
    halves: Mutex<Halves>,
    /// Reads do not end.
    stalls: AtomicBool,
    /// One has begun since.
    stalled: AtomicBool,
}

impl ModelDevice {
    fn new(halves: Halves) -> Arc<Self> {
        let halves = Mutex::new(Rank::DEVICE, halves);
        Arc::new(Self { halves, stalls: AtomicBool::new(false), stalled: AtomicBool::new(false) })
    }
}

fn halves_of(offset_bytes: u64) -> impl Iterator<Item = u64> {
    offset_bytes / HALF as u64..
}

impl BlockDevice for ModelDevice {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        while self.stalls.load(SeqCst) {
            self.stalled.store(true, SeqCst);
            thread::yield_now();
        }
        for (half, bytes) in halves_of(offset_bytes).zip(buffer.chunks_exact_mut(HALF)) {
            match self.halves.lock().get(&half) {
                Some(content) => bytes.copy_from_slice(content),
                None => bytes.fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let bytes = buffers.iter().flat_map(|buffer| buffer.chunks_exact(HALF));
        for (half, bytes) in halves_of(offset_bytes).zip(bytes) {
            self.halves.lock().insert(half, bytes.into());
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        thread::yield_now();
        Ok(())
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        for half in halves_of(offset_bytes).take(length_bytes as usize / HALF) {
            self.halves.lock().remove(&half);
        }
        Ok(())
    }

    fn length_bytes(&self) -> u64 {
        VOLUME_BYTES
    }

    fn flush_time(&self) -> Duration {
        Duration::ZERO
    }

    fn raw_file(&self) -> Option<RawFile> {
        Some(RawFile::of(File::open("/dev/null").expect("the system has one")))
    }
}

/// What a file held, in order.
struct History {
    inode: InodeId,
    /// `None` when it is gone. An operation's outcome is here before it begins.
    contents: Mutex<Vec<Option<Vec<u8>>>>,
    /// The content that the last operation to end has left.
    completed: AtomicU64,
}

impl History {
    fn new(inode: InodeId, content: Vec<u8>) -> Arc<Self> {
        Arc::new(Self {
            inode,
            contents: Mutex::new(Rank::LEAF, vec![Some(content)]),
            completed: AtomicU64::new(0),
        })
    }

    fn newest(&self) -> Vec<u8> {
        self.contents.lock().last().cloned().flatten().expect("its thread has not removed it")
    }

    /// One operation that makes `content` of the file, or finds no space and leaves the file as it
    /// is.
    fn change(&self, content: Option<Vec<u8>>, operate: impl FnOnce() -> crate::Result<()>) {
        let before = self.newest();
        self.contents.lock().push(content);
        match operate() {
            Ok(()) => {}
            Err(Error::NoSpace) => self.contents.lock().push(Some(before)),
            Err(error) => panic!("{error}"),
        }
        self.completed.store(self.contents.lock().len() as u64 - 1, SeqCst);
        note_progress();
    }

    fn completed(&self) -> usize {
        self.completed.load(SeqCst) as usize
    }

    /// Whether the file may have answered so, at some time since `since` had been completed.
    fn may_be(&self, since: usize, is: impl Fn(Option<&[u8]>) -> bool) -> bool {
        self.contents.lock()[since..].iter().any(|content| is(content.as_deref()))
    }

    fn expect_content(
        &self,
        since: usize,
        offset: usize,
        asked_bytes: usize,
        read: &[u8],
        how: &str,
    ) {
        let is = |content: Option<&[u8]>| {
            content.is_some_and(|content| {
                let from = offset.min(content.len());
                content[from..content.len().min(from + asked_bytes)] == *read
            })
        };
        if !self.may_be(since, is) {
            // A half block is told by its first byte, and by one that differs.
            let word = |half: &[u8]| (half[0], half.iter().copied().find(|byte| *byte != half[0]));
            let words = |bytes: &[u8]| bytes.chunks(HALF).map(word).collect::<Vec<_>>();
            let contents: Vec<_> =
                self.contents.lock().iter().map(|content| content.as_deref().map(words)).collect();
            panic!(
                "inode {}, {how} at {offset}: {} bytes {:?} are none of {contents:?} from {since} on",
                self.inode,
                read.len(),
                words(read)
            );
        }
    }
}

/// How often it came to what.
#[derive(Debug, Default)]
struct Outcomes {
    in_memory: AtomicU64,
    finished: AtomicU64,
    refused: AtomicU64,
    not_planned: AtomicU64,
    /// What a planned read got from the device was written for another file.
    foreign: AtomicU64,
}

/// The volume with its files, and who knows what they hold.
struct Scene {
    device: Arc<ModelDevice>,
    volume: Volume,
    /// One for each name; the others are gone.
    files: Mutex<Vec<Arc<History>>>,
    outcomes: Outcomes,
}

fn byte_of(name: usize, version: u64) -> u8 {
    (16 * (name as u64 + 1) + version) as u8
}

fn options(data_cache_bytes: u64) -> VolumeOptions {
    VolumeOptions { background: false, data_cache_bytes, ..VolumeOptions::default() }
}

/// A volume of two files, almost full.
fn make_base() -> Halves {
    let device = ModelDevice::new(Halves::new());
    mkfs(&*device, &MkfsOptions::default()).expect("a volume");
    let volume = Volume::open(device.clone(), options(0)).expect("it opens");
    for (name, text) in NAMES.iter().enumerate() {
        let file = volume.create(volume.root(), text, &FILE).expect("a file").inode;
        volume
            .write(file, 0, &[byte_of(name, 0); FILE_BLOCKS as usize * BLOCK_SIZE])
            .expect("space");
    }
    volume.sync().expect("a sync");
    let filler = volume.create(volume.root(), b"filler", &FILE).expect("a file").inode;
    let blocks = volume.space().available_blocks - FREE_BLOCKS;
    volume
        .allocate(
            filler,
            0,
            blocks * BLOCK_SIZE as u64,
            AllocateMode::Allocate { keep_size: false },
        )
        .expect("there is space");
    volume.close().expect("the end");
    drop(volume);
    device.halves.lock().clone()
}

impl Scene {
    fn new(base: &Halves, random: &mut Seeded) -> Arc<Self> {
        let device = ModelDevice::new(base.clone());
        let data_cache_bytes = [0, 0, 2, 64][random.below(4) as usize] * BLOCK_SIZE as u64;
        let flush = [FlushPolicy::Auto, FlushPolicy::Overlap][random.below(2) as usize];
        let options =
            VolumeOptions { discard: random.below(2) == 0, flush, ..options(data_cache_bytes) };
        let volume = Volume::open(device.clone(), options).expect("it opens");
        let files = (0..NAMES.len()).map(|name| {
            let inode = volume.lookup(volume.root(), NAMES[name]).expect("it is there").inode;
            History::new(inode, vec![byte_of(name, 0); FILE_BLOCKS as usize * BLOCK_SIZE])
        });
        let files = Mutex::new(Rank::LEAF, files.collect());
        Arc::new(Self { device, volume, files, outcomes: Outcomes::default() })
    }

    fn file(&self, name: usize) -> Arc<History> {
        Arc::clone(&self.files.lock()[name])
    }

    fn overwrite(&self, name: usize, random: &mut Seeded) {
        let file = self.file(name);
        let from = random.below(FILE_BLOCKS) as usize * BLOCK_SIZE;
        let end = (from + (1 + random.below(FILE_BLOCKS) as usize) * BLOCK_SIZE)
            .min(FILE_BLOCKS as usize * BLOCK_SIZE);
        let mut content = file.newest();
        content.resize(content.len().max(end), 0);
        content[from..end].fill(byte_of(name, random.below(4)));
        let data = content[from..end].to_vec();
        file.change(Some(content), || self.volume.write(file.inode, from as u64, &data));
    }

    fn set_size(&self, name: usize, random: &mut Seeded) {
        let file = self.file(name);
        let size = [0, 0, BLOCK_SIZE, BLOCK_SIZE + 700, FILE_BLOCKS as usize * BLOCK_SIZE]
            [random.below(5) as usize];
        let mut content = file.newest();
        content.resize(size, 0);
        let change = AttributeChange { size: Some(size as u64), ..AttributeChange::default() };
        file.change(Some(content), || self.volume.set_attributes(file.inode, &change).map(drop));
    }

    fn punch(&self, name: usize, random: &mut Seeded) {
        let file = self.file(name);
        let from = random.below(FILE_BLOCKS) as usize * BLOCK_SIZE;
        let mut content = file.newest();
        let end = content.len().min(from + BLOCK_SIZE);
        content[from.min(end)..end].fill(0);
        file.change(Some(content), || {
            self.volume.allocate(
                file.inode,
                from as u64,
                BLOCK_SIZE as u64,
                AllocateMode::PunchHole,
            )
        });
    }

    /// Removes the file, and makes another one of this name.
    fn replace(&self, name: usize) {
        let file = self.file(name);
        let root = self.volume.root();
        file.change(None, || {
            self.volume.unlink(root, NAMES[name])?;
            self.volume.forget(file.inode, 1);
            Ok(())
        });
        let made =
            self.volume.create(root, NAMES[name], &FILE).expect("what was removed makes room");
        self.files.lock()[name] = History::new(made.inode, Vec::new());
    }

    fn change(&self, name: usize, random: &mut Seeded) {
        match random.below(12) {
            0..6 => self.overwrite(name, random),
            6..8 => self.set_size(name, random),
            8 => self.punch(name, random),
            9 => self.replace(name),
            _ => self.volume.commit().expect("nothing fails"),
        }
        if random.below(3) > 0 {
            self.volume
                .fsync_blocking(self.file(name).inode, FsyncKind::Full)
                .expect("nothing fails");
        }
        note_progress();
    }

    /// Has the device read what a plan lacks, as a kernel would; whether it gave what it holds.
    fn read_device(&self, at: u64, bytes: &mut [u8], name: usize, random: &mut Seeded) -> bool {
        (0..random.below(30)).for_each(|_| thread::yield_now());
        self.device.read(at, bytes).expect("it never fails");
        if bytes.iter().any(|byte| *byte >= 16 && byte / 16 != byte_of(name, 0) / 16) {
            self.outcomes.foreign.fetch_add(1, SeqCst);
        }
        (0..random.below(30)).for_each(|_| thread::yield_now());
        let right = random.below(8) > 0;
        if !right {
            bytes[random.below(bytes.len() as u64) as usize] ^= 0x80;
        }
        right
    }

    /// A read as the transport does it.
    fn read(&self, name: usize, random: &mut Seeded) {
        let file = self.file(name);
        let offset = random.below(FILE_BLOCKS) as usize * BLOCK_SIZE;
        let mut buffer =
            AlignedBuffer::zeroed((1 + random.below(FILE_BLOCKS) as usize) * BLOCK_SIZE);
        let asked = buffer.len();
        let since = file.completed();
        match self.volume.read_at_once(file.inode, offset as u64, &mut buffer) {
            Some(ReadAtOnce::Done(length)) => {
                file.expect_content(since, offset, asked, &buffer[..length], "in memory");
                self.outcomes.in_memory.fetch_add(1, SeqCst);
                return;
            }
            Some(ReadAtOnce::Planned(planned)) => {
                assert_may_block(None);
                let right = self.read_device(
                    planned.device_offset_bytes(),
                    &mut buffer[planned.bytes()],
                    name,
                    random,
                );
                let since = file.completed();
                let finished = self.volume.finish_read(&planned, &buffer);
                assert_may_block(None);
                if let Some(length) = finished {
                    assert!(right, "what the device gave wrongly was taken");
                    file.expect_content(
                        since,
                        offset,
                        asked,
                        &buffer[..length],
                        "planned and finished",
                    );
                    self.outcomes.finished.fetch_add(1, SeqCst);
                    return;
                }
                self.outcomes.refused.fetch_add(1, SeqCst);
            }
            None => drop(self.outcomes.not_planned.fetch_add(1, SeqCst)),
        }
        let since = file.completed();
        match self.volume.read_into(file.inode, offset as u64, &mut buffer) {
            Ok(length) => {
                file.expect_content(since, offset, asked, &buffer[..length], "with waiting")
            }
            Err(Error::NotFound) => assert!(
                file.may_be(since, |content| content.is_none()),
                "inode {} is there",
                file.inode
            ),
            Err(error) => panic!("{error}"),
        }
    }
}

/// One schedule; what its reads came to.
fn reads_beside_changes(base: &Halves, seed: u64) -> [u64; 5] {
    let mut random = Seeded::new(seed);
    let scene = Scene::new(base, &mut random);
    let spawn = |task: fn(&Scene, Seeded), random: &mut Seeded| {
        let (scene, random) = (Arc::clone(&scene), Seeded::new(random.next_u64()));
        thread::spawn("model", move || task(&scene, random))
    };
    let threads = vec![
        spawn(|scene, mut random| (0..10).for_each(|_| scene.change(0, &mut random)), &mut random),
        spawn(|scene, mut random| (0..10).for_each(|_| scene.change(1, &mut random)), &mut random),
        spawn(
            |scene, mut random| {
                (0..14).for_each(|_| scene.read(random.below(2) as usize, &mut random))
            },
            &mut random,
        ),
        spawn(
            |scene, mut random| {
                (0..14).for_each(|_| scene.read(random.below(2) as usize, &mut random))
            },
            &mut random,
        ),
        spawn(
            |scene, _| (0..3).for_each(|_| scene.volume.commit().expect("nothing fails")),
            &mut random,
        ),
    ];
    super::join_all(threads);
    (0..4).for_each(|_| (0..NAMES.len()).for_each(|name| scene.read(name, &mut random)));
    scene.volume.close().expect("nothing fails");
    let Outcomes { in_memory, finished, refused, not_planned, foreign } = &scene.outcomes;
    [in_memory, finished, refused, not_planned, foreign].map(|count| count.load(SeqCst))
}

fn simulate<T: Send + 'static>(seed: u64, function: impl FnOnce() -> T + Send + 'static) -> T {
    let settings = Settings { seed, steps_max: STEPS_MAX, quiet_max: Duration::from_secs(3600) };
    simulation::run(&settings, function)
        .outcome
        .unwrap_or_else(|error| panic!("schedule {seed}: {error}"))
}

fn base() -> Arc<Halves> {
    static BASE: OnceLock<Arc<Halves>> = OnceLock::new();
    BASE.get_or_init(|| Arc::new(simulate(0, make_base))).clone()
}

#[test]
fn a_planned_read_is_what_the_file_holds() {
    let base = base();
    let mut sum = [0; 5];
    for seed in 0..schedules(800) as u64 {
        let base = Arc::clone(&base);
        let counts = simulate(seed, move || reads_beside_changes(&base, seed));
        sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    let [in_memory, finished, refused, not_planned, foreign] = sum;
    println!(
        "reads: {in_memory} in memory, {finished} finished, {refused} refused, {not_planned} not planned; {foreign} got another file's blocks"
    );
    assert!(sum.iter().all(|count| *count > 0), "the model misses something: {sum:?}");
}

/// A writer holds the file, and the device does not answer it before the reads have come to
/// nothing.
#[test]
fn planning_and_finishing_wait_for_nobody() {
    let base = base();
    for seed in 0..schedules(40) as u64 {
        let base = Arc::clone(&base);
        simulate(seed, move || {
            let scene = Scene::new(&base, &mut Seeded::new(seed));
            let file = scene.file(0);
            let mut buffer = AlignedBuffer::zeroed(BLOCK_SIZE);
            // Brings the file's items into memory, but not its data.
            scene.volume.seek(file.inode, 0, SeekTarget::Hole).expect("it is there");
            let Some(ReadAtOnce::Planned(planned)) =
                scene.volume.read_at_once(file.inode, 0, &mut buffer)
            else {
                panic!("no plan")
            };
            scene
                .device
                .read(planned.device_offset_bytes(), &mut buffer[planned.bytes()])
                .expect("it never fails");
            scene.device.stalls.store(true, SeqCst);
            let writer = {
                let scene = Arc::clone(&scene);
                thread::spawn("model", move || {
                    scene
                        .volume
                        .write(scene.file(0).inode, 7, b"a part of a block")
                        .expect("there is space")
                })
            };
            while !scene.device.stalled.load(SeqCst) {
                thread::yield_now();
            }
            assert_eq!(scene.volume.finish_read(&planned, &buffer), None);
            assert!(scene.volume.read_at_once(file.inode, 0, &mut buffer).is_none());
            scene.device.stalls.store(false, SeqCst);
            super::join_all(vec![writer]);
            assert_eq!(scene.volume.finish_read(&planned, &buffer), None);
        });
    }
}
