//! The identity of a file.
use cairn_format::{EntryTarget, INODE_ROOT, InodeNumber, TREE_FILES, TreeId};
use std::fmt;

/// Something that has an inode: each subvolume has inode numbers of its own, so a number alone
/// identifies nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ObjectId {
    /// The subvolume, which is named by its tree.
    pub subvolume: TreeId,
    /// The number there.
    pub inode: InodeNumber,
}

impl ObjectId {
    /// The top of all names.
    pub const ROOT: Self = Self::root_of(TREE_FILES);

    /// The root directory of a subvolume.
    pub const fn root_of(subvolume: TreeId) -> Self {
        Self { subvolume, inode: INODE_ROOT }
    }

    /// The object of the same subvolume with this number.
    #[must_use]
    pub fn sibling(self, inode: InodeNumber) -> Self {
        Self { inode, ..self }
    }

    /// What an entry in a directory of `subvolume` names.
    pub fn named(subvolume: TreeId, target: EntryTarget) -> Self {
        match target {
            EntryTarget::Inode(inode, _) => Self { subvolume, inode },
            EntryTarget::Subvolume(named) => Self::root_of(named),
        }
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "inode {}", self.inode)?;
        if self.subvolume != TREE_FILES {
            write!(f, " of subvolume {}", self.subvolume)?;
        }
        Ok(())
    }
}
