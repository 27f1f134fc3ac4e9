//! Changes of what says that there are subvolumes: their fields, items, trees, and names.
use super::super::images::read_node;
use super::{Draft, put};
use cairn_format::{
    BlockNumber, Geometry, Key, Node, TREE_FILES, TREE_ROOTS, TREE_SUBVOLUMES, TreeId,
};

/// Fields of a superblock about subvolumes: the features, the next tree, the default subvolume.
const SUBVOLUME_FIELDS: [(usize, usize); 3] = [(256, 4), (272, 8), (280, 8)];
/// Fields of a Subvolume item.
const SUBVOLUME_ITEM_FIELDS: [(usize, usize); 7] =
    [(0, 8), (8, 8), (16, 8), (24, 8), (32, 8), (40, 8), (56, 8)];

impl Draft<'_> {
    /// Changes what says that there are subvolumes, or which.
    pub(super) fn subvolumes(&mut self) {
        match self.input.byte() % 8 {
            0 => {
                let field = self.input.one_of(&SUBVOLUME_FIELDS).unwrap_or((272, 8));
                self.in_all_superblocks(field);
            }
            // Items that are appended to the log from here on are another tree's.
            1 => self.logged = TreeId(TREE_FILES.0 + u64::from(self.input.byte() % 6)),
            2 | 3 => self.item_of(TREE_SUBVOLUMES, |draft, key, value| {
                let field = draft.input.one_of(&SUBVOLUME_ITEM_FIELDS).unwrap_or((0, 8));
                draft.set_field(value, field);
                key
            }),
            4 => self.item_of(TREE_SUBVOLUMES, |draft, key, _| Key {
                inode: draft.number(key.inode),
                ..key
            }),
            5 => self
                .item_of(TREE_ROOTS, |draft, key, _| Key { inode: draft.number(key.inode), ..key }),
            6 => self.item_of(TREE_ROOTS, |draft, key, value| {
                draft.set_field(value, (0, 8));
                key
            }),
            // An entry names a subvolume, or what was one.
            _ => {
                let Some((leaf, key, mut value)) = self.entry_of_a_leaf(None) else { return };
                value[8] = if value[8] == 16 { 4 } else { 16 };
                if self.input.byte().is_multiple_of(2) {
                    self.set_field(&mut value, (0, 8));
                }
                let Some(mut node) = read_node(&self.device, &self.base.superblock, leaf) else {
                    return;
                };
                put(&mut node, key, &value);
                self.write(leaf.0, &node.seal()[..]);
            }
        }
    }

    /// The same field with the same value in all superblocks.
    fn in_all_superblocks(&mut self, field: (usize, usize)) {
        let geometry = self.base.superblock.geometry;
        let start = self.input.at;
        for address in
            [Geometry::SUPERBLOCKS[0], Geometry::SUPERBLOCKS[1], geometry.superblock_copy()]
        {
            self.input.at = start;
            let mut bytes = self.read(address.0, 1);
            self.set_field(&mut bytes, field);
            Self::seal(&mut bytes);
            self.write(address.0, &bytes);
        }
    }

    /// Changes an item of a tree: its value, or its key; now and then it stays under its old key as
    /// well, or goes.
    fn item_of(&mut self, tree: TreeId, change: impl FnOnce(&mut Self, Key, &mut Vec<u8>) -> Key) {
        let superblock = &self.base.superblock;
        let is_leaf = |node: &Node| node.tree() == tree && node.level() == 0 && node.count() > 0;
        let of_tree = |leaf: &BlockNumber| {
            read_node(&self.device, superblock, *leaf).is_some_and(|node| is_leaf(&node))
        };
        let leaves: Vec<BlockNumber> = self.base.nodes.iter().copied().filter(of_tree).collect();
        let Some(leaf) = self.input.one_of(&leaves) else { return };
        let Some(mut node) = read_node(&self.device, superblock, leaf) else { return };
        let index = self.input.below(node.count());
        let (key, mut value) = (node.key(index), node.value(index).to_vec());
        let how = self.input.byte();
        let new = change(self, key, &mut value);
        if !how.is_multiple_of(4) {
            node.remove(index);
        }
        if how % 8 != 1 {
            put(&mut node, new, &value);
        }
        self.write(leaf.0, &node.seal()[..]);
    }
}
