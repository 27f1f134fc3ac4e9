//! Where the next checkpoint goes, and which part of the ring still counts.
//!
//! Head and tail count blocks since the log was made and never go back; modulo the ring's length
//! they are positions. What lies between them may be needed by a replay and is not overwritten.
//!
//! Invariants: `tail ≤ head ≤ tail + log_blocks`; `flushed_sequence ≤ written_sequence <
//! next_sequence`; operations up to `written_last` are in completed writes, or in a durable
//! superblock.
//!
//! Lock: rank `LOG_RING`, around the whole structure.
use crate::error::CommitReason;
use crate::statistics::LogStatistics;
use cairn_format::{Generation, LogPosition, LogSeq};
use std::collections::VecDeque;

/// A transaction that was cut and whose superblock is not durable yet.
#[derive(Clone, Copy, Debug)]
struct PendingCut {
    generation: Generation,
    head: u64,
    last: LogSeq,
}

/// CheckpointPlace of one checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CheckpointPlace {
    /// Block within the ring.
    pub(crate) ring_block: u64,
    pub(crate) sequence: u64,
}

/// A push found no room.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoRoom {
    /// Calls of `super_committed` that the decision knew of.
    pub(crate) commits: u64,
    pub(crate) reason: CommitReason,
    /// Whether to ask for a commit: one under way will not do.
    pub(crate) request: bool,
}

/// What was written to the ring so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WrittenCheckpoints {
    pub(crate) checkpoints: u64,
    pub(crate) blocks: u64,
    pub(crate) items: u64,
    pub(crate) bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Ring {
    log_blocks: u64,
    head: u64,
    tail: u64,
    next_sequence: u64,
    pub(crate) written_sequence: u64,
    pub(crate) flushed_sequence: u64,
    pub(crate) written_last: LogSeq,
    /// The newest superblock known to be durable; 0 before the first commit of a mount.
    pub(crate) superblock: Generation,
    pending: VecDeque<PendingCut>,
    /// Calls of `super_committed` so far.
    pub(crate) commits: u64,
    /// Times that the head passed the ring's end.
    wraps: u64,
    written: WrittenCheckpoints,
    /// Flushes issued by the log.
    pub(crate) flushes: u64,
    pressure_requested: bool,
    room_requested: bool,
}

impl Ring {
    /// The empty ring of a mount. `start.sequence` is above 0: 0 means "no checkpoint".
    pub(crate) fn new(log_blocks: u64, start: LogPosition) -> Self {
        assert!(
            start.block < log_blocks && start.sequence > 0,
            "impossible start of the log {start:?}"
        );
        Self {
            log_blocks,
            head: start.block,
            tail: start.block,
            next_sequence: start.sequence,
            written_sequence: start.sequence - 1,
            flushed_sequence: start.sequence - 1,
            written_last: LogSeq(0),
            superblock: Generation(0),
            pending: VecDeque::new(),
            commits: 0,
            wraps: 0,
            written: WrittenCheckpoints::default(),
            flushes: 0,
            pressure_requested: false,
            room_requested: false,
        }
    }

    fn used(&self) -> u64 {
        self.head - self.tail
    }

    pub(crate) fn free(&self) -> u64 {
        self.log_blocks - self.used()
    }

    /// Blocks in use when all commits under way are through.
    fn used_after_pending(&self) -> u64 {
        self.head - self.pending.back().map_or(self.tail, |cut| cut.head)
    }

    /// Where the next checkpoint will stand.
    pub(crate) fn position(&self) -> LogPosition {
        LogPosition { block: self.head % self.log_blocks, sequence: self.next_sequence }
    }

    /// Gives out `blocks` blocks, which the caller knows to be free, for the next checkpoint.
    pub(crate) fn allocate(&mut self, blocks: u64) -> CheckpointPlace {
        assert!(blocks <= self.free(), "the log ring has no room for {blocks} blocks");
        let LogPosition { block, sequence } = self.position();
        self.wraps += u64::from(block + blocks >= self.log_blocks);
        self.head += blocks;
        self.next_sequence += 1;
        CheckpointPlace { ring_block: block, sequence }
    }

    /// Everything up to this operation is written: in `written` more checkpoints, of which
    /// `sequence` is the newest, or in none, when the operations had undone each other.
    pub(crate) fn wrote(
        &mut self,
        sequence: Option<u64>,
        last: LogSeq,
        written: WrittenCheckpoints,
    ) {
        self.written_sequence = self.written_sequence.max(sequence.unwrap_or(0));
        self.written_last = self.written_last.max(last);
        self.written.checkpoints += written.checkpoints;
        self.written.blocks += written.blocks;
        self.written.items += written.items;
        self.written.bytes += written.bytes;
    }

    /// Everything up to this checkpoint is durable. Flushes overlap, so a later one may have ended
    /// before.
    pub(crate) fn flushed(&mut self, sequence: u64) {
        self.flushed_sequence = self.flushed_sequence.max(sequence);
        self.flushes += 1;
    }

    /// Whether a flush would make anything durable.
    pub(crate) fn needs_flush(&self) -> bool {
        self.written_sequence > self.flushed_sequence
    }

    /// Notes where the log stood when transaction `generation` was cut.
    pub(crate) fn cut(&mut self, generation: Generation, last: LogSeq) -> LogPosition {
        self.pending.push_back(PendingCut { generation, head: self.head, last });
        self.position()
    }

    /// The superblock of `generation` is durable: what lies before its cut is free. Returns the
    /// last operation that it covers, 0 if it covers none more.
    pub(crate) fn super_committed(&mut self, generation: Generation) -> LogSeq {
        let mut covered = LogSeq(0);
        while let Some(cut) = self.pending.pop_front_if(|cut| cut.generation <= generation) {
            self.tail = cut.head;
            covered = cut.last;
        }
        self.written_last = self.written_last.max(covered);
        self.superblock = self.superblock.max(generation);
        self.commits += 1;
        self.pressure_requested = false;
        self.room_requested = false;
        covered
    }

    /// Whether to ask for a commit because a push has no room: once, and not if a commit under way
    /// will make room for the `current_blocks` blocks that remain then.
    pub(crate) fn request_room(&mut self, current_blocks: u64) -> bool {
        let pending_suffices = !self.pending.is_empty()
            && self.used_after_pending() + current_blocks <= self.log_blocks;
        !pending_suffices && !std::mem::replace(&mut self.room_requested, true)
    }

    /// Whether to ask for a commit that is still to be cut: once.
    pub(crate) fn request_cut(&mut self) -> bool {
        !std::mem::replace(&mut self.room_requested, true)
    }

    /// Whether to ask for a commit because more than half of the ring is in use: once.
    pub(crate) fn request_relief(&mut self) -> Option<CommitReason> {
        let pressed = self.used_after_pending() > self.log_blocks / 2;
        (pressed && !std::mem::replace(&mut self.pressure_requested, true))
            .then_some(CommitReason::LogPressure)
    }

    /// Fills in what the ring counts.
    pub(crate) fn count_into(&self, statistics: &mut LogStatistics) {
        statistics.checkpoints = self.written.checkpoints;
        statistics.blocks_written = self.written.blocks;
        statistics.items_logged = self.written.items;
        statistics.bytes_logged = self.written.bytes;
        statistics.flushes = self.flushes;
        statistics.ring_blocks_used = self.used();
        statistics.wraps = self.wraps;
    }
}
