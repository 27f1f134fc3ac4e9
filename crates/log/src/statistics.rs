//! Counters since the log was made. Each part of the log counts under its own lock and fills in its
//! own fields here. The serialised names are those of `cairn stats`.
use serde::{Deserialize, Serialize};

/// What the log did, and what it holds now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LogStatistics {
    /// Operations inserted.
    #[serde(rename = "operations_logged")]
    pub operations: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Items in them.
    pub items_logged: u64,
    /// Bytes of entries in them.
    pub bytes_logged: u64,
    /// Blocks written to the ring.
    #[serde(rename = "log_blocks_written")]
    pub blocks_written: u64,
    /// Flushes issued by the log.
    #[serde(rename = "log_flushes")]
    pub flushes: u64,
    /// Pushes of the worker, which no request waited for.
    #[serde(rename = "log_background_pushes")]
    pub background_pushes: u64,
    /// Groups: rounds of a leader after which at least one waiter was done.
    #[serde(rename = "fsync_groups")]
    pub groups: u64,
    /// Waiters that the groups completed.
    #[serde(rename = "fsyncs_grouped")]
    pub grouped: u64,
    /// Size of the largest group.
    #[serde(rename = "fsync_group_size_max")]
    pub group_size_max: u64,
    /// Waiters that a transaction commit completed.
    #[serde(rename = "fsyncs_committed")]
    pub committed: u64,
    /// Calls that found their operation durable.
    #[serde(rename = "fsyncs_immediate")]
    pub immediate: u64,
    /// Times that a leader waited for others to join.
    #[serde(rename = "log_gathers")]
    pub gathers: u64,
    /// Times that the ring had no room and a commit took over.
    pub fallbacks_ring_full: u64,
    /// Times that the items were too many for one checkpoint and a commit took over.
    pub fallbacks_context_too_large: u64,
    /// Times that an operation could only become durable with a superblock and a commit took over.
    pub fallbacks_commit_needed: u64,
    /// Closed contexts that were dropped because their superblock was durable first.
    #[serde(rename = "log_contexts_dropped")]
    pub contexts_dropped: u64,
    /// Operations that waited because the list was too long.
    #[serde(rename = "log_throttle_waits")]
    pub throttle_waits: u64,
    /// Bytes of entries in the list now.
    #[serde(rename = "log_context_bytes")]
    pub context_bytes: u64,
    /// Items in the list now.
    #[serde(rename = "log_context_items")]
    pub context_items: u64,
    /// Times that the head of the ring passed its end.
    #[serde(rename = "log_wraps")]
    pub wraps: u64,
    /// Blocks of the ring in use now.
    #[serde(rename = "log_blocks_used")]
    pub ring_blocks_used: u64,
}
