//! Items of snapshots: the snapshots of a subvolume, its dead lists, and what their deletion left
//! to do. They stand in the tree of subvolumes; dead runs have a tree of their own.
//!
//! A *dead run* is a reference (an extent, or a pointer to a node) that a subvolume has given up
//! while snapshots of it still have it. It stands in a *dead list*; each snapshot begins one.
use crate::units::{BlockNumber, BlockRange, COUNTER_MAX, Generation, NODE_BLOCKS};
use crate::{FormatError, NodePointer, Structure, SubvolumeItem};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

fn damaged(what: String) -> FormatError {
    FormatError::new(Structure::Item, BlockNumber(0), what)
}

/// A snapshot of a subvolume: the tree of files as it was at the cut of the transaction in its key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotItem {
    /// Root of the tree then.
    pub root: NodePointer,
    /// When it was made, in nanoseconds since 1970.
    pub created_ns: u64,
    /// It is not to be deleted.
    pub is_held: bool,
    /// It has no name any more, and goes with the last fork of it.
    pub is_hidden: bool,
    /// No entry in it names a subvolume.
    pub names_none: bool,
    /// As that of a subvolume, and no other one's; 0 only if it never had a name.
    pub number: u32,
    /// Identity, random.
    pub uuid: [u8; 16],
    /// Its name; those of a subvolume's snapshots differ. A hidden one has none.
    pub name: Vec<u8>,
}

/// The head of [`SnapshotItem`] on disk; the name follows.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawSnapshot {
    pub root_block: U64,
    pub root_generation: U64,
    pub root_level: u8,
    pub reserved: [u8; 3],
    pub number: U32,
    pub created_ns: U64,
    pub flags: U64,
    pub uuid: [u8; 16],
}

const FLAG_HELD: u64 = 1;
const FLAG_HIDDEN: u64 = 2;
const FLAG_NAMES_NONE: u64 = 4;

impl SnapshotItem {
    /// Longest name in bytes.
    pub const NAME_BYTES_MAX: usize = 255;

    /// Item value.
    pub fn encode(&self) -> Vec<u8> {
        let raw = RawSnapshot {
            root_block: U64::new(self.root.block.0),
            root_generation: U64::new(self.root.generation.0),
            root_level: self.root.level,
            reserved: [0; 3],
            number: U32::new(self.number),
            created_ns: U64::new(self.created_ns),
            flags: U64::new(
                if self.is_held { FLAG_HELD } else { 0 }
                    | if self.is_hidden { FLAG_HIDDEN } else { 0 }
                    | if self.names_none { FLAG_NAMES_NONE } else { 0 },
            ),
            uuid: self.uuid,
        };
        [raw.as_bytes(), &self.name].concat()
    }

    /// From an item value.
    ///
    /// # Errors
    /// If it has a wrong length, an impossible root, number or name, or unknown flags.
    pub fn decode(value: &[u8]) -> Result<Self, FormatError> {
        let Ok((raw, name)) = RawSnapshot::read_from_prefix(value) else {
            return Err(damaged(format!("snapshot item of {} bytes", value.len())));
        };
        let flags = raw.flags.get();
        if flags & !(FLAG_HELD | FLAG_HIDDEN | FLAG_NAMES_NONE) != 0 {
            return Err(damaged(format!("snapshot with unknown flags {flags:#x}")));
        }
        let (is_held, is_hidden) = (flags & FLAG_HELD != 0, flags & FLAG_HIDDEN != 0);
        if is_held && is_hidden {
            return Err(damaged("snapshot without a name that is held".into()));
        }
        let is_name = (1..=Self::NAME_BYTES_MAX).contains(&name.len())
            && !name.iter().any(|byte| matches!(byte, b'/' | 0))
            && !matches!(name, b"." | b"..");
        if is_hidden != name.is_empty() || !is_hidden && !is_name {
            return Err(damaged(format!("snapshot with a name of {} bytes", name.len())));
        }
        if raw.number.get() == 0 && !is_hidden || raw.number.get() >= SubvolumeItem::NUMBER_END {
            return Err(damaged(format!("snapshot with the impossible number {}", raw.number)));
        }
        let root = NodePointer {
            block: BlockNumber(raw.root_block.get()),
            generation: Generation(raw.root_generation.get()),
            level: raw.root_level,
        };
        if root.level >= crate::node::LEVELS_MAX || !root.block.0.is_multiple_of(NODE_BLOCKS) {
            return Err(damaged(format!("snapshot with the impossible root {root:?}")));
        }
        Ok(Self {
            root,
            created_ns: raw.created_ns.get(),
            is_held,
            is_hidden,
            names_none: flags & FLAG_NAMES_NONE != 0,
            number: raw.number.get(),
            uuid: raw.uuid,
            name: name.to_vec(),
        })
    }
}

/// A dead list of a subvolume, begun by the transaction in its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeadListItem {
    /// Key of its runs in the tree of dead runs; used once.
    pub list: u64,
}

impl DeadListItem {
    /// Bytes on disk.
    pub const BYTES: usize = 16;

    /// Item value.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.list.to_le_bytes());
        bytes
    }

    /// From an item value.
    ///
    /// # Errors
    /// If it has a wrong length, an impossible list, or flags that this version doesn't know.
    pub fn decode(value: &[u8]) -> Result<Self, FormatError> {
        let Ok([list, flags]) = <[U64; 2]>::read_from_bytes(value) else {
            return Err(damaged(format!("dead list item of {} bytes", value.len())));
        };
        if list.get() == 0 || list.get() > COUNTER_MAX || flags.get() != 0 {
            return Err(damaged(format!("dead list {list} with flags {flags:#x}")));
        }
        Ok(Self { list: list.get() })
    }
}

/// A snapshot was deleted: runs born above `oldest` and up to `newest`, which is the key's offset,
/// are to be freed, of the subvolume's lists begun in `lists`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CleanupItem {
    /// Births above this one.
    pub oldest: Generation,
    /// Of lists begun by this transaction or later.
    pub lists_from: Generation,
    /// And before this one.
    pub lists_to: Generation,
}

impl CleanupItem {
    /// Bytes on disk.
    pub const BYTES: usize = 32;

    /// Item value.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let raw = [self.oldest, self.lists_from, self.lists_to, Generation(0)];
        zerocopy::transmute!(raw.map(|generation| U64::new(generation.0)))
    }

    /// From an item value.
    ///
    /// # Errors
    /// If it has a wrong length or names no lists.
    pub fn decode(value: &[u8]) -> Result<Self, FormatError> {
        let Ok(raw) = <[U64; 4]>::read_from_bytes(value) else {
            return Err(damaged(format!("cleanup item of {} bytes", value.len())));
        };
        let [oldest, lists_from, lists_to, reserved] = raw.map(|word| word.get());
        if reserved != 0 || lists_from >= lists_to || oldest > lists_from || lists_to > COUNTER_MAX
        {
            return Err(damaged(format!(
                "cleanup of births above {oldest} in lists {lists_from}..{lists_to}"
            )));
        }
        Ok(Self {
            oldest: Generation(oldest),
            lists_from: Generation(lists_from),
            lists_to: Generation(lists_to),
        })
    }
}

/// A reference that a subvolume has given up, and that snapshots of it have.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeadRun {
    /// Its blocks.
    pub range: BlockRange,
    /// Transaction that made the reference.
    pub birth: Generation,
    /// Whether it led to a node; otherwise it was an extent, or a part of one.
    pub is_node: bool,
}

/// [`DeadRun`] on disk.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawDeadRun {
    pub start: U64,
    pub birth: U64,
    pub blocks: U32,
    pub flags: U32,
}

const FLAG_NODE: u32 = 1;

impl DeadRun {
    /// Bytes on disk.
    pub const BYTES: usize = size_of::<RawDeadRun>();
    /// Runs of the largest item.
    pub const PER_ITEM: usize = crate::node::VALUE_BYTES_MAX / Self::BYTES;

    /// Item value; at most [`Self::PER_ITEM`].
    pub fn encode_all(runs: &[Self]) -> Vec<u8> {
        let raw = |run: &Self| RawDeadRun {
            start: U64::new(run.range.start.0),
            birth: U64::new(run.birth.0),
            blocks: U32::new(run.range.blocks as u32),
            flags: U32::new(if run.is_node { FLAG_NODE } else { 0 }),
        };
        runs.iter().flat_map(|run| raw(run).as_bytes().to_vec()).collect()
    }

    /// From an item value.
    ///
    /// # Errors
    /// If it has a wrong length, or an impossible run.
    pub fn decode_all(value: &[u8]) -> Result<Vec<Self>, FormatError> {
        if value.is_empty() || !value.len().is_multiple_of(Self::BYTES) {
            return Err(damaged(format!("dead runs of {} bytes", value.len())));
        }
        let decode = |bytes: &[u8]| {
            let raw = RawDeadRun::read_from_bytes(bytes)
                .map_err(|_| damaged("a dead run is cut off".into()))?;
            let (start, blocks) = (raw.start.get(), u64::from(raw.blocks.get()));
            let is_node = raw.flags.get() & FLAG_NODE != 0;
            let possible = if is_node {
                blocks == NODE_BLOCKS && start.is_multiple_of(NODE_BLOCKS)
            } else {
                blocks > 0
            };
            if !possible || raw.flags.get() & !FLAG_NODE != 0 || start.checked_add(blocks).is_none()
            {
                return Err(damaged(format!(
                    "dead run of {blocks} blocks at {start} with flags {:#x}",
                    raw.flags
                )));
            }
            Ok(Self {
                range: BlockRange::new(BlockNumber(start), blocks),
                birth: Generation(raw.birth.get()),
                is_node,
            })
        };
        value.chunks_exact(Self::BYTES).map(decode).collect()
    }
}
