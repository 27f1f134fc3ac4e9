//! Data that travels with the group: an fsync of little data hands its unwritten blocks to the log
//! together with the items that describe them, and the leader that writes the checkpoint writes
//! them beside it.
//!
//! States of a write: *queued* → *under way* (a thread took it, in a [`DataBatch`]) → completed, or
//! *lost* (it failed, and failed again on its own). A [`DataTicket`] reports to the file how its
//! writes ended.
//!
//! Invariants:
//! - A write is queued before the items that refer to it enter the list. So a thread that takes a
//!   context out of the list finds its data queued, under way, or done; and nothing counts as
//!   written before [`DataQueue::write`] returned, which waits for what other threads took before.
//! - A transaction's superblock is written after all data of its operations has settled: its freed
//!   blocks, which a write under way may still hit, are pinned until then.
//! - No checkpoint calls data that was lost `NEW_DATA`: replay would end there, and with it what
//!   other fsyncs were acknowledged for. Blocks that were lost count as such until their
//!   transaction is durable; until then only items of that transaction carry the mark for them.
//!
//! Lock: a leaf around the queue; a ticket has its own. None is held during device I/O.
use crate::cache_aligned::CacheAligned;
use crate::error::LogError;
use cairn_blockdev::{BlockDevice, DeviceError, SetWrite, SharedBlocks};
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_format::{BlockRange, EntryFlags, Extent, Generation, ItemKind};
use std::sync::Arc;

/// Reports how the writes of a file's data ended that travels with a group.
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
    /// The content; it does not change meanwhile.
    pub data: SharedBlocks,
    /// Transaction of the operation.
    pub generation: Generation,
    /// Learns how the write ended.
    pub ticket: Arc<DataTicket>,
}

/// Blocks whose extent is logged, but whose data never got there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LostBlocks {
    generation: Generation,
    range: BlockRange,
}

impl LostBlocks {
    fn overlaps(&self, range: BlockRange) -> bool {
        self.range.start < range.end() && range.start < self.range.end()
    }
}

/// The flags that an entry gets in a checkpoint: without `NEW_DATA` where `lost` blocks are
/// concerned.
pub(crate) fn flags_without(
    lost: &[LostBlocks],
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

/// Writes that one thread took and has to [write](DataQueue::write). If that thread panics with
/// them, no other waits for them for ever.
pub(crate) struct DataBatch<'q> {
    queue: &'q DataQueue,
    number: u64,
    /// By address.
    writes: Vec<DataWrite>,
}

impl DataBatch<'_> {
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

impl Drop for DataBatch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut unsettled = self.queue.unsettled.lock();
            unsettled.abandoned |= unsettled.under_way.contains(&self.number);
            self.queue.settled.notify_all();
        }
    }
}

#[derive(Default)]
struct UnsettledData {
    queued: Vec<DataWrite>,
    next_number: u64,
    /// Batches under way.
    under_way: Vec<u64>,
    /// Blocks queued or under way.
    blocks: u64,
    lost: Vec<LostBlocks>,
    /// Writes ever lost.
    losses: u64,
    /// A thread panicked with a batch under way: how its writes ended will never be known.
    abandoned: bool,
    /// The log is dead: nothing more is queued.
    dead: bool,
}

/// Data writes that are not settled.
pub(crate) struct DataQueue {
    unsettled: CacheAligned<Mutex<UnsettledData>>,
    settled: Condvar,
    device: Arc<dyn BlockDevice>,
}

impl DataQueue {
    pub(crate) fn new(device: Arc<dyn BlockDevice>) -> Self {
        let unsettled = Mutex::new(Rank::LEAF, UnsettledData::default());
        Self { unsettled: CacheAligned(unsettled), settled: Condvar::new(), device }
    }

    /// Queues data, unless the log is dead.
    pub(crate) fn add(&self, writes: Vec<DataWrite>) {
        let mut unsettled = self.unsettled.lock();
        if !unsettled.dead {
            unsettled.blocks += writes.iter().map(|write| write.range.blocks).sum::<u64>();
            unsettled.queued.extend(writes);
        }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.unsettled.lock().blocks
    }

    pub(crate) fn losses(&self) -> u64 {
        self.unsettled.lock().losses
    }

    /// The blocks that count as lost now.
    pub(crate) fn lost(&self) -> Vec<LostBlocks> {
        self.unsettled.lock().lost.clone()
    }

    /// What is queued belongs to the caller, which must [write](Self::write) it.
    pub(crate) fn take(&self) -> DataBatch<'_> {
        let mut unsettled = self.unsettled.lock();
        let number = unsettled.next_number;
        unsettled.next_number += 1;
        let mut writes = std::mem::take(&mut unsettled.queued);
        unsettled.under_way.push(number);
        drop(unsettled);
        writes.sort_unstable_by_key(|write| write.range.start);
        DataBatch { queue: self, number, writes }
    }

    /// Writes `batch`, and beside it what is in `others`; settles the batch and waits for what
    /// other threads took before. Calls `meanwhile` while the device works.
    ///
    /// # Errors
    /// One of `others` could not be written, or a thread panicked that had taken data.
    pub(crate) fn write(
        &self,
        batch: DataBatch<'_>,
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
                // Which write of the run failed is not known: each again, alone.
                let again = |_| self.device.write(write.range.start.offset_bytes(), &[&write.data]);
                let result = result.clone().or_else(again);
                if let Err(error) = &result {
                    tracing::debug!("file data could not be written: {error}");
                    lost.push(LostBlocks { generation: write.generation, range: write.range });
                }
                write.ticket.settle(result);
            }
        }
        self.settle(&batch, lost);
        self.wait_for_others()?;
        Ok(results.into_iter().collect::<Result<(), _>>()?)
    }

    /// Writes what is queued; on return everything that was queued before has settled.
    pub(crate) fn write_queued(&self) -> Result<(), LogError> {
        self.write(self.take(), Vec::new(), &mut || {})
    }

    fn settle(&self, batch: &DataBatch<'_>, lost: Vec<LostBlocks>) {
        let mut unsettled = self.unsettled.lock();
        unsettled.under_way.retain(|number| *number != batch.number);
        unsettled.blocks -= batch.writes.iter().map(|write| write.range.blocks).sum::<u64>();
        unsettled.losses += lost.len() as u64;
        unsettled.lost.extend(lost);
        self.settled.notify_all();
    }

    /// Waits until everything that other threads took before is settled, too.
    fn wait_for_others(&self) -> Result<(), LogError> {
        let mut unsettled = self.unsettled.lock();
        let next = unsettled.next_number;
        while !unsettled.abandoned && unsettled.under_way.iter().any(|number| *number < next) {
            self.settled.wait(&mut unsettled);
        }
        if unsettled.abandoned {
            Err(LogError::Aborted("a thread that wrote data ended with a panic".into()))
        } else {
            Ok(())
        }
    }

    /// The superblock of `generation` is durable: no checkpoint to come will name blocks that it
    /// lost.
    pub(crate) fn super_committed(&self, generation: Generation) {
        self.unsettled.lock().lost.retain(|lost| lost.generation > generation);
    }

    /// The log is dead: forgets what is queued, and what comes.
    pub(crate) fn close(&self) {
        // Dropped after the lock: the memory goes back to its pool.
        let forgotten;
        let mut unsettled = self.unsettled.lock();
        unsettled.dead = true;
        forgotten = std::mem::take(&mut unsettled.queued);
        unsettled.blocks -= forgotten.iter().map(|write| write.range.blocks).sum::<u64>();
    }
}
