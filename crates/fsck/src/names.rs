//! The facts of each inode and directory entry that pass `Items` keeps for pass `Namespace`:
//! compact, since a volume has millions of them.
pub(crate) use cairn_format::shown_bytes as shown;
use cairn_format::{FileType, OrphanKind};

/// An inode, in 48 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct InodeFacts {
    pub(crate) inode: u64,
    pub(crate) parent: u64,
    /// Directory: subdirectories that its entries name.
    pub(crate) subdirectories: u64,
    /// Directory: entries found.
    pub(crate) entries: u64,
    pub(crate) links: u32,
    pub(crate) file_type: FileType,
    pub(crate) orphan: Option<OrphanKind>,
}

/// A directory entry without its name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct NameFacts {
    /// The named inode.
    pub(crate) child: u64,
    /// The directory that holds the entry.
    pub(crate) directory: u64,
    /// Number of the file type in the entry.
    pub(crate) file_type: u8,
}

/// The facts of `inode`; `inodes` ascend.
pub(crate) fn find_inode(inodes: &[InodeFacts], inode: u64) -> Option<&InodeFacts> {
    inodes.binary_search_by_key(&inode, |facts| facts.inode).ok().map(|index| &inodes[index])
}

/// The entries that name `inode`; `names` are sorted.
pub(crate) fn names_of(names: &[NameFacts], inode: u64) -> &[NameFacts] {
    let first = names.partition_point(|name| name.child < inode);
    let count = names[first..].partition_point(|name| name.child == inode);
    &names[first..first + count]
}
