//! Who waits for which operation, and who leads.
//!
//! Invariants: waiters are left only while there is a leader, or a group in flight, whose thread
//! leads again when it has landed, or while `fallback` says that a transaction commit was asked
//! for; a waiter is taken out of the list exactly once, under the lock, and finished after the lock
//! was released; `durable` never goes back; after `error` was set the list stays empty. At most one
//! group is in flight beside the one that a leader works on, so at most two threads are at work.
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

    /// Sleeps until there is something to do. Leadership comes first: it must not get lost with a
    /// finished thread.
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

    /// Tells the waiter; no lock may be held. A blocked thread looks at the clock itself when it
    /// runs again.
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
    /// Somebody else leads now.
    Appointed(Successor),
    /// The caller leads.
    Lead,
}

/// A group is in flight.
pub(crate) struct Launched {
    pub(crate) successor: Option<Successor>,
}

/// A group that is written and whose flush is under way, while nobody leads or somebody else does.
#[derive(Clone, Copy)]
struct InFlight {
    /// The last operation in it.
    last: LogSeq,
    waiters: usize,
}

pub(crate) struct Group {
    waiters: Vec<(LogSeq, Waiter)>,
    pub(crate) leader: bool,
    in_flight: Option<InFlight>,
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
            in_flight: None,
            fallback: false,
            commits: 0,
            push_wanted: false,
            durable: LogSeq(0),
            error: None,
            gathering,
            gather_wanted: None,
        }
    }

    /// Those who wait for the next group.
    pub(crate) fn waiting(&self) -> usize {
        if self.in_flight.is_none() { self.waiters.len() } else { self.next().count() }
    }

    /// Whether the thread that blocks there has not been taken out yet.
    pub(crate) fn waits(&self, slot: &Arc<Slot>) -> bool {
        self.waiters.iter().any(|(_, waiter)| waiter.is(slot))
    }

    fn next(&self) -> impl Iterator<Item = &Waiter> {
        let in_flight = self.in_flight.map_or(LogSeq(0), |group| group.last);
        self.waiters.iter().filter(move |(target, _)| *target > in_flight).map(|(_, waiter)| waiter)
    }

    /// Whether threads of the log still have to do with the device.
    pub(crate) fn is_busy(&self) -> bool {
        self.leader || self.in_flight.is_some()
    }

    /// The leader has written everything up to `last`, and flushes it now. If groups may overlap
    /// and no other is in flight, its own is from now on, and it leads no more; whoever leads next,
    /// if the next group is complete already, is to be told.
    pub(crate) fn launch(&mut self, last: LogSeq) -> Option<Launched> {
        if !self.gathering.overlaps() || self.in_flight.is_some() || self.error.is_some() {
            return None;
        }
        let waiters = self.waiters.iter().filter(|(target, _)| *target <= last).count();
        self.in_flight = Some(InFlight { last, waiters });
        self.gathering.launched();
        self.leader = false;
        Some(Launched {
            successor: (!self.fallback && self.next_is_complete()).then(|| self.appoint()),
        })
    }

    /// The group in flight has landed. Its thread leads again, unless somebody else does; says
    /// whether it leads.
    pub(crate) fn land(&mut self) -> bool {
        self.in_flight = None;
        self.gathering.landed();
        !std::mem::replace(&mut self.leader, true)
    }

    /// Whether to write the next group beside the flush of the one in flight: everybody else who is
    /// expected waits for it, and it isn't the smaller one. A wait for the flush would only bring
    /// those that are in flight themselves.
    fn next_is_complete(&self) -> bool {
        let Some(InFlight { waiters, .. }) = self.in_flight else { return true };
        // Counted only when it can be.
        if self.waiters.len() < 2 * waiters {
            return false;
        }
        let next = self.waiting();
        next >= waiters.max(1) && self.gathering.is_almost_all(next + waiters)
    }

    /// The last operation that somebody waits for.
    pub(crate) fn highest_target(&self) -> Option<LogSeq> {
        self.waiters.iter().map(|(target, _)| *target).max()
    }

    /// Adds a waiter. If nobody leads and nothing else will finish it, the caller leads from now
    /// on.
    pub(crate) fn register(&mut self, target: LogSeq, waiter: Waiter) -> Registered {
        if let Some(error) = &self.error {
            return Registered::Finished(waiter, Err(error.clone()));
        }
        if self.durable >= target {
            return Registered::Finished(waiter, Ok(()));
        }
        let is_callback = matches!(waiter, Waiter::Callback(..));
        self.waiters.push((target, waiter));
        if self.leader || self.fallback || !self.next_is_complete() {
            return Registered::Waiting;
        }
        if self.in_flight.is_some() && is_callback {
            // A thread that has other things to do.
            return Registered::Appointed(self.appoint());
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
        self.next().any(|waiter| matches!(waiter, Waiter::Callback(..)))
    }

    /// Whether a thread that does nothing else is worth its wake-up.
    pub(crate) fn several_wait(&self) -> bool {
        self.waiting() > 1
    }

    /// Appoints the next leader: who waits alone and blocked, since it wakes up anyway, or else the
    /// worker.
    pub(crate) fn appoint(&mut self) -> Successor {
        self.leader = true;
        let alone = {
            let mut next = self.next();
            next.next().filter(|_| next.next().is_none())
        };
        if let Some(Waiter::Blocked(slot)) = alone {
            slot.state.lock().leads = true;
            return Successor::Blocked(Arc::clone(slot));
        }
        Successor::Worker
    }
}
