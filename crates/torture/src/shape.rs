//! The runs of the crash-state test: what a volume and its clients are like, and the record of
//! what the clients do on it.
use crate::files::mkfs_options;
use crate::generator::Profile;
use crate::history::ClientHistory;
use crate::runner::make_bases;
use crate::sabotage::Sabotage;
use crate::workload::{Client, session};
use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_engine::mkfs::mkfs;
use cairn_engine::{FlushPolicy, FsyncWait, Volume, VolumeOptions};
use cairn_environment::atomic::AtomicU64;
use cairn_environment::random::Seeded;
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
}

impl Shape {
    pub(crate) fn random(random: &mut Seeded) -> Self {
        let clients = [1, 3, 3, 4][random.below(4) as usize];
        // One client and no background work: such a run can be repeated exactly.
        let background = clients > 1 && random.chance(3, 4);
        let full_log = random.chance(1, 3);
        let volume_mib = if full_log { 96 } else { [24, 32, 48, 80][random.below(4) as usize] };
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
        }
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
}

pub(crate) fn record(
    shape: &Shape,
    random: &mut Seeded,
    sabotage: Sabotage,
) -> Result<Recorded, String> {
    let device = Arc::new(SimulatedDevice::new(shape.volume_bytes));
    let options = mkfs_options(shape.log_bytes);
    mkfs(&*device, &options).map_err(|error| format!("mkfs: {error}"))?;
    let open = || {
        Volume::open(device.clone() as Arc<dyn BlockDevice>, shape.options())
            .map_err(|error| format!("open: {error}"))
    };
    let volume = open()?;
    make_bases(&volume, shape.clients).map_err(|error| format!("making the bases: {error}"))?;
    volume.close().map_err(|error| format!("closing the empty volume: {error}"))?;
    device.start_recording();
    device.set_delay(Operation::Flush, Duration::from_micros(shape.flush_time_us));
    device.set_delay(Operation::Discard, if shape.trims() { DISCARD_TIME } else { Duration::ZERO });
    if !shape.repeats_exactly() {
        let late_us = LATE_WRITES_US[random.below(LATE_WRITES_US.len() as u64) as usize];
        device.set_late_writes(Duration::from_micros(late_us));
    }
    let order = Arc::new(AtomicU64::new(0));
    let profile = if shape.full_log { Profile::CRASH_FULL_LOG } else { Profile::CRASH };
    let client = |client| {
        let mut client = Client::new(client, random.next_u64(), profile, order.clone());
        client.history.sabotage = sabotage;
        client
    };
    let mut clients: Vec<Client> = (0..shape.clients).map(client).collect();
    let (mut log_blocks_written, mut fallbacks) = (0, 0);
    for _ in 0..shape.sessions {
        let volume = open()?;
        session(&mut clients, volume.clone(), &device, shape.operations_each, shape.trims())?;
        let statistics = volume.statistics();
        log_blocks_written += statistics.log.blocks_written;
        fallbacks +=
            statistics.log.fallbacks_ring_full + statistics.log.fallbacks_context_too_large;
    }
    let histories = clients.into_iter().map(|client| client.history).collect();
    Ok(Recorded { device, histories, log_blocks_written, fallbacks })
}
