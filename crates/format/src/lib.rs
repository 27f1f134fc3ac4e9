//! On-disk structures of a Cairn volume. This crate does no I/O.
//!
//! Every structure with blocks of its own (superblock, node, bitmap, checkpoint) begins with a
//! [`Header`]: magic, CRC-32C, version, length, volume id, its own address and a generation.
//! Integers are little-endian. `docs/format.md` has one table row per field; the test `layout`
//! compares it with the code.
//!
//! Invariants of every decoder in this crate:
//! - a decoder never panics, whatever the bytes are; it returns a [`FormatError`] that names
//!   structure and block;
//! - a decoder checks checksum, volume id and address before any other field;
//! - an encoder followed by the decoder is the identity.
#![forbid(unsafe_code)]

mod bitmap;
mod checkpoint;
mod error;
mod geometry;
mod header;
mod items;
mod key;
pub mod node;
mod shown;
mod snapshot;
mod subvolume;
mod superblock;
mod units;

pub use bitmap::{BITMAP_BYTES, Bitmap, GENERATION_OF_MKFS, bitmap_generations_checksum};
pub use checkpoint::{
    CHECKPOINT_HEADER_BYTES, Checkpoint, CheckpointBuilder, CheckpointEntry, CheckpointHeader,
    ENTRY_HEADER_BYTES, EntryFlags, RawCheckpoint, RawEntry,
};
pub use error::{FormatError, Structure};
pub use geometry::Geometry;
pub use header::{HEADER_BYTES, Header};
pub use items::{
    DirectoryEntry, EntryTarget, Extent, ExtentKind, FileType, InodeItem, MAX_EXTENT_BLOCKS,
    OrphanKind, RawInode, RootItem, SYMLINK_PART_BYTES, Timestamp, XATTR_INLINE_BYTES_MAX,
    XATTR_OWN_PREFIX, XattrItem, decode_orphan, encode_orphan,
};
pub use key::{
    INODE_FIRST, INODE_ORPHANS, INODE_ROOT, ItemKind, Key, TREE_DEAD, TREE_FILES, TREE_ROOTS,
    TREE_SUBVOLUMES, hash_name, name_slot_range,
};
pub use node::{ChildPointer, Node};
pub use shown::shown_bytes;
pub use snapshot::{CleanupItem, DeadListItem, DeadRun, RawDeadRun, RawSnapshot, SnapshotItem};
pub use subvolume::{Inheritance, Origin, RawSubvolume, SubvolumeItem};
pub use superblock::{
    Features, LABEL_BYTES, LogPosition, NodePointer, RawSuperblock, SUPERBLOCK_SLOTS, Superblock,
};
pub use units::{
    BLOCK_SIZE, BlockNumber, BlockRange, COUNTER_MAX, COUNTER_WRITABLE_MAX, FileBlock,
    GENERATION_WRITABLE_MAX, Generation, INODE_NUMBER_END, InodeNumber, LogSeq, NODE_BLOCKS,
    NODE_SIZE, SECTOR_SIZE, TreeId, VolumeId, blocks_for_bytes,
};

/// Version of the format that this crate writes, and the newest that it reads.
pub const FORMAT_VERSION: u16 = 1;

/// CRC-32C (Castagnoli) of `bytes`, as stored for metadata and for every data block.
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

#[cfg(test)]
mod format_tests;
