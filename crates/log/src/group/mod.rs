//! Group commit: requests for durability that wait together share one checkpoint and one flush.
//!
//! A request *registers* the last operation that it needs ([`Waiters::register`]). If no thread
//! leads, its own thread does; `lead.rs` has what a leader does. While a leader works, other
//! requests register and form the next group. [`Waiters`] is what the threads share: the
//! [`Group`], its lock, and the two positions that are read without it.
//!
//! Why no wake-up is lost: the decision to stop leading ([`Waiters::decide`]) and the registration
//! of a waiter happen under the group's lock; a waiter that comes after the decision finds no
//! leader and leads itself. A successor is appointed while it is in the list of waiters; if it is
//! finished before it wakes up, it still sees that it leads, and hands over again.
//!
//! Lock discipline: rank `LOG_GROUP` around [`Group`]. The functions return the threads to wake and
//! the waiters to finish; that happens when the lock was released.
mod state;
mod waiter;

pub(crate) use state::{Group, Launched, Registered, Successor};
pub use waiter::DurableCallback;
pub(crate) use waiter::{Waiter, WaiterSlot, WakeReason};

use crate::cache_aligned::CacheAligned;
use crate::checkpoint::ring::NoRoom;
use crate::error::LogError;
use crate::gathering::{FlushPolicy, Gathering};
use crate::statistics::LogStatistics;
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::clock;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_format::LogSeq;
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

/// The thread that leads.
#[derive(Clone, Copy)]
pub(crate) enum Leader<'a> {
    /// It waits here for its own operation.
    Blocked(&'a Arc<WaiterSlot>),
    /// It brought a callback and has other things to do.
    Passing,
    /// The same, and others wait for the thread: one round, which it has begun or not.
    Once(&'a Cell<bool>),
    /// The log's worker.
    Worker,
}

/// Whether the leader does another round.
pub(crate) enum LeaderDecision {
    Lead,
    /// It leads no more.
    Leave {
        /// The thread that leads instead.
        successor: Option<Successor>,
        /// The worker wanted to push meanwhile.
        push: bool,
        /// The requests wait for a transaction commit.
        fallback: Option<NoRoom>,
    },
}

/// What a durable superblock changed.
pub(crate) struct CommittedGroup {
    /// The waiters that it finishes.
    pub(crate) finished: Vec<Waiter>,
    /// The thread that leads for the waiters that are left.
    pub(crate) successor: Option<Successor>,
    /// The worker wanted to push meanwhile.
    pub(crate) push: bool,
}

/// The requests that wait for durability, of one log.
pub(crate) struct Waiters {
    group: CacheAligned<Mutex<Group>>,
    /// Enough others joined; with `group`.
    joined: Condvar,
    /// The leader of a dead log left, or the group in flight landed; with `group`.
    left: Condvar,
    /// Copies for reading without the lock.
    durable: CacheAligned<AtomicU64>,
    dead: AtomicBool,
    /// Requests that found their operation durable.
    immediate: CacheAligned<AtomicU64>,
}

impl Waiters {
    pub(crate) fn new(policy: FlushPolicy) -> Self {
        let group = Group::new(Gathering::new(policy));
        Self {
            group: CacheAligned(Mutex::new(Rank::LOG_GROUP, group)),
            joined: Condvar::new(),
            left: Condvar::new(),
            durable: CacheAligned(AtomicU64::new(0)),
            dead: AtomicBool::new(false),
            immediate: CacheAligned(AtomicU64::new(0)),
        }
    }

    /// The last operation that is durable, with all before it.
    pub(crate) fn durable(&self) -> LogSeq {
        LogSeq(self.durable.load(Ordering::Acquire))
    }

    /// Why the log is dead, if it is.
    pub(crate) fn error(&self) -> Option<LogError> {
        if !self.dead.load(Ordering::Acquire) {
            return None;
        }
        self.group.lock().error.clone()
    }

    /// Whether a request finds its operation durable, so that it has nothing to wait for. Takes no
    /// lock.
    pub(crate) fn finds_durable(&self, target: LogSeq) -> bool {
        let found = self.durable() >= target && !self.dead.load(Ordering::Acquire);
        if found {
            // Relaxed: a counter.
            self.immediate.fetch_add(1, Ordering::Relaxed);
        }
        found
    }

    /// Adds a waiter; see [`Group::register`].
    pub(crate) fn register(&self, target: LogSeq, waiter: Waiter) -> Registered {
        let mut group = self.group.lock();
        let registered = group.register(target, waiter);
        if matches!(registered, Registered::Finished(_, Ok(()))) {
            self.immediate.fetch_add(1, Ordering::Relaxed);
        }
        if group.gather_wanted.is_some_and(|wanted| group.waiting() >= wanted) {
            group.gather_wanted = None;
            self.joined.notify_one();
        }
        registered
    }

    /// The worker wants to push: returns whether it leads now. If another thread leads, or a commit
    /// comes, the worker is woken again later.
    pub(crate) fn lead_to_push(&self) -> bool {
        let mut group = self.group.lock();
        if group.error.is_some() {
            return false;
        }
        let leads = !group.leader && !group.fallback;
        group.leader |= leads;
        group.push_wanted |= !leads;
        leads
    }

    /// A push found no room. The worker is woken again when a commit has made some: the operations
    /// that are throttled may ask just before it, and sleep just after it.
    pub(crate) fn want_push(&self) {
        self.group.lock().push_wanted = true;
    }

    /// The leader begins a group. Returns whether it [gathers](Self::gather) others before it
    /// closes the group.
    pub(crate) fn begin_group(&self, flush_time: Duration) -> bool {
        let mut group = self.group.lock();
        let waiting = group.waiting();
        group.gathering.begin(clock::now_monotonic(), waiting, flush_time)
    }

    /// The leader waits for others that are expected to join.
    pub(crate) fn gather(&self) {
        let mut group = self.group.lock();
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
        group.count_gather();
    }

    /// The last operation that a request waits for.
    pub(crate) fn highest_target(&self) -> Option<LogSeq> {
        self.group.lock().highest_target()
    }

    /// The leader flushes what is written up to `last`; see [`Group::launch`].
    pub(crate) fn launch(&self, last: LogSeq) -> Option<Launched> {
        self.group.lock().launch(last)
    }

    /// A flush has ended, which made everything up to `durable` durable, or failed. Takes out the
    /// waiters that it finishes. A group that was `launched` has landed; returns whether its thread
    /// leads again.
    pub(crate) fn complete(&self, launched: bool, durable: Option<LogSeq>) -> (bool, Vec<Waiter>) {
        let mut group = self.group.lock();
        let leads = !launched || group.land();
        if !leads && group.error.is_some() {
            // The thread that stops a dead log waits for this one as well.
            self.left.notify_all();
        }
        let Some(last) = durable.filter(|_| group.error.is_none()) else {
            return (leads, Vec::new());
        };
        self.advance_durable(&mut group, last);
        let finished = group.complete();
        let waiting = group.waiting();
        group.gathering.completed(clock::now_monotonic(), finished.len(), waiting);
        (leads, finished)
    }

    fn advance_durable(&self, group: &mut Group, last: LogSeq) {
        group.durable = group.durable.max(last);
        self.durable.store(group.durable.0, Ordering::Release);
    }

    /// Before each round: whether the leader does it. Otherwise it leads no more.
    pub(crate) fn decide(&self, leader: Leader<'_>, no_room: Option<NoRoom>) -> LeaderDecision {
        let mut group = self.group.lock();
        let fallback = no_room.filter(|no_room| group.fall_back(*no_room));
        let idle = group.error.is_some() || group.fallback || group.waiting() == 0;
        let stays = match leader {
            Leader::Blocked(slot) => group.waits(slot),
            Leader::Passing => !group.several_wait() && group.callback_waits(),
            Leader::Once(has_begun) => !has_begun.replace(true),
            // To wake another thread first would only be later.
            Leader::Worker => true,
        };
        if !idle && stays {
            return LeaderDecision::Lead;
        }
        if !idle {
            let successor = Some(group.appoint());
            return LeaderDecision::Leave { successor, push: false, fallback };
        }
        group.leader = false;
        if group.error.is_some() {
            self.left.notify_all();
        }
        let push = !group.fallback && std::mem::take(&mut group.push_wanted);
        LeaderDecision::Leave { successor: None, push, fallback }
    }

    /// A superblock is durable that covers everything up to `last`.
    pub(crate) fn super_committed(&self, last: LogSeq) -> CommittedGroup {
        let mut group = self.group.lock();
        group.commits += 1;
        group.fallback = false;
        if group.error.is_some() {
            return CommittedGroup { finished: Vec::new(), successor: None, push: false };
        }
        self.advance_durable(&mut group, last);
        let finished = group.complete_by_commit();
        let successor = (!group.is_busy() && group.waiting() > 0).then(|| group.appoint());
        let push = !group.leader && std::mem::take(&mut group.push_wanted);
        CommittedGroup { finished, successor, push }
    }

    /// The log is dead from now on, because of the first error. Takes out all waiters; `None` if it
    /// was dead before.
    pub(crate) fn close(&self, error: &LogError) -> Option<Vec<Waiter>> {
        let mut group = self.group.lock();
        if group.error.is_some() {
            return None;
        }
        group.error = Some(error.clone());
        group.fallback = false;
        self.dead.store(true, Ordering::Release);
        self.joined.notify_all();
        Some(group.take_all())
    }

    /// A thread panicked that led, or whose group was in flight: others must not wait for it.
    pub(crate) fn leave_panicking(&self, leads: bool, flushes: bool) {
        let mut group = self.group.lock();
        let leads = if flushes { group.land() } else { leads };
        group.leader &= !leads;
        drop(group);
        self.left.notify_all();
    }

    /// Waits until no thread of a dead log uses the device.
    pub(crate) fn wait_until_idle(&self) {
        let mut group = self.group.lock();
        while group.is_busy() {
            self.left.wait(&mut group);
        }
    }

    /// Whether a thread leads.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn is_led(&self) -> bool {
        self.group.lock().leader
    }

    /// Fills in what the group counts.
    pub(crate) fn count_into(&self, statistics: &mut LogStatistics) {
        self.group.lock().count_into(statistics);
        statistics.immediate = self.immediate.load(Ordering::Relaxed);
    }
}
