//! How requests come from the kernel and replies go back.
//!
//! There are two ways: `/dev/fuse` (`device.rs`), with one cloned descriptor per request thread,
//! and FUSE over io_uring (`ring`), with one queue per CPU. [`Reply`] hides the difference.
//!
//! Invariants:
//! - every request that expects a reply gets exactly one, also when its handler drops the [`Reply`]
//!   or panics;
//! - a reply goes the way its request came: the kernel looks for it nowhere else.
//!
//! Locks: `FUSE` for the outbox of a queue and the list of jobs, for a moment each. A handler may
//! answer from any thread, with locks of lower ranks held: a reply never sleeps.

mod buffer;
mod device;
mod reply;
mod ring;
mod turns;

pub use buffer::RequestBuffer;
pub use device::{Channel, DEVICE_PATH, End, RequestThreads};
pub use reply::{Delivery, Notifier, Reply};
pub use ring::{RingFailure, RingThreads, Rings};

use crate::protocol::Request;
use cairn_blockdev::{BlockPool, RawFile};
use std::any::Any;
use std::ops::Range;

/// Longest data of one read or write, in bytes.
pub const TRANSFER_BYTES_MAX: usize = 1 << 20;

/// Why a handler could not finish its work.
pub type HandlerFailure = Box<dyn std::error::Error + Send + Sync>;

/// What became of a request that was to be answered without waiting.
#[derive(Debug)]
pub enum AtOnce {
    /// It is answered, or will be.
    Answered,
    /// Its answer takes more.
    Left(Reply),
    /// Its answer takes a read of the device, which the caller lets the kernel do, and nothing else
    /// but memory.
    Read(Reply, DeviceRead),
}

/// A read of the device into the memory of a reply.
#[derive(Debug)]
pub struct DeviceRead {
    /// What is read.
    pub file: RawFile,
    /// Where it is read from.
    pub offset_bytes: u64,
    /// Where in the reply's payload it is put: whole blocks, which no longer hold anything of the
    /// request.
    pub room: Range<usize>,
    /// What [`Handler::handle_read`] wants back.
    pub plan: Box<dyn Any + Send>,
}

/// What answers requests. Called by all request threads at once.
pub trait Handler: Send + Sync + 'static {
    /// Answers `request` through `reply`, now or later, on this thread or another.
    fn handle(&self, request: Request<'_>, reply: Reply);

    /// As [`Handler::handle`], if what is done here takes nothing but memory: it waits neither for
    /// the device nor for long, unless [`Reply::has_time`]. The answer may come later, from
    /// elsewhere. Otherwise says what to do, and nothing has happened.
    fn handle_at_once(&self, _request: &Request<'_>, reply: Reply) -> AtOnce {
        AtOnce::Left(reply)
    }

    /// Goes on with a request for which [`AtOnce::Read`] was returned: `payload` is the memory of
    /// its reply, into which the device has read. Waits neither for the device nor for long.
    /// Returns how long the answer in `payload` is; `None` if [`Handler::handle`] must answer.
    fn handle_read(
        &self,
        _request: &Request<'_>,
        _plan: Box<dyn Any + Send>,
        _payload: &mut [u8],
    ) -> Option<usize> {
        None
    }

    /// Memory that data of WRITEs arrives in.
    fn buffers(&self) -> BlockPool {
        BlockPool::new(0)
    }

    /// Called once, when no more requests come.
    ///
    /// # Errors
    /// What was asked for earlier could not be made durable.
    fn finish(&self) -> Result<(), HandlerFailure>;
}
