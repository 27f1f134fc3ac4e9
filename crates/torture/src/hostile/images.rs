//! The volumes that are mutated: small ones with something of everything, kept in the tree so that
//! an input means the same for ever. `cargo run -p cairn-torture --example make_hostile_images DIR`
//! makes them anew.
#[path = "../../../fsck/tests/golden/sparse_image.rs"]
pub mod sparse_image;

use super::overlay::{Image, OverlayDevice};
use cairn_blockdev::{BLOCK_BYTES, BlockDevice};
use cairn_format::{
    BLOCK_SIZE, BlockNumber, Checkpoint, Extent, Geometry, ItemKind, NODE_BLOCKS, NODE_SIZE, Node,
    RootItem, Superblock, TREE_ROOTS,
};
use std::sync::Arc;

/// Name and sparse content of each volume. Inputs name them by their number: append only.
const IMAGES: [(&str, &[u8]); 5] = [
    ("everything", include_bytes!("../../corpus/images/everything.sparse")),
    ("logged", include_bytes!("../../corpus/images/logged.sparse")),
    ("orphans", include_bytes!("../../corpus/images/orphans.sparse")),
    ("wrapped", include_bytes!("../../corpus/images/wrapped.sparse")),
    ("deep", include_bytes!("../../corpus/images/deep.sparse")),
];

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
        };
        base.find_nodes(&device);
        base.find_checkpoints(&device);
        base
    }

    fn find_nodes(&mut self, device: &OverlayDevice) {
        let mut todo = vec![self.superblock.root.block];
        while let Some(address) = todo.pop() {
            let node = read_node(device, &self.superblock, address)
                .expect("the corpus holds whole volumes");
            self.nodes.push(address);
            for (index, (key, value)) in node.items().enumerate() {
                if node.level() > 0 {
                    todo.push(node.child(index).block);
                } else if node.tree() == TREE_ROOTS {
                    todo.push(RootItem::decode(value).expect("a root item").root.block);
                } else if key.kind == ItemKind::Extent as u8 {
                    self.extents.push(Extent::decode(value).expect("an extent").start);
                }
            }
        }
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
