//! `/dev/fuse`: request threads that read, and replies written from any thread.
//!
//! With rings, only FORGETs, which have no waiting caller, and rare INTERRUPTs come this way. While
//! many FORGETs come, as when a tree is removed, the thread pauses before the next read
//! ([`ForgetRate`]). Then one read returns many, and the kernel does not wake a thread for each of
//! them, which would cost the removing program more than the FORGET itself.
use super::turns::Turns;
use super::{Handler, Reply, RequestBuffer};
use crate::kernel;
use cairn_environment::clock::{self, Monotonic};
use cairn_environment::thread::{self, JoinHandle};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsRawFd, OwnedFd, RawFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::{self, Errno};
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

/// The FUSE device.
pub const DEVICE_PATH: &str = "/dev/fuse";

/// Why no more requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The file system was unmounted.
    Unmounted,
    /// The connection was cut while it was mounted.
    Aborted,
    /// The device could not be read.
    Failed(Errno),
}

/// One descriptor of a connection to the kernel.
#[derive(Debug)]
pub struct Channel {
    device: OwnedFd,
}

impl Channel {
    /// The channel of the descriptor of a new mount.
    pub fn new(device: OwnedFd) -> Self {
        Self { device }
    }

    /// Another descriptor of the same connection, with its own list of requests in work, so that
    /// threads do not contend.
    ///
    /// # Errors
    /// If the device cannot be opened or cloned.
    pub fn clone_descriptor(&self) -> io::Result<Self> {
        let device = rustix::fs::open(DEVICE_PATH, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        kernel::clone_fuse_device(&device, &self.device)?;
        Ok(Self { device })
    }

    /// Waits for a request and reads it. Returns its length.
    ///
    /// # Errors
    /// If there will be no more requests.
    pub fn receive(&self, buffer: &mut RequestBuffer) -> Result<usize, EndReason> {
        let mut was_cut = false;
        loop {
            return match io::readv(&self.device, &mut buffer.room()) {
                Ok(length_bytes) => Ok(length_bytes),
                // ENOENT: the caller was killed before the request could be read.
                Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => continue,
                Err(Errno::NODEV) => Err(EndReason::Unmounted),
                // Also where an unmount meets a request that is being read; the next read says so.
                Err(Errno::CONNABORTED) if !was_cut => {
                    was_cut = true;
                    continue;
                }
                Err(Errno::CONNABORTED) => Err(EndReason::Aborted),
                Err(error) => Err(EndReason::Failed(error)),
            };
        }
    }

    pub(super) fn raw_descriptor(&self) -> RawFd {
        self.device.as_raw_fd()
    }

    pub(super) fn is_readable(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut [PollFd::new(&self.device, PollFlags::IN)], Some(&now))
            .is_ok_and(|ready| ready > 0)
    }

    pub(super) fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        io::writev(&self.device, parts).map(drop)
    }
}

/// The pause of the thread beside rings.
const FORGET_PAUSE: Duration = Duration::from_millis(1);
/// The thread pauses from this many FORGETs on within [`FORGETS_SPAN`].
const FORGETS_MANY: usize = 16;
const FORGETS_SPAN: Duration = Duration::from_millis(4);

/// Detects many FORGETs.
struct ForgetRate {
    begun: Monotonic,
    count: usize,
}

impl ForgetRate {
    fn new() -> Self {
        Self { begun: clock::now_monotonic(), count: 0 }
    }

    /// Counts another `count` at the time `now`. Returns whether there are many.
    fn are_many(&mut self, count: usize, now: Monotonic) -> bool {
        if now - self.begun > FORGETS_SPAN {
            *self = Self { begun: now, count: 0 };
        }
        self.count += count;
        self.count >= FORGETS_MANY
    }
}

/// Passes the request of `length_bytes` in `buffer` to `handler`. Returns the number of nodes whose
/// references it dropped.
fn serve_one(
    channel: &Arc<Channel>,
    buffer: &mut RequestBuffer,
    length_bytes: usize,
    handler: &dyn Handler,
) -> usize {
    let mut forgotten_nodes = 0;
    match buffer.parse(length_bytes) {
        Ok(request) => {
            forgotten_nodes = request.operation.forgotten_nodes();
            let unique = request.header.unique;
            let reply = if request.operation.expects_reply() {
                Reply::new(Arc::clone(channel), unique)
            } else {
                Reply::silent(unique)
            };
            handler.handle(request, reply);
        }
        Err(malformed) => {
            tracing::error!("{malformed}");
            if malformed.unique != 0 {
                Reply::new(Arc::clone(channel), malformed.unique).error(Errno::INVAL);
            }
        }
    }
    buffer.release();
    forgotten_nodes
}

/// The threads that read requests. They end when the file system is unmounted.
#[derive(Debug)]
pub struct RequestThreads {
    threads: Vec<JoinHandle<EndReason>>,
}

impl RequestThreads {
    /// Starts `count` threads. A channel that cannot be cloned is shared.
    pub fn start(channel: &Arc<Channel>, count: usize, handler: &Arc<dyn Handler>) -> Self {
        Self::start_each(channel, count, handler, serve)
    }

    /// Starts the thread for requests that do not come over rings.
    pub fn start_beside_rings(channel: &Arc<Channel>, handler: &Arc<dyn Handler>) -> Self {
        Self::start_each(channel, 1, handler, |channel, handler, _| {
            serve_beside_rings(channel, handler)
        })
    }

    fn start_each(
        channel: &Arc<Channel>,
        count: usize,
        handler: &Arc<dyn Handler>,
        serve: fn(&Arc<Channel>, &dyn Handler, Option<Turns>) -> EndReason,
    ) -> Self {
        let turns = Turns::new(count);
        let threads = (0..count.max(1))
            .map(|index| {
                let turns = turns.clone();
                let own = if index == 0 { Arc::clone(channel) } else { clone_or_share(channel) };
                let handler = Arc::clone(handler);
                thread::spawn(&format!("cairn-fuse-{index}"), move || {
                    serve(&own, handler.as_ref(), turns)
                })
            })
            .collect();
        Self { threads }
    }

    /// Waits until all have ended. Returns the first one's reason.
    pub fn join(self) -> EndReason {
        let ends: Vec<EndReason> = self
            .threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or(EndReason::Failed(Errno::IO)))
            .collect();
        ends.iter()
            .copied()
            .find(|end| *end != EndReason::Unmounted)
            .unwrap_or(EndReason::Unmounted)
    }
}

fn clone_or_share(channel: &Arc<Channel>) -> Arc<Channel> {
    match channel.clone_descriptor() {
        Ok(own) => Arc::new(own),
        Err(error) => {
            tracing::warn!("request threads share one descriptor of {DEVICE_PATH}: {error}");
            Arc::clone(channel)
        }
    }
}

fn serve(channel: &Arc<Channel>, handler: &dyn Handler, turns: Option<Turns>) -> EndReason {
    let mut buffer = RequestBuffer::new(&handler.buffers());
    let turn = turns.map(Turns::join);
    loop {
        let received = match &turn {
            Some(turn) => turn.wait(|| channel.receive(&mut buffer)),
            None => channel.receive(&mut buffer),
        };
        if let Err(end) =
            received.map(|length_bytes| serve_one(channel, &mut buffer, length_bytes, handler))
        {
            return end;
        }
    }
}

fn serve_beside_rings(channel: &Arc<Channel>, handler: &dyn Handler) -> EndReason {
    let mut buffer = RequestBuffer::new(&handler.buffers());
    let mut forgetting = ForgetRate::new();
    loop {
        let forgotten_nodes = match channel.receive(&mut buffer) {
            Ok(length_bytes) => serve_one(channel, &mut buffer, length_bytes, handler),
            Err(end) => return end,
        };
        if forgotten_nodes > 0 && forgetting.are_many(forgotten_nodes, clock::now_monotonic()) {
            clock::sleep(FORGET_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_forgets_are_those_that_come_close_together() {
        let begin = clock::now_monotonic();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut forgetting = ForgetRate { begun: begin, count: 0 };
        assert!(
            (1..FORGETS_MANY as u64 * 3).all(|second| !forgetting.are_many(1, at(second))),
            "one in a millisecond"
        );
        let mut forgetting = ForgetRate { begun: begin, count: 0 };
        assert!(
            (1..FORGETS_MANY).all(|_| !forgetting.are_many(1, at(1)))
                && forgetting.are_many(1, at(2))
        );
        assert!(!forgetting.are_many(1, at(9)) && forgetting.are_many(FORGETS_MANY, at(9)));
    }
}
