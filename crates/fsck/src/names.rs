//! The facts of each inode and directory entry that pass `Items` keeps for pass `Namespace`:
//! compact, since a volume has millions of them.
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

/// Bytes of a name or path as text for a terminal. Control characters, bytes that are no UTF-8, and
/// backslashes are escaped as a shell reads them in `$'…'`, so different bytes are different texts.
pub(crate) fn shown(bytes: &[u8]) -> String {
    let mut text = String::new();
    let escaped =
        |bytes: &[u8]| bytes.iter().map(|byte| format!(r"\x{byte:02x}")).collect::<String>();
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\\' => text.push_str(r"\\"),
                _ if character.is_control() => {
                    text += &escaped(character.encode_utf8(&mut [0; 4]).as_bytes());
                }
                _ => text.push(character),
            }
        }
        text += &escaped(chunk.invalid());
    }
    text
}
