//! Writing the list to the ring, which only the leader does, and flushing it.
use crate::context::Context;
use crate::data::{DataBatch, Lost};
use crate::error::{CommitReason, LogError};
use crate::ring::Place;
use crate::shared::Shared;
use crate::stages::RoundTimes;
use cairn_blockdev::{BlockBuffer, SetWrite};
use cairn_environment::atomic::Ordering;
use cairn_environment::clock;
use cairn_format::{BLOCK_SIZE, CheckpointHeader, Generation, LogSeq};
use std::time::Duration;

/// A push found no room.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoRoom {
    /// Calls of `super_committed` that the decision knew of.
    pub(crate) commits: u64,
    pub(crate) reason: CommitReason,
    /// Whether to ask for a commit: one under way will not do.
    pub(crate) request: bool,
}

/// Contexts taken out of the list, with the places of their checkpoints.
struct Taken {
    contexts: Vec<(Context, Place)>,
    /// The last operation in them.
    last: LogSeq,
    flushed_sequence: u64,
    superblock: Generation,
    relief: Option<CommitReason>,
}

pub(crate) fn nanoseconds(interval: Duration) -> u64 {
    u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX)
}

impl Shared {
    /// Longest checkpoint, in blocks.
    fn checkpoint_blocks_max(&self) -> u64 {
        const LENGTH_FIELD_BLOCKS: u64 = (1 << 30) / BLOCK_SIZE as u64;
        (self.geometry.log_blocks / 2).min(LENGTH_FIELD_BLOCKS)
    }

    /// Writes everything in the list to the ring, and the data that came with it, without a flush:
    /// 1. take the contexts and give each its place, in one step, so that a cut sees either both or
    ///    neither;
    /// 2. take the data, which was queued before the items that refer to it;
    /// 3. format the checkpoints, holding no lock;
    /// 4. write data and checkpoints side by side, call `meanwhile` while the device works, and
    ///    wait for all of it, also for data that a commit took over;
    /// 5. if data could not be written, the checkpoints are not what they should be: write them
    ///    again;
    /// 6. note them as written.
    ///
    /// A crash before the next flush leaves any part of them on the device; replay takes the
    /// checkpoints that are whole, and whose data is there.
    pub(crate) fn push(&self, meanwhile: &mut dyn FnMut()) -> Result<Option<NoRoom>, LogError> {
        let taken = match self.take_contexts() {
            Ok(taken) => taken,
            Err(no_room) => return Ok(Some(no_room)),
        };
        let data = self.data.take();
        let _watch = self.data.watch(&data);
        self.shrunk.notify_all();
        let begin = clock::now_monotonic();
        self.write_together(&taken, &data, meanwhile)?;
        if let Some((_, newest)) = taken.contexts.last() {
            let write_time_ns = nanoseconds(begin.elapsed());
            self.ring.lock().wrote(newest.sequence, taken.last);
            self.count(|counters| counters.write_time_ns += write_time_ns);
            tracing::trace!(sequence = newest.sequence, last = %taken.last, "checkpoints written");
        } else {
            // Their data may have been under way until now.
            let mut ring = self.ring.lock();
            let written_sequence = ring.written_sequence;
            ring.wrote(written_sequence, taken.last);
        }
        self.recycle(taken.contexts.into_iter().map(|(context, _)| context));
        if let Some(reason) = taken.relief {
            (self.commit_request)(reason);
        }
        Ok(None)
    }

    /// Steps 3 to 5.
    ///
    /// While blocks count as lost, a checkpoint goes after its data, with a flush between them: its
    /// entries that name lost blocks don't have their data verified, so all data in them must be
    /// durable before. The place and the length of a checkpoint stay what they were; torn between
    /// the two versions, its checksum fails, and nothing in it was acknowledged.
    fn write_together(
        &self,
        taken: &Taken,
        data: &DataBatch,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), LogError> {
        // Decided once: a superblock may become durable meanwhile, and with it blocks no longer
        // count as lost.
        let data_first = !self.data.lost().is_empty();
        if data_first {
            self.write_data(data, Vec::new(), meanwhile)?;
        } else {
            let checkpoints = self.format(taken, &[]);
            self.write_data(data, self.checkpoint_writes(taken, &checkpoints), meanwhile)?;
        }
        self.count_checkpoints(taken);
        let lost = self.data.lost();
        if taken.contexts.is_empty() || (lost.is_empty() && !data_first) {
            return Ok(());
        }
        self.device.flush()?;
        self.count(|counters| counters.flushes += 1);
        let checkpoints = self.format(taken, &lost);
        for write in self.checkpoint_writes(taken, &checkpoints) {
            self.device.write(write.offset_bytes, &write.buffers)?;
        }
        Ok(())
    }

    fn take_contexts(&self) -> Result<Taken, NoRoom> {
        let mut fresh = self.fresh_context();
        let mut list = self.list.lock();
        let mut ring = self.ring.lock();
        let blocks = list.contexts().map(Context::blocks);
        let (needed, largest) = blocks
            .fold((0, 0), |(sum, largest): (u64, u64), blocks| (sum + blocks, largest.max(blocks)));
        let too_large = largest > self.checkpoint_blocks_max();
        #[cfg(feature = "baselines")]
        let needed = if self.options.commits_only { needed.max(ring.free() + 1) } else { needed };
        if too_large || needed > ring.free() {
            let reason =
                if too_large { CommitReason::ContextTooLarge } else { CommitReason::RingFull };
            let request = ring.request_room(list.current.blocks());
            return Err(NoRoom { commits: ring.commits, reason, request });
        }
        let mut taken = Taken {
            contexts: Vec::new(),
            last: list.last,
            flushed_sequence: ring.flushed_sequence,
            superblock: ring.superblock,
            relief: None,
        };
        if needed == 0 {
            // The operations since the last push undid each other.
            return Ok(taken);
        }
        fresh.generation = list.current.generation;
        let closed = std::mem::take(&mut list.closed);
        let current = std::mem::replace(&mut list.current, fresh);
        list.push_requested = false;
        list.admit(self.options.hard_limit_bytes);
        for context in closed.into_iter().chain([current]).filter(|context| !context.is_empty()) {
            let place = ring.allocate(context.blocks());
            taken.contexts.push((context, place));
        }
        taken.relief = ring.request_relief();
        Ok(taken)
    }

    fn format(&self, taken: &Taken, lost: &[Lost]) -> Vec<BlockBuffer> {
        // Read after the contexts were closed, so it is above every inode number in them.
        let next_inode = self.next_inode.load(Ordering::Acquire);
        let format = |(context, place): &(Context, Place)| {
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

    fn count_checkpoints(&self, taken: &Taken) {
        let sum = |of: fn(&Context) -> u64| {
            taken.contexts.iter().map(|(context, _)| of(context)).sum::<u64>()
        };
        self.count(|counters| {
            counters.checkpoints += taken.contexts.len() as u64;
            counters.blocks_written += sum(Context::blocks);
            counters.items_logged += sum(|context| context.items() as u64);
            counters.bytes_logged += sum(|context| context.entry_bytes() as u64);
        });
    }

    /// The writes that put `checkpoints` one behind the other into the ring: one, or two where the
    /// ring ends.
    fn checkpoint_writes<'a>(
        &self,
        taken: &Taken,
        checkpoints: &'a [BlockBuffer],
    ) -> Vec<SetWrite<'a>> {
        let Some((_, first)) = taken.contexts.first() else { return Vec::new() };
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

    /// Flushes if anything was written since the last flush. Returns the last operation that is
    /// durable then. `always` asks for a flush in any case.
    pub(crate) fn flush(&self, always: bool, times: &mut RoundTimes) -> Result<LogSeq, LogError> {
        let (sequence, last, needed) = {
            let ring = self.ring.lock();
            (ring.written_sequence, ring.written_last, ring.needs_flush())
        };
        let began = (needed || always).then(clock::now_monotonic);
        if let Some(begin) = began {
            self.device.flush()?;
            let flush_time_ns = nanoseconds(begin.elapsed());
            self.ring.lock().flushed(sequence);
            self.count(|counters| {
                counters.flushes += 1;
                counters.flush_time_ns += flush_time_ns;
            });
        }
        times.flushed(began);
        Ok(last)
    }
}
