//! The runs of the crash-state test: what a volume and its clients are like, and the record of
//! what the clients do on it.
use crate::composition::Composition;
use crate::contents::BLOCK_BYTES;
use crate::files::{NEW_FILE, mkfs_options};
use crate::found::Found;
use crate::generator::Profile;
use crate::history::ClientHistory;
use crate::medium::Medium;
use crate::runner::make_bases;
use crate::sabotage::Sabotage;
use crate::workload::{Client, session};
use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_engine::mkfs::mkfs;
use cairn_engine::{AllocateMode, Error, FlushPolicy, FsyncWait, Volume, VolumeOptions};
use cairn_environment::atomic::AtomicU64;
use cairn_environment::random::Seeded;
use cairn_format::{BLOCK_SIZE, Geometry, Superblock};
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// The shape of one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    volume_bytes: u64,
    pub(crate) log_bytes: u64,
    clients: u8,
    operations_each: usize,
    sessions: usize,
    background: bool,
    commit_interval_ms: u64,
    discard: bool,
    fsync_wait: FsyncWait,
    flush: FlushPolicy,
    /// How long a flush takes, so that clients work while commits and groups are under way.
    flush_time_us: u64,
    /// Much is logged: the ring wraps around and is full now and then.
    full_log: bool,
    profile: Profile,
    /// What is free, if the volume is nearly full from the beginning.
    room: Option<Room>,
    /// The volume is mounted read-only between two sessions.
    read_only_between: bool,
    composition: Composition,
    /// Inodes leave memory all the time.
    few_inodes: bool,
}

/// The file in the root of a nearly full volume that holds what nobody may use.
pub(crate) const FILLER_NAME: &[u8] = b"filler";

/// What a nearly full volume has left.
#[derive(Clone, Copy, Debug)]
struct Room {
    bytes: u64,
    /// Length of its pieces; the whole, if it is in one piece.
    piece_bytes: u64,
    /// It is on both sides of a boundary between two block groups, if there is one.
    at_boundary: bool,
}

impl Room {
    fn random(random: &mut Seeded) -> Self {
        let bytes = [0, 256 << 10, MIB, 3 * MIB][random.below(4) as usize];
        let piece_bytes = [4 << 10, 20 << 10, 256 << 10, bytes][random.below(4) as usize];
        let at_boundary = random.chance(1, 3);
        Self { bytes, piece_bytes: piece_bytes.max(4 << 10), at_boundary }
    }

    /// Makes a file without a length that holds all other space, so that nobody has to read it. It
    /// belongs to no client, and lies behind `first_block` of the volume, nearly in one piece.
    fn leave(self, volume: &Volume, first_block: u64) -> Result<(), Error> {
        let file = volume.create(volume.root(), FILLER_NAME, &NEW_FILE)?.inode;
        let mut end = 0;
        let mut step = volume.space().total_blocks * BLOCK_BYTES;
        while step >= BLOCK_BYTES {
            step = step / BLOCK_BYTES * BLOCK_BYTES;
            match volume.allocate(file, end, step, AllocateMode::Allocate { keep_size: true }) {
                Ok(()) => end += step,
                Err(Error::NoSpace) => step /= 2,
                Err(error) => return Err(error),
            }
        }
        // Away from the end, so that there is something behind each piece.
        let mut left = self.bytes;
        let boundary = (Geometry::GROUP_BLOCKS - first_block) * BLOCK_BYTES;
        let mut piece = 0;
        if self.at_boundary && boundary + self.bytes < end {
            // Many pieces take twice their length, with what is between them.
            let before = if self.piece_bytes < self.bytes { self.bytes } else { self.bytes / 2 };
            piece = boundary - before;
        }
        while left > 0 && piece + self.piece_bytes <= end {
            volume.allocate(file, piece, self.piece_bytes, AllocateMode::PunchHole)?;
            left = left.saturating_sub(self.piece_bytes);
            piece += 2 * self.piece_bytes;
        }
        volume.forget(file, 1);
        volume.sync()
    }
}

impl Shape {
    pub(crate) fn random(random: &mut Seeded) -> Self {
        let clients = [1, 3, 3, 4][random.below(4) as usize];
        // One client and no background work: such a run can be repeated exactly.
        let background = clients > 1 && random.chance(3, 4);
        let full_log = random.chance(1, 3);
        let even = if full_log { Profile::CRASH_FULL_LOG } else { Profile::CRASH };
        let profile = if random.chance(2, 3) { even.swarm(random) } else { even };
        let volume_mib = match () {
            () if full_log || profile.is_large() => 96,
            () => [24, 32, 48, 80][random.below(4) as usize],
        };
        let room = random.chance(1, 4).then(|| Room::random(random));
        Self {
            volume_bytes: volume_mib * MIB,
            log_bytes: if full_log { MIB } else { MIB << random.below(3) },
            clients,
            operations_each: 60 + random.below(240) as usize,
            sessions: 1 + random.below(2) as usize,
            background,
            commit_interval_ms: if full_log {
                60_000
            } else {
                [5, 20, 100, 1000][random.below(4) as usize]
            },
            discard: random.chance(1, 2),
            fsync_wait: if random.chance(1, 4) { FsyncWait::Complete } else { FsyncWait::Super },
            full_log,
            flush_time_us: match (background, full_log) {
                (false, _) => 0,
                // A slow commit lets the clients fill the other half of the ring.
                (true, true) => [400, 10_000][random.below(2) as usize],
                (true, false) => [0, 100, 400, 2500][random.below(4) as usize],
            },
            flush: if random.chance(1, 2) { FlushPolicy::Overlap } else { FlushPolicy::Auto },
            profile,
            room,
            read_only_between: random.chance(1, 3),
            composition: Composition::random(random),
            few_inodes: random.chance(1, 2),
        }
    }

    /// What the volume stands on: only simulated devices have members.
    pub(crate) fn composition_on(&self, medium: Medium) -> Composition {
        if medium == Medium::Simulated { self.composition } else { Composition::Single }
    }

    /// Whether the seed decides all of the run, also which thread does something first.
    pub(crate) fn repeats_exactly(&self) -> bool {
        self.clients == 1 && !self.background
    }

    fn options(&self) -> VolumeOptions {
        VolumeOptions {
            commit_interval: Duration::from_millis(self.commit_interval_ms),
            background: self.background,
            discard: self.discard,
            fsync_wait: self.fsync_wait,
            flush: self.flush,
            // A small cache makes commits frequent, which keeps the log short.
            node_cache_bytes: if self.full_log { 64 << 20 } else { 256 << 10 },
            // So small that blocks leave it all the time; or none.
            data_cache_bytes: if self.discard { 0 } else { 32 << 10 },
            inode_cache_entries: if self.few_inodes {
                0
            } else {
                VolumeOptions::default().inode_cache_entries
            },
            ..VolumeOptions::default()
        }
    }
}

impl Shape {
    /// Whether free blocks are discarded all the time: where nothing else discards, and commits are
    /// quick.
    fn trims(&self) -> bool {
        self.background && !self.discard && !self.full_log
    }
}

/// How long the discard of a free run takes, so that clients meet it.
const DISCARD_TIME: Duration = Duration::from_micros(100);

/// How late writes are answered at most, so that flushes begin meanwhile.
const LATE_WRITES_US: [u64; 3] = [0, 200, 1000];

/// A record of one run, ready to be crashed.
pub(crate) struct Recorded {
    pub(crate) device: Arc<SimulatedDevice>,
    pub(crate) histories: Vec<ClientHistory>,
    pub(crate) log_blocks_written: u64,
    pub(crate) fallbacks: u64,
    /// Operations that a full volume refused, or did in part.
    pub(crate) refused: u64,
    /// Several threads wrote to a device that answers late.
    pub(crate) is_late: bool,
}

/// The first block of a new volume that may hold anything.
fn first_allocatable(device: &dyn BlockDevice) -> Result<u64, String> {
    let slot = Geometry::SUPERBLOCKS[0];
    let mut bytes = vec![0; BLOCK_SIZE];
    device.read(slot.offset_bytes(), &mut bytes).map_err(|error| error.to_string())?;
    let superblock = Superblock::decode(&bytes, slot).map_err(|error| error.to_string())?;
    Ok(superblock.geometry.allocatable().start.0)
}

/// Reads all of a volume that is mounted read-only: nothing may be written.
fn only_read(
    device: &SimulatedDevice,
    opened: Arc<dyn BlockDevice>,
    shape: &Shape,
) -> Result<(), String> {
    let before = device.history_len();
    let options = VolumeOptions { read_only: true, ..shape.options() };
    let volume =
        Volume::open(opened, options).map_err(|error| format!("open read-only: {error}"))?;
    let found = Found::read(&volume)?;
    if let Some(error) =
        found.objects.values().find_map(|object| object.bytes.as_ref()?.as_ref().err())
    {
        return Err(format!("mounted read-only: {error}"));
    }
    volume.close().map_err(|error| format!("closing what was read: {error}"))?;
    if device.history_len() != before {
        return Err("a read-only mount writes".into());
    }
    Ok(())
}

pub(crate) fn record(
    shape: &Shape,
    random: &mut Seeded,
    medium: Medium,
    sabotage: Sabotage,
) -> Result<Recorded, String> {
    let composition = shape.composition_on(medium);
    let device = Arc::new(composition.device(shape.volume_bytes));
    let way = medium.reach(&device, composition, random);
    let options = mkfs_options(shape.log_bytes);
    mkfs(&*way.make()?, &options).map_err(|error| format!("mkfs: {error}"))?;
    let open = || {
        Volume::open(way.open(false)?, shape.options()).map_err(|error| format!("open: {error}"))
    };
    let first_block = first_allocatable(&*way.open(true)?)?;
    let volume = open()?;
    make_bases(&volume, shape.clients).map_err(|error| format!("making the bases: {error}"))?;
    if let Some(room) = shape.room {
        room.leave(&volume, first_block).map_err(|error| format!("filling the volume: {error}"))?;
    }
    volume.close().map_err(|error| format!("closing the empty volume: {error}"))?;
    drop(volume);
    device.start_recording();
    device.set_delay(Operation::Flush, Duration::from_micros(shape.flush_time_us));
    device.set_delay(Operation::Discard, if shape.trims() { DISCARD_TIME } else { Duration::ZERO });
    let mut is_late = false;
    if !shape.repeats_exactly() {
        let late_us = LATE_WRITES_US[random.below(LATE_WRITES_US.len() as u64) as usize];
        device.set_late_writes(Duration::from_micros(late_us));
        is_late = late_us > 0 && medium == Medium::Simulated;
    }
    let order = Arc::new(AtomicU64::new(0));
    let mut profile = shape.profile;
    // Writes of 256 KiB and more don't fill holes.
    if medium != Medium::Simulated && random.chance(1, 2) {
        profile.file_bytes_max = 768 << 10;
    }
    let client = |client| {
        let mut client = Client::new(client, random.next_u64(), profile, order.clone());
        client.history.sabotage = sabotage;
        client
    };
    let mut clients: Vec<Client> = (0..shape.clients).map(client).collect();
    let (mut log_blocks_written, mut fallbacks) = (0, 0);
    // Each time it is opened, a file is looked at for the holes that discards have made.
    let times = if medium == Medium::Simulated { 1 } else { 3 };
    for number in 0..shape.sessions * times {
        if number > 0 && shape.read_only_between {
            only_read(&device, way.open(true)?, shape)?;
        }
        let volume = open()?;
        let operations_each = shape.operations_each / times;
        session(&mut clients, volume.clone(), &device, operations_each, shape.trims())?;
        let statistics = volume.statistics();
        log_blocks_written += statistics.log.blocks_written;
        fallbacks +=
            statistics.log.fallbacks_ring_full + statistics.log.fallbacks_context_too_large;
    }
    let refused = clients.iter().map(|client| client.refused).sum();
    let histories = clients.into_iter().map(|client| client.history).collect();
    Ok(Recorded { device, histories, log_blocks_written, fallbacks, refused, is_late })
}
