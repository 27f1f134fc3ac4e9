//! Stopping a volume, after a failure or on request. The latter is what ext4, XFS and btrfs do with
//! their shutdown ioctl: what a crash leaves, without a crash.
//!
//! States: *running* → *stopped*; a stopped volume is only closed. It is not marked clean, so that
//! the next mount recovers.
//!
//! Requests that the device has already got end as they would, which no crash rules out either; a
//! commit or a push under way stops at its next step, since transactions and log have failed by
//! then.
use crate::volume::VolumeInner;
use crate::{Error, Result};
use cairn_environment::atomic::Ordering;
use cairn_log::LogError;

const REASON: &str = "it was shut down on request";

/// What happens to changes that are not durable yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShutdownLog {
    /// They become durable first, in data and log.
    Flush,
    /// They are lost, unless an fsync has made them durable.
    Drop,
}

impl VolumeInner {
    /// Why the volume was stopped.
    pub(crate) fn failure(&self) -> Option<String> {
        // The log knows first; the commit thread tells the transactions a moment later.
        self.transactions
            .failure()
            .or_else(|| self.log.error().map(|error| Error::from(error).into_failure()))
    }

    /// Stops all changes after a failure; every waiter gets an error.
    pub(crate) fn fail(&self, error: &Error) {
        let failure = error.clone().into_failure();
        if self.halt(&failure, LogError::Aborted(failure.as_str().into())) {
            tracing::error!("the volume is read-only from now on: {failure}");
        }
    }

    /// Ends every wait and every later change with an error; whether this was the first reason to.
    pub(crate) fn halt(&self, failure: &str, reason: LogError) -> bool {
        let first = self.transactions.fail(failure);
        self.failed.store(true, Ordering::Release);
        self.log.abort(reason);
        self.space.shut_down();
        self.orphans.stop();
        first
    }

    /// 1. Makes everything durable, with [`ShutdownLog::Flush`]. *A failure is returned, after step
    ///    2.*
    /// 2. Ends every wait and every later change with an error.
    pub(crate) fn shut_down(&self, log: ShutdownLog) -> Result<()> {
        let synced = match log {
            ShutdownLog::Flush => self.sync(),
            ShutdownLog::Drop => self.check_alive(),
        };
        let first = self.halt(REASON, LogError::Aborted(REASON.into()));
        if first {
            tracing::warn!(?log, "the volume was shut down");
        }
        synced.and_then(|()| {
            if first { Ok(()) } else { Err(Error::Aborted("somebody else shut it down".into())) }
        })
    }
}
