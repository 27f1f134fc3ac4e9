//! The blocks of the fixed structures of a volume.
//!
//! ```text
//! block 0        never written (room for a boot sector)
//! block 16       superblock slot 0          block 32  superblock slot 1
//! block 64       bitmap table, slot 0 of every group, then slot 1 of every group (1 block each)
//! then           log ring (`log_blocks`)
//! then           first block that can be allocated, aligned to a node
//! last block     superblock copy
//! ```
//! The bitmaps cover the device from block 0. The fixed structures are marked used in them.
use crate::units::{BLOCK_SIZE, BlockNumber, BlockRange, NODE_BLOCKS};

/// Sizes and addresses, all derived from numbers in the superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Length of the volume in blocks, the superblock copy included.
    pub total_blocks: u64,
    /// Length of the log ring in blocks.
    pub log_blocks: u64,
}

impl Geometry {
    /// Blocks of one block group: 64 MiB.
    pub const GROUP_BLOCKS: u64 = 16 * 1024;
    /// Superblock slots that alternate.
    pub const SUPERBLOCKS: [BlockNumber; 2] = [BlockNumber(16), BlockNumber(32)];
    /// First block of the bitmap table.
    pub const BITMAP_START: BlockNumber = BlockNumber(64);
    /// Smallest volume, in bytes.
    pub const VOLUME_BYTES_MIN: u64 = 16 << 20;
    /// Smallest log, in blocks: 1 MiB.
    pub const LOG_BLOCKS_MIN: u64 = 256;

    /// Number of block groups; the last one may be short.
    pub fn groups(&self) -> u64 {
        self.total_blocks.div_ceil(Self::GROUP_BLOCKS)
    }
    /// The blocks of group `group`.
    pub fn group_range(&self, group: u64) -> BlockRange {
        let start = group * Self::GROUP_BLOCKS;
        BlockRange::new(BlockNumber(start), Self::GROUP_BLOCKS.min(self.total_blocks - start))
    }
    /// Block of bitmap slot `slot` (0 or 1) of `group`.
    pub fn bitmap_block(&self, group: u64, slot: usize) -> BlockNumber {
        BlockNumber(Self::BITMAP_START.0 + slot as u64 * self.groups() + group)
    }
    /// The whole bitmap table.
    pub fn bitmap_table(&self) -> BlockRange {
        BlockRange::new(Self::BITMAP_START, 2 * self.groups())
    }
    /// The log ring.
    pub fn log(&self) -> BlockRange {
        BlockRange::new(self.bitmap_table().end(), self.log_blocks)
    }
    /// First block that can be allocated.
    pub fn data_start(&self) -> BlockNumber {
        BlockNumber(self.log().end().0.next_multiple_of(NODE_BLOCKS))
    }
    /// Copy of the superblock.
    pub fn superblock_copy(&self) -> BlockNumber {
        BlockNumber(self.total_blocks - 1)
    }
    /// Blocks that can be allocated: from `data_start` to the copy of the superblock.
    pub fn allocatable(&self) -> BlockRange {
        let start = self.data_start();
        BlockRange::new(start, self.superblock_copy().0.saturating_sub(start.0))
    }
    /// Whether `range` lies within the allocatable blocks.
    pub fn contains(&self, range: BlockRange) -> bool {
        let allocatable = self.allocatable();
        range.blocks > 0
            && range.start >= allocatable.start
            && range.start.0.checked_add(range.blocks).is_some_and(|end| end <= allocatable.end().0)
    }
    /// The geometry that mkfs gives a volume of `bytes` bytes. The log takes 1/64 of it, between
    /// 4 MiB and 256 MiB, unless `log_bytes` is given. `None` if less than half remains for files.
    pub fn for_size(bytes: u64, log_bytes: Option<u64>) -> Option<Self> {
        let total_blocks = bytes / BLOCK_SIZE as u64;
        let log_bytes = log_bytes.unwrap_or_else(|| (bytes / 64).clamp(4 << 20, 256 << 20));
        let geometry = Self { total_blocks, log_blocks: log_bytes / BLOCK_SIZE as u64 };
        let valid = bytes >= Self::VOLUME_BYTES_MIN
            && geometry.log_blocks >= Self::LOG_BLOCKS_MIN
            && geometry.log_blocks <= total_blocks
            && geometry.allocatable().blocks >= total_blocks / 2;
        valid.then_some(geometry)
    }
}
