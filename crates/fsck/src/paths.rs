//! Adds paths to findings: one more walk over the directories, only if a finding needs a path.
use crate::FsckError;
use crate::checker::Checker;
use crate::file_tree::FileTree;
use crate::item_stream::{Item, Visitor, visit};
use crate::names::{names_of, shown};
use crate::object::ObjectId;
use crate::report::Finding;
use crate::subvolumes::is_left_over;
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

/// Adds a path to every finding about an inode that has one.
pub(crate) fn add(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    let mut wanted: HashSet<ObjectId> =
        checker.report.findings.iter().filter_map(Finding::object).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    for tree in checker.trees.values_mut().filter(|tree| !tree.names.is_sorted()) {
        tree.names.sort_unstable();
    }
    let mut waiting: Vec<ObjectId> = wanted.iter().copied().collect();
    while let Some(object) = waiting.pop() {
        let directory = directory_of(&checker.trees, object);
        waiting.extend(directory.filter(|&directory| wanted.insert(directory)));
    }
    let (subvolumes, found) = (&checker.subvolumes, HashMap::new());
    let mut collector = NameCollector { subvolumes, wanted, found, tree: TREE_FILES };
    for tree in checker.trees.values() {
        collector.tree = tree.id;
        visit(&checker.reader, tree, &mut collector)?;
    }
    for finding in &mut checker.report.findings {
        finding.path = finding.object().and_then(|object| path_of(&collector.found, object));
    }
    Ok(())
}

/// The directory with the first name of an object.
fn directory_of(trees: &BTreeMap<TreeId, FileTree>, object: ObjectId) -> Option<ObjectId> {
    if object.inode != INODE_ROOT {
        let tree = trees.get(&object.subvolume)?;
        return names_of(&tree.names, object.inode.0)
            .first()
            .map(|name| tree.object(name.directory));
    }
    trees.values().find_map(|tree| {
        let mut names = tree.subvolume_names.iter();
        let name = names.find(|name| name.subvolume == object.subvolume)?;
        Some(tree.object(name.directory))
    })
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
