//! Adds paths to findings: one more walk over the directories, only if a finding needs a path.
use crate::FsckError;
use crate::checker::Checker;
use crate::file_tree::FileTree;
use crate::item_stream::{Item, Visitor, visit_leaves};
use crate::names::{NameFacts, names_of, shown};
use crate::object::ObjectId;
use crate::report::Finding;
use crate::snapshots;
use crate::subvolumes::is_left_over;
use crate::trees::ExpectedNode;
use cairn_format::{
    DirectoryEntry, EntryTarget, INODE_ROOT, InodeNumber, ItemKind, SubvolumeItem, TREE_FILES,
    TreeId,
};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The depth of the deepest path that is assembled.
const DEPTH_MAX: usize = 256;

/// Directory and name of objects. That of a subvolume belongs to its root directory.
pub(crate) type Names = HashMap<ObjectId, (ObjectId, Vec<u8>)>;

/// The first name found of each wanted object, with its directory.
struct NameCollector<'c> {
    subvolumes: &'c BTreeMap<TreeId, SubvolumeItem>,
    wanted: HashSet<ObjectId>,
    found: Names,
    /// The tree that is being visited.
    tree: TreeId,
}

impl Visitor for NameCollector<'_> {
    fn item(&mut self, item: Item<'_>) -> Result<(), FsckError> {
        if item.key.kind == ItemKind::DirectoryEntry as u8
            && let Ok(entry) = DirectoryEntry::decode(item.value)
        {
            let child = ObjectId::named(self.tree, entry.target);
            let inode = InodeNumber(item.key.inode);
            let directory = ObjectId { subvolume: self.tree, inode };
            let is_left_over = matches!(entry.target, EntryTarget::Subvolume(named)
                if is_left_over(self.subvolumes, directory, named));
            if self.wanted.contains(&child) && !is_left_over {
                self.found.entry(child).or_insert((directory, entry.name));
            }
        }
        Ok(())
    }

    fn leaves_done(&mut self, _done: u64) {}
}

/// The entries of a tree that name inodes.
#[derive(Default)]
struct EntryCollector(Vec<NameFacts>);

impl Visitor for EntryCollector {
    fn item(&mut self, item: Item<'_>) -> Result<(), FsckError> {
        if item.key.kind == ItemKind::DirectoryEntry as u8
            && let Ok(entry) = DirectoryEntry::decode(item.value)
            && let EntryTarget::Inode(inode, file_type) = entry.target
        {
            let (child, file_type) = (inode.0, file_type as u8);
            self.0.push(NameFacts { child, directory: item.key.inode, file_type });
        }
        Ok(())
    }

    fn leaves_done(&mut self, _done: u64) {}
}

/// Adds a path to every finding about an inode that has one. Of trees of which not all leaves are
/// known, it reads those of one at a time.
pub(crate) fn add(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    let mut wanted: HashSet<ObjectId> =
        checker.report.findings.iter().filter_map(Finding::object).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    add_homes(&checker.trees, &mut wanted);
    let mut by_tree: BTreeMap<TreeId, Vec<ObjectId>> = BTreeMap::new();
    wanted.iter().for_each(|object| by_tree.entry(object.subvolume).or_default().push(*object));
    let (subvolumes, found) = (&checker.subvolumes, HashMap::new());
    let mut collector = NameCollector { subvolumes, wanted, found, tree: TREE_FILES };
    for (id, mut waiting) in by_tree {
        let Some(tree) = checker.trees.get_mut(&id) else { continue };
        let mut leaves = std::mem::take(&mut tree.leaves);
        let mut names = std::mem::take(&mut tree.names);
        names.sort_unstable();
        let root = checker.snapshots.root_of(id);
        if let Some(root) = root.filter(|_| tree.lacks_leaves()) {
            let root = ExpectedNode::root(id, root, checker.superblock.generation);
            leaves = snapshots::leaves(&checker.reader, &root.with(tree.lineage));
        }
        if tree.lacks_leaves() {
            let mut entries = EntryCollector::default();
            visit_leaves(&checker.reader, &leaves, &tree.changes, &mut entries)?;
            names = entries.0;
            names.sort_unstable();
        }
        while let Some(object) = waiting.pop() {
            let name = names_of(&names, object.inode.0).first();
            let name = name.filter(|_| object.inode != INODE_ROOT);
            let directory = name.map(|name| tree.object(name.directory));
            waiting.extend(directory.filter(|&directory| collector.wanted.insert(directory)));
        }
        collector.tree = id;
        visit_leaves(&checker.reader, &leaves, &tree.changes, &mut collector)?;
        if !tree.lacks_leaves() {
            (tree.leaves, tree.names) = (leaves, names);
        }
    }
    for finding in &mut checker.report.findings {
        finding.path = finding.object().and_then(|object| path_of(&collector.found, object));
    }
    Ok(())
}

/// Adds the roots of the subvolumes, the directories that name them, and so on upwards.
fn add_homes(trees: &BTreeMap<TreeId, FileTree>, wanted: &mut HashSet<ObjectId>) {
    let mut homes: HashMap<TreeId, ObjectId> = HashMap::new();
    for tree in trees.values() {
        for name in &tree.subvolume_names {
            homes.entry(name.subvolume).or_insert(tree.object(name.directory));
        }
    }
    let mut waiting: Vec<ObjectId> = wanted.iter().copied().collect();
    while let Some(object) = waiting.pop() {
        if wanted.insert(ObjectId::root_of(object.subvolume)) || object.inode == INODE_ROOT {
            let home = homes.get(&object.subvolume).copied();
            waiting.extend(home.filter(|home| wanted.insert(*home)));
        }
    }
}

/// The path of an object, as reports show it, from a map of directory and name by object.
pub(crate) fn path_of(found: &Names, object: ObjectId) -> Option<String> {
    if object == ObjectId::ROOT {
        return Some("/".into());
    }
    let (mut names, mut at) = (Vec::new(), object);
    while at != ObjectId::ROOT {
        let (directory, name) = found.get(&at)?;
        names.push(shown(name));
        at = *directory;
        if names.len() > DEPTH_MAX {
            return None;
        }
    }
    names.push(String::new());
    names.reverse();
    Some(names.join("/"))
}
