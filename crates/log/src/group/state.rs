//! The group: which requests wait for which operation, and whether a thread leads.
//!
//! Plain state, under the lock in [`super::Waiters`]; the models of the tests run it alone.
//!
//! States of the leadership: *none* → *led* (a thread registers, or is appointed) → none, or, if
//! groups overlap, *in flight* while its leader flushes: another thread may lead meanwhile.
//!
//! Invariants: waiters are left only while there is a leader, or a group in flight, whose thread
//! leads again when it has landed, or while `fallback` says that a transaction commit was asked
//! for; a waiter is taken out of the list exactly once; `durable` never goes back; after `error`
//! was set the list stays empty. At most one group is in flight beside the one that a leader works
//! on, so at most two threads are at work.
use super::waiter::{Waiter, WaiterSlot};
use crate::checkpoint::ring::NoRoom;
use crate::error::{CommitReason, LogError};
use crate::gathering::{FlushPolicy, Gathering};
use crate::statistics::LogStatistics;
use cairn_format::LogSeq;
use std::sync::Arc;

/// The thread that takes over the leadership; to be woken after the lock was released.
pub(crate) enum Successor {
    Blocked(Arc<WaiterSlot>),
    Worker,
}

/// Where a request stands that was registered.
pub(crate) enum Registered {
    /// Nothing to wait for.
    Finished(Waiter, Result<(), LogError>),
    /// A thread leads, or a commit comes.
    Waiting,
    /// Another thread leads now.
    Appointed(Successor),
    /// The caller leads.
    Lead,
}

/// A group is in flight.
pub(crate) struct Launched {
    pub(crate) successor: Option<Successor>,
}

/// A group that is written and whose flush is under way, while no thread or another one leads.
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
    /// The worker wanted to push while another thread led, or found no room.
    pub(crate) push_wanted: bool,
    pub(crate) durable: LogSeq,
    pub(crate) error: Option<LogError>,
    pub(crate) gathering: Gathering,
    /// A leader waits for this many.
    pub(crate) gather_wanted: Option<usize>,
    counts: GroupCounts,
}

#[derive(Clone, Copy, Default)]
struct GroupCounts {
    groups: u64,
    grouped: u64,
    group_size_max: u64,
    committed: u64,
    gathers: u64,
    fallbacks_ring_full: u64,
    fallbacks_context_too_large: u64,
    fallbacks_commit_needed: u64,
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
            counts: GroupCounts::default(),
        }
    }

    /// How many requests wait for the next group.
    pub(crate) fn waiting(&self) -> usize {
        if self.in_flight.is_none() { self.waiters.len() } else { self.next().count() }
    }

    /// Whether the thread that blocks there has not been taken out yet.
    pub(crate) fn waits(&self, slot: &Arc<WaiterSlot>) -> bool {
        self.waiters.iter().any(|(_, waiter)| waiter.is(slot))
    }

    fn next(&self) -> impl Iterator<Item = &Waiter> {
        let in_flight = self.in_flight.map_or(LogSeq(0), |group| group.last);
        self.waiters.iter().filter(move |(target, _)| *target > in_flight).map(|(_, waiter)| waiter)
    }

    /// Whether a leader, or the thread of a group in flight, still uses the device.
    pub(crate) fn is_busy(&self) -> bool {
        self.leader || self.in_flight.is_some()
    }

    /// The leader has written everything up to `last`, and flushes it now. If groups may overlap
    /// and no other is in flight, its own is from now on, and it leads no more; if the next group
    /// is complete already, its leader is appointed.
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

    /// The group in flight has landed. Its thread leads again, unless another one does; returns
    /// whether it leads.
    pub(crate) fn land(&mut self) -> bool {
        self.in_flight = None;
        self.gathering.landed();
        !std::mem::replace(&mut self.leader, true)
    }

    /// Whether to write the next group beside the flush of the one in flight: all other requests
    /// that are expected wait for it, and it isn't the smaller one. A wait for the flush would only
    /// bring those that are in flight themselves.
    fn next_is_complete(&self) -> bool {
        let Some(InFlight { waiters, .. }) = self.in_flight else { return true };
        // Counted only when it can be.
        if self.waiters.len() < 2 * waiters {
            return false;
        }
        let next = self.waiting();
        next >= waiters.max(1) && self.gathering.is_almost_all(next + waiters)
    }

    /// The last operation that a request waits for.
    pub(crate) fn highest_target(&self) -> Option<LogSeq> {
        self.waiters.iter().map(|(target, _)| *target).max()
    }

    /// Adds a waiter. If no thread leads and nothing else will finish the waiter, the caller leads
    /// from now on.
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

    /// Takes out the waiters whose operation is durable, at most `limit`, in the order of their
    /// arrival.
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

    /// Takes out all waiters.
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

    /// Appoints the next leader: a thread that waits alone and blocked, since it wakes up anyway,
    /// or else the worker.
    pub(crate) fn appoint(&mut self) -> Successor {
        self.leader = true;
        let alone = {
            let mut next = self.next();
            next.next().filter(|_| next.next().is_none())
        };
        if let Some(Waiter::Blocked(slot)) = alone {
            slot.appoint();
            return Successor::Blocked(Arc::clone(slot));
        }
        Successor::Worker
    }

    /// A push found no room: requests wait for a commit from now on. Not so if a superblock that
    /// became durable since then has made room, which the next round finds out, or on a dead log.
    /// Returns whether they wait for a commit.
    pub(crate) fn fall_back(&mut self, no_room: NoRoom) -> bool {
        let falls_back = self.error.is_none() && no_room.commits >= self.commits;
        if falls_back {
            self.fallback = true;
            match no_room.reason {
                CommitReason::ContextTooLarge => self.counts.fallbacks_context_too_large += 1,
                CommitReason::CommitNeeded => self.counts.fallbacks_commit_needed += 1,
                _ => self.counts.fallbacks_ring_full += 1,
            }
        }
        falls_back
    }

    /// A flush made everything up to `durable` durable: takes out the waiters that it finishes.
    pub(crate) fn complete(&mut self) -> Vec<Waiter> {
        let limit = if self.gathering.policy() == FlushPolicy::Each { 1 } else { usize::MAX };
        let finished = self.take_durable(limit);
        let size = finished.len() as u64;
        self.counts.groups += u64::from(size > 0);
        self.counts.grouped += size;
        self.counts.group_size_max = self.counts.group_size_max.max(size);
        finished
    }

    /// A superblock made everything up to `durable` durable: takes out the waiters that it
    /// finishes.
    pub(crate) fn complete_by_commit(&mut self) -> Vec<Waiter> {
        let finished = self.take_durable(usize::MAX);
        self.counts.committed += finished.len() as u64;
        finished
    }

    /// The leader waited for others to join.
    pub(crate) fn count_gather(&mut self) {
        self.counts.gathers += 1;
    }

    /// Fills in what the group counts.
    pub(crate) fn count_into(&self, statistics: &mut LogStatistics) {
        statistics.groups = self.counts.groups;
        statistics.grouped = self.counts.grouped;
        statistics.group_size_max = self.counts.group_size_max;
        statistics.committed = self.counts.committed;
        statistics.gathers = self.counts.gathers;
        statistics.fallbacks_ring_full = self.counts.fallbacks_ring_full;
        statistics.fallbacks_context_too_large = self.counts.fallbacks_context_too_large;
        statistics.fallbacks_commit_needed = self.counts.fallbacks_commit_needed;
    }
}
