//! Keys of items, and the keys of names.
use crate::units::{FileBlock, Generation, InodeNumber, TreeId};
use siphasher::sip::SipHasher13;
use std::fmt;
use std::hash::Hasher;
use std::ops::RangeInclusive;

/// The tree of roots: tree id → root item.
pub const TREE_ROOTS: TreeId = TreeId(1);
/// The tree of dead runs: dead list → what it has.
pub const TREE_DEAD: TreeId = TreeId(3);
/// The tree of subvolumes: id of a subvolume → its item.
pub const TREE_SUBVOLUMES: TreeId = TreeId(4);
/// The tree of files of the first subvolume. Trees with this id and above hold files.
pub const TREE_FILES: TreeId = TreeId(256);
/// The root directory.
pub const INODE_ROOT: InodeNumber = InodeNumber(1);
/// The first inode number for files; smaller ones are reserved.
pub const INODE_FIRST: u64 = 16;
/// Inode of the orphan items, for inodes without a name whose removal isn't complete.
pub const INODE_ORPHANS: InodeNumber = InodeNumber(2);

/// The kind of an item. The number is on disk and sorts the items of one inode.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum ItemKind {
    /// Root tree: root of the tree with id `inode`.
    Root = 1,
    /// Tree of subvolumes: the subvolume with id `inode`; offset 0.
    Subvolume = 2,
    /// Tree of subvolumes: the snapshot of subvolume `inode` made by the transaction `offset`.
    Snapshot = 3,
    /// Tree of subvolumes: the dead list of subvolume `inode` begun by the transaction `offset`.
    DeadList = 4,
    /// Tree of subvolumes: dead runs of subvolume `inode` that are to be freed; offset is the
    /// newest birth.
    Cleanup = 5,
    /// Attributes of an inode; offset 0.
    Inode = 16,
    /// Entry of a directory; offset is the name's slot.
    DirectoryEntry = 32,
    /// Extended attribute; offset is the name's slot.
    Xattr = 48,
    /// Further part of a large xattr value; offset is slot × 256 + part. Parts count from 1.
    XattrPart = 49,
    /// Target of a symbolic link; offset 0.
    Symlink = 64,
    /// Extent of a file; offset is the block within the file.
    Extent = 80,
    /// Unfinished removal or truncation; inode is [`INODE_ORPHANS`], offset the inode concerned.
    Orphan = 112,
    /// Tree of dead runs: some of list `inode`; offset is the transaction × 2^16 + a count.
    DeadRuns = 128,
}

impl ItemKind {
    /// Whether items of this kind stand in trees of files.
    pub fn is_of_files(self) -> bool {
        (Self::Inode..=Self::Orphan).contains(&self)
    }

    /// The kind with this number.
    pub fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            1 => Self::Root,
            2 => Self::Subvolume,
            3 => Self::Snapshot,
            4 => Self::DeadList,
            5 => Self::Cleanup,
            16 => Self::Inode,
            32 => Self::DirectoryEntry,
            48 => Self::Xattr,
            49 => Self::XattrPart,
            64 => Self::Symlink,
            80 => Self::Extent,
            112 => Self::Orphan,
            128 => Self::DeadRuns,
            _ => return None,
        })
    }
}

/// Key of an item. Sorts by inode, then kind, then offset.
///
/// `kind` is a plain number, so that range bounds can lie between kinds; a valid item's kind is an
/// [`ItemKind`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Key {
    /// The object of the item.
    pub inode: u64,
    /// An [`ItemKind`].
    pub kind: u8,
    /// Its meaning depends on the kind.
    pub offset: u64,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match ItemKind::from_u8(self.kind) {
            Some(kind) => write!(f, "({} {kind:?} {})", self.inode, self.offset),
            None => write!(f, "({} kind {} {})", self.inode, self.kind, self.offset),
        }
    }
}

impl Key {
    /// The smallest key.
    pub const MIN: Key = Key { inode: 0, kind: 0, offset: 0 };
    /// The largest key.
    pub const MAX: Key = Key { inode: u64::MAX, kind: u8::MAX, offset: u64::MAX };

    /// Key of an item of `inode`.
    pub fn new(inode: InodeNumber, kind: ItemKind, offset: u64) -> Self {
        Self { inode: inode.0, kind: kind as u8, offset }
    }
    /// The root item of `tree`.
    pub fn root(tree: TreeId) -> Self {
        Self { inode: tree.0, kind: ItemKind::Root as u8, offset: 0 }
    }
    /// The item of `subvolume`.
    pub fn subvolume(subvolume: TreeId) -> Self {
        Self { inode: subvolume.0, kind: ItemKind::Subvolume as u8, offset: 0 }
    }
    /// An item about `subvolume`, of the transaction `generation`: a snapshot, dead list or
    /// cleanup.
    pub fn of_subvolume(subvolume: TreeId, kind: ItemKind, generation: Generation) -> Self {
        Self { inode: subvolume.0, kind: kind as u8, offset: generation.0 }
    }
    /// All items of one kind about `subvolume`.
    pub fn all_of_subvolume(subvolume: TreeId, kind: ItemKind) -> RangeInclusive<Key> {
        Self::all(InodeNumber(subvolume.0), kind)
    }
    /// So many items can a transaction add to a dead list.
    pub const DEAD_RUN_ITEMS_MAX: u64 = 1 << 16;

    /// Item number `count` that the transaction `generation` adds to the dead list `list`.
    ///
    /// # Panics
    /// If `count` is [`Self::DEAD_RUN_ITEMS_MAX`] or more, or the generation 2^48 or more.
    pub fn dead_runs(list: u64, generation: Generation, count: u64) -> Self {
        assert!(
            count < Self::DEAD_RUN_ITEMS_MAX && generation.0 < 1 << 48,
            "item {count} of {generation}"
        );
        Self { inode: list, kind: ItemKind::DeadRuns as u8, offset: generation.0 << 16 | count }
    }
    /// The extent item of `inode` whose first block is `block`.
    pub fn extent(inode: InodeNumber, block: FileBlock) -> Self {
        Self::new(inode, ItemKind::Extent, block.0)
    }
    /// The first block of the extent whose item has this key.
    pub fn file_block(self) -> FileBlock {
        debug_assert!(self.kind == ItemKind::Extent as u8, "{self:?} is no extent");
        FileBlock(self.offset)
    }
    /// All keys of one kind of one inode.
    pub fn all(inode: InodeNumber, kind: ItemKind) -> RangeInclusive<Key> {
        Self::new(inode, kind, 0)..=Self::new(inode, kind, u64::MAX)
    }
    /// All keys of one inode.
    pub fn all_of_inode(inode: InodeNumber) -> RangeInclusive<Key> {
        Key { inode: inode.0, kind: 0, offset: 0 }..=Key {
            inode: inode.0,
            kind: u8::MAX,
            offset: u64::MAX,
        }
    }
    /// The next key, or `None` for the largest.
    pub fn successor(self) -> Option<Self> {
        if let Some(offset) = self.offset.checked_add(1) {
            return Some(Self { offset, ..self });
        }
        if let Some(kind) = self.kind.checked_add(1) {
            return Some(Self { kind, offset: 0, ..self });
        }
        Some(Self { inode: self.inode.checked_add(1)?, kind: 0, offset: 0 })
    }
}

/// Slots per hash value, for names with equal hashes.
const SLOTS: u64 = 256;

/// Hash of a name, 47 bits, keyed by the volume's seed so that an attacker can't provoke
/// collisions.
pub fn hash_name(seed: &[u8; 16], name: &[u8]) -> u64 {
    let mut hasher = SipHasher13::new_with_key(seed);
    hasher.write(name);
    hasher.finish() >> 17
}

/// The slots for names with this hash: 256 of them, below 2^55, so that a slot can be a directory
/// cookie and slot × 256 + part can be an offset.
pub fn name_slot_range(hash: u64) -> RangeInclusive<u64> {
    let first = (hash & ((1 << 47) - 1)) * SLOTS;
    first..=first + SLOTS - 1
}
