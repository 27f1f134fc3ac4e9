//! Leading: one round after the other while somebody waits.
//!
//! A round: gather → push → flush → finish those who waited. While its flush runs, others register and form the next
//! group. A thread that waits for its own operation leads until that is durable and hands over to another blocked
//! thread; one that came with a callback goes on while callbacks wait, because waking somebody else costs more than the
//! round itself.
//!
//! Why no wake-up is lost: the decision to stop leading and the registration of a waiter happen under the group's lock;
//! a waiter that comes after the decision finds `leader` unset and leads itself. A successor is appointed while it is in
//! the list of waiters; if it is finished before it wakes up, it still sees that it leads, and hands over again.
use crate::error::{CommitReason, LogError};
use crate::gathering::FlushPolicy;
use crate::group::Slot;
use crate::log::LogOptions;
use crate::push::{NoRoom, nanoseconds};
use crate::shared::Shared;
use crate::stages::RoundTimes;
use cairn_environment::clock;

impl Shared {
    /// Leads until the caller, which is the leader, need not or must not any more. `own` is where it waits, if it does.
    pub(crate) fn lead(&self, own: Option<&Slot>) {
        let mut no_room = None;
        while self.goes_on(own, no_room.take()) {
            no_room = self.round_or_fail(Self::round);
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
        let no_room = self.round_or_fail(|shared| {
            let LogOptions { background_push_bytes, hard_limit_bytes, .. } = shared.options;
            if shared.list.lock().entry_bytes() < background_push_bytes.min(hard_limit_bytes) {
                return Ok(None);
            }
            shared.count(|counters| counters.background_pushes += 1);
            let no_room = shared.push()?;
            if no_room.is_some() {
                shared.flush_and_complete(RoundTimes::new())?;
            }
            Ok(no_room)
        });
        if self.goes_on(None, no_room) {
            self.lead(None);
        }
    }

    fn round_or_fail(&self, round: impl FnOnce(&Self) -> Result<Option<NoRoom>, LogError>) -> Option<NoRoom> {
        round(self).unwrap_or_else(|error| {
            self.fail(error);
            None
        })
    }

    fn round(&self) -> Result<Option<NoRoom>, LogError> {
        self.gather();
        let Some(target) = self.group.lock().highest_target() else { return Ok(None) };
        let written_last = self.ring.lock().written_last;
        let mut times = RoundTimes::new();
        let no_room = if target > written_last {
            times.writing();
            self.push()?
        } else {
            None
        };
        self.flush_and_complete(times)?;
        Ok(no_room)
    }

    fn flush_and_complete(&self, mut times: RoundTimes) -> Result<(), LogError> {
        let each = self.options.flush == FlushPolicy::Each;
        let last = self.flush(each, &mut times)?;
        self.complete(last, times);
        Ok(())
    }

    /// Waits for others that are expected to join.
    fn gather(&self) {
        let flush_time = self.device.flush_time();
        let mut group = self.group.lock();
        let waiting = group.waiting();
        let Some(plan) = group.gathering.plan(waiting, flush_time) else { return };
        let begin = clock::now_monotonic();
        let mut seen = waiting;
        group.gather_wanted = Some(plan.wanted);
        while group.gather_wanted.is_some() && group.error.is_none() && seen > 0 {
            let rest = plan.limit.saturating_sub(begin.elapsed()).min(plan.pause);
            if rest.is_zero() {
                break;
            }
            let paused = self.joined.wait_for(&mut group, rest);
            let now = group.waiting();
            if paused && now <= seen {
                break;
            }
            seen = now;
        }
        group.gather_wanted = None;
        let joined = group.waiting() > waiting;
        group.gathering.gathered(joined);
        drop(group);
        let spent_ns = nanoseconds(begin.elapsed());
        self.count(|counters| {
            counters.gathers += 1;
            counters.gather_time_ns += spent_ns;
        });
    }

    /// After a round: whether the leader, whose own slot is `own`, does another one. Otherwise it leads no more.
    fn goes_on(&self, own: Option<&Slot>, no_room: Option<NoRoom>) -> bool {
        let mut group = self.group.lock();
        // A superblock that became durable since the decision has made room: then the next round finds out.
        let mut request = None;
        if let Some(no_room) = no_room
            && group.error.is_none()
            && no_room.commits >= group.commits
        {
            group.fallback = true;
            request = no_room.request;
        }
        let idle = group.error.is_some() || group.fallback || group.waiting() == 0;
        let stays = match own {
            Some(slot) => !slot.is_done(),
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
        self.fall_back(request);
        false
    }

    fn fall_back(&self, request: Option<CommitReason>) {
        let Some(reason) = request else { return };
        tracing::debug!(?reason, "the log falls back to a transaction commit");
        self.count(|counters| match reason {
            CommitReason::ContextTooLarge => counters.fallbacks_context_too_large += 1,
            _ => counters.fallbacks_ring_full += 1,
        });
        (self.commit_request)(reason);
    }
}
