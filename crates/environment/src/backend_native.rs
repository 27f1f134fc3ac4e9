//! What the locks are made of in a normal build: `parking_lot`, whose locks spin briefly, then
//! sleep, and hand themselves over fairly from time to time.

pub(crate) use parking_lot::{Condvar, RawMutex, RawRwLock};
use std::time::Duration;

pub(crate) fn unlock_fair<T: ?Sized>(guard: parking_lot::MutexGuard<'_, T>) {
    parking_lot::MutexGuard::unlock_fair(guard);
}

/// Waits until notified or until `timeout` has passed; returns whether it passed.
pub(crate) fn wait_for<T: ?Sized>(
    condvar: &Condvar,
    guard: &mut parking_lot::MutexGuard<'_, T>,
    timeout: Duration,
) -> bool {
    condvar.wait_for(guard, timeout).timed_out()
}
