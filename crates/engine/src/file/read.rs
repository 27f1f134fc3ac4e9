//! Reading and seeking in files.
//!
//! A read takes pages from memory, and what is not there from the device, verified.
use crate::InodeId;
use crate::file::Files;
use crate::file::extents::Source;
use crate::file::inode::InodeState;
use crate::file::offsets::{BLOCK, blocks_of};
use crate::types::SeekTarget;
use crate::{Error, Result};
use cairn_blockdev::{BlockBuffer, is_aligned};
use cairn_format::{BLOCK_SIZE, ExtentKind, FileBlock};
use std::ops::Range;

/// Longest read that is done in one step.
const STEP_BLOCKS: u64 = 256;

/// Where the step ends that begins at `at_bytes`.
fn step_end_bytes(at_bytes: u64) -> u64 {
    (FileBlock::round_down(at_bytes) + STEP_BLOCKS).offset_bytes()
}

impl Files {
    /// Appends to `out` up to `length_bytes` bytes from `offset_bytes`, fewer at the end of the
    /// file.
    pub(crate) fn read(
        &self,
        number: InodeId,
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
            let step_end = end.min(step_end_bytes(at));
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
        number: InodeId,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Result<usize> {
        let inode = self.inodes.get(number);
        let state = self.read_inode_in_use(&inode)?;
        state.expect_regular()?;
        let end = offset_bytes.saturating_add(buffer.len() as u64).min(state.item.size);
        let mut at = offset_bytes;
        while at < end {
            let step_end = end.min(step_end_bytes(at));
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
        number: InodeId,
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
        number: InodeId,
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
        number: InodeId,
        state: &InodeState,
        first_block: FileBlock,
        buffer: &mut [u8],
        source: Source,
    ) -> Result<bool> {
        let end_block = first_block + (buffer.len() / BLOCK_SIZE) as u64;
        let gone = state.truncated_from.unwrap_or(FileBlock::END);
        let absent = |blocks: Range<FileBlock>, bytes: &mut [u8]| {
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
        for (blocks, content) in state.pages.within(first_block..end_block) {
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
        number: InodeId,
        state: &InodeState,
        block: FileBlock,
    ) -> Result<BlockBuffer> {
        self.read_copy(number, state, block.offset_bytes()..block.next().offset_bytes())
    }

    /// The next data or hole at or after `offset_bytes`.
    pub(crate) fn seek(
        &self,
        number: InodeId,
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
        let end = FileBlock::round_up(size).min(state.truncated_from.unwrap_or(FileBlock::END));
        let mut at = FileBlock::round_down(offset_bytes);
        match target {
            SeekTarget::Data => match self.next_data(number, &state, at..end)? {
                Some(block) => Ok(block.offset_bytes().max(offset_bytes)),
                None => Err(Error::OutOfRange),
            },
            SeekTarget::Hole => {
                while self.next_data(number, &state, at..end)? == Some(at) {
                    at = match self.data_extent_at(number, at)? {
                        Some(extent_end) => extent_end,
                        None => at.next(),
                    };
                }
                Ok(at.offset_bytes().max(offset_bytes).min(size))
            }
        }
    }

    /// The first of `blocks` that holds data.
    fn next_data(
        &self,
        number: InodeId,
        state: &InodeState,
        blocks: Range<FileBlock>,
    ) -> Result<Option<FileBlock>> {
        let Range { start: mut at, end } = blocks.clone();
        let page = state.pages.within(blocks).next().map(|(blocks, _)| blocks.start);
        while at < page.unwrap_or(end) {
            let Some((start, extent)) = self.extents_in(number, at..end, 1)?.into_iter().next()
            else {
                break;
            };
            if extent.kind == ExtentKind::Data {
                return Ok(Some(page.unwrap_or(FileBlock::END).min(start.max(at))));
            }
            at = start + extent.blocks;
        }
        Ok(page)
    }

    /// Where the data extent that covers a block ends.
    fn data_extent_at(&self, number: InodeId, block: FileBlock) -> Result<Option<FileBlock>> {
        let extent = self.extents_in(number, block..block.next(), 1)?.pop();
        Ok(extent
            .filter(|(_, extent)| extent.kind == ExtentKind::Data)
            .map(|(start, extent)| start + extent.blocks))
    }
}
