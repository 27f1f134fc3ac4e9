//! What is counted and remembered about the space of snapshots.
//!
//! Lock discipline: its locks are leaves, held for moments.
use super::refusals::Refusals;
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_format::Generation;
use std::collections::BTreeMap;

/// Blocks by the snapshot of one subvolume that has them.
pub(super) type BySnapshot = BTreeMap<Generation, u64>;

/// What is counted about the space of snapshots.
pub(crate) struct SnapshotCounts {
    /// Runs of blocks that cleanups have freed, and their blocks.
    pub(crate) freed_runs: AtomicU64,
    pub(crate) freed_blocks: AtomicU64,
    pub(crate) refusals: Refusals,
    /// What snapshots refer to, as far as it is known.
    pub(super) referenced: Mutex<BTreeMap<u64, BySnapshot>>,
}

impl SnapshotCounts {
    pub(super) fn new() -> Self {
        Self {
            freed_runs: AtomicU64::new(0),
            freed_blocks: AtomicU64::new(0),
            refusals: Refusals::new(),
            referenced: Mutex::new(Rank::LEAF, BTreeMap::new()),
        }
    }

    /// A cleanup freed runs.
    pub(super) fn note_freed(&self, runs: u64, blocks: u64) {
        self.freed_runs.fetch_add(runs, Ordering::Relaxed);
        self.freed_blocks.fetch_add(blocks, Ordering::Relaxed);
    }
}
