//! Pass `Trees`: every node of every tree, and the blocks that the superblock's state refers to.
//!
//! A node is read only after the pass has claimed its block: it lies within the volume, is aligned,
//! and is referred to for the first time. Levels go down by one, so the walk ends whatever the
//! nodes hold.
use crate::FsckError;
use crate::checker::{Checker, LostNode};
use crate::forks::{self, Lineage, Sums};
use crate::object::ObjectId;
use crate::overlay::TreeChanges;
use crate::reader::{NODES_PER_READ, OUTSIDE};
use crate::report::{Finding, PassId, Severity, Structure};
use crate::snapshots;
use crate::snapshots::dead_runs;
use crate::snapshots::fingerprint::{Fingerprint, Subtree};
use crate::subvolumes;
use cairn_format::{
    BlockNumber, BlockRange, Extent, Generation, InodeNumber, ItemKind, Key, NODE_BLOCKS, Node,
    NodePointer, RootItem, TREE_DEAD, TREE_FILES, TREE_ROOTS, TREE_SUBVOLUMES, TreeId,
    node::LEVELS_MAX,
};
use std::collections::BTreeSet;

/// What the parent says about a node.
#[derive(Clone, Copy)]
pub(crate) struct ExpectedNode {
    pub(crate) tree: TreeId,
    pub(crate) pointer: NodePointer,
    /// Generation of the parent node, of the snapshot, or of the superblock.
    pub(crate) parent_generation: Generation,
    /// Smallest key.
    pub(crate) lower: Key,
    /// A bound above all keys, if there is one.
    pub(crate) upper: Option<Key>,
    pub(crate) lineage: Lineage,
    is_root: bool,
}

impl ExpectedNode {
    pub(crate) fn root(tree: TreeId, pointer: NodePointer, parent_generation: Generation) -> Self {
        let (lower, upper, lineage) = (Key::MIN, None, Lineage::default());
        Self { tree, pointer, parent_generation, lower, upper, lineage, is_root: true }
    }

    /// The same in a tree that may be that of a fork.
    pub(crate) fn with(self, lineage: Lineage) -> Self {
        Self { lineage, ..self }
    }

    /// Whether a fork has the node from its origin.
    pub(crate) fn is_of_origin(&self) -> bool {
        self.lineage.is_of_origin(self.pointer.generation)
    }

    /// Whether the log changes items that are, or would be, in the node or below it.
    pub(crate) fn is_changed_by(&self, changes: &TreeChanges) -> bool {
        let next = changes.items.range(self.lower..).next();
        next.is_some_and(|(key, _)| self.upper.is_none_or(|upper| *key < upper))
    }

    /// Whether all below the node is, after replay, as the fork's origin has it.
    pub(crate) fn is_as_in_origin(&self, changes: Option<&TreeChanges>) -> bool {
        self.is_of_origin() && !changes.is_some_and(|changes| self.is_changed_by(changes))
    }

    /// Whether the node is counted in another tree.
    fn is_counted_elsewhere(&self) -> bool {
        self.lineage.is_counted_elsewhere(self.pointer.generation)
    }
}

/// What is done with the nodes of a tree.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    /// Its items are checked, and so what it shares with other trees is read, too, unless the sums
    /// show that all in it is right.
    Whole,
    /// Its blocks are counted. It is the tree of a snapshot that stands in for its subvolume's,
    /// which pass `Snapshots` checks; or what is left of one, of which nobody uses the items.
    Counting,
}

/// Runs the pass.
pub(crate) fn check(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    checker.snapshots.needs_all_leaves = checker.options.data && !checker.log_is_empty();
    let none = Sums::default();
    let mut walk = TreeWalk { checker, roots: Vec::new(), reading: Reading::Whole, sums: &none };
    let superblock = &walk.checker.superblock;
    let root = ExpectedNode::root(TREE_ROOTS, superblock.root, superblock.generation);
    walk.visit_all(&[root]);
    let mut roots = std::mem::take(&mut walk.roots);
    for root in &roots {
        checker.snapshots.add_root(root.tree, root.pointer);
    }
    let features = checker.superblock.features;
    let of_subvolumes = features.has_subvolumes().then_some(TREE_SUBVOLUMES);
    let of_snapshots = features.has_snapshots().then_some(TREE_DEAD);
    let needed = of_subvolumes.into_iter().chain(of_snapshots).chain([TREE_FILES]);
    for tree in needed.filter(|tree| !roots.iter().any(|root| root.tree == *tree)) {
        checker.lost_nodes.push(LostNode::whole(tree));
        if !checker.has_errors(PassId::Trees) {
            checker.found(finding(Structure::Item, format!("the root tree has no tree {tree}")));
        }
    }
    // What the other trees refer to depends on forks and snapshots.
    let (first, others): (Vec<_>, Vec<_>) =
        roots.drain(..).partition(|root| root.tree == TREE_SUBVOLUMES);
    TreeWalk { checker, roots, reading: Reading::Whole, sums: &none }.visit_all(&first);
    snapshots::note_nameless(checker);
    let others: Vec<ExpectedNode> =
        others.into_iter().map(|root| root.with(checker.lineage_of_tree(root.tree))).collect();
    for root in others.iter().filter(|root| root.tree.holds_files()) {
        checker.tree(root.tree).lineage = root.lineage;
    }
    let mut sums = Sums::note(checker, &others);
    let (roots, reading) = (Vec::new(), Reading::Whole);
    TreeWalk { checker, roots, reading, sums: &sums }.visit_all(&others);
    let wrong = sums.note_lost(checker);
    for root in others.iter().filter(|root| wrong.contains(&root.tree)) {
        let (roots, reading) = (Vec::new(), Reading::Whole);
        TreeWalk { checker, roots, reading, sums: &sums }.read_again(root);
    }
    let counted = roots_of_nameless(checker);
    let (roots, reading) = (Vec::new(), Reading::Counting);
    TreeWalk { checker, roots, reading, sums: &none }.visit_all(&counted);
    subvolumes::check_items(checker);
    forks::check(checker);
    checker.report.statistics.referenced_blocks = checker.referenced.count();
    let allocatable = checker.superblock.geometry.allocatable().blocks;
    checker.report.statistics.free_blocks =
        allocatable.saturating_sub(checker.report.statistics.referenced_blocks);
    Ok(())
}

/// The trees that count for subvolumes without a name: of each that of its newest snapshot, and
/// what is left of the one that was the newest before.
fn roots_of_nameless(checker: &Checker<'_>) -> Vec<ExpectedNode> {
    let mut roots = Vec::new();
    for (&id, item) in checker.subvolumes.iter().filter(|(_, item)| item.is_nameless()) {
        let of = checker.snapshots.of.get(&id);
        if let Some((&made, newest)) = of.and_then(|of| of.snapshots.last_key_value()) {
            let root = ExpectedNode::root(id, newest.root, made);
            roots.push(root.with(checker.lineage_of(id)));
        }
        if let Some(root) = item.dying_root {
            let root = ExpectedNode::root(id, root, checker.superblock.generation);
            roots.push(root.with(checker.lineage_of_tree(id)));
        }
    }
    roots
}

fn finding(structure: Structure, problem: impl Into<String>) -> Finding {
    Finding::new(PassId::Trees, Severity::Error, structure, problem)
}

struct TreeWalk<'c, 'a> {
    checker: &'c mut Checker<'a>,
    /// The roots in the leaves of the root tree.
    roots: Vec<ExpectedNode>,
    reading: Reading,
    sums: &'c Sums,
}

impl TreeWalk<'_, '_> {
    /// Claims, reads and checks nodes, and all nodes below them.
    fn visit_all(&mut self, expected: &[ExpectedNode]) -> Subtree {
        let mut all = Subtree::NOTHING;
        for chunk in expected.chunks(NODES_PER_READ) {
            let claimed: Vec<&ExpectedNode> =
                chunk.iter().filter(|expected| self.claim_node(expected)).collect();
            all.is_whole &= claimed.len() == chunk.len();
            let is_left_out: Vec<bool> =
                claimed.iter().map(|expected| self.is_left_out(expected)).collect();
            let read = claimed.iter().zip(&is_left_out).filter(|(_, is_left_out)| !**is_left_out);
            let read: Vec<BlockNumber> = read.map(|(expected, _)| expected.pointer.block).collect();
            let mut nodes = self.checker.reader.nodes(&read).into_iter();
            for (expected, is_left_out) in claimed.into_iter().zip(is_left_out) {
                let node = if is_left_out { None } else { nodes.next() };
                all.add(match node {
                    None => self.sums.shared(expected),
                    Some(Ok(node)) => self.visit(expected, &node),
                    Some(Err(problem)) => self.unreadable(expected, problem),
                });
            }
        }
        all
    }

    /// Whether another tree has a node, too, so that it is not read here.
    fn is_left_out(&self, expected: &ExpectedNode) -> bool {
        if self.reading == Reading::Counting {
            return expected.is_counted_elsewhere();
        }
        self.checker.trees.get(&expected.tree).is_some_and(|tree| match tree.is_partial {
            true => expected.is_counted_elsewhere(),
            false => tree.summed.is_some() && expected.is_as_in_origin(Some(&tree.changes)),
        })
    }

    /// Finds all leaves of a tree of which some were left out, without those below nodes that it
    /// has lost.
    fn read_again(&mut self, root: &ExpectedNode) {
        let lost = self.checker.lost_nodes.iter().filter(|lost| lost.tree == root.tree);
        let lost: BTreeSet<(Option<BlockNumber>, Key)> =
            lost.map(|lost| (lost.block, lost.keys.0)).collect();
        let tree = self.checker.tree(root.tree);
        (tree.leaves, tree.leaf_bounds) = (Vec::new(), Vec::new());
        let mut nodes = vec![*root];
        // From the left: the last one is the next.
        while let Some(expected) = nodes.pop() {
            let ExpectedNode { pointer: NodePointer { block, .. }, lower, .. } = expected;
            if lost.contains(&(Some(block), lower)) {
                continue;
            }
            let node = self.checker.reader.node(block).ok();
            let node = node.filter(|node| contradiction(&expected, node).is_none());
            let Some(node) = node else { continue };
            if node.level() > 0 {
                nodes.extend(children(&expected, &node).into_iter().rev());
                continue;
            }
            let tree = self.checker.tree(root.tree);
            tree.leaves.push(block);
            tree.leaf_bounds.push(lower);
            if expected.is_as_in_origin(Some(&tree.changes)) {
                self.claim_extents(&expected, &node);
            }
        }
    }

    /// What many forks have from one origin is reported once.
    fn unreadable(&mut self, expected: &ExpectedNode, problem: String) -> Subtree {
        let block = expected.pointer.block.0;
        if expected.is_counted_elsewhere() && self.checker.doubtful_nodes.contains(&block) {
            return self.lose(expected);
        }
        self.damaged(expected, problem)
    }

    fn damaged(&mut self, expected: &ExpectedNode, problem: impl Into<String>) -> Subtree {
        self.checker.found(finding(Structure::Node, problem).at(expected.pointer.block.0));
        self.lose(expected)
    }

    fn lose(&mut self, expected: &ExpectedNode) -> Subtree {
        let is_roots = expected.tree == TREE_ROOTS;
        let lost = LostNode {
            tree: expected.tree,
            keys: if is_roots { (Key::MIN, None) } else { (expected.lower, expected.upper) },
            parent_generation: if is_roots { Generation(0) } else { expected.parent_generation },
            block: Some(expected.pointer.block),
            pointer: (!is_roots).then_some(expected.pointer),
        };
        self.checker.lost_nodes.push(lost);
        self.checker.doubtful_nodes.insert(expected.pointer.block.0);
        Subtree::LOST
    }

    /// Checks a pointer before it is followed.
    fn claim_node(&mut self, expected: &ExpectedNode) -> bool {
        let NodePointer { block, generation, level } = expected.pointer;
        let range = BlockRange::node(block);
        let problem = if level >= LEVELS_MAX {
            Some(format!("the pointer to it says level {level}"))
        } else if !self.checker.reader.has_node(block) {
            Some(OUTSIDE.to_string())
        } else if expected.is_counted_elsewhere() {
            // A snapshot has it, and so somebody else counts it.
            None
        } else {
            self.checker
                .referenced
                .insert(range)
                .map(|block| format!("block {block} is referred to twice"))
        };
        if let Some(problem) = problem {
            self.damaged(expected, format!("tree {}: {problem}", expected.tree));
            return false;
        }
        if generation > expected.parent_generation || generation.0 == 0 {
            // A mount still follows the pointer, so nothing is lost.
            let problem = format!(
                "tree {}: generation {generation} below a parent of generation {}",
                expected.tree, expected.parent_generation
            );
            self.checker.found(finding(Structure::Node, problem).at(block.0));
        }
        true
    }

    fn visit(&mut self, expected: &ExpectedNode, node: &Node) -> Subtree {
        if let Some(problem) = contradiction(expected, node) {
            return self.damaged(expected, format!("tree {}: {problem}", expected.tree));
        }
        let mut subtree = Subtree::of_node(node);
        let is_own = !expected.is_counted_elsewhere();
        if is_own {
            let (range, generation) = (BlockRange::node(node.address()), node.generation());
            self.checker.snapshots.add_reference(expected.tree, range, generation);
            self.checker.note_maker(node, expected.tree);
            self.checker.report.statistics.nodes += 1;
        } else {
            subtree.references = Fingerprint::default();
        }
        if node.level() > 0 {
            subtree.add(self.visit_all(&children(expected, node)));
        } else {
            subtree.add(self.visit_leaf(expected, node));
        }
        if is_own && self.reading != Reading::Counting {
            self.checker.snapshots.remember(expected.tree, node, subtree);
        }
        subtree
    }

    fn visit_leaf(&mut self, expected: &ExpectedNode, node: &Node) -> Subtree {
        let statistics = &mut self.checker.report.statistics;
        if !expected.is_counted_elsewhere() {
            statistics.leaves += 1;
            statistics.leaf_bytes_used += node.used_bytes() as u64;
        }
        if node.count() == 0 && !expected.is_root {
            let problem = format!("tree {}: a leaf without items", expected.tree);
            let empty = Finding::new(PassId::Trees, Severity::Warning, Structure::Node, problem);
            self.checker.found(empty.at(expected.pointer.block.0));
        }
        let mut extents = Subtree::NOTHING;
        match expected.tree {
            TREE_ROOTS => self.visit_root_items(node),
            TREE_SUBVOLUMES if self.checker.superblock.features.has_subvolumes() => {
                subvolumes::add_items(self.checker, node);
            }
            TREE_DEAD if self.checker.superblock.features.has_snapshots() => {
                dead_runs::add_items(self.checker, node);
            }
            id => {
                let has_items = self.reading != Reading::Counting;
                if has_items && self.checker.may_have_files_in(id) {
                    let tree = self.checker.tree(id);
                    tree.leaves.push(node.address());
                    tree.leaf_bounds.push(expected.lower);
                }
                extents = self.claim_extents(expected, node);
                extents.names = snapshots::names_in(self.checker, expected, node);
            }
        }
        let (done, total) = (
            self.checker.report.statistics.nodes * NODE_BLOCKS,
            self.checker.superblock.used_blocks,
        );
        self.checker.progress(PassId::Trees, done, total);
        extents
    }

    fn visit_root_items(&mut self, node: &Node) {
        for (key, value) in node.items() {
            let tree = TreeId(key.inode);
            let has_subvolumes = self.checker.superblock.features.has_subvolumes();
            let may_exist = self.checker.has_items_in(tree);
            let known = may_exist && key == Key::root(tree);
            let problem = match RootItem::decode(value) {
                Ok(item) => {
                    // A tree has one root.
                    if known || !may_exist {
                        self.roots.push(ExpectedNode::root(tree, item.root, node.generation()));
                    }
                    if known && self.checker.may_have_files_in(tree) {
                        self.checker.tree(tree).has_root = true;
                    }
                    (!known).then(|| match has_subvolumes {
                        true => format!("{key:?} in the root tree: there is no such tree"),
                        false => format!(
                            "{key:?} in the root tree: this version knows only tree {TREE_FILES}"
                        ),
                    })
                }
                Err(error) => Some(format!("{key:?}: {}", error.problem)),
            };
            if let Some(problem) = problem {
                self.checker.found(finding(Structure::Item, problem).at(node.address().0));
            }
        }
    }

    /// Marks the blocks of a leaf's extents. Pass `Items` reports an extent that can't be decoded,
    /// unless the log replaces it: then that pass does not see it, but replay does.
    fn claim_extents(&mut self, expected: &ExpectedNode, node: &Node) -> Subtree {
        let id = expected.tree;
        let has_snapshots = self.checker.superblock.features.has_snapshots();
        let mut extents = Subtree::NOTHING;
        for (key, value) in node.items().filter(|(key, _)| key.kind == ItemKind::Extent as u8) {
            let object = ObjectId { subvolume: id, inode: InodeNumber(key.inode) };
            let tree = self.checker.trees.get(&id);
            let extent = match Extent::decode(value) {
                Ok(extent) => extent,
                Err(error) if tree.is_some_and(|tree| tree.changes.items.contains_key(&key)) => {
                    let problem =
                        format!("extent {key:?}, which the log replaces: {}", error.problem);
                    self.checker
                        .found(finding(Structure::Item, problem).at(node.address().0).of(object));
                    extents.is_whole = false;
                    continue;
                }
                Err(error) => {
                    extents.is_whole = false;
                    // Pass `Items` does not go through them.
                    let is_counting = self.reading == Reading::Counting;
                    if tree.map_or(is_counting, |tree| tree.is_partial) {
                        let problem = format!("extent {key:?}: {}", error.problem);
                        self.checker.found(
                            finding(Structure::Item, problem).at(node.address().0).of(object),
                        );
                    }
                    continue;
                }
            };
            let is_own = !expected.lineage.is_counted_elsewhere(extent.generation);
            if has_snapshots && is_own {
                let (range, birth) = (extent.range(), extent.generation);
                self.checker.snapshots.add_reference(id, range, birth);
                extents.references.add(Fingerprint::of(range, birth));
            }
            let problem = if !self.checker.reader.contains(extent.range()) {
                Some(format!("{} blocks at {} lie outside the volume", extent.blocks, extent.start))
            } else if is_own {
                self.checker
                    .referenced
                    .insert(extent.range())
                    .map(|block| format!("block {block} is referred to twice"))
            } else {
                None
            };
            if let Some(problem) = problem {
                let problem = format!("extent {key:?}: {problem}");
                self.checker
                    .found(finding(Structure::Item, problem).at(node.address().0).of(object));
            } else if let Some(tree) = self.checker.trees.get_mut(&id)
                && tree.changes.extent_inodes.contains(&key.inode)
            {
                tree.earlier_extents
                    .entry(key.inode)
                    .or_default()
                    .push((extent.range(), extent.generation));
            }
        }
        if !extents.is_whole {
            self.checker.snapshots.add_uncountable(id);
        }
        extents
    }
}

/// What in `node` contradicts its parent.
pub(crate) fn contradiction(expected: &ExpectedNode, node: &Node) -> Option<String> {
    let pointer = &expected.pointer;
    if !expected.lineage.accepts(node, expected.tree) {
        return Some(format!("belongs to tree {}", node.tree()));
    }
    if node.generation() != pointer.generation {
        return Some(format!(
            "generation {} where the parent expects {}: a write was lost",
            node.generation(),
            pointer.generation
        ));
    }
    if node.level() != pointer.level {
        return Some(format!("level {} instead of {}", node.level(), pointer.level));
    }
    // The first key of an inner node is not compared: its child takes all keys below the second.
    let first = usize::from(node.level() > 0);
    let outside =
        |key: &Key| *key < expected.lower || expected.upper.is_some_and(|upper| *key >= upper);
    let key = (first..node.count()).map(|index| node.key(index)).find(outside)?;
    Some(format!("key {key:?} lies outside {:?}..{:?}", expected.lower, expected.upper))
}

/// What an inner node says about its children. Those that a dying fork has given up are left out.
pub(crate) fn children(expected: &ExpectedNode, node: &Node) -> Vec<ExpectedNode> {
    (0..node.count())
        .map(|index| {
            let child = node.child(index);
            ExpectedNode {
                tree: expected.tree,
                pointer: NodePointer {
                    block: child.block,
                    generation: child.generation,
                    level: node.level() - 1,
                },
                parent_generation: node.generation(),
                lower: if index == 0 { expected.lower } else { node.key(index) },
                upper: if index + 1 < node.count() {
                    Some(node.key(index + 1))
                } else {
                    expected.upper
                },
                lineage: expected.lineage,
                is_root: false,
            }
        })
        .filter(|child| !child.lineage.has_given_up(child.upper))
        .collect()
}
