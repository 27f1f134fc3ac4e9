//! How a log behaves, and what its owner brings along.
use crate::baselines::Baselines;
use crate::error::CommitReason;
use crate::gathering::FlushPolicy;
use cairn_format::{BLOCK_SIZE, Generation, Geometry, LogPosition};

/// Asks for a transaction commit. Never blocks; the log holds no lock meanwhile.
pub type CommitRequest = Box<dyn Fn(CommitReason) + Send + Sync>;

/// What a thread that brings a callback may be used for, when no thread leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallerLeads {
    /// It leads until several others wait.
    UntilSeveralWait,
    /// It leads for its own operation; others wait for the thread.
    Once,
    /// For nothing that takes time: a worker of the log leads.
    Never,
}

/// How a log behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogOptions {
    /// When a leader waits for others, and whether groups overlap.
    pub flush: FlushPolicy,
    /// Nothing will be logged: there is no worker.
    pub read_only: bool,
    /// From this many bytes in the list on, the worker writes them to the ring.
    pub background_push_bytes: u64,
    /// From this many bytes in the list on, operations wait.
    pub hard_limit_bytes: u64,
    /// Which mechanisms are replaced by what came before them; without the feature `baselines`
    /// none can be.
    pub baselines: Baselines,
}

impl LogOptions {
    /// The defaults for a volume: push at a quarter of the ring, at most 32 MiB; wait at twice
    /// that.
    pub fn for_geometry(geometry: &Geometry) -> Self {
        let background_push_bytes = (geometry.log_blocks * BLOCK_SIZE as u64 / 4).min(32 << 20);
        Self {
            flush: FlushPolicy::Auto,
            read_only: false,
            background_push_bytes,
            hard_limit_bytes: 2 * background_push_bytes,
            baselines: Baselines::default(),
        }
    }

    /// So long a list is pushed when the worker is woken for it.
    pub(crate) fn pushed_bytes(&self) -> u64 {
        self.background_push_bytes.min(self.hard_limit_bytes)
    }
}

/// Where a log starts, as the superblock says that was committed for this mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogStart {
    /// The superblock's `log_epoch`.
    pub epoch: u64,
    /// The superblock's `log_tail`; its sequence is above 0. [`crate::Replay::end`] is such a
    /// position.
    pub position: LogPosition,
    /// The running transaction.
    pub generation: Generation,
}
