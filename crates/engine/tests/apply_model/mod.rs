//! Random changes of subvolumes, and a merge of three trees in a few lines, which know inodes and
//! entries only.
#![allow(dead_code, reason = "no test program uses all of it")]
use super::small_volume::{DIRECTORY, FILE};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, InodeId, NewInode, RenameMode, Result,
    Timestamp, Volume, XattrMode,
};
use cairn_environment::random::Seeded;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

/// What an inode is, but for its names and, of a directory, what is in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    pub mode: u32,
    pub uid: u32,
    /// Of a directory always the same.
    pub modified: Timestamp,
    pub content: Vec<u8>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

pub type Key = (u64, Vec<u8>);

/// Everything in a subvolume.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Tree {
    pub nodes: BTreeMap<u64, Node>,
    pub entries: BTreeMap<Key, u64>,
}

const DIRECTORY_BITS: u32 = 0o040_000;
const TYPE_BITS: u32 = 0o170_000;

pub fn is_directory(node: &Node) -> bool {
    node.mode & TYPE_BITS == DIRECTORY_BITS
}

fn expect<T: PartialEq + Debug>(inode: InodeId, is: T, expected: T) -> Result<()> {
    if is == expected {
        return Ok(());
    }
    Err(Error::Aborted(format!("{is:?} instead of {expected:?} of {}", inode.number())))
}

impl Tree {
    /// Checks counts on the way.
    pub fn read(volume: &Volume, root: InodeId) -> Self {
        Self::try_read(volume, root).unwrap()
    }

    /// The same beside somebody who changes it: an error if both meet.
    pub fn try_read(volume: &Volume, root: InodeId) -> Result<Self> {
        let mut tree = Self::default();
        let mut next = vec![root];
        let (mut links, mut said) = (BTreeMap::new(), BTreeMap::new());
        while let Some(inode) = next.pop() {
            let number = inode.number().0;
            let attributes = volume.attributes(inode)?;
            said.insert(number, attributes.links);
            let mut content = Vec::new();
            match attributes.mode & TYPE_BITS {
                DIRECTORY_BITS => {
                    let (mut names, mut subdirectories, mut bytes) = (Vec::new(), 0, 0);
                    let mut take = |item: cairn_engine::DirectoryItem<'_>| {
                        names.push((item.name.to_vec(), item.inode));
                        subdirectories += u32::from(item.file_type == FileType::Directory);
                        bytes += item.name.len() as u64;
                        true
                    };
                    volume.read_directory(inode, 0, &mut take)?;
                    let counted = (2 + subdirectories, bytes);
                    expect(inode, (attributes.links, attributes.size_bytes), counted)?;
                    for (name, child) in names {
                        let found = volume.lookup(inode, &name)?.inode;
                        volume.forget(found, 1);
                        expect(inode, found, child)?;
                        tree.entries.insert((number, name), child.number().0);
                        *links.entry(child.number().0).or_insert(0) += 1;
                        if links[&child.number().0] == 1 {
                            next.push(child);
                        }
                    }
                }
                0o120_000 => content = volume.read_link(inode)?,
                _ => volume.read(inode, 0, 1 << 20, &mut content).map(drop)?,
            }
            let names = volume.list_xattrs(inode)?;
            let value = |name: &Vec<u8>| Ok((name.clone(), volume.get_xattr(inode, name)?));
            let xattrs = names.iter().map(value).collect::<Result<_>>()?;
            let cairn_engine::Attributes { mode, uid, modified, .. } = attributes;
            let is_directory = mode & TYPE_BITS == DIRECTORY_BITS;
            let modified = if is_directory { Timestamp::default() } else { modified };
            tree.nodes.insert(number, Node { mode, uid, modified, content, xattrs });
        }
        for (number, links) in links {
            if !is_directory(&tree.nodes[&number]) {
                expect(sibling(root, number), said[&number], links)?;
            }
        }
        Ok(tree)
    }

    /// Each entry is reached from the root directory `root`, and each directory once.
    pub fn is_sound(&self, root: u64) -> bool {
        let (mut seen, mut next) = (BTreeSet::from([root]), vec![root]);
        let mut reached = 0;
        while let Some(directory) = next.pop() {
            for ((_, _), child) in
                self.entries.range((directory, Vec::new())..(directory + 1, Vec::new()))
            {
                reached += 1;
                let Some(node) = self.nodes.get(child) else { return false };
                let is_new = seen.insert(*child);
                if is_directory(node) {
                    if !is_new {
                        return false;
                    }
                    next.push(*child);
                }
            }
        }
        reached == self.entries.len()
    }

    pub fn names_of(&self, inode: u64) -> BTreeSet<&Key> {
        self.entries.iter().filter(|(_, of)| **of == inode).map(|(key, _)| key).collect()
    }
}

/// Of one thing: what it becomes, unless both have changed it.
fn merged<T: Clone + PartialEq>(
    base: Option<&T>,
    fork: Option<&T>,
    origin: Option<&T>,
) -> Option<Option<T>> {
    if fork == base || fork == origin {
        Some(origin.cloned())
    } else if origin == base {
        Some(fork.cloned())
    } else {
        None
    }
}

/// The merge, unless something in it is a conflict.
pub fn merge(base: &Tree, fork: &Tree, origin: &Tree, root: u64) -> Option<Tree> {
    let mut tree = Tree::default();
    let keys = base.entries.keys().chain(fork.entries.keys()).chain(origin.entries.keys());
    let (mut ours, mut theirs) = (BTreeSet::new(), BTreeSet::new());
    for key in keys.collect::<BTreeSet<_>>() {
        let of = |tree: &Tree| tree.entries.get(key).copied();
        let all = [of(base), of(fork), of(origin)];
        let [base, fork, origin] = all;
        if let Some(inode) = merged(base.as_ref(), fork.as_ref(), origin.as_ref())? {
            tree.entries.insert(key.clone(), inode);
        }
        if fork != origin {
            let changed = if fork == base { &mut ours } else { &mut theirs };
            changed.extend([base, fork, origin].into_iter().flatten());
        }
    }
    let numbers = base.nodes.keys().chain(fork.nodes.keys()).chain(origin.nodes.keys());
    for number in numbers.collect::<BTreeSet<_>>() {
        let of = |tree: &Tree| tree.nodes.get(number).cloned();
        let [base, fork, origin] = [of(base), of(fork), of(origin)];
        if let Some(node) = merged(base.as_ref(), fork.as_ref(), origin.as_ref())? {
            tree.nodes.insert(*number, node);
        }
    }
    // Names of one inode are changed by one side.
    let is_torn = |inode: &u64| {
        let [fork, origin] = [fork, origin].map(|side| side.names_of(*inode));
        fork != origin
    };
    if ours.intersection(&theirs).any(is_torn) || !tree.is_sound(root) {
        return None;
    }
    // What has no name is gone.
    let named: BTreeSet<u64> = tree.entries.values().copied().chain([root]).collect();
    if tree.nodes.keys().any(|number| !named.contains(number)) {
        return None;
    }
    Some(tree)
}

/// The inode with this number in the subvolume with the root directory `root`.
pub fn sibling(root: InodeId, number: u64) -> InodeId {
    // The ids of a subvolume have its root directory's slot.
    InodeId(root.0 - root.number().0 + number)
}

/// Changes a subvolume at random.
pub fn change(volume: &Volume, root: InodeId, random: &mut Seeded) {
    try_change(volume, root, random).unwrap();
}

/// The same beside somebody who changes it, too: an error if both meet.
pub fn try_change(volume: &Volume, root: InodeId, random: &mut Seeded) -> Result<()> {
    let tree = Tree::try_read(volume, root)?;
    let id = |number: u64| sibling(root, number);
    let directories: Vec<u64> = tree
        .nodes
        .iter()
        .filter(|(_, node)| is_directory(node))
        .map(|(number, _)| *number)
        .collect();
    let directory = id(directories[random.below(directories.len() as u64) as usize]);
    let name = format!("n{}", random.below(6)).into_bytes();
    let names: Vec<&Key> = tree.entries.keys().collect();
    let some = (!names.is_empty()).then(|| names[random.below(names.len() as u64) as usize]);
    let Some((parent, old)) = some.filter(|_| random.below(4) > 0) else {
        let kinds = [FileType::Regular, FileType::Regular, FileType::Directory, FileType::Symlink];
        let file_type = kinds[random.below(4) as usize];
        let target = (file_type == FileType::Symlink).then_some(&b"somewhere"[..]);
        let new = NewInode { file_type, target, ..FILE };
        if let Ok(made) = volume.create(directory, &name, &new) {
            if file_type == FileType::Regular {
                let bytes = vec![random.below(255) as u8; random.below(30_000) as usize];
                volume.write(made.inode, 0, &bytes)?;
            }
            volume.forget(made.inode, 1);
        }
        return Ok(());
    };
    let (inode, parent) = (id(tree.entries[&(*parent, old.clone())]), id(*parent));
    let node = &tree.nodes[&inode.number().0];
    let is_file = node.mode & TYPE_BITS == 0o100_000;
    match random.below(12) {
        0 if is_directory(node) => drop(volume.remove_directory(parent, old)),
        0 | 1 => drop(volume.unlink(parent, old)),
        2 | 3 => drop(volume.rename(parent, old, directory, &name, RenameMode::Replace)),
        4 if is_file && volume.link(inode, directory, &name).is_ok() => volume.forget(inode, 1),
        4 => {}
        5 => {
            let mode = Some(if random.below(2) == 0 { 0o600 } else { 0o700 });
            volume.set_attributes(inode, &AttributeChange { mode, ..Default::default() })?;
        }
        6 => {
            let value = vec![random.below(255) as u8; random.below(9_000) as usize];
            volume.set_xattr(inode, b"user.some", &value, XattrMode::Any)?;
        }
        7 => drop(volume.remove_xattr(inode, b"user.some")),
        8 if is_file => {
            let size = Some(random.below(40_000));
            volume.set_attributes(inode, &AttributeChange { size, ..Default::default() })?;
        }
        9 if is_file => {
            let (at, length) = (random.below(30_000), 1 + random.below(20_000));
            volume.allocate(inode, at, length, AllocateMode::PunchHole)?;
        }
        10 if is_file => {
            let mode = AllocateMode::Allocate { keep_size: random.below(2) == 0 };
            volume.allocate(inode, random.below(30_000), 1 + random.below(20_000), mode)?;
        }
        _ if is_file => {
            let bytes = vec![random.below(255) as u8; 1 + random.below(9_000) as usize];
            volume.write(inode, random.below(30_000), &bytes)?;
        }
        _ => {}
    }
    Ok(())
}

/// Makes a subvolume and a fork of it, after `changes` changes of the one, and of both.
pub fn forked(volume: &Volume, random: &mut Seeded, changes: [u64; 3]) -> ([InodeId; 2], Tree) {
    let root = volume.root();
    let origin = volume.create_subvolume(root, b"origin", &DIRECTORY).unwrap().inode;
    (0..changes[0]).for_each(|_| change(volume, origin, random));
    let base = Tree::read(volume, origin);
    let fork = volume.fork(origin, root, b"fork").unwrap().inode;
    for _ in 0..changes[1] {
        change(volume, fork, random);
    }
    for _ in 0..changes[2] {
        change(volume, origin, random);
    }
    ([origin, fork], base)
}
