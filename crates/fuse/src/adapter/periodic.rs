//! Commits every second, for a mount whose server is told neither of sync(2) nor of umount(2).
//!
//! Locks: `stopped` is held for checking and waiting only, never while the volume commits.
use super::VolumeHandler;
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::thread::{self, JoinHandle};
use std::sync::Arc;
use std::time::Duration;

const INTERVAL: Duration = Duration::from_secs(1);

struct Stop {
    stopped: Mutex<bool>,
    change: Condvar,
}

/// A thread that commits a volume every second when something changed. Dropped, it ends.
pub struct PeriodicCommit {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl PeriodicCommit {
    /// Starts it.
    pub fn start(handler: Arc<VolumeHandler>) -> Self {
        let stop = Arc::new(Stop { stopped: Mutex::new(Rank::LEAF, false), change: Condvar::new() });
        let seen = Arc::clone(&stop);
        let thread = thread::spawn("cairn-periodic", move || {
            while !seen.wait() {
                if let Err(error) = handler.sync_if_changed() {
                    tracing::error!("periodic commit: {error}");
                    return;
                }
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Stop {
    /// Waits for the next turn. Returns whether to stop.
    fn wait(&self) -> bool {
        let mut stopped = self.stopped.lock();
        if !*stopped {
            self.change.wait_for(&mut stopped, INTERVAL);
        }
        *stopped
    }
}

impl Drop for PeriodicCommit {
    fn drop(&mut self) {
        *self.stop.stopped.lock() = true;
        self.stop.change.notify_all();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

impl std::fmt::Debug for PeriodicCommit {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("PeriodicCommit")
    }
}
