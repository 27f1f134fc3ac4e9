//! What differs between two trees of files, by inode and by entry.
use crate::store::Store;
use crate::types::Changes;
use crate::{InodeId, Result};
use cairn_btree::{ItemDifference, Tree};
use cairn_format::{
    BlockNumber, DirectoryEntry, EntryTarget, Extent, ExtentKind, FileBlock, FileType, Generation,
    InodeItem, InodeNumber, ItemKind, Key,
};
use std::collections::HashSet;

/// An entry of a directory.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(in crate::names) struct Entry {
    pub(in crate::names) directory: InodeNumber,
    pub(in crate::names) name: Vec<u8>,
    pub(in crate::names) inode: InodeNumber,
    pub(in crate::names) file_type: FileType,
}

/// An inode of both trees that is not the same in both.
pub(in crate::names) struct ChangedInode {
    pub(in crate::names) number: InodeNumber,
    pub(in crate::names) changes: Changes,
    /// In the new tree.
    pub(in crate::names) item: InodeItem,
}

/// One of the two trees.
#[derive(Clone, Copy)]
pub(in crate::names) struct Side<'a> {
    pub(in crate::names) store: &'a Store,
    pub(in crate::names) tree: &'a Tree,
    /// The root directory.
    pub(in crate::names) root: InodeId,
}

impl Side<'_> {
    /// Fails once the subvolume has ended: who reads all of it looks from time to time.
    pub(in crate::names) fn expect_alive(&self) -> Result<()> {
        self.store.trees.subvolume(self.root)?.check_alive()
    }

    /// What was decoded from an item of this tree.
    pub(in crate::names) fn of_item<T>(
        &self,
        key: &Key,
        decoded: std::result::Result<T, cairn_format::FormatError>,
    ) -> Result<T> {
        self.store.of_item(self.root, key, decoded)
    }

    /// The attributes of an inode, if it exists.
    pub(in crate::names) fn inode_item(&self, number: InodeNumber) -> Result<Option<InodeItem>> {
        let key = Key::new(number, ItemKind::Inode, 0);
        let Some(value) = self.tree.get(&key)? else { return Ok(None) };
        self.of_item(&key, InodeItem::decode(&value)).map(Some)
    }
}

/// A run of blocks of a file that were written at once, or allocated.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Run {
    at: u64,
    blocks: u64,
    start: BlockNumber,
    generation: Generation,
    written: Generation,
    kind: ExtentKind,
}

/// The data of a file, as far as it differs.
#[derive(Default)]
struct Runs(Vec<Run>);

impl Runs {
    /// Adds an extent behind the others. Where one extent became two, nothing was written.
    fn push(&mut self, at: u64, extent: &Extent) {
        let Extent { start, blocks, kind, generation, written, .. } = *extent;
        let run = Run { at, blocks, start, generation, written, kind };
        if let Some(last) = self.0.last_mut()
            && Some(at) == last.at.checked_add(last.blocks)
            && start.0 == last.start.0 + last.blocks
            && (generation, written, kind) == (last.generation, last.written, last.kind)
        {
            last.blocks += blocks;
        } else {
            self.0.push(run);
        }
    }

    /// Those below the end of a file of this size: what a truncation left behind is no data.
    fn up_to(&self, size: u64) -> impl Iterator<Item = Run> {
        let end = FileBlock::round_up(size).0;
        let runs = self.0.iter().take_while(move |run| run.at < end);
        runs.map(move |run| Run { blocks: run.blocks.min(end - run.at), ..*run })
    }
}

/// What differs of one inode, while its items come.
#[derive(Default)]
struct Current {
    number: InodeNumber,
    /// If they differ.
    items: Option<(Option<InodeItem>, Option<InodeItem>)>,
    old_runs: Runs,
    new_runs: Runs,
    has_extents: bool,
    has_xattrs: bool,
    has_entries: bool,
}

/// All that differs.
#[derive(Default)]
pub(super) struct Gathered {
    pub(super) removed: Vec<Entry>,
    pub(super) added: Vec<Entry>,
    pub(super) changed: Vec<ChangedInode>,
}

impl Gathered {
    /// Reads what differs between both trees.
    pub(super) fn new(old: Side<'_>, new: Side<'_>) -> Result<Self> {
        let mut gathered = Self::default();
        let mut current = Current::default();
        for found in old.tree.differences(new.tree) {
            let found = found?;
            old.expect_alive()?;
            new.expect_alive()?;
            if found.key.inode != current.number.0 {
                let number = InodeNumber(found.key.inode);
                let before =
                    std::mem::replace(&mut current, Current { number, ..Current::default() });
                gathered.finish(before, old, new)?;
            }
            gathered.add(&mut current, found, old, new)?;
        }
        gathered.finish(current, old, new)?;
        gathered.leave_out_moved_slots();
        Ok(gathered)
    }

    fn add(
        &mut self,
        current: &mut Current,
        found: ItemDifference,
        old: Side<'_>,
        new: Side<'_>,
    ) -> Result<()> {
        let ItemDifference { key, left, right } = found;
        match ItemKind::from_u8(key.kind) {
            Some(ItemKind::Inode) => {
                let decode = |side: Side<'_>, value: Option<Vec<u8>>| {
                    value.map(|value| side.of_item(&key, InodeItem::decode(&value))).transpose()
                };
                current.items = Some((decode(old, left)?, decode(new, right)?));
            }
            Some(ItemKind::DirectoryEntry) => {
                current.has_entries = true;
                for (side, value, entries) in
                    [(old, left, &mut self.removed), (new, right, &mut self.added)]
                {
                    let Some(value) = value else { continue };
                    let entry = side.of_item(&key, DirectoryEntry::decode(&value))?;
                    // Other subvolumes are left out, as they are in a snapshot.
                    if let EntryTarget::Inode(inode, file_type) = entry.target {
                        let directory = InodeNumber(key.inode);
                        entries.push(Entry { directory, name: entry.name, inode, file_type });
                    }
                }
            }
            Some(ItemKind::Xattr | ItemKind::XattrPart) => current.has_xattrs = true,
            // Of an inode that only one tree has, its names say all.
            Some(ItemKind::Extent) if !current.is_of_one_tree() => {
                current.has_extents = true;
                for (side, value, runs) in
                    [(old, left, &mut current.old_runs), (new, right, &mut current.new_runs)]
                {
                    if let Some(value) = value {
                        runs.push(key.offset, &side.of_item(&key, Extent::decode(&value))?);
                    }
                }
            }
            // The target of a symbolic link never changes; orphans have no names.
            _ => {}
        }
        Ok(())
    }

    /// Notes what has changed of an inode of which all items came.
    fn finish(&mut self, current: Current, old: Side<'_>, new: Side<'_>) -> Result<()> {
        let (before, after) = match current.items {
            Some((Some(before), Some(after))) => (before, after),
            Some(_) => return Ok(()),
            None if current.has_extents || current.has_xattrs => {
                let number = current.number;
                let (before, after) = (old.inode_item(number)?, new.inode_item(number)?);
                let Some(items) = before.zip(after) else { return Ok(()) };
                items
            }
            None => return Ok(()),
        };
        let changes = current.changes(&before, &after);
        if changes.any() {
            let number = current.number;
            self.changed.push(ChangedInode { number, changes, item: after });
        }
        Ok(())
    }

    /// A name that was made again may stand in another slot than before.
    fn leave_out_moved_slots(&mut self) {
        let removed: HashSet<&Entry> = self.removed.iter().collect();
        let both: HashSet<Entry> =
            self.added.iter().filter(|entry| removed.contains(entry)).cloned().collect();
        if !both.is_empty() {
            self.removed.retain(|entry| !both.contains(entry));
            self.added.retain(|entry| !both.contains(entry));
        }
    }
}

impl Current {
    fn is_of_one_tree(&self) -> bool {
        matches!(self.items, Some((Some(_), None) | (None, Some(_))))
    }

    fn changes(&self, before: &InodeItem, after: &InodeItem) -> Changes {
        let is_file = FileType::from_mode(after.mode) == Some(FileType::Regular);
        let data = is_file
            && (before.size != after.size
                || !self.old_runs.up_to(before.size).eq(self.new_runs.up_to(after.size)));
        Changes {
            replaced: false,
            data,
            mode: before.mode != after.mode,
            owner: (before.uid, before.gid) != (after.uid, after.gid),
            xattrs: self.has_xattrs,
            times: before.modified != after.modified && !data && !self.has_entries,
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn extent(start: u64, blocks: u64, generation: u64) -> Extent {
        Extent {
            start: BlockNumber(start),
            blocks,
            kind: ExtentKind::Unwritten,
            generation: Generation(generation),
            written: Generation(generation),
            checksums: Vec::new(),
        }
    }

    fn runs(extents: &[(u64, Extent)], size_blocks: u64) -> Vec<Run> {
        let mut runs = Runs::default();
        extents.iter().for_each(|(at, extent)| runs.push(*at, extent));
        runs.up_to(size_blocks * 4096).collect()
    }

    #[test]
    fn how_extents_are_cut_does_not_matter() {
        let whole = [(3, extent(100, 10, 7))];
        let cut = [(3, extent(100, 4, 7)), (7, extent(104, 6, 7))];
        assert!(runs(&whole, 50) == runs(&cut, 50));
        // What lies behind the end does not either.
        assert!(runs(&whole, 7) == runs(&cut[..1], 7));
        assert!(runs(&whole, 8) != runs(&cut[..1], 8));
        assert!(runs(&whole, 3).is_empty());
        for other in [(7, extent(105, 6, 7)), (8, extent(104, 6, 7)), (7, extent(104, 6, 8))] {
            assert!(runs(&whole, 50) != runs(&[cut[0].clone(), other], 50));
        }
        let mut written = extent(104, 6, 7);
        written.written = Generation(9);
        assert!(runs(&whole, 50) != runs(&[cut[0].clone(), (7, written)], 50));
    }
}
