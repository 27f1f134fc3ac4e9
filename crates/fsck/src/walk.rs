//! Goes through the tree of names of a volume, each directory before what it holds. A subvolume is
//! a directory like any other.
//!
//! The walk needs memory for the directories, and for the depth of the tree, but not for the names
//! of a directory. A directory is entered once, whatever names lead to it, so the walk ends on any
//! volume. If nodes of a tree are lost, what lost its name with them comes at the end, in the root
//! directory, by the name [`LOST_AND_FOUND`] and its numbers. So does a subvolume without a name.
use crate::names::shown;
use crate::object::ObjectId;
use crate::tree_reader::TreeReader;
use cairn_format::{
    DirectoryEntry, FileType, Generation, INODE_FIRST, INODE_ROOT, InodeItem, InodeNumber,
    TREE_FILES, Timestamp,
};
use std::collections::{BTreeSet, HashSet};

/// What has no name left stands in the root directory by this name and its inode's number; before
/// that, if it is not of the first subvolume, the subvolume's and `-`.
pub const LOST_AND_FOUND: &str = "lost+found-";

/// Something with a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Its name in the directory; empty for the root. Never `.` or `..`, and without `/` and NUL.
    pub name: Vec<u8>,
    /// What it is: two names are hard links if this is the same.
    pub object: ObjectId,
    /// Its type.
    pub file_type: FileType,
    /// Its attributes.
    pub attributes: InodeItem,
}

/// A step of the walk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// A directory. What follows, up to its end, is in it.
    Enter(Entry),
    /// The end of the directory that was entered last and has not ended.
    Leave(Entry),
    /// Anything but a directory.
    Object(Entry),
    /// Something is lost or contradicts itself; it belongs to [`Walk::path`].
    Problem {
        /// The object.
        object: ObjectId,
        /// What is wrong, in words.
        problem: String,
    },
}

struct OpenDirectory {
    entry: Entry,
    /// The next slot; `None` behind the last one.
    next_slot: Option<u64>,
    /// Names found, unless that is no question any more.
    names: Option<u64>,
    /// Length of the path of the directory above.
    path_bytes: usize,
}

/// What comes after the names below the root.
enum Rest {
    /// Nobody has looked.
    Unknown,
    /// These have no name.
    Nameless(std::vec::IntoIter<ObjectId>),
}

/// A walk through all names of a volume.
pub struct Walk<'r, 'a> {
    reader: &'r TreeReader<'a>,
    open: Vec<OpenDirectory>,
    path: Vec<u8>,
    /// Length of the path without what the last step added.
    path_bytes: usize,
    /// Steps that come before anything else.
    waiting: Vec<Step>,
    seen: HashSet<ObjectId>,
    /// Objects that a name led to. If no nodes are lost, only subvolumes.
    named: BTreeSet<ObjectId>,
    rest: Rest,
    began: bool,
}

impl<'r, 'a> Walk<'r, 'a> {
    /// Begins at the root.
    pub fn new(reader: &'r TreeReader<'a>) -> Self {
        Self {
            reader,
            open: Vec::new(),
            path: Vec::new(),
            path_bytes: 0,
            waiting: Vec::new(),
            seen: HashSet::new(),
            named: BTreeSet::new(),
            rest: Rest::Unknown,
            began: false,
        }
    }

    /// The path that the last step is about, from the root; empty for the root itself.
    pub fn path(&self) -> &[u8] {
        &self.path
    }

    /// Leaves out what is in the directory that was just entered, and its end.
    pub fn leave_out(&mut self) {
        if let Some(open) = self.open.pop() {
            self.path_bytes = open.path_bytes;
        }
    }

    fn problem(object: ObjectId, problem: impl Into<String>) -> Step {
        Step::Problem { object, problem: problem.into() }
    }

    fn enter(&mut self, entry: Entry) -> Step {
        self.seen.insert(entry.object);
        self.open.push(OpenDirectory {
            entry: entry.clone(),
            next_slot: Some(0),
            names: (entry.attributes != placeholder()).then_some(0),
            path_bytes: self.path_bytes,
        });
        self.path_bytes = self.path.len();
        Step::Enter(entry)
    }

    /// The root directory. If its attributes are lost, its names may be left.
    fn root(&mut self) -> Step {
        let found = self.reader.attributes(ObjectId::ROOT);
        let whole = found.as_ref().ok().copied().flatten().filter(|item| {
            item.file_type().is_ok_and(|file_type| file_type == FileType::Directory)
        });
        if whole.is_none() {
            let problem = found.err().unwrap_or_else(|| "it does not exist".into());
            self.waiting.push(Self::problem(
                ObjectId::ROOT,
                format!("the attributes of the root directory are lost: {problem}"),
            ));
        }
        self.enter(Entry {
            name: Vec::new(),
            object: ObjectId::ROOT,
            file_type: FileType::Directory,
            attributes: whole.unwrap_or_else(placeholder),
        })
    }

    /// The next step in the directory that is open.
    fn next_in(&mut self, at: usize) -> Step {
        self.path.truncate(self.path_bytes);
        let directory = self.open[at].entry.object;
        loop {
            let next = self.open[at].next_slot;
            let next = next.and_then(|slot| self.reader.next_entry(directory, slot));
            let Some((slot, entry)) = next else { return self.leave() };
            self.open[at].next_slot = slot.checked_add(1);
            self.open[at].names = self.open[at].names.map(|names| names + 1);
            return match entry {
                Ok(entry) if self.reader.leads_out(directory, &entry) => continue,
                Ok(entry) => self.named_object(directory, entry),
                Err(problem) => {
                    let problem = format!("a name in this directory is damaged: {problem}");
                    Self::problem(directory, problem)
                }
            };
        }
    }

    /// The end of a directory; before it, what is wrong with its names as a whole.
    fn leave(&mut self) -> Step {
        let mut open = self.open.pop().expect("the caller has a directory open");
        let (stated, object) = (open.entry.attributes.entries, open.entry.object);
        if let Some(found) = open.names.take().filter(|found| *found != stated) {
            self.open.push(open);
            let problem = format!("{stated} names are in this directory, {found} were found");
            return Self::problem(object, problem);
        }
        self.path_bytes = open.path_bytes;
        Step::Leave(open.entry)
    }

    fn named_object(&mut self, directory: ObjectId, name: DirectoryEntry) -> Step {
        self.path.push(b'/');
        self.path.extend_from_slice(&name.name);
        let object = ObjectId::named(directory.subvolume, name.target);
        if self.reader.is_incomplete() || object.inode == INODE_ROOT {
            self.named.insert(object);
        }
        let named_type = name.target.file_type();
        let attributes = match self.reader.attributes(object) {
            Ok(Some(attributes)) => attributes,
            // Its names may be left.
            Ok(None) if named_type == FileType::Directory && self.has_names(object) => {
                self.waiting
                    .push(Self::problem(object, "the attributes of this directory are lost"));
                placeholder()
            }
            Ok(None) => {
                let problem = format!("{object}, which this name leads to, is lost");
                return Self::problem(directory, problem);
            }
            Err(problem) => return Self::problem(object, problem),
        };
        let Ok(file_type) = attributes.file_type() else {
            return Self::problem(object, "its type is unknown");
        };
        if file_type != named_type {
            let problem = format!("its name says {named_type:?}, its inode {file_type:?}");
            self.waiting.push(Self::problem(object, problem));
        }
        self.object(Entry { name: name.name, object, file_type, attributes })
    }

    fn object(&mut self, entry: Entry) -> Step {
        if entry.file_type != FileType::Directory {
            return Step::Object(entry);
        }
        if self.seen.contains(&entry.object) {
            self.waiting.clear();
            return Self::problem(entry.object, "a second name of a directory");
        }
        self.enter(entry)
    }

    fn has_names(&self, object: ObjectId) -> bool {
        self.reader.next_entry(object, 0).is_some()
    }

    /// What has no name, once everything else is done.
    fn nameless(&mut self) -> Option<Step> {
        if let Rest::Unknown = self.rest {
            self.rest = Rest::Nameless(self.find_nameless().into_iter());
        }
        loop {
            let Rest::Nameless(rest) = &mut self.rest else { return None };
            let object = rest.next()?;
            if self.seen.contains(&object) || self.named.contains(&object) {
                continue;
            }
            let attributes = match self.reader.attributes(object) {
                Ok(Some(attributes)) => attributes,
                Ok(None) if self.has_names(object) => placeholder(),
                _ => continue,
            };
            let Ok(file_type) = attributes.file_type() else { continue };
            // It was to be removed, and nothing else says so any more.
            if attributes.links == 0 && attributes != placeholder() {
                continue;
            }
            self.path_bytes = 0;
            self.path.clear();
            let name = match object.subvolume {
                TREE_FILES => format!("{LOST_AND_FOUND}{}", object.inode),
                subvolume => format!("{LOST_AND_FOUND}{subvolume}-{}", object.inode),
            };
            let name = name.into_bytes();
            self.path.push(b'/');
            self.path.extend_from_slice(&name);
            self.named.insert(object);
            let entry = Entry { name, object, file_type, attributes };
            self.waiting.push(Self::problem(object, "its name is lost"));
            return Some(self.object(entry));
        }
    }

    /// Subvolumes without a name, and in trees whose nodes are lost inodes without a name that are
    /// not to be removed: those first that no nameless directory names.
    fn find_nameless(&self) -> Vec<ObjectId> {
        let mut nameless = Vec::new();
        for subvolume in self.reader.subvolumes() {
            let root = ObjectId::root_of(subvolume);
            nameless.extend((!self.is_known(root)).then_some(root));
            let mut from = root.sibling(InodeNumber(INODE_FIRST));
            while let Some((object, has_attributes)) = self.reader.next_of_damaged(from) {
                from = object.sibling(InodeNumber(object.inode.0 + 1));
                let counts = has_attributes && !self.is_known(object);
                if counts && !self.reader.is_to_be_removed(object) {
                    nameless.push(object);
                }
            }
        }
        let mut below = HashSet::new();
        for &object in &nameless {
            let mut slot = Some(0);
            while let Some((at, entry)) = slot.and_then(|slot| self.reader.next_entry(object, slot))
            {
                let named = entry.ok().map(|entry| ObjectId::named(object.subvolume, entry.target));
                below.extend(named);
                slot = at.checked_add(1);
            }
        }
        nameless.sort_by_key(|object| below.contains(object));
        nameless
    }

    fn is_known(&self, object: ObjectId) -> bool {
        self.seen.contains(&object) || self.named.contains(&object)
    }
}

impl Iterator for Walk<'_, '_> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        if let Some(step) = self.waiting.pop() {
            return Some(step);
        }
        if !self.began {
            self.began = true;
            return Some(self.root());
        }
        match self.open.len() {
            0 => None,
            // Below the root the nameless come last, before the root ends.
            1 => match self.next_in(0) {
                Step::Leave(root) => Some(self.nameless_or(root)),
                step => Some(step),
            },
            count => Some(self.next_in(count - 1)),
        }
    }
}

impl Walk<'_, '_> {
    /// The next nameless object, in the root directory, which stays open; or its end.
    fn nameless_or(&mut self, root: Entry) -> Step {
        self.open.push(OpenDirectory { entry: root, next_slot: None, names: None, path_bytes: 0 });
        match self.nameless() {
            Some(step) => step,
            None => {
                self.path.clear();
                let root = self.open.pop().expect("it was pushed");
                Step::Leave(root.entry)
            }
        }
    }
}

/// The attributes of a directory whose own are lost: only its owner has access.
fn placeholder() -> InodeItem {
    let epoch = Timestamp { seconds: 0, nanoseconds: 0 };
    InodeItem {
        mode: FileType::Directory.mode_bits() | 0o700,
        uid: 0,
        gid: 0,
        links: 0,
        size: 0,
        blocks: 0,
        device: 0,
        parent: 0,
        entries: 0,
        flags: 0,
        generation: Generation(0),
        accessed: epoch,
        modified: epoch,
        changed: epoch,
        created: epoch,
    }
}

/// The path of a step, as reports show it.
pub fn shown_path(path: &[u8]) -> String {
    if path.is_empty() { "/".into() } else { shown(path) }
}
