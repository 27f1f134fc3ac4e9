//! Ends the process when something takes longer than anything but a hang could: a test that hangs
//! reports nothing.
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, clock, thread};
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

/// Lives as long as what it watches.
pub struct Watchdog(Arc<(Mutex<bool>, Condvar)>);

impl Watchdog {
    /// Aborts the process, and says that `what` hangs, unless it is dropped within `limit`.
    pub fn new(what: String, limit: Duration) -> Self {
        let shared = Arc::new((Mutex::new(Rank::LEAF, false), Condvar::new()));
        let other = shared.clone();
        drop(thread::spawn("watchdog", move || {
            let begin = clock::now_monotonic();
            let mut done = other.0.lock();
            while !*done {
                if begin.elapsed() >= limit {
                    // Not by a macro, whose output a test captures, and loses here.
                    let _ = writeln!(std::io::stderr(), "{what} hangs");
                    std::process::abort();
                }
                other.1.wait_for(&mut done, Duration::from_secs(1));
            }
        }));
        Self(shared)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.0.0.lock() = true;
        self.0.1.notify_all();
    }
}
