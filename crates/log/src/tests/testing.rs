//! What the tests share: a small volume on a simulated device, with commits that consist of a
//! superblock in memory.
use crate::{
    Batch, CommitReason, Cut, DataTicket, DataWrite, Log, LogOptions, LogStart, LogStatistics,
    Replay, ReplayError,
};
use cairn_blockdev::{AlignedBuffer, BlockBuffer, BlockDevice, SimulatedDevice};
use cairn_environment::Rank;
use cairn_environment::atomic::AtomicU64;
use cairn_environment::lock::Mutex;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, EntryFlags, Extent, ExtentKind, Features, Generation,
    Geometry, InodeNumber, ItemKind, Key, LogPosition, LogSeq, NodePointer, Superblock, TREE_FILES,
    TreeId, VolumeId, checksum,
};
use std::collections::BTreeMap;
use std::sync::Arc;

pub(crate) const VOLUME_BYTES: u64 = 16 << 20;
pub(crate) const LOG_BLOCKS: u64 = Geometry::LOG_BLOCKS_MIN;

pub(crate) type Items = BTreeMap<Key, Vec<u8>>;

pub(crate) fn key(offset: u64) -> Key {
    Key::new(InodeNumber(9), ItemKind::Symlink, offset)
}

pub(crate) fn extent_key(offset: u64) -> Key {
    Key::new(InodeNumber(9), ItemKind::Extent, offset)
}

pub(crate) fn geometry() -> Geometry {
    Geometry::for_size(VOLUME_BYTES, Some(LOG_BLOCKS * BLOCK_SIZE as u64)).unwrap()
}

pub(crate) fn superblock() -> Superblock {
    let geometry = geometry();
    Superblock {
        volume: VolumeId([3; 16]),
        generation: Generation(10),
        features: Features::default(),
        geometry,
        root: NodePointer { block: geometry.data_start(), generation: Generation(9), level: 0 },
        next_inode: 5,
        log_epoch: 2,
        log_tail: LogPosition { block: LOG_BLOCKS - 3, sequence: 7 },
        used_blocks: 0,
        bitmaps_checksum: 0,
        inodes: 0,
        next_tree: TreeId(TREE_FILES.0 + 1),
        next_list: 1,
        default_subvolume: TREE_FILES,
        hash_seed: [1; 16],
        created_ns: 0,
        clean: false,
        label: String::new(),
    }
}

pub(crate) struct Volume {
    pub(crate) device: Arc<SimulatedDevice>,
    pub(crate) log: Arc<Log>,
    pub(crate) superblock: Superblock,
    pub(crate) requests: Arc<Mutex<Vec<CommitReason>>>,
    pub(crate) next_inode: Arc<AtomicU64>,
    /// The transaction after the superblock's.
    pub(crate) running: Generation,
}

/// No background push unless a test wants it.
pub(crate) fn quiet_options() -> LogOptions {
    LogOptions {
        background_push_bytes: u64::MAX,
        hard_limit_bytes: u64::MAX,
        ..LogOptions::for_geometry(&geometry())
    }
}

/// Waiters completed in any way.
pub(crate) fn completed(statistics: &LogStatistics) -> u64 {
    statistics.grouped + statistics.committed + statistics.immediate
}

impl Volume {
    pub(crate) fn new() -> Self {
        Self::with_options(quiet_options())
    }

    pub(crate) fn with_options(options: LogOptions) -> Self {
        Self::mount(Arc::new(SimulatedDevice::new(VOLUME_BYTES)), superblock(), options)
    }

    pub(crate) fn mount(
        device: Arc<SimulatedDevice>,
        superblock: Superblock,
        options: LogOptions,
    ) -> Self {
        let options = LogOptions { baselines: super::baselines(), ..options };
        let requests = Arc::new(Mutex::new(Rank::LEAF, Vec::new()));
        let noted = Arc::clone(&requests);
        let running = superblock.generation.next();
        let start = LogStart {
            epoch: superblock.log_epoch,
            position: superblock.log_tail,
            generation: running,
        };
        let next_inode = Arc::new(AtomicU64::new(superblock.next_inode));
        let log = Log::new(
            Arc::clone(&device) as Arc<dyn BlockDevice>,
            superblock.volume,
            superblock.geometry,
            start,
            Arc::clone(&next_inode),
            Box::new(move |reason| noted.lock().push(reason)),
            options,
        );
        Self { device, log, superblock, requests, next_inode, running }
    }

    pub(crate) fn put(&self, offset: u64, value: &[u8]) -> LogSeq {
        let mut batch = Batch::new();
        batch.put(TREE_FILES, key(offset), value, EntryFlags::default());
        self.log.insert(&mut batch)
    }

    pub(crate) fn delete(&self, offset: u64) -> LogSeq {
        let mut batch = Batch::new();
        batch.delete(TREE_FILES, key(offset));
        self.log.insert(&mut batch)
    }

    /// Writes one block of data and logs its extent.
    pub(crate) fn put_data(&self, offset: u64, block: BlockNumber, fill: u8) -> LogSeq {
        let data = [fill; BLOCK_SIZE];
        self.device.write(block.offset_bytes(), &[&data]).unwrap();
        let mut batch = Batch::new();
        batch.put(
            TREE_FILES,
            extent_key(offset),
            &extent_of(block, &data, self.running).encode(),
            EntryFlags::NEW_DATA,
        );
        self.log.insert(&mut batch)
    }

    /// One block of data that the log is to write, and its ticket.
    pub(crate) fn carried(&self, block: BlockNumber, data: &[u8]) -> (DataWrite, Arc<DataTicket>) {
        let ticket = DataTicket::new(1);
        let data = BlockBuffer::from(AlignedBuffer::copy_of(data)).share();
        let range = BlockRange::new(block, 1);
        (DataWrite { range, data, generation: self.running, ticket: Arc::clone(&ticket) }, ticket)
    }

    /// Logs an extent of one block and leaves writing it to the log.
    pub(crate) fn put_carried(
        &self,
        offset: u64,
        block: BlockNumber,
        fill: u8,
    ) -> (LogSeq, Arc<DataTicket>) {
        let data = [fill; BLOCK_SIZE];
        let (write, ticket) = self.carried(block, &data);
        let mut batch = Batch::new();
        batch.put(
            TREE_FILES,
            extent_key(offset),
            &extent_of(block, &data, self.running).encode(),
            EntryFlags::NEW_DATA,
        );
        (self.log.insert_with_data(&mut batch, vec![write]), ticket)
    }

    pub(crate) fn cut(&mut self) -> Cut {
        self.running = self.running.next();
        self.log.cut(self.running)
    }

    /// The superblock of the transaction before the running one becomes durable.
    pub(crate) fn write_superblock(&mut self, cut: Cut) {
        // A log that was stopped writes nothing.
        let _ = self.log.write_data();
        self.device.flush().unwrap();
        let generation = Generation(self.running.0 - 1);
        self.superblock =
            Superblock { generation, log_tail: cut.position, ..self.superblock.clone() };
    }

    /// It is durable, and the log learns of it.
    pub(crate) fn commit(&mut self, cut: Cut) {
        self.write_superblock(cut);
        self.log.super_committed(self.superblock.generation);
    }

    pub(crate) fn requests(&self) -> Vec<CommitReason> {
        self.requests.lock().clone()
    }

    /// What a replay finds after a crash that loses everything unflushed.
    pub(crate) fn durable_device(&self) -> SimulatedDevice {
        self.device.crash_state_with(|unflushed| {
            vec![cairn_blockdev::simulated::Fate::Lost; unflushed.len()]
        })
    }

    pub(crate) fn replayed(&self) -> Items {
        let device = self.durable_device();
        let mut items = Items::new();
        apply(&replay(&device, &self.superblock).unwrap(), &mut items).unwrap();
        items
    }
}

pub(crate) fn extent_of(block: BlockNumber, data: &[u8], generation: Generation) -> Extent {
    let checksums = data.chunks(BLOCK_SIZE).map(checksum).collect();
    Extent {
        start: block,
        blocks: (data.len() / BLOCK_SIZE) as u64,
        kind: ExtentKind::Data,
        generation,
        written: generation,
        checksums,
    }
}

/// What counts after a crash.
pub(crate) fn replay<'d>(
    device: &'d dyn BlockDevice,
    superblock: &Superblock,
) -> Result<Replay<'d>, ReplayError> {
    crate::replay(device, superblock, &mut |_, _, _| {})
}

/// Applies what is to be replayed; returns the last operation in it.
pub(crate) fn apply(replay: &Replay<'_>, items: &mut Items) -> Result<Option<LogSeq>, ReplayError> {
    let mut last = None;
    for checkpoint in replay.checkpoints() {
        let checkpoint = checkpoint?;
        last = Some(checkpoint.header.last_operation);
        for entry in checkpoint.entries() {
            if entry.flags.contains(EntryFlags::DELETE) {
                items.remove(&entry.key);
            } else {
                items.insert(entry.key, entry.value.to_vec());
            }
        }
    }
    Ok(last)
}
