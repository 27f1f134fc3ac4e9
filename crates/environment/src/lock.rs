//! Mutex, reader-writer lock and condition variable, each lock with a [`Rank`].
//!
//! Purpose: the only locks of the program. They sleep when they must wait, wake one waiter at a
//! time, and cannot be poisoned. `parking_lot` hands a lock over fairly now and then; where the
//! order of arrival is a promise (tickets), a queue keeps it, never a lock.
//!
//! Invariants (debug builds): locks are taken by ascending rank, and those of a nested rank by
//! ascending place, if they are taken with one (`read_at`, `write_at`); no thread takes the same
//! lock twice. A `try_` function cannot wait, so it is not checked, but what it took counts for the
//! locks that follow.
//!
//! Owned guards (`read_arc_at`, `write_arc_at`) keep their lock alive: a descent through a tree can
//! hold a node's lock while the cache drops the node.
//!
//! An [`RwLock`] is generic over the raw lock inside it, so that a measurement can put another one
//! there (`waking.rs`). Everything else takes the default, the product's.

use crate::backend::{self, RawRwLock};
use crate::held::{Held, RankTag};
use crate::rank::Rank;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

type InnerMutex<T> = lock_api::Mutex<backend::RawMutex, T>;

fn address<T: ?Sized>(lock: &T) -> usize {
    std::ptr::from_ref(lock).cast::<()>().addr()
}

/// Mutual exclusion around a value.
///
/// ```
/// use cairn_environment::{lock::Mutex, Rank};
/// let count = Mutex::new(Rank::LEAF, 0);
/// *count.lock() += 1;
/// assert_eq!(*count.lock(), 1);
/// ```
pub struct Mutex<T: ?Sized> {
    rank: RankTag,
    inner: InnerMutex<T>,
}

/// Access to a [`Mutex`]'s value; releases it when dropped.
#[must_use = "the lock is released when the guard is dropped"]
pub struct MutexGuard<'a, T: ?Sized> {
    // Fields drop in this order: released first, taken off the list second.
    inner: lock_api::MutexGuard<'a, backend::RawMutex, T>,
    held: Held,
}

impl<T> Mutex<T> {
    /// A free mutex.
    pub const fn new(rank: Rank, value: T) -> Mutex<T> {
        Mutex { rank: RankTag::new(rank), inner: InnerMutex::new(value) }
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Takes the mutex; waits until it is free.
    ///
    /// # Panics
    /// In a debug build, when the thread holds a lock that must be taken after this one.
    #[track_caller]
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.rank.check(address(self), None);
        let inner = self.inner.lock();
        MutexGuard { inner, held: self.rank.hold(address(self), None, true) }
    }

    /// Takes the mutex if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let inner = self.inner.try_lock()?;
        Some(MutexGuard { inner, held: self.rank.hold(address(self), None, true) })
    }
}

impl<T: ?Sized> MutexGuard<'_, T> {
    /// Releases the mutex to the thread that waits longest, if any does. Who takes it again at once
    /// would otherwise get it before the waiter has woken up.
    pub fn unlock_fair(self) {
        let Self { inner, held } = self;
        backend::unlock_fair(inner);
        drop(held);
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.inner, formatter)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, formatter)
    }
}

/// Waiting, with a [`Mutex`] released meanwhile, until another thread changed the mutex's value.
///
/// ```
/// use cairn_environment::{lock::{Condvar, Mutex}, thread, Rank};
/// use std::sync::Arc;
/// let shared = Arc::new((Mutex::new(Rank::LEAF, false), Condvar::new()));
/// let other = Arc::clone(&shared);
/// let setter = thread::spawn("setter", move || {
///     *other.0.lock() = true;
///     other.1.notify_one();
/// });
/// let mut done = shared.0.lock();
/// while !*done {
///     shared.1.wait(&mut done);
/// }
/// drop(done);
/// setter.join().unwrap();
/// ```
pub struct Condvar {
    inner: backend::Condvar,
}

impl Condvar {
    /// A condition variable without waiters.
    pub const fn new() -> Condvar {
        Condvar { inner: backend::Condvar::new() }
    }

    /// Releases the mutex, sleeps until notified, takes the mutex again. May return without a
    /// reason: check the condition again.
    ///
    /// # Panics
    /// In a debug build, when the thread holds a lock that must be taken after the mutex, which it
    /// takes again.
    #[track_caller]
    pub fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        guard.held.check_again();
        crate::thread::will_block();
        self.inner.wait(&mut guard.inner);
    }

    /// Like [`Condvar::wait`], for at most `timeout`. Returns whether the time ran out.
    #[track_caller]
    pub fn wait_for<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) -> bool {
        guard.held.check_again();
        crate::thread::will_block();
        backend::wait_for(&self.inner, &mut guard.inner, timeout)
    }

    /// Wakes one waiter, if there is one.
    pub fn notify_one(&self) {
        self.inner.notify_one();
    }

    /// Wakes all waiters.
    pub fn notify_all(&self) {
        self.inner.notify_all();
    }
}

impl Default for Condvar {
    fn default() -> Condvar {
        Condvar::new()
    }
}

impl fmt::Debug for Condvar {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Condvar")
    }
}

/// Many readers or one writer around a value. A waiting writer stops new readers, so a thread must
/// not read twice.
///
/// ```
/// use cairn_environment::{lock::RwLock, Rank};
/// use std::sync::Arc;
/// let node = Arc::new(RwLock::new(Rank::NODE, vec![1]));
/// let mut guard = node.write_arc_at(0);
/// drop(node);
/// guard.push(2);
/// assert_eq!(*guard, [1, 2]);
/// ```
pub struct RwLock<T: ?Sized, R = RawRwLock> {
    rank: RankTag,
    inner: lock_api::RwLock<R, T>,
}

/// Shared access to an [`RwLock`]'s value.
#[must_use = "the lock is released when the guard is dropped"]
pub struct RwLockReadGuard<'a, T: ?Sized, R: lock_api::RawRwLock = RawRwLock> {
    inner: lock_api::RwLockReadGuard<'a, R, T>,
    _held: Held,
}

/// Exclusive access to an [`RwLock`]'s value.
#[must_use = "the lock is released when the guard is dropped"]
pub struct RwLockWriteGuard<'a, T: ?Sized, R: lock_api::RawRwLock = RawRwLock> {
    inner: lock_api::RwLockWriteGuard<'a, R, T>,
    _held: Held,
}

impl<T> RwLock<T> {
    /// A free lock.
    pub const fn new(rank: Rank, value: T) -> RwLock<T> {
        RwLock::with_raw(rank, <RawRwLock as lock_api::RawRwLock>::INIT, value)
    }
}

impl<T, R: lock_api::RawRwLock> RwLock<T, R> {
    /// A lock around `raw`, which is free.
    pub(crate) const fn with_raw(rank: Rank, raw: R, value: T) -> RwLock<T, R> {
        RwLock { rank: RankTag::new(rank), inner: lock_api::RwLock::from_raw(raw, value) }
    }
}

impl<T: ?Sized, R: lock_api::RawRwLock> RwLock<T, R> {
    /// Shared access; waits for the writer that holds the lock, and for those that wait already.
    ///
    /// # Panics
    /// In a debug build, when the thread holds a lock that must be taken after this one.
    #[track_caller]
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T, R> {
        self.read_in(None)
    }

    /// Exclusive access; waits for the threads that hold the lock.
    ///
    /// # Panics
    /// In a debug build, when the thread holds a lock that must be taken after this one.
    #[track_caller]
    #[inline]
    pub fn write(&self) -> RwLockWriteGuard<'_, T, R> {
        self.write_in(None)
    }

    /// [`RwLock::read`]; the lock has this place among those of its rank.
    ///
    /// # Panics
    /// In a debug build, when the thread holds a lock that must be taken after this one.
    #[track_caller]
    #[inline]
    pub fn read_at(&self, place: u64) -> RwLockReadGuard<'_, T, R> {
        self.read_in(Some(place))
    }

    /// [`RwLock::write`]; the lock has this place among those of its rank.
    ///
    /// # Panics
    /// In a debug build, when the thread holds a lock that must be taken after this one.
    #[track_caller]
    #[inline]
    pub fn write_at(&self, place: u64) -> RwLockWriteGuard<'_, T, R> {
        self.write_in(Some(place))
    }

    #[track_caller]
    #[inline]
    fn read_in(&self, place: Option<u64>) -> RwLockReadGuard<'_, T, R> {
        self.rank.check(address(self), place);
        let inner = self.inner.read();
        RwLockReadGuard { inner, _held: self.rank.hold(address(self), place, false) }
    }

    #[track_caller]
    #[inline]
    fn write_in(&self, place: Option<u64>) -> RwLockWriteGuard<'_, T, R> {
        self.rank.check(address(self), place);
        let inner = self.inner.write();
        RwLockWriteGuard { inner, _held: self.rank.hold(address(self), place, true) }
    }

    /// Checks, in debug builds, that the thread may wait for this lock, whether it will have to or
    /// not.
    ///
    /// # Panics
    /// In a debug build, when the thread holds a lock that must be taken after this one.
    #[track_caller]
    #[inline]
    pub fn assert_order(&self, place: u64) {
        self.rank.check(address(self), Some(place));
    }

    /// Shared access, if it needs no waiting.
    #[inline]
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T, R>> {
        self.try_read_in(None)
    }

    /// Exclusive access, if it needs no waiting.
    #[inline]
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T, R>> {
        self.try_write_in(None)
    }

    #[inline]
    fn try_read_in(&self, place: Option<u64>) -> Option<RwLockReadGuard<'_, T, R>> {
        let inner = self.inner.try_read()?;
        Some(RwLockReadGuard { inner, _held: self.rank.hold(address(self), place, false) })
    }

    #[inline]
    fn try_write_in(&self, place: Option<u64>) -> Option<RwLockWriteGuard<'_, T, R>> {
        let inner = self.inner.try_write()?;
        Some(RwLockWriteGuard { inner, _held: self.rank.hold(address(self), place, true) })
    }

    /// [`RwLock::read_at`] with a guard that keeps the lock alive.
    #[track_caller]
    #[inline]
    pub fn read_arc_at(self: &Arc<Self>, place: u64) -> ArcRwLockReadGuard<T, R> {
        ArcRwLockReadGuard::from_borrowed(self, self.read_in(Some(place)))
    }

    /// [`RwLock::write_at`] with a guard that keeps the lock alive.
    #[track_caller]
    #[inline]
    pub fn write_arc_at(self: &Arc<Self>, place: u64) -> ArcRwLockWriteGuard<T, R> {
        ArcRwLockWriteGuard::from_borrowed(self, self.write_in(Some(place)))
    }

    /// [`RwLock::read_arc_at`], if it needs no waiting.
    #[inline]
    pub fn try_read_arc_at(self: &Arc<Self>, place: u64) -> Option<ArcRwLockReadGuard<T, R>> {
        Some(ArcRwLockReadGuard::from_borrowed(self, self.try_read_in(Some(place))?))
    }

    /// [`RwLock::write_arc_at`], if it needs no waiting.
    #[inline]
    pub fn try_write_arc_at(self: &Arc<Self>, place: u64) -> Option<ArcRwLockWriteGuard<T, R>> {
        Some(ArcRwLockWriteGuard::from_borrowed(self, self.try_write_in(Some(place))?))
    }
}

impl<T: ?Sized, R: lock_api::RawRwLock> Deref for RwLockReadGuard<'_, T, R> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized, R: lock_api::RawRwLock> Deref for RwLockWriteGuard<'_, T, R> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized, R: lock_api::RawRwLock> DerefMut for RwLockWriteGuard<'_, T, R> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: ?Sized + fmt::Debug, R: lock_api::RawRwLock> fmt::Debug for RwLock<T, R> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.inner, formatter)
    }
}

impl<T: ?Sized + fmt::Debug, R: lock_api::RawRwLock> fmt::Debug for RwLockReadGuard<'_, T, R> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, formatter)
    }
}

impl<T: ?Sized + fmt::Debug, R: lock_api::RawRwLock> fmt::Debug for RwLockWriteGuard<'_, T, R> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, formatter)
    }
}

/// Shared access to an [`RwLock`]'s value, which keeps the lock alive.
#[must_use = "the lock is released when the guard is dropped"]
pub struct ArcRwLockReadGuard<T: ?Sized, R: lock_api::RawRwLock = RawRwLock> {
    // Taken off the list before the value may die with the last `Arc`.
    _held: Held,
    lock: Arc<RwLock<T, R>>,
    // A guard belongs to the thread that took the lock.
    _not_send: PhantomData<*const ()>,
}

/// Exclusive access to an [`RwLock`]'s value, which keeps the lock alive.
#[must_use = "the lock is released when the guard is dropped"]
pub struct ArcRwLockWriteGuard<T: ?Sized, R: lock_api::RawRwLock = RawRwLock> {
    _held: Held,
    lock: Arc<RwLock<T, R>>,
    _not_send: PhantomData<*const ()>,
}

impl<T: ?Sized, R: lock_api::RawRwLock> ArcRwLockReadGuard<T, R> {
    #[inline]
    fn from_borrowed(
        lock: &Arc<RwLock<T, R>>,
        guard: RwLockReadGuard<'_, T, R>,
    ) -> ArcRwLockReadGuard<T, R> {
        std::mem::forget(guard.inner);
        ArcRwLockReadGuard { lock: Arc::clone(lock), _held: guard._held, _not_send: PhantomData }
    }
}

impl<T: ?Sized, R: lock_api::RawRwLock> ArcRwLockWriteGuard<T, R> {
    #[inline]
    fn from_borrowed(
        lock: &Arc<RwLock<T, R>>,
        guard: RwLockWriteGuard<'_, T, R>,
    ) -> ArcRwLockWriteGuard<T, R> {
        std::mem::forget(guard.inner);
        ArcRwLockWriteGuard { lock: Arc::clone(lock), _held: guard._held, _not_send: PhantomData }
    }
}

impl<T: ?Sized, R: lock_api::RawRwLock> Deref for ArcRwLockReadGuard<T, R> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock shared until it is dropped (the borrowed guard it was
        // made of was forgotten), and its `Arc` keeps the value in place, so no mutable
        // reference exists meanwhile.
        unsafe { &*self.lock.inner.data_ptr() }
    }
}

impl<T: ?Sized, R: lock_api::RawRwLock> Drop for ArcRwLockReadGuard<T, R> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: this guard holds the lock shared, taken on this thread, and nothing else releases
        // that hold.
        unsafe { self.lock.inner.force_unlock_read() };
    }
}

impl<T: ?Sized, R: lock_api::RawRwLock> Deref for ArcRwLockWriteGuard<T, R> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock exclusively until it is dropped, and its `Arc` keeps
        // the value in place; a mutable reference can only come from this guard, which is borrowed
        // here.
        unsafe { &*self.lock.inner.data_ptr() }
    }
}

impl<T: ?Sized, R: lock_api::RawRwLock> DerefMut for ArcRwLockWriteGuard<T, R> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as for `deref`; the guard is borrowed exclusively, so this is the only reference.
        unsafe { &mut *self.lock.inner.data_ptr() }
    }
}

impl<T: ?Sized, R: lock_api::RawRwLock> Drop for ArcRwLockWriteGuard<T, R> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: this guard holds the lock exclusively, taken on this thread, and nothing else
        // releases that hold.
        unsafe { self.lock.inner.force_unlock_write() };
    }
}

impl<T: ?Sized + fmt::Debug, R: lock_api::RawRwLock> fmt::Debug for ArcRwLockReadGuard<T, R> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, formatter)
    }
}

impl<T: ?Sized + fmt::Debug, R: lock_api::RawRwLock> fmt::Debug for ArcRwLockWriteGuard<T, R> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, formatter)
    }
}
