//! What the locks are made of under the model checker: raw locks built of its mutex and condition variable.
//!
//! The values that the locks protect stay in `lock_api`'s cells, so that guards, owned guards and their drops are the
//! same code as in a normal build; only *who may go on* is decided here.
//!
//! Lock discipline: the inner mutex of a raw lock is held for a few instructions and nothing is taken under it. A
//! condition variable's inner mutex is taken while the user's mutex is held (waiter), and the user's raw mutex is
//! released under it; a notifier takes it alone or under the user's mutex.

use lock_api::{GuardNoSend, MutexGuard};
use shuttle::sync as model;
use std::sync::PoisonError;
use std::time::Duration;

fn locked<T>(mutex: &model::Mutex<T>) -> model::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn waited<'a, T>(condvar: &model::Condvar, guard: model::MutexGuard<'a, T>) -> model::MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// A mutex without a value.
pub(crate) struct RawMutex {
    taken: model::Mutex<bool>,
    released: model::Condvar,
}

// SAFETY: `lock` returns only after it set `taken` from false to true under the inner mutex, and only the holder's
// `unlock` sets it back, so at most one thread is between the two.
unsafe impl lock_api::RawMutex for RawMutex {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: RawMutex = RawMutex { taken: model::Mutex::new(false), released: model::Condvar::new() };
    type GuardMarker = GuardNoSend;

    fn lock(&self) {
        let mut taken = locked(&self.taken);
        while *taken {
            taken = waited(&self.released, taken);
        }
        *taken = true;
    }

    fn try_lock(&self) -> bool {
        !std::mem::replace(&mut *locked(&self.taken), true)
    }

    unsafe fn unlock(&self) {
        *locked(&self.taken) = false;
        self.released.notify_one();
    }
}

struct Sharing {
    readers: u32,
    writer: bool,
    writers_waiting: u32,
}

/// A reader-writer lock without a value; waiting writers go before new readers.
pub(crate) struct RawRwLock {
    sharing: model::Mutex<Sharing>,
    released: model::Condvar,
}

// SAFETY: `writer` is set only when there is neither a reader nor a writer, `readers` grows only when there is no writer,
// both under the inner mutex; the unlocking functions undo exactly their own step.
unsafe impl lock_api::RawRwLock for RawRwLock {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: RawRwLock = RawRwLock {
        sharing: model::Mutex::new(Sharing { readers: 0, writer: false, writers_waiting: 0 }),
        released: model::Condvar::new(),
    };
    type GuardMarker = GuardNoSend;

    fn lock_shared(&self) {
        let mut sharing = locked(&self.sharing);
        while sharing.writer || sharing.writers_waiting > 0 {
            sharing = waited(&self.released, sharing);
        }
        sharing.readers += 1;
    }

    fn try_lock_shared(&self) -> bool {
        let mut sharing = locked(&self.sharing);
        let free = !sharing.writer && sharing.writers_waiting == 0;
        sharing.readers += u32::from(free);
        free
    }

    unsafe fn unlock_shared(&self) {
        locked(&self.sharing).readers -= 1;
        self.released.notify_all();
    }

    fn lock_exclusive(&self) {
        let mut sharing = locked(&self.sharing);
        sharing.writers_waiting += 1;
        while sharing.writer || sharing.readers > 0 {
            sharing = waited(&self.released, sharing);
        }
        sharing.writers_waiting -= 1;
        sharing.writer = true;
    }

    fn try_lock_exclusive(&self) -> bool {
        let mut sharing = locked(&self.sharing);
        let free = !sharing.writer && sharing.readers == 0;
        sharing.writer |= free;
        free
    }

    unsafe fn unlock_exclusive(&self) {
        locked(&self.sharing).writer = false;
        self.released.notify_all();
    }
}

/// A condition variable. `notifications` makes a timed wait see what happened while it did not sleep.
pub(crate) struct Condvar {
    notifications: model::Mutex<u64>,
    notified: model::Condvar,
}

impl Condvar {
    pub(crate) const fn new() -> Condvar {
        Condvar { notifications: model::Mutex::new(0), notified: model::Condvar::new() }
    }

    pub(crate) fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, RawMutex, T>) {
        // The inner mutex is held from before the user's mutex is released until this thread sleeps: a notification
        // that follows the release finds it sleeping.
        let inner = locked(&self.notifications);
        MutexGuard::unlocked(guard, || drop(waited(&self.notified, inner)));
    }

    pub(crate) fn notify_one(&self) {
        *locked(&self.notifications) += 1;
        self.notified.notify_one();
    }

    pub(crate) fn notify_all(&self) {
        *locked(&self.notifications) += 1;
        self.notified.notify_all();
    }
}

/// The model has no time: a timed wait lets the others run once, and has timed out unless somebody notified meanwhile.
pub(crate) fn wait_for<T: ?Sized>(condvar: &Condvar, guard: &mut MutexGuard<'_, RawMutex, T>, _timeout: Duration) -> bool {
    let before = *locked(&condvar.notifications);
    MutexGuard::unlocked(guard, shuttle::thread::yield_now);
    *locked(&condvar.notifications) == before
}

/// Threads that wait for a condition of which they are told all at once.
#[cfg(feature = "baselines")]
pub(crate) struct WaitQueue {
    queue: model::Mutex<()>,
    changed: model::Condvar,
}

#[cfg(feature = "baselines")]
impl WaitQueue {
    pub(crate) const fn new() -> WaitQueue {
        WaitQueue { queue: model::Mutex::new(()), changed: model::Condvar::new() }
    }

    pub(crate) fn wait_while(&self, condition: impl Fn() -> bool) {
        let mut queue = locked(&self.queue);
        while condition() {
            queue = waited(&self.changed, queue);
        }
    }

    pub(crate) fn wake_all(&self) {
        drop(locked(&self.queue));
        self.changed.notify_all();
    }
}
