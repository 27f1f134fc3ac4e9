//! What a volume's blocks are for, found by following the pointers from its superblock: damage to
//! what nothing refers to may go unnoticed, damage to anything else must not.
//!
//! Neither the engine nor fsck is asked, only the format; and everything must be whole.
use cairn_blockdev::BlockDevice;
use cairn_format::{
    BLOCK_SIZE, Bitmap, BlockNumber, BlockRange, Checkpoint, EntryFlags, Extent, ExtentKind,
    Generation, Geometry, ItemKind, Key, NODE_SIZE, Node, RootItem, Superblock, TREE_ROOTS, TreeId,
};
use std::collections::BTreeMap;

/// What refers to a block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Reference {
    /// The slot of the newest superblock.
    NewestSlot,
    /// The slot of the one before it.
    OtherSlot,
    /// The copy of the newest one.
    SuperblockCopy,
    /// The bitmap of its group that counts.
    Bitmap,
    /// The checkpoint to be replayed with this number, counted from zero.
    Checkpoint(usize),
    /// A node of a tree.
    Node,
    /// Data of a file.
    Data,
    /// Data that this checkpoint brought.
    NewData(usize),
}

/// See the [module](self).
pub struct References {
    /// The superblock that counts.
    pub superblock: Superblock,
    /// By block; what isn't here is referred to by nothing.
    pub blocks: BTreeMap<u64, Reference>,
    /// Where a structure doesn't fill its last block: that block, and the bytes of it that count.
    pub covered_bytes: BTreeMap<u64, usize>,
    /// How many checkpoints are to be replayed.
    pub checkpoints: usize,
}

/// Extents of data, with the checkpoint that brought their data.
type Extents = BTreeMap<(TreeId, Key), (Extent, Option<usize>)>;

impl References {
    /// Those of a volume.
    ///
    /// # Panics
    /// Anything of it is damaged.
    pub fn of(device: &dyn BlockDevice) -> Self {
        let slots = Geometry::SUPERBLOCKS
            .map(|slot| Superblock::decode(&read(device, slot, 1), slot).expect("a superblock"));
        let newest = usize::from(slots[1].generation > slots[0].generation);
        let superblock = slots[newest].clone();
        let copy = superblock.geometry.superblock_copy();
        assert_eq!(
            Superblock::decode(&read(device, copy, 1), copy),
            Ok(superblock.clone()),
            "the copy"
        );
        let mut references = Self {
            superblock,
            blocks: BTreeMap::new(),
            covered_bytes: BTreeMap::new(),
            checkpoints: 0,
        };
        references.add(BlockRange::new(Geometry::SUPERBLOCKS[newest], 1), Reference::NewestSlot);
        references.add(BlockRange::new(Geometry::SUPERBLOCKS[1 - newest], 1), Reference::OtherSlot);
        references.add(BlockRange::new(copy, 1), Reference::SuperblockCopy);
        references.add_bitmaps(device);
        let mut extents = Extents::new();
        references.add_tree(device, references.superblock.root.block, &mut extents);
        references.add_log(device, &mut extents);
        for (extent, checkpoint) in
            extents.values().filter(|(extent, _)| extent.kind == ExtentKind::Data)
        {
            references.add(extent.range(), checkpoint.map_or(Reference::Data, Reference::NewData));
        }
        references
    }

    fn add(&mut self, range: BlockRange, reference: Reference) {
        self.blocks.extend((range.start.0..range.end().0).map(|block| (block, reference)));
    }

    /// As [`Self::add`], of a structure with a header, which says how much of its blocks the
    /// checksum covers.
    fn add_covered(&mut self, device: &dyn BlockDevice, range: BlockRange, reference: Reference) {
        let length: [u8; 4] = read(device, range.start, 1)[12..16].try_into().expect("four bytes");
        let (last, before) = (range.end().0 - 1, (range.blocks as usize - 1) * BLOCK_SIZE);
        self.covered_bytes.insert(last, u32::from_le_bytes(length) as usize - before);
        self.add(range, reference);
    }

    fn add_bitmaps(&mut self, device: &dyn BlockDevice) {
        let geometry = self.superblock.geometry;
        for group in 0..geometry.groups() {
            let generation_of = |slot: usize| -> Option<Generation> {
                let block = read(device, geometry.bitmap_block(group, slot), 1);
                let generation =
                    Bitmap::decode_slot(&block, &self.superblock, group, slot).ok()?.generation;
                Some(generation).filter(|generation| *generation <= self.superblock.generation)
            };
            let counts = usize::from(generation_of(1) > generation_of(0));
            self.add_covered(
                device,
                BlockRange::new(geometry.bitmap_block(group, counts), 1),
                Reference::Bitmap,
            );
        }
    }

    /// The nodes below `block`, and the trees and extents that they name.
    fn add_tree(&mut self, device: &dyn BlockDevice, block: BlockNumber, extents: &mut Extents) {
        let range = BlockRange::node(block);
        let page: Box<[u8; NODE_SIZE]> = read(device, block, range.blocks)
            .into_boxed_slice()
            .try_into()
            .expect("a node's length");
        let node = Node::decode(page, self.superblock.volume, block).expect("a node");
        self.add(range, Reference::Node);
        for (index, (key, value)) in node.items().enumerate() {
            if node.level() > 0 {
                self.add_tree(device, node.child(index).block, extents);
            } else if node.tree() == TREE_ROOTS {
                self.add_tree(device, RootItem::decode(value).expect("a root").root.block, extents);
            } else if key.kind == ItemKind::Extent as u8 {
                extents
                    .insert((node.tree(), key), (Extent::decode(value).expect("an extent"), None));
            }
        }
    }

    /// The checkpoints behind the superblock, and what they make of the extents.
    fn add_log(&mut self, device: &dyn BlockDevice, extents: &mut Extents) {
        let (ring, mut at) = (self.superblock.geometry.log(), self.superblock.log_tail);
        loop {
            let start = BlockNumber(ring.start.0 + at.block);
            let Some(blocks) = Checkpoint::blocks_announced(&read(device, start, 1)) else {
                return;
            };
            assert!(at.block + blocks < ring.blocks, "these logs don't go round their end");
            let Ok(checkpoint) =
                Checkpoint::decode(read(device, start, blocks), self.superblock.volume, at.block)
            else {
                return;
            };
            if (checkpoint.header.log_epoch, checkpoint.header.sequence)
                != (self.superblock.log_epoch, at.sequence)
            {
                return;
            }
            at.block += blocks;
            at.sequence += 1;
            if checkpoint.header.generation <= self.superblock.generation {
                continue;
            }
            self.add_covered(
                device,
                BlockRange::new(start, blocks),
                Reference::Checkpoint(self.checkpoints),
            );
            for entry in
                checkpoint.entries().filter(|entry| entry.key.kind == ItemKind::Extent as u8)
            {
                extents.remove(&(entry.tree, entry.key));
                if !entry.flags.contains(EntryFlags::DELETE) {
                    let is_new = entry.flags.contains(EntryFlags::NEW_DATA);
                    extents.insert(
                        (entry.tree, entry.key),
                        (
                            Extent::decode(entry.value).expect("an extent"),
                            is_new.then_some(self.checkpoints),
                        ),
                    );
                }
            }
            self.checkpoints += 1;
        }
    }
}

fn read(device: &dyn BlockDevice, start: BlockNumber, blocks: u64) -> Vec<u8> {
    let mut bytes = vec![0; blocks as usize * BLOCK_SIZE];
    device.read(start.offset_bytes(), &mut bytes).expect("the device works");
    bytes
}
