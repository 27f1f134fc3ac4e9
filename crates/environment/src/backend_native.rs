//! What the locks are made of in a normal build: `parking_lot`, whose locks spin briefly, then
//! sleep, and hand themselves over fairly from time to time.

pub(crate) use parking_lot::{Condvar, RawMutex, RawRwLock};
use std::time::Duration;

/// Waits until notified or until `timeout` has passed; returns whether it passed.
pub(crate) fn wait_for<T: ?Sized>(
    condvar: &Condvar,
    guard: &mut parking_lot::MutexGuard<'_, T>,
    timeout: Duration,
) -> bool {
    condvar.wait_for(guard, timeout).timed_out()
}

/// Threads that wait for a condition of which they are told all at once, like a wait queue of the
/// kernel.
#[cfg(feature = "baselines")]
pub(crate) struct WaitQueue {
    waiting: crate::atomic::AtomicU32,
}

#[cfg(feature = "baselines")]
impl WaitQueue {
    pub(crate) const fn new() -> WaitQueue {
        WaitQueue { waiting: crate::atomic::AtomicU32::new(0) }
    }

    fn key(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Sleeps as long as `condition` holds. It reads atomics and nothing else.
    pub(crate) fn wait_while(&self, condition: impl Fn() -> bool) {
        use crate::atomic::Ordering::SeqCst;
        self.waiting.fetch_add(1, SeqCst);
        while condition() {
            // SAFETY: the key is the address of this queue, which lives as long as anybody waits;
            // the callbacks neither panic nor park.
            unsafe {
                parking_lot_core::park(
                    self.key(),
                    &condition,
                    || {},
                    |_, _| {},
                    parking_lot_core::DEFAULT_PARK_TOKEN,
                    None,
                )
            };
        }
        self.waiting.fetch_sub(1, SeqCst);
    }

    /// Wakes everybody. The condition was changed before.
    pub(crate) fn wake_all(&self) {
        if self.waiting.load(crate::atomic::Ordering::SeqCst) > 0 {
            // SAFETY: the key is the address of this queue, which nothing else parks on.
            unsafe {
                parking_lot_core::unpark_all(self.key(), parking_lot_core::DEFAULT_UNPARK_TOKEN)
            };
        }
    }
}
