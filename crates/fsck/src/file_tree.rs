//! The files of one subvolume: what the passes find out about its tree, each for the next.
//!
//! Inode numbers mean something only within a tree, so everything that is known by inode number
//! is here. [`Checker`](crate::checker::Checker) has one of these for each tree of files.
use crate::forks::Lineage;
use crate::names::{InodeFacts, NameFacts};
use crate::object::ObjectId;
use crate::overlay::TreeChanges;
use cairn_format::{
    BlockNumber, BlockRange, Extent, ExtentKind, FileType, Generation, InodeItem, InodeNumber,
    ItemKind, Key, TreeId,
};
use std::collections::HashMap;

/// An entry that names a subvolume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct SubvolumeName {
    pub(crate) subvolume: TreeId,
    /// The directory that holds the entry.
    pub(crate) directory: u64,
}

/// How many of what there are in a tree, or in a part of one.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct FileCounts {
    pub(crate) items: u64,
    pub(crate) inodes: u64,
    pub(crate) files: u64,
    pub(crate) directories: u64,
    pub(crate) orphans: u64,
    pub(crate) extents: u64,
    pub(crate) data_blocks: u64,
    pub(crate) unwritten_blocks: u64,
}

impl FileCounts {
    /// Counts an item.
    pub(crate) fn add_item(&mut self, key: Key, value: &[u8]) {
        self.items += 1;
        match ItemKind::from_u8(key.kind) {
            Some(ItemKind::Inode) => {
                let file_type = InodeItem::decode(value).ok().map(|item| item.file_type());
                let Some(Ok(file_type)) = file_type else { return };
                self.inodes += 1;
                self.files += u64::from(file_type == FileType::Regular);
                self.directories += u64::from(file_type == FileType::Directory);
            }
            Some(ItemKind::Extent) => {
                let Ok(extent) = Extent::decode(value) else { return };
                self.extents += 1;
                match extent.kind {
                    ExtentKind::Data => self.data_blocks += extent.blocks,
                    ExtentKind::Unwritten => self.unwritten_blocks += extent.blocks,
                }
            }
            Some(ItemKind::Orphan) => self.orphans += 1,
            _ => {}
        }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.items += other.items;
        self.inodes += other.inodes;
        self.files += other.files;
        self.directories += other.directories;
        self.orphans += other.orphans;
        self.extents += other.extents;
        self.data_blocks += other.data_blocks;
        self.unwritten_blocks += other.unwritten_blocks;
    }
}

/// See the [module](self).
pub(crate) struct FileTree {
    /// The tree and subvolume.
    pub(crate) id: TreeId,
    /// From pass `Log`: what the replayable checkpoints change in it.
    pub(crate) changes: TreeChanges,
    /// From pass `Trees`: whether the root tree leads to it.
    pub(crate) has_root: bool,
    /// From pass `Trees`: its items are being removed, in the order of their keys.
    pub(crate) is_dying: bool,
    /// From pass `Trees`: the snapshot that it began as, if it is a fork.
    pub(crate) lineage: Lineage,
    /// From pass `Trees`: of a fork in which names and counters agree, what is in it after replay.
    /// Leaves that it shares with its origin are not among those below, except those that the log
    /// changes.
    pub(crate) summed: Option<FileCounts>,
    /// From pass `Trees`: its names and counters are not compared. Leaves that it shares with
    /// others are not among those below.
    pub(crate) is_partial: bool,
    /// From pass `Trees`: valid leaves, in key order.
    pub(crate) leaves: Vec<BlockNumber>,
    /// From pass `Trees`: for each of them, a key that none of its keys is below.
    pub(crate) leaf_bounds: Vec<Key>,
    /// From pass `Trees`: extents, in the superblock's trees, of the inodes whose extents the log
    /// changes.
    pub(crate) earlier_extents: HashMap<u64, Vec<(BlockRange, Generation)>>,
    /// From pass `Items`: inodes, ascending.
    pub(crate) inodes: Vec<InodeFacts>,
    /// From pass `Items`: directory entries that name inodes.
    pub(crate) names: Vec<NameFacts>,
    /// From pass `Items`, or `Trees` if it has sums: directory entries that name subvolumes.
    pub(crate) subvolume_names: Vec<SubvolumeName>,
}

impl FileTree {
    pub(crate) fn new(id: TreeId) -> Self {
        Self {
            id,
            changes: TreeChanges::default(),
            has_root: false,
            is_dying: false,
            lineage: Lineage::default(),
            summed: None,
            is_partial: false,
            leaves: Vec::new(),
            leaf_bounds: Vec::new(),
            earlier_extents: HashMap::new(),
            inodes: Vec::new(),
            names: Vec::new(),
            subvolume_names: Vec::new(),
        }
    }

    /// Whether leaves that it shares with others may be missing below.
    pub(crate) fn lacks_leaves(&self) -> bool {
        self.summed.is_some() || self.is_partial
    }

    /// The object with this inode number.
    pub(crate) fn object(&self, inode: u64) -> ObjectId {
        ObjectId { subvolume: self.id, inode: InodeNumber(inode) }
    }
}
