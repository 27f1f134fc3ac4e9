//! Offsets in a file: bytes, blocks, and parts of blocks.
use crate::{Error, Result};
use cairn_format::{BLOCK_SIZE, FileBlock};
use std::ops::Range;

/// Longest file in bytes.
pub(crate) const FILE_BYTES_MAX: u64 = 1 << 60;
pub(super) const BLOCK: u64 = BLOCK_SIZE as u64;

/// The end of a range of a file, if a file can be that long.
pub(crate) fn checked_end(offset_bytes: u64, length_bytes: u64) -> Result<u64> {
    offset_bytes
        .checked_add(length_bytes)
        .filter(|end| *end <= FILE_BYTES_MAX)
        .ok_or(Error::FileTooLarge(FILE_BYTES_MAX))
}

/// The blocks that hold `bytes`, wholly or in part.
pub(crate) fn blocks_of(bytes: Range<u64>) -> Range<FileBlock> {
    FileBlock::round_down(bytes.start)..FileBlock::round_up(bytes.end)
}

/// The blocks that lie wholly in `bytes`. If there are none, the end may be before the start.
pub(super) fn whole_blocks_of(bytes: Range<u64>) -> Range<FileBlock> {
    FileBlock::round_up(bytes.start)..FileBlock::round_down(bytes.end)
}

/// The part of `block` that lies in `bytes`, relative to the block.
pub(super) fn part_of_block(block: FileBlock, bytes: &Range<u64>) -> Range<usize> {
    let start = block.offset_bytes();
    (bytes.start.max(start) - start) as usize..(bytes.end.min(start + BLOCK) - start) as usize
}
