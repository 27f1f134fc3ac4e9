//! Threads for requests that may wait for the device.
//!
//! Locks: `jobs` is held briefly to add or take one, never while a request is served.
use super::super::Handler;
use super::queue::ArrivedRequest;
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::thread::{self, JoinHandle};
use std::collections::VecDeque;
use std::sync::Arc;

struct WaitingJobs {
    waiting: VecDeque<ArrivedRequest>,
    ended: bool,
}

struct JobQueue {
    jobs: Mutex<WaitingJobs>,
    change: Condvar,
}

/// The threads. Dropping this serves the waiting requests and ends the threads.
pub struct Workers {
    queue: Arc<JobQueue>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts `count` threads.
    pub fn start(count: usize, handler: &Arc<dyn Handler>) -> Self {
        let jobs = Mutex::new(Rank::FUSE, WaitingJobs { waiting: VecDeque::new(), ended: false });
        let queue = Arc::new(JobQueue { jobs, change: Condvar::new() });
        let threads = (0..count.max(1))
            .map(|index| {
                let (queue, handler) = (Arc::clone(&queue), Arc::clone(handler));
                thread::spawn(&format!("cairn-worker-{index}"), move || {
                    while let Some(arrived) = queue.take() {
                        arrived.serve(handler.as_ref());
                    }
                })
            })
            .collect();
        Self { queue, threads }
    }

    /// Passes `arrived` to the next free thread.
    pub fn put(&self, arrived: ArrivedRequest) {
        self.queue.jobs.lock().waiting.push_back(arrived);
        self.queue.change.notify_one();
    }
}

impl JobQueue {
    fn take(&self) -> Option<ArrivedRequest> {
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
        self.queue.jobs.lock().ended = true;
        self.queue.change.notify_all();
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
