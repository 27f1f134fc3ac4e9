//! What can go wrong with the log, and why it asks for a transaction commit.
use cairn_blockdev::DeviceError;
use cairn_format::FormatError;
use std::sync::Arc;

/// Why nothing becomes durable through the log any more. Every waiter gets a copy.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LogError {
    /// A write to the ring failed, or the flush after it.
    #[error("the log cannot be written: {0}")]
    Device(#[from] DeviceError),
    /// The owner gave up, see [`crate::Log::abort`].
    #[error("the log was shut down after a failure: {0}")]
    Aborted(Arc<str>),
    /// The log was stopped before the operation was durable.
    #[error("the log is stopped")]
    Stopped,
}

/// Why replay could not be carried out. The end of the chain is not an error.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The device reports an error.
    #[error("replaying the log: {0}")]
    Device(#[from] DeviceError),
    /// A checkpoint that belongs to the chain holds something impossible.
    #[error("replaying the log: {0}")]
    Damaged(#[from] FormatError),
}

/// Why the log asks for a transaction commit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum CommitReason {
    /// An fsync or the background push found no room in the ring; the requests that wait continue
    /// at `super_committed`.
    RingFull,
    /// As `RingFull`: the changed items are too many for one checkpoint.
    ContextTooLarge,
    /// As `RingFull`: an operation can only become durable with a superblock, see
    /// [`crate::Batch::need_commit`].
    CommitNeeded,
    /// More than half of the ring is in use.
    LogPressure,
    /// The log is dead, see [`crate::Log::error`]: the volume must not promise anything any more.
    LogFailed,
}
