//! Stops the volume while it is mounted: by an IOCTL, or because the server must end. An IOCTL also
//! syncs it, and trims it.
//!
//! States: *running* → *begun*. After a shutdown has begun, every request fails with EIO except
//! those that end the mount. One atomic number holds the state and counts the changing requests in
//! work. So each of them either ends before the shutdown stops waiting for changes, or is refused:
//! none is answered with success and then lost.
//!
//! The GOINGDOWN ioctl of other file systems comes without its flags. Its caller gets the shutdown
//! that loses nothing, which every flag permits. The one that drops what isn't durable has a number
//! of its own.
use super::extended::is_made_up;
use super::{VolumeHandler, answer};
use crate::kernel;
use crate::protocol::wire::{IoctlOut, TrimOut, TrimRange};
use crate::protocol::{Operation, ROOT_NODE, Request, RequestHeader};
use crate::transport::Reply;
use cairn_engine::{Error, ShutdownLog};
use cairn_environment::atomic::{AtomicUsize, Ordering};
use cairn_environment::{clock, thread};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::FromBytes;

/// In the state: a shutdown has begun.
const BEGUN: usize = 1 << 63;
/// In the state: a caller requested it and gets the result. The bits below count.
const ASKED_FOR: usize = 1 << 62;
const STEP: Duration = Duration::from_millis(2);
/// The shutdown does not wait longer than this for requests on a device. They get an error when
/// the volume has stopped.
const STEPS_MAX: u32 = 500;

/// Whether a shutdown has begun, and the number of changing requests in work.
#[derive(Clone, Default)]
pub struct ShutdownState(Arc<AtomicUsize>);

/// A changing request in work.
pub struct ChangeInWork<'a>(&'a AtomicUsize);

impl ShutdownState {
    /// Whether requests are refused.
    pub fn has_begun(&self) -> bool {
        self.0.load(Ordering::Acquire) & BEGUN != 0
    }

    /// Admits a changing request until the guard is dropped; `None` once a shutdown has begun.
    pub fn begin_change(&self) -> Option<ChangeInWork<'_>> {
        let before = self.0.fetch_add(1, Ordering::AcqRel);
        let change = ChangeInWork(&self.0);
        (before & BEGUN == 0).then_some(change)
    }

    /// Whether a caller requested the shutdown; it gets the report of what was lost.
    pub fn is_asked_for(&self) -> bool {
        self.0.load(Ordering::Acquire) & ASKED_FOR != 0
    }

    fn begin(&self, bits: usize) {
        self.0.fetch_or(BEGUN | bits, Ordering::AcqRel);
    }

    /// Waits for the changes in work. Not on a request thread, which could be doing one of them.
    fn wait_for_changes(&self) {
        for _ in 0..STEPS_MAX {
            if self.0.load(Ordering::Acquire) & !(BEGUN | ASKED_FOR) == 0 {
                return;
            }
            clock::sleep(STEP);
        }
    }
}

impl Drop for ChangeInWork<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Whether `request` is answered after a shutdown: it ends the mount, or an unmounting program
/// needs its answer.
pub fn is_still_answered(request: &Request<'_>) -> bool {
    let node = request.header.node;
    match &request.operation {
        Operation::Destroy | Operation::Release | Operation::ReleaseDirectory => true,
        Operation::GetAttributes { .. } | Operation::Statx { .. } => node == ROOT_NODE,
        Operation::GetXattr { name, .. } => is_made_up(node, name),
        operation => !operation.expects_reply(),
    }
}

/// Whether the caller is root or the server's user.
fn is_privileged(header: &RequestHeader) -> bool {
    header.uid == 0 || header.uid == rustix::process::geteuid().as_raw()
}

impl VolumeHandler {
    /// Makes durable all that was answered with success, and stops the volume; all later requests
    /// fail. Not on a request thread.
    ///
    /// # Errors
    /// If something could not be written; the volume is stopped all the same.
    pub fn stop(&self) -> Result<(), Error> {
        self.shutdown.begin(0);
        self.shutdown.wait_for_changes();
        self.close()
    }

    /// Whether the volume has been shut down.
    pub fn is_shut_down(&self) -> bool {
        self.shutdown.has_begun()
    }

    /// FITRIM, on a thread of its own since it may take long.
    fn trim(&self, header: &RequestHeader, input: &[u8], reply: Reply) {
        if !is_privileged(header) {
            return reply.error(Errno::PERM);
        }
        let Ok(range) = TrimRange::read_from_bytes(input) else { return reply.error(Errno::INVAL) };
        let volume = self.volume.clone();
        thread::spawn("cairn-trim", move || {
            let trimmed = volume
                .trim(range.start..range.start.saturating_add(range.length), range.least_bytes);
            let out = |length| TrimOut {
                header: IoctlOut::default(),
                range: TrimRange { length, ..range },
            };
            answer(reply, trimmed.map(out).map_err(Into::into));
        });
    }

    pub(super) fn ioctl(&self, header: &RequestHeader, command: u32, input: &[u8], reply: Reply) {
        if command == kernel::IOCTL_TRIM {
            return self.trim(header, input, reply);
        }
        let shutdown = match command {
            kernel::IOCTL_SYNC => None,
            kernel::IOCTL_SHUTDOWN | kernel::IOCTL_GOING_DOWN => Some(ShutdownLog::Flush),
            kernel::IOCTL_SHUTDOWN_DROP => Some(ShutdownLog::Drop),
            _ => return reply.error(Errno::NOTTY),
        };
        if shutdown.is_some() && !is_privileged(header) {
            return reply.error(Errno::PERM);
        }
        let (volume, writes, state) =
            (self.volume.clone(), self.writes.clone(), self.shutdown.clone());
        thread::spawn("cairn-sync", move || {
            if shutdown != Some(ShutdownLog::Drop) {
                writes.wait_for_quiet(&reply);
            }
            let done = match shutdown {
                None => volume.sync(),
                Some(log) => {
                    // First: a later answer would be neither refused nor durable.
                    state.begin(ASKED_FOR);
                    if log == ShutdownLog::Flush {
                        state.wait_for_changes();
                    }
                    volume.shut_down(log)
                }
            };
            answer(reply, done.map(|()| IoctlOut::default()).map_err(Into::into));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_ends_before_the_end_or_is_refused() {
        let state = ShutdownState::default();
        drop(state.begin_change().expect("it runs"));
        let change = state.begin_change().expect("it runs");
        state.begin(0);
        assert!(state.has_begun() && !state.is_asked_for() && state.begin_change().is_none());
        let waiting = state.clone();
        let waiter = thread::spawn("waiter", move || {
            waiting.wait_for_changes();
            waiting.0.load(Ordering::Acquire)
        });
        clock::sleep(STEP * 10);
        assert!(!waiter.is_finished());
        drop(change);
        assert_eq!(waiter.join().unwrap(), BEGUN);
    }
}
