//! Data that travels with the group: an fsync of little data hands its unwritten blocks to the log
//! together with the items that describe them, and whoever writes the checkpoint writes them beside
//! it.
//!
//! States of a write: *queued* → *under way* (taken by one thread) → completed, or *lost* (it
//! failed, and failed again on its own). A [`DataTicket`] tells the file what became of its writes.
//!
//! Invariants:
//! - A write is queued before the items that refer to it enter the list. So whoever takes a context
//!   out of the list finds its data queued, under way, or done; and nothing counts as written
//!   before [`DataQueue::wait_for_others`] returned.
//! - A transaction's superblock is written after all data of its operations has settled: its freed
//!   blocks, which a write under way may still hit, are pinned until then.
//! - No checkpoint calls data that was lost `NEW_DATA`: replay would end there, and with it what
//!   others were told is durable. Blocks that were lost count as such until their transaction is
//!   durable; until then only items of that transaction carry the mark for them.
//!
//! Lock: a leaf around the queue; a ticket has its own. None is held during device I/O.
use crate::error::LogError;
use crate::shared::Shared;
use cairn_blockdev::{DeviceError, SetWrite, SharedBlocks};
use cairn_environment::Rank;
use cairn_environment::atomic::Ordering;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_format::{BlockRange, EntryFlags, Extent, Generation, ItemKind};
use std::sync::Arc;

/// What became of a file's data that travels with a group.
///
/// ```
/// let ticket = cairn_log::DataTicket::new(1);
/// assert!(ticket.outcome().is_none());
/// ```
pub struct DataTicket {
    state: Mutex<TicketState>,
}

struct TicketState {
    writes_left: usize,
    error: Option<DeviceError>,
}

impl DataTicket {
    /// For `writes` writes.
    pub fn new(writes: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(Rank::LEAF, TicketState { writes_left: writes, error: None }),
        })
    }

    /// How it ended, when all writes have; the first error if there was one.
    pub fn outcome(&self) -> Option<Result<(), DeviceError>> {
        let state = self.state.lock();
        (state.writes_left == 0).then(|| state.error.clone().map_or(Ok(()), Err))
    }

    fn settle(&self, result: Result<(), DeviceError>) {
        let mut state = self.state.lock();
        state.writes_left -= 1;
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
    }
}

/// One run of blocks to be written.
pub struct DataWrite {
    /// Where.
    pub range: BlockRange,
    /// The content; nobody changes it meanwhile.
    pub data: SharedBlocks,
    /// Transaction of the operation.
    pub generation: Generation,
    /// Hears what became of it.
    pub ticket: Arc<DataTicket>,
}

/// Blocks whose extent is logged, but whose data never got there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lost {
    generation: Generation,
    range: BlockRange,
}

impl Lost {
    fn overlaps(&self, range: BlockRange) -> bool {
        self.range.start < range.end() && range.start < self.range.end()
    }
}

/// The flags that an entry gets in a checkpoint: without `NEW_DATA` where `lost` blocks are
/// concerned.
pub(crate) fn flags_without(
    lost: &[Lost],
    kind: u8,
    flags: EntryFlags,
    value: &[u8],
) -> EntryFlags {
    if lost.is_empty() || kind != ItemKind::Extent as u8 || !flags.contains(EntryFlags::NEW_DATA) {
        return flags;
    }
    match Extent::decode(value) {
        Ok(extent) if lost.iter().any(|lost| lost.overlaps(extent.range())) => {
            EntryFlags(flags.0 & !EntryFlags::NEW_DATA.0)
        }
        _ => flags,
    }
}

/// Writes that one thread took.
pub(crate) struct DataBatch {
    number: u64,
    /// By address.
    writes: Vec<DataWrite>,
}

impl DataBatch {
    /// Neighbours on the device, as index ranges of `writes`.
    fn runs(&self) -> Vec<std::ops::Range<usize>> {
        let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
        for (index, write) in self.writes.iter().enumerate() {
            match runs.last_mut() {
                Some(run) if self.writes[index - 1].range.end() == write.range.start => {
                    run.end = index + 1
                }
                _ => runs.push(index..index + 1),
            }
        }
        runs
    }

    fn set_write(&self, run: &std::ops::Range<usize>) -> SetWrite<'_> {
        let writes = &self.writes[run.clone()];
        SetWrite {
            offset_bytes: writes[0].range.start.offset_bytes(),
            buffers: writes.iter().map(|write| &write.data[..]).collect(),
        }
    }
}

#[derive(Default)]
struct Queue {
    queued: Vec<DataWrite>,
    next_number: u64,
    /// Batches under way.
    under_way: Vec<u64>,
    /// Blocks queued or under way.
    blocks: u64,
    lost: Vec<Lost>,
    /// Writes ever lost.
    losses: u64,
    /// A thread panicked with a batch under way: what became of it will never be known.
    abandoned: bool,
}

struct Watch<'a> {
    queue: &'a DataQueue,
    number: u64,
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut queue = self.queue.queue.lock();
            queue.abandoned |= queue.under_way.contains(&self.number);
            self.queue.settled.notify_all();
        }
    }
}

/// Data writes that are not settled.
pub(crate) struct DataQueue {
    queue: Mutex<Queue>,
    settled: Condvar,
}

impl DataQueue {
    pub(crate) fn new() -> Self {
        Self { queue: Mutex::new(Rank::LEAF, Queue::default()), settled: Condvar::new() }
    }

    pub(crate) fn add(&self, writes: Vec<DataWrite>) {
        let mut queue = self.queue.lock();
        queue.blocks += writes.iter().map(|write| write.range.blocks).sum::<u64>();
        queue.queued.extend(writes);
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.queue.lock().blocks
    }

    pub(crate) fn losses(&self) -> u64 {
        self.queue.lock().losses
    }

    pub(crate) fn lost(&self) -> Vec<Lost> {
        self.queue.lock().lost.clone()
    }

    /// What is queued belongs to the caller, who must [settle](Shared::settle) it.
    pub(crate) fn take(&self) -> DataBatch {
        let mut queue = self.queue.lock();
        let number = queue.next_number;
        queue.next_number += 1;
        let mut writes = std::mem::take(&mut queue.queued);
        queue.under_way.push(number);
        drop(queue);
        writes.sort_unstable_by_key(|write| write.range.start);
        DataBatch { number, writes }
    }

    /// Waits until everything that others took before is settled, too.
    fn wait_for_others(&self) -> Result<(), LogError> {
        let mut queue = self.queue.lock();
        let next = queue.next_number;
        while !queue.abandoned && queue.under_way.iter().any(|number| *number < next) {
            self.settled.wait(&mut queue);
        }
        if queue.abandoned {
            Err(LogError::Aborted("a thread that wrote data ended with a panic".into()))
        } else {
            Ok(())
        }
    }

    /// While this lives, a panic lets nobody wait for `batch` for ever.
    pub(crate) fn watch(&self, batch: &DataBatch) -> impl Sized + use<'_> {
        Watch { queue: self, number: batch.number }
    }

    fn settle(&self, batch: &DataBatch, lost: Vec<Lost>) {
        let mut queue = self.queue.lock();
        queue.under_way.retain(|number| *number != batch.number);
        queue.blocks -= batch.writes.iter().map(|write| write.range.blocks).sum::<u64>();
        queue.losses += lost.len() as u64;
        queue.lost.extend(lost);
        self.settled.notify_all();
    }

    /// The superblock of `generation` is durable: no checkpoint to come will name blocks that it
    /// lost.
    pub(crate) fn super_committed(&self, generation: Generation) {
        self.queue.lock().lost.retain(|lost| lost.generation > generation);
    }

    /// Nothing more is written: the log is dead.
    pub(crate) fn forget(&self) {
        // Dropped after the lock: the memory goes back to its pool.
        let forgotten;
        let mut queue = self.queue.lock();
        forgotten = std::mem::take(&mut queue.queued);
        queue.blocks -= forgotten.iter().map(|write| write.range.blocks).sum::<u64>();
    }
}

impl Shared {
    /// Writes `batch`, and beside it what is in `others`; settles the batch and waits for what
    /// others took before. Calls `meanwhile` while the device works.
    ///
    /// # Errors
    /// One of `others` could not be written, or a thread panicked that had taken data.
    pub(crate) fn write_data(
        &self,
        batch: &DataBatch,
        others: Vec<SetWrite<'_>>,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), LogError> {
        let runs = batch.runs();
        let count = others.len();
        let mut set = others;
        set.extend(runs.iter().map(|run| batch.set_write(run)));
        let mut results =
            if set.is_empty() { Vec::new() } else { self.device.write_set_while(&set, meanwhile) };
        let data_results = results.split_off(count);
        drop(set);
        let mut lost = Vec::new();
        for (run, result) in runs.into_iter().zip(data_results) {
            for write in &batch.writes[run] {
                // Whose fault it was is not known: each again, alone.
                let again = |_| self.device.write(write.range.start.offset_bytes(), &[&write.data]);
                let result = result.clone().or_else(again);
                if let Err(error) = &result {
                    tracing::debug!("file data could not be written: {error}");
                    lost.push(Lost { generation: write.generation, range: write.range });
                }
                write.ticket.settle(result);
            }
        }
        self.data.settle(batch, lost);
        self.data.wait_for_others()?;
        Ok(results.into_iter().collect::<Result<(), _>>()?)
    }

    /// Writes what is queued; on return everything that was queued before has settled.
    pub(crate) fn write_queued_data(&self) -> Result<(), LogError> {
        let batch = self.data.take();
        let _watch = self.data.watch(&batch);
        self.write_data(&batch, Vec::new(), &mut || {})
    }

    /// Queues data, unless nothing is written any more.
    pub(crate) fn queue_data(&self, writes: Vec<DataWrite>) {
        if !self.dead.load(Ordering::Acquire) {
            self.data.add(writes);
        }
    }
}
