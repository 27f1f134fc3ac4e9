//! Writing the list to the ring. Only the leader gets here.
use crate::context::Context;
use crate::error::{CommitReason, LogError};
use crate::ring::Place;
use crate::shared::Shared;
use crate::stages::RoundTimes;
use cairn_environment::atomic::Ordering;
use cairn_environment::clock;
use cairn_format::{BLOCK_SIZE, CheckpointHeader, LogSeq};
use std::time::Duration;

/// A push found no room.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoRoom {
    /// Calls of `super_committed` that the decision knew of.
    pub(crate) commits: u64,
    /// What to ask for, if a commit under way will not do.
    pub(crate) request: Option<CommitReason>,
}

/// Contexts taken out of the list, with the places of their checkpoints.
struct Taken {
    contexts: Vec<(Context, Place)>,
    /// The last operation in them.
    last: LogSeq,
    flushed_sequence: u64,
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

    /// Writes everything in the list to the ring, without a flush:
    /// 1. take the contexts and give each its place, in one step, so that a cut sees either both or neither;
    /// 2. format the checkpoints, holding no lock;
    /// 3. write them, oldest first and side by side: one write, or two where the ring ends;
    /// 4. note them as written.
    ///
    /// A crash before the next flush leaves any part of them on the device; replay takes the checkpoints that are whole.
    pub(crate) fn push(&self) -> Result<Option<NoRoom>, LogError> {
        let taken = match self.take_contexts() {
            Ok(taken) => taken,
            Err(no_room) => return Ok(Some(no_room)),
        };
        self.shrunk.notify_all();
        if let (Some((_, first)), Some((_, newest))) = (taken.contexts.first(), taken.contexts.last()) {
            let (first_block, newest_sequence) = (first.ring_block, newest.sequence);
            let checkpoints = self.format(&taken);
            let begin = clock::now_monotonic();
            self.recycle(taken.contexts.into_iter().map(|(context, _)| context));
            self.write(first_block, &checkpoints)?;
            let write_time_ns = nanoseconds(begin.elapsed());
            self.ring.lock().wrote(newest_sequence, taken.last);
            self.count(|counters| counters.write_time_ns += write_time_ns);
            tracing::trace!(sequence = newest_sequence, last = %taken.last, "checkpoints written");
        }
        if let Some(reason) = taken.relief {
            (self.commit_request)(reason);
        }
        Ok(None)
    }

    fn take_contexts(&self) -> Result<Taken, NoRoom> {
        let mut fresh = self.fresh_context();
        let mut list = self.list.lock();
        let mut ring = self.ring.lock();
        let blocks = list.contexts().map(Context::blocks);
        let (needed, largest) = blocks.fold((0, 0), |(sum, largest): (u64, u64), blocks| (sum + blocks, largest.max(blocks)));
        let too_large = largest > self.checkpoint_blocks_max();
        if too_large || needed > ring.free() {
            let reason = if too_large { CommitReason::ContextTooLarge } else { CommitReason::RingFull };
            let request = ring.request_room(list.current.blocks()).then_some(reason);
            return Err(NoRoom { commits: ring.commits, request });
        }
        let mut taken = Taken { contexts: Vec::new(), last: list.last, flushed_sequence: ring.flushed_sequence, relief: None };
        if needed == 0 {
            // The operations since the last push undid each other.
            let written_sequence = ring.written_sequence;
            ring.wrote(written_sequence, list.last);
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

    fn format(&self, taken: &Taken) -> Vec<Vec<u8>> {
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
            };
            context.format().finish(&header, self.volume, place.ring_block)
        };
        let checkpoints: Vec<Vec<u8>> = taken.contexts.iter().map(format).collect();
        self.count(|counters| {
            counters.checkpoints += checkpoints.len() as u64;
            counters.blocks_written += checkpoints.iter().map(|bytes| (bytes.len() / BLOCK_SIZE) as u64).sum::<u64>();
            counters.items_logged += taken.contexts.iter().map(|(context, _)| context.items() as u64).sum::<u64>();
            counters.bytes_logged += taken.contexts.iter().map(|(context, _)| context.entry_bytes() as u64).sum::<u64>();
        });
        checkpoints
    }

    /// Writes `checkpoints` one behind the other from `first_block` of the ring on.
    fn write(&self, first_block: u64, checkpoints: &[Vec<u8>]) -> Result<(), LogError> {
        let ring = self.geometry.log();
        let mut before_end_bytes = (ring.blocks - first_block) as usize * BLOCK_SIZE;
        let (mut here, mut wrapped): (Vec<&[u8]>, Vec<&[u8]>) = (Vec::new(), Vec::new());
        for bytes in checkpoints {
            let (now, later) = bytes.split_at(bytes.len().min(before_end_bytes));
            before_end_bytes -= now.len();
            here.extend((!now.is_empty()).then_some(now));
            wrapped.extend((!later.is_empty()).then_some(later));
        }
        self.device.write(ring.start.offset_bytes() + first_block * BLOCK_SIZE as u64, &here)?;
        if !wrapped.is_empty() {
            self.device.write(ring.start.offset_bytes(), &wrapped)?;
        }
        Ok(())
    }

    /// Flushes if anything was written since the last flush. Returns the last operation that is durable then. `always`
    /// asks for a flush in any case.
    pub(crate) fn flush(&self, always: bool, times: &mut RoundTimes) -> Result<LogSeq, LogError> {
        let (sequence, last, needed) = {
            let ring = self.ring.lock();
            (ring.written_sequence, ring.written_last, ring.needs_flush())
        };
        let began = (needed || always).then(clock::now_monotonic);
        if let Some(begin) = began {
            self.device.flush()?;
            let flush_time_ns = nanoseconds(begin.elapsed());
            self.ring.lock().flushed_sequence = sequence;
            self.count(|counters| {
                counters.flushes += 1;
                counters.flush_time_ns += flush_time_ns;
            });
        }
        times.flushed(began);
        Ok(last)
    }
}
