//! The predecessor of the node lock: btrfs' extent buffer lock as of Linux 5.9, for measurements
//! only. All that a measurement of locks needs stands in this file; the product has none of it.
//!
//! What it copies (`fs/btrfs/locking.c`, function by function): a spinning reader-writer lock;
//! `blocking_readers` and `blocking_writers`, into which a holder turns its hold before it may
//! sleep (`btrfs_set_lock_blocking_read`/`_write`); one wait queue for the threads that wait until
//! blocking readers are gone and one for those that wait for the blocking writer; a release of a
//! blocking hold wakes *all* threads in its queue, and all of them contend again. A `try_` gives up
//! on a blocking holder and spins for a spinning one, as `btrfs_tree_read_lock_atomic` and
//! `btrfs_try_tree_write_lock` do. The spinning lock lets readers wait for a writer that waits,
//! like the kernel's.
//!
//! What differs: the kernel doesn't preempt the holder of a spinning lock; here a thread that has
//! spun for a while yields its CPU instead of burning it. A path in btrfs lists the locks that its
//! owner holds; here a list per thread does. A thread that is going to sleep, copy or read calls
//! [`block_held`], which is `btrfs_set_path_blocking`.
//!
//! States of a hold: *spinning*, then perhaps *blocking*, then released. Invariant: a blocking hold
//! leaves the spinning lock free; a thread that takes the spinning lock looks at the blocking
//! counts again under it.
use crate::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::backend;
use crate::lock;
use crate::rank::Rank;
use std::cell::RefCell;

/// A raw lock of one kind or the other, chosen when it is made.
pub struct EitherLock(Kind);

// Few of them exist at a time, and the model checker makes them large.
#[cfg_attr(feature = "shuttle", allow(clippy::large_enum_variant))]
enum Kind {
    /// The product's.
    Sleeping(backend::RawRwLock),
    /// The predecessor.
    Waking(WakingLock),
}

/// The standard library's lock on a futex word, to measure beside the others; it has no rank.
pub use std::sync::RwLock as FutexLock;

/// A reader-writer lock of one kind or the other.
pub type RwLock<T> = lock::RwLock<T, EitherLock>;

impl<T> RwLock<T> {
    /// A free lock of the product's kind.
    pub const fn sleeping(rank: Rank, value: T) -> RwLock<T> {
        let raw = <backend::RawRwLock as lock_api::RawRwLock>::INIT;
        lock::RwLock::with_raw(rank, EitherLock(Kind::Sleeping(raw)), value)
    }

    /// A free lock of the predecessor's kind: it spins, blocks, and wakes all waiters.
    pub const fn waking(rank: Rank, value: T) -> RwLock<T> {
        lock::RwLock::with_raw(rank, EitherLock(Kind::Waking(WakingLock::new())), value)
    }
}

/// Bits of [`SpinLock::state`] beside the number of readers.
const WRITER: u32 = 1 << 31;
const WRITER_WAITS: u32 = 1 << 30;
/// Turns before a thread yields its CPU.
const SPINS_MAX: u32 = 200;

/// The kernel's `rwlock_t`.
struct SpinLock {
    state: AtomicU32,
}

/// The predecessor.
struct WakingLock {
    spinning: SpinLock,
    blocking_readers: AtomicU32,
    blocking_writer: AtomicBool,
    /// Threads that wait until there are no blocking readers.
    readers_gone: WaitQueue,
    /// Threads that wait until there is no blocking writer.
    writer_gone: WaitQueue,
}

struct Hold {
    lock: *const WakingLock,
    exclusive: bool,
    blocking: bool,
}

#[cfg(not(feature = "shuttle"))]
thread_local! {
    static HELD: RefCell<Vec<Hold>> = const { RefCell::new(Vec::new()) };
}
// Under the model checker many modelled threads share one thread of the system.
#[cfg(feature = "shuttle")]
shuttle::thread_local! {
    static HELD: RefCell<Vec<Hold>> = RefCell::new(Vec::new());
}

/// Turns every waking lock that this thread holds from spinning into blocking: it is about to
/// sleep, or to work for long.
pub fn block_held() {
    HELD.with(|held| {
        for hold in held.borrow_mut().iter_mut().filter(|hold| !hold.blocking) {
            hold.blocking = true;
            // SAFETY: a listed lock is held by this thread, and its guard keeps it alive and in
            // place.
            unsafe { &*hold.lock }.set_blocking(hold.exclusive);
        }
    });
}

/// How many waking locks this thread holds, so that a test can see the kind of a lock.
pub fn waking_held() -> usize {
    HELD.with(|held| held.borrow().len())
}

fn relax(spins: &mut u32) {
    *spins += 1;
    if cfg!(feature = "shuttle") || spins.is_multiple_of(SPINS_MAX) {
        crate::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

impl SpinLock {
    fn exchange(&self, old: u32, new: u32) -> bool {
        self.state.compare_exchange_weak(old, new, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    fn read_lock(&self) {
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if state & (WRITER | WRITER_WAITS) == 0 && self.exchange(state, state + 1) {
                return;
            }
            relax(&mut spins);
        }
    }

    fn read_unlock(&self) {
        self.state.fetch_sub(1, Ordering::SeqCst);
    }

    fn write_lock(&self) {
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if state & !WRITER_WAITS == 0 && self.exchange(state, WRITER) {
                return;
            }
            self.state.fetch_or(WRITER_WAITS, Ordering::Relaxed);
            relax(&mut spins);
        }
    }

    fn write_unlock(&self) {
        self.state.fetch_and(!WRITER, Ordering::SeqCst);
    }
}

impl WakingLock {
    /// A free lock.
    const fn new() -> WakingLock {
        WakingLock {
            spinning: SpinLock { state: AtomicU32::new(0) },
            blocking_readers: AtomicU32::new(0),
            blocking_writer: AtomicBool::new(false),
            readers_gone: WaitQueue::new(),
            writer_gone: WaitQueue::new(),
        }
    }

    fn list(&self, exclusive: bool) {
        HELD.with(|held| held.borrow_mut().push(Hold { lock: self, exclusive, blocking: false }));
    }

    /// Takes the hold off the list; whether it had become a blocking one.
    fn unlist(&self) -> bool {
        HELD.with(|held| {
            let mut held = held.borrow_mut();
            let index = held.iter().rposition(|hold| std::ptr::eq(hold.lock, self));
            held.remove(index.expect("a lock that is released is held")).blocking
        })
    }

    fn has_blocking_readers(&self) -> bool {
        self.blocking_readers.load(Ordering::SeqCst) > 0
    }

    fn has_blocking_writer(&self) -> bool {
        self.blocking_writer.load(Ordering::SeqCst)
    }

    fn set_blocking(&self, exclusive: bool) {
        if exclusive {
            self.blocking_writer.store(true, Ordering::SeqCst);
            self.spinning.write_unlock();
        } else {
            self.blocking_readers.fetch_add(1, Ordering::SeqCst);
            self.spinning.read_unlock();
        }
    }

    fn lock_shared(&self) {
        block_held();
        while !self.try_lock_shared() {
            self.writer_gone.wait_while(|| self.has_blocking_writer());
        }
    }

    fn try_lock_shared(&self) -> bool {
        if self.has_blocking_writer() {
            return false;
        }
        self.spinning.read_lock();
        // It may have become a blocking one since.
        let free = !self.has_blocking_writer();
        if free {
            self.list(false)
        } else {
            self.spinning.read_unlock()
        }
        free
    }

    fn unlock_shared(&self) {
        if !self.unlist() {
            self.spinning.read_unlock();
        } else if self.blocking_readers.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.readers_gone.wake_all();
        }
    }

    fn lock_exclusive(&self) {
        block_held();
        while !self.try_lock_exclusive() {
            self.readers_gone.wait_while(|| self.has_blocking_readers());
            self.writer_gone.wait_while(|| self.has_blocking_writer());
        }
    }

    fn try_lock_exclusive(&self) -> bool {
        if self.has_blocking_writer() || self.has_blocking_readers() {
            return false;
        }
        self.spinning.write_lock();
        let free = !self.has_blocking_writer() && !self.has_blocking_readers();
        if free {
            self.list(true)
        } else {
            self.spinning.write_unlock()
        }
        free
    }

    fn unlock_exclusive(&self) {
        if !self.unlist() {
            self.spinning.write_unlock();
        } else {
            self.blocking_writer.store(false, Ordering::SeqCst);
            self.writer_gone.wake_all();
        }
    }
}

// SAFETY: a spinning hold excludes others by `SpinLock`: a writer enters only when neither a writer
// nor a reader is in, a reader only when no writer is. A blocking hold is counted before it leaves
// the spinning lock, and a thread that takes that afterwards gives way to it; so at every moment
// there are readers or one writer. The unlocking functions undo their own hold, which the thread's
// list knows.
unsafe impl lock_api::RawRwLock for EitherLock {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: EitherLock = EitherLock(Kind::Sleeping(backend::RawRwLock::INIT));
    type GuardMarker = lock_api::GuardNoSend;

    fn lock_shared(&self) {
        match &self.0 {
            Kind::Sleeping(lock) => lock.lock_shared(),
            Kind::Waking(lock) => lock.lock_shared(),
        }
    }

    fn try_lock_shared(&self) -> bool {
        match &self.0 {
            Kind::Sleeping(lock) => lock.try_lock_shared(),
            Kind::Waking(lock) => lock.try_lock_shared(),
        }
    }

    unsafe fn unlock_shared(&self) {
        match &self.0 {
            // SAFETY: the caller holds this lock shared.
            Kind::Sleeping(lock) => unsafe { lock.unlock_shared() },
            Kind::Waking(lock) => lock.unlock_shared(),
        }
    }

    fn lock_exclusive(&self) {
        match &self.0 {
            Kind::Sleeping(lock) => lock.lock_exclusive(),
            Kind::Waking(lock) => lock.lock_exclusive(),
        }
    }

    fn try_lock_exclusive(&self) -> bool {
        match &self.0 {
            Kind::Sleeping(lock) => lock.try_lock_exclusive(),
            Kind::Waking(lock) => lock.try_lock_exclusive(),
        }
    }

    unsafe fn unlock_exclusive(&self) {
        match &self.0 {
            // SAFETY: the caller holds this lock exclusively.
            Kind::Sleeping(lock) => unsafe { lock.unlock_exclusive() },
            Kind::Waking(lock) => lock.unlock_exclusive(),
        }
    }
}

/// Threads that wait for a condition and are all woken at once, like a wait queue of the kernel.
#[cfg(not(feature = "shuttle"))]
struct WaitQueue {
    waiting: AtomicU32,
}

#[cfg(not(feature = "shuttle"))]
impl WaitQueue {
    const fn new() -> WaitQueue {
        WaitQueue { waiting: AtomicU32::new(0) }
    }

    fn key(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Sleeps as long as `condition` holds. It reads atomics and nothing else.
    fn wait_while(&self, condition: impl Fn() -> bool) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        while condition() {
            // SAFETY: the key is the address of this queue, which outlives its waiters; the
            // callbacks neither panic nor park.
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
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes all waiters. The condition was changed before.
    fn wake_all(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // SAFETY: the key is the address of this queue, which nothing else parks on.
            unsafe {
                parking_lot_core::unpark_all(self.key(), parking_lot_core::DEFAULT_UNPARK_TOKEN)
            };
        }
    }
}

/// The same under the model checker's scheduler.
#[cfg(feature = "shuttle")]
struct WaitQueue(std::sync::Mutex<Vec<shuttle_engine::runtime::task::TaskId>>);

#[cfg(feature = "shuttle")]
impl WaitQueue {
    const fn new() -> WaitQueue {
        WaitQueue(std::sync::Mutex::new(Vec::new()))
    }

    fn wait_while(&self, condition: impl Fn() -> bool) {
        let task = backend::this_task();
        loop {
            // The condition reads atomics, so there are points between its check and the sleep: the
            // task enters first, and may have been woken at one of those points.
            backend::locked(&self.0).push(task);
            let waits = condition();
            let entered = backend::locked(&self.0).contains(&task);
            if waits && entered {
                backend::block();
            } else {
                backend::locked(&self.0).retain(|other| *other != task);
            }
            if !waits {
                return;
            }
        }
    }

    fn wake_all(&self) {
        shuttle_engine::runtime::thread::continuation::switch();
        let waiting = std::mem::take(&mut *backend::locked(&self.0));
        waiting.into_iter().for_each(backend::wake);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "waking_tests.rs"]
mod tests;
