//! [`Log`]: what operations, fsyncs and transaction commits call.
//!
//! Each function says which part of [`LogCore`] does the work. An fsync enters at
//! [`Log::wait_durable_since`] or [`Log::on_durable_since`], registers, and goes on in `lead.rs`.
use crate::cache_aligned::CacheAligned;
use crate::checkpoint::{CheckpointWriter, Cut};
use crate::data::{DataQueue, DataWrite};
use crate::early_wake_up;
use crate::error::LogError;
use crate::group::{
    DurableCallback, Leader, Registered, Successor, Waiter, WaiterSlot, Waiters, WakeReason,
};
use crate::item_list::ItemList;
use crate::item_list::batch::Batch;
use crate::lead::lead;
use crate::log_core::LogCore;
use crate::options::{CallerLeads, CommitRequest, LogOptions, LogStart};
use crate::stages::{Ending, RequestTimer, StageTime, Stages};
use crate::statistics::LogStatistics;
use crate::worker;
use crate::worker_signal::{WORKERS, WorkerSignal};
use cairn_blockdev::BlockDevice;
use cairn_environment::atomic::AtomicU64;
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, assert_may_block, thread};
use cairn_format::{Generation, Geometry, LogSeq, VolumeId};
use std::cell::Cell;
use std::sync::Arc;

/// The log of a mounted volume.
///
/// ```
/// use cairn_blockdev::{BlockDevice, MemoryDevice};
/// use cairn_environment::atomic::AtomicU64;
/// use cairn_format::{
///     EntryFlags, Generation, Geometry, InodeNumber, ItemKind, Key, LogPosition, TREE_FILES,
///     VolumeId,
/// };
/// use cairn_log::{Batch, Log, LogOptions, LogStart};
/// use std::sync::Arc;
///
/// let geometry = Geometry::for_size(64 << 20, None).expect("large enough");
/// let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(64 << 20));
/// let start = LogStart {
///     epoch: 1,
///     position: LogPosition { block: 0, sequence: 1 },
///     generation: Generation(2),
/// };
/// let next_inode = Arc::new(AtomicU64::new(3));
/// let options = LogOptions::for_geometry(&geometry);
/// let volume = VolumeId([1; 16]);
/// let log = Log::new(device, volume, geometry, start, next_inode, Box::new(|_| {}), options);
///
/// let mut batch = Batch::new();
/// let key = Key::new(InodeNumber(7), ItemKind::Symlink, 0);
/// batch.put(TREE_FILES, key, b"target", EntryFlags::default());
/// let sequence = log.insert(&mut batch);
/// log.wait_durable(sequence)?;
/// assert!(log.durable() >= sequence);
/// log.stop();
/// # Ok::<(), cairn_log::LogError>(())
/// ```
pub struct Log {
    pub(crate) core: Arc<LogCore>,
    workers: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl Log {
    /// The log of a volume that is being mounted, and its worker threads unless it is read-only.
    /// Since it flushes from several threads, and a device reports a failure to only one of them,
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
        let core = Arc::new(LogCore {
            list: ItemList::new(
                start.generation,
                options.background_push_bytes,
                options.hard_limit_bytes,
            ),
            data: DataQueue::new(Arc::clone(&device)),
            checkpoints: CheckpointWriter::new(
                device,
                volume,
                geometry,
                start,
                next_inode,
                options.baselines,
            ),
            waiters: Waiters::new(options.flush),
            worker: CacheAligned(WorkerSignal::new()),
            stages: Stages::new(),
            options,
            commit_request,
        });
        let worker = |_| {
            let core = Arc::clone(&core);
            thread::spawn("cairn-log", move || worker::run(&core))
        };
        let workers = (0..if options.read_only { 0 } else { WORKERS }).map(worker).collect();
        Arc::new(Self { core, workers: Mutex::new(Rank::LEAF, workers) })
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
        let list = &self.core.list;
        let inserted = self.core.options.baselines.insert(list, batch);
        let (sequence, push) = inserted.unwrap_or_else(|| list.insert(batch));
        if push {
            self.core.wake_to_push();
        }
        sequence
    }

    /// As [`Log::insert`], for an operation whose items refer to data that is not written yet: it
    /// is written together with the checkpoint that holds them, or by [`Log::write_data`]. The
    /// operation counts as durable when its data is, or when that was tried and failed, which is
    /// for the owner of the [`crate::DataTicket`]s to find out.
    pub fn insert_with_data(&self, batch: &mut Batch, data: Vec<DataWrite>) -> LogSeq {
        debug_assert!(!batch.is_empty(), "data belongs to items");
        self.core.data.add(data);
        self.insert(batch)
    }

    /// Writes the data of all operations so far that is not written yet, and waits for what is
    /// under way. A commit does so between its cut and its first flush.
    ///
    /// # Errors
    /// The log is dead: data that was queued may have been thrown away, so no superblock may
    /// follow.
    pub fn write_data(&self) -> Result<(), LogError> {
        self.core.data.write_queued()?;
        self.error().map_or(Ok(()), Err)
    }

    /// Blocks of data that are not written yet.
    pub fn unwritten_blocks(&self) -> u64 {
        self.core.data.blocks()
    }

    /// Data writes that failed, since the log was made. A caller that makes other files' data
    /// durable compares it before and after.
    pub fn data_losses(&self) -> u64 {
        self.core.data.losses()
    }

    /// The last operation inserted; 0 if there was none.
    pub fn last(&self) -> LogSeq {
        self.core.list.last()
    }

    /// The last operation that is durable, with all before it.
    pub fn durable(&self) -> LogSeq {
        self.core.waiters.durable()
    }

    /// Waits while the list is too long. Operations call it before they reserve or join, holding no
    /// lock, so none sleeps with what the worker needs that shortens the list.
    ///
    /// # Errors
    /// The log is dead.
    pub fn throttle(&self) -> Result<(), LogError> {
        assert_may_block(None);
        self.core.list.throttle(&self.core.worker);
        self.error().map_or(Ok(()), Err)
    }

    /// Calls `callback` when the operation `target` is durable: at once if it is, otherwise later,
    /// on the thread that makes it durable. If no thread is making anything durable, the calling
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
        let core = &*self.core;
        let waiter = Waiter::Callback(callback, core.stages.register(timer));
        let target = target.min(core.list.last());
        if core.waiters.finds_durable(target) {
            return waiter.finish(Ok(Ending::Immediate), &core.stages);
        }
        match core.waiters.register(target, waiter) {
            Registered::Finished(waiter, outcome) => {
                waiter.finish(outcome.map(|()| Ending::Immediate), &core.stages)
            }
            Registered::Waiting => {}
            Registered::Appointed(successor) => core.wake(Some(successor)),
            Registered::Lead => match leads {
                CallerLeads::UntilSeveralWait => lead(core, Leader::Passing),
                CallerLeads::Once => lead(core, Leader::Once(&Cell::new(false))),
                CallerLeads::Never => core.wake(Some(Successor::Worker)),
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
        let registration = self.core.stages.register(timer);
        let ending = self.wait_for_ending(target)?;
        self.core.stages.finish(&registration, ending);
        Ok(())
    }

    fn wait_for_ending(&self, target: LogSeq) -> Result<Ending, LogError> {
        let core = &*self.core;
        let target = target.min(core.list.last());
        if core.waiters.finds_durable(target) {
            return Ok(Ending::Immediate);
        }
        let slot = Arc::new(WaiterSlot::new());
        match core.waiters.register(target, Waiter::Blocked(Arc::clone(&slot))) {
            Registered::Finished(_, outcome) => return outcome.map(|()| Ending::Immediate),
            Registered::Waiting => {}
            // Only for callbacks; it would be right here, too.
            Registered::Appointed(successor) => core.wake(Some(successor)),
            Registered::Lead => lead(core, Leader::Blocked(&slot)),
        }
        loop {
            match slot.wait() {
                WakeReason::Lead => lead(core, Leader::Blocked(&slot)),
                WakeReason::Done(outcome) => return outcome,
            }
        }
    }

    /// Cuts: operations inserted from now on belong to transaction `next`. The caller guarantees
    /// that no [`Log::insert`] runs.
    pub fn cut(&self, next: Generation) -> Cut {
        self.core.checkpoints.cut(&self.core.list, next)
    }

    /// The superblock of `generation`, which carries its [`Cut::position`], is durable. Drops the
    /// closed contexts that it covers, finishes the requests that wait for them, and frees the ring
    /// before the cut. If a push waited for room, a waiter or the worker tries again.
    ///
    /// An owner that was asked for a commit must either commit, so that this is called, or
    /// [abort](Log::abort).
    pub fn super_committed(&self, generation: Generation) {
        early_wake_up::super_committed(&self.core, generation);
    }

    /// Nothing becomes durable any more: each request that waits gets `error`, and so does every
    /// later call. The first error stays.
    pub fn abort(&self, error: LogError) {
        self.core.fail(error);
    }

    /// Why the log is dead, if it is.
    pub fn error(&self) -> Option<LogError> {
        self.core.waiters.error()
    }

    /// How long the stages of all requests took so far.
    pub fn stage_times(&self) -> Vec<StageTime> {
        self.core.stages.report()
    }

    /// Counters, and what is in the list and the ring now.
    pub fn statistics(&self) -> LogStatistics {
        let mut statistics = LogStatistics::default();
        self.core.waiters.count_into(&mut statistics);
        self.core.list.count_into(&mut statistics);
        self.core.checkpoints.count_into(&mut statistics);
        statistics
    }

    /// Ends the worker threads. What is not durable yet never will be: requests that wait for it
    /// get [`LogError::Stopped`]. On return the log doesn't use the device any more. Not for
    /// callbacks.
    pub fn stop(&self) {
        self.core.fail(LogError::Stopped);
        // Before the workers: one of them may have been appointed and not woken yet.
        self.core.waiters.wait_until_idle();
        self.core.worker.send(|signals| signals.stop = true);
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
