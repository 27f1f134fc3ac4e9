//! Stopping a volume on request. This is what ext4, XFS and btrfs do with their shutdown ioctl:
//! what a crash leaves, without a crash.
use crate::layers::Layers;
use crate::{Error, Result};
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

impl Layers {
    /// 1. Makes everything durable, with [`ShutdownLog::Flush`]. *A failure is returned, after step
    ///    2.*
    /// 2. Ends every wait and every later change with an error.
    pub(crate) fn shut_down(&self, log: ShutdownLog) -> Result<()> {
        let synced = match log {
            ShutdownLog::Flush => self.files.sync(),
            ShutdownLog::Drop => self.store.check_alive(),
        };
        let first = self.store.halt(REASON, LogError::Aborted(REASON.into()));
        if first {
            tracing::warn!(?log, "the volume was shut down");
        }
        synced.and_then(|()| {
            if first { Ok(()) } else { Err(Error::Aborted("it was shut down before".into())) }
        })
    }
}
