//! One request for durability that waits: a blocked thread, or a callback.
//!
//! States of a waiter: registered → taken out of the group, exactly once, under the group's lock →
//! finished, after the lock was released. A blocked thread may be appointed leader in between; it
//! takes the leadership before its outcome, so that none is lost with a finished thread.
//!
//! Lock: a leaf in each [`WaiterSlot`].
use crate::error::LogError;
use crate::stages::{Ending, Registration, Stages};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, assert_unlocked};
use std::sync::Arc;

/// Called when an operation is durable, or never will be.
pub type DurableCallback = Box<dyn FnOnce(Result<(), LogError>) + Send>;

/// Where a blocked thread waits: for its outcome, or to be appointed leader.
pub(crate) struct WaiterSlot {
    state: Mutex<SlotState>,
    wake: Condvar,
}

#[derive(Default)]
struct SlotState {
    outcome: Option<Result<Ending, LogError>>,
    leads: bool,
}

/// Why a blocked thread goes on.
pub(crate) enum WakeReason {
    /// It is the leader now.
    Lead,
    /// Its operation is durable, or never will be.
    Done(Result<Ending, LogError>),
}

impl WaiterSlot {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(Rank::LEAF, SlotState::default()), wake: Condvar::new() }
    }

    /// Sleeps until there is something to do. Leadership comes first: it must not get lost with a
    /// finished thread.
    pub(crate) fn wait(&self) -> WakeReason {
        let mut state = self.state.lock();
        loop {
            if std::mem::take(&mut state.leads) {
                return WakeReason::Lead;
            }
            if let Some(outcome) = state.outcome.take() {
                return WakeReason::Done(outcome);
            }
            self.wake.wait(&mut state);
        }
    }

    /// The thread leads from now on; [`Self::notify`] wakes it.
    pub(super) fn appoint(&self) {
        self.state.lock().leads = true;
    }

    pub(crate) fn notify(&self) {
        self.wake.notify_one();
    }

    fn finish(&self, outcome: Result<Ending, LogError>) {
        self.state.lock().outcome = Some(outcome);
        self.wake.notify_one();
    }
}

/// What happens when the operation is durable.
pub(crate) enum Waiter {
    Callback(DurableCallback, Registration),
    Blocked(Arc<WaiterSlot>),
}

impl Waiter {
    /// Whether this is the thread that waits at `slot`.
    pub(super) fn is(&self, slot: &Arc<WaiterSlot>) -> bool {
        matches!(self, Waiter::Blocked(own) if Arc::ptr_eq(own, slot))
    }

    /// Reports the outcome to the waiter; no lock may be held. A blocked thread looks at the clock
    /// itself when it runs again.
    pub(crate) fn finish(self, outcome: Result<Ending, LogError>, stages: &Stages) {
        match self {
            Waiter::Callback(callback, registration) => {
                assert_unlocked();
                callback(outcome.map(|ending| stages.finish(&registration, ending)));
            }
            Waiter::Blocked(slot) => slot.finish(outcome),
        }
    }
}
