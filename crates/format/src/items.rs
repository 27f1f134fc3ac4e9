//! Values of the items: inode, directory entry, extent, extended attribute, root, orphan.
use crate::units::{
    BLOCK_SIZE, BlockNumber, BlockRange, Generation, INODE_NUMBER_END, InodeNumber, TreeId,
};
use crate::{
    FormatError, INODE_FIRST, INODE_ROOT, Key, NodePointer, Structure, TREE_FILES, blocks_for_bytes,
};
use zerocopy::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Blocks of the longest extent (1 MiB): its checksums take 1 KiB of the item.
pub const MAX_EXTENT_BLOCKS: u64 = 256;
/// Bytes of an xattr value in its first item. The rest goes to parts of up to this size.
pub const XATTR_INLINE_BYTES_MAX: usize = 3072;
/// With this begin the names of extended attributes in which the volume has settings of its own. No
/// program sees them.
pub const XATTR_OWN_PREFIX: &[u8] = b"system.cairn.";

/// Bytes of a symbolic link's target in its first item. The rest of a longer one is in a second
/// item, with offset 1.
pub const SYMLINK_PART_BYTES: usize = 3072;

fn damaged(what: &str) -> FormatError {
    FormatError::new(Structure::Item, BlockNumber(0), what)
}

/// Type of a file system object; numbers as in `readdir`'s `d_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum FileType {
    Fifo = 1,
    CharacterDevice = 2,
    Directory = 4,
    BlockDevice = 6,
    Regular = 8,
    Symlink = 10,
    Socket = 12,
}

impl FileType {
    /// From the number in a directory entry.
    pub fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            1 => Self::Fifo,
            2 => Self::CharacterDevice,
            4 => Self::Directory,
            6 => Self::BlockDevice,
            8 => Self::Regular,
            10 => Self::Symlink,
            12 => Self::Socket,
            _ => return None,
        })
    }
    /// From the type bits of a mode.
    pub fn from_mode(mode: u32) -> Option<Self> {
        Self::from_u8(((mode >> 12) & 15) as u8)
    }
    /// The type bits of a mode.
    pub fn mode_bits(self) -> u32 {
        u32::from(self as u8) << 12
    }
}

/// A point in time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct Timestamp {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds within the second.
    pub nanoseconds: u32,
}

/// Attributes of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InodeItem {
    /// Type and permission bits, as in `stat`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Names that refer to the inode (a directory: 2 + number of its subdirectories).
    pub links: u32,
    /// Length in bytes (a directory: sum of its names' lengths).
    pub size: u64,
    /// Blocks allocated.
    pub blocks: u64,
    /// Device number of a special file, as in `makedev` of Linux.
    pub device: u64,
    /// Directory: its parent. With [`Features::PARENTS`](crate::Features::PARENTS), of anything
    /// else: the directory in which it was last given a name, which may be gone, or 0. Otherwise 0.
    pub parent: u64,
    /// Directory: number of entries.
    pub entries: u64,
    /// Inode flags; none defined yet.
    pub flags: u32,
    /// Transaction in which the inode was made.
    pub generation: Generation,
    /// Last access.
    pub accessed: Timestamp,
    /// Last change of data.
    pub modified: Timestamp,
    /// Last change of attributes.
    pub changed: Timestamp,
    /// Birth.
    pub created: Timestamp,
}

/// [`InodeItem`] on disk.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawInode {
    pub mode: U32,
    pub uid: U32,
    pub gid: U32,
    pub links: U32,
    pub size: U64,
    pub blocks: U64,
    pub device: U64,
    pub parent: U64,
    pub entries: U64,
    pub generation: U64,
    pub accessed_seconds: I64,
    pub modified_seconds: I64,
    pub changed_seconds: I64,
    pub created_seconds: I64,
    pub accessed_ns: U32,
    pub modified_ns: U32,
    pub changed_ns: U32,
    pub created_ns: U32,
    pub flags: U32,
    pub reserved: [u8; 12],
}

impl InodeItem {
    /// Bytes on disk.
    pub const BYTES: usize = size_of::<RawInode>();
    /// All bits that a mode may have: those of the type and the permissions.
    pub const MODE_BITS: u32 = 0o177_777;

    /// The type in `mode`.
    ///
    /// # Errors
    /// If the type bits are unknown.
    pub fn file_type(&self) -> Result<FileType, FormatError> {
        FileType::from_mode(self.mode)
            .ok_or_else(|| damaged(&format!("inode with mode {:o}", self.mode)))
    }
    /// Item value.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let raw = RawInode {
            mode: U32::new(self.mode),
            uid: U32::new(self.uid),
            gid: U32::new(self.gid),
            links: U32::new(self.links),
            size: U64::new(self.size),
            blocks: U64::new(self.blocks),
            device: U64::new(self.device),
            parent: U64::new(self.parent),
            entries: U64::new(self.entries),
            generation: U64::new(self.generation.0),
            accessed_seconds: I64::new(self.accessed.seconds),
            modified_seconds: I64::new(self.modified.seconds),
            changed_seconds: I64::new(self.changed.seconds),
            created_seconds: I64::new(self.created.seconds),
            accessed_ns: U32::new(self.accessed.nanoseconds),
            modified_ns: U32::new(self.modified.nanoseconds),
            changed_ns: U32::new(self.changed.nanoseconds),
            created_ns: U32::new(self.created.nanoseconds),
            flags: U32::new(self.flags),
            reserved: [0; 12],
        };
        zerocopy::transmute!(raw)
    }
    /// From an item value.
    ///
    /// # Errors
    /// If it has a wrong length or impossible fields.
    pub fn decode(value: &[u8]) -> Result<Self, FormatError> {
        let raw = RawInode::read_from_bytes(value)
            .map_err(|_| damaged(&format!("inode item of {} bytes", value.len())))?;
        let time =
            |seconds: I64, ns: U32| Timestamp { seconds: seconds.get(), nanoseconds: ns.get() };
        let item = Self {
            mode: raw.mode.get(),
            uid: raw.uid.get(),
            gid: raw.gid.get(),
            links: raw.links.get(),
            size: raw.size.get(),
            blocks: raw.blocks.get(),
            device: raw.device.get(),
            parent: raw.parent.get(),
            entries: raw.entries.get(),
            flags: raw.flags.get(),
            generation: Generation(raw.generation.get()),
            accessed: time(raw.accessed_seconds, raw.accessed_ns),
            modified: time(raw.modified_seconds, raw.modified_ns),
            changed: time(raw.changed_seconds, raw.changed_ns),
            created: time(raw.created_seconds, raw.created_ns),
        };
        item.file_type()?;
        if item.size > i64::MAX as u64 {
            return Err(damaged(&format!("inode with size {}", item.size)));
        }
        Ok(item)
    }
}

/// What a name stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum EntryTarget {
    /// An inode of the same tree, and its type.
    Inode(InodeNumber, FileType),
    /// The root directory of the subvolume with this id.
    Subvolume(TreeId),
}

impl EntryTarget {
    /// The type of an entry for a subvolume, where others have a [`FileType`].
    const SUBVOLUME: u8 = 16;

    /// The type of what is named.
    pub fn file_type(self) -> FileType {
        match self {
            Self::Inode(_, file_type) => file_type,
            Self::Subvolume(_) => FileType::Directory,
        }
    }
    /// The inode of the same tree, if it is one.
    pub fn inode(self) -> Option<InodeNumber> {
        match self {
            Self::Inode(inode, _) => Some(inode),
            Self::Subvolume(_) => None,
        }
    }
}

/// An entry of a directory. On disk: inode u64, or id of a subvolume; type u8; name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirectoryEntry {
    /// The object of the name.
    pub target: EntryTarget,
    /// 1 to 255 bytes, without `/` and NUL.
    pub name: Vec<u8>,
}

impl DirectoryEntry {
    const NAME_AT: usize = 9;
    /// Longest name in bytes.
    pub const NAME_BYTES_MAX: usize = 255;

    /// Bytes of the longest item value.
    pub const BYTES_MAX: usize = Self::NAME_AT + Self::NAME_BYTES_MAX;

    /// Item value.
    ///
    /// # Panics
    /// If the name is longer than [`Self::NAME_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        Self::encode_in(&mut [0; Self::BYTES_MAX], self.target, &self.name).to_vec()
    }
    /// Item value of an entry with these fields, in `buffer`.
    ///
    /// # Panics
    /// If the name is longer than [`Self::NAME_BYTES_MAX`].
    pub fn encode_in<'a>(
        buffer: &'a mut [u8; Self::BYTES_MAX],
        target: EntryTarget,
        name: &[u8],
    ) -> &'a [u8] {
        let value = &mut buffer[..Self::NAME_AT + name.len()];
        let (number, entry_type) = match target {
            EntryTarget::Inode(inode, file_type) => (inode.0, file_type as u8),
            EntryTarget::Subvolume(tree) => (tree.0, EntryTarget::SUBVOLUME),
        };
        value[..8].copy_from_slice(&number.to_le_bytes());
        value[8] = entry_type;
        value[Self::NAME_AT..].copy_from_slice(name);
        value
    }
    /// The name in an item value, without copying.
    ///
    /// # Errors
    /// As [`DirectoryEntry::decode`].
    pub fn name_of(value: &[u8]) -> Result<&[u8], FormatError> {
        let name = value.get(Self::NAME_AT..).unwrap_or_default();
        if name.is_empty()
            || name.len() > Self::NAME_BYTES_MAX
            || name.contains(&b'/')
            || name.contains(&0)
        {
            return Err(damaged(&format!(
                "directory entry with the name {:?}",
                String::from_utf8_lossy(name)
            )));
        }
        Ok(name)
    }
    /// From an item value.
    ///
    /// # Errors
    /// If its name, type or inode number is impossible.
    pub fn decode(value: &[u8]) -> Result<Self, FormatError> {
        Ok(Self { target: Self::target_of(value)?, name: Self::name_of(value)?.to_vec() })
    }
    /// What an item value names, without copying the name.
    ///
    /// # Errors
    /// As [`DirectoryEntry::decode`].
    pub fn target_of(value: &[u8]) -> Result<EntryTarget, FormatError> {
        Self::name_of(value)?;
        let number = u64::from_le_bytes(value[..8].try_into().expect("a name follows"));
        if value[8] == EntryTarget::SUBVOLUME {
            let tree = TreeId(number);
            // The first subvolume is the top of all names.
            if tree == TREE_FILES || !tree.holds_files() {
                return Err(damaged(&format!(
                    "directory entry of the impossible subvolume {tree}"
                )));
            }
            return Ok(EntryTarget::Subvolume(tree));
        }
        let inode = InodeNumber(number);
        let file_type = FileType::from_u8(value[8])
            .ok_or_else(|| damaged(&format!("directory entry of type {}", value[8])))?;
        if inode != INODE_ROOT && !(INODE_FIRST..INODE_NUMBER_END).contains(&inode.0) {
            return Err(damaged(&format!("directory entry of the impossible inode {inode}")));
        }
        Ok(EntryTarget::Inode(inode, file_type))
    }
}

/// The content of an extent's blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum ExtentKind {
    /// Written data with one checksum per block.
    Data = 1,
    /// Allocated but never written: reads as zeros, carries no checksums.
    Unwritten = 2,
}

/// An extent of a file. Its key's offset is the first block within the file.
///
/// On disk: start block u64, generation u64, blocks u32, kind u8, compression u8 (0), encryption u8
/// (0), flags u8, with flag 1 `written` u64 and reserved u64, then one CRC-32C u32 per block if
/// `kind` is `Data`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Extent {
    /// The first block.
    pub start: BlockNumber,
    /// Number of blocks; 1 to [`MAX_EXTENT_BLOCKS`] for data.
    pub blocks: u64,
    /// Written or only allocated.
    pub kind: ExtentKind,
    /// Transaction that inserted the blocks into the file: the birth of this reference to them.
    pub generation: Generation,
    /// Transaction that wrote the data. A later one than `generation` if blocks that a snapshot has
    /// as unwritten were written in place; of unwritten blocks the same.
    pub written: Generation,
    /// CRC-32C of each block; empty for unwritten ones.
    pub checksums: Vec<u32>,
}

impl Extent {
    const HEAD_BYTES: usize = 24;
    /// Bytes of the head of an extent whose data is younger than the reference.
    const LONG_HEAD_BYTES: usize = 40;
    const FLAG_LONG_HEAD: u8 = 1;
    /// Longest unwritten extent in blocks: 128 MiB.
    pub const UNWRITTEN_BLOCKS_MAX: u64 = 32 * 1024;

    /// The blocks.
    pub fn range(&self) -> BlockRange {
        BlockRange::new(self.start, self.blocks)
    }
    /// The part that begins `skip` blocks in and has `blocks` blocks.
    #[must_use]
    pub fn slice(&self, skip: u64, blocks: u64) -> Self {
        let checksums = match self.kind {
            ExtentKind::Data => self.checksums[skip as usize..(skip + blocks) as usize].to_vec(),
            ExtentKind::Unwritten => Vec::new(),
        };
        Self { start: BlockNumber(self.start.0 + skip), blocks, checksums, ..*self }
    }
    /// Item value.
    pub fn encode(&self) -> Vec<u8> {
        let is_long = self.written != self.generation;
        let head = if is_long { Self::LONG_HEAD_BYTES } else { Self::HEAD_BYTES };
        let mut bytes = Vec::with_capacity(head + 4 * self.checksums.len());
        bytes.extend_from_slice(&self.start.0.to_le_bytes());
        bytes.extend_from_slice(&self.generation.0.to_le_bytes());
        bytes.extend_from_slice(&(self.blocks as u32).to_le_bytes());
        let flags = if is_long { Self::FLAG_LONG_HEAD } else { 0 };
        bytes.extend_from_slice(&[self.kind as u8, 0, 0, flags]);
        if is_long {
            bytes.extend_from_slice(&self.written.0.to_le_bytes());
            bytes.extend_from_slice(&[0; 8]);
        }
        for sum in &self.checksums {
            bytes.extend_from_slice(&sum.to_le_bytes());
        }
        bytes
    }
    /// From an item value.
    ///
    /// # Errors
    /// If it has a wrong length, an impossible kind, or a transformation that this version doesn't
    /// know.
    pub fn decode(value: &[u8]) -> Result<Self, FormatError> {
        let is_long = value.get(23).is_some_and(|flags| *flags == Self::FLAG_LONG_HEAD);
        let head_bytes = if is_long { Self::LONG_HEAD_BYTES } else { Self::HEAD_BYTES };
        let Some((head, sums)) = value.split_at_checked(head_bytes) else {
            return Err(damaged(&format!("extent item of {} bytes", value.len())));
        };
        let word =
            |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        let blocks = u64::from(u32::from_le_bytes(head[16..20].try_into().expect("four bytes")));
        let (kind, blocks_max, sums_expected) = match head[20] {
            1 => (ExtentKind::Data, MAX_EXTENT_BLOCKS, blocks),
            2 => (ExtentKind::Unwritten, Self::UNWRITTEN_BLOCKS_MAX, 0),
            other => return Err(damaged(&format!("extent of kind {other}"))),
        };
        if head[21..23] != [0; 2] || head[23] & !Self::FLAG_LONG_HEAD != 0 {
            return Err(damaged("extent with an unknown transformation"));
        }
        let generation = Generation(word(8));
        let written = if is_long { Generation(word(24)) } else { generation };
        if is_long && (written <= generation || word(32) != 0 || kind != ExtentKind::Data) {
            return Err(damaged(&format!(
                "extent of kind {} of {generation} that was written in {written}",
                head[20]
            )));
        }
        if blocks == 0
            || blocks > blocks_max
            || sums.len() as u64 != 4 * sums_expected
            || word(0).checked_add(blocks).is_none()
        {
            return Err(damaged(&format!(
                "extent of {blocks} blocks at {} with {} bytes of checksums",
                word(0),
                sums.len()
            )));
        }
        let checksums = sums
            .chunks_exact(4)
            .map(|c| u32::from_le_bytes(c.try_into().expect("four bytes")))
            .collect();
        Ok(Self { start: BlockNumber(word(0)), blocks, kind, generation, written, checksums })
    }
    /// From the value of the item with this key.
    ///
    /// # Errors
    /// As those of [`decode`](Self::decode), or if it ends behind the last block of any file.
    pub fn decode_of(key: &Key, value: &[u8]) -> Result<Self, FormatError> {
        let extent = Self::decode(value)?;
        let end = key.offset.checked_add(extent.blocks);
        if end.is_none_or(|end| end > blocks_for_bytes(i64::MAX as u64)) {
            return Err(damaged(&format!(
                "extent of {} blocks at file block {}: behind the end of the largest file",
                extent.blocks, key.offset
            )));
        }
        Ok(extent)
    }
    /// Bytes of file data.
    pub fn bytes(&self) -> u64 {
        self.blocks * BLOCK_SIZE as u64
    }
}

/// First item of an extended attribute. On disk: value length u32, name length u16, reserved u16,
/// name, the first part of the value ([`XattrItem::inline_bytes`]). The rest is in `XattrPart`
/// items.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct XattrItem {
    /// Name with its namespace, e.g. `user.comment`.
    pub name: Vec<u8>,
    /// Length of the whole value.
    pub value_bytes: u32,
    /// First part of the value.
    pub inline: Vec<u8>,
}

impl XattrItem {
    const NAME_AT: usize = 8;
    /// Longest value that Linux allows.
    pub const VALUE_BYTES_MAX: usize = 65536;

    /// Bytes of a value of `value_bytes` in the first item.
    pub fn inline_bytes(value_bytes: usize) -> usize {
        value_bytes.min(XATTR_INLINE_BYTES_MAX)
    }
    /// Number of further parts of a value of `value_bytes`.
    pub fn parts(value_bytes: usize) -> usize {
        (value_bytes - Self::inline_bytes(value_bytes)).div_ceil(XATTR_INLINE_BYTES_MAX)
    }
    /// Item value.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::NAME_AT + self.name.len() + self.inline.len());
        bytes.extend_from_slice(&self.value_bytes.to_le_bytes());
        bytes.extend_from_slice(&(self.name.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(&self.name);
        bytes.extend_from_slice(&self.inline);
        bytes
    }
    /// From an item value.
    ///
    /// # Errors
    /// If its lengths don't add up.
    pub fn decode(value: &[u8]) -> Result<Self, FormatError> {
        let fail = || damaged(&format!("xattr item of {} bytes", value.len()));
        let Some((head, rest)) = value.split_at_checked(Self::NAME_AT) else { return Err(fail()) };
        let value_bytes = u32::from_le_bytes(head[..4].try_into().expect("four bytes"));
        let name_bytes = u16::from_le_bytes(head[4..6].try_into().expect("two bytes")) as usize;
        let Some((name, inline)) = rest.split_at_checked(name_bytes) else { return Err(fail()) };
        if name.is_empty()
            || name.len() > 255
            || value_bytes as usize > Self::VALUE_BYTES_MAX
            || inline.len() != Self::inline_bytes(value_bytes as usize)
        {
            return Err(fail());
        }
        Ok(Self { name: name.to_vec(), value_bytes, inline: inline.to_vec() })
    }
}

/// Root of a tree, in the root tree. On disk: block u64, generation u64, level u8, 7 reserved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RootItem {
    /// The root node.
    pub root: NodePointer,
}

impl RootItem {
    /// Bytes on disk.
    pub const BYTES: usize = 24;
    /// Item value.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.root.block.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.root.generation.0.to_le_bytes());
        bytes[16] = self.root.level;
        bytes
    }
    /// From an item value.
    ///
    /// # Errors
    /// If it has a wrong length.
    pub fn decode(value: &[u8]) -> Result<Self, FormatError> {
        let bytes: &[u8; Self::BYTES] = value
            .try_into()
            .map_err(|_| damaged(&format!("root item of {} bytes", value.len())))?;
        let word =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Ok(Self {
            root: NodePointer {
                block: BlockNumber(word(0)),
                generation: Generation(word(8)),
                level: bytes[16],
            },
        })
    }
}

/// The reason for an inode's orphan item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum OrphanKind {
    /// It has no name any more and is removed after its last use.
    Remove = 1,
    /// Blocks past its size are still being freed.
    Truncate = 2,
}

/// Value of an orphan item.
pub fn encode_orphan(kind: OrphanKind) -> [u8; 1] {
    [kind as u8]
}

/// From the value of an orphan item.
///
/// # Errors
/// If the kind is unknown.
pub fn decode_orphan(value: &[u8]) -> Result<OrphanKind, FormatError> {
    match value {
        [1] => Ok(OrphanKind::Remove),
        [2] => Ok(OrphanKind::Truncate),
        _ => Err(damaged("orphan item of unknown kind")),
    }
}

const _: () = assert!(InodeItem::BYTES == 128);
