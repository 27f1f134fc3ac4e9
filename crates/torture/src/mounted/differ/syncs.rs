//! Syncs of the mount at random times, beside calls that they must not change.
//!
//! So the kernel sends what it caches while calls are under way, as it does by itself on a machine
//! that has been up for a while.
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const PAUSE_MICROSECONDS_MAX: u64 = 4_000;

/// A thread that syncs, until [`Syncs::end`].
pub struct Syncs {
    ended: Arc<AtomicBool>,
    thread: thread::JoinHandle<u64>,
}

impl Syncs {
    /// Begins with the file system of `folder`.
    pub fn begin(folder: PathBuf, seed: u64) -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&ended);
        let thread = thread::spawn("syncs", move || {
            let (mut random, mut count) = (Seeded::new(seed), 0);
            while !end.load(Ordering::Acquire) {
                clock::sleep(Duration::from_micros(random.below(PAUSE_MICROSECONDS_MAX)));
                let done = File::open(&folder).is_ok_and(|file| rustix::fs::syncfs(file).is_ok());
                count += u64::from(done);
            }
            count
        });
        Self { ended, thread }
    }

    /// How many there were.
    pub fn end(self) -> u64 {
        self.ended.store(true, Ordering::Release);
        self.thread.join().unwrap_or(0)
    }
}
