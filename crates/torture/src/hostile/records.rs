//! Changes to what says which subvolumes and snapshots there are, and where their trees stand: the
//! items of the root tree, of the tree of subvolumes and of that of dead runs; entries that name
//! subvolumes; nodes that several trees share.
//!
//! Only volumes with several subvolumes have these operations ([`BaseImage::records`]), so inputs
//! of the others mean what they meant.
//!
//! [`BaseImage::records`]: super::images::BaseImage::records
use super::images::read_node;
use super::program::{Draft, put};
use cairn_format::{
    BlockNumber, DirectoryEntry, EntryTarget, ItemKind, Key, NODE_BLOCKS, Node, TreeId,
};

/// A field: its offset and its width.
type Field = (usize, usize);

const ROOT_FIELDS: [Field; 3] = [(0, 8), (8, 8), (16, 1)];
const SUBVOLUME_FIELDS: [Field; 15] = [
    (0, 8),
    (8, 8),
    (16, 8),
    (24, 8),
    (32, 8),
    (40, 8),
    (56, 4),
    (64, 8),
    (72, 8),
    (80, 8),
    (88, 8),
    (96, 1),
    (97, 1),
    (104, 8),
    (112, 8),
];
const SNAPSHOT_FIELDS: [Field; 8] =
    [(0, 8), (8, 8), (16, 1), (20, 4), (24, 8), (32, 8), (40, 8), (56, 1)];
const DEAD_LIST_FIELDS: [Field; 2] = [(0, 8), (8, 8)];
const CLEANUP_FIELDS: [Field; 3] = [(0, 8), (8, 8), (16, 8)];
const DEAD_RUN_FIELDS: [Field; 4] = [(0, 8), (8, 8), (16, 4), (20, 4)];
const DEAD_RUN_BYTES: usize = 24;
/// Of the superblock: next id of a tree, default subvolume, next id of a list, number of inodes.
const SUPERBLOCK_FIELDS: [Field; 4] = [(272, 8), (280, 8), (288, 8), (260, 8)];

/// The fields of an item of this kind.
fn fields_of(kind: u8) -> &'static [Field] {
    match ItemKind::from_u8(kind) {
        Some(ItemKind::Root) => &ROOT_FIELDS,
        Some(ItemKind::Subvolume) => &SUBVOLUME_FIELDS,
        Some(ItemKind::Snapshot) => &SNAPSHOT_FIELDS,
        Some(ItemKind::DeadList) => &DEAD_LIST_FIELDS,
        Some(ItemKind::Cleanup) => &CLEANUP_FIELDS,
        Some(ItemKind::DeadRuns) => &DEAD_RUN_FIELDS,
        _ => &[(0, 8)],
    }
}

/// An item of a leaf.
struct Record {
    leaf: BlockNumber,
    key: Key,
    value: Vec<u8>,
}

impl Draft<'_> {
    pub(super) fn change_record(&mut self, choice: u8) {
        match choice % 16 {
            0..=5 => self.record_field(),
            6 | 7 => self.record_key(),
            8 => self.remove_record(),
            9 | 10 => self.exchange_records(),
            11 => self.record_elsewhere(),
            12 => self.name_of_a_subvolume(),
            13 => self.node_of_another_tree(),
            14 => self.child_of_another_node(),
            _ => self.superblock_of_subvolumes(),
        }
    }

    fn node_at(&self, block: BlockNumber) -> Option<Node> {
        read_node(&self.device, &self.base.superblock, block)
    }

    fn set_node(&self, mut node: Node, change: impl FnOnce(&mut Node)) {
        change(&mut node);
        let address = node.address();
        self.write(address.0, &node.seal()[..]);
    }

    fn record(&mut self) -> Option<Record> {
        let leaf = self.input.one_of(&self.base.records)?;
        let node = self.node_at(leaf).filter(|node| node.level() == 0 && node.count() > 0)?;
        let index = self.input.below(node.count());
        Some(Record { leaf, key: node.key(index), value: node.value(index).to_vec() })
    }

    /// A field gets another number, or one of its bits turned round.
    fn change_field(&mut self, bytes: &mut [u8], (offset, width): Field) {
        if self.input.byte().is_multiple_of(4) {
            let bit = self.input.below(8 * width);
            if let Some(byte) = bytes.get_mut(offset + bit / 8) {
                *byte ^= 1 << (bit % 8);
            }
        } else {
            self.set_field(bytes, (offset, width));
        }
    }

    fn record_field(&mut self) {
        let Some(Record { leaf, key, mut value }) = self.record() else { return };
        let (offset, width) = self.input.one_of(fields_of(key.kind)).unwrap_or((0, 8));
        let start = if key.kind == ItemKind::DeadRuns as u8 {
            DEAD_RUN_BYTES * self.input.below((value.len() / DEAD_RUN_BYTES).max(1))
        } else {
            0
        };
        self.change_field(&mut value, (start + offset, width));
        if let Some(node) = self.node_at(leaf) {
            self.set_node(node, |node| put(node, key, &value));
        }
    }

    /// An item gets another key, or stands there twice.
    fn record_key(&mut self) {
        let Some(Record { leaf, key, value }) = self.record() else { return };
        let mut other = key;
        let choice = self.input.byte();
        match choice % 4 {
            0 | 1 => other.inode = self.number(key.inode),
            2 => other.offset = self.number(key.offset),
            _ => other.kind = 1 + self.input.byte() % 5,
        }
        let Some(node) = self.node_at(leaf) else { return };
        self.set_node(node, |node| {
            if choice < 128 {
                remove(node, &key);
            }
            put(node, other, &value);
        });
    }

    fn remove_record(&mut self) {
        let Some(Record { leaf, key, .. }) = self.record() else { return };
        if let Some(node) = self.node_at(leaf) {
            self.set_node(node, |node| remove(node, &key));
        }
    }

    /// Two items exchange their values, or a field of these.
    fn exchange_records(&mut self) {
        let (Some(one), Some(mut other)) = (self.record(), self.record()) else { return };
        // Of one kind, where that is possible.
        for _ in 0..4 {
            if other.key.kind == one.key.kind && other.key != one.key {
                break;
            }
            let Some(next) = self.record() else { return };
            other = next;
        }
        let (mut value, mut other_value) = (one.value, other.value);
        if self.input.byte().is_multiple_of(2) {
            std::mem::swap(&mut value, &mut other_value);
        } else {
            let (offset, width) = self.input.one_of(fields_of(one.key.kind)).unwrap_or((0, 8));
            let both = (
                value.get_mut(offset..offset + width),
                other_value.get_mut(offset..offset + width),
            );
            if let (Some(field), Some(other_field)) = both {
                field.swap_with_slice(other_field);
            }
        }
        for (leaf, key, value) in [(one.leaf, one.key, value), (other.leaf, other.key, other_value)]
        {
            if let Some(node) = self.node_at(leaf) {
                self.set_node(node, |node| put(node, key, &value));
            }
        }
    }

    /// An item of any tree also stands in a leaf of any other.
    fn record_elsewhere(&mut self) {
        let from_records = self.input.byte().is_multiple_of(2);
        let item = if from_records {
            self.record().map(|record| (record.key, record.value))
        } else {
            let block = self.input.one_of(&self.base.nodes);
            let node = block.and_then(|block| self.node_at(block));
            node.filter(|node| node.level() == 0 && node.count() > 0).map(|node| {
                let index = self.input.below(node.count());
                (node.key(index), node.value(index).to_vec())
            })
        };
        let targets = if from_records { &self.base.nodes } else { &self.base.records };
        let (Some((key, value)), Some(target)) = (item, self.input.one_of(targets)) else {
            return;
        };
        if let Some(node) = self.node_at(target).filter(|node| node.level() == 0) {
            self.set_node(node, |node| put(node, key, &value));
        }
    }

    /// An entry of a directory names a subvolume, another one than it did, or something else.
    fn name_of_a_subvolume(&mut self) {
        let Some((leaf, key, value)) = self.entry_of_a_leaf(None) else { return };
        let Ok(entry) = DirectoryEntry::decode(&value) else { return };
        let subvolume = self.input.one_of(&self.base.subvolumes).unwrap_or(256);
        let id = if self.input.byte() >= 192 { self.number(subvolume) } else { subvolume };
        let entry = DirectoryEntry { target: EntryTarget::Subvolume(TreeId(id)), ..entry };
        let mut value = entry.encode();
        // The same number as an inode.
        if self.input.byte().is_multiple_of(4) {
            value[8] = 4;
        }
        if let Some(node) = self.node_at(leaf) {
            self.set_node(node, |node| put(node, key, &value));
        }
    }

    /// A node says that it is of another tree, or of another generation.
    fn node_of_another_tree(&mut self) {
        let Some(block) = self.input.one_of(&self.base.nodes) else { return };
        let mut page = self.read(block.0, NODE_BLOCKS);
        let tree = self.input.one_of(&self.base.subvolumes).unwrap_or(256);
        match self.input.byte() % 3 {
            0 => page[48..56].copy_from_slice(&tree.to_le_bytes()),
            1 => self.set_field(&mut page, (48, 8)),
            _ => self.set_field(&mut page, (40, 8)),
        }
        Self::seal(&mut page);
        self.write(block.0, &page);
    }

    /// A pointer of a node to a child leads to another node, with or without its generation.
    fn child_of_another_node(&mut self) {
        let above: Vec<BlockNumber> = self
            .base
            .nodes
            .iter()
            .copied()
            .filter(|block| self.node_at(*block).is_some_and(|node| node.level() > 0))
            .collect();
        let (Some(parent), Some(child)) =
            (self.input.one_of(&above), self.input.one_of(&self.base.nodes))
        else {
            return;
        };
        let (Some(node), Some(child)) = (self.node_at(parent), self.node_at(child)) else {
            return;
        };
        let index = self.input.below(node.count().max(1));
        if index >= node.count() {
            return;
        }
        let (key, mut value) = (node.key(index), node.value(index).to_vec());
        value[..8].copy_from_slice(&child.address().0.to_le_bytes());
        if self.input.byte() >= 64 {
            value[8..16].copy_from_slice(&child.generation().0.to_le_bytes());
        }
        self.set_node(node, |node| put(node, key, &value));
    }

    /// What the superblocks say of subvolumes, the same in all of them.
    fn superblock_of_subvolumes(&mut self) {
        let field = self.input.one_of(&SUPERBLOCK_FIELDS).unwrap_or((272, 8));
        let mut bytes = self.base.superblock_bytes(&self.device);
        let mut new = bytes[0].1.clone();
        self.change_field(&mut new, field);
        let (start, end) = (field.0, field.0 + field.1);
        for (block, bytes) in &mut bytes {
            bytes[start..end].copy_from_slice(&new[start..end]);
            Self::seal(bytes);
            self.write(*block, bytes);
        }
    }
}

fn remove(node: &mut Node, key: &Key) {
    if let Ok(index) = node.search(key) {
        node.remove(index);
    }
}
