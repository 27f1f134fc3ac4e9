//! A log checkpoint: the items that changed since the previous checkpoint.
//!
//! ```text
//! | header | checkpoint header | entry | entry | … | zeros to a whole block |
//! entry: tree u64, inode u64, offset u64, value length u16, kind u8, flags u8, reserved u32, value
//! ```
//! It occupies consecutive blocks of the ring, wrapping at the ring's end. The address in the
//! common header is its first block **within the ring**, the generation is its transaction, and the
//! length covers header and entries.
//!
//! Replay accepts a checkpoint only if its checksum matches, its epoch is the superblock's, its
//! sequence is the expected one, its generation is not below its predecessor's, and it doesn't rely
//! on a superblock newer than the one that replay found. All data extents marked
//! [`EntryFlags::NEW_DATA`] must also verify, unless the superblock or a later checkpoint's
//! `flushed_sequence` covers the checkpoint.
use crate::header::{HEADER_BYTES, Header};
use crate::units::{BLOCK_SIZE, BlockNumber, COUNTER_MAX, Generation, LogSeq, TreeId, VolumeId};
use crate::{FormatError, Key, Structure, node::VALUE_BYTES_MAX};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"CRNL";
const ENTRIES_AT: usize = HEADER_BYTES + size_of::<RawCheckpoint>();
/// Bytes before the first entry.
pub const CHECKPOINT_HEADER_BYTES: usize = ENTRIES_AT;
/// Bytes of an entry before its value.
pub const ENTRY_HEADER_BYTES: usize = size_of::<RawEntry>();

/// The part of a checkpoint after the common header.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RawCheckpoint {
    /// Position in the chain: the predecessor's plus 1.
    pub sequence: U64,
    /// Mount during which it was written.
    pub log_epoch: U64,
    /// Newest checkpoint known to be durable when this one was written.
    pub flushed_sequence: U64,
    /// Last operation in the checkpoint.
    pub last_operation: U64,
    /// Next inode number at that time.
    pub next_inode: U64,
    /// Number of entries.
    pub entries: U32,
    /// Its own generation minus that of the newest superblock known to be durable when it was
    /// written; 0 if not recorded.
    pub superblock_distance: U32,
}

/// The beginning of an entry.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RawEntry {
    /// The item's tree.
    pub tree: U64,
    /// Key: inode.
    pub inode: U64,
    /// Key: offset.
    pub offset: U64,
    /// Bytes of value that follow.
    pub value_length: U16,
    /// Key: kind.
    pub kind: u8,
    /// [`EntryFlags`].
    pub flags: u8,
    /// Zero; reserved.
    pub reserved: U32,
}

/// The effect of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct EntryFlags(pub u8);

impl EntryFlags {
    /// The item is removed; otherwise it is inserted or replaced.
    pub const DELETE: Self = Self(1);
    /// The item is an extent whose data may not have been flushed before this checkpoint: replay
    /// verifies it.
    pub const NEW_DATA: Self = Self(2);
    /// Whether all bits of `other` are set.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// One change of one item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CheckpointEntry<'a> {
    /// The item's tree.
    pub tree: TreeId,
    /// The item's key.
    pub key: Key,
    /// The effect on it.
    pub flags: EntryFlags,
    /// Its new value; empty for a removal.
    pub value: &'a [u8],
}

impl CheckpointEntry<'_> {
    /// Bytes in the log.
    pub fn bytes(&self) -> usize {
        ENTRY_HEADER_BYTES + self.value.len()
    }
}

/// The fields of a checkpoint besides its entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CheckpointHeader {
    /// Position in the chain.
    pub sequence: u64,
    /// Mount during which it was written.
    pub log_epoch: u64,
    /// Its transaction.
    pub generation: Generation,
    /// Newest checkpoint known to be durable when this one was written.
    pub flushed_sequence: u64,
    /// Last operation in the checkpoint.
    pub last_operation: LogSeq,
    /// Next inode number at that time.
    pub next_inode: u64,
    /// Newest superblock known to be durable when this was written. Items in its trees may be in no
    /// checkpoint from here on. 0 if not recorded.
    pub superblock: Generation,
}

impl CheckpointHeader {
    /// The stored form of [`CheckpointHeader::superblock`]; 0 if the value doesn't fit.
    fn superblock_distance(&self) -> u32 {
        self.generation
            .0
            .checked_sub(self.superblock.0)
            .and_then(|distance| u32::try_from(distance).ok())
            .unwrap_or(0)
    }
}

/// Collects entries and makes the blocks of a checkpoint in the caller's memory.
pub struct CheckpointBuilder<'m> {
    memory: &'m mut [u8],
    length_bytes: usize,
    entries: u32,
}

impl<'m> CheckpointBuilder<'m> {
    /// A builder in `memory`, with any content: whole blocks, with room for
    /// [`CHECKPOINT_HEADER_BYTES`] and all entries.
    ///
    /// # Panics
    /// If there is no room for the header.
    pub fn new(memory: &'m mut [u8]) -> Self {
        assert!(
            memory.len() >= ENTRIES_AT && memory.len().is_multiple_of(BLOCK_SIZE),
            "a checkpoint in {} bytes",
            memory.len()
        );
        Self { memory, length_bytes: ENTRIES_AT, entries: 0 }
    }
    /// Adds an entry.
    ///
    /// # Panics
    /// If the memory has no room for it.
    pub fn push(&mut self, entry: CheckpointEntry<'_>) {
        debug_assert!(entry.value.len() <= VALUE_BYTES_MAX);
        let raw = RawEntry {
            tree: U64::new(entry.tree.0),
            inode: U64::new(entry.key.inode),
            offset: U64::new(entry.key.offset),
            value_length: U16::new(entry.value.len() as u16),
            kind: entry.key.kind,
            flags: entry.flags.0,
            reserved: U32::ZERO,
        };
        let value_at = self.length_bytes + ENTRY_HEADER_BYTES;
        let end = value_at + entry.value.len();
        self.memory[self.length_bytes..value_at].copy_from_slice(raw.as_bytes());
        self.memory[value_at..end].copy_from_slice(entry.value);
        self.length_bytes = end;
        self.entries += 1;
    }
    /// Number of entries so far.
    pub fn entries(&self) -> u32 {
        self.entries
    }
    /// Number of blocks that the checkpoint will take.
    pub fn blocks(&self) -> u64 {
        self.length_bytes.div_ceil(BLOCK_SIZE) as u64
    }
    /// The sealed blocks of the checkpoint that starts at `ring_block`, at the beginning of the
    /// memory.
    pub fn finish(
        self,
        header: &CheckpointHeader,
        volume: VolumeId,
        ring_block: u64,
    ) -> &'m mut [u8] {
        let common = Header::new(
            MAGIC,
            self.length_bytes,
            volume,
            BlockNumber(ring_block),
            header.generation,
        );
        let raw = RawCheckpoint {
            sequence: U64::new(header.sequence),
            log_epoch: U64::new(header.log_epoch),
            flushed_sequence: U64::new(header.flushed_sequence),
            last_operation: U64::new(header.last_operation.0),
            next_inode: U64::new(header.next_inode),
            entries: U32::new(self.entries),
            superblock_distance: U32::new(header.superblock_distance()),
        };
        let bytes = &mut self.memory[..self.length_bytes.next_multiple_of(BLOCK_SIZE)];
        bytes[..HEADER_BYTES].copy_from_slice(common.as_bytes());
        bytes[HEADER_BYTES..ENTRIES_AT].copy_from_slice(raw.as_bytes());
        bytes[self.length_bytes..].fill(0);
        Header::seal(bytes);
        bytes
    }
}

/// A checkpoint read from the log.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Its fields.
    pub header: CheckpointHeader,
    bytes: Vec<u8>,
    entries: u32,
}

impl Checkpoint {
    /// Number of blocks of the checkpoint with the first block `block`, if that looks like one.
    /// Does not validate it.
    pub fn blocks_announced(block: &[u8]) -> Option<u64> {
        let (header, _) = Header::read_from_prefix(block).ok()?;
        let length = header.length.get() as usize;
        (header.magic == MAGIC && length >= ENTRIES_AT).then(|| length.div_ceil(BLOCK_SIZE) as u64)
    }

    /// Decodes the checkpoint in `bytes` (whole blocks), which starts at `ring_block`, and checks
    /// every entry.
    ///
    /// # Errors
    /// If anything in it is wrong.
    pub fn decode(
        mut bytes: Vec<u8>,
        volume: VolumeId,
        ring_block: u64,
    ) -> Result<Self, FormatError> {
        let address = BlockNumber(ring_block);
        let common = Header::verify(&bytes, MAGIC, Structure::Checkpoint, Some(volume), address)?;
        let fail = |problem: String| Err(FormatError::new(Structure::Checkpoint, address, problem));
        bytes.truncate(common.length.get() as usize);
        let Some(Ok(raw)) = bytes.get(HEADER_BYTES..ENTRIES_AT).map(RawCheckpoint::read_from_bytes)
        else {
            return fail(format!("only {} bytes", bytes.len()));
        };
        let counters =
            [common.generation, raw.sequence, raw.log_epoch, raw.last_operation, raw.next_inode];
        if let Some(counter) = counters.iter().find(|counter| counter.get() > COUNTER_MAX) {
            return fail(format!("impossible counter {counter}"));
        }
        let superblock = match raw.superblock_distance.get() {
            0 => 0,
            distance => match common.generation.get().checked_sub(distance.into()) {
                Some(superblock) => superblock,
                None => {
                    return fail(format!(
                        "generation {} relies on a superblock {distance} before it",
                        common.generation
                    ));
                }
            },
        };
        let checkpoint = Self {
            header: CheckpointHeader {
                sequence: raw.sequence.get(),
                log_epoch: raw.log_epoch.get(),
                generation: Generation(common.generation.get()),
                flushed_sequence: raw.flushed_sequence.get(),
                last_operation: LogSeq(raw.last_operation.get()),
                next_inode: raw.next_inode.get(),
                superblock: Generation(superblock),
            },
            bytes,
            entries: raw.entries.get(),
        };
        let mut at = ENTRIES_AT;
        for index in 0..checkpoint.entries {
            match checkpoint.entry_at(at) {
                Some(entry) if entry.value.len() <= VALUE_BYTES_MAX => at += entry.bytes(),
                _ => {
                    return fail(format!(
                        "entry {index} of {} reaches past the end",
                        checkpoint.entries
                    ));
                }
            }
        }
        if at != checkpoint.bytes.len() {
            return fail(format!("{} bytes after the last entry", checkpoint.bytes.len() - at));
        }
        Ok(checkpoint)
    }

    fn entry_at(&self, at: usize) -> Option<CheckpointEntry<'_>> {
        let (raw, rest) = RawEntry::read_from_prefix(self.bytes.get(at..)?).ok()?;
        Some(CheckpointEntry {
            tree: TreeId(raw.tree.get()),
            key: Key { inode: raw.inode.get(), kind: raw.kind, offset: raw.offset.get() },
            flags: EntryFlags(raw.flags),
            value: rest.get(..raw.value_length.get() as usize)?,
        })
    }

    /// The entries, in the order in which they were written.
    pub fn entries(&self) -> impl Iterator<Item = CheckpointEntry<'_>> {
        let mut at = ENTRIES_AT;
        (0..self.entries).map(move |_| {
            let entry = self.entry_at(at).expect("checked when decoding");
            at += entry.bytes();
            entry
        })
    }
    /// Number of blocks in the ring.
    pub fn blocks(&self) -> u64 {
        self.bytes.len().div_ceil(BLOCK_SIZE) as u64
    }
}
