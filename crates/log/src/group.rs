//! Who waits for which operation, and who leads.
//!
//! Invariants: waiters are left only while there is a leader, or while `fallback` says that a transaction commit was
//! asked for; a waiter is taken out of the list exactly once, under the lock, and finished after the lock was
//! released; `durable` never goes back; after `error` was set the list stays empty.
//!
//! Lock: rank `LOG_GROUP` around [`Group`]; a [`Slot`] is a leaf.
use crate::error::LogError;
use crate::gathering::Gathering;
use crate::log::DurableCallback;
use crate::stages::{Ending, Registration, Stages};
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_format::LogSeq;
use std::sync::Arc;

/// Where a blocked thread waits: for its outcome, or to be told that it leads now.
pub(crate) struct Slot {
    state: Mutex<SlotState>,
    wake: Condvar,
}

#[derive(Default)]
struct SlotState {
    outcome: Option<Result<Ending, LogError>>,
    leads: bool,
}

/// Why a blocked thread goes on.
pub(crate) enum Wake {
    /// It is the leader now.
    Lead,
    /// Its operation is durable, or never will be.
    Done(Result<Ending, LogError>),
}

impl Slot {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(Rank::LEAF, SlotState::default()), wake: Condvar::new() }
    }

    /// Sleeps until there is something to do. Leadership comes first: it must not get lost with a finished thread.
    pub(crate) fn wait(&self) -> Wake {
        let mut state = self.state.lock();
        loop {
            if std::mem::take(&mut state.leads) {
                return Wake::Lead;
            }
            if let Some(outcome) = state.outcome.take() {
                return Wake::Done(outcome);
            }
            self.wake.wait(&mut state);
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.state.lock().outcome.is_some()
    }

    fn finish(&self, outcome: Result<Ending, LogError>) {
        self.state.lock().outcome = Some(outcome);
        self.wake.notify_one();
    }

    pub(crate) fn notify(&self) {
        self.wake.notify_one();
    }
}

/// What happens when the operation is durable.
pub(crate) enum Waiter {
    Callback(DurableCallback, Registration),
    Blocked(Arc<Slot>),
}

impl Waiter {
    /// Whether this is the thread that waits there.
    pub(crate) fn is(&self, own: &Arc<Slot>) -> bool {
        matches!(self, Waiter::Blocked(slot) if Arc::ptr_eq(slot, own))
    }

    /// Tells the waiter; no lock may be held. A blocked thread looks at the clock itself when it runs again.
    pub(crate) fn finish(self, outcome: Result<Ending, LogError>, stages: &Stages) {
        match self {
            Waiter::Callback(callback, registration) => {
                callback(outcome.map(|ending| stages.finish(&registration, ending)));
            }
            Waiter::Blocked(slot) => slot.finish(outcome),
        }
    }
}

/// Who takes over the leadership; to be told after the lock was released.
pub(crate) enum Successor {
    Blocked(Arc<Slot>),
    Worker,
}

/// What became of a request.
pub(crate) enum Registered {
    /// Nothing to wait for.
    Finished(Waiter, Result<(), LogError>),
    /// Somebody leads, or a commit comes.
    Waiting,
    /// The caller leads.
    Lead,
}

pub(crate) struct Group {
    waiters: Vec<(LogSeq, Waiter)>,
    pub(crate) leader: bool,
    /// The ring had no room; `super_committed` continues.
    pub(crate) fallback: bool,
    /// Calls of `super_committed` that got here.
    pub(crate) commits: u64,
    /// The worker wanted to push while somebody else led.
    pub(crate) push_wanted: bool,
    pub(crate) durable: LogSeq,
    pub(crate) error: Option<LogError>,
    pub(crate) gathering: Gathering,
    /// A leader waits for this many.
    pub(crate) gather_wanted: Option<usize>,
}

impl Group {
    pub(crate) fn new(gathering: Gathering) -> Self {
        Self {
            waiters: Vec::new(),
            leader: false,
            fallback: false,
            commits: 0,
            push_wanted: false,
            durable: LogSeq(0),
            error: None,
            gathering,
            gather_wanted: None,
        }
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiters.len()
    }

    /// The last operation that somebody waits for.
    pub(crate) fn highest_target(&self) -> Option<LogSeq> {
        self.waiters.iter().map(|(target, _)| *target).max()
    }

    /// Adds a waiter. If nobody leads and nothing else will finish it, the caller leads from now on.
    pub(crate) fn register(&mut self, target: LogSeq, waiter: Waiter) -> Registered {
        if let Some(error) = &self.error {
            return Registered::Finished(waiter, Err(error.clone()));
        }
        if self.durable >= target {
            return Registered::Finished(waiter, Ok(()));
        }
        self.waiters.push((target, waiter));
        if self.leader || self.fallback {
            return Registered::Waiting;
        }
        self.leader = true;
        Registered::Lead
    }

    /// Takes out those whose operation is durable, at most `limit`, in the order of their arrival.
    pub(crate) fn take_durable(&mut self, limit: usize) -> Vec<Waiter> {
        let durable = self.durable;
        let mut taken = 0;
        let reached = |(target, _): &mut (LogSeq, Waiter)| {
            let take = *target <= durable && taken < limit;
            taken += usize::from(take);
            take
        };
        self.waiters.extract_if(.., reached).map(|(_, waiter)| waiter).collect()
    }

    /// Takes out all.
    pub(crate) fn take_all(&mut self) -> Vec<Waiter> {
        self.waiters.drain(..).map(|(_, waiter)| waiter).collect()
    }

    pub(crate) fn callback_waits(&self) -> bool {
        self.waiters.iter().any(|(_, waiter)| matches!(waiter, Waiter::Callback(..)))
    }

    /// Whether a thread that does nothing else is worth its wake-up.
    pub(crate) fn several_wait(&self) -> bool {
        self.waiters.len() > 1
    }

    /// Appoints the next leader: who waits alone and blocked, since it wakes up anyway, or else the worker.
    pub(crate) fn appoint(&mut self) -> Successor {
        self.leader = true;
        match &self.waiters[..] {
            [(_, Waiter::Blocked(slot))] => {
                slot.state.lock().leads = true;
                Successor::Blocked(Arc::clone(slot))
            }
            _ => Successor::Worker,
        }
    }
}
