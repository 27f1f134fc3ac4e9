//! Makes an empty volume on a device.
//!
//! An empty volume has one file tree (the root directory's inode item in a leaf), one root tree
//! (the file tree's root item in a leaf), a bitmap per block group, and three equal superblocks of
//! generation 1.
//!
//! Invariant: until the last step a reader finds no superblock at all, so that an interrupted mkfs
//! leaves "no volume" rather than half of one. No lock is taken.
use cairn_blockdev::{AlignedBuffer, BlockDevice, DeviceError};
use cairn_environment::{clock, random};
use cairn_format::{
    BLOCK_SIZE, Bitmap, BlockNumber, BlockRange, Features, Generation, Geometry, INODE_FIRST,
    INODE_ROOT, InodeItem, ItemKind, Key, LABEL_BYTES, LogPosition, NODE_BLOCKS, Node, NodePointer,
    RootItem, Superblock, TREE_FILES, TREE_ROOTS, Timestamp, TreeId, VolumeId,
    bitmap_generations_checksum,
};

const GENERATION_FIRST: Generation = Generation(1);
const ROOT_MODE: u32 = 0o040_755;
/// Bitmap slots read at once: 1 MiB.
const BITMAPS_PER_READ: u64 = 256;

/// What the new volume should be like. Its size is the device's.
#[derive(Clone, Debug, Default)]
pub struct MkfsOptions {
    /// Length of the log ring; by default 1/64 of the volume, between 4 MiB and 256 MiB.
    pub log_bytes: Option<u64>,
    /// Name of the volume, up to 64 bytes.
    pub label: String,
    /// Owner of the root directory.
    pub uid: u32,
    /// Group of the root directory.
    pub gid: u32,
    /// Keys the hashes of names; by default random, so that nobody can choose names with equal
    /// hashes. For tests with such names.
    pub hash_seed: Option<[u8; 16]>,
}

/// Why no volume was made.
#[derive(Debug, thiserror::Error)]
pub enum MkfsError {
    /// The device can't hold a volume with such a log.
    #[error(
        "a device of {length_bytes} bytes is too small for a volume with {log}; at least {} bytes and half of them for files are needed",
        Geometry::VOLUME_BYTES_MIN
    )]
    Geometry {
        /// The device's length.
        length_bytes: u64,
        /// The log asked for, in words.
        log: String,
    },
    /// The label doesn't fit.
    #[error("the label has {length_bytes} bytes; {LABEL_BYTES} are possible, without NUL")]
    Label {
        /// Length of the label.
        length_bytes: usize,
    },
    /// Reading or writing failed.
    #[error("making a volume: {0}")]
    Device(#[from] DeviceError),
}

/// Makes an empty volume on `device`; whatever the device held before is lost.
///
/// # Errors
/// A size, log or label that doesn't fit (the device is unchanged), or a failed write (the device
/// holds no volume).
pub fn mkfs(device: &dyn BlockDevice, options: &MkfsOptions) -> Result<Superblock, MkfsError> {
    let length_bytes = device.length_bytes();
    let Some(geometry) = Geometry::for_size(length_bytes, options.log_bytes) else {
        let log = options
            .log_bytes
            .map_or_else(|| "the default log".into(), |bytes| format!("a log of {bytes} bytes"));
        return Err(MkfsError::Geometry { length_bytes, log });
    };
    if options.label.len() > LABEL_BYTES || options.label.contains('\0') {
        return Err(MkfsError::Label { length_bytes: options.label.len() });
    }
    let created = now();
    let superblock = Superblock {
        volume: VolumeId(random::bytes16()),
        generation: GENERATION_FIRST,
        features: Features {
            compatible: Features::PARENTS,
            incompatible: Features::IMPLICIT_BITMAPS,
            ..Features::default()
        },
        geometry,
        root: NodePointer { block: geometry.data_start(), generation: GENERATION_FIRST, level: 0 },
        next_inode: INODE_FIRST,
        log_epoch: 1,
        log_tail: LogPosition { block: 0, sequence: 1 },
        used_blocks: 2 * NODE_BLOCKS,
        bitmaps_checksum: bitmap_generations_checksum(
            (0..geometry.groups()).map(|_| GENERATION_FIRST),
        ),
        inodes: 1,
        next_tree: TreeId(TREE_FILES.0 + 1),
        next_list: 1,
        default_subvolume: TREE_FILES,
        hash_seed: options.hash_seed.unwrap_or_else(random::bytes16),
        created_ns: created.seconds.unsigned_abs() * 1_000_000_000 + u64::from(created.nanoseconds),
        clean: true,
        label: options.label.clone(),
    };
    write_volume(device, &superblock, root_directory(created, options))?;
    Ok(superblock)
}

/// Writes everything in an order that never shows half a volume:
/// 1. Zeros over the three superblocks; flush. *Crash: no volume (or still the old one, whole).*
/// 2. Trees, bitmaps, the log's first block; flush. *Crash: no volume.*
/// 3. The superblocks; flush. *Crash: no volume, or the new one.*
fn write_volume(
    device: &dyn BlockDevice,
    superblock: &Superblock,
    root_directory: InodeItem,
) -> Result<(), MkfsError> {
    let geometry = &superblock.geometry;
    let zeros = vec![0; BLOCK_SIZE];
    let superblock_places =
        [Geometry::SUPERBLOCKS[0], Geometry::SUPERBLOCKS[1], geometry.superblock_copy()];
    for address in superblock_places {
        device.write(address.offset_bytes(), &[&zeros])?;
    }
    device.flush()?;

    write_trees(device, superblock, root_directory)?;
    write_bitmaps(device, superblock)?;
    device.write(geometry.log().start.offset_bytes(), &[&zeros])?;
    device.flush()?;

    for address in superblock_places {
        device.write(address.offset_bytes(), &[&superblock.encode(address)])?;
    }
    device.flush()?;
    Ok(())
}

/// The root tree's leaf with the file tree's root item, then the file tree's leaf with the root
/// directory.
fn write_trees(
    device: &dyn BlockDevice,
    superblock: &Superblock,
    root_directory: InodeItem,
) -> Result<(), DeviceError> {
    let roots_address = superblock.root.block;
    let files_address = BlockNumber(roots_address.0 + NODE_BLOCKS);
    let leaf = |tree: TreeId, address: BlockNumber, key: Key, value: &[u8]| {
        let mut node = Node::new(superblock.volume, tree, 0, address, GENERATION_FIRST);
        node.insert(0, key, value).expect("an empty node has room for an item");
        node.seal();
        node
    };
    let root_item = RootItem {
        root: NodePointer { block: files_address, generation: GENERATION_FIRST, level: 0 },
    };
    let roots = leaf(TREE_ROOTS, roots_address, Key::root(TREE_FILES), &root_item.encode());
    let root_key = Key::new(INODE_ROOT, ItemKind::Inode, 0);
    let files = leaf(TREE_FILES, files_address, root_key, &root_directory.encode());
    device.write(roots_address.offset_bytes(), &[&roots.page()[..], &files.page()[..]])
}

fn now() -> Timestamp {
    let (seconds, nanoseconds) = clock::now_wall();
    Timestamp { seconds, nanoseconds }
}

fn root_directory(created: Timestamp, options: &MkfsOptions) -> InodeItem {
    InodeItem {
        mode: ROOT_MODE,
        uid: options.uid,
        gid: options.gid,
        links: 2,
        size: 0,
        blocks: 0,
        device: 0,
        parent: INODE_ROOT.0,
        entries: 0,
        flags: 0,
        generation: GENERATION_FIRST,
        accessed: created,
        modified: created,
        changed: created,
        created,
    }
}

/// Slot 1 of the groups that hold the first nodes; zeros in every other slot, which are written
/// only over something else: so a sparse image stays sparse, however long it is.
fn write_bitmaps(device: &dyn BlockDevice, superblock: &Superblock) -> Result<(), DeviceError> {
    let geometry = &superblock.geometry;
    let mut first = 0;
    while first < geometry.groups() {
        let groups = first..(first + BITMAPS_PER_READ).min(geometry.groups());
        first = groups.end;
        let zeros = vec![0; (groups.end - groups.start) as usize * BLOCK_SIZE];
        write_where_different(device, geometry.bitmap_block(groups.start, 0), &zeros)?;
        let mut slots = zeros;
        for (group, slot) in groups.clone().zip(slots.chunks_exact_mut(BLOCK_SIZE)) {
            if let Some(bitmap) = explicit_bitmap(superblock, group) {
                slot.copy_from_slice(
                    &bitmap.encode(superblock.volume, geometry.bitmap_block(group, 1)),
                );
            }
        }
        write_where_different(device, geometry.bitmap_block(groups.start, 1), &slots)?;
    }
    Ok(())
}

/// The bitmap of a group in which mkfs allocated nodes.
fn explicit_bitmap(superblock: &Superblock, group: u64) -> Option<Bitmap> {
    let group_range = superblock.geometry.group_range(group).range();
    let nodes = BlockRange::new(superblock.root.block, 2 * NODE_BLOCKS).range();
    let here = nodes.start.max(group_range.start)..nodes.end.min(group_range.end);
    if here.is_empty() {
        return None;
    }
    let mut bitmap = Bitmap::initial(&superblock.geometry, group);
    for block in here {
        let index = block - group_range.start;
        bitmap.bits[(index / 8) as usize] |= 1 << (index % 8);
    }
    Some(bitmap)
}

/// Writes the runs of blocks from `start` on that differ from `wanted`.
fn write_where_different(
    device: &dyn BlockDevice,
    start: BlockNumber,
    wanted: &[u8],
) -> Result<(), DeviceError> {
    let mut present = AlignedBuffer::zeroed(wanted.len());
    device.read(start.offset_bytes(), &mut present)?;
    let pairs: Vec<_> =
        present.chunks_exact(BLOCK_SIZE).zip(wanted.chunks_exact(BLOCK_SIZE)).collect();
    let mut at = 0;
    for run in pairs.chunk_by(|(a, b), (c, d)| (a == b) == (c == d)) {
        if run[0].0 != run[0].1 {
            let offset_bytes = start.offset_bytes() + (at * BLOCK_SIZE) as u64;
            device
                .write(offset_bytes, &[&wanted[at * BLOCK_SIZE..(at + run.len()) * BLOCK_SIZE]])?;
        }
        at += run.len();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_blockdev::{MemoryDevice, forward_to_device};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    /// Fails every write after the first `writes_left`.
    struct Failing {
        device: MemoryDevice,
        writes_left: AtomicU64,
    }

    impl BlockDevice for Failing {
        fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
            let left = self
                .writes_left
                .try_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            let offset_bytes = if left.is_ok() { offset_bytes } else { u64::MAX - 4095 };
            self.device.write(offset_bytes, buffers)
        }
        fn flush_time(&self) -> Duration {
            Duration::ZERO
        }
        forward_to_device!(self => self.device; read, flush, discard, length_bytes);
    }

    fn read_superblock(
        device: &dyn BlockDevice,
        address: BlockNumber,
    ) -> Result<Superblock, cairn_format::FormatError> {
        Superblock::decode(&read_block(device, address), address)
    }

    fn read_block(device: &dyn BlockDevice, address: BlockNumber) -> Vec<u8> {
        let mut block = vec![0; BLOCK_SIZE];
        device.read(address.offset_bytes(), &mut block).unwrap();
        block
    }

    fn read_node(device: &dyn BlockDevice, superblock: &Superblock, address: BlockNumber) -> Node {
        let mut page = Box::new([0; cairn_format::NODE_SIZE]);
        device.read(address.offset_bytes(), &mut page[..]).unwrap();
        Node::decode(page, superblock.volume, address).unwrap()
    }

    #[test]
    fn an_empty_volume_can_be_read_back() {
        for length_bytes in [16 << 20, (200 << 20) + 12288] {
            let device = MemoryDevice::new(length_bytes);
            let options =
                MkfsOptions { label: "maildir".into(), uid: 5, gid: 6, ..MkfsOptions::default() };
            let superblock = mkfs(&device, &options).unwrap();
            for address in [
                Geometry::SUPERBLOCKS[0],
                Geometry::SUPERBLOCKS[1],
                superblock.geometry.superblock_copy(),
            ] {
                assert_eq!(read_superblock(&device, address).unwrap(), superblock);
            }
            let roots = read_node(&device, &superblock, superblock.root.block);
            assert_eq!(
                (roots.tree(), roots.count(), roots.key(0)),
                (TREE_ROOTS, 1, Key::root(TREE_FILES))
            );
            let root = RootItem::decode(roots.value(0)).unwrap().root;
            let files = read_node(&device, &superblock, root.block);
            let inode = InodeItem::decode(files.value(0)).unwrap();
            assert_eq!(
                (inode.mode, inode.links, inode.parent, inode.uid, inode.gid),
                (0o40755, 2, 1, 5, 6)
            );
            assert_eq!(used_bits(&device, &superblock), superblock.used_blocks);
        }
    }

    /// Set bits among the allocatable blocks; asserts that every other bit is set, and that slot 0
    /// is no bitmap.
    fn used_bits(device: &dyn BlockDevice, superblock: &Superblock) -> u64 {
        let geometry = &superblock.geometry;
        let mut used = 0;
        for group in 0..geometry.groups() {
            let slots = [0, 1].map(|slot| read_block(device, geometry.bitmap_block(group, slot)));
            let bitmap = Bitmap::decode_slot(&slots[1], superblock, group, 1).unwrap();
            assert!(Bitmap::decode_slot(&slots[0], superblock, group, 0).is_err());
            let holds_root = geometry.group_range(group).range().contains(&superblock.root.block.0);
            assert_eq!(slots[1].iter().any(|&byte| byte != 0), holds_root, "group {group}");
            for index in 0..Geometry::GROUP_BLOCKS {
                let set = bitmap.bits[(index / 8) as usize] & (1 << (index % 8)) != 0;
                let allocatable = geometry
                    .allocatable()
                    .range()
                    .contains(&(group * Geometry::GROUP_BLOCKS + index));
                assert!(set || allocatable);
                used += u64::from(set && allocatable);
            }
        }
        used
    }

    /// Reads zeros; counts what is written.
    struct Sparse {
        length_bytes: u64,
        written_bytes: AtomicU64,
    }

    impl BlockDevice for Sparse {
        fn length_bytes(&self) -> u64 {
            self.length_bytes
        }
        fn read(&self, _: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
            buffer.fill(0);
            Ok(())
        }
        fn write(&self, _: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
            let bytes = buffers.iter().map(|buffer| buffer.len() as u64).sum();
            self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
            Ok(())
        }
        fn flush(&self) -> Result<(), DeviceError> {
            Ok(())
        }
        fn discard(&self, _: u64, _: u64) -> Result<(), DeviceError> {
            Ok(())
        }
        fn flush_time(&self) -> Duration {
            Duration::ZERO
        }
    }

    #[test]
    fn a_long_sparse_device_stays_sparse() {
        let written = [1 << 30, 1 << 40].map(|length_bytes| {
            let device = Sparse { length_bytes, written_bytes: AtomicU64::new(0) };
            mkfs(&device, &MkfsOptions::default()).unwrap();
            device.written_bytes.into_inner()
        });
        assert!(written[0] == written[1] && written[1] < 100_000, "{written:?}");
    }

    #[test]
    fn an_interrupted_mkfs_leaves_no_volume() {
        for writes in 0.. {
            let device = Failing {
                device: MemoryDevice::new(16 << 20),
                writes_left: AtomicU64::new(u64::MAX),
            };
            let old = mkfs(&device, &MkfsOptions::default()).unwrap();
            device.writes_left.store(writes, Ordering::Relaxed);
            let made = mkfs(&device, &MkfsOptions::default());
            device.writes_left.store(u64::MAX, Ordering::Relaxed);
            let places = [
                Geometry::SUPERBLOCKS[0],
                Geometry::SUPERBLOCKS[1],
                old.geometry.superblock_copy(),
            ];
            let found = places
                .iter()
                .filter_map(|&place| read_superblock(&device, place).ok())
                .collect::<Vec<_>>();
            match made {
                Ok(new) => {
                    assert!(
                        writes > 5
                            && found.iter().all(|superblock| *superblock == new)
                            && found.len() == 3
                    );
                    return;
                }
                // The first three writes remove the old superblocks, the last three write the new
                // ones.
                Err(_) if (3..=6).contains(&writes) => assert!(found.is_empty(), "{writes} writes"),
                Err(_) if writes < 3 => assert!(found.iter().all(|superblock| *superblock == old)),
                Err(_) => assert!(found.iter().all(|superblock| superblock.volume != old.volume)),
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_before_anything_is_written() {
        let device = MemoryDevice::new(8 << 20);
        assert!(matches!(mkfs(&device, &MkfsOptions::default()), Err(MkfsError::Geometry { .. })));
        let device = MemoryDevice::new(32 << 20);
        let options = MkfsOptions { log_bytes: Some(24 << 20), ..MkfsOptions::default() };
        assert!(
            mkfs(&device, &options).unwrap_err().to_string().contains("a log of 25165824 bytes")
        );
        let options = MkfsOptions { label: "x".repeat(65), ..MkfsOptions::default() };
        assert!(matches!(mkfs(&device, &options), Err(MkfsError::Label { length_bytes: 65 })));
        assert_eq!(device.counters().writes, 0);
    }
}
