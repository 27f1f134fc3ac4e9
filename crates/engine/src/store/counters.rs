//! Counters that no other part keeps.
use cairn_environment::atomic::{AtomicU64, Ordering};

/// Counters that no other part keeps.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) commits: AtomicU64,
    pub(crate) nodes_written: AtomicU64,
    pub(crate) replayed_checkpoints: AtomicU64,
    pub(crate) replayed_items: AtomicU64,
    pub(crate) worst_case_used_percent: AtomicU64,
}

impl Counters {
    /// An operation used so many percent of the nodes that it had reserved.
    pub(crate) fn note_worst_case(&self, percent: u64) {
        // Nearly always less than the greatest so far: then nothing is written that others read.
        if percent > self.worst_case_used_percent.load(Ordering::Relaxed) {
            self.worst_case_used_percent.fetch_max(percent, Ordering::Relaxed);
        }
    }
}
