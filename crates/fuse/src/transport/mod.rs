//! How requests come from the kernel and replies go back.
//!
//! Today there is one way: `/dev/fuse` (`device.rs`), with one cloned descriptor per request thread. A second way
//! (FUSE over io_uring) adds a module beside it and a variant to [`Reply`]'s route; handlers and protocol stay.
//!
//! Invariants:
//! - every request that expects a reply gets exactly one, also when its handler drops the [`Reply`] or panics;
//! - a reply goes to the descriptor from which its request was read: the kernel looks for it nowhere else.
//!
//! Locks: none are held here. A handler may answer from any thread, with any lock held: a reply never sleeps.

mod buffer;
mod device;
mod reply;

pub use buffer::RequestBuffer;
pub use device::{Channel, DEVICE_PATH, End, RequestThreads};
pub use reply::{Delivery, Reply};

use crate::protocol::Request;

/// Longest data of one read or write, in bytes.
pub const TRANSFER_BYTES_MAX: usize = 1 << 20;

/// Why a handler could not finish its work.
pub type HandlerFailure = Box<dyn std::error::Error + Send + Sync>;

/// What answers requests. Called by all request threads at once.
pub trait Handler: Send + Sync + 'static {
    /// Answers `request` through `reply`, now or later, on this thread or another.
    fn handle(&self, request: Request<'_>, reply: Reply);

    /// Called once, when no more requests come.
    ///
    /// # Errors
    /// What was asked for earlier could not be made durable.
    fn finish(&self) -> Result<(), HandlerFailure>;
}
