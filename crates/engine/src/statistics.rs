//! Counters of a volume, in the form that `cairn stats` prints.
use crate::fsync_stage::FsyncStage;
use crate::layers::Layers;
use crate::names::held_space::SnapshotStatistics;
use crate::store::failures::Failures;
use crate::store::recovery::meter::RecoveryPhase;
use cairn_blockdev::DeviceHealth;
use cairn_blockdev::composed::MemberHealth;
use cairn_btree::CacheStatistics;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_format::{BLOCK_SIZE, NODE_BLOCKS};
use cairn_log::LogStatistics;
use serde::{Deserialize, Serialize};

/// Counters since the volume was opened, and sizes now. Times in nanoseconds where the name says
/// so.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Statistics {
    /// What failed on the device.
    pub failures: Failures,
    /// Why the volume is read-only, if it stopped.
    pub failure: Option<String>,
    pub volume: String,
    pub label: String,
    pub storage_full: bool,
    pub generation: u64,
    pub total_bytes: u64,
    pub available_bytes: u64,
    pub used_bytes: u64,
    pub pinned_bytes: u64,
    pub dirty_data_bytes: u64,
    pub inodes_in_memory: u64,
    /// Inodes that the kernel, or a user of the library, holds a reference on.
    pub inodes_referenced: u64,
    /// Of the tree nodes in memory.
    #[serde(flatten)]
    pub nodes: CacheStatistics,
    /// Blocks of file data that were read from memory, although the device had them.
    pub data_cache_hits: u64,
    /// Blocks of file data that were read from the device; 0 without the cache.
    pub data_cache_misses: u64,
    pub data_cache_bytes: u64,
    #[serde(flatten)]
    pub log: LogStatistics,
    /// Space that operations in work and delayed data hold.
    pub reserved_bytes: u64,
    pub tickets_waiting: u64,
    pub tickets_waited: u64,
    pub tickets_granted: u64,
    pub tickets_failed: u64,
    pub ticket_wait_max_ns: u64,
    pub reclaim_writes: u64,
    pub reclaim_commits: u64,
    pub reclaim_preemptive_runs: u64,
    /// The greatest share of the nodes it had reserved that any operation used.
    pub worst_case_used_percent: u64,
    pub commits: u64,
    pub nodes_written: u64,
    pub replayed_checkpoints: u64,
    pub replayed_items: u64,
    /// What opening the volume did, phase by phase.
    pub recovery: Vec<RecoveryPhase>,
    pub device_flush_time_ns: u64,
    /// In the order of their course.
    pub fsync_stages: Vec<FsyncStage>,
    pub snapshots: SnapshotStatistics,
    /// Of a mirror or concatenation.
    pub device: Option<ComposedDevice>,
}

impl Statistics {
    /// Fsyncs that ended well, and syncs.
    pub fn fsyncs(&self) -> u64 {
        let log = &self.log;
        log.grouped + log.committed + log.immediate
    }
}

/// How the members of a mirror or concatenation are.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct ComposedDevice {
    pub kind: String,
    pub pool: String,
    pub degraded: bool,
    pub repaired_blocks: u64,
    pub resynchronised_blocks: u64,
    pub members: Vec<DeviceMember>,
}

/// One member.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct DeviceMember {
    pub name: String,
    pub state: String,
    pub bad_reads: u64,
    pub write_errors: u64,
    pub checksum_errors: u64,
    pub bad_blocks: u64,
    pub rewritten_blocks: u64,
    pub flush_time_ns: u64,
}

impl From<DeviceHealth> for ComposedDevice {
    fn from(health: DeviceHealth) -> Self {
        let DeviceHealth {
            kind,
            pool,
            degraded,
            repaired_blocks,
            resynchronised_blocks,
            members,
            ..
        } = health;
        let member = |member: MemberHealth| DeviceMember {
            name: member.name,
            state: member.state,
            bad_reads: member.bad_reads,
            write_errors: member.write_errors,
            checksum_errors: member.checksum_errors,
            bad_blocks: member.bad_blocks,
            rewritten_blocks: member.rewritten_blocks,
            flush_time_ns: member.flush_time_ns,
        };
        let members = members.into_iter().map(member).collect();
        Self {
            kind: kind.to_owned(),
            pool,
            degraded,
            repaired_blocks,
            resynchronised_blocks,
            members,
        }
    }
}

impl Layers {
    /// Reads all counters; they belong to about the same moment.
    pub(crate) fn statistics(&self) -> Statistics {
        let Self { store, files, names, recovery } = self;
        let space = store.space.report();
        let data_cache = files.data_cache.statistics();
        let block = BLOCK_SIZE as u64;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let available_blocks = self.space_info().available_blocks;
        Statistics {
            failures: names.known_failures(),
            failure: store.failure(),
            volume: store.superblock.volume.to_string(),
            label: store.superblock.label.clone(),
            storage_full: store.storage_room.is_tight(),
            generation: store.transactions.generation().0,
            total_bytes: space.total_blocks * block,
            available_bytes: available_blocks * block,
            used_bytes: space.used * block,
            pinned_bytes: space.pinned * block,
            dirty_data_bytes: count(&store.delayed_blocks) * block,
            inodes_in_memory: files.inodes.len() as u64,
            inodes_referenced: files.inodes.referenced() as u64,
            nodes: store.cache.statistics(),
            data_cache_hits: data_cache.hits,
            data_cache_misses: data_cache.misses,
            data_cache_bytes: data_cache.bytes,
            log: store.log.statistics(),
            reserved_bytes: (space.reserved_data + space.reserved_nodes * NODE_BLOCKS) * block,
            tickets_waiting: space.tickets_waiting,
            tickets_waited: space.tickets_waited,
            tickets_granted: space.tickets_granted,
            tickets_failed: space.tickets_failed,
            ticket_wait_max_ns: space.ticket_wait_max.as_nanos() as u64,
            reclaim_writes: space.reclaim_writes,
            reclaim_commits: space.reclaim_commits,
            reclaim_preemptive_runs: space.preemptive_runs,
            worst_case_used_percent: count(&store.counters.worst_case_used_percent),
            commits: count(&store.counters.commits),
            nodes_written: count(&store.counters.nodes_written),
            replayed_checkpoints: count(&store.counters.replayed_checkpoints),
            replayed_items: count(&store.counters.replayed_items),
            recovery: recovery.get().cloned().unwrap_or_default(),
            device_flush_time_ns: store.device.flush_time().as_nanos() as u64,
            fsync_stages: store.log.stage_times().into_iter().map(FsyncStage::from).collect(),
            snapshots: names.snapshot_statistics(available_blocks, space.total_blocks),
            device: store.device.health().map(ComposedDevice::from),
        }
    }
}
