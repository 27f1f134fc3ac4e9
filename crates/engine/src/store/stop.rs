//! Stopping the store, after a failure or on request.
//!
//! States: *running* → *stopped*; a stopped store is only closed. It is not marked clean, so that
//! the next mount recovers.
//!
//! Requests that the device has already got end as they would, which no crash rules out either; a
//! commit or a push under way stops at its next step, since transactions and log have failed by
//! then.
use super::Store;
use super::trees::Subvolume;
use crate::{Error, InodeId, Result};
use cairn_environment::atomic::Ordering;
use cairn_log::LogError;

impl Store {
    /// Fails if nothing can be changed.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.options.read_only {
            return Err(Error::ReadOnly);
        }
        self.check_alive()
    }

    /// As [`Store::check_writable`]; also fails for an inode of a snapshot. Asked before space is:
    /// on a full volume, too, it is the reason.
    pub(crate) fn check_writable_at(&self, inode: InodeId) -> Result<()> {
        self.check_writable()?;
        self.trees.subvolume(inode).map_or(Ok(()), Subvolume::check_writable)
    }

    /// Fails if the volume has failed; a read-only one has nothing to make durable.
    pub(crate) fn check_alive(&self) -> Result<()> {
        if self.has_failed() || self.signal.has_failed() {
            return Err(Error::after(self.failure().unwrap_or_default()));
        }
        Ok(())
    }

    /// Whether the store has stopped.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Why the volume was stopped.
    pub(crate) fn failure(&self) -> Option<String> {
        // The log knows first; the commit thread passes it on a moment later.
        self.transactions
            .failure()
            .or_else(|| self.log.error().map(|error| Error::from(error).into_failure()))
    }

    /// Stops all changes after a failure; every waiter gets an error. No lock is held: waiters
    /// bring callbacks.
    pub(crate) fn fail(&self, error: &Error) {
        self.refuse_changes(error);
        self.end_waits(LogError::Aborted(error.clone().into_failure().as_str().into()));
    }

    /// As [`Store::fail`], for a thread that may hold locks: nothing that begins from now on
    /// succeeds, and the commit thread ends the waits.
    pub(crate) fn fail_under_locks(&self, error: &Error) {
        self.refuse_changes(error);
        self.signal.pass_on_failure();
    }

    fn refuse_changes(&self, error: &Error) {
        let failure = error.clone().into_failure();
        if self.refuse(&failure) {
            tracing::error!("the volume is read-only from now on: {failure}");
        }
    }

    /// Ends every wait and every later change with an error; whether this was the first reason to.
    pub(crate) fn halt(&self, failure: &str, reason: LogError) -> bool {
        let first = self.refuse(failure);
        self.end_waits(reason);
        first
    }

    fn refuse(&self, failure: &str) -> bool {
        let first = self.transactions.fail(failure);
        self.failed.store(true, Ordering::Release);
        first
    }

    fn end_waits(&self, reason: LogError) {
        self.log.abort(reason);
        self.space.shut_down();
        self.observer.stopped();
    }
}
