//! Adds paths to findings: one more walk over the directories, only if a finding needs a path.
use crate::FsckError;
use crate::checker::Checker;
use crate::data::visit_new_leaves;
use crate::file_tree::FileTree;
use crate::item_stream::{Item, Visitor, visit, visit_leaves};
use crate::names::{NameFacts, names_of, shown};
use crate::object::ObjectId;
use crate::reader::Reader;
use crate::report::Finding;
use crate::snapshots;
use crate::subvolumes::is_left_over;
use crate::trees::ExpectedNode;
use cairn_format::{
    BlockNumber, DirectoryEntry, EntryTarget, Generation, INODE_ROOT, InodeNumber, ItemKind,
    SubvolumeItem, TREE_FILES, TreeId,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

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
/// known, it reads nodes without a name that is wanted once, however many have them.
pub(crate) fn add(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    let mut wanted: HashSet<ObjectId> =
        checker.report.findings.iter().filter_map(Finding::object).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    add_homes(&checker.trees, &mut wanted);
    for tree in checker.trees.values_mut().filter(|tree| !tree.names.is_sorted()) {
        tree.names.sort_unstable();
    }
    let (subvolumes, found) = (&checker.subvolumes, HashMap::new());
    let mut collector = NameCollector { subvolumes, wanted, found, tree: TREE_FILES };
    let ids: BTreeSet<TreeId> = collector.wanted.iter().map(|object| object.subvolume).collect();
    let trees = ids.iter().filter_map(|id| checker.trees.get(id));
    let (forks, trees): (Vec<&FileTree>, Vec<_>) = trees.partition(|tree| tree.lacks_leaves());
    for tree in trees {
        collector.add_names(&checker.reader, tree)?;
    }
    let forks = forks.into_iter().filter_map(|tree| {
        let root = checker.snapshots.root_of(tree.id)?;
        let root = ExpectedNode::root(tree.id, root, checker.superblock.generation);
        Some((tree, root.with(tree.lineage)))
    });
    collector.add_names_of_forks(&checker.reader, &forks.collect::<Vec<_>>())?;
    for finding in &mut checker.report.findings {
        finding.path = finding.object().and_then(|object| path_of(&collector.found, object));
    }
    Ok(())
}

impl NameCollector<'_> {
    /// The names of the wanted objects in a tree of which all leaves are known, and of the
    /// directories above them.
    fn add_names(&mut self, reader: &Reader<'_>, tree: &FileTree) -> Result<(), FsckError> {
        let mut waiting = self.wanted_in(tree);
        while let Some(object) = waiting.pop() {
            let directory = directory_of(tree, &tree.names, object);
            waiting.extend(directory.filter(|&directory| self.wanted.insert(directory)));
        }
        self.tree = tree.id;
        visit(reader, tree, self)
    }

    /// The same in forks of which not all leaves are known, with their roots.
    fn add_names_of_forks(
        &mut self,
        reader: &Reader<'_>,
        forks: &[(&FileTree, ExpectedNode)],
    ) -> Result<(), FsckError> {
        let mut search = LeafSearch::of(self, forks);
        for (tree, root) in forks {
            let mut entries = EntryCollector::default();
            let leaves = search.leaves(reader, root);
            visit_leaves(reader, &leaves, &tree.changes, &mut entries)?;
            entries.0.sort_unstable();
            let wanted = self.wanted_in(tree).into_iter();
            let directories = wanted.filter_map(|object| directory_of(tree, &entries.0, object));
            let directories = directories.map(|directory| directory.inode.0);
            let above = snapshots::ancestors(reader, root, &tree.changes, directories);
            self.wanted.extend(above.into_iter().map(|inode| tree.object(inode)));
        }
        let mut search = LeafSearch::of(self, forks);
        for (tree, root) in forks {
            self.tree = tree.id;
            visit_leaves(reader, &search.leaves(reader, root), &tree.changes, self)?;
        }
        Ok(())
    }

    fn wanted_in(&self, tree: &FileTree) -> Vec<ObjectId> {
        let wanted = self.wanted.iter().filter(|object| object.subvolume == tree.id);
        wanted.copied().collect()
    }
}

/// The directory with the first name of an object in a tree with these names, which are sorted.
fn directory_of(tree: &FileTree, names: &[NameFacts], object: ObjectId) -> Option<ObjectId> {
    let name = names_of(names, object.inode.0).first();
    name.filter(|_| object.inode != INODE_ROOT).map(|name| tree.object(name.directory))
}

/// Finds leaves with names of inodes.
struct LeafSearch {
    inodes: HashSet<u64>,
    /// Nodes without such names below them.
    others: HashSet<u64>,
}

impl LeafSearch {
    /// For the names of all wanted objects of these forks.
    fn of(collector: &NameCollector<'_>, forks: &[(&FileTree, ExpectedNode)]) -> Self {
        let ids: BTreeSet<TreeId> = forks.iter().map(|(tree, _)| tree.id).collect();
        let wanted = collector.wanted.iter().filter(|object| ids.contains(&object.subvolume));
        Self { inodes: wanted.map(|object| object.inode.0).collect(), others: HashSet::new() }
    }

    fn leaves(&mut self, reader: &Reader<'_>, root: &ExpectedNode) -> Vec<BlockNumber> {
        let (mut leaves, Self { inodes, others }) = (Vec::new(), self);
        visit_new_leaves(reader, &[*root], Generation(0), others, &mut |leaf| {
            let is_wanted = |value: &[u8]| match DirectoryEntry::decode(value) {
                Ok(DirectoryEntry { target: EntryTarget::Inode(inode, _), .. }) => {
                    inodes.contains(&inode.0)
                }
                Ok(_) => true,
                Err(_) => false,
            };
            let has_name = leaf
                .items()
                .any(|(key, value)| key.kind == ItemKind::DirectoryEntry as u8 && is_wanted(value));
            leaves.extend(has_name.then_some(leaf.address()));
            has_name
        });
        leaves
    }
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
