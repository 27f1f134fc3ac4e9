//! The items of a volume, found by following the pointers from its superblock and by replaying its
//! log, and the nodes in which they stand.
//!
//! Neither the engine nor fsck is asked, only the format; and everything must be whole.
use cairn_blockdev::BlockDevice;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, Checkpoint, EntryFlags, Geometry, Key, NODE_SIZE, Node,
    RootItem, Superblock, TREE_ROOTS,
};
use std::collections::BTreeMap;

/// A leaf of the files' tree.
pub struct Leaf {
    /// Its first block.
    pub block: BlockNumber,
    /// Its items, in order.
    pub items: Vec<(Key, Vec<u8>)>,
}

/// See the [module](self).
pub struct Items {
    /// The superblock that counts.
    pub superblock: Superblock,
    /// The nodes that are no leaves of the files' tree, parents first.
    pub above: Vec<BlockNumber>,
    /// The leaves of the files' tree, in the order of their keys.
    pub leaves: Vec<Leaf>,
    /// What the log changes: new values, and `None` for removals.
    pub logged: BTreeMap<Key, Option<Vec<u8>>>,
}

impl Items {
    /// Those of a volume.
    ///
    /// # Panics
    /// Anything of it is damaged.
    pub fn of(device: &dyn BlockDevice) -> Self {
        let slots = Geometry::SUPERBLOCKS.iter().filter_map(|&slot| {
            Superblock::decode(&read(device, BlockRange::new(slot, 1)), slot).ok()
        });
        let superblock =
            slots.max_by_key(|superblock| superblock.generation).expect("a superblock");
        let root = superblock.root.block;
        let mut items =
            Self { superblock, above: Vec::new(), leaves: Vec::new(), logged: BTreeMap::new() };
        items.add_node(device, root);
        for (_, checkpoint) in checkpoints(device, &items.superblock) {
            for entry in checkpoint.entries() {
                let removed = entry.flags.contains(EntryFlags::DELETE);
                items.logged.insert(entry.key, (!removed).then(|| entry.value.to_vec()));
            }
        }
        items
    }

    fn add_node(&mut self, device: &dyn BlockDevice, block: BlockNumber) {
        let page: Box<[u8; NODE_SIZE]> = read(device, BlockRange::node(block))
            .into_boxed_slice()
            .try_into()
            .expect("a node's length");
        let node = Node::decode(page, self.superblock.volume, block).expect("a node");
        if node.level() > 0 {
            self.above.push(block);
            (0..node.count()).for_each(|index| self.add_node(device, node.child(index).block));
        } else if node.tree() == TREE_ROOTS {
            self.above.push(block);
            for (_, value) in node.items() {
                self.add_node(device, RootItem::decode(value).expect("a root item").root.block);
            }
        } else {
            let items = node.items().map(|(key, value)| (key, value.to_vec())).collect();
            self.leaves.push(Leaf { block, items });
        }
    }

    /// The items after a replay, without those of leaves that `is_left` refuses.
    pub fn left(&self, is_left: impl Fn(BlockNumber) -> bool) -> BTreeMap<Key, Vec<u8>> {
        let leaves = self.leaves.iter().filter(|leaf| is_left(leaf.block));
        let mut left: BTreeMap<Key, Vec<u8>> =
            leaves.flat_map(|leaf| leaf.items.iter().cloned()).collect();
        for (key, change) in &self.logged {
            match change {
                Some(value) => left.insert(*key, value.clone()),
                None => left.remove(key),
            };
        }
        left
    }

    /// All items after a replay.
    pub fn all(&self) -> BTreeMap<Key, Vec<u8>> {
        self.left(|_| true)
    }
}

/// The checkpoints to replay, in order, each with its blocks counted from the beginning of the
/// ring.
pub fn checkpoints(
    device: &dyn BlockDevice,
    superblock: &Superblock,
) -> Vec<(BlockRange, Checkpoint)> {
    let (ring, mut at) = (superblock.geometry.log(), superblock.log_tail);
    let read_ring = |from: u64, blocks: u64| -> Vec<u8> {
        let places = (from..from + blocks).map(|block| ring.start.0 + block % ring.blocks);
        places.flat_map(|block| read(device, BlockRange::new(BlockNumber(block), 1))).collect()
    };
    let mut found = Vec::new();
    loop {
        let announced = Checkpoint::blocks_announced(&read_ring(at.block, 1));
        let Some(blocks) = announced.filter(|blocks| *blocks <= ring.blocks) else { return found };
        let bytes = read_ring(at.block, blocks);
        let Ok(checkpoint) = Checkpoint::decode(bytes, superblock.volume, at.block) else {
            return found;
        };
        let header = &checkpoint.header;
        if (header.log_epoch, header.sequence) != (superblock.log_epoch, at.sequence) {
            return found;
        }
        let range = BlockRange::new(BlockNumber(at.block), blocks);
        at.block = (at.block + blocks) % ring.blocks;
        at.sequence += 1;
        if header.generation > superblock.generation {
            found.push((range, checkpoint));
        }
    }
}

fn read(device: &dyn BlockDevice, range: BlockRange) -> Vec<u8> {
    let mut bytes = vec![0; range.blocks as usize * BLOCK_SIZE];
    device.read(range.start.offset_bytes(), &mut bytes).expect("the device works");
    bytes
}
