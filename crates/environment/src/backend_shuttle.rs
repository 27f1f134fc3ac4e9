//! What the locks are made of under the model checker's scheduler: it alone decides who goes on.
//!
//! All modelled threads (*tasks*) share one thread of the system, and the scheduler switches
//! between them only at *points*: before a lock is taken or released, before a notification, before
//! an access to an atomic. Between two points nothing else runs, so the bookkeeping here needs no
//! care. The values that the locks protect stay in `lock_api`'s cells, so that guards, owned guards
//! and their drops are the same code as in a normal build.
//!
//! States of a waiter on a condition variable: *waiting*, then *notified* or *expired*, once.
//!
//! Lock discipline: the standard mutexes below are never contended, and none is held at a point.

use crate::simulation;
use lock_api::{GuardNoSend, MutexGuard};
use shuttle_engine::runtime::execution::ExecutionState;
use shuttle_engine::runtime::task::TaskId;
use shuttle_engine::runtime::thread::continuation::switch;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The value of a mutex that is never contended.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The scheduler alone says who is next.
pub(crate) fn unlock_fair<T: ?Sized>(guard: MutexGuard<'_, RawMutex, T>) {
    drop(guard);
}

/// The running task.
pub(crate) fn this_task() -> TaskId {
    ExecutionState::me()
}

/// Sleeps until somebody calls [`wake`].
pub(crate) fn block() {
    ExecutionState::with(|state| state.current_mut().block(false));
    switch();
}

/// Makes a task runnable again. It must exist, and need not sleep.
pub(crate) fn wake(task: TaskId) {
    ExecutionState::with(|state| {
        let task = state.get_mut(task);
        if !task.finished() {
            task.unblock();
        }
    });
}

/// Calls `function` with the name of each task that sleeps, and what else is known of it.
pub(crate) fn for_each_sleeping(mut function: impl FnMut(TaskId, String)) {
    ExecutionState::with(|state| {
        let tasks = (0..).map_while(|index| state.try_get(TaskId::from(index)));
        let sleeping = tasks.filter(|task| !task.finished() && !task.runnable());
        sleeping.for_each(|task| function(task.id(), task.format_for_deadlock()));
    });
}

/// Tasks that wait until something is released; all try again, and the scheduler says who is first.
struct Queue(Mutex<Vec<TaskId>>);

impl Queue {
    const fn new() -> Queue {
        Queue(Mutex::new(Vec::new()))
    }

    fn sleep(&self) {
        locked(&self.0).push(this_task());
        block();
    }

    fn wake_all(&self) {
        let waiting = std::mem::take(&mut *locked(&self.0));
        waiting.into_iter().for_each(wake);
    }
}

/// A mutex without a value.
pub(crate) struct RawMutex {
    taken: AtomicBool,
    released: Queue,
}

// SAFETY: `lock` returns only after it found `taken` false and set it, with no point in between,
// and only the holder's `unlock` sets it back, so at most one task is between the two.
unsafe impl lock_api::RawMutex for RawMutex {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: RawMutex = RawMutex { taken: AtomicBool::new(false), released: Queue::new() };
    type GuardMarker = GuardNoSend;

    fn lock(&self) {
        switch();
        while self.taken.swap(true, Relaxed) {
            self.released.sleep();
        }
    }

    fn try_lock(&self) -> bool {
        switch();
        !self.taken.swap(true, Relaxed)
    }

    unsafe fn unlock(&self) {
        switch();
        self.taken.store(false, Relaxed);
        self.released.wake_all();
    }
}

struct Sharing {
    readers: u32,
    writer: bool,
    writers_waiting: u32,
}

/// A reader-writer lock without a value; waiting writers go before new readers.
pub struct RawRwLock {
    sharing: Mutex<Sharing>,
    released: Queue,
}

// SAFETY: `writer` is set only when there is neither a reader nor a writer, `readers` grows only
// when there is no writer, each in one step without a point; the unlocking functions undo exactly
// their own step.
unsafe impl lock_api::RawRwLock for RawRwLock {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: RawRwLock = RawRwLock {
        sharing: Mutex::new(Sharing { readers: 0, writer: false, writers_waiting: 0 }),
        released: Queue::new(),
    };
    type GuardMarker = GuardNoSend;

    fn lock_shared(&self) {
        switch();
        while !self.share() {
            self.released.sleep();
        }
    }

    fn try_lock_shared(&self) -> bool {
        switch();
        self.share()
    }

    unsafe fn unlock_shared(&self) {
        switch();
        locked(&self.sharing).readers -= 1;
        self.released.wake_all();
    }

    fn lock_exclusive(&self) {
        switch();
        if self.seize() {
            return;
        }
        locked(&self.sharing).writers_waiting += 1;
        while !self.seize() {
            self.released.sleep();
        }
        locked(&self.sharing).writers_waiting -= 1;
    }

    fn try_lock_exclusive(&self) -> bool {
        switch();
        self.seize()
    }

    unsafe fn unlock_exclusive(&self) {
        switch();
        locked(&self.sharing).writer = false;
        self.released.wake_all();
    }
}

impl RawRwLock {
    fn share(&self) -> bool {
        let mut sharing = locked(&self.sharing);
        let free = !sharing.writer && sharing.writers_waiting == 0;
        sharing.readers += u32::from(free);
        free
    }

    fn seize(&self) -> bool {
        let mut sharing = locked(&self.sharing);
        let free = !sharing.writer && sharing.readers == 0;
        sharing.writer |= free;
        free
    }
}

const WAITING: u8 = 0;
const NOTIFIED: u8 = 1;
const EXPIRED: u8 = 2;

/// A task that waits for a notification, for a moment, or for whichever comes first.
pub(crate) struct Waiter {
    task: TaskId,
    state: AtomicU8,
    place: &'static Location<'static>,
}

impl Waiter {
    /// For the running task, which waits at the caller's place.
    #[track_caller]
    pub(crate) fn new() -> Arc<Waiter> {
        Arc::new(Waiter {
            task: this_task(),
            state: AtomicU8::new(WAITING),
            place: Location::caller(),
        })
    }

    /// Whether nothing has happened to it.
    pub(crate) fn is_waiting(&self) -> bool {
        self.state.load(Relaxed) == WAITING
    }

    fn end(&self, state: u8) {
        if self.is_waiting() {
            self.state.store(state, Relaxed);
            wake(self.task);
        }
    }

    /// Its time has come.
    pub(crate) fn expire(&self) {
        self.end(EXPIRED);
    }

    /// Sleeps until something happens; returns whether that was its time.
    pub(crate) fn sleep(&self) -> bool {
        simulation::note_place(self.task, Some(self.place));
        while self.is_waiting() {
            block();
        }
        simulation::note_place(self.task, None);
        self.state.load(Relaxed) == EXPIRED
    }
}

/// A condition variable. A notification goes to any of those who wait.
pub(crate) struct Condvar {
    waiters: Mutex<Vec<Arc<Waiter>>>,
}

impl Condvar {
    pub(crate) const fn new() -> Condvar {
        Condvar { waiters: Mutex::new(Vec::new()) }
    }

    /// Enters the running task. A notification that comes before is lost, as it would be.
    #[track_caller]
    fn enter(&self) -> Arc<Waiter> {
        switch();
        let waiter = Waiter::new();
        locked(&self.waiters).push(Arc::clone(&waiter));
        waiter
    }

    fn leave(&self, waiter: &Arc<Waiter>) {
        locked(&self.waiters).retain(|other| !Arc::ptr_eq(other, waiter));
    }

    #[track_caller]
    pub(crate) fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, RawMutex, T>) {
        let waiter = self.enter();
        MutexGuard::unlocked(guard, || waiter.sleep());
    }

    pub(crate) fn notify_one(&self) {
        switch();
        let mut waiters = locked(&self.waiters);
        let chosen = match waiters.len() {
            0 => return,
            1 => 0,
            count => (ExecutionState::next_u64() % count as u64) as usize,
        };
        let waiter = waiters.remove(chosen);
        drop(waiters);
        waiter.end(NOTIFIED);
        linger();
    }

    pub(crate) fn notify_all(&self) {
        switch();
        let waiters = std::mem::take(&mut *locked(&self.waiters));
        waiters.iter().for_each(|waiter| waiter.end(NOTIFIED));
        if !waiters.is_empty() {
            linger();
        }
    }
}

/// One time in [`LINGERS_OF`], the running task stands still for a while after it has woken others,
/// as a thread that loses its CPU: they may do all that they do before it takes its next step.
fn linger() {
    if !simulation::is_running() && ExecutionState::next_u64().is_multiple_of(LINGERS_OF) {
        (0..LINGER_STEPS).for_each(|_| switch());
    }
}

const LINGERS_OF: u64 = 16;
const LINGER_STEPS: usize = 40;

/// Waits until notified or until `timeout` has passed in the simulation. Outside of one there is no
/// time: a timed wait lets the others run once, and has timed out unless somebody notified
/// meanwhile.
#[track_caller]
pub(crate) fn wait_for<T: ?Sized>(
    condvar: &Condvar,
    guard: &mut MutexGuard<'_, RawMutex, T>,
    timeout: Duration,
) -> bool {
    let waiter = condvar.enter();
    let simulated = simulation::is_running();
    if simulated {
        simulation::wake_after(timeout, &waiter);
    }
    MutexGuard::unlocked(guard, || match simulated {
        true => drop(waiter.sleep()),
        false => shuttle::thread::yield_now(),
    });
    let notified = waiter.state.load(Relaxed) == NOTIFIED;
    if !notified {
        condvar.leave(&waiter);
    }
    !notified
}
