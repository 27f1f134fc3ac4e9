//! The queue of files that the writeback thread writes before its next sweep.
use super::inode::Inode;
use cairn_environment::Rank;
use cairn_environment::clock::Monotonic;
use cairn_environment::lock::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Files that grow and have much dirty data, to be written soon. Lock: a leaf, for moments.
pub(super) struct WriteBehind {
    queue: Mutex<GrowingFiles>,
    changed: Condvar,
}

struct GrowingFiles {
    files: VecDeque<Arc<Inode>>,
    stop: bool,
}

/// What the writeback thread does next.
pub(super) enum Due {
    File(Arc<Inode>),
    Sweep,
    End,
}

impl WriteBehind {
    pub(super) fn new() -> Self {
        let queue = GrowingFiles { files: VecDeque::new(), stop: false };
        Self { queue: Mutex::new(Rank::LEAF, queue), changed: Condvar::new() }
    }

    pub(super) fn stop(&self) {
        self.queue.lock().stop = true;
        self.changed.notify_all();
    }

    pub(super) fn push(&self, inode: &Arc<Inode>) {
        let mut queue = self.queue.lock();
        if !queue.files.iter().any(|queued| Arc::ptr_eq(queued, inode)) {
            queue.files.push_back(Arc::clone(inode));
            drop(queue);
            self.changed.notify_all();
        }
    }

    /// Waits for a file, until `interval` since `start` is over, or for the end.
    pub(super) fn wait(&self, start: Monotonic, interval: Duration) -> Due {
        let mut queue = self.queue.lock();
        loop {
            if queue.stop {
                return Due::End;
            }
            let left = interval.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Due::Sweep;
            }
            if let Some(inode) = queue.files.pop_front() {
                return Due::File(inode);
            }
            self.changed.wait_for(&mut queue, left);
        }
    }
}
