//! Counters since the log was made. Each part of the log counts under its own lock and fills in its
//! own fields here.

/// What the log did, and what it holds now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LogStatistics {
    /// Operations inserted.
    pub operations: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Items in them.
    pub items_logged: u64,
    /// Bytes of entries in them.
    pub bytes_logged: u64,
    /// Blocks written to the ring.
    pub blocks_written: u64,
    /// Flushes issued by the log.
    pub flushes: u64,
    /// Pushes of the worker, which no request waited for.
    pub background_pushes: u64,
    /// Groups: rounds of a leader after which at least one waiter was done.
    pub groups: u64,
    /// Waiters that the groups completed.
    pub grouped: u64,
    /// Size of the largest group.
    pub group_size_max: u64,
    /// Waiters that a transaction commit completed.
    pub committed: u64,
    /// Calls that found their operation durable.
    pub immediate: u64,
    /// Times that a leader waited for others to join.
    pub gathers: u64,
    /// Times that the ring had no room and a commit took over.
    pub fallbacks_ring_full: u64,
    /// Times that the items were too many for one checkpoint and a commit took over.
    pub fallbacks_context_too_large: u64,
    /// Closed contexts that were dropped because their superblock was durable first.
    pub contexts_dropped: u64,
    /// Operations that waited because the list was too long.
    pub throttle_waits: u64,
    /// Bytes of entries in the list now.
    pub context_bytes: u64,
    /// Items in the list now.
    pub context_items: u64,
    /// Times that the head of the ring passed its end.
    pub wraps: u64,
    /// Blocks of the ring in use now.
    pub ring_blocks_used: u64,
}
