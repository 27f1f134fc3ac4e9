//! Checkpoints: contexts taken out of the item list, formatted, and put into the ring.
//!
//! States of a checkpoint: *placed* ([`CheckpointWriter::take`] took its context out of the list
//! and gave it its place, in one step) → *written* ([`CheckpointWriter::wrote`]) → *flushed*
//! ([`CheckpointWriter::flush`], if the flush began after the write had completed).
//!
//! Invariants:
//! - Only the leader takes, writes and notes as written, so checkpoints are written in the order of
//!   their sequence numbers, and a flush covers all that were written before it.
//! - A context and its place are taken under the list's and the ring's lock, so that a cut sees
//!   both or neither.
//! - A checkpoint says which one was flushed and which superblock was durable when its context was
//!   taken; replay relies on both.
//!
//! The functions compute and write; the order in which the leader calls them, and what a crash
//! between them leaves, stands in `lead.rs`.
//!
//! Lock discipline: the list's lock (`CIL_CONTEXT`), then the ring's (`LOG_RING`). None is held
//! while anything is formatted, written or flushed.
pub(crate) mod ring;

use crate::baselines::Baselines;
use crate::cache_aligned::CacheAligned;
use crate::data::LostBlocks;
use crate::error::{CommitReason, LogError};
use crate::item_list::ItemList;
use crate::item_list::context::Context;
use crate::options::LogStart;
use crate::statistics::LogStatistics;
use cairn_blockdev::{BlockBuffer, BlockDevice, BlockPool, SetWrite};
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::clock::{self, Monotonic};
use cairn_environment::lock::Mutex;
use cairn_format::{
    BLOCK_SIZE, CheckpointHeader, Generation, Geometry, LogPosition, LogSeq, VolumeId,
};
use ring::{CheckpointPlace, NoRoom, Ring, WrittenCheckpoints};
use std::sync::Arc;
use std::time::Duration;

/// Memory for checkpoints that is kept for later ones.
const UNUSED_BUFFERS_BYTES_MAX: usize = 4 << 20;

/// Where the log stood when a transaction was cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut {
    /// Where replay starts after the transaction's superblock.
    pub position: LogPosition,
    /// The last operation of the transaction.
    pub last: LogSeq,
}

/// Contexts taken out of the list, with the places of their checkpoints.
pub(crate) struct TakenContexts {
    contexts: Vec<(Context, CheckpointPlace)>,
    /// The last operation in them.
    last: LogSeq,
    flushed_sequence: u64,
    superblock: Generation,
    /// Why to ask for a commit, if the ring is filling up.
    pub(crate) relief: Option<CommitReason>,
}

impl TakenContexts {
    /// The operations since the last push undid each other: there is nothing to write.
    pub(crate) fn is_empty(&self) -> bool {
        self.contexts.is_empty()
    }

    /// The contexts, to be used again.
    pub(crate) fn into_contexts(self) -> impl Iterator<Item = Context> {
        self.contexts.into_iter().map(|(context, _)| context)
    }
}

/// What a flush made durable.
pub(crate) struct CompletedFlush {
    /// The last operation that is durable now.
    pub(crate) last: LogSeq,
    /// When the flush began; none was needed without it.
    pub(crate) began: Option<Monotonic>,
}

/// Writes the checkpoints of one log.
pub(crate) struct CheckpointWriter {
    device: Arc<dyn BlockDevice>,
    volume: VolumeId,
    geometry: Geometry,
    epoch: u64,
    next_inode: Arc<AtomicU64>,
    baselines: Baselines,
    ring: CacheAligned<Mutex<Ring>>,
    /// Memory for checkpoints.
    buffers: BlockPool,
}

impl CheckpointWriter {
    /// For a log that starts at `start`.
    pub(crate) fn new(
        device: Arc<dyn BlockDevice>,
        volume: VolumeId,
        geometry: Geometry,
        start: LogStart,
        next_inode: Arc<AtomicU64>,
        baselines: Baselines,
    ) -> Self {
        let ring = Ring::new(geometry.log_blocks, start.position);
        Self {
            device,
            volume,
            geometry,
            epoch: start.epoch,
            next_inode,
            baselines,
            ring: CacheAligned(Mutex::new(Rank::LOG_RING, ring)),
            buffers: BlockPool::new(UNUSED_BUFFERS_BYTES_MAX),
        }
    }

    /// How long the device's flushes take.
    pub(crate) fn flush_time(&self) -> Duration {
        self.device.flush_time()
    }

    /// The last operation that is written.
    pub(crate) fn written_last(&self) -> LogSeq {
        self.ring.lock().written_last
    }

    /// Longest checkpoint, in blocks.
    fn blocks_max(&self) -> u64 {
        const LENGTH_FIELD_BLOCKS: u64 = (1 << 30) / BLOCK_SIZE as u64;
        (self.geometry.log_blocks / 2).min(LENGTH_FIELD_BLOCKS)
    }

    /// Cuts: operations inserted from now on belong to transaction `next`.
    pub(crate) fn cut(&self, list: &ItemList, next: Generation) -> Cut {
        let fresh = list.fresh_context();
        let mut items = list.lock();
        let mut ring = self.ring.lock();
        let generation = items.close_current(fresh, next);
        let last = items.last();
        Cut { position: ring.cut(generation, last), last }
    }

    /// The superblock of `generation` is durable: what lies before its cut is free, and the closed
    /// contexts that it covers leave the list. Returns them, and the last operation that it covers,
    /// 0 if it covers none more.
    pub(crate) fn super_committed(
        &self,
        list: &ItemList,
        generation: Generation,
    ) -> (Vec<Context>, LogSeq) {
        let mut items = list.lock();
        let dropped = items.drop_covered(generation);
        (dropped, self.ring.lock().super_committed(generation))
    }

    /// Takes the contexts out of the list and gives each its place, in one step, so that a cut sees
    /// either both or neither.
    pub(crate) fn take(&self, list: &ItemList) -> Result<TakenContexts, NoRoom> {
        let fresh = list.fresh_context();
        let mut items = list.lock();
        let mut ring = self.ring.lock();
        let blocks = items.contexts().map(Context::blocks);
        let (needed, largest) = blocks
            .fold((0, 0), |(sum, largest): (u64, u64), blocks| (sum + blocks, largest.max(blocks)));
        let too_large = largest > self.blocks_max();
        let needed = self.baselines.blocks_asked(needed, ring.free());
        let needs_commit = items.contexts().any(Context::needs_commit);
        if needs_commit || too_large || needed > ring.free() {
            let reason = match (needs_commit, too_large) {
                (true, _) => CommitReason::CommitNeeded,
                (false, true) => CommitReason::ContextTooLarge,
                (false, false) => CommitReason::RingFull,
            };
            let request = if items.current().needs_commit() {
                ring.request_cut()
            } else {
                ring.request_room(items.current().blocks())
            };
            return Err(NoRoom { commits: ring.commits, reason, request });
        }
        let mut taken = TakenContexts {
            contexts: Vec::new(),
            last: items.last(),
            flushed_sequence: ring.flushed_sequence,
            superblock: ring.superblock,
            relief: None,
        };
        if needed == 0 {
            return Ok(taken);
        }
        for context in items.take_all(fresh) {
            let place = ring.allocate(context.blocks());
            taken.contexts.push((context, place));
        }
        taken.relief = ring.request_relief();
        Ok(taken)
    }

    /// The checkpoints of `taken`, whose entries call no data new that was `lost`. Takes no lock of
    /// the log.
    pub(crate) fn format(&self, taken: &TakenContexts, lost: &[LostBlocks]) -> Vec<BlockBuffer> {
        // Read after the contexts were closed, so it is above every inode number in them.
        let next_inode = self.next_inode.load(Ordering::Acquire);
        let format = |(context, place): &(Context, CheckpointPlace)| {
            let header = CheckpointHeader {
                sequence: place.sequence,
                log_epoch: self.epoch,
                generation: context.generation,
                flushed_sequence: taken.flushed_sequence,
                last_operation: context.last,
                next_inode,
                superblock: taken.superblock,
            };
            let mut buffer = self.buffers.take(context.blocks() as usize * BLOCK_SIZE);
            context.format(&mut buffer, lost).finish(&header, self.volume, place.ring_block);
            buffer
        };
        taken.contexts.iter().map(format).collect()
    }

    /// The writes that put `checkpoints` one behind the other into the ring: one, or two where the
    /// ring ends; none for no checkpoint.
    pub(crate) fn writes<'a>(
        &self,
        taken: &TakenContexts,
        checkpoints: &'a [BlockBuffer],
    ) -> Vec<SetWrite<'a>> {
        let first = taken.contexts.first().filter(|_| !checkpoints.is_empty());
        let Some((_, first)) = first else { return Vec::new() };
        let ring = self.geometry.log();
        let mut before_end_bytes = (ring.blocks - first.ring_block) as usize * BLOCK_SIZE;
        let (mut here, mut wrapped): (Vec<&[u8]>, Vec<&[u8]>) = (Vec::new(), Vec::new());
        for bytes in checkpoints {
            let (now, later) = bytes.split_at(bytes.len().min(before_end_bytes));
            before_end_bytes -= now.len();
            here.extend((!now.is_empty()).then_some(now));
            wrapped.extend((!later.is_empty()).then_some(later));
        }
        let start = ring.start.offset_bytes();
        let mut writes = vec![SetWrite {
            offset_bytes: start + first.ring_block * BLOCK_SIZE as u64,
            buffers: here,
        }];
        if !wrapped.is_empty() {
            writes.push(SetWrite { offset_bytes: start, buffers: wrapped });
        }
        writes
    }

    /// Flushes the data that is written, and then writes the checkpoints of `taken`, once more if
    /// they were written beside it. Their entries that name lost blocks don't have their data
    /// verified by a replay, so all data in them must be durable before. The place and the length
    /// of a checkpoint stay what they were; torn between the two versions, its checksum fails, and
    /// nothing in it was acknowledged.
    pub(crate) fn write_after_data(
        &self,
        taken: &TakenContexts,
        lost: &[LostBlocks],
    ) -> Result<(), LogError> {
        self.device.flush()?;
        self.ring.lock().flushes += 1;
        let checkpoints = self.format(taken, lost);
        for write in self.writes(taken, &checkpoints) {
            self.device.write(write.offset_bytes, &write.buffers)?;
        }
        Ok(())
    }

    /// `taken` is written, and all data that came with it.
    pub(crate) fn wrote(&self, taken: &TakenContexts) {
        let mut written = WrittenCheckpoints::default();
        for (context, _) in &taken.contexts {
            written.checkpoints += 1;
            written.blocks += context.blocks();
            written.items += context.items() as u64;
            written.bytes += context.entry_bytes() as u64;
        }
        let newest = taken.contexts.last().map(|(_, place)| place.sequence);
        self.ring.lock().wrote(newest, taken.last, written);
        tracing::trace!(sequence = newest, last = %taken.last, "checkpoints written");
    }

    /// Flushes if anything was written since the last flush, or in any case if `always`.
    pub(crate) fn flush(&self, always: bool) -> Result<CompletedFlush, LogError> {
        let (sequence, last, needed) = {
            let ring = self.ring.lock();
            (ring.written_sequence, ring.written_last, ring.needs_flush())
        };
        let began = (needed || always).then(clock::now_monotonic);
        if began.is_some() {
            self.device.flush()?;
            self.ring.lock().flushed(sequence);
        }
        Ok(CompletedFlush { last, began })
    }

    /// Fills in what the ring counts.
    pub(crate) fn count_into(&self, statistics: &mut LogStatistics) {
        self.ring.lock().count_into(statistics);
    }
}
