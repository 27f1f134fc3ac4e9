//! Threads for requests that may wait for the device.
//!
//! Locks: `jobs` is held for a moment to put or take one, never while a request is served.
use super::super::Handler;
use super::queue::Arrived;
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::thread::{self, JoinHandle};
use std::collections::VecDeque;
use std::sync::Arc;

struct Jobs {
    waiting: VecDeque<Arrived>,
    ended: bool,
}

struct Shared {
    jobs: Mutex<Jobs>,
    change: Condvar,
}

/// The threads. Dropped, they serve what waits and end.
pub struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts `count` threads.
    pub fn start(count: usize, handler: &Arc<dyn Handler>) -> Self {
        let jobs = Mutex::new(Rank::FUSE, Jobs { waiting: VecDeque::new(), ended: false });
        let shared = Arc::new(Shared { jobs, change: Condvar::new() });
        let threads = (0..count.max(1))
            .map(|index| {
                let (shared, handler) = (Arc::clone(&shared), Arc::clone(handler));
                thread::spawn(&format!("cairn-worker-{index}"), move || {
                    while let Some(arrived) = shared.take() {
                        arrived.serve(handler.as_ref());
                    }
                })
            })
            .collect();
        Self { shared, threads }
    }

    /// Hands `arrived` to the next thread that is free.
    pub fn put(&self, arrived: Arrived) {
        self.shared.jobs.lock().waiting.push_back(arrived);
        self.shared.change.notify_one();
    }
}

impl Shared {
    fn take(&self) -> Option<Arrived> {
        let mut jobs = self.jobs.lock();
        loop {
            if let Some(arrived) = jobs.waiting.pop_front() {
                return Some(arrived);
            }
            if jobs.ended {
                return None;
            }
            self.change.wait(&mut jobs);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.jobs.lock().ended = true;
        self.shared.change.notify_all();
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Workers").field("threads", &self.threads.len()).finish()
    }
}
