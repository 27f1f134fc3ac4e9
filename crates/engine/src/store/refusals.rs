//! That space was refused, for the thread that says which snapshots hold it.
//!
//! Lock discipline: the lock is a leaf, held for moments.
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, clock};
use std::time::Duration;

pub(crate) struct Refusals {
    noted: AtomicBool,
    stopped: Mutex<bool>,
    changed: Condvar,
}

impl Refusals {
    pub(super) fn new() -> Self {
        Self {
            noted: AtomicBool::new(false),
            stopped: Mutex::new(Rank::LEAF, false),
            changed: Condvar::new(),
        }
    }

    /// Space was refused.
    pub(super) fn note(&self) {
        if !self.noted.load(Ordering::Relaxed) && !self.noted.swap(true, Ordering::AcqRel) {
            let _stopped = self.stopped.lock();
            self.changed.notify_all();
        }
    }

    pub(super) fn stop(&self) {
        *self.stopped.lock() = true;
        self.changed.notify_all();
    }

    /// Waits until space is refused. Returns false at the end.
    pub(crate) fn wait(&self) -> bool {
        let mut stopped = self.stopped.lock();
        while !*stopped && !self.noted.load(Ordering::Acquire) {
            self.changed.wait(&mut stopped);
        }
        !*stopped
    }

    /// Forgets what is refused for a while.
    pub(crate) fn pause(&self, interval: Duration) {
        let start = clock::now_monotonic();
        let mut stopped = self.stopped.lock();
        while !*stopped {
            let left = interval.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            self.changed.wait_for(&mut stopped, left);
        }
        self.noted.store(false, Ordering::Release);
    }
}
