//! A sync writes many small files in a few large writes. One that can't be written keeps no other
//! from becoming durable.
use cairn_blockdev::simulated::Fate;
use cairn_blockdev::{BlockDevice, DeviceError, Operation, SimulatedDevice, forward_to_device};
use cairn_engine::{Error, FileType, FsyncKind, InodeId, NewInode, Volume, VolumeOptions, mkfs};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use cairn_format::BLOCK_SIZE;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };
// Without a cache of data: what is no dirty page is read from the device.
const OPTIONS: fn() -> VolumeOptions =
    || VolumeOptions { background: false, data_cache_bytes: 0, ..VolumeOptions::default() };

fn open(device: Arc<dyn BlockDevice>) -> Volume {
    Volume::open(device, OPTIONS()).unwrap()
}

/// The device after a power failure that loses all that no flush covered.
fn crashed(device: &SimulatedDevice) -> Volume {
    open(Arc::new(device.crash_state_with(|unflushed| vec![Fate::Lost; unflushed.len()])))
}

fn name(index: usize) -> Vec<u8> {
    format!("file {index}").into_bytes()
}

/// No two files have a block in common.
fn content(index: usize, length_bytes: usize) -> Vec<u8> {
    (0..length_bytes.div_ceil(8))
        .flat_map(|word| ((index as u64) << 32 | word as u64).to_le_bytes())
        .take(length_bytes)
        .collect()
}

/// The file with this content.
fn owner(block: &[u8]) -> usize {
    u32::from_le_bytes(block[4..8].try_into().unwrap()) as usize
}

fn create(volume: &Volume, lengths_bytes: &[usize]) -> Vec<InodeId> {
    let one = |(index, length_bytes): (usize, &usize)| {
        let file = volume.create(volume.root(), &name(index), &FILE).unwrap().inode;
        volume.write(file, 0, &content(index, *length_bytes)).unwrap();
        file
    };
    lengths_bytes.iter().enumerate().map(one).collect()
}

fn is_right(volume: &Volume, index: usize, length_bytes: usize) -> bool {
    let mut read = Vec::new();
    let file = volume.lookup(volume.root(), &name(index)).unwrap().inode;
    volume.read(file, 0, 1 << 20, &mut read).is_ok() && read == content(index, length_bytes)
}

#[test]
fn a_sync_of_many_small_files_takes_few_writes() {
    const FILES: usize = 500;
    // What is queued before it is written, and a file more, which is queued as a whole.
    const WRITE_BYTES_MAX: u64 = (256 + 64) * BLOCK_SIZE as u64;
    let device = Arc::new(SimulatedDevice::new(128 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = open(device.clone());
    let mut random = Seeded::new(3);
    let lengths: Vec<usize> =
        (0..FILES).map(|_| (3 << 10) + random.below(17 << 10) as usize).collect();
    create(&volume, &lengths);
    let blocks: usize = lengths.iter().map(|length| length.div_ceil(BLOCK_SIZE)).sum();
    assert_eq!(
        volume.statistics().dirty_data_bytes,
        (blocks * BLOCK_SIZE) as u64,
        "nothing is written before the sync"
    );
    let longest = Arc::new(Mutex::new(Rank::LEAF, 0));
    let seen = Arc::clone(&longest);
    device.fail_when(move |request| {
        let mut longest = seen.lock();
        *longest = request.length_bytes.max(*longest);
        false
    });
    let before = device.counters();
    volume.sync().unwrap();
    let after = device.counters();
    let (writes, flushes) = (after.writes - before.writes, after.flushes - before.flushes);
    let longest = *longest.lock();
    assert!(writes < 60 && flushes <= 4, "{writes} writes and {flushes} flushes for {FILES} files");
    assert!(after.bytes_written - before.bytes_written >= (blocks * BLOCK_SIZE) as u64);
    assert!(
        longest <= WRITE_BYTES_MAX,
        "a write of {longest} bytes, for which an fsync may have to wait"
    );
    assert_eq!(volume.statistics().dirty_data_bytes, 0);
    // The pages have left memory, those of the last files too.
    let before = device.counters().reads;
    assert!(lengths.iter().enumerate().all(|(index, length)| is_right(&volume, index, *length)));
    assert!(device.counters().reads >= before + FILES as u64);
    let state = crashed(&device);
    let wrong: Vec<usize> =
        (0..FILES).filter(|&index| !is_right(&state, index, lengths[index])).collect();
    assert!(wrong.is_empty(), "after a crash these are not as they were: {wrong:?}");
    // Nothing is left to do.
    let before = device.counters().writes;
    volume.sync().unwrap();
    assert_eq!(device.counters().writes, before);
    volume.close().unwrap();
}

/// Writes the blocks of all files but one. Those it refuses everywhere, or only at the first place.
struct Picky {
    device: SimulatedDevice,
    refuses: AtomicBool,
    victim: usize,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    /// Where the victim's blocks were to go first.
    bad: BTreeSet<u64>,
    /// Whether it is `bad` that is refused, not the blocks.
    only_bad: bool,
    /// Where they went at last.
    written: BTreeSet<u64>,
    /// Whole writes that were refused although they carried other files' blocks too.
    shared_refusals: usize,
}

impl Picky {
    fn refuse(&self, offset_bytes: u64, buffers: &[&[u8]]) -> bool {
        let blocks = buffers.iter().flat_map(|buffer| buffer.chunks_exact(BLOCK_SIZE));
        let placed = (offset_bytes..).step_by(BLOCK_SIZE).zip(blocks);
        let is_victim = |block: &[u8]| {
            owner(block) == self.victim && block[..BLOCK_SIZE] == content_block(block)[..]
        };
        let (mine, others): (Vec<_>, Vec<_>) = placed.partition(|(_, block)| is_victim(block));
        let mine: BTreeSet<u64> = mine.into_iter().map(|(place, _)| place).collect();
        let mut places = self.places.lock();
        if mine.is_empty() || !self.refuses.load(Ordering::SeqCst) {
            places.written.extend(mine);
            return false;
        }
        if places.bad.is_empty() {
            places.bad.clone_from(&mine);
        }
        if places.only_bad && places.bad.is_disjoint(&mine) {
            places.written.extend(mine);
            return false;
        }
        places.shared_refusals += usize::from(!others.is_empty());
        true
    }
}

/// What a file's block that begins like this one holds.
fn content_block(block: &[u8]) -> Vec<u8> {
    let first = u64::from_le_bytes(block[..8].try_into().unwrap());
    (0..BLOCK_SIZE as u64 / 8).flat_map(|word| first.wrapping_add(word).to_le_bytes()).collect()
}

impl BlockDevice for Picky {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        if self.refuse(offset_bytes, buffers) {
            let mut is_over = false;
            self.device.fail_when(move |request| {
                request.operation == Operation::Write
                    && request.offset_bytes == offset_bytes
                    && !std::mem::replace(&mut is_over, true)
            });
        }
        self.device.write(offset_bytes, buffers)
    }
    forward_to_device!(self => self.device; read, flush, discard, length_bytes, flush_time);
}

const FILES: usize = 40;
const VICTIM: usize = 17;
const LENGTH: usize = 3 * BLOCK_SIZE;

fn picky(only_bad: bool) -> (Arc<Picky>, Volume, Vec<InodeId>) {
    let places = Mutex::new(Rank::LEAF, Places { only_bad, ..Places::default() });
    let device = Arc::new(Picky {
        device: SimulatedDevice::new(64 << 20),
        refuses: AtomicBool::new(false),
        victim: VICTIM,
        places,
    });
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = open(device.clone());
    let files = create(&volume, &[LENGTH; FILES]);
    device.refuses.store(true, Ordering::SeqCst);
    (device, volume, files)
}

fn wrong(volume: &Volume) -> Vec<usize> {
    (0..FILES).filter(|&index| !is_right(volume, index, LENGTH)).collect()
}

#[derive(Clone, Copy, Debug)]
enum FsyncWay {
    Blocking,
    Callback,
    Brief,
    BriefWithFlush,
}

impl FsyncWay {
    fn of(self, volume: &Volume, file: InodeId) -> Result<(), Error> {
        let (sender, told) = std::sync::mpsc::channel();
        let completion = Box::new(move |result| sender.send(result).unwrap());
        match self {
            Self::Blocking => return volume.fsync_blocking(file, FsyncKind::Full),
            Self::Callback => volume.fsync(file, FsyncKind::Full, completion),
            Self::Brief => volume.fsync_briefly(file, FsyncKind::Full, false, completion),
            Self::BriefWithFlush => volume.fsync_briefly(file, FsyncKind::Full, true, completion),
        }
        told.recv().unwrap()
    }
}

#[test]
fn a_file_that_cannot_be_written_keeps_nothing_else_of_its_sweep() {
    type Again = fn(&Volume, InodeId);
    let ways: [(&str, Again); 3] = [
        ("a sync", |volume, _| volume.sync().unwrap()),
        ("an fsync", |volume, file| volume.fsync_blocking(file, FsyncKind::Full).unwrap()),
        ("an fsync of its data", |volume, file| {
            volume.fsync_blocking(file, FsyncKind::DataOnly).unwrap()
        }),
    ];
    for (what, again) in ways {
        let (device, volume, files) = picky(false);
        let victim = files[VICTIM];
        for attempt in 0..2 {
            volume.sync().unwrap_err();
            let statistics = volume.statistics();
            assert_eq!(statistics.dirty_data_bytes, LENGTH as u64, "of that file alone");
            assert!(statistics.failure.is_none() && statistics.failures.write_errors > 0);
            assert_eq!(statistics.failures.last.unwrap().inode, Some(victim.0));
            assert_eq!(wrong(&volume), [], "who reads it sees what was written");
            assert_eq!(wrong(&crashed(&device.device)), [VICTIM], "attempt {attempt}");
        }
        // However an fsync waits, it says so; and what it tried is tried again by the next one.
        for fsync in
            [FsyncWay::Blocking, FsyncWay::Callback, FsyncWay::Brief, FsyncWay::BriefWithFlush]
        {
            assert!(fsync.of(&volume, victim).is_err(), "{fsync:?}");
        }
        // A write of the sweep had others' blocks beside the file's: each was tried again alone.
        assert!(device.places.lock().shared_refusals > 0);
        device.refuses.store(false, Ordering::SeqCst);
        again(&volume, victim);
        assert_eq!(volume.statistics().dirty_data_bytes, 0, "{what}");
        assert_eq!(wrong(&crashed(&device.device)), [], "{what}");
        let places = device.places.lock();
        assert_eq!(places.written.len(), LENGTH / BLOCK_SIZE);
        assert!(
            places.written.is_disjoint(&places.bad),
            "{what}: blocks that extents named before hold it now"
        );
    }
}

#[test]
fn a_sync_puts_elsewhere_what_a_bad_place_does_not_take() {
    let (device, volume, _) = picky(true);
    volume.sync().unwrap();
    assert!(!device.places.lock().bad.is_empty());
    let statistics = volume.statistics();
    assert_eq!(statistics.dirty_data_bytes, 0);
    assert!(statistics.failures.write_errors > 0);
    assert_eq!(wrong(&crashed(&device.device)), []);
    assert_eq!(wrong(&volume), []);
    volume.close().unwrap();
    assert_eq!(wrong(&open(device)), []);
}

/// It takes no sync and no full memory for that.
#[test]
fn a_file_that_grows_is_written_meanwhile() {
    const PART_BYTES: usize = 1 << 20;
    const PARTS: usize = 40;
    let device = Arc::new(SimulatedDevice::new(256 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let options = VolumeOptions {
        commit_interval: Duration::from_secs(3600),
        data_cache_bytes: 0,
        ..VolumeOptions::default()
    };
    let volume = Volume::open(device.clone(), options).unwrap();
    let file = volume.create(volume.root(), &name(7), &FILE).unwrap().inode;
    let all = content(7, PARTS * PART_BYTES);
    for (index, part) in all.chunks(PART_BYTES).enumerate() {
        volume.write(file, (index * PART_BYTES) as u64, part).unwrap();
    }
    // All but what is too little to be written for its own sake.
    while volume.statistics().dirty_data_bytes >= 8 << 20 {
        thread::yield_now();
    }
    assert_eq!(volume.statistics().commits, 1, "that of the mount");
    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    let mut read = Vec::new();
    for volume in [&crashed(&device), &volume] {
        let file = volume.lookup(volume.root(), &name(7)).unwrap().inode;
        read.clear();
        volume.read(file, 0, PARTS * PART_BYTES, &mut read).unwrap();
        assert!(read == all);
    }
    volume.close().unwrap();
}
