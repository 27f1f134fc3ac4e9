//! Paths of directories and names of inodes in a tree that nothing changes.
//!
//! A directory knows its parent; its name stands in that one's entries. A file notes the directory
//! in which it was last given a name, so the search begins there. It may have lost that name since,
//! or have others, and on volumes of earlier builds files note nothing: then the directories are
//! searched. Inode numbers ascend as inodes are made, and a file is usually made in a directory
//! that was made not long before it. So the next to be searched is the one with the next smaller
//! number of those that are known. All may have to be searched.
use super::gathered::{Entry, Side};
use crate::{Error, Result};
use cairn_format::{
    DirectoryEntry, EntryTarget, FileType, FormatError, INODE_ROOT, InodeItem, InodeNumber,
    ItemKind, Key,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Deepest path. Of damage only it could be deeper, since damage can lead in circles.
const DEPTH_MAX: usize = 1 << 16;
/// Directories that are read at the same time.
const TOGETHER: usize = 32;

/// An inode, a directory that has a name of it, and the name.
type NamedInode = (InodeNumber, InodeNumber, Vec<u8>);

/// What is known of the names of a tree.
pub(in crate::names) struct Paths<'a> {
    side: Side<'a>,
    /// Of directories: where their names are.
    places: HashMap<InodeNumber, (InodeNumber, Vec<u8>)>,
    /// Of directories, with `/` at the end, but for the root directory.
    paths: HashMap<InodeNumber, Vec<u8>>,
    /// Directories of which all entries were looked at once.
    seen: BTreeSet<InodeNumber>,
    /// Directories that were not searched yet, of those that are known.
    unsearched: BTreeSet<InodeNumber>,
    /// Directories that were searched before they were known, since files noted them.
    noted: BTreeSet<InodeNumber>,
}

/// An inode that is no directory, whose names are to be found.
#[derive(Clone, Copy)]
pub(in crate::names) struct Wanted {
    /// How many names it has, or how many are wanted.
    pub(in crate::names) names: u32,
    /// The directory that it notes, if it does.
    noted: Option<InodeNumber>,
}

impl Wanted {
    /// So many of the names that the inode with this item has.
    pub(in crate::names) fn new(names: u32, item: &InodeItem) -> Self {
        Self { names, noted: Some(InodeNumber(item.parent)).filter(|parent| parent.0 != 0) }
    }
}

impl<'a> Paths<'a> {
    /// Of the tree of `side`, which has these entries of directories, among others.
    pub(in crate::names) fn new(side: Side<'a>, entries: &[Entry]) -> Self {
        let directories = entries.iter().filter(|entry| entry.file_type == FileType::Directory);
        let place = |entry: &Entry| (entry.inode, (entry.directory, entry.name.clone()));
        Self {
            side,
            places: directories.map(place).collect(),
            paths: HashMap::from([(INODE_ROOT, Vec::new())]),
            seen: BTreeSet::new(),
            unsearched: BTreeSet::from([INODE_ROOT]),
            noted: BTreeSet::new(),
        }
    }

    /// The path of an entry.
    pub(in crate::names) fn of_entry(
        &mut self,
        directory: InodeNumber,
        name: &[u8],
    ) -> Result<Vec<u8>> {
        let directory = self.of_directory(directory)?;
        Ok([directory, name].concat())
    }

    /// The path of a directory, with `/` at the end; that of the root directory is empty.
    pub(in crate::names) fn of_directory(&mut self, directory: InodeNumber) -> Result<&[u8]> {
        let (mut at, mut below) = (directory, Vec::new());
        while !self.paths.contains_key(&at) {
            let (parent, name) = self.place(at)?;
            below.push((at, name));
            if below.len() > DEPTH_MAX {
                return Err(self.damaged(directory, "it stands in itself"));
            }
            at = parent;
        }
        let mut path = self.paths.get(&at).cloned().unwrap_or_default();
        while let Some((of, name)) = below.pop() {
            path.extend_from_slice(&name);
            path.push(b'/');
            self.paths.insert(of, path.clone());
        }
        Ok(self.paths.get(&directory).map_or(&[], Vec::as_slice))
    }

    /// Where the name of a directory is.
    pub(in crate::names) fn place(
        &mut self,
        directory: InodeNumber,
    ) -> Result<(InodeNumber, Vec<u8>)> {
        if !self.places.contains_key(&directory) {
            let item = self.side.inode_item(directory)?;
            let parent = item.map(|item| InodeNumber(item.parent));
            if let Some(parent) = parent.filter(|parent| !self.seen.contains(parent)) {
                self.look_into(parent, &mut |_, _| {})?;
            }
        }
        let place = self.places.get(&directory).cloned();
        place.ok_or_else(|| self.damaged(directory, "its parent has no entry of it"))
    }

    pub(super) fn damaged(&self, inode: InodeNumber, problem: &str) -> Error {
        let key = Key::new(inode, ItemKind::Inode, 0);
        self.side.store.damaged_item(self.side.root, &key, problem.into())
    }

    /// Shows `visit` the entries of a directory, and learns where directories are.
    fn look_into(
        &mut self,
        directory: InodeNumber,
        visit: &mut dyn FnMut(InodeNumber, &[u8]),
    ) -> Result<()> {
        let is_first = self.seen.insert(directory);
        let (mut damage, side): (Option<(Key, FormatError)>, _) = (None, self.side);
        let (tree, keys) = (self.side.tree, Key::all(directory, ItemKind::DirectoryEntry));
        tree.scan(keys, |key, value| {
            let named = DirectoryEntry::target_of(value)
                .and_then(|target| Ok((target, DirectoryEntry::name_of(value)?)));
            match named {
                Ok((EntryTarget::Inode(inode, FileType::Directory), name)) => {
                    if is_first {
                        self.places.entry(inode).or_insert_with(|| (directory, name.to_vec()));
                        if !self.noted.contains(&inode) {
                            self.unsearched.insert(inode);
                        }
                    }
                }
                Ok((EntryTarget::Inode(inode, _), name)) => visit(inode, name),
                Ok((EntryTarget::Subvolume(_), _)) => {}
                Err(error) => damage = Some((key, error)),
            }
            damage.is_none() && side.expect_alive().is_ok()
        })?;
        side.expect_alive()?;
        match damage {
            Some((key, error)) => self.side.of_item(&key, Err(error)),
            None => Ok(()),
        }
    }

    /// The names of inodes. To be called once. `on_failure` says whether the search goes on behind
    /// a directory that can't be read.
    pub(in crate::names) fn names_of(
        &mut self,
        mut wanted: BTreeMap<InodeNumber, Wanted>,
        on_failure: &mut dyn FnMut(Error) -> Result<()>,
    ) -> Result<Vec<NamedInode>> {
        let mut found = Vec::new();
        self.noted = wanted.values().filter_map(|wanted| wanted.noted).collect();
        let noted: Vec<InodeNumber> = self.noted.iter().copied().collect();
        for together in noted.chunks(TOGETHER) {
            let entries = |directory: &InodeNumber| Key::all(*directory, ItemKind::DirectoryEntry);
            let ahead = together.iter().map(entries).collect::<Vec<_>>();
            let read = self.side.tree.read_ahead(&ahead);
            read.map_err(Error::from).or_else(&mut *on_failure)?;
            for directory in together {
                self.unsearched.remove(directory);
                self.search(*directory, &mut wanted, &mut found).or_else(&mut *on_failure)?;
            }
        }
        while !wanted.is_empty() {
            let round: Vec<InodeNumber> = wanted.keys().copied().collect();
            for inode in round {
                if !wanted.contains_key(&inode) {
                    continue;
                }
                let before = self.unsearched.range(..inode).next_back();
                let Some(directory) = before.or_else(|| self.unsearched.first()).copied() else {
                    // Damage: fewer names than links. What is known is shown.
                    return Ok(found);
                };
                self.unsearched.remove(&directory);
                self.search(directory, &mut wanted, &mut found).or_else(&mut *on_failure)?;
            }
        }
        Ok(found)
    }

    /// Takes what a directory names from `wanted`.
    fn search(
        &mut self,
        directory: InodeNumber,
        wanted: &mut BTreeMap<InodeNumber, Wanted>,
        found: &mut Vec<NamedInode>,
    ) -> Result<()> {
        self.look_into(directory, &mut |inode, name| {
            let Some(of) = wanted.get_mut(&inode) else { return };
            found.push((inode, directory, name.to_vec()));
            of.names -= 1;
            if of.names == 0 {
                wanted.remove(&inode);
            }
        })
    }
}
