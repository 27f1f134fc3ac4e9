//! Reading, writing and seeking in files.
//!
//! A write copies into pages in memory and reserves the space that writing them out will take; it joins no transaction.
//! Bytes of a page past the end of the file are zero, always: extending a file then shows zeros.
use crate::extents::gaps;
use crate::inode::{Inode, InodeState, Page, PageState};
use crate::operation::Effort;
use crate::types::SeekTarget;
use crate::volume::VolumeInner;
use crate::{Error, Result};
use cairn_blockdev::AlignedBuffer;
use cairn_format::{BLOCK_SIZE, ExtentKind, InodeNumber, blocks_for_bytes};
use cairn_space::{Request, Reservation};
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Longest file in bytes.
pub(crate) const FILE_BYTES_MAX: u64 = 1 << 60;
const BLOCK: u64 = BLOCK_SIZE as u64;
/// Longest write that is done in one step.
const STEP_BYTES: usize = 1 << 20;

/// The end of a range of a file, if a file can be that long.
pub(crate) fn checked_end(offset_bytes: u64, length_bytes: u64) -> Result<u64> {
    offset_bytes.checked_add(length_bytes).filter(|end| *end <= FILE_BYTES_MAX).ok_or(Error::FileTooLarge(FILE_BYTES_MAX))
}

fn blocks_of(bytes: Range<u64>) -> Range<u64> {
    bytes.start / BLOCK..blocks_for_bytes(bytes.end)
}

/// The part of block `block` that lies in `bytes`, relative to the block.
fn part_of_block(block: u64, bytes: &Range<u64>) -> Range<usize> {
    let start = block * BLOCK;
    (bytes.start.max(start) - start) as usize..(bytes.end.min(start + BLOCK) - start) as usize
}

impl VolumeInner {
    /// Appends to `out` up to `length_bytes` bytes from `offset_bytes`, fewer at the end of the file.
    pub(crate) fn read(&self, number: InodeNumber, offset_bytes: u64, length_bytes: usize, out: &mut Vec<u8>) -> Result<()> {
        let inode = self.inodes.get(number);
        let state = self.read_inode(&inode)?;
        state.expect_regular()?;
        let end = offset_bytes.saturating_add(length_bytes as u64).min(state.item.size);
        if offset_bytes >= end {
            return Ok(());
        }
        let blocks = blocks_of(offset_bytes..end);
        let mut buffer = AlignedBuffer::zeroed((blocks.end - blocks.start) as usize * BLOCK_SIZE);
        self.read_blocks(number, &state, blocks.start, &mut buffer)?;
        let skip = (offset_bytes - blocks.start * BLOCK) as usize;
        out.extend_from_slice(&buffer[skip..skip + (end - offset_bytes) as usize]);
        Ok(())
    }

    /// Fills `buffer` with the blocks from `first_block` on, from memory or the device. `buffer` holds zeros before.
    fn read_blocks(&self, number: InodeNumber, state: &InodeState, first_block: u64, buffer: &mut [u8]) -> Result<()> {
        let end_block = first_block + (buffer.len() / BLOCK_SIZE) as u64;
        let mut in_memory = 0;
        for (block, page) in state.pages.range(first_block..end_block) {
            let at = (block - first_block) as usize * BLOCK_SIZE;
            buffer[at..at + BLOCK_SIZE].copy_from_slice(&page.data[..]);
            in_memory += 1;
        }
        if in_memory < end_block - first_block {
            let kept = state.truncated_from.unwrap_or(u64::MAX);
            self.read_mapped(number, first_block, buffer, &|block| block < kept && !state.pages.contains_key(&block))?;
        }
        Ok(())
    }

    /// One block as the file has it now.
    pub(crate) fn read_block(&self, number: InodeNumber, state: &InodeState, block: u64) -> Result<Box<[u8; BLOCK_SIZE]>> {
        let mut buffer = AlignedBuffer::zeroed(BLOCK_SIZE);
        self.read_blocks(number, state, block, &mut buffer)?;
        Ok(buffer.to_vec().into_boxed_slice().try_into().expect("one block"))
    }

    /// Writes `data` at `offset_bytes`, into memory; the file grows when needed.
    pub(crate) fn write(&self, number: InodeNumber, offset_bytes: u64, data: &[u8]) -> Result<()> {
        checked_end(offset_bytes, data.len() as u64)?;
        self.check_writable()?;
        let inode = self.inodes.get(number);
        let mut at = 0;
        while at < data.len() {
            let offset = offset_bytes + at as u64;
            let step = (data.len() - at).min(STEP_BYTES - (offset as usize % BLOCK_SIZE));
            self.throttle_dirty_data(&inode, blocks_for_bytes(step as u64))?;
            self.write_step(&inode, offset, &data[at..at + step])?;
            at += step;
        }
        Ok(())
    }

    fn write_step(&self, inode: &Arc<Inode>, offset_bytes: u64, data: &[u8]) -> Result<()> {
        let bytes = offset_bytes..offset_bytes + data.len() as u64;
        let blocks = blocks_of(bytes.clone());
        let reservation = self.reserve_for_write(inode, &blocks)?;
        let mut state = self.write_inode(inode)?;
        state.expect_regular()?;
        // What may fail first: only the blocks at both ends can be partial.
        let last = blocks.end - 1;
        let mut head = self.content_for(inode, &state, blocks.start, &bytes)?;
        let mut tail = if last == blocks.start { None } else { self.content_for(inode, &state, last, &bytes)? };
        for block in blocks {
            let part = part_of_block(block, &bytes);
            let source = (block * BLOCK + part.start as u64 - offset_bytes) as usize;
            let old = head.take().or_else(|| if block == last { tail.take() } else { None });
            self.write_page(&mut state, block, part.clone(), &data[source..source + part.len()], old);
            self.take_for_page(&mut state, &reservation);
        }
        state.item.size = state.item.size.max(bytes.end);
        state.size_dirty |= state.item.size != state.disk_size;
        state.times_dirty = true;
        self.touch(&mut state);
        self.list_dirty(inode);
        Ok(())
    }

    /// Space for writing `blocks`; blocks allocated before need none, and that is asked only when space is short.
    fn reserve_for_write(&self, inode: &Arc<Inode>, blocks: &Range<u64>) -> Result<Reservation> {
        let count = blocks.end - blocks.start;
        let request = Request { data_blocks: count, nodes: 1 + count / 64 };
        match self.reserve(request, Effort::Ordinary) {
            Ok(reservation) => Ok(reservation),
            Err(error) => {
                let extents = self.extents_in(inode.number, blocks.start, blocks.end, usize::MAX)?;
                let preallocated = gaps(blocks.start, blocks.end, &extents).is_empty()
                    && extents.iter().all(|(_, extent)| extent.kind == ExtentKind::Unwritten);
                if !preallocated {
                    return Err(error);
                }
                Ok(self.reserve(Request { data_blocks: 0, nodes: 1 }, Effort::Writeback)?)
            }
        }
    }

    /// What a block holds before a part of it is written, if that matters and is not in memory.
    fn content_for(&self, inode: &Inode, state: &InodeState, block: u64, bytes: &Range<u64>) -> Result<Option<Box<[u8; BLOCK_SIZE]>>> {
        let needed = part_of_block(block, bytes).len() < BLOCK_SIZE && block * BLOCK < state.item.size && !state.pages.contains_key(&block);
        if needed { Ok(Some(self.read_block(inode.number, state, block)?)) } else { Ok(None) }
    }

    fn write_page(&self, state: &mut InodeState, block: u64, part: Range<usize>, data: &[u8], old: Option<Box<[u8; BLOCK_SIZE]>>) {
        let whole = <&[u8; BLOCK_SIZE]>::try_from(data).ok();
        let page = match (state.pages.entry(block), whole) {
            // Into new memory, without looking at what was there.
            (Entry::Vacant(entry), Some(content)) => entry.insert(Page { data: Arc::new(*content), state: PageState::Writing }),
            (entry, _) => {
                let page = entry.or_insert_with(|| {
                    let content = old.unwrap_or_else(|| Box::new([0; BLOCK_SIZE]));
                    Page { data: Arc::from(content), state: PageState::Writing }
                });
                Arc::make_mut(&mut page.data)[part].copy_from_slice(data);
                page
            }
        };
        if page.state != PageState::Dirty {
            state.logged_pages -= u64::from(matches!(page.state, PageState::Logged(_)));
            page.state = PageState::Dirty;
            state.dirty_pages += 1;
            self.dirty_pages.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Keeps, of `reservation`, what the dirty pages of the file need.
    fn take_for_page(&self, state: &mut InodeState, reservation: &Reservation) {
        let dirty_pages = state.dirty_pages;
        let held = state.reservation.as_ref().map_or((0, 0), |r| (r.data_blocks(), r.nodes()));
        let blocks = dirty_pages.saturating_sub(held.0).min(reservation.data_blocks());
        let nodes = (1 + dirty_pages / 64).saturating_sub(held.1).min(reservation.nodes());
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
        let blocks: Vec<u64> = state.pages.range(from..to).map(|(block, _)| *block).collect();
        for block in blocks {
            if state.remove_page(block) {
                self.dirty_pages.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.trim_reservation(state);
    }

    /// Gives back what the dirty pages don't need any more.
    pub(crate) fn trim_reservation(&self, state: &mut InodeState) {
        if state.dirty_pages == 0 {
            state.reservation = None;
        } else if let Some(reservation) = &state.reservation {
            let surplus = reservation.data_blocks().saturating_sub(state.dirty_pages);
            reservation.give_back(surplus, 0);
        }
    }

    /// Writes zeros over bytes of blocks that exist; holes stay holes.
    pub(crate) fn zero_part(&self, inode: &Arc<Inode>, bytes: Range<u64>) -> Result<()> {
        let block = bytes.start / BLOCK;
        let part = part_of_block(block, &bytes);
        let reservation = self.reserve(Request { data_blocks: 1, nodes: 1 }, Effort::Removal)?;
        let mut state = self.write_inode(inode)?;
        let hole = !state.pages.contains_key(&block)
            && !self.extents_in(inode.number, block, block + 1, 1)?.iter().any(|(_, extent)| extent.kind == ExtentKind::Data);
        if hole || part.is_empty() {
            return Ok(());
        }
        let zeros = vec![0; part.len()];
        let old = self.content_for(inode, &state, block, &bytes)?;
        self.write_page(&mut state, block, part, &zeros, old);
        self.take_for_page(&mut state, &reservation);
        self.list_dirty(inode);
        Ok(())
    }

    /// The next data or hole at or after `offset_bytes`.
    pub(crate) fn seek(&self, number: InodeNumber, offset_bytes: u64, target: SeekTarget) -> Result<u64> {
        let inode = self.inodes.get(number);
        let state = self.read_inode(&inode)?;
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
    fn next_data(&self, number: InodeNumber, state: &InodeState, from: u64, end: u64) -> Result<Option<u64>> {
        let page = state.pages.range(from..end.max(from)).next().map(|(block, _)| *block);
        let mut at = from;
        while at < page.unwrap_or(end) {
            let Some((start, extent)) = self.extents_in(number, at, end, 1)?.into_iter().next() else { break };
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
        Ok(extent.filter(|(_, extent)| extent.kind == ExtentKind::Data).map(|(start, extent)| start + extent.blocks))
    }
}
