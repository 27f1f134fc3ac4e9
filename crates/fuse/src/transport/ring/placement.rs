//! Keeps a caller and the thread of its queue on one CPU.
//!
//! A program that sends one request after the other never runs while the queue's thread serves it:
//! one CPU is enough for both. But the thread still runs when it hands over a reply, so the kernel
//! wakes the caller on another, idle CPU. An idle CPU takes long to wake, on a virtual machine
//! longer than the whole request. But a CPU that runs only SCHED_IDLE threads counts as idle. So
//! while requests come one by one and close together, and each is answered at once, the thread
//! *yields*: it takes that policy, and the caller continues on the same CPU.
//!
//! A thread that yields gets almost nothing of a CPU on which other threads compute. So a *watcher*
//! checks the yielding threads every [`TICK`], and stops the yielding of a thread that has had a
//! request and made no progress since the last check. Such a thread does not yield again for a
//! while, longer each time. A thread that is about to wait for other threads or for the device
//! stops yielding by itself. When no requests come, the watcher stops the yielding as well, and
//! then sleeps.
//!
//! States of a queue, in one word with a number that counts how often it began to yield:
//! - *normal*: the thread's policy is SCHED_OTHER, or about to be so, by a call in progress on a
//!   thread with that policy;
//! - *yielding*: the thread's policy is SCHED_IDLE, or about to be so;
//! - *rescued*: the watcher has set SCHED_OTHER while the thread was not waiting for requests. The
//!   thread may just have been about to set SCHED_IDLE, so the watcher repeats it until the thread
//!   reports that it is normal, or waits for requests.
//!
//! Invariants:
//! - only the queue's thread makes its queue yield: it first sets the word, then wakes the watcher,
//!   then sets the policy;
//! - when the queue's thread makes its queue normal, it first sets the policy and then the word;
//! - the watcher makes a queue normal only if its thread was waiting for requests, so not about to
//!   set the policy;
//! - the watcher sleeps only if it found all queues normal after it had cleared its `awake` flag.
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

/// The interval between the watcher's checks.
const TICK: Duration = Duration::from_millis(1);
/// Ticks without a request after which a queue is normal again.
const QUIET_TICKS: u32 = 20;
/// A queue yields from this score on: requests that came one by one, less those that did not.
const SCORE_MIN: u32 = 8;
/// The score stops rising here.
const SCORE_MAX: u32 = 32;
/// The loss of score for a request that came with others, or was not answered at once.
const SCORE_LOSS: u32 = 16;
/// The most time for the first [`SCORE_MIN`] requests.
const CLOSE_TOGETHER: Duration = Duration::from_millis(2);
/// How long a queue stays normal after its thread was kept from running.
const PENALTY_MIN: Duration = Duration::from_millis(100);
const PENALTY_MAX: Duration = Duration::from_secs(2);

const NORMAL: u64 = 0;
const YIELDING: u64 = 1;
const RESCUED: u64 = 2;
const KIND_MASK: u64 = 3;
const ONE_EPOCH: u64 = 4;

/// The state that a queue's thread shares with the watcher.
#[derive(Debug, Default)]
pub struct ThreadPlacement {
    /// Zero before the thread runs.
    thread_id: AtomicI32,
    word: AtomicU64,
    /// How often the thread has looked for requests.
    rounds: AtomicU64,
    /// The thread waits for requests, or is about to, or has just done so.
    waiting: AtomicBool,
    /// How often it was kept from running since its thread read this.
    starved: AtomicU32,
}

thread_local! {
    /// The placement of the calling thread.
    static OWN: RefCell<Option<Arc<ThreadPlacement>>> = const { RefCell::new(None) };
}

impl ThreadPlacement {
    fn kind(&self) -> u64 {
        self.word.load(Ordering::SeqCst) & KIND_MASK
    }

    /// Called by the queue's thread. `wake` wakes the watcher; it runs before the policy is set,
    /// since the thread might not get that far afterwards.
    fn begin_to_yield(&self, wake: impl FnOnce()) {
        let word = self.word.load(Ordering::SeqCst);
        self.word.store((word & !KIND_MASK) + ONE_EPOCH + YIELDING, Ordering::SeqCst);
        wake();
        self.set_policy(true);
    }

    /// Called by the queue's thread.
    fn be_normal(&self) {
        let word = self.word.load(Ordering::SeqCst);
        if word & KIND_MASK != NORMAL {
            self.set_policy(false);
            self.word.store(word & !KIND_MASK, Ordering::SeqCst);
        }
    }

    /// Called by the watcher, which has read `word`.
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

/// What a queue's thread has done since its last wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundKind {
    /// It answered the only request.
    Alone,
    /// It began a read of the device for the only request. The caller and this thread still take
    /// turns.
    Reading,
    /// Something else.
    Others,
}

/// The queue thread's side of the placement.
#[derive(Debug)]
pub struct YieldPolicy {
    own: Arc<ThreadPlacement>,
    watcher: Option<Arc<WatcherState>>,
    yields: bool,
    score: u32,
    /// The time when the score was last zero.
    begun: Monotonic,
    normal_until: Monotonic,
    penalty: Duration,
}

impl YieldPolicy {
    /// For the calling thread, which serves `own`.
    fn new(own: Arc<ThreadPlacement>, watcher: Option<Arc<WatcherState>>) -> Self {
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

    /// Waits for requests by `wait`.
    pub fn wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.own.waiting.store(true, Ordering::SeqCst);
        let arrived = wait();
        self.own.waiting.store(false, Ordering::SeqCst);
        arrived
    }

    /// Called at the end of a round.
    pub fn end_round(&mut self, round: RoundKind) {
        if self.watcher.is_none() {
            return;
        }
        self.own.rounds.fetch_add(1, Ordering::Relaxed);
        let kind = self.own.kind();
        if self.yields && kind != YIELDING {
            // It waits for others, or the watcher has decided or rescued it.
            self.own.be_normal();
            self.stop();
        }
        if round == RoundKind::Reading {
            return;
        }
        if round == RoundKind::Others {
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
            self.own.begin_to_yield(|| watcher.into_iter().for_each(WatcherState::wake));
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

impl Drop for YieldPolicy {
    fn drop(&mut self) {
        self.own.be_normal();
        thread::on_block(None);
        OWN.set(None);
    }
}

/// The current activity of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activity {
    /// It runs, or would if it had a CPU.
    Runnable,
    Sleeping,
    /// It waits for a device, or its state is not known.
    Other,
}

/// Reads it from /proc.
fn activity(thread_id: i32) -> Activity {
    let status =
        std::fs::read_to_string(format!("/proc/self/task/{thread_id}/stat")).unwrap_or_default();
    // The name before it, in parentheses, may contain any characters.
    match status.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
        Some('R') => Activity::Runnable,
        Some('S') => Activity::Sleeping,
        _ => Activity::Other,
    }
}

#[derive(Debug)]
struct WatcherState {
    queues: Vec<Arc<ThreadPlacement>>,
    awake: AtomicBool,
    ended: Mutex<bool>,
    change: Condvar,
}

impl WatcherState {
    fn wake(&self) {
        if !self.awake.swap(true, Ordering::SeqCst) {
            drop(self.ended.lock());
            self.change.notify_all();
        }
    }

    /// Waits until a queue yields. Returns false at the end.
    fn sleep(&self) -> bool {
        let mut ended = self.ended.lock();
        while !*ended && !self.awake.load(Ordering::SeqCst) {
            self.change.wait(&mut ended);
        }
        !*ended
    }

    fn watch(&self) {
        let mut samples = vec![QueueSample::default(); self.queues.len()];
        while self.sleep() {
            clock::sleep(TICK);
            self.awake.store(false, Ordering::SeqCst);
            let mut some_yield = false;
            for (queue, sample) in self.queues.iter().zip(&mut samples) {
                some_yield |= sample.update(queue, activity);
            }
            if some_yield {
                self.awake.store(true, Ordering::SeqCst);
            }
        }
    }
}

/// The watcher's last sample of a queue.
#[derive(Clone, Copy, Debug, Default)]
struct QueueSample {
    word: u64,
    rounds: u64,
    quiet_ticks: u32,
}

impl QueueSample {
    /// Samples `queue` again, and stops its yielding if it must. Returns whether it was not normal.
    fn update(&mut self, queue: &ThreadPlacement, activity: impl Fn(i32) -> Activity) -> bool {
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

/// The thread that checks the yielding threads.
#[derive(Debug)]
pub struct Watcher {
    /// `None` if threads may not take their policy back; then none yields.
    shared: Option<Arc<WatcherState>>,
    queues: Vec<Arc<ThreadPlacement>>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// A watcher of `queue_count` queues.
    pub fn start(queue_count: usize) -> Self {
        let queues: Vec<_> =
            (0..queue_count).map(|_| Arc::new(ThreadPlacement::default())).collect();
        if queue_count < 2 || !may_yield() {
            return Self { shared: None, queues, thread: None };
        }
        let shared = Arc::new(WatcherState {
            queues: queues.clone(),
            awake: AtomicBool::new(false),
            ended: Mutex::new(Rank::FUSE, false),
            change: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        let thread = thread::spawn("cairn-watcher", move || own.watch());
        Self { shared: Some(shared), queues, thread: Some(thread) }
    }

    /// The returned function runs on the thread of the queue with this index, once per index.
    pub fn joiner(&self, index: usize) -> impl FnOnce() -> YieldPolicy + Send + 'static {
        let (own, shared) = (Arc::clone(&self.queues[index]), self.shared.clone());
        move || YieldPolicy::new(own, shared)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            *shared.ended.lock() = true;
            shared.change.notify_all();
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the watcher of the queues panicked");
        }
    }
}

/// Whether a thread of this process may take SCHED_IDLE and leave it again: that needs
/// CAP_SYS_NICE, or a limit for nice values. A thread that ends tries it.
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
