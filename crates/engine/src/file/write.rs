//! Writing to files, in memory.
//!
//! A write goes in steps of up to [`STEP_BLOCKS`] blocks. Each step:
//! 1. When memory holds too much dirty data, writes some of it out ([`super::dirty`]).
//! 2. Reserves the space that writing the step's blocks out will take. No lock is held.
//! 3. Copies whole blocks, or takes them from the caller's shared buffer. No lock is held.
//! 4. Under the inode's state lock: reads what the blocks at both ends held before, if that
//!    matters; changes the pages; keeps the space for them; notes length and times, as wanted.
//!
//! A write to the end of the file names the end that its caller believes in, for steps 2 and 3. If
//! step 4 finds another one under the lock, nothing has changed yet, and the step begins again with
//! that. So nobody else's change of the length comes between the choice of the place and the write.
//! Each further step expects the end where the one before has stopped: the steps stand one behind
//! the other, until the length changes between two of them. Appends to a file take turns in the
//! kernel, so that only happens when a fork is applied. What stood before is then replaced as a
//! whole, the first steps with it, and the others stand behind the new content: the same as if the
//! kernel had sent several requests.
//!
//! It joins no transaction. *A crash: nothing of it is durable before an fsync or a sweep.* Bytes
//! of a page past the end of the file are zero, always: extending a file then shows zeros.
use super::Files;
use super::extents::{gaps, own_extents};
use super::inode::{Inode, InodeState};
use super::offsets::{blocks_of, checked_end, part_of_block, whole_blocks_of};
use super::pages::{Pages, is_worth_its_buffer};
use crate::InodeId;
use crate::store::operation::Effort;
use crate::types::{WritePlace, WriteTimes};
use crate::{Error, Result};
use cairn_blockdev::{BlockBuffer, BlockPool, SharedBlocks};
use cairn_format::{BLOCK_SIZE, ExtentKind, FileBlock, blocks_for_bytes};
use cairn_space::{Request, Reservation, Urgency};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Longest step of a write.
const STEP_BLOCKS: usize = 256;
/// A file that grows is written when so many blocks of it are dirty: 8 MiB, enough for long writes.
const WRITE_BEHIND_BLOCKS: u64 = 2048;

/// The bytes that a write brings.
#[derive(Clone, Copy)]
struct Content<'a> {
    bytes: &'a [u8],
    /// The buffer that holds them, if it may be kept, and where in it they begin.
    buffer: Option<(&'a SharedBlocks, usize)>,
    times: WriteTimes,
}

impl Content<'_> {
    /// A part of the bytes.
    fn part(&self, range: Range<usize>) -> Self {
        let buffer = self.buffer.map(|(buffer, begin)| (buffer, begin + range.start));
        Self { bytes: &self.bytes[range], buffer, times: self.times }
    }

    /// `range` of the bytes, which are whole blocks of the file, as blocks to keep: a part of the
    /// buffer where that is aligned and worth it, or a copy.
    fn blocks(&self, range: Range<usize>, pool: &BlockPool) -> SharedBlocks {
        if let Some((buffer, begin)) = self.buffer
            && (begin + range.start).is_multiple_of(BLOCK_SIZE)
        {
            let (start, end) = (begin + range.start, begin + range.end);
            let slice = buffer.slice(start / BLOCK_SIZE..end / BLOCK_SIZE);
            if is_worth_its_buffer(&slice) {
                return slice;
            }
        }
        pool.copy_of(&self.bytes[range])
    }
}

/// What came of a step.
enum Step {
    /// The bytes are written, up to this offset of the file.
    Done { end_bytes: u64 },
    /// Nothing is written: the end of the file, where they should go, is at this offset.
    EndIsAt(u64),
}

impl Files {
    /// Writes `data` into memory; the file grows when needed. Returns the offset behind it.
    pub(crate) fn write(
        &self,
        number: InodeId,
        place: WritePlace,
        data: &[u8],
        times: WriteTimes,
    ) -> Result<u64> {
        self.write_content(number, place, Content { bytes: data, buffer: None, times })
    }

    /// As [`Files::write`], with the bytes `range` of a buffer, whose whole blocks become the
    /// file's.
    pub(crate) fn write_shared(
        &self,
        number: InodeId,
        place: WritePlace,
        data: &SharedBlocks,
        range: Range<usize>,
        times: WriteTimes,
    ) -> Result<u64> {
        if range.start > range.end || range.end > data.len() {
            return Err(Error::InvalidArgument("a range outside of the buffer"));
        }
        let buffer = Some((data, range.start));
        self.write_content(number, place, Content { bytes: &data[range], buffer, times })
    }

    fn write_content(
        &self,
        number: InodeId,
        mut place: WritePlace,
        content: Content<'_>,
    ) -> Result<u64> {
        let length = content.bytes.len();
        checked_end(place.offset_bytes(), length as u64)?;
        self.store.check_writable_at(number)?;
        let inode = self.inodes.get(number);
        let mut done = 0;
        while done < length {
            let in_block = place.offset_bytes() as usize % BLOCK_SIZE;
            let end = length.min(done + STEP_BLOCKS * BLOCK_SIZE - in_block);
            self.throttle_dirty_data(&inode, blocks_for_bytes((end - done) as u64))?;
            match self.write_step(&inode, place, content.part(done..end))? {
                Step::Done { end_bytes } => (place, done) = (place.continued(end_bytes), end),
                Step::EndIsAt(end_bytes) => {
                    checked_end(end_bytes, (length - done) as u64)?;
                    place = WritePlace::End(end_bytes);
                }
            }
        }
        Ok(place.offset_bytes())
    }

    /// Steps 2 to 4.
    fn write_step(
        &self,
        inode: &Arc<Inode>,
        place: WritePlace,
        content: Content<'_>,
    ) -> Result<Step> {
        let offset_bytes = place.offset_bytes();
        let bytes = offset_bytes..offset_bytes + content.bytes.len() as u64;
        // Where bytes of the file are in the content.
        let in_content = |at: u64| (at - offset_bytes) as usize;
        let blocks = blocks_of(bytes.clone());
        // 2. Space.
        let reservation = self.reserve_for_write(inode, &blocks)?;
        // 3. Whole blocks.
        let whole = whole_blocks_of(bytes.clone());
        let middle = (!whole.is_empty()).then(|| {
            let range =
                in_content(whole.start.offset_bytes())..in_content(whole.end.offset_bytes());
            content.blocks(range, &self.buffers)
        });
        // 4. The pages. What may fail comes first: only the blocks at both ends can be partial.
        let mut state = self.write_inode_in_use(inode)?;
        state.expect_regular()?;
        if place == WritePlace::End(offset_bytes) && state.item.size != offset_bytes {
            return Ok(Step::EndIsAt(state.item.size));
        }
        let last = blocks.end - 1;
        let head = Some(blocks.start).filter(|block| !whole.contains(block));
        let tail = Some(last).filter(|block| *block > blocks.start && !whole.contains(block));
        let old = |block: Option<FileBlock>| {
            block.map_or(Ok(None), |block| self.content_for(inode, &state, block, &bytes))
        };
        let (old_head, old_tail) = (old(head)?, old(tail)?);
        let edit = |pages: &mut Pages, block: FileBlock, old| {
            let part = part_of_block(block, &bytes);
            let from = in_content(block.offset_bytes() + part.start as u64);
            let source = &content.bytes[from..from + part.len()];
            pages.edit(block, old, &self.buffers, |page| page[part].copy_from_slice(source));
        };
        self.change_pages(&mut state, |pages| {
            if let Some(block) = head {
                edit(pages, block, old_head);
            }
            if let Some(middle) = middle {
                pages.insert(whole.start, middle, &self.buffers);
            }
            if let Some(block) = tail {
                edit(pages, block, old_tail);
            }
        });
        self.take_for_pages(&mut state, &reservation);
        let grew = bytes.end > state.item.size;
        state.item.size = state.item.size.max(bytes.end);
        state.size_dirty |= state.item.size != state.disk_size;
        if content.times == WriteTimes::Now {
            state.times_dirty = true;
            self.touch(&mut state);
        }
        self.list_dirty(inode);
        let much = grew && state.pages.dirty() >= WRITE_BEHIND_BLOCKS;
        drop(state);
        if much && self.store.options.background {
            self.write_behind(inode);
        }
        Ok(Step::Done { end_bytes: bytes.end })
    }

    /// Changes the pages of a file, and counts those that are dirty.
    pub(crate) fn change_pages<R>(
        &self,
        state: &mut InodeState,
        change: impl FnOnce(&mut Pages) -> R,
    ) -> R {
        let before = state.pages.dirty();
        let result = change(&mut state.pages);
        let after = state.pages.dirty();
        if after > before {
            self.store.delayed_blocks.fetch_add(after - before, Ordering::Relaxed);
        } else if before > after {
            self.store.delayed_blocks.fetch_sub(before - after, Ordering::Relaxed);
        }
        result
    }

    /// Space for writing `blocks`. Preallocated ones need none; that is asked when space is short,
    /// and before anybody waits for more: reclaim would write what is dirty, and a block that is
    /// written needs another one for its next content.
    fn reserve_for_write(
        &self,
        inode: &Arc<Inode>,
        blocks: &Range<FileBlock>,
    ) -> Result<Reservation> {
        let count = blocks.end - blocks.start;
        let request = Request { data_blocks: count, nodes: 1 + count / 64 };
        if self.store.check_storage_room().is_ok()
            && let Ok(reservation) = self.store.space.try_reserve(request, Urgency::Ordinary)
        {
            return Ok(reservation);
        }
        let extents = {
            let _state = self.read_inode_in_use(inode)?;
            self.extents_in(inode.number, blocks.clone(), usize::MAX)?
        };
        let extents = own_extents(&extents, self.store.trees.of(inode.number).boundary());
        let preallocated = gaps(blocks.clone(), &extents).is_empty()
            && extents.iter().all(|(_, extent)| extent.kind == ExtentKind::Unwritten);
        if preallocated {
            return self.store.reserve(Request { data_blocks: 0, nodes: 1 }, Effort::Writeback);
        }
        self.store.reserve(request, Effort::Ordinary)
    }

    /// What a block holds before a part of it is written, if that matters and is not in memory.
    fn content_for(
        &self,
        inode: &Inode,
        state: &InodeState,
        block: FileBlock,
        bytes: &Range<u64>,
    ) -> Result<Option<BlockBuffer>> {
        let needed = part_of_block(block, bytes).len() < BLOCK_SIZE
            && block.offset_bytes() < state.item.size
            && !state.pages.contains(block);
        if needed { Ok(Some(self.read_block(inode.number, state, block)?)) } else { Ok(None) }
    }

    /// Keeps, of `reservation`, what the dirty pages of the file need.
    fn take_for_pages(&self, state: &mut InodeState, reservation: &Reservation) {
        let delayed_blocks = state.pages.dirty();
        let held = state.reservation.as_ref().map_or((0, 0), |r| (r.data_blocks(), r.nodes()));
        let blocks = delayed_blocks.saturating_sub(held.0).min(reservation.data_blocks());
        let nodes = (1 + delayed_blocks / 64).saturating_sub(held.1).min(reservation.nodes());
        if blocks + nodes > 0 {
            let part = reservation.split(blocks, nodes);
            match &state.reservation {
                Some(kept) => kept.merge(part),
                None => state.reservation = Some(part),
            }
        }
    }

    /// Forgets the pages of `blocks`; their content is gone or written elsewhere.
    pub(crate) fn drop_pages(&self, state: &mut InodeState, blocks: Range<FileBlock>) {
        self.change_pages(state, |pages| pages.remove(blocks, &self.buffers));
        self.trim_reservation(state);
    }

    /// Gives back what the dirty pages don't need any more.
    pub(crate) fn trim_reservation(&self, state: &mut InodeState) {
        if state.pages.dirty() == 0 {
            state.reservation = None;
        } else if let Some(reservation) = &state.reservation {
            let surplus = reservation.data_blocks().saturating_sub(state.pages.dirty());
            reservation.give_back(surplus, 0);
        }
    }

    /// Writes zeros over bytes of blocks that exist; holes stay holes.
    pub(crate) fn zero_part(&self, inode: &Arc<Inode>, bytes: Range<u64>) -> Result<()> {
        let block = FileBlock::round_down(bytes.start);
        let part = part_of_block(block, &bytes);
        let reservation =
            self.store.reserve(Request { data_blocks: 1, nodes: 1 }, Effort::Removal)?;
        let mut state = self.write_inode(inode)?;
        let hole = !state.pages.contains(block)
            && !self
                .extents_in(inode.number, block..block.next(), 1)?
                .iter()
                .any(|(_, extent)| extent.kind == ExtentKind::Data);
        if hole || part.is_empty() {
            return Ok(());
        }
        let old = self.content_for(inode, &state, block, &bytes)?;
        self.change_pages(&mut state, |pages| {
            pages.edit(block, old, &self.buffers, |content| content[part].fill(0))
        });
        self.take_for_pages(&mut state, &reservation);
        self.list_dirty(inode);
        Ok(())
    }
}
