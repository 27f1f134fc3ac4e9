//! fallocate: allocating blocks ahead, punching holes, making ranges zero; and copying between
//! files.
//!
//! All of it holds the file's extents mutex and works in operations of bounded size. Partial blocks
//! at the edges of a punched range are zeroed as a write would do it.
use crate::file::Files;
use crate::file::extents::gaps;
use crate::file::inode::Inode;
use crate::file::offsets::checked_end;
use crate::store::operation::Effort;
use crate::types::AllocateMode;
use crate::{Error, Result};
use cairn_format::{BLOCK_SIZE, Extent, ExtentKind, InodeNumber, blocks_for_bytes};
use cairn_space::Request;
use std::sync::Arc;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// A copy goes in steps of so much.
const COPY_STEP_BYTES: u64 = 1 << 20;
/// Most that is copied on a thread that must not be kept.
const CACHED_COPY_BYTES_MAX: u64 = 128 << 10;

impl Files {
    /// Does what `mode` says to a range of a file.
    pub(crate) fn allocate(
        &self,
        number: InodeNumber,
        offset_bytes: u64,
        length_bytes: u64,
        mode: AllocateMode,
    ) -> Result<()> {
        if length_bytes == 0 {
            return Err(Error::InvalidArgument("a range of no bytes"));
        }
        let end = checked_end(offset_bytes, length_bytes)?;
        self.store.check_writable()?;
        let inode = self.inodes.get(number);
        self.read_inode_in_use(&inode)?.expect_regular()?;
        match mode {
            AllocateMode::Allocate { keep_size } => self.fill(&inode, offset_bytes, end, keep_size),
            AllocateMode::PunchHole => self.punch(&inode, offset_bytes, end),
            AllocateMode::ZeroRange { keep_size } => {
                self.punch(&inode, offset_bytes, end)?;
                self.fill(&inode, offset_bytes, end, keep_size)
            }
        }
    }

    /// Puts unwritten extents into the holes of a range.
    fn fill(
        &self,
        inode: &Arc<Inode>,
        offset_bytes: u64,
        end_bytes: u64,
        keep_size: bool,
    ) -> Result<()> {
        let (first, last) = (offset_bytes / BLOCK, blocks_for_bytes(end_bytes));
        let _extents = inode.extents.lock();
        self.settle_truncation(inode)?;
        let mut missing =
            gaps(first, last, &self.extents_in(inode.number, first, last, usize::MAX)?);
        let wanted = missing.iter().map(|(from, to)| to - from).sum();
        let reservation =
            self.store.reserve(Request { data_blocks: wanted, nodes: 0 }, Effort::Ordinary)?;
        missing.reverse();
        loop {
            let (mut operation, batch) = self.store.begin_batch(1, 0, Effort::Writeback)?;
            let mut state = self.write_inode(inode)?;
            for _ in 0..batch {
                let Some((from, to)) = missing.pop() else { break };
                let wanted = (to - from).min(Extent::UNWRITTEN_BLOCKS_MAX);
                let range = self.store.space.allocate_data(&reservation, wanted, None)?;
                if from + range.blocks < to {
                    missing.push((from + range.blocks, to));
                }
                let extent = Extent {
                    start: range.start,
                    blocks: range.blocks,
                    kind: ExtentKind::Unwritten,
                    generation: operation.generation(),
                    checksums: Vec::new(),
                };
                self.insert_extent(&mut operation, inode.number, &mut state, from, extent)?;
            }
            let finished = missing.is_empty();
            if finished && !keep_size && end_bytes > state.item.size {
                state.item.size = end_bytes;
                state.disk_size = end_bytes;
            }
            self.touch(&mut state);
            operation.put_inode(inode.number, &state.loggable())?;
            let sequence = operation.log();
            state.logged(sequence);
            if finished {
                return Ok(());
            }
        }
    }

    /// Makes a range a hole.
    fn punch(&self, inode: &Arc<Inode>, offset_bytes: u64, end_bytes: u64) -> Result<()> {
        let size = self.read_inode(inode)?.item.size;
        let (first, last) = (blocks_for_bytes(offset_bytes), end_bytes / BLOCK);
        let visible_end = end_bytes.min(size.next_multiple_of(BLOCK));
        if offset_bytes < visible_end {
            if !offset_bytes.is_multiple_of(BLOCK) {
                self.zero_part(inode, offset_bytes..visible_end.min(first * BLOCK))?;
            }
            if !visible_end.is_multiple_of(BLOCK) && last >= first {
                self.zero_part(inode, last * BLOCK..visible_end)?;
            }
        }
        let _extents = inode.extents.lock();
        self.settle_truncation(inode)?;
        loop {
            let (mut operation, batch) = self.store.begin_batch(3, 0, Effort::Removal)?;
            let mut state = self.write_inode(inode)?;
            let mut finished = true;
            if first < last {
                let gone = self.extents_in(inode.number, first, last, batch)?;
                finished = gone.len() < batch;
                self.drop_extents(&mut operation, inode.number, &mut state, (first, last), &gone)?;
                // The extents that stay until the next round may have their data in memory alone.
                let gone_end = gone
                    .last()
                    .filter(|_| !finished)
                    .map_or(last, |(start, extent)| (start + extent.blocks).min(last));
                self.drop_pages(&mut state, first, gone_end);
                if state.all_logged() {
                    // What held the size back is gone: the rest of the file is a hole.
                    state.disk_size = state.item.size;
                }
            }
            self.touch(&mut state);
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
        from: InodeNumber,
        from_offset: u64,
        to: InodeNumber,
        to_offset: u64,
        length_bytes: u64,
    ) -> Result<u64> {
        let mut copied = 0;
        let length_bytes =
            length_bytes.min(self.attributes(from)?.size_bytes.saturating_sub(from_offset));
        self.read(from, from_offset, 0, &mut Vec::new())?;
        while copied < length_bytes {
            let mut buffer =
                self.buffers.take((length_bytes - copied).min(COPY_STEP_BYTES) as usize);
            let count = self
                .read_into(from, from_offset + copied, &mut buffer)?
                .min((length_bytes - copied) as usize);
            if count == 0 {
                break;
            }
            self.write_shared(to, to_offset + copied, &buffer.share(), 0..count)?;
            copied += count as u64;
        }
        Ok(copied)
    }

    /// As [`Files::copy_range`], if what is copied is little and in memory; otherwise nothing
    /// happens.
    pub(crate) fn copy_cached(
        &self,
        from: InodeNumber,
        from_offset: u64,
        to: InodeNumber,
        to_offset: u64,
        length_bytes: u64,
    ) -> Option<Result<u64>> {
        let size = self.try_read_inode_in_use(&self.inodes.get(from))?.item.size;
        let length_bytes = length_bytes.min(size.saturating_sub(from_offset));
        if length_bytes == 0 || length_bytes > CACHED_COPY_BYTES_MAX {
            return None;
        }
        let mut buffer = self.buffers.take(length_bytes as usize);
        let count =
            self.read_cached_into(from, from_offset, &mut buffer)?.min(length_bytes as usize);
        Some(self.write_shared(to, to_offset, &buffer.share(), 0..count).map(|()| count as u64))
    }
}
