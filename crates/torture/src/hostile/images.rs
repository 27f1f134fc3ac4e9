//! The volumes that are mutated: small ones with something of everything, kept in the tree so that
//! an input means the same for ever. `cargo run -p cairn-torture --example make_hostile_images DIR`
//! makes them anew.
#[path = "../../../fsck/tests/golden/sparse_image.rs"]
pub mod sparse_image;

use super::overlay::{Image, OverlayDevice};
use cairn_blockdev::{BLOCK_BYTES, BlockDevice};
use cairn_format::{
    BLOCK_SIZE, BlockNumber, Checkpoint, DeadListItem, Extent, Geometry, ItemKind, Key,
    NODE_BLOCKS, NODE_SIZE, Node, RootItem, SnapshotItem, SubvolumeItem, Superblock, TREE_FILES,
};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Name and sparse content of each volume. Inputs name them by their number ([`chosen`]): append
/// only.
const IMAGES: [(&str, &[u8]); 9] = [
    ("everything", include_bytes!("../../corpus/images/everything.sparse")),
    ("logged", include_bytes!("../../corpus/images/logged.sparse")),
    ("orphans", include_bytes!("../../corpus/images/orphans.sparse")),
    ("wrapped", include_bytes!("../../corpus/images/wrapped.sparse")),
    ("deep", include_bytes!("../../corpus/images/deep.sparse")),
    ("snapshots", include_bytes!("../../corpus/images/snapshots.sparse")),
    ("forks", include_bytes!("../../corpus/images/forks.sparse")),
    ("removal", include_bytes!("../../corpus/images/removal.sparse")),
    ("naming", include_bytes!("../../corpus/images/naming.sparse")),
];
/// The first images have one subvolume. Most bytes name one of them, modulo their number.
const FIRST: usize = 5;
/// The later ones have several; each has so many bytes of its own, which begin here.
const LATER_FROM: u8 = 0xd0;
const LATER_BYTES: u8 = 4;

/// The number of the image that the first byte of an input names.
pub fn chosen(byte: u8) -> usize {
    let later = byte.checked_sub(LATER_FROM).map(|byte| FIRST + usize::from(byte / LATER_BYTES));
    later.filter(|later| *later < IMAGES.len()).unwrap_or(usize::from(byte) % FIRST)
}

/// A byte that names an image.
pub fn first_byte(image: usize) -> u8 {
    match image.checked_sub(FIRST) {
        None => image as u8,
        Some(later) => LATER_FROM + LATER_BYTES * later as u8,
    }
}

/// A volume, and where its structures stand.
pub struct BaseImage {
    /// Its name.
    pub name: &'static str,
    image: Arc<Image>,
    length_bytes: u64,
    /// Its newest superblock.
    pub superblock: Superblock,
    /// First blocks of all nodes, parents first.
    pub nodes: Vec<BlockNumber>,
    /// The checkpoints to replay: block within the ring, and length.
    pub checkpoints: Vec<(u64, u64)>,
    /// First blocks of some extents.
    pub extents: Vec<BlockNumber>,
    /// The leaves of the trees that say what subvolumes and snapshots there are; none in a volume
    /// with one subvolume.
    pub records: Vec<BlockNumber>,
    /// Numbers that these leaves have: ids of trees and dead lists, generations, blocks of roots.
    pub facts: Vec<u64>,
    /// The ids of all subvolumes.
    pub subvolumes: Vec<u64>,
}

impl BaseImage {
    /// All of them.
    ///
    /// # Panics
    /// When a file of the corpus is not what it should be.
    pub fn all() -> Vec<Self> {
        IMAGES.iter().map(|(name, sparse)| Self::load(name, sparse)).collect()
    }

    /// A device with this volume.
    pub fn device(&self) -> OverlayDevice {
        OverlayDevice::new(self.image.clone(), self.length_bytes)
    }

    /// The three superblocks on `device`, which has the geometry of this volume, with their blocks.
    pub fn superblock_bytes(&self, device: &OverlayDevice) -> Vec<(u64, Box<[u8]>)> {
        let copy = self.superblock.geometry.superblock_copy();
        let places = Geometry::SUPERBLOCKS.into_iter().chain([copy]);
        places.map(|place| (place.0, device.block(place.0))).collect()
    }

    fn load(name: &'static str, sparse: &[u8]) -> Self {
        let memory = sparse_image::load(sparse);
        let mut image = Image::new();
        for block in 0..memory.length_bytes() / BLOCK_BYTES as u64 {
            let mut bytes = vec![0; BLOCK_BYTES];
            memory.read(block * BLOCK_BYTES as u64, &mut bytes).expect("memory can be read");
            if bytes.iter().any(|&byte| byte != 0) {
                image.insert(block, bytes.into());
            }
        }
        let device = OverlayDevice::new(Arc::new(image), memory.length_bytes());
        let superblock = Geometry::SUPERBLOCKS
            .iter()
            .filter_map(|&address| Superblock::decode(&device.block(address.0), address).ok())
            .max_by_key(|superblock| superblock.generation)
            .expect("the corpus holds volumes");
        let mut base = Self {
            name,
            image: device.base_image(),
            length_bytes: memory.length_bytes(),
            superblock,
            nodes: Vec::new(),
            checkpoints: Vec::new(),
            extents: Vec::new(),
            records: Vec::new(),
            facts: Vec::new(),
            subvolumes: Vec::new(),
        };
        base.find_nodes(&device);
        if !base.superblock.features.has_subvolumes() {
            (base.records, base.facts, base.subvolumes) = Default::default();
        }
        base.find_checkpoints(&device);
        base
    }

    /// Nodes that several trees have are met once. Those of a tree that is being removed may be
    /// gone.
    fn find_nodes(&mut self, device: &OverlayDevice) {
        let mut todo = vec![self.superblock.root.block];
        let mut met = BTreeSet::new();
        while let Some(address) = todo.pop() {
            if !met.insert(address) {
                continue;
            }
            let Some(node) = read_node(device, &self.superblock, address) else {
                assert!(self.superblock.features.has_subvolumes(), "{}: {address}", self.name);
                continue;
            };
            self.nodes.push(address);
            if node.level() == 0 && node.tree() < TREE_FILES {
                self.records.push(address);
            }
            for (index, (key, value)) in node.items().enumerate() {
                if node.level() > 0 {
                    todo.push(node.child(index).block);
                } else if node.tree() < TREE_FILES {
                    todo.extend(self.note_record(key, value));
                } else if key.kind == ItemKind::Extent as u8 {
                    self.extents.push(Extent::decode(value).expect("an extent").start);
                }
            }
        }
        self.facts.sort_unstable();
        self.facts.dedup();
    }

    /// Notes the numbers of an item about trees; the root of one, if it has that.
    fn note_record(&mut self, key: Key, value: &[u8]) -> Option<BlockNumber> {
        self.facts.extend([key.inode, key.offset]);
        let root = match ItemKind::from_u8(key.kind)? {
            ItemKind::Root => RootItem::decode(value).expect("a root item").root,
            ItemKind::Snapshot => SnapshotItem::decode(value).expect("a snapshot").root,
            ItemKind::Subvolume => {
                self.subvolumes.push(key.inode);
                SubvolumeItem::decode(value).expect("a subvolume").dying_root?
            }
            ItemKind::DeadList => {
                self.facts.push(DeadListItem::decode(value).expect("a dead list").list);
                return None;
            }
            _ => return None,
        };
        self.facts.extend([root.block.0, root.generation.0]);
        Some(root.block)
    }

    fn find_checkpoints(&mut self, device: &OverlayDevice) {
        let log = self.superblock.geometry.log();
        let mut at = self.superblock.log_tail;
        loop {
            let first = device.block(log.start.0 + at.block);
            let Some(blocks) = Checkpoint::blocks_announced(&first) else { return };
            let Some(checkpoint) = read_checkpoint(device, &self.superblock, at.block, blocks)
            else {
                return;
            };
            if (checkpoint.header.sequence, checkpoint.header.log_epoch)
                != (at.sequence, self.superblock.log_epoch)
            {
                return;
            }
            self.checkpoints.push((at.block, blocks));
            at.block = (at.block + blocks) % log.blocks;
            at.sequence += 1;
        }
    }
}

/// The node at `address`, if it is valid.
pub fn read_node(
    device: &OverlayDevice,
    superblock: &Superblock,
    address: BlockNumber,
) -> Option<Node> {
    let mut page = Box::new([0; NODE_SIZE]);
    for (block, bytes) in
        (address.0..address.0 + NODE_BLOCKS).zip(page.chunks_exact_mut(BLOCK_SIZE))
    {
        bytes.copy_from_slice(&device.block(block));
    }
    Node::decode(page, superblock.volume, address).ok()
}

/// The checkpoint of `blocks` blocks at `ring_block`, if it is valid.
pub fn read_checkpoint(
    device: &OverlayDevice,
    superblock: &Superblock,
    ring_block: u64,
    blocks: u64,
) -> Option<Checkpoint> {
    let log = superblock.geometry.log();
    let places = (ring_block..ring_block + blocks.min(log.blocks))
        .map(|block| log.start.0 + block % log.blocks);
    Checkpoint::decode(
        places.flat_map(|block| device.block(block)).collect(),
        superblock.volume,
        ring_block,
    )
    .ok()
}
