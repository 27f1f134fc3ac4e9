//! What came before the mechanisms, chosen in their place, so that `cairn bench ab` can compare
//! both in one program. For measurements only.
//!
//! This file is the crate's one seam for predecessors: with the feature `baselines` it is compiled,
//! without it `no_baselines.rs` stands in its place. Each crate below has such a seam of its own.
//! M1 off and M3 off are options of the product: [`FsyncWait::Complete`](crate::FsyncWait) and
//! [`FlushPolicy::Each`](crate::FlushPolicy).
use cairn_btree::NodeCache;
use cairn_space::{Reclaimer, Space};
use std::sync::{Arc, Weak};

/// Which mechanisms are replaced by what came before them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Baselines {
    /// M2 off: node locks spin, block, and wake everybody. Changes the locks alone.
    pub waking_locks: bool,
    /// What came before the routes: every descent through a tree locks its way down, node by node.
    /// With the waking locks this is all of M2's predecessor; on both sides of a comparison, what
    /// is compared are the locks alone.
    pub locked_descents: bool,
    /// M4 off: a thread that finds no space waits for the flusher, together with all others, and
    /// tries again.
    pub shared_flusher: bool,
    /// M5 off: items enter the list in two passes, with two allocations each.
    pub two_pass_insertion: bool,
    /// Every fsync becomes a commit, as if the log had never any room: shows what M1 does for such
    /// fsyncs.
    pub commits_only: bool,
}

impl Baselines {
    pub(crate) fn node_cache(self, cache: Arc<NodeCache>) -> Arc<NodeCache> {
        cache.with_waking_locks(self.waking_locks).with_locked_descents(self.locked_descents)
    }

    pub(crate) fn of_the_log(self) -> cairn_log::Baselines {
        cairn_log::Baselines {
            two_pass_insertion: self.two_pass_insertion,
            commits_only: self.commits_only,
        }
    }

    pub(crate) fn start_reclaim(self, space: &Arc<Space>, reclaimer: Weak<dyn Reclaimer>) {
        if self.shared_flusher {
            space.start_with_shared_flusher(reclaimer);
        } else {
            space.start(reclaimer);
        }
    }
}

#[cfg(test)]
#[path = "baselines_tests.rs"]
mod tests;
