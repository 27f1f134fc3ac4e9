//! Opening a volume: superblock, bitmaps, trees, log.
//!
//! 1. Take the valid superblock with the highest generation out of three.
//! 2. Per group take the newest valid bitmap that is not newer than the superblock. A newer one was
//!    written by a commit that a crash cut short; such a group is written again by the first
//!    commit, or the stale slot could be taken for that commit's. Their sum must be the
//!    superblock's, or an older one stands in for one that is damaged.
//! 3. Walk the log from the superblock's tail to the first checkpoint that fails.
//! 4. Mark the blocks that the log's extents use, before any node is allocated.
//! 5. Apply the log's checkpoints in order to the trees, in memory, in a transaction of its own.
//! 6. Settle the superblocks: which one was found must not depend on what isn't durable. *A crash:
//!    again.* On a mirror that was not closed, make the copies of what is overwritten in place the
//!    same (`cairn_blockdev::composed` says why that is right). *A crash: again.*
//! 7. The first commit makes all that durable together with a new log epoch. *A crash before: all
//!    of this again.*
mod bitmaps;
pub(crate) mod meter;
mod replay;
pub(crate) mod superblock;

use super::counters::Counters;
use super::cut_work::CutWork;
use super::discards::Discards;
use super::failures::{FailureLedger, Watched};
use super::inode_count::InodeCount;
use super::list_births::ListBirths;
use super::requests::{CommitSignal, Unpinner};
use super::snapshot_counts::SnapshotCounts;
use super::transaction::Transactions;
use super::trees::Trees;
use super::turns::Turns;
use super::{Observer, Store};
use crate::{Result, VolumeOptions};
use bitmaps::read_bitmaps;
use cairn_blockdev::{BlockDevice, FlushFence};
use cairn_btree::NodeCache;
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, AtomicU64};
use cairn_environment::lock::Mutex;
use cairn_format::{Geometry, Superblock};
use cairn_log::{CommitReason, CommitRequest, Log, LogOptions};
use cairn_space::Space;
use meter::RecoveryMeter;
use replay::Replayer;
use std::sync::Arc;
use superblock::read_superblock;

/// The cache of snapshots' nodes has this part of the memory that the other cache has, and where
/// that is little, as much as the other one: paths of a few snapshots should find room.
const SNAPSHOT_CACHE_PART: u64 = 4;
const SNAPSHOT_CACHE_BYTES_MIN: u64 = 2 << 20;

impl Store {
    /// Steps 1 to 6; the volume is not running yet.
    pub(crate) fn recover(
        device: Arc<dyn BlockDevice>,
        options: VolumeOptions,
        observer: Arc<dyn Observer>,
        meter: &mut RecoveryMeter<'_>,
    ) -> Result<Self> {
        let failures = FailureLedger::new();
        let device: Arc<dyn BlockDevice> =
            Arc::new(FlushFence::new(Arc::new(Watched::new(device, &failures))));
        meter.at("superblock and bitmaps", 0, 0);
        let superblock = read_superblock(&*device, options.read_only)?;
        let bitmaps = read_bitmaps(&*device, &superblock, options.read_only)?;
        let space = Space::new(superblock.geometry, bitmaps.bits);
        for group in bitmaps.stale {
            space.mark_changed(group);
        }
        let cache = node_cache(&device, &superblock, &options);
        let snapshot_cache = cache_of_snapshots(&cache, &options);
        let trees = Trees::open([&cache, &snapshot_cache], &space, &superblock, options.subvolume)?;
        let counters = Counters::default();
        let inode_count = InodeCount::new(superblock.inodes);
        let replayer = Replayer {
            space: &space,
            trees: &trees,
            superblock: &superblock,
            counters: &counters,
            inode_count: &inode_count,
        };
        let (start, next_inode) = replayer.replay(&*device, options.read_only, meter)?;
        let next_inode = Arc::new(AtomicU64::new(next_inode));
        let signal = CommitSignal::new();
        let request = log_requests(signal.clone());
        let log_options = log_options(&options, &superblock.geometry);
        let log = Log::new(
            device.clone(),
            superblock.volume,
            superblock.geometry,
            start,
            next_inode.clone(),
            request,
            log_options,
        );
        Ok(Self {
            device,
            failures,
            superblock,
            options,
            space,
            trees,
            log,
            delayed_blocks: AtomicU64::new(0),
            counters,
            storage_room: Arc::default(),
            inode_count,
            cache,
            transactions: Transactions::new(start.generation),
            cut_work: CutWork::new(),
            list_births: ListBirths::new(),
            turns: Turns::new(),
            snapshot_counts: SnapshotCounts::new(),
            log_epoch: start.epoch,
            next_inode,
            bitmap_slots: Mutex::new(Rank::LEAF, bitmaps.slots),
            discards: Discards::new(),
            signal,
            unpinner: Unpinner::new(),
            failed: AtomicBool::new(false),
            observer,
        })
    }
}

fn node_cache(
    device: &Arc<dyn BlockDevice>,
    superblock: &Superblock,
    options: &VolumeOptions,
) -> Arc<NodeCache> {
    let cache = NodeCache::new(
        device.clone(),
        superblock.volume,
        superblock.geometry,
        options.node_cache_bytes,
    );
    options.baselines.node_cache(cache)
}

fn cache_of_snapshots(live: &Arc<NodeCache>, options: &VolumeOptions) -> Arc<NodeCache> {
    let limit_bytes = (options.node_cache_bytes / SNAPSHOT_CACHE_PART)
        .max(SNAPSHOT_CACHE_BYTES_MIN.min(options.node_cache_bytes));
    NodeCache::of_snapshots(live, limit_bytes)
}

/// What the log does when it needs a commit, or has failed.
fn log_requests(signal: Arc<CommitSignal>) -> CommitRequest {
    Box::new(move |reason| {
        if reason == CommitReason::LogFailed {
            signal.pass_on_failure();
        } else {
            signal.request();
        }
    })
}

fn log_options(options: &VolumeOptions, geometry: &Geometry) -> LogOptions {
    LogOptions {
        flush: options.flush,
        read_only: options.read_only,
        baselines: options.baselines.of_the_log(),
        ..LogOptions::for_geometry(geometry)
    }
}
