//! Waiting until all data has arrived that the kernel had begun to send.
//!
//! syncfs(2) on a plain `fuse` mount writes back everything dirty. Linux 6.18 waits until that is
//! done (measured with slow WRITEs); before 6.16 it only began, since a page counted as written as
//! soon as it was copied into a request, and a request to sync that followed could overtake the
//! data. The kernel keeps at most a fixed number of such WRITEs with the server and sends the next
//! when one is answered. So once no request waits on the device and no WRITE is in work, all have
//! been answered. Between the moment a thread has read a request and the one it counts it, neither
//! shows; therefore the quiet must last for a while.
use crate::transport::Reply;
use cairn_environment::atomic::{AtomicUsize, Ordering};
use cairn_environment::clock;
use std::sync::Arc;
use std::time::Duration;

const STEP: Duration = Duration::from_millis(2);
/// Steps that the quiet must last.
const QUIET_STEPS: u32 = 5;
/// Others may go on using the mount, and what they write meanwhile needs no waiting for.
const STEPS_MAX: u32 = 5000;

/// How many WRITEs are in work.
#[derive(Clone, Default)]
pub struct WritesInWork(Arc<AtomicUsize>);

/// One of them.
pub struct WriteInWork<'a>(&'a AtomicUsize);

impl WritesInWork {
    /// Counts one more, until the guard is dropped.
    pub fn begin(&self) -> WriteInWork<'_> {
        self.0.fetch_add(1, Ordering::AcqRel);
        WriteInWork(&self.0)
    }

    /// Waits for the quiet; `reply` tells which connection to look at. Not on a request thread: it
    /// could be the only one.
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
