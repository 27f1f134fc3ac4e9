//! The threads that commit and that unpin.
//!
//! `cairn-commit` commits every `commit_interval` and on request; `cairn-unpin` frees the blocks of
//! committed transactions.
use super::Store;
use crate::{Error, Result};
use cairn_format::Generation;

impl Store {
    /// Body of the commit thread.
    pub(crate) fn run_committer(&self) {
        let interval = self.options.background.then_some(self.options.commit_interval);
        while let Some(is_requested) = self.signal.wait(interval) {
            if self.signal.has_failed() {
                self.fail(&Error::Aborted(
                    self.failure().unwrap_or_else(|| "the log failed".into()),
                ));
            }
            if self.has_failed() {
                continue;
            }
            match self.commit() {
                // The thread that stopped the volume has reported why.
                Ok(()) | Err(Error::Aborted(_) | Error::Closed) => {}
                Err(error) => tracing::error!("commit failed: {error}"),
            }
            if !is_requested {
                self.observer.commit_due(&self.space);
            }
        }
    }

    /// Waits until the commit thread has committed everything that changed before.
    pub(crate) fn wait_for_commit(&self) -> Result<()> {
        // The running transaction, or the one before if nothing changed since its cut.
        let newest = loop {
            let running = self.transactions.generation();
            let has_changed = self.trees.any_changed();
            if self.transactions.generation() == running {
                break Generation(running.0 - u64::from(!has_changed));
            }
        };
        self.signal.request();
        self.transactions.wait_super_committed(newest)
    }

    /// Body of the thread that unpins.
    pub(crate) fn run_unpinner(&self) {
        while let Some(generation) = self.unpinner.wait_and_take() {
            self.unpin(generation);
        }
    }

    /// Ends both threads, and the one that waits for refusals, after the store has stopped.
    pub(crate) fn stop_threads(&self) {
        self.snapshot_counts.refusals.stop();
        self.signal.stop();
        self.unpinner.stop();
    }

    /// Commits, and waits until the blocks that were freed before are free.
    pub(crate) fn commit_and_unpin(&self) -> Result<()> {
        self.commit()?;
        self.transactions.wait_completed(self.transactions.super_committed())
    }
}
