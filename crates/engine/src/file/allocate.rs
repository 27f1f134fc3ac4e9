//! fallocate: allocating blocks ahead, punching holes, making ranges zero; and copying between
//! files.
//!
//! All of it holds the file's extents mutex and works in operations of bounded size. Partial blocks
//! at the edges of a punched range are zeroed as a write would do it.
use crate::InodeId;
use crate::file::Files;
use crate::file::extents::gaps;
use crate::file::inode::Inode;
use crate::file::offsets::{BLOCK, blocks_of, checked_end, whole_blocks_of};
use crate::store::operation::Effort;
use crate::types::{AllocateMode, WritePlace, WriteTimes};
use crate::{Error, Result};
use cairn_format::{Extent, ExtentKind};
use cairn_space::Request;
use std::ops::Range;
use std::sync::Arc;

/// Longest step of a copy.
const COPY_STEP_BYTES: u64 = 1 << 20;
/// Longest copy on a thread that must not be blocked.
const CACHED_COPY_BYTES_MAX: u64 = 128 << 10;

impl Files {
    /// Does what `mode` says to a range of a file.
    pub(crate) fn allocate(
        &self,
        number: InodeId,
        offset_bytes: u64,
        length_bytes: u64,
        mode: AllocateMode,
        times: WriteTimes,
    ) -> Result<()> {
        if length_bytes == 0 {
            return Err(Error::InvalidArgument("a range of no bytes"));
        }
        let end = checked_end(offset_bytes, length_bytes)?;
        self.store.check_writable_at(number)?;
        let inode = self.inodes.get(number);
        self.read_inode_in_use(&inode)?.expect_regular()?;
        match mode {
            AllocateMode::Allocate { keep_size } => {
                self.fill(&inode, offset_bytes..end, keep_size, times)
            }
            AllocateMode::PunchHole => self.punch(&inode, offset_bytes, end, times),
            AllocateMode::ZeroRange { keep_size } => {
                self.punch(&inode, offset_bytes, end, times)?;
                self.fill(&inode, offset_bytes..end, keep_size, times)
            }
        }
    }

    /// Puts unwritten extents into the holes of a range.
    fn fill(
        &self,
        inode: &Arc<Inode>,
        bytes: Range<u64>,
        keep_size: bool,
        times: WriteTimes,
    ) -> Result<()> {
        let (end_bytes, blocks) = (bytes.end, blocks_of(bytes));
        let _extents = self.lock_extents(inode);
        self.settle_truncation(inode)?;
        let mut missing = gaps(blocks.clone(), &self.extents_in(inode.number, blocks, usize::MAX)?);
        let wanted = missing.iter().map(|gap| gap.end - gap.start).sum();
        let reservation =
            self.store.reserve(Request { data_blocks: wanted, nodes: 0 }, Effort::Ordinary)?;
        missing.reverse();
        loop {
            let (mut operation, batch) =
                self.store.begin_batch(inode.number, 1, 0, Effort::Writeback)?;
            let mut state = self.write_inode(inode)?;
            for _ in 0..batch {
                let Some(gap) = missing.pop() else { break };
                let wanted = (gap.end - gap.start).min(Extent::UNWRITTEN_BLOCKS_MAX);
                let range = self.store.space.allocate_data(&reservation, wanted, None)?;
                let rest = gap.start + range.blocks..gap.end;
                if !rest.is_empty() {
                    missing.push(rest);
                }
                let extent = Extent {
                    start: range.start,
                    blocks: range.blocks,
                    kind: ExtentKind::Unwritten,
                    generation: operation.generation(),
                    written: operation.generation(),
                    checksums: Vec::new(),
                };
                self.insert_extent(&mut operation, inode.number, &mut state, gap.start, extent)?;
            }
            let finished = missing.is_empty();
            if finished && !keep_size && end_bytes > state.item.size {
                state.item.size = end_bytes;
                state.disk_size = end_bytes;
            }
            if times == WriteTimes::Now {
                self.touch(&mut state);
            }
            operation.put_inode(inode.number, &state.loggable())?;
            let sequence = operation.log();
            state.logged(sequence);
            if finished {
                return Ok(());
            }
        }
    }

    /// Makes a range a hole. Up to the end of the file or further, the block that holds the end
    /// goes as well.
    fn punch(
        &self,
        inode: &Arc<Inode>,
        offset_bytes: u64,
        end_bytes: u64,
        times: WriteTimes,
    ) -> Result<()> {
        // A full volume refuses it here, or not at all: beside snapshots it may give nothing back.
        drop(self.store.begin_batch(inode.number, 3, 0, Effort::Removal)?);
        let size = self.read_inode(inode)?.item.size;
        let whole = whole_blocks_of(offset_bytes..end_bytes);
        let visible_end = end_bytes.min(size.next_multiple_of(BLOCK));
        if offset_bytes < visible_end {
            if !offset_bytes.is_multiple_of(BLOCK) {
                let head_end = visible_end.min(whole.start.offset_bytes());
                self.zero_part(inode, offset_bytes..head_end)?;
            }
            if !visible_end.is_multiple_of(BLOCK) && whole.end >= whole.start {
                self.zero_part(inode, whole.end.offset_bytes()..visible_end)?;
            }
        }
        let _extents = self.lock_extents(inode);
        self.settle_truncation(inode)?;
        loop {
            let (mut operation, batch) =
                self.store.begin_batch(inode.number, 3, 0, Effort::Cleanup)?;
            let mut state = self.write_inode(inode)?;
            // Under its lock the inode has no data behind its size.
            let file_end = state.item.size.next_multiple_of(BLOCK).max(end_bytes);
            let whole = match end_bytes >= state.item.size {
                true => whole_blocks_of(offset_bytes..file_end),
                false => whole.clone(),
            };
            let mut finished = true;
            if !whole.is_empty() {
                let gone = self.extents_in(inode.number, whole.clone(), batch)?;
                finished = gone.len() < batch;
                self.drop_extents(&mut operation, inode.number, &mut state, whole.clone(), &gone)?;
                // The extents that stay until the next round may have their data in memory alone.
                let gone_end = gone
                    .last()
                    .filter(|_| !finished)
                    .map_or(whole.end, |(start, extent)| (*start + extent.blocks).min(whole.end));
                self.drop_pages(&mut state, whole.start..gone_end);
                if state.all_logged() {
                    // What held the size back is gone: the rest of the file is a hole.
                    state.disk_size = state.item.size;
                }
            }
            if times == WriteTimes::Now {
                self.touch(&mut state);
            }
            operation.put_inode(inode.number, &state.loggable())?;
            let sequence = operation.log();
            state.logged(sequence);
            self.unlist_clean(inode, &state);
            if finished {
                return Ok(());
            }
        }
    }

    /// Copies bytes from one file to another; returns how many, fewer at the end that the source
    /// has now: a file that is copied behind itself grows, and the copy must not follow.
    pub(crate) fn copy_range(
        &self,
        from: InodeId,
        from_offset: u64,
        to: InodeId,
        to_offset: u64,
        length_bytes: u64,
        times: WriteTimes,
    ) -> Result<u64> {
        let mut copied = 0;
        let length_bytes =
            length_bytes.min(self.attributes(from)?.size_bytes.saturating_sub(from_offset));
        self.read(from, from_offset, 0, &mut Vec::new())?;
        if from == to && overlap(from_offset, to_offset, length_bytes) {
            return Err(Error::InvalidArgument("a range is copied onto a part of itself"));
        }
        while copied < length_bytes {
            let mut buffer =
                self.buffers.take((length_bytes - copied).min(COPY_STEP_BYTES) as usize);
            let count = self
                .read_into(from, from_offset + copied, &mut buffer)?
                .min((length_bytes - copied) as usize);
            if count == 0 {
                break;
            }
            let place = WritePlace::At(to_offset + copied);
            self.write_shared(to, place, &buffer.share(), 0..count, times)?;
            copied += count as u64;
        }
        Ok(copied)
    }

    /// As [`Files::copy_range`], if what is copied is little and in memory; otherwise nothing
    /// happens.
    pub(crate) fn copy_cached(
        &self,
        from: InodeId,
        from_offset: u64,
        to: InodeId,
        to_offset: u64,
        length_bytes: u64,
        times: WriteTimes,
    ) -> Option<Result<u64>> {
        let size = self.try_read_inode_in_use(&self.inodes.get(from))?.item.size;
        let length_bytes = length_bytes.min(size.saturating_sub(from_offset));
        if length_bytes == 0
            || length_bytes > CACHED_COPY_BYTES_MAX
            || (from == to && overlap(from_offset, to_offset, length_bytes))
        {
            return None;
        }
        let mut buffer = self.buffers.take(length_bytes as usize);
        let count =
            self.read_cached_into(from, from_offset, &mut buffer)?.min(length_bytes as usize);
        let place = WritePlace::At(to_offset);
        let written = self.write_shared(to, place, &buffer.share(), 0..count, times);
        Some(written.map(|_| count as u64))
    }
}

/// Whether two ranges of this length have a part in common.
fn overlap(first_offset: u64, second_offset: u64, length_bytes: u64) -> bool {
    first_offset.abs_diff(second_offset) < length_bytes
}
