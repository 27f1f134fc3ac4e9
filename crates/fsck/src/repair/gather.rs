//! Sorts the items by inode. Items that can't be decoded, or have an impossible key, are left out:
//! no reader could use them.
use cairn_format::{
    DirectoryEntry, Extent, FileType, Generation, INODE_NUMBER_END, INODE_ORPHANS, INODE_ROOT,
    InodeItem, ItemKind, Key, OrphanKind, SYMLINK_PART_BYTES, Timestamp, TreeId,
    XATTR_INLINE_BYTES_MAX, XattrItem, decode_orphan,
};
use std::collections::BTreeMap;

/// An extended attribute and its parts.
pub(super) struct Attribute {
    pub(super) item: XattrItem,
    pub(super) parts: BTreeMap<u64, Vec<u8>>,
}

impl Attribute {
    /// Whether all parts are present, in their full length.
    pub(super) fn is_complete(&self) -> bool {
        let value_bytes = self.item.value_bytes as usize;
        let count = XattrItem::parts(value_bytes);
        let right = |(&part, bytes): (&u64, &Vec<u8>)| {
            let before = part as usize * XATTR_INLINE_BYTES_MAX;
            part >= 1
                && part as usize <= count
                && bytes.len() == value_bytes.saturating_sub(before).min(XATTR_INLINE_BYTES_MAX)
        };
        self.parts.len() == count && self.parts.iter().all(right)
    }
}

/// Everything about one inode.
#[derive(Default)]
pub(super) struct GatheredInode {
    pub(super) item: Option<InodeItem>,
    /// By slot.
    pub(super) entries: BTreeMap<u64, DirectoryEntry>,
    pub(super) xattrs: BTreeMap<u64, Attribute>,
    pub(super) target: BTreeMap<u64, Vec<u8>>,
    /// By file block.
    pub(super) extents: BTreeMap<u64, Extent>,
}

impl GatheredInode {
    /// Its type. For an inode without an item: the type that it must have had.
    pub(super) fn file_type(&self) -> Option<FileType> {
        match &self.item {
            Some(item) => FileType::from_mode(item.mode),
            None if !self.entries.is_empty() => Some(FileType::Directory),
            None if !self.extents.is_empty() => Some(FileType::Regular),
            None if !self.target.is_empty() => Some(FileType::Symlink),
            None => None,
        }
    }

    /// Whether enough of it is left to keep it.
    pub(super) fn can_be_kept(&self) -> bool {
        match self.file_type() {
            Some(FileType::Symlink) => self.whole_target().is_some(),
            file_type => file_type.is_some(),
        }
    }

    /// The target of a symbolic link, if its parts fit together.
    pub(super) fn whole_target(&self) -> Option<Vec<u8>> {
        let first = self.target.get(&0)?;
        let whole = match self.target.get(&1) {
            Some(second) if first.len() == SYMLINK_PART_BYTES => [&first[..], second].concat(),
            _ => first.clone(),
        };
        (!whole.is_empty() && !whole.contains(&0)).then_some(whole)
    }
}

/// The attributes of an inode whose item is lost: only the owner of the volume has access.
pub(super) fn invented_item(
    file_type: FileType,
    permissions: u32,
    generation: Generation,
) -> InodeItem {
    let epoch = Timestamp { seconds: 0, nanoseconds: 0 };
    InodeItem {
        mode: file_type.mode_bits() | permissions,
        uid: 0,
        gid: 0,
        links: 1,
        size: 0,
        blocks: 0,
        device: 0,
        parent: 0,
        entries: 0,
        flags: 0,
        generation,
        accessed: epoch,
        modified: epoch,
        changed: epoch,
        created: epoch,
    }
}

/// The items of all trees of files.
pub(super) type GatheredTrees = BTreeMap<TreeId, GatheredItems>;

/// All inodes of one tree, and its orphan items.
#[derive(Default)]
pub(super) struct GatheredItems {
    pub(super) inodes: BTreeMap<u64, GatheredInode>,
    pub(super) orphans: BTreeMap<u64, OrphanKind>,
}

impl GatheredItems {
    /// Adds an item, unless no reader could use it.
    pub(super) fn add(&mut self, key: Key, value: &[u8], inode_first: u64) {
        let Some(kind) = ItemKind::from_u8(key.kind) else { return };
        if kind == ItemKind::Orphan && key.inode == INODE_ORPHANS.0 {
            if let Ok(orphan) = decode_orphan(value) {
                self.orphans.insert(key.offset, orphan);
            }
            return;
        }
        let possible =
            key.inode == INODE_ROOT.0 || (inode_first..INODE_NUMBER_END).contains(&key.inode);
        if !possible {
            return;
        }
        let inode = self.inodes.entry(key.inode).or_default();
        match kind {
            ItemKind::Inode if key.offset == 0 => inode.item = InodeItem::decode(value).ok(),
            ItemKind::DirectoryEntry => inode
                .entries
                .extend(DirectoryEntry::decode(value).ok().map(|entry| (key.offset, entry))),
            ItemKind::Xattr => {
                if let Ok(item) = XattrItem::decode(value) {
                    inode.xattrs.insert(key.offset, Attribute { item, parts: BTreeMap::new() });
                }
            }
            ItemKind::XattrPart => {
                if let Some(attribute) = inode.xattrs.get_mut(&(key.offset / 256)) {
                    attribute.parts.insert(key.offset % 256, value.to_vec());
                }
            }
            ItemKind::Symlink if key.offset < 2 => {
                drop(inode.target.insert(key.offset, value.to_vec()))
            }
            ItemKind::Extent => {
                inode.extents.extend(Extent::decode(value).ok().map(|extent| (key.offset, extent)))
            }
            _ => {}
        }
    }
}
