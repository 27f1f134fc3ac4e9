//! Counters of the cache and of lock waits. Cheap, and exact only when nothing runs.
//!
//! Lock discipline: no lock; relaxed atomics on which no other memory depends.
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_format::{BlockNumber, NODE_BLOCKS};
use serde::{Deserialize, Serialize};

/// What the cache holds and has done. The serialised names are those of `cairn stats`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheStatistics {
    /// Lookups that found the node in memory.
    #[serde(rename = "node_cache_hits")]
    pub hits: u64,
    /// Descents that took no lock but their leaf's; they aren't among the hits.
    pub quick_descents: u64,
    /// Lookups that read the node from the device.
    #[serde(rename = "node_cache_misses")]
    pub misses: u64,
    /// Nodes in memory.
    #[serde(rename = "nodes_in_memory")]
    pub nodes: u64,
    /// Nodes that aren't on the device yet, those being written included.
    #[serde(rename = "nodes_dirty")]
    pub dirty: u64,
    /// Clean nodes dropped to make room.
    #[serde(rename = "node_cache_evictions")]
    pub evictions: u64,
    /// Times that a thread had to wait for the lock of a tree's root pointer.
    pub root_lock_waits: u64,
    /// Those for exclusive access.
    pub root_write_lock_waits: u64,
    /// Times that a thread had to wait for an inner node's lock.
    pub inner_lock_waits: u64,
    /// Those for exclusive access.
    pub inner_write_lock_waits: u64,
    /// Times that a thread had to wait for a leaf's lock.
    pub leaf_lock_waits: u64,
    /// Those for exclusive access.
    pub leaf_write_lock_waits: u64,
}

/// How often threads waited for locks; counted only when they do.
#[derive(Default)]
pub(crate) struct LockWaits {
    root: Waits,
    inner: Waits,
    leaf: Waits,
    quick: [Stripe; STRIPES],
}

/// Waits for locks of one level.
#[derive(Default)]
struct Waits {
    shared: AtomicU64,
    exclusive: AtomicU64,
}

impl Waits {
    fn count(&self, exclusive: bool) {
        let counter = if exclusive { &self.exclusive } else { &self.shared };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// All, and those for exclusive access.
    fn report(&self) -> (u64, u64) {
        let exclusive = self.exclusive.load(Ordering::Relaxed);
        (self.shared.load(Ordering::Relaxed) + exclusive, exclusive)
    }
}

/// Counters so far apart that threads in different leaves rarely write the same cache line.
const STRIPES: usize = 32;

#[derive(Default)]
#[repr(align(128))]
struct Stripe(AtomicU64);

impl LockWaits {
    /// A wait for a root pointer.
    pub(crate) fn count_root(&self, exclusive: bool) {
        self.root.count(exclusive);
    }

    /// A descent that locked nothing but the leaf at `block`.
    #[inline]
    pub(crate) fn count_quick(&self, block: BlockNumber) {
        self.quick[(block.0 / NODE_BLOCKS) as usize % STRIPES].0.fetch_add(1, Ordering::Relaxed);
    }

    /// A wait for a node.
    pub(crate) fn count_node(&self, level: u8, exclusive: bool) {
        let counters = if level == 0 { &self.leaf } else { &self.inner };
        counters.count(exclusive);
    }

    /// Adds the counts to `statistics`.
    pub(crate) fn report(&self, statistics: &mut CacheStatistics) {
        statistics.quick_descents =
            self.quick.iter().map(|stripe| stripe.0.load(Ordering::Relaxed)).sum();
        (statistics.root_lock_waits, statistics.root_write_lock_waits) = self.root.report();
        (statistics.inner_lock_waits, statistics.inner_write_lock_waits) = self.inner.report();
        (statistics.leaf_lock_waits, statistics.leaf_write_lock_waits) = self.leaf.report();
    }
}
