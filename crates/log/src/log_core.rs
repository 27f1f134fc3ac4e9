//! What the threads of a log work on together: its parts, each behind its own lock and functions.
//!
//! The parts know nothing of each other above them: the list of items, the queue of data and the
//! writer of checkpoints hold what is not durable yet, the waiters hold the requests. What leads
//! from one to the other stands in `lead.rs` and `early_wake_up.rs`; here is only what both need.
//!
//! State: *alive* → *dead*, from the first failed write or flush, an abort, or the end of the log.
//! A dead log makes nothing durable any more, and has finished each waiter with the error.
//!
//! Lock discipline: no lock is held here; the parts take theirs one after the other.
use crate::cache_aligned::CacheAligned;
use crate::checkpoint::CheckpointWriter;
use crate::data::DataQueue;
use crate::error::{CommitReason, LogError};
use crate::group::{Successor, Waiters};
use crate::item_list::ItemList;
use crate::options::{CommitRequest, LogOptions};
use crate::stages::Stages;
use crate::worker_signal::WorkerSignal;

/// The parts of a log.
pub(crate) struct LogCore {
    pub(crate) list: ItemList,
    pub(crate) data: DataQueue,
    pub(crate) checkpoints: CheckpointWriter,
    pub(crate) waiters: Waiters,
    pub(crate) worker: CacheAligned<WorkerSignal>,
    pub(crate) stages: Stages,
    pub(crate) options: LogOptions,
    pub(crate) commit_request: CommitRequest,
}

impl LogCore {
    /// Wakes the thread that was appointed leader.
    pub(crate) fn wake(&self, successor: Option<Successor>) {
        match successor {
            Some(Successor::Blocked(slot)) => slot.notify(),
            Some(Successor::Worker) => self.worker.send(|signals| signals.lead = true),
            None => {}
        }
    }

    /// Has the worker push.
    pub(crate) fn wake_to_push(&self) {
        self.worker.send(|signals| signals.push = true);
    }

    /// The log is dead from now on, because of the first error. Finishes every waiter.
    pub(crate) fn fail(&self, error: LogError) {
        let Some(waiters) = self.waiters.close(&error) else { return };
        self.list.close();
        self.data.close();
        if !matches!(error, LogError::Stopped) {
            tracing::error!(%error, "the log is dead");
            (self.commit_request)(CommitReason::LogFailed);
        }
        waiters.into_iter().for_each(|waiter| waiter.finish(Err(error.clone()), &self.stages));
    }
}
