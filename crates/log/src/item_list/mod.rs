//! M5, the committed item list: the newest state of every item that changed since the last
//! checkpoint, in memory.
//!
//! **What it is for.** An operation changes a few items (an inode, a directory entry, an extent).
//! Writing them to the ring each time would write the same inode again and again; so they are
//! collected, and an fsync writes the whole list as one checkpoint. All operations of all threads
//! meet at this list, so inserting must be short. The idea is XFS's delayed logging
//! (`Documentation/filesystems/xfs/xfs-delayed-logging-design.rst`).
//!
//! **How an operation is inserted.**
//! 1. It formats its items into a [`batch::Batch`]: the thread's own buffers, no lock, the hashes
//!    computed.
//! 2. One short lock numbers the operation and copies its items into the current
//!    [`context::Context`], all or none. An item that is there already is overwritten in place; one
//!    that was created and removed within the context leaves nothing. The accounting (bytes,
//!    limits) happens under the same lock.
//! 3. After the lock: add memory that the next operation will need, wake the worker if the list has
//!    become long.
//!
//! No item costs an allocation: its vector stands in a `Vec`, its value in an [`arena`], and an
//! [`index`] of 8 bytes per item finds it. Two contexts take turns with all their memory, so in the
//! long run nothing is allocated.
//!
//! **How the list is switched.** As a whole, under its lock, so that an operation's items never
//! straddle two contexts:
//! - a *cut* (a transaction commit begins) closes the current context: it belongs to the cut
//!   transaction, and what comes belongs to the next one;
//! - a *push* takes all contexts, closed and current, for checkpoints;
//! - a *superblock* that is durable drops the closed contexts that it covers: the trees hold their
//!   items.
//!
//! **Two lengths.** From `background_push_bytes` on, a worker writes the list without being asked,
//! so that an fsync has little to write. From `hard_limit_bytes` on, operations wait
//! ([`ItemList::throttle`]). Each time that the list has become short enough, all operations that
//! wait then are *admitted*, even if it is too long again when they run: none is overtaken for
//! ever.
//!
//! Invariants: the closed contexts are the oldest and none is empty; the contexts hold a contiguous
//! run of operations, up to `last`; a dead list is empty and stays so.
//!
//! Lock discipline: rank `CIL_CONTEXT` around [`ListedItems`]. The ring's lock may be taken under
//! it (a context and its place in the ring are taken in one step); formatting and allocation happen
//! outside.
pub(crate) mod arena;
pub(crate) mod batch;
pub(crate) mod context;
pub(crate) mod index;

use crate::cache_aligned::CacheAligned;
use crate::statistics::LogStatistics;
use crate::worker_signal::WorkerSignal;
use arena::new_chunk;
use batch::Batch;
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::{Condvar, Mutex, MutexGuard};
use cairn_format::{Generation, LogSeq};
use context::Context;
use std::collections::VecDeque;

/// What the list's lock protects.
pub(crate) struct ListedItems {
    current: Context,
    /// Contexts of transactions that were cut, oldest first; none is empty.
    closed: VecDeque<Context>,
    /// An empty context whose memory the next one uses.
    spare: Option<Context>,
    /// The last operation.
    last: LogSeq,
    /// The log is dead: what is inserted is dropped.
    dead: bool,
    background_push_bytes: u64,
    hard_limit_bytes: u64,
    /// The worker knows that `current` is long.
    push_requested: bool,
    /// Operations that wait because the list is too long.
    throttled: usize,
    /// Times that the list had become short enough: each lets in all operations that waited then.
    admissions: u64,
    throttle_waits: u64,
    background_pushes: u64,
    contexts_dropped: u64,
}

/// What remains to be done after an insertion, when the list's lock was released.
#[derive(Clone, Copy)]
pub(crate) struct Upkeep {
    /// The list is long: wake the worker.
    push: bool,
    /// The list is short again: notify the operations that are throttled.
    admits: bool,
    /// The context's memory is used up: add a chunk.
    wants_chunk: bool,
}

impl ListedItems {
    /// What the list needs after an insertion.
    pub(crate) fn upkeep(&mut self) -> Upkeep {
        let long = self.current.entry_bytes() as u64 > self.background_push_bytes;
        Upkeep {
            push: long && !std::mem::replace(&mut self.push_requested, true),
            // What was created and is removed makes the list shorter.
            admits: self.admit(),
            wants_chunk: self.current.values().wants_chunk(),
        }
    }

    fn entry_bytes(&self) -> u64 {
        self.contexts().map(|context| context.entry_bytes() as u64).sum()
    }

    fn is_too_long(&self) -> bool {
        self.entry_bytes() > self.hard_limit_bytes && !self.dead
    }

    /// The list may have become shorter: lets in the operations that wait, if so. Returns whether
    /// to notify them.
    fn admit(&mut self) -> bool {
        let admits = self.throttled > 0 && self.entry_bytes() <= self.hard_limit_bytes;
        self.admissions += u64::from(admits);
        admits
    }

    /// All contexts, oldest first.
    pub(crate) fn contexts(&self) -> impl Iterator<Item = &Context> {
        self.closed.iter().chain([&self.current])
    }

    /// The context that operations enter.
    pub(crate) fn current(&self) -> &Context {
        &self.current
    }

    /// The last operation inserted.
    pub(crate) fn last(&self) -> LogSeq {
        self.last
    }

    /// A cut: closes the current context; operations enter `fresh` from now on, which belongs to
    /// transaction `next`. Returns the transaction that was cut.
    pub(crate) fn close_current(&mut self, mut fresh: Context, next: Generation) -> Generation {
        fresh.generation = next;
        let context = std::mem::replace(&mut self.current, fresh);
        let generation = context.generation;
        debug_assert!(generation < next, "{next:?} follows {generation:?}");
        self.push_requested = false;
        if !context.is_empty() {
            self.closed.push_back(context);
        }
        generation
    }

    /// A push: takes all contexts that hold anything, oldest first; operations enter `fresh` from
    /// now on.
    pub(crate) fn take_all(&mut self, mut fresh: Context) -> impl Iterator<Item = Context> + use<> {
        fresh.generation = self.current.generation;
        let closed = std::mem::take(&mut self.closed);
        let current = std::mem::replace(&mut self.current, fresh);
        self.push_requested = false;
        self.admit();
        closed.into_iter().chain([current]).filter(|context| !context.is_empty())
    }

    /// The superblock of `generation` is durable: takes out the closed contexts that it covers.
    pub(crate) fn drop_covered(&mut self, generation: Generation) -> Vec<Context> {
        let mut dropped = Vec::new();
        while let Some(context) =
            self.closed.pop_front_if(|context| context.generation <= generation)
        {
            dropped.push(context);
        }
        self.contexts_dropped += dropped.len() as u64;
        self.admit();
        dropped
    }
}

/// The committed item list of one log.
pub(crate) struct ItemList {
    items: CacheAligned<Mutex<ListedItems>>,
    /// The list became shorter, or the log died; with `items`.
    shrunk: Condvar,
    /// The last operation, for reading without the lock.
    last: CacheAligned<AtomicU64>,
}

impl ItemList {
    /// The empty list of a log whose running transaction is `generation`.
    pub(crate) fn new(
        generation: Generation,
        background_push_bytes: u64,
        hard_limit_bytes: u64,
    ) -> Self {
        let items = ListedItems {
            current: Context::new(generation),
            closed: VecDeque::new(),
            spare: None,
            last: LogSeq(0),
            dead: false,
            background_push_bytes,
            hard_limit_bytes,
            push_requested: false,
            throttled: 0,
            admissions: 0,
            throttle_waits: 0,
            background_pushes: 0,
            contexts_dropped: 0,
        };
        Self {
            items: CacheAligned(Mutex::new(Rank::CIL_CONTEXT, items)),
            shrunk: Condvar::new(),
            last: CacheAligned(AtomicU64::new(0)),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, ListedItems> {
        self.items.lock()
    }

    /// The last operation inserted; 0 if there was none.
    pub(crate) fn last(&self) -> LogSeq {
        LogSeq(self.last.load(Ordering::Acquire))
    }

    /// Adds the changes of one operation, all at once, and empties the batch. Returns the
    /// operation's number, and whether the list has become long, so that the worker should push.
    pub(crate) fn insert(&self, batch: &mut Batch) -> (LogSeq, bool) {
        let (sequence, upkeep) = {
            let mut items = self.items.lock();
            let sequence = self.add_operation(&mut items, |context| {
                batch.changes().for_each(|(change, value)| context.apply(change, value));
                context.note_need(batch.needs_commit());
            });
            (sequence, items.upkeep())
        };
        batch.clear();
        (sequence, self.keep_up(upkeep))
    }

    /// Numbers an operation and has its changes applied to the current context.
    pub(crate) fn add_operation(
        &self,
        items: &mut ListedItems,
        apply: impl FnOnce(&mut Context),
    ) -> LogSeq {
        items.last = items.last.next();
        items.current.last = items.last;
        if !items.dead {
            apply(&mut items.current);
        }
        self.last.store(items.last.0, Ordering::Release);
        items.last
    }

    /// Does what an insertion left to do, without the lock. Returns whether the worker should push.
    pub(crate) fn keep_up(&self, upkeep: Upkeep) -> bool {
        if upkeep.wants_chunk {
            let chunk = new_chunk();
            self.items.lock().current.values().add_chunk(chunk);
        }
        if upkeep.admits {
            self.notify_throttled();
        }
        upkeep.push
    }

    /// Waits while the list is too long. An operation that has to wait first wakes the worker, and
    /// goes on as soon as the list has been short enough once since then, whatever other operations
    /// added meanwhile.
    pub(crate) fn throttle(&self, worker: &WorkerSignal) {
        let mut items = self.items.lock();
        if items.is_too_long() {
            let admissions = items.admissions;
            let goes_on =
                |items: &ListedItems| items.admissions != admissions || !items.is_too_long();
            items.throttle_waits += 1;
            items.throttled += 1;
            while !goes_on(&items) {
                // First wake the thread that shortens the list, then sleep.
                drop(items);
                worker.send(|signals| signals.push = true);
                items = self.items.lock();
                if !goes_on(&items) {
                    self.shrunk.wait(&mut items);
                }
            }
            items.throttled -= 1;
        }
    }

    /// Has the operations that are throttled look again.
    pub(crate) fn notify_throttled(&self) {
        self.shrunk.notify_all();
    }

    /// Whether the list is at least so long that the worker pushes it now; counts the push.
    pub(crate) fn begins_background_push(&self, at_least_bytes: u64) -> bool {
        let mut items = self.items.lock();
        let begins = items.entry_bytes() >= at_least_bytes;
        items.background_pushes += u64::from(begins);
        begins
    }

    /// An empty context for the transaction that runs now, made before the lock is taken under
    /// which the list is switched.
    pub(crate) fn fresh_context(&self) -> Context {
        let (spare, generation) = {
            let mut items = self.items.lock();
            (items.spare.take(), items.current.generation)
        };
        let mut context = spare.unwrap_or_else(|| Context::new(generation));
        context.generation = generation;
        if context.values().wants_chunk() {
            context.values().add_chunk(new_chunk());
        }
        context
    }

    /// Takes back contexts that were written or dropped.
    pub(crate) fn recycle(&self, contexts: impl IntoIterator<Item = Context>) {
        let Some(mut context) = contexts.into_iter().last() else { return };
        context.clear();
        let displaced = self.items.lock().spare.replace(context);
        drop(displaced);
    }

    /// The log is dead: forgets all items, drops those that come, and lets in all operations that
    /// wait.
    pub(crate) fn close(&self) {
        let forgotten = {
            let mut items = self.items.lock();
            items.dead = true;
            let generation = items.current.generation;
            let current = std::mem::replace(&mut items.current, Context::new(generation));
            (std::mem::take(&mut items.closed), current)
        };
        self.shrunk.notify_all();
        drop(forgotten);
    }

    /// Fills in what the list counts.
    pub(crate) fn count_into(&self, statistics: &mut LogStatistics) {
        let items = self.items.lock();
        statistics.operations = items.last.0;
        statistics.throttle_waits = items.throttle_waits;
        statistics.background_pushes = items.background_pushes;
        statistics.contexts_dropped = items.contexts_dropped;
        statistics.context_bytes = items.entry_bytes();
        statistics.context_items = items.contexts().map(|context| context.items() as u64).sum();
    }
}
