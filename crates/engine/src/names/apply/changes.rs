//! What one side has changed since the fork was made: inodes and entries, with all that is needed
//! to do the same elsewhere.
use crate::Result;
use crate::file::extents::gaps;
use crate::names::differences::gathered::Side;
use cairn_format::{
    DirectoryEntry, EntryTarget, Extent, ExtentKind, FileBlock, FileType, Generation, INODE_ROOT,
    InodeItem, InodeNumber, ItemKind, Key, XattrItem,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// What an entry names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Target {
    pub(super) inode: InodeNumber,
    pub(super) file_type: FileType,
}

/// An entry's directory and name.
pub(super) type EntryKey = (InodeNumber, Vec<u8>);

/// What became of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct EntryChange {
    pub(super) before: Option<Target>,
    pub(super) after: Option<Target>,
}

/// What became of an inode. One that has no name any more counts as gone.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct InodeChange {
    pub(super) before: Option<InodeItem>,
    pub(super) after: Option<InodeItem>,
    /// Values of items that differ, but for attributes, entries and extents.
    pub(super) items: BTreeMap<Key, Option<Vec<u8>>>,
    /// Extents that only one of the trees has.
    pub(super) old_extents: Vec<(FileBlock, Extent)>,
    pub(super) new_extents: Vec<(FileBlock, Extent)>,
}

impl InodeChange {
    /// Whether it is, or was, a directory.
    pub(super) fn is_directory(&self) -> bool {
        let item = self.after.as_ref().or(self.before.as_ref());
        item.is_some_and(is_directory)
    }

    /// Whether it is new.
    pub(super) fn is_new(&self) -> bool {
        self.before.is_none() && self.after.is_some()
    }

    /// Whether it is gone.
    pub(super) fn is_gone(&self) -> bool {
        self.after.is_none()
    }

    /// Whether what it is has changed, not only its names. Of a directory, what is in it is no part
    /// of that, nor are times.
    pub(super) fn has_new_content(&self) -> bool {
        let (Some(before), Some(after)) = (&self.before, &self.after) else { return true };
        !self.items.is_empty()
            || !self.old_extents.is_empty()
            || !self.new_extents.is_empty()
            || essence(before) != essence(after)
    }
}

pub(super) fn is_directory(item: &InodeItem) -> bool {
    FileType::from_mode(item.mode) == Some(FileType::Directory)
}

/// The attributes in which an inode counts as changed.
pub(super) fn essence(item: &InodeItem) -> InodeItem {
    let of_files = InodeItem {
        links: 0,
        blocks: 0,
        parent: 0,
        accessed: Default::default(),
        changed: Default::default(),
        ..*item
    };
    if !is_directory(item) {
        return of_files;
    }
    InodeItem { size: 0, entries: 0, modified: Default::default(), ..of_files }
}

/// Whether an item is the attribute `own` of the root directory.
pub(super) fn is_own_attribute(key: &Key, value: &[u8], own: Option<&[u8]>) -> bool {
    let is_of_root = key.inode == INODE_ROOT.0 && key.kind == ItemKind::Xattr as u8;
    own.is_some_and(|own| {
        is_of_root && XattrItem::decode(value).is_ok_and(|xattr| xattr.name == own)
    })
}

/// All that one side has changed.
#[derive(Default)]
pub(super) struct SideChanges {
    pub(super) inodes: BTreeMap<InodeNumber, InodeChange>,
    pub(super) entries: BTreeMap<EntryKey, EntryChange>,
}

impl SideChanges {
    /// From `old` to `new`, but for the attribute `own` of the root directory. Neither changes
    /// meanwhile.
    pub(super) fn between(old: Side<'_>, new: Side<'_>, own: Option<&[u8]>) -> Result<Self> {
        let mut changes = Self::default();
        for found in old.tree.differences(new.tree) {
            let found = found?;
            old.expect_alive()?;
            new.expect_alive()?;
            let value = found.left.as_ref().or(found.right.as_ref());
            if value.is_some_and(|value| is_own_attribute(&found.key, value, own)) {
                continue;
            }
            let (key, values) = (found.key, [(old, found.left), (new, found.right)]);
            changes.add(key, values)?;
        }
        changes.entries.retain(|_, change| change.before != change.after);
        for (number, change) in &mut changes.inodes {
            for (side, item) in [(old, &mut change.before), (new, &mut change.after)] {
                if item.is_none() {
                    *item = side.inode_item(*number)?;
                }
                *item = item.filter(|item| item.links > 0);
            }
        }
        // What never had a name is nobody's.
        changes.inodes.retain(|_, change| change.before.is_some() || change.after.is_some());
        Ok(changes)
    }

    fn add(&mut self, key: Key, values: [(Side<'_>, Option<Vec<u8>>); 2]) -> Result<()> {
        let number = InodeNumber(key.inode);
        let [before, after] = values;
        let (is_old, sides) = ([true, false], [before, after]);
        match ItemKind::from_u8(key.kind) {
            Some(ItemKind::Inode) => {
                let change = self.inodes.entry(number).or_default();
                for (is_old, (side, value)) in is_old.into_iter().zip(sides) {
                    let Some(value) = value else { continue };
                    let item = Some(side.of_item(&key, InodeItem::decode(&value))?);
                    if is_old { change.before = item } else { change.after = item }
                }
            }
            Some(ItemKind::DirectoryEntry) => {
                for (is_old, (side, value)) in is_old.into_iter().zip(sides) {
                    let Some(value) = value else { continue };
                    let entry = side.of_item(&key, DirectoryEntry::decode(&value))?;
                    // Other subvolumes are left out.
                    let EntryTarget::Inode(inode, file_type) = entry.target else { continue };
                    let change = self.entries.entry((number, entry.name)).or_default();
                    let target = Some(Target { inode, file_type });
                    if is_old { change.before = target } else { change.after = target }
                }
            }
            Some(ItemKind::Extent) => {
                let change = self.inodes.entry(number).or_default();
                for (is_old, (side, value)) in is_old.into_iter().zip(sides) {
                    let Some(value) = value else { continue };
                    let extent = side.of_item(&key, Extent::decode(&value))?;
                    let extents =
                        if is_old { &mut change.old_extents } else { &mut change.new_extents };
                    extents.push((key.file_block(), extent));
                }
            }
            Some(ItemKind::Xattr | ItemKind::XattrPart | ItemKind::Symlink) => {
                let [_, (_, new)] = sides;
                self.inodes.entry(number).or_default().items.insert(key, new);
            }
            // Removals that are under way are each side's own.
            _ => {}
        }
        Ok(())
    }
}

/// What a file needs to get the data that a fork's has: blocks to drop, and extents to copy into
/// them.
#[derive(Default)]
pub(super) struct DataChange {
    pub(super) dropped: Vec<Range<FileBlock>>,
    pub(super) copied: Vec<(FileBlock, Extent)>,
}

impl DataChange {
    /// Of a file that has what the fork began with; `origin` is when that was.
    pub(super) fn of(change: &InodeChange, origin: Generation) -> Self {
        let is_inherited = |extent: &Extent| extent.generation <= origin && change.before.is_some();
        let (inherited, copied): (Vec<_>, Vec<_>) =
            change.new_extents.iter().cloned().partition(|(_, extent)| is_inherited(extent));
        let mut dropped = Vec::new();
        for (start, old) in &change.old_extents {
            let blocks = *start..*start + old.blocks;
            let from = inherited.partition_point(|(at, one)| *at + one.blocks <= blocks.start);
            let to = inherited.partition_point(|(at, _)| *at < blocks.end);
            dropped.extend(gaps(blocks, &inherited[from..to.max(from)]));
        }
        Self { dropped, copied }
    }

    /// The file ends at `end`, and the origin has these extents behind it. If data is among them,
    /// all of them go: the fork has it, too, if it was looked at while it shortened the file.
    /// Returns how many of them.
    pub(super) fn end_at(&mut self, end: FileBlock, behind: &[(FileBlock, Extent)]) -> usize {
        self.copied.retain_mut(|(start, extent)| {
            let is_in = *start < end;
            if is_in && *start + extent.blocks > end {
                *extent = extent.slice(0, end - *start);
            }
            is_in
        });
        if behind.iter().all(|(_, extent)| extent.kind != ExtentKind::Data) {
            return 0;
        }
        self.dropped.push(end..FileBlock::END);
        behind.len()
    }
}
