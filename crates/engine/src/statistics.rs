//! Counters of a volume, in the form that `cairn stats` prints.
use crate::volume::VolumeInner;
use cairn_format::BLOCK_SIZE;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters that no other part keeps.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) commits: AtomicU64,
    pub(crate) nodes_written: AtomicU64,
    pub(crate) replayed_checkpoints: AtomicU64,
    pub(crate) replayed_items: AtomicU64,
}

/// Counters since the volume was opened, and sizes now. Times in nanoseconds where the name says so.
#[derive(Clone, Debug, Default, Serialize)]
#[allow(missing_docs)]
pub struct Statistics {
    pub volume: String,
    pub label: String,
    pub failure: Option<String>,
    pub generation: u64,
    pub total_bytes: u64,
    pub available_bytes: u64,
    pub used_bytes: u64,
    pub pinned_bytes: u64,
    pub dirty_data_bytes: u64,
    pub inodes_in_memory: u64,
    pub nodes_in_memory: u64,
    pub nodes_dirty: u64,
    pub node_cache_hits: u64,
    pub node_cache_misses: u64,
    pub quick_descents: u64,
    pub root_lock_waits: u64,
    pub root_write_lock_waits: u64,
    pub inner_lock_waits: u64,
    pub inner_write_lock_waits: u64,
    pub leaf_lock_waits: u64,
    pub leaf_write_lock_waits: u64,
    pub operations_logged: u64,
    pub items_logged: u64,
    pub bytes_logged: u64,
    pub checkpoints: u64,
    pub log_blocks_written: u64,
    pub log_blocks_used: u64,
    pub log_flushes: u64,
    pub fsync_groups: u64,
    pub fsyncs_grouped: u64,
    pub fsyncs_committed: u64,
    pub fsyncs_immediate: u64,
    pub fsync_group_size_max: u64,
    pub fallbacks_ring_full: u64,
    pub fallbacks_context_too_large: u64,
    pub log_throttle_waits: u64,
    pub commits: u64,
    pub nodes_written: u64,
    pub replayed_checkpoints: u64,
    pub replayed_items: u64,
    pub device_flush_time_ns: u64,
}

impl VolumeInner {
    /// Reads all counters; they belong to about the same moment.
    pub(crate) fn statistics(&self) -> Statistics {
        let (log, cache, space) = (self.log.statistics(), self.cache.statistics(), self.space.report());
        let block = BLOCK_SIZE as u64;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Statistics {
            volume: self.superblock.volume.to_string(),
            label: self.superblock.label.clone(),
            failure: self.transactions.failure(),
            generation: self.transactions.generation().0,
            total_bytes: space.total_blocks * block,
            available_bytes: space.available_blocks * block,
            used_bytes: space.used * block,
            pinned_bytes: space.pinned * block,
            dirty_data_bytes: count(&self.dirty_pages) * block,
            inodes_in_memory: self.inodes.len() as u64,
            nodes_in_memory: cache.nodes,
            nodes_dirty: cache.dirty,
            node_cache_hits: cache.hits,
            node_cache_misses: cache.misses,
            quick_descents: cache.quick_descents,
            root_lock_waits: cache.root_lock_waits,
            root_write_lock_waits: cache.root_write_lock_waits,
            inner_lock_waits: cache.inner_lock_waits,
            inner_write_lock_waits: cache.inner_write_lock_waits,
            leaf_lock_waits: cache.leaf_lock_waits,
            leaf_write_lock_waits: cache.leaf_write_lock_waits,
            operations_logged: log.operations,
            items_logged: log.items_logged,
            bytes_logged: log.bytes_logged,
            checkpoints: log.checkpoints,
            log_blocks_written: log.blocks_written,
            log_blocks_used: log.ring_blocks_used,
            log_flushes: log.flushes,
            fsync_groups: log.groups,
            fsyncs_grouped: log.grouped,
            fsyncs_committed: log.committed,
            fsyncs_immediate: log.immediate,
            fsync_group_size_max: log.group_size_max,
            fallbacks_ring_full: log.fallbacks_ring_full,
            fallbacks_context_too_large: log.fallbacks_context_too_large,
            log_throttle_waits: log.throttle_waits,
            commits: count(&self.counters.commits),
            nodes_written: count(&self.counters.nodes_written),
            replayed_checkpoints: count(&self.counters.replayed_checkpoints),
            replayed_items: count(&self.counters.replayed_items),
            device_flush_time_ns: self.device.flush_time().as_nanos() as u64,
        }
    }
}
