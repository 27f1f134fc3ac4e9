//! The item that describes a subvolume, in the tree of subvolumes.
use crate::{
    BlockNumber, FormatError, Generation, INODE_NUMBER_END, INODE_ROOT, InodeNumber, Key,
    NodePointer, Structure, Superblock, TREE_FILES, TreeId,
};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The snapshot that a fork was made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin {
    /// The subvolume; its id is below that of the fork.
    pub subvolume: TreeId,
    /// Transaction that made its snapshot. What was born later in the fork's tree is the fork's.
    pub generation: Generation,
}

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
    /// It has lost its name, and its tree is being removed; if it is headless, that of a snapshot.
    pub is_dying: bool,
    /// It has no tree of its own any more: its newest snapshot stands in for that.
    pub is_headless: bool,
    /// Identity, random.
    pub uuid: [u8; 16],
    /// With an inode number, the number of that inode in a mount; below [`NUMBER_END`], and no
    /// other subvolume's. That of the first one is 0.
    ///
    /// [`NUMBER_END`]: SubvolumeItem::NUMBER_END
    pub number: u32,
    /// It is a fork: a writable subvolume that began as this snapshot.
    pub origin: Option<Origin>,
    /// A fork has entries that name subvolumes of its origin, and that are to be removed.
    pub names_others: bool,
    /// A fork stands in the place of an earlier subvolume, which was rolled back: that of its
    /// origin, or one that continues the same.
    pub continues: bool,
    /// A fork notes in its dead lists what it gives up of what it has inherited.
    pub notes_inherited: bool,
    /// It was a fork of a snapshot that is gone, and has taken over what that alone had. So it may
    /// have no origin, or one of an earlier time.
    pub is_joined: bool,
    /// Of a dying one that is a fork, has snapshots, or is headless: what stands in nodes wholly
    /// below this key was given up.
    pub cursor: Key,
    /// Of a headless one that is dying: the root of the tree that is being removed, which was its
    /// newest snapshot's.
    pub dying_root: Option<NodePointer>,
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
    pub reserved: [u8; 4],
    pub origin_subvolume: U64,
    pub origin_generation: U64,
    pub cursor_inode: U64,
    pub cursor_offset: U64,
    pub cursor_kind: u8,
    pub root_level: u8,
    pub reserved_root: [u8; 6],
    pub root_block: U64,
    pub root_generation: U64,
    pub reserved_end: [u8; 8],
}

const FLAG_DYING: u64 = 1;
const FLAG_NAMES_OTHERS: u64 = 2;
const FLAG_HEADLESS: u64 = 4;
const FLAG_CONTINUES: u64 = 8;
const FLAG_NOTES_INHERITED: u64 = 16;
const FLAG_JOINED: u64 = 32;
const FLAGS: u64 = FLAG_DYING
    | FLAG_NAMES_OTHERS
    | FLAG_HEADLESS
    | FLAG_CONTINUES
    | FLAG_NOTES_INHERITED
    | FLAG_JOINED;

/// What a subvolume has of others, by the transactions that made it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Inheritance {
    /// References up to this one are its origin's; 0 without one.
    pub origin: Generation,
    /// Nodes up to this one may have been made by others.
    pub made_until: Generation,
    /// What it gives up of its origin's references stands in its dead lists.
    pub is_noted: bool,
}

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
            is_headless: false,
            uuid: superblock.volume.0,
            number: 0,
            origin: None,
            names_others: false,
            continues: false,
            notes_inherited: false,
            is_joined: false,
            cursor: Key::MIN,
            dying_root: None,
        }
    }

    /// It has lost its name.
    pub fn is_nameless(&self) -> bool {
        self.is_dying || self.is_headless
    }

    /// It began as a fork.
    pub fn is_fork(&self) -> bool {
        self.origin.is_some() || self.is_joined
    }

    /// What it has of others.
    pub fn inheritance(&self) -> Inheritance {
        Inheritance {
            origin: self.origin.map_or(Generation(0), |origin| origin.generation),
            made_until: if self.is_fork() { self.generation } else { Generation(0) },
            is_noted: self.notes_inherited && self.origin.is_some(),
        }
    }

    /// Item value.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
        let root = self.dying_root.unwrap_or_default();
        let raw = RawSubvolume {
            parent: U64::new(self.parent.0),
            directory: U64::new(self.directory.0),
            generation: U64::new(self.generation.0),
            created_ns: U64::new(self.created_ns),
            flags: U64::new(
                flag(self.is_dying, FLAG_DYING)
                    | flag(self.names_others, FLAG_NAMES_OTHERS)
                    | flag(self.is_headless, FLAG_HEADLESS)
                    | flag(self.continues, FLAG_CONTINUES)
                    | flag(self.notes_inherited, FLAG_NOTES_INHERITED)
                    | flag(self.is_joined, FLAG_JOINED),
            ),
            uuid: self.uuid,
            number: U32::new(self.number),
            reserved: [0; 4],
            origin_subvolume: U64::new(self.origin.map_or(0, |origin| origin.subvolume.0)),
            origin_generation: U64::new(self.origin.map_or(0, |origin| origin.generation.0)),
            cursor_inode: U64::new(self.cursor.inode),
            cursor_offset: U64::new(self.cursor.offset),
            cursor_kind: self.cursor.kind,
            root_level: root.level,
            reserved_root: [0; 6],
            root_block: U64::new(root.block.0),
            root_generation: U64::new(root.generation.0),
            reserved_end: [0; 8],
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
        let flags = raw.flags.get();
        if flags & !FLAGS != 0 {
            return Err(damaged(format!("subvolume with unknown flags {flags:#x}")));
        }
        let origin = Origin {
            subvolume: TreeId(raw.origin_subvolume.get()),
            generation: Generation(raw.origin_generation.get()),
        };
        let origin = match (origin.subvolume.0, origin.generation.0) {
            (0, 0) => None,
            (subvolume, generation) if subvolume >= TREE_FILES.0 && generation > 0 => Some(origin),
            (subvolume, generation) => {
                let origin = format!("a snapshot of {generation} of the subvolume {subvolume}");
                return Err(damaged(format!("fork of {origin}, which can't be")));
            }
        };
        let cursor = Key {
            inode: raw.cursor_inode.get(),
            kind: raw.cursor_kind,
            offset: raw.cursor_offset.get(),
        };
        let is_dying = flags & FLAG_DYING != 0;
        let is_headless = flags & FLAG_HEADLESS != 0;
        let names_others = flags & FLAG_NAMES_OTHERS != 0;
        let continues = flags & FLAG_CONTINUES != 0;
        let notes_inherited = flags & FLAG_NOTES_INHERITED != 0;
        let is_joined = flags & FLAG_JOINED != 0;
        let root = NodePointer {
            block: BlockNumber(raw.root_block.get()),
            generation: Generation(raw.root_generation.get()),
            level: raw.root_level,
        };
        let dying_root = (root != NodePointer::default()).then_some(root);
        if names_others && (origin.is_none() || is_headless) {
            return Err(damaged("subvolume with names of an origin that it can't have".into()));
        }
        if continues && origin.is_none() && !is_joined {
            return Err(damaged("subvolume that continues another one, and is no fork".into()));
        }
        if cursor != Key::MIN && !is_dying {
            return Err(damaged("subvolume with a cursor that is not being removed".into()));
        }
        if dying_root.is_some() != (is_headless && is_dying) {
            return Err(damaged("subvolume with a root in its item, or without its root".into()));
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
            is_dying,
            is_headless,
            uuid: raw.uuid,
            number: raw.number.get(),
            origin,
            names_others,
            continues,
            notes_inherited,
            is_joined,
            cursor,
            dying_root,
        })
    }
}
