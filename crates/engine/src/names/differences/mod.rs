//! What differs between a subvolume at two times, or between it and a fork, as paths.
//!
//! 1. Both trees are read as far as they differ ([`gathered`]): entries that only one has, and
//!    inodes that have changed.
//! 2. Of an inode with an entry that is gone and one that is new, these two are a move. What is in
//!    a directory that was moved keeps its entry, so it is not named.
//! 3. An inode that has changed is named with each of its names ([`paths`]).
//!
//! Lock discipline: none is held. Both are noted as being read (`long_reads.rs`): if one is deleted
//! meanwhile, its nodes stay until this has ended, which it does soon.
pub(super) mod gathered;
pub(super) mod paths;

use super::Names;
use crate::types::{Changes, Difference, DifferenceKind};
use crate::{Error, InodeId, Result};
use cairn_format::{FileType, INODE_ROOT, InodeNumber};
use gathered::{ChangedInode, Entry, Gathered, Side};
use paths::{Paths, Wanted};
use std::collections::{BTreeMap, HashMap};

/// The path of the root directory.
const ROOT: &[u8] = b".";

impl Names {
    /// What differs between two states of one subvolume or of forks of it, by path. Their root
    /// directories are given.
    pub(crate) fn differences(&self, old: InodeId, new: InodeId) -> Result<Vec<Difference>> {
        for root in [old, new] {
            if !root.is_subvolume_root() {
                return Err(Error::InvalidArgument("not the root directory of a subvolume"));
            }
            self.files.enter(root)?;
        }
        if self.store.first_origin(old)? != self.store.first_origin(new)? {
            return Err(Error::CrossDevice);
        }
        if old == new {
            return Ok(Vec::new());
        }
        let unchanging = self.files.unchanging([old, new])?;
        let [old, new] = unchanging.roots();
        self.differences_of_unchanging(old, new)
    }

    /// As [`Names::differences`]; nothing changes either meanwhile.
    fn differences_of_unchanging(&self, old: InodeId, new: InodeId) -> Result<Vec<Difference>> {
        let _reading = self.files.begin_long_read([old, new])?;
        let side = |root| Side { store: &self.store, tree: self.store.trees.of(root), root };
        let (old, new) = (side(old), side(new));
        let gathered = Gathered::new(old, new)?;
        let mut paths = (Paths::new(old, &gathered.removed), Paths::new(new, &gathered.added));
        let entries = PathsByInode::new(&gathered, &mut paths.0, &mut paths.1)?;
        let mut found = Found::default();
        found.add_names(&entries);
        found.add_changes(&gathered.changed, &entries, &mut paths.1)?;
        Ok(found.sorted())
    }
}

/// The path of an entry that only one tree has.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct EntryPath {
    path: Vec<u8>,
    file_type: u8,
}

/// Entries that only one tree has, by what they name.
#[derive(Default)]
struct PathsByInode(BTreeMap<InodeNumber, PathsOfInode>);

#[derive(Default)]
struct PathsOfInode {
    removed: Vec<EntryPath>,
    added: Vec<EntryPath>,
}

/// What became of the paths of an inode.
#[derive(Default, Debug, PartialEq, Eq)]
struct Fates<'p> {
    removed: Vec<&'p EntryPath>,
    added: Vec<&'p EntryPath>,
    moved: Vec<(&'p EntryPath, &'p EntryPath)>,
    /// In another directory than before, which has the path now.
    kept: Vec<&'p EntryPath>,
}

impl PathsByInode {
    fn new(gathered: &Gathered, old: &mut Paths<'_>, new: &mut Paths<'_>) -> Result<Self> {
        let mut all = Self::default();
        let path_of = |paths: &mut Paths<'_>, entry: &Entry| {
            let path = paths.of_entry(entry.directory, &entry.name)?;
            Result::Ok(EntryPath { path, file_type: entry.file_type as u8 })
        };
        for entry in &gathered.removed {
            all.0.entry(entry.inode).or_default().removed.push(path_of(old, entry)?);
        }
        for entry in &gathered.added {
            all.0.entry(entry.inode).or_default().added.push(path_of(new, entry)?);
        }
        for paths in all.0.values_mut() {
            paths.removed.sort_unstable();
            paths.added.sort_unstable();
        }
        Ok(all)
    }
}

impl PathsOfInode {
    /// Of paths that are gone and paths that are new, equal ones belong together, then those of the
    /// same rank.
    fn fates(&self) -> Fates<'_> {
        let mut fates = Fates::default();
        let is_in = |of: &[EntryPath], path| of.binary_search(path).is_ok();
        let (kept, added): (Vec<_>, Vec<_>) =
            self.added.iter().partition(|path| is_in(&self.removed, path));
        let mut added = added.into_iter();
        for removed in self.removed.iter().filter(|path| !is_in(&self.added, path)) {
            match added.next() {
                Some(added) => fates.moved.push((removed, added)),
                None => fates.removed.push(removed),
            }
        }
        Fates { kept, added: added.collect(), ..fates }
    }
}

/// What was found so far.
#[derive(Default)]
struct Found(Vec<Difference>);

impl Found {
    fn push(&mut self, path: &[u8], kind: DifferenceKind) {
        self.0.push(Difference { path: path.to_vec(), kind });
    }

    /// Names that came and went.
    fn add_names(&mut self, entries: &PathsByInode) {
        let fates: Vec<Fates<'_>> = entries.0.values().map(PathsOfInode::fates).collect();
        let removed = fates.iter().flat_map(|fates| &fates.removed);
        let mut removed: HashMap<&[u8], u8> =
            removed.map(|gone| (&gone.path[..], gone.file_type)).collect();
        for fates in &fates {
            for (from, to) in &fates.moved {
                self.push(&to.path, DifferenceKind::Moved { from: from.path.clone() });
            }
            for added in &fates.added {
                if removed.get(&added.path[..]) == Some(&added.file_type) {
                    removed.remove(&added.path[..]);
                    let changes = Changes { replaced: true, ..Changes::default() };
                    self.push(&added.path, DifferenceKind::Changed(changes));
                } else {
                    self.push(&added.path, DifferenceKind::Added);
                }
            }
        }
        removed.into_keys().for_each(|path| self.push(path, DifferenceKind::Removed));
    }

    /// Inodes that both trees have, with their paths in the new one.
    fn add_changes(
        &mut self,
        changed: &[ChangedInode],
        entries: &PathsByInode,
        paths: &mut Paths<'_>,
    ) -> Result<()> {
        let mut wanted = BTreeMap::new();
        let mut by_number = HashMap::new();
        for ChangedInode { number, changes, item } in changed {
            let fates = entries.0.get(number).map(PathsOfInode::fates).unwrap_or_default();
            // What is open and has no name has no path.
            if item.links == 0 {
                continue;
            }
            if FileType::from_mode(item.mode) == Some(FileType::Directory) {
                let path = match *number {
                    INODE_ROOT => ROOT,
                    number => paths.of_directory(number)?.strip_suffix(b"/").unwrap_or_default(),
                };
                // It may have been open without a name before.
                if fates.added.is_empty() {
                    self.push(path, DifferenceKind::Changed(*changes));
                }
                continue;
            }
            for entry in fates.moved.iter().map(|(_, to)| to).chain(&fates.kept) {
                self.push(&entry.path, DifferenceKind::Changed(*changes));
            }
            let new_names = fates.added.len() + fates.moved.len() + fates.kept.len();
            if item.links as usize > new_names {
                wanted.insert(*number, Wanted::new(item.links, item));
                by_number.insert(*number, *changes);
            }
        }
        for (number, directory, name) in paths.names_of(wanted)? {
            let path = paths.of_entry(directory, &name)?;
            // The search meets new names, too.
            let is_new = entries.0.get(&number).is_some_and(|entries| {
                entries.added.binary_search_by(|entry| entry.path.cmp(&path)).is_ok()
            });
            if let Some(changes) = by_number.get(&number)
                && !is_new
            {
                self.push(&path, DifferenceKind::Changed(*changes));
            }
        }
        Ok(())
    }

    /// By path; of one path, what is gone comes first.
    fn sorted(self) -> Vec<Difference> {
        let mut found = self.0;
        let rank = |kind: &DifferenceKind| match kind {
            DifferenceKind::Removed => 0,
            DifferenceKind::Added => 1,
            DifferenceKind::Moved { .. } => 2,
            DifferenceKind::Changed(_) => 3,
        };
        found.sort_unstable_by(|one, other| {
            one.path.cmp(&other.path).then_with(|| rank(&one.kind).cmp(&rank(&other.kind)))
        });
        found
    }
}
