//! Pass `Snapshots`: the trees of the snapshots.
//!
//! Trees share nodes with each other and with their subvolume's, so each node is read once and
//! remembered: the pass takes time for the different nodes, whatever the number of snapshots. Of a
//! volume with few snapshots, each is then checked as a whole, like a subvolume. Of one with many,
//! names and counters are compared by sums (`balance`), and only those are checked as a whole for
//! which these do not show that all is right, and the first one of each subvolume.
use super::balance::{Balance, lead_to_root};
use super::fingerprint::{Fingerprint, Subtree};
use super::{KnownNode, SnapshotLeaf, SubvolumeSnapshots, balance_of, compare, dead_runs};
use crate::FsckError;
use crate::checker::Checker;
use crate::file_tree::FileTree;
use crate::forks::{self, Lineage};
use crate::reader::{NODES_PER_READ, OUTSIDE, Reader};
use crate::report::{Finding, PassId, Severity, Structure};
use crate::trees::{ExpectedNode, children, contradiction};
use crate::{items, namespace};
use cairn_format::{
    BlockNumber, DirectoryEntry, Extent, Generation, INODE_ORPHANS, InodeItem, ItemKind, Key, Node,
    NodePointer, Origin, SnapshotItem, TREE_SUBVOLUMES, TreeId, XattrItem, decode_orphan,
    node::LEVELS_MAX,
};
use std::collections::HashSet;

/// For so many snapshots a block is named that contradicts the others.
const EXAMPLES_MAX: usize = 16;

/// Runs the pass.
pub(crate) fn check(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    let all = std::mem::take(&mut checker.snapshots.of);
    let total: usize = all.values().map(|of| of.snapshots.len()).sum();
    let all_known = !checker.lost_nodes.iter().any(|lost| lost.concerns(TREE_SUBVOLUMES));
    let (mut done, mut examples) = (0, EXAMPLES_MAX);
    // Sums over the directories of trees in which each leads to the root.
    let mut shapes = HashSet::new();
    for (&id, of) in &all {
        let mut kept = Fingerprint::default();
        // The snapshot before this one, or the origin, if nothing is wrong with it.
        let mut before = checker.subvolumes.get(&id).and_then(|item| item.origin);
        for (&generation, snapshot) in &of.snapshots {
            let of_this = of.kept.get(&generation).copied().unwrap_or_default();
            kept.add(of_this);
            let lineage = checker.lineage_of(id);
            let mut walk = SnapshotWalk { checker, id, generation, snapshot, found: false };
            let root = ExpectedNode::root(id, snapshot.root, generation).with(lineage);
            let below = walk.visit_all(&[root]);
            let (mut is_spoilt, mut is_miscounted) = (!below.is_whole, false);
            if is_spoilt && !walk.found {
                walk.report(None, Structure::Node, "nodes or items of its tree are damaged");
            }
            let is_known = is_known(checker, id, of);
            if below.is_whole && is_known && below.references != kept {
                let example = match examples.checked_sub(1) {
                    Some(left) => {
                        examples = left;
                        compare::example(checker, id, of, generation)
                    }
                    None => None,
                };
                let (in_tree, kept) = (below.references.blocks, kept.blocks);
                let mut problem = format!(
                    "its tree refers to {in_tree} blocks, and {kept} are kept for it: they are \
                     not the same"
                );
                if let Some(example) = example {
                    problem = format!("{problem}; {example}");
                }
                let mut walk = SnapshotWalk { checker, id, generation, snapshot, found: false };
                walk.report(None, Structure::Item, problem);
                // New dead lists repair that.
                checker.needs_rebuild = true;
                is_miscounted = true;
            }
            let are_many = checker.snapshots.are_many;
            let of_before = before.filter(|before| {
                let key = (before.subvolume, before.generation);
                let of = all.get(&key.0).map(|of| &of.snapshots);
                let exists = of.is_some_and(|of| of.contains_key(&key.1));
                are_many && exists && !checker.snapshots.damaged.contains(&key)
            });
            let since = of_before.map_or(Generation(0), |before| before.generation);
            before = Some(Origin { subvolume: id, generation });
            if below.is_whole {
                let problems = forks::not_of_origin(checker, &all, &root, since);
                let mut walk = SnapshotWalk { checker, id, generation, snapshot, found: false };
                for forks::Foreign { block, problem, .. } in problems {
                    walk.report(Some(block), Structure::Item, problem);
                }
                is_spoilt |= walk.found;
            }
            // What a fork's snapshot has from the origin can be read if that snapshot can.
            let of_origin = checker.subvolumes.get(&id).and_then(|item| item.origin);
            let is_there = |origin: &Origin| {
                let of = all.get(&origin.subvolume);
                of.is_some_and(|of| of.snapshots.contains_key(&origin.generation))
            };
            let lacks_origin = of_origin.is_some_and(|origin| !is_there(&origin));
            let lacks_inherited = lacks_origin
                || of_origin.is_some_and(|origin| {
                    let damaged = &checker.snapshots.damaged;
                    damaged.contains(&(origin.subvolume, origin.generation))
                });
            if lacks_origin && all_known {
                let problem = "nothing keeps what it has from the fork's origin";
                let mut walk = SnapshotWalk { checker, id, generation, snapshot, found: false };
                walk.report(None, Structure::Item, problem);
            }
            let is_damaged = is_spoilt || is_miscounted || lacks_inherited;
            let is_readable = of_origin.is_none() || !is_damaged;
            let is_right = |checker: &Checker<'_>| {
                of_before.is_some()
                    && is_known
                    && !is_damaged
                    && below.names.is_right(snapshot.names_none)
                    && (shapes.contains(&below.names.directories)
                        || lead_to_root(&checker.reader, &root, since, None))
            };
            if below.is_whole && is_readable && !is_right(checker) {
                is_spoilt |= check_whole(checker, id, generation, snapshot)?;
            }
            if is_spoilt {
                checker.snapshots.spoilt.insert((id, generation));
            }
            if is_spoilt || is_damaged {
                checker.snapshots.damaged.insert((id, generation));
            } else {
                shapes.insert(below.names.directories);
            }
            done += 1;
            checker.progress(PassId::Snapshots, done, total as u64);
        }
    }
    checker.snapshots.of = all;
    Ok(())
}

/// Whether everything is known that is kept for the snapshots of a subvolume.
fn is_known(checker: &Checker<'_>, id: TreeId, of: &SubvolumeSnapshots) -> bool {
    let is_lost = checker.lost_nodes.iter().any(|lost| lost.concerns(id));
    !is_lost && !of.is_uncountable && dead_runs::are_known(checker)
}

/// The beginning of each finding about a snapshot.
pub(crate) fn shown(snapshot: &SnapshotItem, generation: Generation) -> String {
    if snapshot.is_hidden {
        return format!("hidden snapshot (of generation {generation})");
    }
    let name = crate::names::shown(&snapshot.name);
    format!("snapshot \"{name}\" (of generation {generation})")
}

struct SnapshotWalk<'c, 'a> {
    checker: &'c mut Checker<'a>,
    id: TreeId,
    generation: Generation,
    snapshot: &'c SnapshotItem,
    /// Whether something was reported about this snapshot.
    found: bool,
}

impl SnapshotWalk<'_, '_> {
    fn report(
        &mut self,
        block: Option<BlockNumber>,
        structure: Structure,
        problem: impl Into<String>,
    ) {
        self.found = true;
        let problem = format!("{}: {}", shown(self.snapshot, self.generation), problem.into());
        let finding = Finding::new(PassId::Snapshots, Severity::Error, structure, problem);
        let finding = finding.in_subvolume(self.id);
        self.checker.found(match block {
            Some(block) => finding.at(block.0),
            None => finding,
        });
    }

    /// Checks nodes, and all nodes below them.
    fn visit_all(&mut self, expected: &[ExpectedNode]) -> Subtree {
        let mut all = Subtree::NOTHING;
        for chunk in expected.chunks(NODES_PER_READ) {
            let (mut below, mut unknown) = (vec![None; chunk.len()], Vec::new());
            for (expected, below) in chunk.iter().zip(&mut below) {
                let known = self.checker.snapshots.known.get(&expected.pointer.block.0).copied();
                *below = Some(match (self.pointer_problem(expected), known) {
                    (Some(problem), _) => self.lost(expected, problem),
                    // It is read in the origin's snapshot.
                    (None, known) if expected.is_of_origin() => inherited(expected, known),
                    (None, Some(known)) => self.visit_known(expected, &known),
                    (None, None) => {
                        unknown.push(*expected);
                        continue;
                    }
                });
            }
            let addresses: Vec<BlockNumber> =
                unknown.iter().map(|expected| expected.pointer.block).collect();
            let mut read = self.checker.reader.nodes(&addresses).into_iter();
            for (expected, below) in chunk.iter().zip(below) {
                let below = below.or_else(|| {
                    Some(match read.next()? {
                        Ok(node) => self.visit(expected, &node),
                        Err(problem) => self.lost(expected, problem),
                    })
                });
                all.add(below.unwrap_or(Subtree::LOST));
            }
        }
        all
    }

    fn lost(&mut self, expected: &ExpectedNode, problem: impl Into<String>) -> Subtree {
        self.report(Some(expected.pointer.block), Structure::Node, problem);
        Subtree::LOST
    }

    /// What is wrong with a pointer, before it is followed.
    fn pointer_problem(&self, expected: &ExpectedNode) -> Option<String> {
        let (block, generation) = (expected.pointer.block, expected.pointer.generation);
        let parent = expected.parent_generation;
        if expected.pointer.level >= LEVELS_MAX {
            Some(format!("the pointer to it says level {}", expected.pointer.level))
        } else if !self.checker.reader.has_node(block) {
            Some(OUTSIDE.to_string())
        } else if generation > parent || generation.0 == 0 {
            Some(format!("generation {generation} below a parent of generation {parent}"))
        } else {
            None
        }
    }

    fn visit_known(&mut self, expected: &ExpectedNode, known: &KnownNode) -> Subtree {
        let pointer = &expected.pointer;
        let KnownNode { tree, generation, level, below } = *known;
        let is_expected = expected.lineage.accepts_made_by(tree, generation, expected.tree);
        if !is_expected || (generation, level) != (pointer.generation, pointer.level) {
            let problem = format!(
                "a node of tree {tree}, generation {generation} and level {level} where the \
                 parent expects tree {}, generation {} and level {}",
                expected.tree, pointer.generation, pointer.level
            );
            return self.lost(expected, problem);
        }
        if is_outside(expected, known) {
            let (lower, upper) = (expected.lower, expected.upper);
            return self.lost(expected, format!("a key lies outside {lower:?}..{upper:?}"));
        }
        below
    }

    fn visit(&mut self, expected: &ExpectedNode, node: &Node) -> Subtree {
        if let Some(problem) = contradiction(expected, node) {
            return self.lost(expected, problem);
        }
        self.checker.note_maker(node, self.id);
        let mut below = Subtree::of_node(node);
        if node.level() > 0 {
            below.add(self.visit_all(&children(expected, node)));
        } else {
            below.add(self.visit_leaf(expected.lineage, node));
        }
        // Damage is reported once, for the first snapshot that has it.
        self.checker.snapshots.insert_known(node, below);
        below
    }

    fn visit_leaf(&mut self, lineage: Lineage, leaf: &Node) -> Subtree {
        let mut extents = Subtree::NOTHING;
        extents.names = match self.checker.snapshots.are_many {
            true => balance_of(self.checker, lineage, leaf.generation(), leaf.items()),
            false => Balance::UNKNOWN,
        };
        for (key, value) in leaf.items() {
            match checked_item(&self.checker.reader, key, value, leaf.generation()) {
                Ok(Some(extent)) if lineage.is_of_origin(extent.generation) => {}
                Ok(Some(extent)) => {
                    extents.references.add(Fingerprint::of(extent.range(), extent.generation));
                }
                Ok(None) => {}
                Err(problem) => {
                    let problem = format!("{key:?}: {problem}");
                    self.report(Some(leaf.address()), Structure::Item, problem);
                    extents.is_whole = false;
                }
            }
        }
        let (subvolume, generation, block) = (self.id, self.generation, leaf.address());
        self.checker.snapshots.leaves.push(SnapshotLeaf { subvolume, generation, block });
        extents
    }
}

/// What a fork has from its origin. In the fork it counts for nothing; but its names do.
fn inherited(expected: &ExpectedNode, known: Option<KnownNode>) -> Subtree {
    let NodePointer { generation, level, .. } = expected.pointer;
    let is_it = |known: &KnownNode| {
        let is_same = (known.generation, known.level) == (generation, level);
        is_same && known.below.is_whole && !is_outside(expected, known)
    };
    let names = known.filter(is_it).map_or(Balance::UNKNOWN, |known| known.below.names);
    Subtree { names, ..Subtree::NOTHING }
}

/// Whether a key does not belong where the node is expected.
fn is_outside(expected: &ExpectedNode, known: &KnownNode) -> bool {
    known.below.keys.is_some_and(|(first, last)| {
        first < expected.lower || expected.upper.is_some_and(|upper| last >= upper)
    })
}

/// Decodes an item of a tree of files in a leaf of this generation. Returns it if it is an extent.
fn checked_item(
    reader: &Reader<'_>,
    key: Key,
    value: &[u8],
    generation: Generation,
) -> Result<Option<Extent>, String> {
    let kind = ItemKind::from_u8(key.kind).filter(|kind| kind.is_of_files());
    let kind = kind.ok_or("an item of this kind does not belong here")?;
    if (kind == ItemKind::Orphan) != (key.inode == INODE_ORPHANS.0) {
        return Err("an item of this kind does not belong here".into());
    }
    let decoded = match kind {
        ItemKind::Inode => InodeItem::decode(value).map(drop),
        ItemKind::DirectoryEntry => DirectoryEntry::decode(value).map(drop),
        ItemKind::Xattr => XattrItem::decode(value).map(drop),
        ItemKind::Orphan => decode_orphan(value).map(drop),
        ItemKind::Extent => {
            let extent = Extent::decode(value).map_err(|error| error.problem)?;
            if !reader.contains(extent.range()) {
                let (blocks, start) = (extent.blocks, extent.start);
                return Err(format!("{blocks} blocks at {start} lie outside the volume"));
            }
            if extent.generation.0 == 0 || extent.written > generation {
                return Err(format!(
                    "an extent of generation {}, written in {}, in a leaf of {generation}",
                    extent.generation, extent.written
                ));
            }
            return Ok(Some(extent));
        }
        _ => Ok(()),
    };
    decoded.map(|()| None).map_err(|error| error.problem)
}

/// Checks inodes, names and counters of a snapshot whose nodes are whole. Returns whether there are
/// errors.
fn check_whole(
    checker: &mut Checker<'_>,
    id: TreeId,
    generation: Generation,
    snapshot: &SnapshotItem,
) -> Result<bool, FsckError> {
    let mut tree = FileTree::new(id);
    tree.lineage = checker.lineage_of(id);
    let root = ExpectedNode::root(id, snapshot.root, generation).with(tree.lineage);
    let mut nodes = vec![root];
    // From the left: the last one is the next.
    while let Some(expected) = nodes.pop() {
        let ExpectedNode { pointer, lower, .. } = expected;
        // What a fork has from its origin was not compared with the pointers of this tree.
        let node = checker
            .reader
            .node(pointer.block)
            .and_then(|node| contradiction(&expected, &node).map_or(Ok(node), Err));
        let node = match node {
            Ok(node) => node,
            Err(problem) => {
                let problem = format!("{}: {problem}", shown(snapshot, generation));
                let (pass, structure) = (PassId::Snapshots, Structure::Node);
                let finding = Finding::new(pass, Severity::Error, structure, problem);
                checker.found(finding.at(pointer.block.0).in_subvolume(id));
                return Ok(true);
            }
        };
        if node.level() > 0 {
            nodes.extend(children(&expected, &node).into_iter().rev());
        } else {
            tree.leaves.push(pointer.block);
            tree.leaf_bounds.push(lower);
        }
    }
    let (statistics, fork_inodes) = (checker.report.statistics, checker.fork_inodes);
    let before = checker.report.errors;
    checker.in_snapshot = Some(shown(snapshot, generation));
    items::check_snapshot(checker, &mut tree, generation)?;
    if checker.report.errors == before {
        namespace::check_snapshot(checker, &mut tree);
    }
    if snapshot.names_none && !tree.subvolume_names.is_empty() {
        let problem = "it says that no entry in it names a subvolume, but one does";
        let (pass, structure) = (PassId::Snapshots, Structure::Directory);
        let finding = Finding::new(pass, Severity::Error, structure, problem);
        checker.found(finding.in_subvolume(id));
    }
    checker.in_snapshot = None;
    (checker.report.statistics, checker.fork_inodes) = (statistics, fork_inodes);
    Ok(checker.report.errors > before)
}
