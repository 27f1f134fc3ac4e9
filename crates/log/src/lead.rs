//! Leading: one round after the other while somebody waits.
//!
//! A round: gather → push → flush → tell those who waited. While it runs, others register and form
//! the next group. While several wait, a worker of the log leads: between two rounds there is no
//! hand-over then, and the device need not wait for a thread to wake up, which takes longest when
//! many others have just been woken. Whoever waits alone leads its own round and hands over to
//! nobody. Those whose operation is durable are told while the device works on the next group,
//! since telling many takes as long as a flush; but before a leader waits for others to join, for
//! it is them who join.
//!
//! *Overlapping.* When the gathering policy says that it pays, a leader that has written its group
//! leads no more while it flushes: the group is *in flight*. As soon as everybody else who is
//! expected has registered, the one who came last leads, or the second worker, and writes the next
//! group while the flush is under way. When the flush is done, its thread leads again unless
//! somebody else does. Writing is for leaders only, so checkpoints are written in order, and a
//! flush covers all that were written before it.
//!
//! Why no wake-up is lost: the decision to stop leading and the registration of a waiter happen
//! under the group's lock; a waiter that comes after the decision finds `leader` unset and leads
//! itself. A successor is appointed while it is in the list of waiters; if it is finished before it
//! wakes up, it still sees that it leads, and hands over again. [`Telling`] tells everybody at the
//! latest when it is dropped. A leader that panics leaves a dead log.
use crate::error::{CommitReason, LogError};
use crate::gathering::FlushPolicy;
use crate::group::{Launched, Slot, Waiter};
use crate::log::LogOptions;
use crate::push::{NoRoom, nanoseconds};
use crate::shared::Shared;
use crate::stages::{Ending, RoundTimes};
use cairn_environment::clock;
use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

/// What a round left to do.
#[derive(Default)]
struct Round {
    /// Somebody else leads by now.
    left: bool,
    no_room: Option<NoRoom>,
    /// Waiters whose operation is durable, and who don't know yet.
    finished: Vec<Waiter>,
    times: RoundTimes,
}

/// Who leads.
#[derive(Clone, Copy)]
pub(crate) enum Leader<'a> {
    /// A thread that waits here for its own operation.
    Blocked(&'a Arc<Slot>),
    /// A thread that brought a callback and has other things to do.
    Passing,
    /// The same, and others wait for the thread: one round, which it has begun or not.
    Once(&'a Cell<bool>),
    /// The log's worker.
    Worker,
}

/// Those whose operation is durable, on the way to being told.
struct Telling<'a> {
    shared: &'a Shared,
    finished: std::vec::IntoIter<Waiter>,
    times: RoundTimes,
}

impl Telling<'_> {
    fn now(&mut self) {
        for waiter in self.finished.by_ref() {
            waiter.finish(Ok(Ending::Round(self.times)), &self.shared.stages);
        }
    }
}

impl Drop for Telling<'_> {
    fn drop(&mut self) {
        // After a panic of one callback the others are called all the same; a second panic is lost
        // in the first.
        while self.finished.len() > 0
            && std::panic::catch_unwind(AssertUnwindSafe(|| self.now())).is_err()
        {}
    }
}

/// What a thread is to the group, and would leave to nobody if it panicked.
#[derive(Clone, Copy)]
enum Role {
    Leader,
    /// Its group is in flight.
    Flusher,
    /// Others do without it.
    Gone,
}

/// Leaves a dead log when a leader panics: nobody else would ever lead.
struct Watch<'a> {
    shared: &'a Shared,
    role: Cell<Role>,
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared
                .fail(LogError::Aborted("a thread that led a group ended with a panic".into()));
            let mut group = self.shared.group.lock();
            let leads = match self.role.get() {
                Role::Leader => true,
                Role::Flusher => group.land(),
                Role::Gone => false,
            };
            group.leader &= !leads;
            drop(group);
            self.shared.left.notify_all();
        }
    }
}

impl Shared {
    /// Leads until `leader` need not or must not any more.
    pub(crate) fn lead(&self, leader: Leader<'_>) {
        self.lead_after(&self.watch(), leader, Round::default());
    }

    /// Of a leader.
    fn watch(&self) -> Watch<'_> {
        Watch { shared: self, role: Cell::new(Role::Leader) }
    }

    fn lead_after(&self, watch: &Watch<'_>, leader: Leader<'_>, mut round: Round) {
        loop {
            let goes_on = !round.left && self.decide(leader, round.no_room);
            if !goes_on {
                watch.role.set(Role::Gone);
            }
            let mut telling = Telling {
                shared: self,
                finished: std::mem::take(&mut round.finished).into_iter(),
                times: round.times,
            };
            if !goes_on {
                telling.now();
                return;
            }
            round = self.round_or_fail(watch, |shared| shared.round(watch, &mut telling));
            telling.now();
        }
    }

    /// The worker's push, which nobody waits for.
    pub(crate) fn push_in_background(&self) {
        {
            let mut group = self.group.lock();
            if group.error.is_some() {
                return;
            }
            if group.leader || group.fallback {
                group.push_wanted = true;
                return;
            }
            group.leader = true;
        }
        let watch = self.watch();
        let round = self.round_or_fail(&watch, |shared| {
            let LogOptions { background_push_bytes, hard_limit_bytes, .. } = shared.options;
            if shared.list.lock().entry_bytes() < background_push_bytes.min(hard_limit_bytes) {
                return Ok(Round::default());
            }
            shared.count(|counters| counters.background_pushes += 1);
            let no_room = shared.push(&mut || {})?;
            let mut round = Round { no_room, ..Round::default() };
            if no_room.is_some() {
                shared.flush_and_complete(&watch, &mut round)?;
            }
            Ok(round)
        });
        self.lead_after(&watch, Leader::Worker, round);
    }

    fn round_or_fail(
        &self,
        watch: &Watch<'_>,
        round: impl FnOnce(&Self) -> Result<Round, LogError>,
    ) -> Round {
        round(self).unwrap_or_else(|error| {
            self.fail(error);
            Round { left: matches!(watch.role.get(), Role::Gone), ..Round::default() }
        })
    }

    fn round(&self, watch: &Watch<'_>, telling: &mut Telling<'_>) -> Result<Round, LogError> {
        self.gather(telling);
        let Some(target) = self.group.lock().highest_target() else { return Ok(Round::default()) };
        let written_last = self.ring.lock().written_last;
        let mut round = Round::default();
        if target > written_last {
            round.times.writing();
            round.no_room = self.push(&mut || telling.now())?;
        }
        telling.now();
        self.flush_and_complete(watch, &mut round)?;
        Ok(round)
    }

    /// Others may write the next group meanwhile, if groups overlap.
    fn flush_and_complete(&self, watch: &Watch<'_>, round: &mut Round) -> Result<(), LogError> {
        let each = self.options.flush == FlushPolicy::Each;
        if round.no_room.is_none() {
            self.launch(watch);
        }
        let flushed = self.flush(each, &mut round.times);
        let mut group = self.group.lock();
        if matches!(watch.role.get(), Role::Flusher) {
            round.left = !group.land();
            watch.role.set(if round.left { Role::Gone } else { Role::Leader });
            if round.left && group.error.is_some() {
                // Whoever stops a dead log waits for this one as well.
                self.left.notify_all();
            }
        }
        round.finished = self.complete(group, flushed?, &round.times);
        Ok(())
    }

    fn launch(&self, watch: &Watch<'_>) {
        let written_last = self.ring.lock().written_last;
        let launched = self.group.lock().launch(written_last);
        if let Some(Launched { successor }) = launched {
            watch.role.set(Role::Flusher);
            self.inform(successor);
        }
    }

    /// Waits for others that are expected to join.
    fn gather(&self, telling: &mut Telling<'_>) {
        let flush_time = self.device.flush_time();
        let mut group = self.group.lock();
        let (begin, waiting) = (clock::now_monotonic(), group.waiting());
        if !group.gathering.begin(begin, waiting, flush_time) {
            return;
        }
        if telling.finished.len() > 0 {
            // It is them who join.
            drop(group);
            telling.now();
            group = self.group.lock();
        }
        while group.error.is_none() {
            let (now, seen) = (clock::now_monotonic(), group.waiting());
            let Some(patience) = group.gathering.patience(now, seen) else { break };
            group.gather_wanted = Some(patience.wanted);
            let paused = self.joined.wait_for(&mut group, patience.pause);
            if paused && group.waiting() <= seen {
                break;
            }
        }
        group.gather_wanted = None;
        let (now, waiting) = (clock::now_monotonic(), group.waiting());
        group.gathering.end(now, waiting);
        drop(group);
        let spent_ns = nanoseconds(now - begin);
        self.count(|counters| {
            counters.gathers += 1;
            counters.gather_time_ns += spent_ns;
        });
    }

    /// After a round: whether the leader does another one. Otherwise it leads no more.
    fn decide(&self, leader: Leader<'_>, no_room: Option<NoRoom>) -> bool {
        let mut group = self.group.lock();
        // A superblock that became durable since the decision has made room: then the next round
        // finds out.
        let no_room =
            no_room.filter(|no_room| group.error.is_none() && no_room.commits >= group.commits);
        group.fallback |= no_room.is_some();
        let idle = group.error.is_some() || group.fallback || group.waiting() == 0;
        let stays = match leader {
            Leader::Blocked(slot) => group.waits(slot),
            Leader::Passing => !group.several_wait() && group.callback_waits(),
            Leader::Once(has_begun) => !has_begun.replace(true),
            // To wake somebody first would only be later.
            Leader::Worker => true,
        };
        if !idle && stays {
            return true;
        }
        let mut push = false;
        let successor = if idle {
            group.leader = false;
            if group.error.is_some() {
                self.left.notify_all();
            }
            push = !group.fallback && std::mem::take(&mut group.push_wanted);
            None
        } else {
            Some(group.appoint())
        };
        drop(group);
        self.inform(successor);
        if push {
            self.worker.send(|signals| signals.push = true);
        }
        if let Some(no_room) = no_room {
            self.fall_back(no_room);
        }
        false
    }

    fn fall_back(&self, NoRoom { reason, request, .. }: NoRoom) {
        tracing::debug!(?reason, "the log falls back to a transaction commit");
        self.count(|counters| match reason {
            CommitReason::ContextTooLarge => counters.fallbacks_context_too_large += 1,
            _ => counters.fallbacks_ring_full += 1,
        });
        if request {
            (self.commit_request)(reason);
        }
    }
}
