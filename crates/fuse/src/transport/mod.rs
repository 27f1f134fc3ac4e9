//! Transport of requests from the kernel and of replies to it.
//!
//! There are two ways: `/dev/fuse` (`device.rs`), with one cloned descriptor per request thread,
//! and FUSE over io_uring (`ring`), with one queue per CPU. [`Reply`] hides the difference.
//!
//! Invariants:
//! - every request that expects a reply gets exactly one, even if its handler drops the [`Reply`]
//!   or panics;
//! - a reply goes the way of its request: the kernel expects it nowhere else.
//!
//! Locks: `FUSE` for the outbox of a queue and the list of jobs, each held briefly. A handler may
//! answer from any thread, with locks of lower ranks held: a reply never sleeps.

mod buffer;
mod device;
mod reply;
mod ring;
mod turns;

pub use buffer::RequestBuffer;
pub use device::{Channel, DEVICE_PATH, EndReason, RequestThreads};
pub use reply::{Delivery, Notifier, Reply};
pub use ring::{KernelRings, RingFailure, RingThreads};

use crate::protocol::Request;
use cairn_blockdev::{BlockPool, RawFile};
use std::any::Any;
use std::ops::Range;

/// Longest data of one read or write, in bytes.
pub const TRANSFER_BYTES_MAX: usize = 1 << 20;

/// Why a handler could not finish.
pub type HandlerFailure = Box<dyn std::error::Error + Send + Sync>;

/// The result of a request that may not wait.
#[derive(Debug)]
pub enum AtOnceResult {
    /// It is answered, or will be.
    Answered,
    /// Its answer needs more than memory.
    Left(Reply),
    /// Its answer needs one read of the device, which the caller delegates to the kernel, and
    /// otherwise only memory.
    Read(Reply, DeviceRead),
}

/// A read of the device into the memory of a reply.
#[derive(Debug)]
pub struct DeviceRead {
    /// The file to read.
    pub file: RawFile,
    /// The offset to read at.
    pub offset_bytes: u64,
    /// The part of the reply's payload to read into: whole blocks, which no longer hold any of the
    /// request.
    pub room: Range<usize>,
    /// The value to pass to [`Handler::handle_read`].
    pub plan: Box<dyn Any + Send>,
}

/// Answers requests. All request threads call it at once.
pub trait Handler: Send + Sync + 'static {
    /// Answers `request` through `reply`, now or later, on this thread or another.
    fn handle(&self, request: Request<'_>, reply: Reply);

    /// As [`Handler::handle`], if the work here needs only memory: it waits neither for the device
    /// nor for long, unless [`Reply::has_time`]. The answer may come later, from another thread.
    /// Otherwise it has no effect and returns what the request needs.
    fn handle_at_once(&self, _request: &Request<'_>, reply: Reply) -> AtOnceResult {
        AtOnceResult::Left(reply)
    }

    /// Continues a request that returned [`AtOnceResult::Read`]. `payload` is the memory of its
    /// reply, into which the device was read. Waits neither for the device nor for long. Returns
    /// the length of the answer in `payload`; `None` if [`Handler::handle`] must answer.
    fn handle_read(
        &self,
        _request: &Request<'_>,
        _plan: Box<dyn Any + Send>,
        _payload: &mut [u8],
    ) -> Option<usize> {
        None
    }

    /// Capabilities to ask the kernel for (`protocol::wire::init_flag`), beside those of every
    /// session.
    fn capabilities(&self) -> u64 {
        0
    }

    /// The memory for the data of WRITEs.
    fn buffers(&self) -> BlockPool {
        BlockPool::new(0)
    }

    /// Called once, when no more requests come.
    ///
    /// # Errors
    /// If earlier changes could not be made durable.
    fn finish(&self) -> Result<(), HandlerFailure>;
}
