//! Reading, writing and seeking in files.
//!
//! A write copies into memory, or leaves whole blocks in the caller's shared buffer, and reserves
//! the space that writing them out will take; it joins no transaction. Bytes of a page past the end
//! of the file are zero, always: extending a file then shows zeros.
use crate::file::Files;
use crate::file::extents::{Source, gaps};
use crate::file::inode::{Inode, InodeState};
use crate::file::pages::{Pages, is_worth_its_buffer};
use crate::store::operation::Effort;
use crate::types::SeekTarget;
use crate::{Error, Result};
use cairn_blockdev::{BlockBuffer, SharedBlocks, is_aligned};
use cairn_format::{BLOCK_SIZE, ExtentKind, InodeNumber, blocks_for_bytes};
use cairn_space::{Request, Reservation, Urgency};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Longest file in bytes.
pub(crate) const FILE_BYTES_MAX: u64 = 1 << 60;
const BLOCK: u64 = BLOCK_SIZE as u64;
/// Longest read or write that is done in one step.
const STEP_BLOCKS: u64 = 256;
/// A file that grows is written when so many blocks of it are dirty: 8 MiB, enough for long writes.
const WRITE_BEHIND_BLOCKS: u64 = 2048;

/// The end of a range of a file, if a file can be that long.
pub(crate) fn checked_end(offset_bytes: u64, length_bytes: u64) -> Result<u64> {
    offset_bytes
        .checked_add(length_bytes)
        .filter(|end| *end <= FILE_BYTES_MAX)
        .ok_or(Error::FileTooLarge(FILE_BYTES_MAX))
}

pub(crate) fn blocks_of(bytes: Range<u64>) -> Range<u64> {
    bytes.start / BLOCK..blocks_for_bytes(bytes.end)
}

/// The part of block `block` that lies in `bytes`, relative to the block.
fn part_of_block(block: u64, bytes: &Range<u64>) -> Range<usize> {
    let start = block * BLOCK;
    (bytes.start.max(start) - start) as usize..(bytes.end.min(start + BLOCK) - start) as usize
}

impl Files {
    /// Appends to `out` up to `length_bytes` bytes from `offset_bytes`, fewer at the end of the
    /// file.
    pub(crate) fn read(
        &self,
        number: InodeNumber,
        offset_bytes: u64,
        length_bytes: usize,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let inode = self.inodes.get(number);
        let state = self.read_inode_in_use(&inode)?;
        state.expect_regular()?;
        let end = offset_bytes.saturating_add(length_bytes as u64).min(state.item.size);
        let mut at = offset_bytes;
        while at < end {
            let step_end = end.min((at / BLOCK + STEP_BLOCKS) * BLOCK);
            let content = self.read_copy(number, &state, at..step_end)?;
            let skip = (at % BLOCK) as usize;
            out.extend_from_slice(&content[skip..skip + (step_end - at) as usize]);
            at = step_end;
        }
        Ok(())
    }

    /// Reads into `buffer`; returns how many bytes, fewer at the end of the file.
    pub(crate) fn read_into(
        &self,
        number: InodeNumber,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Result<usize> {
        let inode = self.inodes.get(number);
        let state = self.read_inode_in_use(&inode)?;
        state.expect_regular()?;
        let end = offset_bytes.saturating_add(buffer.len() as u64).min(state.item.size);
        let mut at = offset_bytes;
        while at < end {
            let step_end = end.min((at / BLOCK + STEP_BLOCKS) * BLOCK);
            let blocks = blocks_of(at..step_end);
            let rest = &mut buffer[(at - offset_bytes) as usize..];
            let whole_bytes = (blocks.end - blocks.start) as usize * BLOCK_SIZE;
            if at.is_multiple_of(BLOCK) && rest.len() >= whole_bytes && is_aligned(rest) {
                self.read_blocks(
                    number,
                    &state,
                    blocks.start,
                    &mut rest[..whole_bytes],
                    Source::Anywhere,
                )?;
            } else {
                let content = self.read_copy(number, &state, at..step_end)?;
                let (skip, length_bytes) = ((at % BLOCK) as usize, (step_end - at) as usize);
                rest[..length_bytes].copy_from_slice(&content[skip..skip + length_bytes]);
            }
            at = step_end;
        }
        Ok((at - offset_bytes) as usize)
    }

    /// As [`Files::read_into`], if all of it is in memory and no lock is taken.
    pub(crate) fn read_cached_into(
        &self,
        number: InodeNumber,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Option<usize> {
        let inode = self.inodes.get(number);
        let state = self.try_read_inode_in_use(&inode)?;
        state.expect_regular().ok()?;
        let end = offset_bytes.saturating_add(buffer.len() as u64).min(state.item.size);
        let length_bytes = end.saturating_sub(offset_bytes) as usize;
        if length_bytes == 0 {
            return Some(0);
        }
        let blocks = blocks_of(offset_bytes..end);
        let whole_bytes = (blocks.end - blocks.start) as usize * BLOCK_SIZE;
        let read = |bytes: &mut [u8]| {
            self.read_blocks(number, &state, blocks.start, bytes, Source::Memory).unwrap_or(false)
        };
        if offset_bytes.is_multiple_of(BLOCK) && buffer.len() >= whole_bytes {
            return read(&mut buffer[..whole_bytes]).then_some(length_bytes);
        }
        let mut content = self.buffers.take(whole_bytes);
        let skip = (offset_bytes % BLOCK) as usize;
        read(&mut content).then(|| {
            buffer[..length_bytes].copy_from_slice(&content[skip..skip + length_bytes]);
            length_bytes
        })
    }

    /// The blocks that `bytes` lie in.
    fn read_copy(
        &self,
        number: InodeNumber,
        state: &InodeState,
        bytes: Range<u64>,
    ) -> Result<BlockBuffer> {
        let blocks = blocks_of(bytes);
        let mut buffer = self.buffers.take((blocks.end - blocks.start) as usize * BLOCK_SIZE);
        self.read_blocks(number, state, blocks.start, &mut buffer, Source::Anywhere)?;
        Ok(buffer)
    }

    /// Fills `buffer` with the blocks from `first_block` on; false if something is not where
    /// `source` says.
    fn read_blocks(
        &self,
        number: InodeNumber,
        state: &InodeState,
        first_block: u64,
        buffer: &mut [u8],
        source: Source,
    ) -> Result<bool> {
        let end_block = first_block + (buffer.len() / BLOCK_SIZE) as u64;
        let gone = state.truncated_from.unwrap_or(u64::MAX);
        let absent = |blocks: Range<u64>, bytes: &mut [u8]| {
            let (there, zeros) = bytes.split_at_mut(
                (gone.clamp(blocks.start, blocks.end) - blocks.start) as usize * BLOCK_SIZE,
            );
            zeros.fill(0);
            if there.is_empty() {
                Ok(true)
            } else {
                self.read_mapped(number, blocks.start, there, source)
            }
        };
        let (mut at, mut rest) = (first_block, buffer);
        for (blocks, content) in state.pages.within(first_block, end_block) {
            let (before, after) =
                std::mem::take(&mut rest).split_at_mut((blocks.start - at) as usize * BLOCK_SIZE);
            if !absent(at..blocks.start, before)? {
                return Ok(false);
            }
            let (here, after) = after.split_at_mut(content.len());
            here.copy_from_slice(content);
            (at, rest) = (blocks.end, after);
        }
        absent(at..end_block, rest)
    }

    /// One block as the file has it now.
    pub(crate) fn read_block(
        &self,
        number: InodeNumber,
        state: &InodeState,
        block: u64,
    ) -> Result<BlockBuffer> {
        self.read_copy(number, state, block * BLOCK..(block + 1) * BLOCK)
    }

    /// Writes `data` at `offset_bytes`, into memory; the file grows when needed.
    pub(crate) fn write(&self, number: InodeNumber, offset_bytes: u64, data: &[u8]) -> Result<()> {
        self.write_from(number, offset_bytes, data, &|blocks| self.buffers.copy_of(&data[blocks]))
    }

    /// As [`Files::write`], with the bytes `range` of a buffer, whose whole blocks become the
    /// file's.
    pub(crate) fn write_shared(
        &self,
        number: InodeNumber,
        offset_bytes: u64,
        data: &SharedBlocks,
        range: Range<usize>,
    ) -> Result<()> {
        if range.start > range.end || range.end > data.len() {
            return Err(Error::InvalidArgument("a range outside of the buffer"));
        }
        let from_byte = range.start;
        let bytes = &data[range];
        self.write_from(number, offset_bytes, bytes, &|blocks| {
            let in_buffer = from_byte + blocks.start..from_byte + blocks.end;
            if in_buffer.start.is_multiple_of(BLOCK_SIZE) {
                let slice = data.slice(in_buffer.start / BLOCK_SIZE..in_buffer.end / BLOCK_SIZE);
                if is_worth_its_buffer(&slice) {
                    return slice;
                }
            }
            self.buffers.copy_of(&bytes[blocks])
        })
    }

    /// `whole` makes shared blocks of a part of `data`.
    fn write_from(
        &self,
        number: InodeNumber,
        offset_bytes: u64,
        data: &[u8],
        whole: &dyn Fn(Range<usize>) -> SharedBlocks,
    ) -> Result<()> {
        checked_end(offset_bytes, data.len() as u64)?;
        self.store.check_writable()?;
        let inode = self.inodes.get(number);
        let mut at = 0;
        while at < data.len() {
            let offset = offset_bytes + at as u64;
            let step = (data.len() - at)
                .min(STEP_BLOCKS as usize * BLOCK_SIZE - (offset as usize % BLOCK_SIZE));
            self.throttle_dirty_data(&inode, blocks_for_bytes(step as u64))?;
            let much = self.write_step(&inode, offset, &data[at..at + step], &|blocks| {
                whole(at + blocks.start..at + blocks.end)
            })?;
            if much && self.store.options.background {
                self.write_behind(&inode);
            }
            at += step;
        }
        Ok(())
    }

    /// Returns whether the file grew and much of it is dirty.
    fn write_step(
        &self,
        inode: &Arc<Inode>,
        offset_bytes: u64,
        data: &[u8],
        whole: &dyn Fn(Range<usize>) -> SharedBlocks,
    ) -> Result<bool> {
        let bytes = offset_bytes..offset_bytes + data.len() as u64;
        let blocks = blocks_of(bytes.clone());
        let reservation = self.reserve_for_write(inode, &blocks)?;
        // Copied before the lock is taken.
        let whole_blocks = blocks_for_bytes(bytes.start)..bytes.end / BLOCK;
        let middle = (!whole_blocks.is_empty()).then(|| {
            whole(
                (whole_blocks.start * BLOCK - offset_bytes) as usize
                    ..(whole_blocks.end * BLOCK - offset_bytes) as usize,
            )
        });
        let mut state = self.write_inode_in_use(inode)?;
        state.expect_regular()?;
        // What may fail first: only the blocks at both ends can be partial.
        let last = blocks.end - 1;
        let is_partial = |block: u64| !whole_blocks.contains(&block);
        let head = if is_partial(blocks.start) {
            self.content_for(inode, &state, blocks.start, &bytes)?
        } else {
            None
        };
        let tail = if last > blocks.start && is_partial(last) {
            self.content_for(inode, &state, last, &bytes)?
        } else {
            None
        };
        let source = |block: u64| {
            let part = part_of_block(block, &bytes);
            let from = (block * BLOCK + part.start as u64 - offset_bytes) as usize;
            (part.clone(), &data[from..from + part.len()])
        };
        self.change_pages(&mut state, |pages| {
            if is_partial(blocks.start) {
                let (part, source) = source(blocks.start);
                pages.edit(blocks.start, head, &self.buffers, |content| {
                    content[part].copy_from_slice(source)
                });
            }
            if let Some(middle) = middle {
                pages.insert(whole_blocks.start, middle, &self.buffers);
            }
            if last > blocks.start && is_partial(last) {
                let (part, source) = source(last);
                pages.edit(last, tail, &self.buffers, |content| {
                    content[part].copy_from_slice(source)
                });
            }
        });
        self.take_for_pages(&mut state, &reservation);
        let grew = bytes.end > state.item.size;
        state.item.size = state.item.size.max(bytes.end);
        state.size_dirty |= state.item.size != state.disk_size;
        state.times_dirty = true;
        self.touch(&mut state);
        self.list_dirty(inode);
        Ok(grew && state.pages.dirty() >= WRITE_BEHIND_BLOCKS)
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
    fn reserve_for_write(&self, inode: &Arc<Inode>, blocks: &Range<u64>) -> Result<Reservation> {
        let count = blocks.end - blocks.start;
        let request = Request { data_blocks: count, nodes: 1 + count / 64 };
        if self.store.check_storage_room().is_ok()
            && let Ok(reservation) = self.store.space.try_reserve(request, Urgency::Normal)
        {
            return Ok(reservation);
        }
        let extents = self.extents_in(inode.number, blocks.start, blocks.end, usize::MAX)?;
        let preallocated = gaps(blocks.start, blocks.end, &extents).is_empty()
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
        block: u64,
        bytes: &Range<u64>,
    ) -> Result<Option<BlockBuffer>> {
        let needed = part_of_block(block, bytes).len() < BLOCK_SIZE
            && block * BLOCK < state.item.size
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

    /// Forgets the pages `from..to`; their content is gone or written elsewhere.
    pub(crate) fn drop_pages(&self, state: &mut InodeState, from: u64, to: u64) {
        self.change_pages(state, |pages| pages.remove(from, to, &self.buffers));
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
        let block = bytes.start / BLOCK;
        let part = part_of_block(block, &bytes);
        let reservation =
            self.store.reserve(Request { data_blocks: 1, nodes: 1 }, Effort::Removal)?;
        let mut state = self.write_inode(inode)?;
        let hole = !state.pages.contains(block)
            && !self
                .extents_in(inode.number, block, block + 1, 1)?
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

    /// The next data or hole at or after `offset_bytes`.
    pub(crate) fn seek(
        &self,
        number: InodeNumber,
        offset_bytes: u64,
        target: SeekTarget,
    ) -> Result<u64> {
        let inode = self.inodes.get(number);
        let state = self.read_inode_in_use(&inode)?;
        state.expect_regular()?;
        let size = state.item.size;
        if offset_bytes >= size {
            return Err(Error::OutOfRange);
        }
        let end = blocks_for_bytes(size).min(state.truncated_from.unwrap_or(u64::MAX));
        let mut at = offset_bytes / BLOCK;
        match target {
            SeekTarget::Data => match self.next_data(number, &state, at, end)? {
                Some(block) => Ok((block * BLOCK).max(offset_bytes)),
                None => Err(Error::OutOfRange),
            },
            SeekTarget::Hole => {
                while self.next_data(number, &state, at, end)? == Some(at) {
                    at = match self.data_extent_at(number, at)? {
                        Some(extent_end) => extent_end,
                        None => at + 1,
                    };
                }
                Ok((at * BLOCK).max(offset_bytes).min(size))
            }
        }
    }

    /// The first block of `from..end` that holds data.
    fn next_data(
        &self,
        number: InodeNumber,
        state: &InodeState,
        from: u64,
        end: u64,
    ) -> Result<Option<u64>> {
        let page = state.pages.within(from, end.max(from)).next().map(|(blocks, _)| blocks.start);
        let mut at = from;
        while at < page.unwrap_or(end) {
            let Some((start, extent)) = self.extents_in(number, at, end, 1)?.into_iter().next()
            else {
                break;
            };
            if extent.kind == ExtentKind::Data {
                return Ok(Some(page.unwrap_or(u64::MAX).min(start.max(at))));
            }
            at = start + extent.blocks;
        }
        Ok(page)
    }

    /// Where the data extent that covers a block ends.
    fn data_extent_at(&self, number: InodeNumber, block: u64) -> Result<Option<u64>> {
        let extent = self.extents_in(number, block, block + 1, 1)?.pop();
        Ok(extent
            .filter(|(_, extent)| extent.kind == ExtentKind::Data)
            .map(|(start, extent)| start + extent.blocks))
    }
}
