//! The files of one subvolume: what the passes find out about its tree, each for the next.
//!
//! Inode numbers mean something only within a tree, so everything that is known by inode number
//! is here. [`Checker`](crate::checker::Checker) has one of these for each tree of files.
use crate::forks::Lineage;
use crate::names::{InodeFacts, NameFacts};
use crate::object::ObjectId;
use crate::overlay::TreeChanges;
use cairn_format::{BlockNumber, BlockRange, Generation, InodeNumber, Key, TreeId};
use std::collections::HashMap;

/// An entry that names a subvolume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct SubvolumeName {
    pub(crate) subvolume: TreeId,
    /// The directory that holds the entry.
    pub(crate) directory: u64,
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
    /// From pass `Trees`: leaves that it shares with its origin are not among those below.
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
    /// From pass `Items`: directory entries that name subvolumes.
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
            is_partial: false,
            leaves: Vec::new(),
            leaf_bounds: Vec::new(),
            earlier_extents: HashMap::new(),
            inodes: Vec::new(),
            names: Vec::new(),
            subvolume_names: Vec::new(),
        }
    }

    /// The object with this inode number.
    pub(crate) fn object(&self, inode: u64) -> ObjectId {
        ObjectId { subvolume: self.id, inode: InodeNumber(inode) }
    }
}
