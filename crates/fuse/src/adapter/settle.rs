//! Waits until all data has arrived that the kernel had begun to send.
//!
//! syncfs(2) on a plain `fuse` mount writes back all dirty data. Linux 6.18 waits until that is
//! done (measured with slow WRITEs). Before 6.16 it only began: a page counted as written as soon
//! as it was copied into a request, so a sync request that followed could overtake the data. The
//! kernel keeps a limited number of such WRITEs in flight and sends the next when one is answered.
//! So once no request waits on the device and no WRITE is in work, all have been answered. A
//! request that a thread has read but not counted yet shows in neither; therefore the quiet must
//! last for a while.
use crate::transport::Reply;
use cairn_environment::atomic::{AtomicUsize, Ordering};
use cairn_environment::clock;
use std::sync::Arc;
use std::time::Duration;

const STEP: Duration = Duration::from_millis(2);
/// The number of steps that the quiet must last.
const QUIET_STEPS: u32 = 5;
/// Other programs may keep using the mount; what they write meanwhile is not waited for.
const STEPS_MAX: u32 = 5000;

/// The number of WRITEs in work.
#[derive(Clone, Default)]
pub struct WritesInWork(Arc<AtomicUsize>);

/// One WRITE in work.
pub struct WriteInWork<'a>(&'a AtomicUsize);

impl WritesInWork {
    /// Counts one more WRITE until the guard is dropped.
    pub fn begin(&self) -> WriteInWork<'_> {
        self.0.fetch_add(1, Ordering::AcqRel);
        WriteInWork(&self.0)
    }

    /// Waits for the quiet on the connection of `reply`. Not on a request thread, which could be
    /// the only one.
    pub fn wait_for_quiet(&self, reply: &Reply) {
        let mut quiet_steps = 0;
        for _ in 0..STEPS_MAX {
            let quiet = self.0.load(Ordering::Acquire) == 0 && !reply.requests_wait();
            quiet_steps = if quiet { quiet_steps + 1 } else { 0 };
            if quiet_steps == QUIET_STEPS {
                return;
            }
            clock::sleep(STEP);
        }
    }
}

impl Drop for WriteInWork<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::thread;

    #[test]
    fn quiet_begins_when_the_last_write_is_done() {
        let (writes, held) = (WritesInWork::default(), WritesInWork::default());
        let reply = Reply::silent(1);
        held.wait_for_quiet(&reply);
        let begun = writes.begin();
        let waiting = writes.clone();
        let waiter = thread::spawn("waiter", move || {
            waiting.wait_for_quiet(&reply);
            waiting.0.load(Ordering::Acquire)
        });
        clock::sleep(STEP * 4 * QUIET_STEPS);
        assert!(!waiter.is_finished());
        drop(begun);
        assert_eq!(waiter.join().unwrap(), 0);
    }
}
