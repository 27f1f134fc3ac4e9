//! Leading: one round after the other while somebody waits.
//!
//! A round: gather → push → flush → tell those who waited. While its flush runs, others register and form the next
//! group; whoever leads that one is appointed before anybody is told, since waking many takes as long as a flush, and the
//! device must not wait for it. A thread that waits for its own operation leads until that is durable and hands over to
//! another blocked thread; one that came with a callback goes on while callbacks wait, because waking somebody else costs
//! more than the round itself.
//!
//! Why no wake-up is lost: the decision to stop leading and the registration of a waiter happen under the group's lock;
//! a waiter that comes after the decision finds `leader` unset and leads itself. A successor is appointed while it is in
//! the list of waiters; if it is finished before it wakes up, it still sees that it leads, and hands over again.
use crate::error::{CommitReason, LogError};
use crate::gathering::FlushPolicy;
use crate::group::{Slot, Waiter};
use crate::log::LogOptions;
use crate::push::{NoRoom, nanoseconds};
use crate::shared::Shared;
use crate::stages::{Ending, RoundTimes};
use cairn_environment::clock;
use std::sync::Arc;

/// What a round left to do.
#[derive(Default)]
struct Round {
    no_room: Option<NoRoom>,
    /// Waiters whose operation is durable, and who don't know yet.
    finished: Vec<Waiter>,
    times: RoundTimes,
}

impl Shared {
    /// Leads until the caller, which is the leader, need not or must not any more. `own` is where it waits, if it does.
    pub(crate) fn lead(&self, own: Option<&Arc<Slot>>) {
        let mut round = Round::default();
        while self.goes_on(own, round) {
            round = self.round_or_fail(Self::round);
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
        let round = self.round_or_fail(|shared| {
            let LogOptions { background_push_bytes, hard_limit_bytes, .. } = shared.options;
            if shared.list.lock().entry_bytes() < background_push_bytes.min(hard_limit_bytes) {
                return Ok(Round::default());
            }
            shared.count(|counters| counters.background_pushes += 1);
            let no_room = shared.push()?;
            let mut round = Round { no_room, ..Round::default() };
            if no_room.is_some() {
                shared.flush_and_complete(&mut round)?;
            }
            Ok(round)
        });
        if self.goes_on(None, round) {
            self.lead(None);
        }
    }

    fn round_or_fail(&self, round: impl FnOnce(&Self) -> Result<Round, LogError>) -> Round {
        round(self).unwrap_or_else(|error| {
            self.fail(error);
            Round::default()
        })
    }

    fn round(&self) -> Result<Round, LogError> {
        self.gather();
        let Some(target) = self.group.lock().highest_target() else { return Ok(Round::default()) };
        let written_last = self.ring.lock().written_last;
        let mut round = Round::default();
        if target > written_last {
            round.times.writing();
            round.no_room = self.push()?;
        }
        self.flush_and_complete(&mut round)?;
        Ok(round)
    }

    fn flush_and_complete(&self, round: &mut Round) -> Result<(), LogError> {
        let each = self.options.flush == FlushPolicy::Each;
        let last = self.flush(each, &mut round.times)?;
        round.finished = self.complete(last, &round.times);
        Ok(())
    }

    /// Waits for others that are expected to join.
    fn gather(&self) {
        let flush_time = self.device.flush_time();
        let mut group = self.group.lock();
        let (begin, waiting) = (clock::now_monotonic(), group.waiting());
        if !group.gathering.begin(begin, waiting, flush_time) {
            return;
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

    /// After a round: whether the leader, whose own slot is `own`, does another one. Otherwise it leads no more. Either way
    /// those who are finished have been told.
    fn goes_on(&self, own: Option<&Arc<Slot>>, round: Round) -> bool {
        let Round { no_room, finished, times } = round;
        let goes_on = self.decide(own, no_room, &finished);
        finished.into_iter().for_each(|waiter| waiter.finish(Ok(Ending::Round(times)), &self.stages));
        goes_on
    }

    fn decide(&self, own: Option<&Arc<Slot>>, no_room: Option<NoRoom>, finished: &[Waiter]) -> bool {
        let own_finished = |slot: &Arc<Slot>| slot.is_done() || finished.iter().any(|waiter| waiter.is(slot));
        let mut group = self.group.lock();
        // A superblock that became durable since the decision has made room: then the next round finds out.
        let no_room = no_room.filter(|no_room| group.error.is_none() && no_room.commits >= group.commits);
        group.fallback |= no_room.is_some();
        let idle = group.error.is_some() || group.fallback || group.waiting() == 0;
        let stays = match own {
            Some(slot) => !own_finished(slot),
            None => group.callback_waits(),
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
