//! Judges what a volume says differs between two states of a subvolume: walks both through the
//! public interface, and finds each difference that was left out, invented or misnamed.
//!
//! From the list follows of each path afterwards which path it was before. Then what stands at both
//! must be the same inode, and may differ only in what the list says.
use cairn_engine::{Changes, Difference, DifferenceKind, FileType, InodeId, Timestamp, Volume};
use std::collections::{BTreeMap, BTreeSet};

/// What stands at a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seen {
    pub inode: u64,
    file_type: FileType,
    mode: u32,
    owner: (u32, u32),
    modified: Timestamp,
    links: u32,
    size_bytes: u64,
    content: Vec<u8>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Of a directory.
    entries: BTreeMap<Vec<u8>, u64>,
}

/// A subvolume by path; the root directory is `.`.
pub type Tree = BTreeMap<Vec<u8>, Seen>;

/// Walks all below a root directory.
pub fn walk(volume: &Volume, root: InodeId) -> Tree {
    let mut tree = Tree::new();
    let mut left = vec![(b".".to_vec(), root)];
    while let Some((path, inode)) = left.pop() {
        let attributes = volume.attributes(inode).unwrap();
        let (mut content, mut entries) = (Vec::new(), BTreeMap::new());
        match attributes.file_type {
            FileType::Regular => {
                volume.read(inode, 0, attributes.size_bytes as usize, &mut content).unwrap();
            }
            FileType::Symlink => content = volume.read_link(inode).unwrap(),
            FileType::Directory => {
                let mut below = Vec::new();
                volume
                    .read_directory(inode, 0, &mut |item| {
                        below.push((item.name.to_vec(), item.inode));
                        true
                    })
                    .unwrap();
                for (name, inode) in below {
                    entries.insert(name.clone(), inode.number().0);
                    left.push((join(&path, &name), inode));
                }
            }
            _ => {}
        }
        let names = volume.list_xattrs(inode).unwrap();
        let xattrs = names
            .into_iter()
            .map(|name| (name.clone(), volume.get_xattr(inode, &name).unwrap()))
            .collect();
        let seen = Seen {
            inode: inode.number().0,
            file_type: attributes.file_type,
            mode: attributes.mode,
            owner: (attributes.uid, attributes.gid),
            modified: attributes.modified,
            links: attributes.links,
            size_bytes: attributes.size_bytes,
            content,
            xattrs,
            entries,
        };
        tree.insert(path, seen);
    }
    tree
}

fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory == b"." { name.to_vec() } else { [directory, b"/", name].concat() }
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b".", path),
    }
}

/// What is said of one path afterwards.
#[derive(Default)]
struct Said {
    added: bool,
    from: Option<Vec<u8>>,
    changes: Option<Changes>,
}

struct Judge<'a> {
    old: &'a Tree,
    new: &'a Tree,
    said: BTreeMap<&'a [u8], Said>,
    removed: BTreeSet<&'a [u8]>,
    /// Of paths afterwards.
    origins: BTreeMap<&'a [u8], Option<&'a [u8]>>,
    problems: Vec<String>,
}

fn shown(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

/// What is wrong with `found`. `touched` are the inodes whose data was written, allocated or
/// discarded between both.
pub fn problems(
    old: &Tree,
    new: &Tree,
    found: &[Difference],
    touched: &BTreeSet<u64>,
) -> Vec<String> {
    let mut judge = Judge {
        old,
        new,
        said: BTreeMap::new(),
        removed: BTreeSet::new(),
        origins: BTreeMap::new(),
        problems: Vec::new(),
    };
    if !found.is_sorted_by(|one, next| one.path <= next.path) {
        judge.problems.push("the paths are not sorted".into());
    }
    for difference in found {
        judge.take(difference);
    }
    for (path, seen) in new {
        judge.judge_path(path, seen, touched);
    }
    judge.judge_removed();
    judge.problems
}

impl<'a> Judge<'a> {
    fn problem(&mut self, path: &[u8], problem: &str) {
        self.problems.push(format!("{}: {problem}", shown(path)));
    }

    fn take(&mut self, difference: &'a Difference) {
        let Difference { path, kind } = difference;
        if let DifferenceKind::Removed = kind {
            if !self.removed.insert(path) || !self.old.contains_key(path) {
                self.problem(path, "removed twice, or was not there");
            }
            return;
        }
        if !self.new.contains_key(path) {
            self.problem(path, "is said to be there");
        }
        let said = self.said.entry(path).or_default();
        let again = match kind {
            DifferenceKind::Removed => false,
            DifferenceKind::Added => std::mem::replace(&mut said.added, true),
            DifferenceKind::Moved { from } => said.from.replace(from.clone()).is_some(),
            DifferenceKind::Changed(changes) => {
                said.changes.replace(*changes).is_some() || !changes.any()
            }
        };
        if again {
            self.problem(path, "said twice, or nothing said");
        }
    }

    /// The path before of what is at `path`; its directory's is known.
    fn origin(&mut self, path: &'a [u8], seen: &Seen) -> Option<&'a [u8]> {
        let (old, is_same) = (self.old, |seen_before: &Seen| seen_before.inode == seen.inode);
        let known = |path: &[u8]| {
            old.get_key_value(path).filter(|(_, before)| is_same(before)).map(|(path, _)| &path[..])
        };
        if path == b"." {
            return known(path);
        }
        let (directory, name) = split(path);
        // By the name in the same directory.
        let natural = self.origins.get(directory).copied().flatten();
        let natural = natural.and_then(|natural| known(&join(natural, name)));
        let said = self.said.get(path);
        let replaced =
            said.is_some_and(|said| said.changes.is_some_and(|changes| changes.replaced));
        let (added, from) =
            (said.is_some_and(|said| said.added), said.and_then(|said| said.from.clone()));
        if added || replaced {
            // That the path existed before says nothing: that may have moved with a directory.
            if natural.is_some() {
                self.problem(path, "is not new");
            }
            if from.is_some() || (added && replaced) {
                self.problem(path, "has come in two ways");
            }
            let before = old.get(path);
            let same_type = before.is_some_and(|before| before.file_type == seen.file_type);
            if replaced && !same_type {
                self.problem(path, "has replaced nothing");
            }
            return None;
        }
        if let Some(from) = from {
            if natural.is_some() {
                self.problem(path, "has not moved");
            }
            let found = known(&from);
            if found.is_none() {
                self.problem(path, "has not come from there");
            }
            return found;
        }
        // In another directory, that has the path now.
        let unsaid = natural.or(known(path));
        if unsaid.is_none() {
            self.problem(path, "is new, and nothing is said");
        }
        unsaid
    }

    fn judge_path(&mut self, path: &'a [u8], seen: &Seen, touched: &BTreeSet<u64>) {
        let origin = self.origin(path, seen);
        self.origins.insert(path, origin);
        let changes = self.said.get(path).and_then(|said| said.changes);
        let Some(before) = origin.and_then(|origin| self.old.get(origin)) else {
            if changes.is_some_and(|changes| !changes.replaced) {
                self.problem(path, "is new, and changed");
            }
            return;
        };
        let changes = changes.unwrap_or_default();
        let same_data = (before.size_bytes, &before.content) == (seen.size_bytes, &seen.content);
        let is_file = seen.file_type == FileType::Regular;
        let data = if !is_file {
            false
        } else if same_data {
            changes.data && touched.contains(&seen.inode)
        } else {
            true
        };
        let expected = Changes {
            replaced: false,
            data,
            mode: before.mode != seen.mode,
            owner: before.owner != seen.owner,
            xattrs: before.xattrs != seen.xattrs,
            times: before.modified != seen.modified && !data && before.entries == seen.entries,
        };
        if changes != expected {
            self.problem(path, &format!("{changes:?} instead of {expected:?}"));
        }
    }

    fn judge_removed(&mut self) {
        let mut kept = BTreeSet::new();
        for (path, origin) in self.origins.clone() {
            if let Some(origin) = origin
                && !kept.insert(origin)
            {
                self.problem(path, "has the origin of another path");
            }
        }
        let replaced = |said: &Said| said.changes.is_some_and(|changes| changes.replaced);
        let replaced: BTreeSet<&[u8]> =
            self.said.iter().filter(|(_, said)| replaced(said)).map(|(path, _)| *path).collect();
        let mut gone_inodes = BTreeSet::new();
        for (path, before) in self.old {
            let (path, is_kept) = (&path[..], kept.contains(&path[..]));
            let is_said = self.removed.contains(path) || replaced.contains(path);
            if is_kept == is_said {
                self.problem(path, "is gone and nothing said, or said and not gone");
            }
            if is_said {
                gone_inodes.insert(before.inode);
            }
        }
        for (path, said) in &self.said {
            let is_new = said.added || said.changes.is_some_and(|changes| changes.replaced);
            if is_new && self.new.get(*path).is_some_and(|seen| gone_inodes.contains(&seen.inode)) {
                self.problems.push(format!("{}: has moved", shown(path)));
            }
        }
    }
}
