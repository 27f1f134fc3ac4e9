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
//! Owned guards (`read_arc`, `write_arc`) keep their lock alive: a descent through a tree can hold
//! a node's lock while the cache drops the node.

use crate::backend;
#[cfg(not(feature = "baselines"))]
use crate::backend::RawRwLock;
use crate::held::{Held, RankTag};
use crate::rank::Rank;
#[cfg(feature = "baselines")]
use crate::waking::{self, RawRwLock};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

/// The standard library's lock on a futex word, to measure beside the others; it has no rank.
#[cfg(feature = "baselines")]
pub use std::sync::RwLock as FutexLock;
#[cfg(feature = "baselines")]
pub use waking::{block_held, waking_held};

type InnerMutex<T> = lock_api::Mutex<backend::RawMutex, T>;
type InnerRwLock<T> = lock_api::RwLock<RawRwLock, T>;

fn address<T: ?Sized>(lock: &T) -> usize {
    std::ptr::from_ref(lock).cast::<()>().addr()
}

/// Mutual exclusion around a value.
///
/// ```
/// use cairn_environment::{lock::Mutex, Rank};
/// let count = Mutex::new(Rank::LEAF, 0);
/// *count.lock() += 1;
/// assert_eq!(count.into_inner(), 1);
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

    /// The value of a mutex that nobody shares any more.
    pub fn into_inner(self) -> T {
        self.inner.into_inner()
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

    /// The value of a mutex that is borrowed exclusively, without locking.
    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
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
/// let mut guard = node.write_arc();
/// drop(node);
/// guard.push(2);
/// assert_eq!(*guard, [1, 2]);
/// ```
pub struct RwLock<T: ?Sized> {
    rank: RankTag,
    inner: InnerRwLock<T>,
}

/// Shared access to an [`RwLock`]'s value.
#[must_use = "the lock is released when the guard is dropped"]
pub struct RwLockReadGuard<'a, T: ?Sized> {
    inner: lock_api::RwLockReadGuard<'a, RawRwLock, T>,
    _held: Held,
}

/// Exclusive access to an [`RwLock`]'s value.
#[must_use = "the lock is released when the guard is dropped"]
pub struct RwLockWriteGuard<'a, T: ?Sized> {
    inner: lock_api::RwLockWriteGuard<'a, RawRwLock, T>,
    _held: Held,
}

impl<T> RwLock<T> {
    /// A free lock.
    pub const fn new(rank: Rank, value: T) -> RwLock<T> {
        RwLock { rank: RankTag::new(rank), inner: InnerRwLock::new(value) }
    }

    /// A free lock of the kind that came before: it spins, blocks, and wakes everybody.
    #[cfg(feature = "baselines")]
    pub const fn waking(rank: Rank, value: T) -> RwLock<T> {
        let raw = RawRwLock::Waking(waking::WakingLock::new());
        RwLock { rank: RankTag::new(rank), inner: InnerRwLock::from_raw(raw, value) }
    }

    /// The value of a lock that nobody shares any more.
    pub fn into_inner(self) -> T {
        self.inner.into_inner()
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Shared access; waits for the writer that holds the lock, and for those that wait already.
    ///
    /// # Panics
    /// In a debug build, when the thread holds a lock that must be taken after this one.
    #[track_caller]
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.read_in(None)
    }

    /// Exclusive access; waits for everybody who holds the lock.
    ///
    /// # Panics
    /// In a debug build, when the thread holds a lock that must be taken after this one.
    #[track_caller]
    #[inline]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.write_in(None)
    }

    /// [`RwLock::read`]; the lock has this place among those of its rank.
    ///
    /// # Panics
    /// In a debug build, when the thread holds a lock that must be taken after this one.
    #[track_caller]
    #[inline]
    pub fn read_at(&self, place: u64) -> RwLockReadGuard<'_, T> {
        self.read_in(Some(place))
    }

    /// [`RwLock::write`]; the lock has this place among those of its rank.
    ///
    /// # Panics
    /// In a debug build, when the thread holds a lock that must be taken after this one.
    #[track_caller]
    #[inline]
    pub fn write_at(&self, place: u64) -> RwLockWriteGuard<'_, T> {
        self.write_in(Some(place))
    }

    #[track_caller]
    #[inline]
    fn read_in(&self, place: Option<u64>) -> RwLockReadGuard<'_, T> {
        self.rank.check(address(self), place);
        let inner = self.inner.read();
        RwLockReadGuard { inner, _held: self.rank.hold(address(self), place, false) }
    }

    #[track_caller]
    #[inline]
    fn write_in(&self, place: Option<u64>) -> RwLockWriteGuard<'_, T> {
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
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        self.try_read_in(None)
    }

    /// Exclusive access, if it needs no waiting.
    #[inline]
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        self.try_write_in(None)
    }

    #[inline]
    fn try_read_in(&self, place: Option<u64>) -> Option<RwLockReadGuard<'_, T>> {
        let inner = self.inner.try_read()?;
        Some(RwLockReadGuard { inner, _held: self.rank.hold(address(self), place, false) })
    }

    #[inline]
    fn try_write_in(&self, place: Option<u64>) -> Option<RwLockWriteGuard<'_, T>> {
        let inner = self.inner.try_write()?;
        Some(RwLockWriteGuard { inner, _held: self.rank.hold(address(self), place, true) })
    }

    /// [`RwLock::read_at`] with a guard that keeps the lock alive.
    #[track_caller]
    #[inline]
    pub fn read_arc_at(self: &Arc<Self>, place: u64) -> ArcRwLockReadGuard<T> {
        ArcRwLockReadGuard::from_borrowed(self, self.read_in(Some(place)))
    }

    /// [`RwLock::write_at`] with a guard that keeps the lock alive.
    #[track_caller]
    #[inline]
    pub fn write_arc_at(self: &Arc<Self>, place: u64) -> ArcRwLockWriteGuard<T> {
        ArcRwLockWriteGuard::from_borrowed(self, self.write_in(Some(place)))
    }

    /// [`RwLock::read_arc_at`], if it needs no waiting.
    #[inline]
    pub fn try_read_arc_at(self: &Arc<Self>, place: u64) -> Option<ArcRwLockReadGuard<T>> {
        Some(ArcRwLockReadGuard::from_borrowed(self, self.try_read_in(Some(place))?))
    }

    /// [`RwLock::write_arc_at`], if it needs no waiting.
    #[inline]
    pub fn try_write_arc_at(self: &Arc<Self>, place: u64) -> Option<ArcRwLockWriteGuard<T>> {
        Some(ArcRwLockWriteGuard::from_borrowed(self, self.try_write_in(Some(place))?))
    }

    /// [`RwLock::read`] with a guard that keeps the lock alive.
    #[track_caller]
    #[inline]
    pub fn read_arc(self: &Arc<Self>) -> ArcRwLockReadGuard<T> {
        ArcRwLockReadGuard::from_borrowed(self, self.read())
    }

    /// [`RwLock::write`] with a guard that keeps the lock alive.
    #[track_caller]
    #[inline]
    pub fn write_arc(self: &Arc<Self>) -> ArcRwLockWriteGuard<T> {
        ArcRwLockWriteGuard::from_borrowed(self, self.write())
    }

    /// [`RwLock::try_read`] with a guard that keeps the lock alive.
    #[inline]
    pub fn try_read_arc(self: &Arc<Self>) -> Option<ArcRwLockReadGuard<T>> {
        Some(ArcRwLockReadGuard::from_borrowed(self, self.try_read()?))
    }

    /// [`RwLock::try_write`] with a guard that keeps the lock alive.
    #[inline]
    pub fn try_write_arc(self: &Arc<Self>) -> Option<ArcRwLockWriteGuard<T>> {
        Some(ArcRwLockWriteGuard::from_borrowed(self, self.try_write()?))
    }

    /// The value of a lock that is borrowed exclusively, without locking.
    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }
}

impl<T: ?Sized> Deref for RwLockReadGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> DerefMut for RwLockWriteGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.inner, formatter)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLockReadGuard<'_, T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, formatter)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLockWriteGuard<'_, T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, formatter)
    }
}

/// Shared access to an [`RwLock`]'s value, which keeps the lock alive.
#[must_use = "the lock is released when the guard is dropped"]
pub struct ArcRwLockReadGuard<T: ?Sized> {
    // Taken off the list before the value may die with the last `Arc`.
    _held: Held,
    lock: Arc<RwLock<T>>,
    // A guard belongs to the thread that took the lock.
    _not_send: PhantomData<*const ()>,
}

/// Exclusive access to an [`RwLock`]'s value, which keeps the lock alive.
#[must_use = "the lock is released when the guard is dropped"]
pub struct ArcRwLockWriteGuard<T: ?Sized> {
    _held: Held,
    lock: Arc<RwLock<T>>,
    _not_send: PhantomData<*const ()>,
}

impl<T: ?Sized> ArcRwLockReadGuard<T> {
    #[inline]
    fn from_borrowed(
        lock: &Arc<RwLock<T>>,
        guard: RwLockReadGuard<'_, T>,
    ) -> ArcRwLockReadGuard<T> {
        std::mem::forget(guard.inner);
        ArcRwLockReadGuard { lock: Arc::clone(lock), _held: guard._held, _not_send: PhantomData }
    }

    /// The lock that the guard holds.
    pub fn lock(guard: &Self) -> &Arc<RwLock<T>> {
        &guard.lock
    }
}

impl<T: ?Sized> ArcRwLockWriteGuard<T> {
    #[inline]
    fn from_borrowed(
        lock: &Arc<RwLock<T>>,
        guard: RwLockWriteGuard<'_, T>,
    ) -> ArcRwLockWriteGuard<T> {
        std::mem::forget(guard.inner);
        ArcRwLockWriteGuard { lock: Arc::clone(lock), _held: guard._held, _not_send: PhantomData }
    }

    /// The lock that the guard holds.
    pub fn lock(guard: &Self) -> &Arc<RwLock<T>> {
        &guard.lock
    }
}

impl<T: ?Sized> Deref for ArcRwLockReadGuard<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock shared until it is dropped (the borrowed guard it was
        // made of was forgotten), and its `Arc` keeps the value in place, so nobody has a mutable
        // reference meanwhile.
        unsafe { &*self.lock.inner.data_ptr() }
    }
}

impl<T: ?Sized> Drop for ArcRwLockReadGuard<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: this guard holds the lock shared, taken on this thread, and nothing else releases
        // that hold.
        unsafe { self.lock.inner.force_unlock_read() };
    }
}

impl<T: ?Sized> Deref for ArcRwLockWriteGuard<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock exclusively until it is dropped, and its `Arc` keeps
        // the value in place; a mutable reference can only come from this guard, which is borrowed
        // here.
        unsafe { &*self.lock.inner.data_ptr() }
    }
}

impl<T: ?Sized> DerefMut for ArcRwLockWriteGuard<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as for `deref`; the guard is borrowed exclusively, so this is the only reference.
        unsafe { &mut *self.lock.inner.data_ptr() }
    }
}

impl<T: ?Sized> Drop for ArcRwLockWriteGuard<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: this guard holds the lock exclusively, taken on this thread, and nothing else
        // releases that hold.
        unsafe { self.lock.inner.force_unlock_write() };
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for ArcRwLockReadGuard<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, formatter)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for ArcRwLockWriteGuard<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, formatter)
    }
}
