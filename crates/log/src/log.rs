//! [`Log`]: what operations, fsyncs and transaction commits call.
use crate::batch::Batch;
use crate::context::Context;
use crate::data::{DataQueue, DataWrite};
use crate::error::{CommitReason, LogError};
use crate::gathering::{FlushPolicy, Gathering};
use crate::group::{Group, Registered, Slot, Successor, Waiter, Wake};
use crate::lead::Leader;
use crate::ring::Ring;
use crate::shared::{CacheAligned, ItemList, Shared};
use crate::stages::{Ending, RequestTimer, StageTime, Stages};
use crate::statistics::LogStatistics;
use crate::worker::{self, WorkerSignal};
use cairn_blockdev::{BlockDevice, BlockPool};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, assert_may_block, thread};
use cairn_format::{BLOCK_SIZE, Generation, Geometry, LogPosition, LogSeq, VolumeId};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;

/// Memory for checkpoints that is kept for later ones.
const UNUSED_BUFFERS_BYTES_MAX: usize = 4 << 20;

/// Called when an operation is durable, or never will be.
pub type DurableCallback = Box<dyn FnOnce(Result<(), LogError>) + Send>;
/// What a thread that brings a callback may be used for, when nobody leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallerLeads {
    /// It leads until several others wait.
    UntilSeveralWait,
    /// It leads for its own operation; others wait for the thread.
    Once,
    /// For nothing that takes time: a worker of the log leads.
    Never,
}

/// Asks for a transaction commit. Never blocks; the log holds no lock meanwhile.
pub type CommitRequest = Box<dyn Fn(CommitReason) + Send + Sync>;

/// How a log behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogOptions {
    /// When a leader waits for others, and whether groups overlap.
    pub flush: FlushPolicy,
    /// Nothing will be logged: there is no worker.
    pub read_only: bool,
    /// From this many bytes in the list on, the worker writes them to the ring.
    pub background_push_bytes: u64,
    /// From this many bytes in the list on, operations wait.
    pub hard_limit_bytes: u64,
    /// Insert items as it was done before the list was optimised.
    #[cfg(feature = "baselines")]
    pub two_pass_insertion: bool,
    /// Nothing is ever written to the ring: whoever waits gets a transaction commit.
    #[cfg(feature = "baselines")]
    pub commits_only: bool,
}

impl LogOptions {
    /// The defaults for a volume: push at a quarter of the ring, at most 32 MiB; wait at twice
    /// that.
    pub fn for_geometry(geometry: &Geometry) -> Self {
        let background_push_bytes = (geometry.log_blocks * BLOCK_SIZE as u64 / 4).min(32 << 20);
        Self {
            flush: FlushPolicy::Auto,
            read_only: false,
            background_push_bytes,
            hard_limit_bytes: 2 * background_push_bytes,
            #[cfg(feature = "baselines")]
            two_pass_insertion: false,
            #[cfg(feature = "baselines")]
            commits_only: false,
        }
    }
}

/// Where a log starts, as the superblock says that was committed for this mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogStart {
    /// The superblock's `log_epoch`.
    pub epoch: u64,
    /// The superblock's `log_tail`; its sequence is above 0. [`crate::Replay::end`] is such a
    /// position.
    pub position: LogPosition,
    /// The running transaction.
    pub generation: Generation,
}

/// Where the log stood when a transaction was cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut {
    /// Where replay starts after the transaction's superblock.
    pub position: LogPosition,
    /// The last operation of the transaction.
    pub last: LogSeq,
}

/// The log of a mounted volume.
///
/// ```
/// use cairn_blockdev::{BlockDevice, MemoryDevice};
/// use cairn_environment::atomic::AtomicU64;
/// use cairn_format::{EntryFlags, Generation, Geometry, InodeNumber, ItemKind, Key, LogPosition, TREE_FILES, VolumeId};
/// use cairn_log::{Batch, Log, LogOptions, LogStart};
/// use std::sync::Arc;
///
/// let geometry = Geometry::for_size(64 << 20, None).expect("large enough");
/// let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(64 << 20));
/// let start = LogStart { epoch: 1, position: LogPosition { block: 0, sequence: 1 }, generation: Generation(2) };
/// let next_inode = Arc::new(AtomicU64::new(3));
/// let log = Log::new(device, VolumeId([1; 16]), geometry, start, next_inode, Box::new(|_| {}), LogOptions::for_geometry(&geometry));
///
/// let mut batch = Batch::new();
/// batch.put(TREE_FILES, Key::new(InodeNumber(7), ItemKind::Symlink, 0), b"target", EntryFlags::default());
/// let sequence = log.insert(&mut batch);
/// log.wait_durable(sequence)?;
/// assert!(log.durable() >= sequence);
/// log.stop();
/// # Ok::<(), cairn_log::LogError>(())
/// ```
pub struct Log {
    shared: Arc<Shared>,
    workers: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl Log {
    /// The log of a volume that is being mounted, and its worker threads unless it is read-only.
    /// Since it flushes from several threads, and a device tells only one of them of a failure,
    /// `device` is to be behind a [`FlushFence`](cairn_blockdev::FlushFence).
    ///
    /// # Panics
    /// When `start.position` is impossible.
    pub fn new(
        device: Arc<dyn BlockDevice>,
        volume: VolumeId,
        geometry: Geometry,
        start: LogStart,
        next_inode: Arc<AtomicU64>,
        commit_request: CommitRequest,
        options: LogOptions,
    ) -> Arc<Self> {
        let list = ItemList {
            current: Context::new(start.generation),
            closed: VecDeque::new(),
            spare: None,
            last: LogSeq(0),
            push_requested: false,
            throttle_waits: 0,
            throttled: 0,
            admissions: 0,
        };
        let shared = Arc::new(Shared {
            device,
            volume,
            geometry,
            epoch: start.epoch,
            next_inode,
            commit_request,
            options,
            list: CacheAligned(Mutex::new(Rank::CIL_CONTEXT, list)),
            shrunk: Condvar::new(),
            group: CacheAligned(Mutex::new(
                Rank::LOG_GROUP,
                Group::new(Gathering::new(options.flush)),
            )),
            joined: Condvar::new(),
            left: Condvar::new(),
            ring: CacheAligned(Mutex::new(
                Rank::LOG_RING,
                Ring::new(geometry.log_blocks, start.position),
            )),
            data: CacheAligned(DataQueue::new()),
            buffers: BlockPool::new(UNUSED_BUFFERS_BYTES_MAX),
            worker: CacheAligned(WorkerSignal::new()),
            last: CacheAligned(AtomicU64::new(0)),
            durable: CacheAligned(AtomicU64::new(0)),
            dead: AtomicBool::new(false),
            immediate: CacheAligned(AtomicU64::new(0)),
            counters: CacheAligned(Mutex::new(Rank::STATISTICS, LogStatistics::default())),
            stages: Stages::new(),
        });
        let worker = |_| {
            let shared = Arc::clone(&shared);
            thread::spawn("cairn-log", move || worker::run(&shared))
        };
        let workers =
            (0..if options.read_only { 0 } else { worker::WORKERS }).map(worker).collect();
        Arc::new(Self { shared, workers: Mutex::new(Rank::LEAF, workers) })
    }

    /// Adds the changes of one operation to the list, all at once, and empties the batch. The
    /// operation's order among others that change the same items is the order of these calls, so
    /// the caller holds what orders them (the inode's lock). Never waits for the device. On a dead
    /// log the changes are dropped.
    ///
    /// An empty batch is no operation: the result is that of the call before.
    pub fn insert(&self, batch: &mut Batch) -> LogSeq {
        if batch.is_empty() {
            return self.last();
        }
        let shared = &self.shared;
        #[cfg(feature = "baselines")]
        if shared.options.two_pass_insertion {
            return shared.insert_in_two_passes(batch);
        }
        let (sequence, next) = {
            let mut list = shared.list.lock();
            let sequence = list.number_operation();
            if !shared.dead.load(Ordering::Acquire) {
                batch.changes().for_each(|(change, value)| list.current.apply(change, value));
            }
            shared.last.store(sequence.0, Ordering::Release);
            (sequence, list.after_insertion(&shared.options))
        };
        batch.clear();
        shared.do_next(next);
        sequence
    }

    /// Items in the list that were inserted in two passes.
    #[cfg(feature = "baselines")]
    pub fn two_pass_items(&self) -> usize {
        self.shared.two_pass_items()
    }

    /// As [`Log::insert`], for an operation whose items refer to data that is not written yet: it
    /// is written together with the checkpoint that holds them, or by [`Log::write_data`]. The
    /// operation counts as durable when its data is, or when that was tried and failed, which is
    /// for the owner of the [`crate::DataTicket`]s to find out.
    pub fn insert_with_data(&self, batch: &mut Batch, data: Vec<DataWrite>) -> LogSeq {
        debug_assert!(!batch.is_empty(), "data belongs to items");
        self.shared.queue_data(data);
        self.insert(batch)
    }

    /// Writes the data of all operations so far that is not written yet, and waits for what is
    /// under way. A commit does so between its cut and its first flush.
    ///
    /// # Errors
    /// The log is dead: data that was queued may have been thrown away, so no superblock may
    /// follow.
    pub fn write_data(&self) -> Result<(), LogError> {
        self.shared.write_queued_data()?;
        self.error().map_or(Ok(()), Err)
    }

    /// Blocks of data that are not written yet.
    pub fn unwritten_blocks(&self) -> u64 {
        self.shared.data.blocks()
    }

    /// Data writes that failed, since the log was made. Who makes other files' data durable
    /// compares it before and after.
    pub fn data_losses(&self) -> u64 {
        self.shared.data.losses()
    }

    /// The last operation inserted; 0 if there was none.
    pub fn last(&self) -> LogSeq {
        LogSeq(self.shared.last.load(Ordering::Acquire))
    }

    /// The last operation that is durable, with all before it.
    pub fn durable(&self) -> LogSeq {
        LogSeq(self.shared.durable.load(Ordering::Acquire))
    }

    /// Waits while the list is too long. Operations call it before they reserve or join, holding no
    /// lock, so nobody sleeps with what the one needs who shortens the list. Whoever has to wait
    /// first wakes that one, and goes on as soon as the list has been short enough once since then,
    /// whatever others added meanwhile.
    ///
    /// # Errors
    /// The log is dead.
    pub fn throttle(&self) -> Result<(), LogError> {
        assert_may_block(None);
        let shared = &self.shared;
        let too_long = |list: &ItemList| {
            list.entry_bytes() > shared.options.hard_limit_bytes
                && !shared.dead.load(Ordering::Acquire)
        };
        let mut list = shared.list.lock();
        if too_long(&list) {
            let admissions = list.admissions;
            let goes_on = |list: &ItemList| list.admissions != admissions || !too_long(list);
            list.throttle_waits += 1;
            list.throttled += 1;
            while !goes_on(&list) {
                // First wake the one who shortens it, then sleep.
                drop(list);
                shared.worker.send(|signals| signals.push = true);
                list = shared.list.lock();
                if !goes_on(&list) {
                    shared.shrunk.wait(&mut list);
                }
            }
            list.throttled -= 1;
        }
        drop(list);
        self.error().map_or(Ok(()), Err)
    }

    /// Calls `callback` when the operation `target` is durable: at once if it is, otherwise later,
    /// on whichever thread makes it durable. If nobody is making anything durable, the calling
    /// thread does, until several others wait. Callbacks run one after the other, without a lock
    /// held: they must be short and must not wait.
    pub fn on_durable(&self, target: LogSeq, callback: DurableCallback) {
        self.on_durable_since(
            RequestTimer::begin(),
            target,
            callback,
            CallerLeads::UntilSeveralWait,
        );
    }

    /// As [`Log::on_durable`], for a request that began earlier: its stages are measured from then
    /// on. `leads` says what the calling thread may be used for.
    pub fn on_durable_since(
        &self,
        timer: RequestTimer,
        target: LogSeq,
        callback: DurableCallback,
        leads: CallerLeads,
    ) {
        assert_may_block(None);
        let registration = self.shared.stages.register(timer);
        match self.shared.register(target, Waiter::Callback(callback, registration)) {
            Registered::Finished(waiter, outcome) => {
                waiter.finish(outcome.map(|()| Ending::Immediate), &self.shared.stages)
            }
            Registered::Waiting => {}
            Registered::Appointed(successor) => self.shared.inform(Some(successor)),
            Registered::Lead => match leads {
                CallerLeads::UntilSeveralWait => self.shared.lead(Leader::Passing),
                CallerLeads::Once => self.shared.lead(Leader::Once(&Cell::new(false))),
                CallerLeads::Never => self.shared.inform(Some(Successor::Worker)),
            },
        }
    }

    /// Waits until the operation `target` is durable.
    ///
    /// # Errors
    /// The log died before.
    pub fn wait_durable(&self, target: LogSeq) -> Result<(), LogError> {
        self.wait_durable_since(RequestTimer::begin(), target)
    }

    /// As [`Log::wait_durable`], for a request that began earlier: its stages are measured from
    /// then on.
    ///
    /// # Errors
    /// The log died before.
    pub fn wait_durable_since(&self, timer: RequestTimer, target: LogSeq) -> Result<(), LogError> {
        assert_may_block(None);
        let registration = self.shared.stages.register(timer);
        let ending = self.wait_for_ending(target)?;
        self.shared.stages.finish(&registration, ending);
        Ok(())
    }

    fn wait_for_ending(&self, target: LogSeq) -> Result<Ending, LogError> {
        if self.durable() >= target && self.error().is_none() {
            self.shared.immediate.fetch_add(1, Ordering::Relaxed);
            return Ok(Ending::Immediate);
        }
        let slot = Arc::new(Slot::new());
        match self.shared.register(target, Waiter::Blocked(Arc::clone(&slot))) {
            Registered::Finished(_, outcome) => return outcome.map(|()| Ending::Immediate),
            Registered::Waiting => {}
            // Only for callbacks; it would be right here, too.
            Registered::Appointed(successor) => self.shared.inform(Some(successor)),
            Registered::Lead => self.shared.lead(Leader::Blocked(&slot)),
        }
        loop {
            match slot.wait() {
                Wake::Lead => self.shared.lead(Leader::Blocked(&slot)),
                Wake::Done(outcome) => return outcome,
            }
        }
    }

    /// Cuts: operations inserted from now on belong to transaction `next`. The caller guarantees
    /// that no [`Log::insert`] runs.
    pub fn cut(&self, next: Generation) -> Cut {
        let mut fresh = self.shared.fresh_context();
        fresh.generation = next;
        let mut list = self.shared.list.lock();
        let mut ring = self.shared.ring.lock();
        let context = std::mem::replace(&mut list.current, fresh);
        debug_assert!(context.generation < next, "{next:?} follows {:?}", context.generation);
        let position = ring.cut(context.generation, list.last);
        list.push_requested = false;
        if !context.is_empty() {
            list.closed.push_back(context);
        }
        Cut { position, last: list.last }
    }

    /// The superblock of `generation`, which carries its [`Cut::position`], is durable. Drops the
    /// closed contexts that it covers, finishes those who wait for them, and frees the ring before
    /// the cut. If a push waited for room, a waiter or the worker tries again.
    ///
    /// Whoever was asked for a commit must either commit, so that this is called, or
    /// [abort](Log::abort).
    pub fn super_committed(&self, generation: Generation) {
        self.shared.super_committed(generation);
    }

    /// Nothing becomes durable any more: everybody who waits gets `error`, and so does every later
    /// call. The first error stays.
    pub fn abort(&self, error: LogError) {
        self.shared.fail(error);
    }

    /// Why the log is dead, if it is.
    pub fn error(&self) -> Option<LogError> {
        if !self.shared.dead.load(Ordering::Acquire) {
            return None;
        }
        self.shared.group.lock().error.clone()
    }

    /// How long the stages of all requests took so far. Empty without the feature `stage-times`.
    pub fn stage_times(&self) -> Vec<StageTime> {
        self.shared.stages.report()
    }

    /// Counters, and what is in the list and the ring now.
    pub fn statistics(&self) -> LogStatistics {
        let mut statistics = *self.shared.counters.lock();
        {
            let list = self.shared.list.lock();
            statistics.operations = list.last.0;
            statistics.throttle_waits = list.throttle_waits;
            statistics.context_bytes = list.entry_bytes();
            statistics.context_items = list.contexts().map(|context| context.items() as u64).sum();
        }
        statistics.immediate = self.shared.immediate.load(Ordering::Relaxed);
        {
            let ring = self.shared.ring.lock();
            statistics.ring_blocks_used = ring.used();
            statistics.wraps = ring.wraps;
        }
        statistics
    }

    /// For tests that look at steps which callers cannot tell apart.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn shared_for_tests(&self) -> &Shared {
        &self.shared
    }

    /// Ends the worker threads. What is not durable yet never will be: whoever waits for it gets
    /// [`LogError::Stopped`]. On return the log doesn't use the device any more. Not for callbacks.
    pub fn stop(&self) {
        self.shared.fail(LogError::Stopped);
        {
            // Before the workers: one of them may have been appointed and not told yet.
            let mut group = self.shared.group.lock();
            while group.is_busy() {
                self.shared.left.wait(&mut group);
            }
        }
        self.shared.worker.send(|signals| signals.stop = true);
        let workers = std::mem::take(&mut *self.workers.lock());
        for worker in workers {
            // A panic in the worker was a panic in a callback; it has been reported.
            let _ = worker.join();
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.stop();
    }
}
