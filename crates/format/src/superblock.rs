//! The superblock: the volume's parameters, and its valid trees and log.
//!
//! It is written to slot `generation % 2`. After that has been flushed, a copy is written to the
//! end of the device. A reader takes the valid one with the highest generation, so a torn write
//! loses nothing.
use crate::header::{HEADER_BYTES, Header};
use crate::units::{
    BLOCK_SIZE, BlockNumber, COUNTER_MAX, Generation, NODE_BLOCKS, TreeId, VolumeId,
};
use crate::{FormatError, Geometry, Structure, TREE_FILES};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a label, padded with zeros.
pub const LABEL_BYTES: usize = 64;
/// Superblocks on a volume: two slots and the copy at the end.
pub const SUPERBLOCK_SLOTS: usize = 3;

const MAGIC: [u8; 4] = *b"CRNS";

/// Address and generation of a tree's root node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NodePointer {
    /// First block of the node.
    pub block: BlockNumber,
    /// Transaction that wrote it.
    pub generation: Generation,
    /// Height above the leaves: 0 for a leaf.
    pub level: u8,
}

/// Features that a volume uses. For an unknown feature, its word decides what a reader refuses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Features {
    /// Unknown bits don't matter.
    pub compatible: u64,
    /// Unknown bits allow reading only.
    pub read_only_compatible: u64,
    /// Unknown bits forbid mounting.
    pub incompatible: u64,
}

impl Features {
    /// Compatible: inodes that are no directories may name a directory that has a name of theirs.
    pub const PARENTS: u64 = 1 << 0;
    /// Incompatible: a slot 1 of zeros is the bitmap that mkfs would have written there.
    pub const IMPLICIT_BITMAPS: u64 = 1 << 0;
    /// Incompatible: there is a tree of subvolumes, and perhaps more than one tree of files.
    pub const SUBVOLUMES: u64 = 1 << 1;
    /// Incompatible: there is a tree of dead runs; there may be snapshots, and extents with a
    /// longer head. Comes with [`Self::SUBVOLUMES`].
    pub const SNAPSHOTS: u64 = 1 << 2;
    /// Incompatible: there may be forks. Comes with [`Self::SNAPSHOTS`].
    pub const FORKS: u64 = 1 << 3;
    /// Incompatible: forks may note what they give up of what they have inherited, and may have
    /// been joined with what they came from. Comes with [`Self::FORKS`].
    pub const JOINING: u64 = 1 << 4;
    /// The incompatible features that this version knows.
    pub const INCOMPATIBLE_KNOWN: u64 =
        Self::IMPLICIT_BITMAPS | Self::SUBVOLUMES | Self::SNAPSHOTS | Self::FORKS | Self::JOINING;

    /// Whether files note a directory of theirs.
    pub fn has_parents(&self) -> bool {
        self.compatible & Self::PARENTS != 0
    }

    /// Whether the volume has a tree of subvolumes.
    pub fn has_subvolumes(&self) -> bool {
        self.incompatible & Self::SUBVOLUMES != 0
    }

    /// Whether the volume has a tree of dead runs.
    pub fn has_snapshots(&self) -> bool {
        self.incompatible & Self::SNAPSHOTS != 0
    }

    /// Whether the volume may have forks.
    pub fn has_forks(&self) -> bool {
        self.incompatible & Self::FORKS != 0
    }

    /// Whether forks may note what they give up, and may have been joined.
    pub fn has_joining(&self) -> bool {
        self.incompatible & Self::JOINING != 0
    }
}

/// A position in the log ring and the checkpoint expected there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LogPosition {
    /// Block within the ring, below `log_blocks`.
    pub block: u64,
    /// Sequence of the checkpoint at that block, or of the next one to be written there.
    pub sequence: u64,
}

/// A decoded superblock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Superblock {
    /// The volume's identity.
    pub volume: VolumeId,
    /// Transaction that this superblock commits.
    pub generation: Generation,
    /// Feature words.
    pub features: Features,
    /// Sizes.
    pub geometry: Geometry,
    /// Root of the root tree.
    pub root: NodePointer,
    /// The next inode number to allocate.
    pub next_inode: u64,
    /// Number of read-write mounts. Checkpoints carry it, so that a checkpoint of an earlier mount
    /// is never replayed.
    pub log_epoch: u64,
    /// Where replay starts.
    pub log_tail: LogPosition,
    /// Allocated blocks among the allocatable ones.
    pub used_blocks: u64,
    /// [`bitmap_generations_checksum`](crate::bitmap_generations_checksum) of this superblock's
    /// bitmaps; 0 if not recorded.
    pub bitmaps_checksum: u32,
    /// Inodes in the tree, including those without a name; 0 if not recorded.
    pub inodes: u64,
    /// The next id of a tree of files; ids are never used twice.
    pub next_tree: TreeId,
    /// The subvolume that a mount shows if it is not told which.
    pub default_subvolume: TreeId,
    /// The next number of a dead list; they are never used twice.
    pub next_list: u64,
    /// Key of the name hash.
    pub hash_seed: [u8; 16],
    /// Time of mkfs, in nanoseconds since 1970.
    pub created_ns: u64,
    /// Whether the volume was unmounted cleanly: then the log holds nothing to replay.
    pub clean: bool,
    /// Name given by the user.
    pub label: String,
}

/// The superblock on disk.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RawSuperblock {
    /// Common header; its generation is the committed transaction.
    pub header: Header,
    /// Feature word: compatible.
    pub features_compatible: U64,
    /// Feature word: read-only compatible.
    pub features_read_only: U64,
    /// Feature word: incompatible.
    pub features_incompatible: U64,
    /// 4096.
    pub block_size: U32,
    /// 16384.
    pub node_size: U32,
    /// 16384.
    pub group_blocks: U32,
    /// Bit 0: clean.
    pub flags: U32,
    /// Length of the volume, in blocks.
    pub total_blocks: U64,
    /// Length of the log ring, in blocks.
    pub log_blocks: U64,
    /// Root tree's root: block.
    pub root_block: U64,
    /// Root tree's root: generation.
    pub root_generation: U64,
    /// Root tree's root: level.
    pub root_level: U64,
    /// Next inode number.
    pub next_inode: U64,
    /// Mount counter.
    pub log_epoch: U64,
    /// Replay starts at this block of the ring.
    pub log_tail_block: U64,
    /// Replay starts with this checkpoint.
    pub log_tail_sequence: U64,
    /// Allocated blocks.
    pub used_blocks: U64,
    /// Time of mkfs, ns since 1970.
    pub created_ns: U64,
    /// Key of the name hash.
    pub hash_seed: [u8; 16],
    /// Label, UTF-8, zero-padded.
    pub label: [u8; LABEL_BYTES],
    /// CRC-32C over the generations of all groups' bitmaps, 0 if not recorded.
    pub bitmaps_checksum: U32,
    /// Inodes in the tree, 0 if not recorded.
    pub inodes: U64,
    /// Zero.
    pub padding: [u8; 4],
    /// With the feature *subvolumes*: the next id of a tree of files; otherwise 0.
    pub next_tree: U64,
    /// With the feature *subvolumes*: the one that is shown by default; otherwise 0.
    pub default_subvolume: U64,
    /// With the feature *snapshots*: the next number of a dead list; otherwise 0.
    pub next_list: U64,
    /// Zero; room for devices, quotas, encryption.
    pub reserved: [u8; 216],
}

const FLAG_CLEAN: u32 = 1;

impl Superblock {
    /// The sealed block for the superblock at `address`.
    pub fn encode(&self, address: BlockNumber) -> Vec<u8> {
        let of_subvolumes =
            |tree: TreeId| U64::new(if self.features.has_subvolumes() { tree.0 } else { 0 });
        let mut label = [0; LABEL_BYTES];
        let length = self.label.len().min(LABEL_BYTES);
        label[..length].copy_from_slice(&self.label.as_bytes()[..length]);
        let raw = RawSuperblock {
            header: Header::new(MAGIC, BLOCK_SIZE, self.volume, address, self.generation),
            features_compatible: U64::new(self.features.compatible),
            features_read_only: U64::new(self.features.read_only_compatible),
            features_incompatible: U64::new(self.features.incompatible),
            block_size: U32::new(BLOCK_SIZE as u32),
            node_size: U32::new(crate::NODE_SIZE as u32),
            group_blocks: U32::new(Geometry::GROUP_BLOCKS as u32),
            flags: U32::new(if self.clean { FLAG_CLEAN } else { 0 }),
            total_blocks: U64::new(self.geometry.total_blocks),
            log_blocks: U64::new(self.geometry.log_blocks),
            root_block: U64::new(self.root.block.0),
            root_generation: U64::new(self.root.generation.0),
            root_level: U64::new(u64::from(self.root.level)),
            next_inode: U64::new(self.next_inode),
            log_epoch: U64::new(self.log_epoch),
            log_tail_block: U64::new(self.log_tail.block),
            log_tail_sequence: U64::new(self.log_tail.sequence),
            used_blocks: U64::new(self.used_blocks),
            created_ns: U64::new(self.created_ns),
            hash_seed: self.hash_seed,
            label,
            bitmaps_checksum: U32::new(self.bitmaps_checksum),
            inodes: U64::new(self.inodes),
            padding: [0; 4],
            next_tree: of_subvolumes(self.next_tree),
            default_subvolume: of_subvolumes(self.default_subvolume),
            next_list: U64::new(if self.features.has_snapshots() { self.next_list } else { 0 }),
            reserved: [0; 216],
        };
        let mut bytes = vec![0; BLOCK_SIZE];
        bytes[..size_of::<RawSuperblock>()].copy_from_slice(raw.as_bytes());
        Header::seal(&mut bytes);
        bytes
    }

    /// Decodes and validates the superblock that was read from `address`.
    ///
    /// # Errors
    /// If anything makes it unusable, such as an unknown incompatible feature.
    pub fn decode(bytes: &[u8], address: BlockNumber) -> Result<Self, FormatError> {
        let fail = |problem: String| Err(FormatError::new(Structure::Superblock, address, problem));
        Header::verify(bytes, MAGIC, Structure::Superblock, None, address)?;
        let Ok((raw, _)) = RawSuperblock::read_from_prefix(bytes) else {
            return fail(format!("only {} bytes", bytes.len()));
        };
        // Otherwise the checksum would leave out a part.
        if raw.header.length.get() as usize != BLOCK_SIZE {
            return fail(format!("a length of {} bytes", raw.header.length));
        }
        if (raw.block_size.get(), raw.node_size.get(), u64::from(raw.group_blocks.get()))
            != (BLOCK_SIZE as u32, crate::NODE_SIZE as u32, Geometry::GROUP_BLOCKS)
        {
            return fail(format!(
                "unsupported sizes: block {}, node {}, group {}",
                raw.block_size, raw.node_size, raw.group_blocks
            ));
        }
        let features = Features {
            compatible: raw.features_compatible.get(),
            read_only_compatible: raw.features_read_only.get(),
            incompatible: raw.features_incompatible.get(),
        };
        let unknown = features.incompatible & !Features::INCOMPATIBLE_KNOWN;
        if unknown != 0 {
            return fail(format!("uses unknown incompatible features {unknown:#x}"));
        }
        let geometry =
            Geometry { total_blocks: raw.total_blocks.get(), log_blocks: raw.log_blocks.get() };
        let bytes_total = geometry.total_blocks.checked_mul(BLOCK_SIZE as u64);
        let sizes_fit = bytes_total.is_some_and(|b| b >= Geometry::VOLUME_BYTES_MIN)
            && geometry.log_blocks >= Geometry::LOG_BLOCKS_MIN
            && geometry.log_blocks < geometry.total_blocks
            && geometry.data_start() < geometry.superblock_copy();
        if !sizes_fit {
            return fail(format!(
                "impossible sizes: {} blocks with a log of {}",
                geometry.total_blocks, geometry.log_blocks
            ));
        }
        let root = NodePointer {
            block: BlockNumber(raw.root_block.get()),
            generation: Generation(raw.root_generation.get()),
            level: u8::try_from(raw.root_level.get()).unwrap_or(u8::MAX),
        };
        if !geometry.contains(crate::BlockRange::node(root.block))
            || !root.block.0.is_multiple_of(NODE_BLOCKS)
            || root.level >= crate::node::LEVELS_MAX
        {
            return fail(format!("impossible root {root:?}"));
        }
        let log_tail =
            LogPosition { block: raw.log_tail_block.get(), sequence: raw.log_tail_sequence.get() };
        if log_tail.block >= geometry.log_blocks {
            return fail(format!("log tail {} outside the log", log_tail.block));
        }
        let counters = [
            raw.header.generation,
            raw.next_inode,
            raw.log_epoch,
            raw.log_tail_sequence,
            raw.inodes,
        ];
        if let Some(counter) = counters.iter().find(|counter| counter.get() > COUNTER_MAX) {
            return fail(format!("impossible counter {counter}"));
        }
        let (next_tree, default_subvolume) = if features.has_subvolumes() {
            (TreeId(raw.next_tree.get()), TreeId(raw.default_subvolume.get()))
        } else {
            (TreeId(TREE_FILES.0 + 1), TREE_FILES)
        };
        if !next_tree.holds_files()
            || !default_subvolume.holds_files()
            || default_subvolume >= next_tree
        {
            return fail(format!(
                "subvolume {default_subvolume} is shown by default, {next_tree} is the next one"
            ));
        }
        if features.has_snapshots() && !features.has_subvolumes() {
            return fail("has the feature snapshots, but not the feature subvolumes".into());
        }
        if features.has_forks() && !features.has_snapshots() {
            return fail("has the feature forks, but not the feature snapshots".into());
        }
        let next_list = if features.has_snapshots() { raw.next_list.get() } else { 1 };
        if !(1..=COUNTER_MAX).contains(&next_list) {
            return fail(format!("impossible next dead list {next_list}"));
        }
        let label_end = raw.label.iter().position(|&b| b == 0).unwrap_or(LABEL_BYTES);
        Ok(Self {
            volume: VolumeId(raw.header.volume),
            generation: Generation(raw.header.generation.get()),
            features,
            geometry,
            root,
            next_inode: raw.next_inode.get(),
            log_epoch: raw.log_epoch.get(),
            log_tail,
            used_blocks: raw.used_blocks.get(),
            bitmaps_checksum: raw.bitmaps_checksum.get(),
            inodes: raw.inodes.get(),
            next_tree,
            default_subvolume,
            next_list,
            hash_seed: raw.hash_seed,
            created_ns: raw.created_ns.get(),
            clean: raw.flags.get() & FLAG_CLEAN != 0,
            label: String::from_utf8_lossy(&raw.label[..label_end]).into_owned(),
        })
    }
}

const _: () = assert!(size_of::<RawSuperblock>() <= BLOCK_SIZE && HEADER_BYTES == 48);
