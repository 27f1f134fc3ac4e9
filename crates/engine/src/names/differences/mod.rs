//! What differs between a subvolume at two times, or between it and a fork, as paths.
//!
//! 1. Both trees are read as far as they differ ([`gathered`]): entries that only one has, and
//!    inodes that have changed.
//! 2. Of an inode with an entry that is gone and one that is new, these two are a move. What is in
//!    a directory that was moved keeps its entry, so it is not named.
//! 3. An inode that has changed is named with each of its names ([`paths`]).
//!
//! Where damage hides a path, it is reported, and the rest is compared.
//!
//! Lock discipline: none is held. Both are noted as being read (`long_reads.rs`): if one is deleted
//! meanwhile, its nodes stay until this has ended, which it does soon.
pub(super) mod gathered;
pub(super) mod paths;

use super::Names;
use crate::types::{Changes, Compared, Difference, DifferenceKind};
use crate::{Error, InodeId, Result};
use cairn_format::{FileType, INODE_ROOT, InodeNumber};
use gathered::{ChangedInode, Entry, Gathered, Side};
use paths::{Paths, Wanted};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// The path of the root directory.
const ROOT: &[u8] = b".";

impl Names {
    /// What differs between two states of one subvolume or of forks of it, by path. Their root
    /// directories are given.
    pub(crate) fn compare(&self, old: InodeId, new: InodeId) -> Result<Compared> {
        for root in [old, new] {
            if !root.is_subvolume_root() {
                return Err(Error::InvalidArgument("not the root directory of a subvolume"));
            }
            self.files.enter(root)?;
        }
        if !self.store.are_of_one_family([old, new])? {
            return Err(Error::CrossDevice);
        }
        if old == new {
            return Ok(Compared::default());
        }
        let unchanging = self.files.unchanging([old, new])?;
        let [old, new] = unchanging.roots();
        self.compare_unchanging(old, new)
    }

    /// As [`Names::compare`]; nothing changes either meanwhile.
    fn compare_unchanging(&self, old: InodeId, new: InodeId) -> Result<Compared> {
        let _reading = self.files.begin_long_read([old, new])?;
        let side = |root| Side { store: &self.store, tree: self.store.trees.of(root), root };
        let (old, new) = (side(old), side(new));
        let gathered = Gathered::new(old, new)?;
        let mut paths = (Paths::new(old, &gathered.removed), Paths::new(new, &gathered.added));
        let mut damage = DamageFound::default();
        let entries = PathsByInode::new(&gathered, &mut paths.0, &mut paths.1, &mut damage)?;
        let mut found = Found::default();
        found.add_names(&entries);
        found.add_changes(&gathered.changed, &entries, &mut paths.1, &mut damage)?;
        Ok(Compared { differences: found.sorted(), damage: damage.errors })
    }
}

/// Damage that hides paths.
#[derive(Default)]
struct DamageFound {
    errors: Vec<Error>,
    texts: HashSet<String>,
}

impl DamageFound {
    /// Notes damage, once.
    ///
    /// # Errors
    /// What is none.
    fn note(&mut self, error: Error) -> Result<()> {
        if !matches!(error, Error::Damaged(_) | Error::Device(_)) {
            return Err(error);
        }
        if self.texts.insert(error.to_string()) {
            self.errors.push(error);
        }
        Ok(())
    }

    /// What damage does not hide.
    fn unless_hidden<T>(&mut self, found: Result<T>) -> Result<Option<T>> {
        match found {
            Ok(found) => Ok(Some(found)),
            Err(error) => self.note(error).map(|()| None),
        }
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
    fn new(
        gathered: &Gathered,
        old: &mut Paths<'_>,
        new: &mut Paths<'_>,
        damage: &mut DamageFound,
    ) -> Result<Self> {
        let mut all = Self::default();
        let path_of = |paths: &mut Paths<'_>, entry: &Entry| {
            let path = paths.of_entry(entry.directory, &entry.name)?;
            Result::Ok(EntryPath { path, file_type: entry.file_type as u8 })
        };
        for entry in &gathered.removed {
            let path = damage.unless_hidden(path_of(old, entry))?;
            all.0.entry(entry.inode).or_default().removed.extend(path);
        }
        for entry in &gathered.added {
            let path = damage.unless_hidden(path_of(new, entry))?;
            all.0.entry(entry.inode).or_default().added.extend(path);
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
        damage: &mut DamageFound,
    ) -> Result<()> {
        let mut wanted = BTreeMap::new();
        let (mut by_number, mut nameless) = (HashMap::new(), BTreeSet::new());
        for ChangedInode { number, changes, item } in changed {
            let fates = entries.0.get(number).map(PathsOfInode::fates).unwrap_or_default();
            // What is open and has no name has no path.
            if item.links == 0 {
                continue;
            }
            if FileType::from_mode(item.mode) == Some(FileType::Directory) {
                let path = match *number {
                    INODE_ROOT => ROOT,
                    number => match damage.unless_hidden(paths.of_directory(number))? {
                        Some(path) => path.strip_suffix(b"/").unwrap_or_default(),
                        None => continue,
                    },
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
                nameless.insert(*number);
                by_number.insert(*number, *changes);
            }
        }
        for (number, directory, name) in paths.names_of(wanted, &mut |error| damage.note(error))? {
            nameless.remove(&number);
            let Some(path) = damage.unless_hidden(paths.of_entry(directory, &name))? else {
                continue;
            };
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
        // One directory that can't be read may have the names of many.
        let Some(first) = nameless.first() else { return Ok(()) };
        let problem = match nameless.len() - 1 {
            0 => "it has changed, and no directory has its name".into(),
            others => {
                format!("it and {others} more have changed, and no directory has their names")
            }
        };
        damage.note(paths.damaged(*first, &problem))
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
