//! The item that describes a subvolume, in the tree of subvolumes.
use crate::{
    BlockNumber, FormatError, Generation, INODE_NUMBER_END, INODE_ROOT, InodeNumber, Structure,
    Superblock, TREE_FILES, TreeId,
};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A subvolume: a tree of files with inode numbers of its own. Its id is that of its tree.
///
/// The first one, [`TREE_FILES`], is the top of all names: it has no parent. Of each other one,
/// exactly one entry stands in the directory that this item names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SubvolumeItem {
    /// The subvolume with the entry that names this one; of the first one, itself.
    pub parent: TreeId,
    /// The directory there.
    pub directory: InodeNumber,
    /// Transaction in which it was made.
    pub generation: Generation,
    /// Time at which it was made, in nanoseconds since 1970.
    pub created_ns: u64,
    /// It has lost its name, and its items are being removed.
    pub is_dying: bool,
    /// Identity, random.
    pub uuid: [u8; 16],
    /// With an inode number, the number of that inode in a mount; below [`NUMBER_END`], and no
    /// other subvolume's. That of the first one is 0.
    ///
    /// [`NUMBER_END`]: SubvolumeItem::NUMBER_END
    pub number: u32,
}

/// [`SubvolumeItem`] on disk.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawSubvolume {
    pub parent: U64,
    pub directory: U64,
    pub generation: U64,
    pub created_ns: U64,
    pub flags: U64,
    pub uuid: [u8; 16],
    pub number: U32,
    pub reserved: [u8; 68],
}

const FLAG_DYING: u64 = 1;

impl SubvolumeItem {
    /// Bytes on disk.
    pub const BYTES: usize = size_of::<RawSubvolume>();
    /// Numbers are below this: together with an inode number they fill 63 bits. The last one that
    /// fits belongs to no subvolume: a mount numbers directories with it that are on no device.
    pub const NUMBER_END: u32 = (1 << (63 - INODE_NUMBER_END.trailing_zeros())) - 1;

    /// That of the first subvolume, which a volume begins with and which nothing names.
    pub fn first(superblock: &Superblock) -> Self {
        Self {
            parent: TREE_FILES,
            directory: INODE_ROOT,
            generation: Generation(0),
            created_ns: superblock.created_ns,
            is_dying: false,
            uuid: superblock.volume.0,
            number: 0,
        }
    }

    /// Item value.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let raw = RawSubvolume {
            parent: U64::new(self.parent.0),
            directory: U64::new(self.directory.0),
            generation: U64::new(self.generation.0),
            created_ns: U64::new(self.created_ns),
            flags: U64::new(if self.is_dying { FLAG_DYING } else { 0 }),
            uuid: self.uuid,
            number: U32::new(self.number),
            reserved: [0; 68],
        };
        zerocopy::transmute!(raw)
    }

    /// From an item value.
    ///
    /// # Errors
    /// If it has a wrong length, an impossible parent, or flags that this version doesn't know.
    pub fn decode(value: &[u8]) -> Result<Self, FormatError> {
        let damaged = |what: String| FormatError::new(Structure::Item, BlockNumber(0), what);
        let raw = RawSubvolume::read_from_bytes(value)
            .map_err(|_| damaged(format!("subvolume item of {} bytes", value.len())))?;
        if raw.flags.get() & !FLAG_DYING != 0 {
            return Err(damaged(format!("subvolume with unknown flags {:#x}", raw.flags)));
        }
        if raw.parent.get() < TREE_FILES.0 {
            return Err(damaged(format!("subvolume in the impossible subvolume {}", raw.parent)));
        }
        if raw.number.get() >= Self::NUMBER_END {
            return Err(damaged(format!("subvolume with the impossible number {}", raw.number)));
        }
        Ok(Self {
            parent: TreeId(raw.parent.get()),
            directory: InodeNumber(raw.directory.get()),
            generation: Generation(raw.generation.get()),
            created_ns: raw.created_ns.get(),
            is_dying: raw.flags.get() & FLAG_DYING != 0,
            uuid: raw.uuid,
            number: raw.number.get(),
        })
    }
}
