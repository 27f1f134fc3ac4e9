//! Whether names and counters of forks agree, without reading what they share once for each.
//!
//! The sum of a node ([`Balance`]) is the same in every tree that has it. So the snapshots that
//! forks began as are read once, each node of all of them. Of each fork its own nodes are read, and
//! those on the way to what the log changes: the others' sums are known. A fork whose sum is right
//! is not read as a whole by any pass. Of some others the passes read all, and find out what is
//! wrong. If there are more, something that they share is wrong, as a rule: names and counters of
//! the rest are not compared, and a note says so.
//!
//! Memory: a [`Known`] for each node of these snapshots, some 300 bytes for 16 KiB, and what is
//! kept of inodes and names of [`WRONG_MAX`] forks; [`NAMES_MAX`] names of subvolumes.
use crate::checker::Checker;
use crate::file_tree::{FileCounts, SubvolumeName};
use crate::overlay::TreeChanges;
use crate::reader::NODES_PER_READ;
use crate::report::{Finding, PassId, Severity, Structure};
use crate::snapshots::fingerprint::Subtree;
use crate::snapshots::{Balance, balance_of, lead_to_root};
use crate::subvolumes::is_left_over;
use crate::trees::{ExpectedNode, children, contradiction};
use cairn_format::{
    BlockNumber, DirectoryEntry, EntryTarget, Extent, Generation, ItemKind, Key, Node, Origin,
    SubvolumeItem, TreeId, node::LEVELS_MAX,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;

/// So many forks are read as wholes if their sums don't show that all in them is right.
const WRONG_MAX: usize = 64;

/// So many names of subvolumes are kept of the forks in which all is right.
const NAMES_MAX: usize = 1 << 20;

/// What a node and those below it say.
#[derive(Clone, Copy)]
struct Sum {
    names: Balance,
    counts: FileCounts,
    /// The smallest and the greatest key that is compared.
    keys: Option<(Key, Key)>,
}

impl Sum {
    fn of_node(node: &Node) -> Self {
        let (names, counts) = (Balance::NOTHING, FileCounts::default());
        Self { names, counts, keys: Subtree::of_node(node).keys }
    }

    /// Adds what follows in key order.
    fn add(&mut self, next: Self) {
        self.names.add(next.names);
        self.counts.add(next.counts);
        self.keys = match (self.keys, next.keys) {
            (Some(own), Some(others)) => Some((own.0.min(others.0), own.1.max(others.1))),
            (own, others) => own.or(others),
        };
    }
}

/// A node of a snapshot that forks began as. All nodes below it can be read.
struct Known {
    tree: TreeId,
    generation: Generation,
    level: u8,
    below: Sum,
}

/// What is known of the snapshots that forks began as.
#[derive(Default)]
pub(crate) struct Sums {
    /// By block.
    known: HashMap<u64, Known>,
    /// Sums over the directories of trees in which each leads to the root.
    shapes: HashSet<u64>,
    /// Snapshots in which all is right.
    right: BTreeSet<(TreeId, Generation)>,
    /// Forks that are read as wholes.
    wholes: usize,
    /// Forks that are not compared, without those that are being removed.
    left_out: usize,
    /// Names of subvolumes in forks in which all is right.
    names: usize,
    /// Forks in all of which directories were followed to the root.
    searched: usize,
}

impl Sums {
    /// Finds out which of the trees with these roots are forks in which all is right, and notes
    /// that of them. Few forks are read as wholes.
    pub(crate) fn note(checker: &mut Checker<'_>, roots: &[ExpectedNode]) -> Self {
        let mut this = Self::default();
        let origins = checker.subvolumes.values().filter_map(|item| item.origin);
        let origins: Vec<Origin> = origins.collect();
        if origins.len() <= checker.whole_max.forks {
            return this;
        }
        let origins = origins.iter().map(|origin| (origin.subvolume, origin.generation));
        this.add_snapshots(checker, &origins.collect());
        let mut forks: BTreeMap<TreeId, Vec<&ExpectedNode>> = BTreeMap::new();
        for root in roots.iter().filter(|root| root.tree.holds_files()) {
            let is_fork = |item: &SubvolumeItem| item.origin.is_some();
            if checker.subvolumes.get(&root.tree).is_some_and(is_fork) {
                forks.entry(root.tree).or_default().push(root);
            }
        }
        // Of those that are being removed, nobody uses the names.
        let (named, nameless): (Vec<_>, Vec<_>) = forks.into_iter().partition(|(id, _)| {
            !checker.subvolumes.get(id).is_some_and(|item| item.is_nameless())
        });
        for (id, roots) in named.into_iter().chain(nameless) {
            let summed = match roots[..] {
                [root] => this.of_fork(checker, root),
                // The root tree is damaged.
                _ => None,
            };
            match summed {
                Some((counts, names)) => {
                    let tree = checker.tree(id);
                    (tree.summed, tree.subvolume_names) = (Some(counts), names);
                }
                None => this.add_wrong(checker, id),
            }
        }
        this
    }

    /// A fork without sums is read as a whole, or left out.
    fn add_wrong(&mut self, checker: &mut Checker<'_>, id: TreeId) {
        let is_nameless = checker.subvolumes.get(&id).is_some_and(SubvolumeItem::is_nameless);
        let tree = checker.tree(id);
        (tree.summed, tree.subvolume_names) = (None, Vec::new());
        if self.wholes < WRONG_MAX {
            self.wholes += 1;
        } else {
            tree.is_partial = true;
            self.left_out += usize::from(!is_nameless);
        }
    }

    /// Once all trees are read: forks that have lost nodes of their own are not right. Returns
    /// those of them that are to be read as wholes.
    pub(crate) fn note_lost(&mut self, checker: &mut Checker<'_>) -> BTreeSet<TreeId> {
        let mut wrong: BTreeSet<TreeId> = checker.lost_nodes.iter().map(|lost| lost.tree).collect();
        wrong.retain(|id| checker.trees.get(id).is_some_and(|tree| tree.summed.is_some()));
        wrong.iter().for_each(|id| self.add_wrong(checker, *id));
        wrong.retain(|id| checker.trees.get(id).is_some_and(|tree| !tree.is_partial));
        if self.left_out > 0 {
            let problem = format!(
                "names, counters and changes of the log within {} forks were not compared: their \
                 sums don't show that all is right, and there are too many like these",
                self.left_out
            );
            let (severity, structure) = (Severity::Note, Structure::Item);
            checker.found(Finding::new(PassId::Trees, severity, structure, problem));
        }
        wrong
    }

    /// What is below a node that a fork has from its origin.
    pub(crate) fn shared(&self, expected: &ExpectedNode) -> Subtree {
        match self.known_below(expected) {
            Some(Sum { names, keys, .. }) => Subtree { names, keys, ..Subtree::NOTHING },
            None => Subtree { names: Balance::UNKNOWN, ..Subtree::NOTHING },
        }
    }

    /// Reads the snapshots that forks began as, the oldest first.
    fn add_snapshots(&mut self, checker: &Checker<'_>, origins: &BTreeSet<(TreeId, Generation)>) {
        let mut before: Option<(TreeId, Origin)> = None;
        for &(id, generation) in origins {
            let of = checker.snapshots.of.get(&id).map(|of| &of.snapshots);
            let Some(snapshot) = of.and_then(|of| of.get(&generation)) else { continue };
            let root = ExpectedNode::root(id, snapshot.root, generation);
            let root = root.with(checker.lineage_of(id));
            // The one before of this subvolume, or the one that it began as.
            let of_before = match before {
                Some((of, before)) if of == id => Some(before),
                _ => checker.subvolumes.get(&id).and_then(|item| item.origin),
            };
            let sum = self.of_snapshot(checker, &root);
            if sum.is_some_and(|sum| self.is_right(checker, &root, &sum, of_before, None)) {
                self.right.insert((id, generation));
                before = Some((id, Origin { subvolume: id, generation }));
            }
        }
    }

    /// Whether names and counters agree in a tree, and all its directories lead to the root.
    /// `before` is a snapshot from which it came.
    fn is_right(
        &mut self,
        checker: &Checker<'_>,
        root: &ExpectedNode,
        sum: &Sum,
        before: Option<Origin>,
        changes: Option<&TreeChanges>,
    ) -> bool {
        let is_right =
            |before: &Origin| self.right.contains(&(before.subvolume, before.generation));
        let since = before.filter(is_right).map_or(Generation(0), |before| before.generation);
        let leads = || {
            self.shapes.contains(&sum.names.directories)
                || lead_to_root(&checker.reader, root, since, changes)
        };
        let is_right = sum.names.is_right(false) && leads();
        if is_right {
            self.shapes.insert(sum.names.directories);
        }
        is_right
    }

    fn known_below(&self, expected: &ExpectedNode) -> Option<Sum> {
        let pointer = &expected.pointer;
        let Known { tree, generation, level, below } = self.known.get(&pointer.block.0)?;
        let is_it = (*generation, *level) == (pointer.generation, pointer.level)
            && expected.lineage.accepts_made_by(*tree, *generation, expected.tree);
        let is_inside = below.keys.is_none_or(|(first, last)| {
            expected.lower <= first && expected.upper.is_none_or(|upper| last < upper)
        });
        (is_it && is_inside).then_some(*below)
    }

    /// That of a node of a snapshot; `None` if a node can't be used.
    fn of_snapshot(&mut self, checker: &Checker<'_>, expected: &ExpectedNode) -> Option<Sum> {
        self.of_snapshot_nodes(checker, &[*expected])
    }

    /// The sum of nodes that follow each other. If some can't be used, that of the others is
    /// remembered nevertheless.
    fn of_snapshot_nodes(
        &mut self,
        checker: &Checker<'_>,
        expected: &[ExpectedNode],
    ) -> Option<Sum> {
        let mut sums = Vec::new();
        for chunk in expected.chunks(NODES_PER_READ) {
            let is_unknown = |expected: &&ExpectedNode| {
                // What is an origin's was read there, or is wrong there.
                may_be_read(checker, expected)
                    && !expected.is_of_origin()
                    && !self.known.contains_key(&expected.pointer.block.0)
            };
            let unknown = chunk.iter().filter(is_unknown);
            let unknown: Vec<BlockNumber> = unknown.map(|node| node.pointer.block).collect();
            let read = unknown.iter().copied().zip(checker.reader.nodes(&unknown));
            let mut read: HashMap<BlockNumber, _> = read.collect();
            for expected in chunk {
                sums.push(match read.remove(&expected.pointer.block) {
                    Some(Ok(node)) => self.of_snapshot_node(checker, expected, &node),
                    Some(Err(_)) => None,
                    None if may_be_read(checker, expected) => self.known_below(expected),
                    None => None,
                });
            }
        }
        total(sums)
    }

    fn of_snapshot_node(
        &mut self,
        checker: &Checker<'_>,
        expected: &ExpectedNode,
        node: &Node,
    ) -> Option<Sum> {
        if contradiction(expected, node).is_some() {
            return None;
        }
        let mut below = Sum::of_node(node);
        below.add(match node.level() {
            0 => of_leaf(checker, expected, node, None),
            _ => self.of_snapshot_nodes(checker, &children(expected, node))?,
        });
        let (tree, generation, level) = (node.tree(), node.generation(), node.level());
        self.known.insert(node.address().0, Known { tree, generation, level, below });
        Some(below)
    }

    /// If all is right in a fork: what is in it, and the subvolumes that it names. One that is
    /// being removed has lost the beginning of its items.
    fn of_fork(
        &mut self,
        checker: &Checker<'_>,
        root: &ExpectedNode,
    ) -> Option<(FileCounts, Vec<SubvolumeName>)> {
        let tree = checker.trees.get(&root.tree)?;
        let item = checker.subvolumes.get(&root.tree).filter(|item| !item.is_nameless())?;
        let changes = Some(&tree.changes).filter(|changes| !changes.items.is_empty());
        let (names, replaced) = (Vec::new(), Replaced::default());
        let mut walk = ForkWalk { sums: self, checker, changes, names, replaced };
        let sum = walk.visit(root)?;
        if !walk.keeps_its_blocks(root) {
            return None;
        }
        let mut names = walk.names;
        names.retain(|name| {
            let directory = tree.object(name.directory);
            !is_left_over(&checker.subvolumes, directory, name.subvolume)
        });
        let is_known = |origin: Origin| self.right.contains(&(origin.subvolume, origin.generation));
        if !item.origin.is_some_and(is_known) && !self.shapes.contains(&sum.names.directories) {
            self.searched += 1;
            if self.searched > WRONG_MAX {
                return None;
            }
        }
        let is_right = self.is_right(checker, root, &sum, item.origin, changes);
        self.names += names.len();
        is_right.then_some((sum.counts, names))
    }
}

fn total(sums: impl IntoIterator<Item = Option<Sum>>) -> Option<Sum> {
    let none = Sum { names: Balance::NOTHING, counts: FileCounts::default(), keys: None };
    sums.into_iter().try_fold(none, |mut total, sum| {
        total.add(sum?);
        Some(total)
    })
}

fn may_be_read(checker: &Checker<'_>, expected: &ExpectedNode) -> bool {
    let pointer = &expected.pointer;
    pointer.level < LEVELS_MAX
        && checker.reader.has_node(pointer.block)
        && pointer.generation.0 > 0
        && pointer.generation <= expected.parent_generation
}

/// The sum over a leaf's items, or over those after replay.
fn of_leaf(
    checker: &Checker<'_>,
    expected: &ExpectedNode,
    leaf: &Node,
    changes: Option<&TreeChanges>,
) -> Sum {
    let mut sum = Sum::of_node(leaf);
    let is_usable = |(key, value): (Key, &[u8])| {
        key.kind != ItemKind::Extent as u8
            || Extent::decode(value).is_ok_and(|extent| checker.reader.contains(extent.range()))
    };
    let changes = changes.filter(|changes| expected.is_changed_by(changes));
    let newest = match changes {
        Some(_) => checker.counters.generation_max,
        None => leaf.generation(),
    };
    let items = merged(expected, leaf, changes);
    sum.names = match leaf.count() > 0 && leaf.items().all(is_usable) {
        true => balance_of(checker, expected.lineage, newest, items.iter().copied()),
        false => Balance::UNKNOWN,
    };
    items.iter().for_each(|(key, value)| sum.counts.add_item(*key, value));
    sum
}

/// An extent that a fork has from its origin.
fn shared_extent(
    checker: &Checker<'_>,
    expected: &ExpectedNode,
    key: Key,
    value: &[u8],
) -> Option<Extent> {
    let extent = Extent::decode(value).ok().filter(|_| key.kind == ItemKind::Extent as u8)?;
    let is_shared =
        expected.lineage.is_of_origin(extent.generation) && checker.reader.contains(extent.range());
    is_shared.then_some(extent)
}

/// What files of a fork have from its origin, and the log replaces: the end of each range of
/// blocks, by file, birth and first block.
#[derive(Default)]
struct Replaced(BTreeMap<(u64, Generation, u64), u64>);

impl Replaced {
    fn add(&mut self, inode: u64, extent: &Extent) {
        let Range { start, end } = extent.range().range();
        self.0.insert((inode, extent.generation, start), end);
    }

    /// Takes the blocks of an extent out; whether all were there.
    fn take(&mut self, inode: u64, extent: &Extent) -> bool {
        let (birth, Range { start: mut at, end }) = (extent.generation, extent.range().range());
        while at < end {
            let before = self.0.range(..=(inode, birth, at)).next_back();
            let found = before.map(|(&(of, born, first), &last)| (of, born, first, last));
            let Some((.., first, last)) =
                found.filter(|(of, born, _, last)| (*of, *born) == (inode, birth) && *last > at)
            else {
                return false;
            };
            self.0.remove(&(inode, birth, first));
            if first < at {
                self.0.insert((inode, birth, first), at);
            }
            if last > end {
                self.0.insert((inode, birth, end), last);
            }
            at = last;
        }
        true
    }
}

/// The items of a leaf after replay.
fn merged<'i>(
    expected: &ExpectedNode,
    leaf: &'i Node,
    changes: Option<&'i TreeChanges>,
) -> Vec<(Key, &'i [u8])> {
    let mut items: Vec<(Key, &[u8])> = leaf.items().collect();
    let Some(changes) = changes else { return items };
    items.retain(|(key, _)| !changes.items.contains_key(key));
    let changed = changes.items.range(expected.lower..);
    let changed = changed.take_while(|(key, _)| expected.upper.is_none_or(|upper| **key < upper));
    items.extend(changed.filter_map(|(key, change)| Some((*key, change.value.as_deref()?))));
    items.sort_by_key(|(key, _)| *key);
    items
}

/// Goes through what a fork does not share, or not as it is.
struct ForkWalk<'s, 'c, 'a> {
    sums: &'s Sums,
    checker: &'c Checker<'a>,
    changes: Option<&'c TreeChanges>,
    names: Vec<SubvolumeName>,
    replaced: Replaced,
}

impl ForkWalk<'_, '_, '_> {
    fn visit(&mut self, expected: &ExpectedNode) -> Option<Sum> {
        if !may_be_read(self.checker, expected) {
            return None;
        }
        if expected.is_as_in_origin(self.changes) {
            let below = self.sums.known_below(expected)?;
            if below.names.names_subvolumes {
                self.add_names(expected)?;
            }
            return Some(below);
        }
        let node = self.read(expected)?;
        if node.level() > 0 {
            let mut below = Sum::of_node(&node);
            let children = children(expected, &node);
            below.add(total(children.iter().map(|child| self.visit(child)))?);
            return Some(below);
        }
        self.add_names_in(&merged(expected, &node, self.changes))?;
        self.add_replaced(expected, &node);
        Some(of_leaf(self.checker, expected, &node, self.changes))
    }

    fn add_replaced(&mut self, expected: &ExpectedNode, leaf: &Node) {
        let Some(changes) = self.changes else { return };
        let is_replaced = |(key, _): &(Key, &[u8])| changes.items.contains_key(key);
        for (key, value) in leaf.items().filter(is_replaced) {
            if let Some(extent) = shared_extent(self.checker, expected, key, value) {
                self.replaced.add(key.inode, &extent);
            }
        }
    }

    /// Whether what the log gives a file of the origin's blocks was the file's before.
    fn keeps_its_blocks(&mut self, root: &ExpectedNode) -> bool {
        let changes = self.changes.iter().flat_map(|changes| &changes.items);
        let mut changes = changes.filter_map(|(key, change)| Some((*key, change.value.as_ref()?)));
        let (checker, replaced) = (self.checker, &mut self.replaced);
        changes.all(|(key, value)| {
            let extent = shared_extent(checker, root, key, value);
            extent.is_none_or(|extent| replaced.take(key.inode, &extent))
        })
    }

    fn read(&self, expected: &ExpectedNode) -> Option<Node> {
        let node = self.checker.reader.node(expected.pointer.block).ok()?;
        contradiction(expected, &node).is_none().then_some(node)
    }

    /// The subvolumes that are named below a node that the fork shares.
    fn add_names(&mut self, expected: &ExpectedNode) -> Option<()> {
        if !self.sums.known_below(expected)?.names.names_subvolumes {
            return Some(());
        }
        let node = self.read(expected)?;
        if node.level() > 0 {
            return children(expected, &node).iter().try_for_each(|child| self.add_names(child));
        }
        self.add_names_in(&node.items().collect::<Vec<_>>())
    }

    /// `None` if there are too many.
    fn add_names_in(&mut self, items: &[(Key, &[u8])]) -> Option<()> {
        for (key, value) in items {
            if key.kind == ItemKind::DirectoryEntry as u8
                && let Ok(entry) = DirectoryEntry::decode(value)
                && let EntryTarget::Subvolume(subvolume) = entry.target
            {
                self.names.push(SubvolumeName { subvolume, directory: key.inode });
            }
        }
        (self.sums.names + self.names.len() <= NAMES_MAX).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, blocks: u64, birth: u64) -> Extent {
        Extent {
            start: BlockNumber(start),
            blocks,
            kind: cairn_format::ExtentKind::Unwritten,
            generation: Generation(birth),
            written: Generation(birth),
            checksums: Vec::new(),
        }
    }

    #[test]
    fn a_block_is_given_once_to_the_file_that_had_it() {
        let mut replaced = Replaced::default();
        replaced.add(7, &extent(100, 50, 3));
        replaced.add(7, &extent(150, 10, 3));
        assert!(!replaced.take(8, &extent(120, 10, 3)), "another file");
        assert!(!replaced.take(7, &extent(120, 10, 2)), "another birth");
        assert!(!replaced.take(7, &extent(90, 20, 3)), "more than it had");
        assert!(replaced.take(7, &extent(120, 10, 3)));
        assert!(!replaced.take(7, &extent(129, 2, 3)), "twice");
    }

    #[test]
    fn what_stood_in_two_extents_may_stand_in_one() {
        let mut replaced = Replaced::default();
        replaced.add(7, &extent(100, 50, 3));
        replaced.add(7, &extent(150, 10, 3));
        assert!(replaced.take(7, &extent(140, 15, 3)));
        assert!(replaced.take(7, &extent(100, 40, 3)));
        assert!(replaced.take(7, &extent(155, 5, 3)));
        assert!(replaced.0.is_empty());
    }
}
