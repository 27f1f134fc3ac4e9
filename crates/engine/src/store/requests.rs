//! What the commit thread and the unpinning thread are asked for.
//!
//! Invariant: a request that was made before a commit began its cut is answered by that commit or
//! by a later one.
//!
//! Lock discipline: both locks are leaves (rank `LEAF`), held for moments.
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, clock};
use cairn_format::Generation;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Requests to the commit thread. The log makes some of them.
pub(super) struct CommitSignal {
    requested: AtomicBool,
    failed: AtomicBool,
    stop: Mutex<bool>,
    changed: Condvar,
}

impl CommitSignal {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            requested: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            stop: Mutex::new(Rank::LEAF, false),
            changed: Condvar::new(),
        })
    }

    /// Asks for a commit.
    pub(super) fn request(&self) {
        // Read and written in one: the thread that takes the earlier request sees what was stored
        // before this.
        if self.requested.swap(true, Ordering::AcqRel) {
            return;
        }
        let _stop = self.stop.lock();
        self.changed.notify_all();
    }

    /// Has the commit thread stop the volume: after a failure that others must learn of on a thread
    /// that holds no lock.
    pub(super) fn pass_on_failure(&self) {
        self.failed.store(true, Ordering::Release);
        self.request();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn stop(&self) {
        *self.stop.lock() = true;
        self.changed.notify_all();
    }

    /// Waits for a request or until `interval` is over. Returns whether a commit was requested, and
    /// `None` at the end.
    pub(super) fn wait(&self, interval: Option<Duration>) -> Option<bool> {
        let start = clock::now_monotonic();
        let mut stop = self.stop.lock();
        loop {
            if *stop {
                return None;
            }
            if self.requested.swap(false, Ordering::AcqRel) {
                return Some(true);
            }
            match interval.map(|interval| interval.saturating_sub(start.elapsed())) {
                Some(Duration::ZERO) => return Some(false),
                Some(left) => {
                    self.changed.wait_for(&mut stop, left);
                }
                None => self.changed.wait(&mut stop),
            }
        }
    }
}

/// Committed transactions whose freed blocks are still pinned, oldest first.
pub(super) struct Unpinner {
    queue: Mutex<UnpinQueue>,
    changed: Condvar,
}

struct UnpinQueue {
    generations: VecDeque<Generation>,
    stop: bool,
}

impl Unpinner {
    pub(super) fn new() -> Self {
        let queue = UnpinQueue { generations: VecDeque::new(), stop: false };
        Self { queue: Mutex::new(Rank::LEAF, queue), changed: Condvar::new() }
    }

    pub(super) fn push(&self, generation: Generation) {
        self.queue.lock().generations.push_back(generation);
        self.changed.notify_all();
    }

    /// The next one; `None` at the end, when all are unpinned.
    pub(super) fn wait_and_take(&self) -> Option<Generation> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(generation) = queue.generations.pop_front() {
                return Some(generation);
            }
            if queue.stop {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }

    pub(super) fn stop(&self) {
        self.queue.lock().stop = true;
        self.changed.notify_all();
    }
}
