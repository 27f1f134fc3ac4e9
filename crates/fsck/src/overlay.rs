//! The changes of the log's replayable checkpoints: the newest value or removal of each item, on
//! top of the trees.
use cairn_format::{Generation, ItemKind, Key, Superblock};
use std::collections::{BTreeMap, HashSet};

/// The newest state of one item in the log.
pub(crate) struct ItemChange {
    /// The checkpoint that holds it.
    pub(crate) sequence: u64,
    /// Its value; `None` if it is removed.
    pub(crate) value: Option<Vec<u8>>,
}

/// All changes of one tree.
#[derive(Default)]
pub(crate) struct TreeChanges {
    pub(crate) items: BTreeMap<Key, ItemChange>,
    /// Inodes whose extents change.
    pub(crate) extent_inodes: HashSet<u64>,
}

impl TreeChanges {
    /// Records the change of an item by checkpoint `sequence`, which is newer than all before it.
    pub(crate) fn insert(&mut self, key: Key, sequence: u64, value: Option<&[u8]>) {
        if key.kind == ItemKind::Extent as u8 {
            self.extent_inodes.insert(key.inode);
        }
        self.items.insert(key, ItemChange { sequence, value: value.map(<[u8]>::to_vec) });
    }
}

/// The counters of superblock and log together.
pub(crate) struct Counters {
    /// Newest generation of superblock and checkpoints.
    pub(crate) generation_max: Generation,
    /// The next inode number after replay.
    pub(crate) next_inode: u64,
}

impl Counters {
    /// Those of the superblock alone.
    pub(crate) fn new(superblock: &Superblock) -> Self {
        Self { generation_max: superblock.generation, next_inode: superblock.next_inode }
    }
}
