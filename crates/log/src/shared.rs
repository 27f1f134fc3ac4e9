//! What callers, the leader and the worker share, and the paths that finish waiters.
//!
//! Each lock stands in cache lines of its own, so that inserting does not slow down waiting and the
//! other way round.
use crate::arena::new_chunk;
use crate::context::Context;
use crate::data::DataQueue;
use crate::error::{CommitReason, LogError};
use crate::gathering::FlushPolicy;
use crate::group::{Group, Registered, Successor, Waiter};
use crate::log::{CommitRequest, LogOptions};
use crate::ring::Ring;
use crate::stages::{Ending, RoundTimes, Stages};
use crate::statistics::LogStatistics;
use crate::worker::WorkerSignal;
use cairn_blockdev::{BlockDevice, BlockPool};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::clock;
use cairn_environment::lock::{Condvar, Mutex, MutexGuard};
use cairn_format::{Generation, Geometry, LogSeq, VolumeId};
use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Arc;

/// A value in cache lines of its own; 128 bytes, because processors fetch lines in pairs.
#[repr(align(128))]
pub(crate) struct CacheAligned<T>(pub(crate) T);

impl<T> Deref for CacheAligned<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// The committed item list. Lock: rank `CIL_CONTEXT`.
pub(crate) struct ItemList {
    pub(crate) current: Context,
    /// Contexts of transactions that were cut, oldest first; none is empty.
    pub(crate) closed: VecDeque<Context>,
    /// An empty context whose memory the next one uses.
    pub(crate) spare: Option<Context>,
    /// The last operation.
    pub(crate) last: LogSeq,
    /// The worker knows that `current` is long.
    pub(crate) push_requested: bool,
    pub(crate) throttle_waits: u64,
    /// Operations that wait because the list is too long.
    pub(crate) throttled: usize,
    /// Times that the list had become short enough: each lets in all who waited then, even if it is
    /// too long again when they wake up, so that nobody is overtaken for ever.
    pub(crate) admissions: u64,
}

/// What remains to be done after an insertion, when the list's lock was released.
#[derive(Clone, Copy)]
pub(crate) struct Next {
    /// The list is long: wake the worker.
    push: bool,
    /// The list is short again: notify those who are throttled.
    admits: bool,
    /// The context's memory is used up: add a chunk.
    wants_chunk: bool,
}

impl ItemList {
    /// The next operation's number.
    pub(crate) fn number_operation(&mut self) -> LogSeq {
        self.last = self.last.next();
        self.current.last = self.last;
        self.last
    }

    pub(crate) fn after_insertion(&mut self, options: &LogOptions) -> Next {
        let long = self.current.entry_bytes() as u64 > options.background_push_bytes;
        Next {
            push: long && !std::mem::replace(&mut self.push_requested, true),
            // What was created and is removed makes the list shorter.
            admits: self.admit(options.hard_limit_bytes),
            wants_chunk: self.current.values().wants_chunk(),
        }
    }

    pub(crate) fn entry_bytes(&self) -> u64 {
        self.contexts().map(|context| context.entry_bytes() as u64).sum()
    }

    /// The list may have become shorter: lets in those who wait, if so. Says whether to notify
    /// them.
    pub(crate) fn admit(&mut self, hard_limit_bytes: u64) -> bool {
        let admits = self.throttled > 0 && self.entry_bytes() <= hard_limit_bytes;
        self.admissions += u64::from(admits);
        admits
    }

    pub(crate) fn contexts(&self) -> impl Iterator<Item = &Context> {
        self.closed.iter().chain([&self.current])
    }
}

pub(crate) struct Shared {
    pub(crate) device: Arc<dyn BlockDevice>,
    pub(crate) volume: VolumeId,
    pub(crate) geometry: Geometry,
    pub(crate) epoch: u64,
    pub(crate) next_inode: Arc<AtomicU64>,
    pub(crate) commit_request: CommitRequest,
    pub(crate) options: LogOptions,
    pub(crate) list: CacheAligned<Mutex<ItemList>>,
    /// The list became shorter, or the log died; with `list`.
    pub(crate) shrunk: Condvar,
    pub(crate) group: CacheAligned<Mutex<Group>>,
    /// Enough others joined; with `group`.
    pub(crate) joined: Condvar,
    /// The leader of a dead log left, or the group in flight landed; with `group`.
    pub(crate) left: Condvar,
    pub(crate) ring: CacheAligned<Mutex<Ring>>,
    pub(crate) data: CacheAligned<DataQueue>,
    /// Memory for checkpoints.
    pub(crate) buffers: BlockPool,
    pub(crate) worker: CacheAligned<WorkerSignal>,
    /// Copies for reading without a lock.
    pub(crate) last: CacheAligned<AtomicU64>,
    pub(crate) durable: CacheAligned<AtomicU64>,
    pub(crate) dead: AtomicBool,
    /// Requests that found their operation durable.
    pub(crate) immediate: CacheAligned<AtomicU64>,
    pub(crate) counters: CacheAligned<Mutex<LogStatistics>>,
    pub(crate) stages: Stages,
}

impl Shared {
    pub(crate) fn do_next(&self, next: Next) {
        if next.wants_chunk {
            let chunk = new_chunk();
            self.list.lock().current.values().add_chunk(chunk);
        }
        if next.admits {
            self.shrunk.notify_all();
        }
        if next.push {
            self.worker.send(|signals| signals.push = true);
        }
    }

    /// An empty context for the transaction that runs now, made before the lock is taken under
    /// which the list is switched.
    pub(crate) fn fresh_context(&self) -> Context {
        let (spare, generation) = {
            let mut list = self.list.lock();
            (list.spare.take(), list.current.generation)
        };
        let mut context = spare.unwrap_or_else(|| Context::new(generation));
        context.generation = generation;
        if context.values().wants_chunk() {
            context.values().add_chunk(new_chunk());
        }
        context
    }

    /// Takes back contexts that were written or dropped, or not used.
    pub(crate) fn recycle(&self, contexts: impl IntoIterator<Item = Context>) {
        let Some(mut context) = contexts.into_iter().last() else { return };
        context.clear();
        let displaced = self.list.lock().spare.replace(context);
        drop(displaced);
    }

    /// See [`Group::register`]; without a lock if the operation is durable.
    pub(crate) fn register(&self, target: LogSeq, waiter: Waiter) -> Registered {
        let target = target.min(LogSeq(self.last.load(Ordering::Acquire)));
        if self.durable.load(Ordering::Acquire) >= target.0 && !self.dead.load(Ordering::Acquire) {
            // Relaxed: a counter.
            self.immediate.fetch_add(1, Ordering::Relaxed);
            return Registered::Finished(waiter, Ok(()));
        }
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

    fn advance_durable(&self, group: &mut Group, last: LogSeq) {
        group.durable = group.durable.max(last);
        self.durable.store(group.durable.0, Ordering::Release);
    }

    /// A flush made everything up to `last` durable: takes out those who waited for that, who are
    /// to be told. Takes the group's lock and releases it.
    pub(crate) fn complete(
        &self,
        mut group: MutexGuard<'_, Group>,
        last: LogSeq,
        times: &RoundTimes,
    ) -> Vec<Waiter> {
        let finished = {
            if group.error.is_some() {
                return Vec::new();
            }
            self.advance_durable(&mut group, last);
            let limit = if group.gathering.policy() == FlushPolicy::Each { 1 } else { usize::MAX };
            let finished = group.take_durable(limit);
            let waiting = group.waiting();
            group.gathering.completed(clock::now_monotonic(), finished.len(), waiting);
            drop(group);
            finished
        };
        if finished.is_empty() {
            return finished;
        }
        let size = finished.len() as u64;
        tracing::trace!(durable = %last, size, "group done");
        self.count(|counters| {
            counters.groups += 1;
            counters.grouped += size;
            counters.group_size_max = counters.group_size_max.max(size);
        });
        self.stages.round(times, size);
        finished
    }

    /// The superblock of `generation` is durable. See [`crate::Log::super_committed`].
    pub(crate) fn super_committed(&self, generation: Generation) {
        let ending = Ending::commit_now();
        let mut dropped = Vec::new();
        let last = {
            let mut list = self.list.lock();
            while let Some(context) =
                list.closed.pop_front_if(|context| context.generation <= generation)
            {
                dropped.push(context);
            }
            list.admit(self.options.hard_limit_bytes);
            self.ring.lock().super_committed(generation)
        };
        self.data.super_committed(generation);
        // Also without a dropped context: those who are throttled ask for a push again, now that
        // there is room.
        self.shrunk.notify_all();
        let (finished, successor, push) = {
            let mut group = self.group.lock();
            group.commits += 1;
            group.fallback = false;
            if group.error.is_some() {
                (Vec::new(), None, false)
            } else {
                self.advance_durable(&mut group, last);
                let finished = group.take_durable(usize::MAX);
                let successor = (!group.is_busy() && group.waiting() > 0).then(|| group.appoint());
                let push = !group.leader && std::mem::take(&mut group.push_wanted);
                (finished, successor, push)
            }
        };
        tracing::debug!(%generation, durable = %last, waiters = finished.len(), contexts = dropped.len(), "superblock committed");
        self.inform(successor);
        if push {
            self.worker.send(|signals| signals.push = true);
        }
        let (contexts, waiters) = (dropped.len() as u64, finished.len() as u64);
        self.recycle(dropped);
        self.count(|counters| {
            counters.contexts_dropped += contexts;
            counters.committed += waiters;
        });
        finished.into_iter().for_each(|waiter| waiter.finish(Ok(ending), &self.stages));
    }

    pub(crate) fn inform(&self, successor: Option<Successor>) {
        match successor {
            Some(Successor::Blocked(slot)) => slot.notify(),
            Some(Successor::Worker) => self.worker.send(|signals| signals.lead = true),
            None => {}
        }
    }

    /// The log is dead from now on, because of the first error. Finishes every waiter.
    pub(crate) fn fail(&self, error: LogError) {
        let waiters = {
            let mut group = self.group.lock();
            if group.error.is_some() {
                return;
            }
            group.error = Some(error.clone());
            group.fallback = false;
            self.dead.store(true, Ordering::Release);
            group.take_all()
        };
        // Whoever is throttled looks at `dead` under the list's lock, before or after this.
        let forgotten = {
            let mut list = self.list.lock();
            let generation = list.current.generation;
            let current = std::mem::replace(&mut list.current, Context::new(generation));
            (std::mem::take(&mut list.closed), current)
        };
        self.shrunk.notify_all();
        self.joined.notify_all();
        self.data.forget();
        drop(forgotten);
        if !matches!(error, LogError::Stopped) {
            tracing::error!(%error, "the log is dead");
            (self.commit_request)(CommitReason::LogFailed);
        }
        waiters.into_iter().for_each(|waiter| waiter.finish(Err(error.clone()), &self.stages));
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut LogStatistics)) {
        change(&mut self.counters.lock());
    }
}
