//! Stops the volume while it is mounted: by an [ioctl](super::ioctl), or because the server must
//! end.
//!
//! States: *running* → *begun*. After a shutdown has begun, every request fails with EIO except
//! those that end the mount. One atomic number holds the state and counts the changing requests in
//! work. So each of them either ends before the shutdown stops waiting for changes, or is refused:
//! none is answered with success and then lost.
use super::VolumeHandler;
use super::extended::is_made_up;
use crate::protocol::{Operation, ROOT_NODE, Request};
use cairn_engine::Error;
use cairn_environment::atomic::{AtomicUsize, Ordering};
use cairn_environment::clock;
use std::sync::Arc;
use std::time::Duration;

/// In the state: a shutdown has begun.
const BEGUN: usize = 1 << 63;
/// In the state: a caller requested it and gets the result. The bits below count.
pub(super) const ASKED_FOR: usize = 1 << 62;
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

    /// Refuses changing requests from now on. `bits` is 0 or [`ASKED_FOR`].
    pub(super) fn begin(&self, bits: usize) {
        self.0.fetch_or(BEGUN | bits, Ordering::AcqRel);
    }

    /// Waits for the changes in work. Not on a request thread, which could be doing one of them.
    pub(super) fn wait_for_changes(&self) {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::thread;

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
