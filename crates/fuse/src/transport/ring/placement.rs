//! Keeping a caller and the thread of its queue on one CPU.
//!
//! A program that asks for one thing after the other never runs while the thread of the queue
//! serves it: one CPU is enough for both. But the thread still runs when it hands a reply over, so
//! the kernel wakes the caller on another CPU, one that is idle. An idle CPU takes long to wake, on
//! a virtual machine longer than the whole request. A CPU on which only SCHED_IDLE threads run
//! counts as idle, though. So while requests come one by one and close together, and each is
//! answered at once, the thread *yields*: it has that policy, and the caller goes on where it was.
//!
//! A thread that yields gets next to nothing of a CPU on which others compute. So a *watcher* looks
//! every [`TICK`] at the threads that yield, and ends that for a thread that has had a request and
//! done nothing with it since the last time. Such a thread does not yield again for a while, longer
//! each time. A thread that is about to wait for others or for the device stops yielding by itself.
//! When no requests come, the watcher ends the yielding as well, and then sleeps.
//!
//! States of a queue, in one word with a number that counts how often it began to yield:
//! - *normal*: the thread's policy is SCHED_OTHER, or about to be so, by a call that someone with
//!   that policy is in;
//! - *yielding*: the thread's policy is SCHED_IDLE, or about to be so;
//! - *rescued*: the watcher has set SCHED_OTHER while the thread was not waiting for requests. It
//!   may just have been about to set SCHED_IDLE, so the watcher does so again until the thread says
//!   that it is normal, or waits for requests.
//!
//! Invariants:
//! - only the queue's thread makes its queue yield: first the word, then it wakes the watcher, then
//!   the policy;
//! - when the queue's thread sets its queue to normal, then first the policy and then the word;
//! - the watcher sets a queue to normal only when its thread was waiting for requests, so not about
//!   to set the policy;
//! - the watcher sleeps only when it found all queues normal after it had said that it goes to
//!   sleep.
//!
//! Locks: the watcher's mutex (`FUSE`) is taken alone, to begin or end its sleep. The hook of
//! [`cairn_environment::thread::on_block`] takes none.
use crate::kernel;
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use cairn_environment::clock::{self, Monotonic};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::thread::{self, JoinHandle};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

/// How often the watcher looks.
const TICK: Duration = Duration::from_millis(1);
/// Ticks without a request after which a queue is normal again.
const QUIET_TICKS: u32 = 20;
/// Requests that came one by one, less those that did not, from which on a queue yields.
const SCORE_MIN: u32 = 8;
/// Further ones don't count.
const SCORE_MAX: u32 = 32;
/// What a request that came with others, or was not answered at once, takes away.
const SCORE_LOSS: u32 = 16;
/// The longest time for the first [`SCORE_MIN`] requests.
const CLOSE_TOGETHER: Duration = Duration::from_millis(2);
/// How long a queue is normal after its thread was kept from running.
const PENALTY_MIN: Duration = Duration::from_millis(100);
const PENALTY_MAX: Duration = Duration::from_secs(2);

const NORMAL: u64 = 0;
const YIELDING: u64 = 1;
const RESCUED: u64 = 2;
const KIND_MASK: u64 = 3;
const ONE_EPOCH: u64 = 4;

/// What a queue's thread shares with the watcher.
#[derive(Debug, Default)]
pub struct Placement {
    /// Zero before the thread runs.
    thread_id: AtomicI32,
    word: AtomicU64,
    /// Times that the thread has looked for requests.
    rounds: AtomicU64,
    /// The thread waits for requests, or is about to, or has just done so.
    waiting: AtomicBool,
    /// How often it was kept from running since its thread asked.
    starved: AtomicU32,
}

thread_local! {
    /// That of the calling thread.
    static OWN: RefCell<Option<Arc<Placement>>> = const { RefCell::new(None) };
}

impl Placement {
    fn kind(&self) -> u64 {
        self.word.load(Ordering::SeqCst) & KIND_MASK
    }

    /// By the queue's thread; `wake` wakes the watcher. First, since with the policy the thread may
    /// not get far enough to do so.
    fn begin_to_yield(&self, wake: impl FnOnce()) {
        let word = self.word.load(Ordering::SeqCst);
        self.word.store((word & !KIND_MASK) + ONE_EPOCH + YIELDING, Ordering::SeqCst);
        wake();
        self.set_policy(true);
    }

    /// By the queue's thread.
    fn be_normal(&self) {
        let word = self.word.load(Ordering::SeqCst);
        if word & KIND_MASK != NORMAL {
            self.set_policy(false);
            self.word.store(word & !KIND_MASK, Ordering::SeqCst);
        }
    }

    /// By the watcher, which has found `word`.
    fn rescue(&self, word: u64) {
        let after = if self.waiting.load(Ordering::SeqCst) { NORMAL } else { RESCUED };
        if self
            .word
            .compare_exchange(word, (word & !KIND_MASK) + after, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
        {
            self.set_policy(false);
        }
    }

    fn set_policy(&self, idle: bool) {
        if let Err(errno) = kernel::set_idle_policy(self.thread_id.load(Ordering::Relaxed), idle) {
            tracing::error!(idle, "the policy of a queue's thread cannot be set: {errno}");
        }
    }
}

/// What a queue's thread has done since it last waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// Answered the one request that there was.
    Alone,
    /// Begun a read of the device for the one request that there is. Its caller and this thread
    /// take turns all the same.
    Reading,
    /// Something else.
    Others,
}

/// The part of a queue's thread.
#[derive(Debug)]
pub struct Manner {
    own: Arc<Placement>,
    watcher: Option<Arc<Shared>>,
    yields: bool,
    score: u32,
    /// When the score was last zero.
    begun: Monotonic,
    normal_until: Monotonic,
    penalty: Duration,
}

impl Manner {
    /// Of the calling thread, which serves `own`.
    fn new(own: Arc<Placement>, watcher: Option<Arc<Shared>>) -> Self {
        own.thread_id.store(kernel::thread_id(), Ordering::Relaxed);
        OWN.set(Some(Arc::clone(&own)));
        thread::on_block(Some(|| {
            OWN.with_borrow(|own| own.iter().for_each(|own| own.be_normal()))
        }));
        let now = clock::now_monotonic();
        Self {
            own,
            watcher,
            yields: false,
            score: 0,
            begun: now,
            normal_until: now,
            penalty: PENALTY_MIN,
        }
    }

    /// Waits by `wait` for requests.
    pub fn wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.own.waiting.store(true, Ordering::SeqCst);
        let arrived = wait();
        self.own.waiting.store(false, Ordering::SeqCst);
        arrived
    }

    /// A round is over.
    pub fn end_round(&mut self, round: Round) {
        if self.watcher.is_none() {
            return;
        }
        self.own.rounds.fetch_add(1, Ordering::Relaxed);
        let kind = self.own.kind();
        if self.yields && kind != YIELDING {
            // Waiting for others, the watcher's decision, or its rescue.
            self.own.be_normal();
            self.stop();
        }
        if round == Round::Reading {
            return;
        }
        if round == Round::Others {
            self.score = self.score.saturating_sub(SCORE_LOSS);
            if self.yields && self.score < SCORE_MIN {
                self.own.be_normal();
                self.stop();
            }
            return;
        }
        if self.score == 0 {
            self.begun = clock::now_monotonic();
        }
        self.score = (self.score + 1).min(SCORE_MAX);
        if !self.yields && self.score >= SCORE_MIN {
            let now = clock::now_monotonic();
            if now < self.normal_until || now - self.begun > CLOSE_TOGETHER {
                self.score = 0;
                return;
            }
            self.yields = true;
            let watcher = self.watcher.as_deref();
            self.own.begin_to_yield(|| watcher.into_iter().for_each(Shared::wake));
        }
    }

    fn stop(&mut self) {
        (self.yields, self.score) = (false, 0);
        if self.own.starved.swap(0, Ordering::Relaxed) == 0 {
            self.penalty = (self.penalty / 2).max(PENALTY_MIN);
        } else {
            self.normal_until = clock::now_monotonic() + self.penalty;
            self.penalty = (self.penalty * 2).min(PENALTY_MAX);
        }
    }
}

impl Drop for Manner {
    fn drop(&mut self) {
        self.own.be_normal();
        thread::on_block(None);
        OWN.set(None);
    }
}

/// What a thread does at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activity {
    /// It runs, or would if it had a CPU.
    Runnable,
    Sleeping,
    /// It waits for a device, or its state is not known.
    Other,
}

/// As /proc tells.
fn activity(thread_id: i32) -> Activity {
    let status =
        std::fs::read_to_string(format!("/proc/self/task/{thread_id}/stat")).unwrap_or_default();
    // The name before it, in parentheses, may have any characters.
    match status.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
        Some('R') => Activity::Runnable,
        Some('S') => Activity::Sleeping,
        _ => Activity::Other,
    }
}

#[derive(Debug)]
struct Shared {
    queues: Vec<Arc<Placement>>,
    awake: AtomicBool,
    ended: Mutex<bool>,
    change: Condvar,
}

impl Shared {
    fn wake(&self) {
        if !self.awake.swap(true, Ordering::SeqCst) {
            drop(self.ended.lock());
            self.change.notify_all();
        }
    }

    /// Waits until a queue yields. False at the end.
    fn sleep(&self) -> bool {
        let mut ended = self.ended.lock();
        while !*ended && !self.awake.load(Ordering::SeqCst) {
            self.change.wait(&mut ended);
        }
        !*ended
    }

    fn watch(&self) {
        let mut seen = vec![Seen::default(); self.queues.len()];
        while self.sleep() {
            clock::sleep(TICK);
            self.awake.store(false, Ordering::SeqCst);
            let mut some_yield = false;
            for (queue, seen) in self.queues.iter().zip(&mut seen) {
                some_yield |= seen.look(queue, activity);
            }
            if some_yield {
                self.awake.store(true, Ordering::SeqCst);
            }
        }
    }
}

/// What the watcher has seen of a queue.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    word: u64,
    rounds: u64,
    quiet_ticks: u32,
}

impl Seen {
    /// Looks at `queue` again, and ends its yielding if it must. Whether it was not normal.
    fn look(&mut self, queue: &Placement, activity: impl Fn(i32) -> Activity) -> bool {
        let (word, rounds) =
            (queue.word.load(Ordering::SeqCst), queue.rounds.load(Ordering::Relaxed));
        if word & KIND_MASK == NORMAL {
            return false;
        }
        if (word, rounds) != (self.word, self.rounds) {
            *self = Self { word, rounds, quiet_ticks: 0 };
            return true;
        }
        match activity(queue.thread_id.load(Ordering::Relaxed)) {
            Activity::Sleeping if self.quiet_ticks < QUIET_TICKS => self.quiet_ticks += 1,
            Activity::Runnable => {
                queue.starved.fetch_add(1, Ordering::Relaxed);
                queue.rescue(word);
            }
            _ => queue.rescue(word),
        }
        true
    }
}

/// The thread that looks at those that yield.
#[derive(Debug)]
pub struct Watcher {
    /// `None` where threads may not take their policy back, so none yields.
    shared: Option<Arc<Shared>>,
    queues: Vec<Arc<Placement>>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Of `queue_count` queues.
    pub fn start(queue_count: usize) -> Self {
        let queues: Vec<_> = (0..queue_count).map(|_| Arc::new(Placement::default())).collect();
        if queue_count < 2 || !may_yield() {
            return Self { shared: None, queues, thread: None };
        }
        let shared = Arc::new(Shared {
            queues: queues.clone(),
            awake: AtomicBool::new(false),
            ended: Mutex::new(Rank::FUSE, false),
            change: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        let thread = thread::spawn("cairn-watcher", move || own.watch());
        Self { shared: Some(shared), queues, thread: Some(thread) }
    }

    /// For the thread of the queue with this index to call; every index once.
    pub fn joiner(&self, index: usize) -> impl FnOnce() -> Manner + Send + 'static {
        let (own, shared) = (Arc::clone(&self.queues[index]), self.shared.clone());
        move || Manner::new(own, shared)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            *shared.ended.lock() = true;
            shared.change.notify_all();
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the watcher of the queues has panicked");
        }
    }
}

/// Whether a thread of this process may take SCHED_IDLE and give it back: that needs CAP_SYS_NICE,
/// or a limit for nice values. Tried by a thread that ends.
fn may_yield() -> bool {
    let tried = thread::spawn("cairn-try", || {
        let own = kernel::thread_id();
        kernel::has_normal_policy(own)
            && kernel::set_idle_policy(own, true)
                .and_then(|()| kernel::set_idle_policy(own, false))
                .is_ok()
    });
    let may = tried.join().unwrap_or(false);
    tracing::debug!(may, "threads of queues may yield");
    may
}

#[cfg(test)]
#[path = "placement_tests.rs"]
mod tests;
