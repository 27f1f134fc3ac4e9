//! Writing a file's dirty data to the device.
//!
//! [`Files::write_back`], with the file's extents mutex held throughout:
//! 1. Under the state lock take a batch of dirty pages (their content is shared, not copied) and
//!    the space kept for them.
//! 2. Without the state lock: allocate, or find the unwritten blocks that the file has there;
//!    reserve for the items.
//! 3. Checksum and write, out of the pages' own memory. *Crash: blocks in flight, referenced by
//!    nothing.*
//! 4. Join; under the state lock replace the extents, log them with the inode; forget the pages
//!    that nobody changed meanwhile. *Crash before the checkpoint is durable: the old extents
//!    count, their blocks are pinned.*
//!
//! If step 2 or 3 fails, the pages are dirty again and nothing is lost; an fsync reports the error.
//! If the thread panics, nobody knows what was written: the volume stops
//! ([`ExtentsGuard`](crate::file::locking::ExtentsGuard)).
//!
//! **An fsync of little data** leaves the writing of step 3 to the log, which writes the data of a
//! whole group together with the group's checkpoint ([`Delivery::WithGroup`]): one wait for the
//! device instead of one per file and another. Until the data is written its pages stay in memory
//! as [`PageState::Logged`](crate::file::pages::PageState::Logged). More data than that is written
//! here, by its own thread, so that a large fsync never stands in the way of a group; and so is
//! everything while the log holds much.
//!
//! Such data goes next to that of the others in the group, so that it is one write on the device,
//! also a small write into the middle of preallocated blocks while there is plenty of space
//! ([`Files::allocate_beside_group`]).
//!
//! If the log could not write the data, the file's extents name blocks that hold something else,
//! which their checksums tell: reading them after a crash is an error. The fsyncs that wait for it
//! report the error, the pages are dirty again, and the next writeback puts the data elsewhere.
use crate::InodeId;
use crate::file::Files;
use crate::file::data_cache::write_worth_keeping;
use crate::file::extents::{UnwrittenRun, own_extents, unwritten_run};
use crate::file::inode::{Flight, Inode, InodeState};
use crate::file::pages::Segment;
use crate::file::pieces::{Part, Piece, data_writes, drop_front, overlapping, parts_of, writes_of};
use crate::store::failures::in_file;
use crate::store::operation::{Effort, Operation};
use crate::{Error, Result};
use cairn_blockdev::SetWrite;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_format::{
    BlockRange, Extent, ExtentKind, FileBlock, Generation, LogSeq, MAX_EXTENT_BLOCKS,
};
use cairn_log::DataTicket;
use cairn_space::{Request, Reservation, Urgency};
use std::ops::Range;
use std::sync::Arc;

/// Pages that are written in one operation.
const BATCH_PAGES: u64 = 1024;
/// Pieces (runs of file blocks on consecutive device blocks) of one operation; bounds its
/// reservation.
const BATCH_PIECES: usize = 16;
/// Longest piece when space is short.
const SHORT_PIECE_BLOCKS: u64 = 4;
/// An fsync of up to so many pages leaves writing them to the log.
const WITH_GROUP_PAGES_MAX: u64 = 64;
/// A write of more blocks than this into preallocated ones is large enough for a write of its own.
const SCATTERED_BLOCKS_MAX: u64 = 8;
/// The part of a volume that must be available before preallocated blocks are exchanged for others.
const PLENTY_PART: u64 = 8;
/// Unwritten blocks in the log from which on nothing is left to it.
pub(super) const WITH_GROUP_BLOCKS_MAX: u64 = 4096;

/// Which thread writes the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Delivery {
    /// The calling thread, before the data enters the tree.
    Here,
    /// The log, together with the checkpoint.
    WithGroup,
}

/// How much one operation tries, what space it may use, and which thread writes its data.
#[derive(Clone, Copy)]
struct Step {
    effort: Effort,
    delivery: Delivery,
    pieces_max: usize,
}

/// Lets reclaim see that the holder of the extents mutex writes data, and so waits for nothing but
/// commits.
struct Writing<'a>(&'a AtomicU64);

impl<'a> Writing<'a> {
    fn begin(write_backs: &'a AtomicU64) -> Self {
        write_backs.fetch_add(1, Ordering::AcqRel);
        Self(write_backs)
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// Dirty pages on their way to the device.
struct Batch {
    segments: Vec<Segment>,
    reservation: Option<Reservation>,
    /// Length of the file when the pages were taken: what they hold past it was written later.
    size: u64,
}

impl Files {
    /// Writes all data of the file that is dirty now, and logs it. On return the data is written
    /// but not flushed.
    pub(crate) fn write_back(&self, inode: &Arc<Inode>, effort: Effort) -> Result<()> {
        let _extents = self.lock_extents(inode);
        self.write_back_locked(inode, effort)
    }

    /// As [`Files::write_back`], with the extents mutex held by the caller.
    pub(crate) fn write_back_locked(&self, inode: &Arc<Inode>, effort: Effort) -> Result<()> {
        self.write_back_by(inode, effort, Delivery::Here)
    }

    /// As [`Files::write_back`], also for data that is on its way with a group at the time of
    /// the call. What fsyncs of others send after it meanwhile is not waited for, or it might take
    /// for ever.
    pub(crate) fn write_back_and_wait(&self, inode: &Arc<Inode>) -> Result<()> {
        self.write_back(inode, Effort::Writeback)?;
        let target = {
            let state = self.read_inode(inode)?;
            (!state.flights.is_empty()).then_some(state.last)
        };
        let Some(target) = target else { return Ok(()) };
        self.store.log.wait_durable(target)?;
        // What could not be written on that way is dirty again.
        self.write_back(inode, Effort::Writeback)
    }

    /// Logs all data of the file that is dirty now. If it is little, writing it is left to the log,
    /// unless that has much to write already. Returns how many blocks the log is to write. The
    /// extents mutex is held.
    pub(crate) fn write_back_with_group(&self, inode: &Arc<Inode>) -> Result<u64> {
        self.settle_flights(inode)?;
        let pages = self.read_inode(inode)?.pages.dirty();
        let little = pages <= WITH_GROUP_PAGES_MAX
            && self.store.log.unwritten_blocks() + pages <= WITH_GROUP_BLOCKS_MAX;
        self.write_back_by(
            inode,
            Effort::Writeback,
            if little { Delivery::WithGroup } else { Delivery::Here },
        )?;
        Ok(if little { pages } else { 0 })
    }

    /// Logs all data of the file that is dirty now; it is written before what was logged counts as
    /// durable. Returns the operation to wait for, and the data on its way, of which nobody has
    /// seen the end yet: the extents mutex is held.
    pub(super) fn write_back_for_fsync(
        &self,
        inode: &Arc<Inode>,
    ) -> Result<(LogSeq, Vec<Arc<DataTicket>>)> {
        let _extents = self.lock_extents(inode);
        self.write_back_with_group(inode)?;
        let state = self.read_inode(inode)?;
        Ok((state.last, state.flights.iter().map(|flight| Arc::clone(&flight.ticket)).collect()))
    }

    fn write_back_by(&self, inode: &Arc<Inode>, effort: Effort, delivery: Delivery) -> Result<()> {
        let _writing = Writing::begin(&inode.write_backs);
        // A thread that panicked with the mutex has left pages that count as being written.
        self.store.check_alive()?;
        self.settle_truncation(inode)?;
        self.settle_flights(inode)?;
        // Pages above the last block that is dirty now, or made dirty again meanwhile, are left to
        // the next time.
        let mut from = FileBlock::FIRST;
        let last = {
            let state = self.read_inode(inode)?;
            match state.pages.last() {
                Some(block) if state.pages.dirty() > 0 => block,
                _ => return Ok(()),
            }
        };
        self.store.check_storage_room()?;
        while from <= last {
            let Some(batch) = self.take_batch(inode, from)? else { break };
            from = batch.segments.last().expect("a batch has pages").end();
            self.write_batch(inode, batch, effort, delivery)?;
        }
        Ok(())
    }

    /// Looks at what became of data that the log wrote.
    fn settle_flights(&self, inode: &Arc<Inode>) -> Result<()> {
        if self.read_inode(inode)?.flights.is_empty() {
            return Ok(());
        }
        let mut state = self.write_inode(inode)?;
        for error in state.flights.iter().filter_map(|flight| flight.ticket.outcome()?.err()) {
            self.store.failures.belongs_to(&error, inode.number);
        }
        let lost = state.settle_flights();
        if lost > 0 {
            self.store.delayed_blocks.fetch_add(lost, Ordering::Relaxed);
            self.list_dirty(inode);
        }
        self.unlist_clean(inode, &state);
        Ok(())
    }

    fn take_batch(&self, inode: &Arc<Inode>, from: FileBlock) -> Result<Option<Batch>> {
        let mut state = self.write_inode(inode)?;
        let dirty_before = state.pages.dirty();
        let segments = self
            .change_pages(&mut state, |pages| pages.take_dirty(from, BATCH_PAGES, BATCH_PIECES));
        if segments.is_empty() {
            return Ok(None);
        }
        let count = dirty_before - state.pages.dirty();
        let reservation = state.reservation.as_ref().map(|kept| {
            let all = state.pages.dirty() == 0;
            kept.split(count.min(kept.data_blocks()), if all { kept.nodes() } else { 0 })
        });
        Ok(Some(Batch { segments, reservation, size: state.item.size }))
    }

    fn write_batch(
        &self,
        inode: &Arc<Inode>,
        mut batch: Batch,
        effort: Effort,
        delivery: Delivery,
    ) -> Result<()> {
        let mut result = Ok(());
        let mut step = Step { effort, delivery, pieces_max: BATCH_PIECES };
        while !batch.segments.is_empty() {
            match self.write_pieces(inode, &batch, step) {
                Ok(written) => drop_front(&mut batch.segments, written),
                // The data was accepted, so there is space for it: piece by piece, and with the
                // help of the reserve, whoever has what it replaces.
                Err(Error::NoSpace) if step.pieces_max > 1 => {
                    let effort = if effort == Effort::Reclaim { effort } else { Effort::Cleanup };
                    step = Step { effort, delivery, pieces_max: 1 };
                }
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        if result.is_err() {
            self.redirty(inode, batch)?;
        }
        result
    }

    /// Writes the first blocks of the batch, as many as make up one operation; returns how many.
    fn write_pieces(&self, inode: &Arc<Inode>, batch: &Batch, step: Step) -> Result<u64> {
        let segments = &batch.segments[..];
        let blocks = segments[0].block..segments[segments.len() - 1].end();
        let existing = self.extents_in(inode.number, blocks, usize::MAX)?;
        let mut pieces = Vec::new();
        let allocated = own_extents(&existing, self.store.trees.of(inode.number).boundary());
        let result = self
            .allocate_pieces(segments, &allocated, batch.reservation.as_ref(), step, &mut pieces)
            .and_then(|count| {
                let parts = parts_of(segments, &mut pieces);
                self.cache_parts(&pieces, &parts, batch.size);
                let with_group = match step.delivery {
                    Delivery::Here => {
                        in_file(inode.number, None, || self.write_data(&writes_of(&parts)))?;
                        None
                    }
                    Delivery::WithGroup => Some(parts),
                };
                self.insert_pieces(inode, batch.size, &pieces, &existing, with_group, step.effort)?;
                Ok(count)
            });
        if result.is_err() && self.store.transactions.failure().is_none() {
            for piece in pieces.iter().filter(|piece| !piece.in_place) {
                match &batch.reservation {
                    Some(kept) => self.store.space.cancel_into(piece.range, kept),
                    None => self.store.space.cancel(piece.range),
                }
            }
        }
        result
    }

    /// Keeps what is about to be written in memory, as far as it is likely to be read soon. If it
    /// can't be written, its pages stay, or no extent refers to its blocks.
    fn cache_parts(&self, pieces: &[Piece], parts: &[Part], file_bytes: u64) {
        let mut parts = parts.iter();
        for piece in pieces {
            let mut checksums = &piece.checksums[..];
            while !checksums.is_empty() {
                let (range, data) = parts.next().expect("the parts make up the pieces");
                let (here, rest) = checksums.split_at(range.blocks as usize);
                if write_worth_keeping(range.blocks, file_bytes) {
                    self.data_cache.keep(range.start.0, here, data, range.blocks == 1);
                } else {
                    self.data_cache.forget(*range);
                }
                checksums = rest;
            }
        }
    }

    fn allocate_pieces(
        &self,
        segments: &[Segment],
        existing: &[(FileBlock, Extent)],
        kept: Option<&Reservation>,
        step: Step,
        pieces: &mut Vec<Piece>,
    ) -> Result<u64> {
        let mut count = 0;
        // A single piece is for when space is short: it should not overlap many extents either.
        let run_max = if step.pieces_max > 1 { MAX_EXTENT_BLOCKS } else { SHORT_PIECE_BLOCKS };
        for stretch in segments.chunk_by(|before, after| before.end() == after.block) {
            let (mut file_block, end) = (stretch[0].block, stretch[stretch.len() - 1].end());
            while file_block < end && pieces.len() < step.pieces_max {
                let run = (end - file_block).min(run_max);
                let (range, in_place) = match unwritten_run(existing, file_block, run) {
                    Some(unwritten) => match self.allocate_beside_group(unwritten, step) {
                        Some(range) => (range, false),
                        None => (unwritten.range, true),
                    },
                    None => {
                        let next_unwritten = existing
                            .iter()
                            .find(|(start, e)| {
                                e.kind == ExtentKind::Unwritten && *start > file_block
                            })
                            .map_or(FileBlock::END, |(s, _)| *s);
                        (
                            self.allocate_blocks(
                                run.min(next_unwritten - file_block),
                                kept,
                                step.effort,
                            )?,
                            false,
                        )
                    }
                };
                pieces.push(Piece {
                    file_block,
                    range,
                    in_place,
                    checksums: Vec::with_capacity(range.blocks as usize),
                });
                file_block += range.blocks;
                count += range.blocks;
            }
        }
        Ok(count)
    }

    fn allocate_blocks(
        &self,
        blocks: u64,
        kept: Option<&Reservation>,
        effort: Effort,
    ) -> Result<BlockRange> {
        if let Some(kept) = kept.filter(|kept| kept.data_blocks() > 0) {
            return Ok(self.store.space.allocate_data(
                kept,
                blocks.min(kept.data_blocks()),
                None,
            )?);
        }
        // Written over preallocated blocks that were given back since: the space was not kept, ask
        // for it now.
        let extra = self.store.reserve(Request { data_blocks: 1, nodes: 0 }, effort)?;
        Ok(self.store.space.allocate_data(&extra, 1, None)?)
    }

    /// Blocks next to the group's other data for a small write into the middle of preallocated
    /// blocks, if the volume has plenty. In place it would be a write of its own on the device;
    /// together the group's data is one. What fills preallocated blocks from their beginning stays
    /// there, so a file that is written in order is in one piece.
    fn allocate_beside_group(&self, unwritten: UnwrittenRun, step: Step) -> Option<BlockRange> {
        let in_order = unwritten.skipped_blocks == 0;
        if step.delivery == Delivery::Here
            || step.pieces_max == 1
            || in_order
            || unwritten.range.blocks > SCATTERED_BLOCKS_MAX
        {
            return None;
        }
        let space = self.store.space.report();
        if space.available_blocks < space.total_blocks / PLENTY_PART {
            return None;
        }
        let blocks = unwritten.range.blocks;
        let reservation = self
            .store
            .space
            .try_reserve(Request { data_blocks: blocks, nodes: 0 }, Urgency::Ordinary)
            .ok()?;
        self.store.space.allocate_data(&reservation, blocks, None).ok()
    }

    /// Writes; all is under way together.
    pub(super) fn write_data(&self, writes: &[SetWrite<'_>]) -> Result<()> {
        let mut outcome = Ok(());
        for result in self.store.device.write_set(writes) {
            outcome = outcome.and(self.store.noted(result.map_err(Error::from)));
        }
        outcome
    }

    fn insert_pieces(
        &self,
        inode: &Arc<Inode>,
        size: u64,
        pieces: &[Piece],
        existing: &[(FileBlock, Extent)],
        with_group: Option<Vec<Part>>,
        effort: Effort,
    ) -> Result<()> {
        // One item for the new extent, or in place for each that was there; of those each is
        // removed or cut, and one of them in two.
        let changes = |piece: &Piece| match overlapping(existing, piece).count() as u64 {
            0 => 1,
            overlaps if piece.in_place => 2 * overlaps + 1,
            overlaps => overlaps + 2,
        };
        let items: u64 = pieces.iter().map(changes).sum();
        let mut operation = self.store.begin(inode.number, items + 1, 0, effort)?;
        let mut state = self.write_inode(inode)?;
        for piece in pieces {
            // What is there was read before, but earlier pieces of this operation may have cut it:
            // look again.
            let blocks = piece.file_blocks();
            let first = blocks.start;
            let current = self.extents_in(inode.number, blocks.clone(), usize::MAX)?;
            let extent = Extent {
                start: piece.range.start,
                blocks: piece.range.blocks,
                kind: ExtentKind::Data,
                generation: operation.generation(),
                written: operation.generation(),
                checksums: piece.checksums.clone(),
            };
            if piece.in_place {
                self.cut_extents(&mut operation, inode.number, blocks.clone(), &current)?;
                let newest = operation.newest_snapshot();
                for (blocks, birth) in births(&blocks, &current, newest, extent.generation) {
                    let part = extent.slice(blocks.start - first, blocks.end - blocks.start);
                    let part = Extent { generation: birth, ..part };
                    self.put_merged(&mut operation, inode.number, blocks.start, part)?;
                }
            } else {
                self.drop_extents(&mut operation, inode.number, &mut state, blocks, &current)?;
                self.insert_extent(&mut operation, inode.number, &mut state, first, extent)?;
            }
        }
        let data = with_group.map(|parts| data_writes(parts, operation.generation()));
        self.finish_pieces(&mut state, pieces, size, data.as_ref().map(|(ticket, _)| ticket));
        operation.put_inode(inode.number, &state.loggable())?;
        let sequence = match data {
            Some((_, writes)) => operation.log_with_data(writes),
            None => operation.log(),
        };
        state.logged(sequence);
        self.unlist_clean(inode, &state);
        Ok(())
    }

    /// Cuts `blocks` out of extent items without freeing what they occupy.
    fn cut_extents(
        &self,
        operation: &mut Operation<'_>,
        inode: InodeId,
        blocks: Range<FileBlock>,
        current: &[(FileBlock, Extent)],
    ) -> Result<()> {
        for &(start, ref extent) in current {
            let end = start + extent.blocks;
            if start < blocks.start {
                operation.put_extent(inode, start, &extent.slice(0, blocks.start - start))?;
            } else {
                operation.delete(inode.extent_key(start))?;
            }
            if blocks.end < end {
                let rest = extent.slice(blocks.end - start, end - blocks.end);
                operation.put_extent(inode, blocks.end, &rest)?;
            }
        }
        Ok(())
    }

    /// The pieces are in the tree. Pages leave memory, or stay until the data of `ticket` is
    /// written.
    fn finish_pieces(
        &self,
        state: &mut InodeState,
        pieces: &[Piece],
        size: u64,
        ticket: Option<&Arc<DataTicket>>,
    ) {
        let flight = ticket.map(|_| state.next_flight);
        for piece in pieces {
            state.pages.written(piece.file_blocks(), flight);
        }
        if let Some(ticket) = ticket {
            let blocks = pieces.iter().map(Piece::file_blocks).collect();
            state.flights.push(Flight {
                number: state.next_flight,
                blocks,
                ticket: Arc::clone(ticket),
            });
            state.next_flight += 1;
        }
        let written_end = pieces[pieces.len() - 1].file_blocks().end.offset_bytes();
        state.disk_size = if state.all_logged() {
            state.item.size
        } else {
            state.disk_size.max(written_end.min(size))
        };
        self.trim_reservation(state);
    }

    /// After a failure: the pages that are left are dirty again.
    fn redirty(&self, inode: &Arc<Inode>, batch: Batch) -> Result<()> {
        let mut state = self.write_inode(inode)?;
        self.change_pages(&mut state, |pages| {
            batch.segments.iter().for_each(|segment| pages.not_written(segment.blocks()))
        });
        match (&state.reservation, batch.reservation) {
            (Some(reservation), Some(kept)) => reservation.merge(kept),
            (None, kept) => state.reservation = kept,
            _ => {}
        }
        Ok(())
    }

    /// Logs the inode's attributes if memory has newer ones.
    pub(crate) fn log_attributes(&self, inode: &Arc<Inode>) -> Result<LogSeq> {
        {
            let state = self.read_inode(inode)?;
            if !state.size_dirty && !state.times_dirty {
                self.unlist_clean(inode, &state);
                return Ok(state.last);
            }
        }
        let mut operation = self.store.begin(inode.number, 1, 0, Effort::Writeback)?;
        let mut state = self.write_inode(inode)?;
        if state.size_dirty || state.times_dirty {
            operation.put_inode(inode.number, &state.loggable())?;
            let sequence = operation.log();
            state.logged(sequence);
        }
        self.unlist_clean(inode, &state);
        Ok(state.last)
    }
}

/// The births of parts of `blocks` that are written in place at `now`. What the snapshot of
/// `newest` has, too, stays the same reference; the rest is a new one.
fn births(
    blocks: &Range<FileBlock>,
    current: &[(FileBlock, Extent)],
    newest: Generation,
    now: Generation,
) -> Vec<(Range<FileBlock>, Generation)> {
    let mut births: Vec<(Range<FileBlock>, Generation)> = Vec::new();
    for (start, extent) in current {
        let part = blocks.start.max(*start)..blocks.end.min(*start + extent.blocks);
        let birth = if extent.generation <= newest { extent.generation } else { now };
        match births.last_mut() {
            Some((last, of_last)) if *of_last == birth && last.end == part.start => {
                last.end = part.end;
            }
            _ => births.push((part, birth)),
        }
    }
    births
}
