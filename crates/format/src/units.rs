//! Newtypes for every kind of id, address and sequence, and the fixed sizes of the format.
use crate::TREE_FILES;
use std::fmt;
use std::ops::{Add, AddAssign, Range, Sub};

/// Smallest unit of allocation and of data checksums, in bytes.
pub const BLOCK_SIZE: usize = 4096;
/// Size of a B-tree node, in bytes.
pub const NODE_SIZE: usize = 16 * 1024;
/// Blocks of one node ("cluster"). A node's address is a multiple of it.
pub const NODE_BLOCKS: u64 = (NODE_SIZE / BLOCK_SIZE) as u64;
/// Smallest unit that a device writes atomically, in bytes.
pub const SECTOR_SIZE: usize = 512;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u64);
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.0)
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
        impl $name {
            /// The next value.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0 + 1)
            }
        }
    };
}

id!(/** Address on the device, in blocks of 4 KiB. */ BlockNumber);
id!(
    /// Index of a block of 4 KiB within a file: block 0 holds the first bytes of the file.
    ///
    /// A block of a file is not a block of the device ([`BlockNumber`]); the extents of the file
    /// map one to the other. A number of blocks is a plain `u64`.
    FileBlock
);
id!(/** Number of a transaction; 0 means "none". */ Generation);
id!(/** Number of a file system object; never used twice in the life of a volume. */ InodeNumber);
id!(/** Number of a tree in the root tree. */ TreeId);
id!(/** Position of an operation in the order of all operations; 0 means "none". */ LogSeq);

impl TreeId {
    /// Whether the tree is that of a subvolume.
    pub fn holds_files(self) -> bool {
        (TREE_FILES.0..COUNTER_MAX).contains(&self.0)
    }
}

impl BlockNumber {
    /// Byte offset of this block on the device.
    pub fn offset_bytes(self) -> u64 {
        self.0 * BLOCK_SIZE as u64
    }
}

impl FileBlock {
    /// The first block of a file.
    pub const FIRST: Self = Self(0);
    /// The bound above all blocks of a file.
    pub const END: Self = Self(u64::MAX);

    /// The block that holds the byte at `offset_bytes`.
    pub fn round_down(offset_bytes: u64) -> Self {
        Self(offset_bytes / BLOCK_SIZE as u64)
    }
    /// The first block that begins at or after `offset_bytes`.
    pub fn round_up(offset_bytes: u64) -> Self {
        Self(blocks_for_bytes(offset_bytes))
    }
    /// Byte offset of this block in the file.
    pub fn offset_bytes(self) -> u64 {
        self.0 * BLOCK_SIZE as u64
    }
    /// The block `blocks` before this one, or the first block of the file.
    #[must_use]
    pub fn saturating_sub(self, blocks: u64) -> Self {
        Self(self.0.saturating_sub(blocks))
    }
}

// Only damage leads behind the last block.
impl Add<u64> for FileBlock {
    type Output = Self;
    fn add(self, blocks: u64) -> Self {
        Self(self.0.saturating_add(blocks))
    }
}
impl AddAssign<u64> for FileBlock {
    fn add_assign(&mut self, blocks: u64) {
        *self = *self + blocks;
    }
}
impl Sub<u64> for FileBlock {
    type Output = Self;
    fn sub(self, blocks: u64) -> Self {
        Self(self.0 - blocks)
    }
}
/// The number of blocks from the second to the first.
impl Sub for FileBlock {
    type Output = u64;
    fn sub(self, earlier: Self) -> u64 {
        self.0 - earlier.0
    }
}

/// Generations, inode numbers, epochs and sequences above this are damage: no volume lives that
/// long, and there is still room to count.
pub const COUNTER_MAX: u64 = 1 << 62;

/// A volume with an epoch or sequence above this is mounted read-only, and no repair raises its
/// counters. So no counter ever reaches the value that a reader takes for damage.
pub const COUNTER_WRITABLE_MAX: u64 = 1 << 61;

/// The same for generations, which stand in the keys of dead runs, with 48 bits.
pub const GENERATION_WRITABLE_MAX: u64 = 1 << 47;

/// Inode numbers are below this, so that a mount can put the subvolume into the bits above.
pub const INODE_NUMBER_END: u64 = 1 << 44;

/// Identity of a volume, random, made by mkfs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct VolumeId(pub [u8; 16]);

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}
impl fmt::Debug for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VolumeId({self})")
    }
}

/// `blocks` consecutive blocks from `start`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct BlockRange {
    /// First block.
    pub start: BlockNumber,
    /// Number of blocks.
    pub blocks: u64,
}

impl BlockRange {
    /// `blocks` blocks from `start`.
    pub fn new(start: BlockNumber, blocks: u64) -> Self {
        Self { start, blocks }
    }
    /// The block after the last one.
    pub fn end(self) -> BlockNumber {
        BlockNumber(self.start.0 + self.blocks)
    }
    /// The block numbers as a plain range.
    pub fn range(self) -> Range<u64> {
        self.start.0..self.start.0 + self.blocks
    }
    /// The blocks of a node at `address`.
    pub fn node(address: BlockNumber) -> Self {
        Self { start: address, blocks: NODE_BLOCKS }
    }
}

/// Blocks needed to hold `bytes` bytes.
pub fn blocks_for_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK_SIZE as u64)
}
