//! Compares a tree of a fork with the snapshot that the fork began as.
//!
//! Of each tree it reads what the other one does not have: below a node that both have, all is the
//! same. First the fork's own nodes are read, and what they have from the origin is noted; then it
//! is looked up in the snapshot.
use crate::checker::Checker;
use crate::reader::Reader;
use crate::snapshots::fingerprint::mixed;
use crate::snapshots::{SubvolumeSnapshots, visit_nodes};
use crate::trees::{ExpectedNode, children, contradiction};
use cairn_format::{
    BlockNumber, BlockRange, Extent, Generation, ItemKind, Key, Node, NodePointer, TreeId,
    node::LEVELS_MAX,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Something in a fork that it can't have from its origin.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Foreign {
    /// The node of the fork that refers to it.
    pub(crate) block: BlockNumber,
    pub(crate) problem: String,
    /// The key of the extent, unless it is a node.
    pub(crate) extent: Option<Key>,
}

impl Foreign {
    fn node(block: BlockNumber, problem: String) -> Self {
        Self { block, problem, extent: None }
    }

    fn extent(leaf: BlockNumber, key: Key, problem: &str) -> Self {
        Self { block: leaf, problem: format!("extent {key:?}: {problem}"), extent: Some(key) }
    }
}

/// An extent, or a part of one, that a leaf of the fork has from the origin.
struct SharedExtent {
    range: BlockRange,
    birth: Generation,
    /// A sum over its data and kind; less that of the parts that were found.
    sum: u64,
    /// Blocks that were not found.
    missing: u64,
    key: Key,
    leaf: BlockNumber,
}

/// What a fork's own nodes have from the origin.
#[derive(Default)]
struct Shared {
    /// By block: the pointer, the node that has it, and whether it was found.
    nodes: HashMap<u64, (NodePointer, BlockNumber, bool)>,
    /// Sorted by their blocks; they don't overlap.
    extents: Vec<SharedExtent>,
    /// How many of all of these were not found.
    missing: usize,
}

/// What the fork's tree below `root`, or that of a snapshot of the fork, has from the origin and is
/// not in the snapshot that the fork began as, or is there once and in the fork twice. Of its own
/// nodes only those born after `since` are read.
pub(crate) fn not_of_origin(
    checker: &Checker<'_>,
    snapshots: &BTreeMap<TreeId, SubvolumeSnapshots>,
    root: &ExpectedNode,
    since: Generation,
) -> Vec<Foreign> {
    let origin = checker.subvolumes.get(&root.tree).and_then(|item| item.origin);
    let Some(origin) = origin else { return Vec::new() };
    let of = snapshots.get(&origin.subvolume);
    let snapshot = of.and_then(|of| of.snapshots.get(&origin.generation));
    // That it is missing has been reported.
    let Some(snapshot) = snapshot else { return Vec::new() };
    let (mut shared, mut problems) = gather(&checker.reader, root, since);
    let of_origin = ExpectedNode::root(origin.subvolume, snapshot.root, origin.generation);
    let of_origin = of_origin.with(checker.lineage_of(origin.subvolume));
    let all_read = look_up(&checker.reader, &of_origin, &mut shared);
    if all_read && shared.missing > 0 {
        let shown = format!(
            "the snapshot of {} of subvolume {}, which it began as",
            origin.generation, origin.subvolume
        );
        problems.extend(missing(&checker.reader, snapshot.root, &shared, &shown));
    }
    problems
}

fn is_readable(reader: &Reader<'_>, pointer: &NodePointer) -> bool {
    pointer.level < LEVELS_MAX && reader.has_node(pointer.block)
}

/// The node, if nothing contradicts it.
fn read(reader: &Reader<'_>, expected: &ExpectedNode) -> Option<Node> {
    let pointer = &expected.pointer;
    let node = is_readable(reader, pointer).then(|| reader.node(pointer.block))?.ok()?;
    contradiction(expected, &node).is_none().then_some(node)
}

fn extents(leaf: &Node) -> impl Iterator<Item = (Key, Extent)> {
    let items = leaf.items().filter(|(key, _)| key.kind == ItemKind::Extent as u8);
    items.filter_map(|(key, value)| Some((key, Extent::decode(value).ok()?)))
}

/// Whether none of its extents is hidden by damage.
fn has_readable_extents(leaf: &Node) -> bool {
    let mut items = leaf.items().filter(|(key, _)| key.kind == ItemKind::Extent as u8);
    items.all(|(_, value)| Extent::decode(value).is_ok())
}

/// A sum over the blocks from `skip` on, of what they hold.
fn sum_of(extent: &Extent, skip: u64, blocks: u64) -> u64 {
    let of_block = |index: u64| {
        let data = extent.checksums.get(index as usize).copied().unwrap_or(0);
        let data = u64::from(data) | (extent.kind as u64) << 32;
        mixed((extent.start.0 + index) ^ mixed(data))
    };
    (skip..skip + blocks).map(of_block).fold(0, u64::wrapping_add)
}

/// What the nodes below `root` that are the fork's own have from the origin; and what of it they
/// have twice.
fn gather(reader: &Reader<'_>, root: &ExpectedNode, since: Generation) -> (Shared, Vec<Foreign>) {
    let (mut shared, mut problems) = (Shared::default(), Vec::new());
    let (mut todo, mut met) = (vec![(*root, root.pointer.block)], HashSet::new());
    while let Some((expected, parent)) = todo.pop() {
        let pointer = expected.pointer;
        if expected.is_of_origin() {
            if shared.nodes.insert(pointer.block.0, (pointer, parent, false)).is_some() {
                problems.push(Foreign::node(parent, twice(pointer.block.0)));
            }
        } else if pointer.generation > since
            && met.insert(pointer.block)
            && let Some(node) = read(reader, &expected)
        {
            if node.level() > 0 {
                let below = children(&expected, &node);
                todo.extend(below.into_iter().map(|child| (child, node.address())));
                continue;
            }
            let of_origin = |(_, extent): &(Key, Extent)| {
                expected.lineage.is_of_origin(extent.generation) && reader.contains(extent.range())
            };
            shared.extents.extend(extents(&node).filter(of_origin).map(|(key, extent)| {
                SharedExtent {
                    range: extent.range(),
                    birth: extent.generation,
                    sum: sum_of(&extent, 0, extent.blocks),
                    missing: extent.blocks,
                    key,
                    leaf: node.address(),
                }
            }));
        }
    }
    shared.extents.sort_by_key(|extent| extent.range.start);
    let mut end = 0;
    shared.extents.retain(|extent| {
        let first = extent.range.start.0;
        let is_alone = first >= end;
        if !is_alone {
            problems.push(Foreign::extent(extent.leaf, extent.key, &twice(first)));
        }
        end = end.max(extent.range.end().0);
        is_alone
    });
    shared.missing = shared.nodes.len() + shared.extents.len();
    (shared, problems)
}

fn twice(block: u64) -> String {
    format!("block {block} is referred to twice in a fork")
}

/// Looks everything up in the snapshot with this root. Returns whether all could be read that had
/// to be.
fn look_up(reader: &Reader<'_>, root: &ExpectedNode, shared: &mut Shared) -> bool {
    let (mut todo, mut met, mut all_read) = (vec![*root], HashSet::new(), true);
    while let Some(expected) = todo.pop() {
        let pointer = expected.pointer;
        if shared.missing == 0 {
            break;
        }
        if let Some((wanted, _, is_found)) = shared.nodes.get_mut(&pointer.block.0)
            && *wanted == pointer
        {
            if !std::mem::replace(is_found, true) {
                shared.missing -= 1;
            }
        } else if met.insert(pointer.block) {
            match read(reader, &expected) {
                None => all_read = false,
                Some(node) if node.level() > 0 => todo.extend(children(&expected, &node)),
                Some(node) => {
                    all_read &= has_readable_extents(&node);
                    extents(&node).for_each(|(_, extent)| shared.find(&extent));
                }
            }
        }
    }
    all_read
}

impl Shared {
    /// Notes that the snapshot has this extent.
    fn find(&mut self, of_origin: &Extent) {
        let range = of_origin.range();
        let first = self.extents.partition_point(|extent| extent.range.end() <= range.start);
        for extent in &mut self.extents[first..] {
            let start = extent.range.start.0.max(range.start.0);
            let end = extent.range.end().0.min(range.end().0);
            if start >= end {
                break;
            }
            if extent.birth == of_origin.generation && extent.missing >= end - start {
                let sum = sum_of(of_origin, start - range.start.0, end - start);
                extent.sum = extent.sum.wrapping_sub(sum);
                extent.missing -= end - start;
                self.missing -= usize::from(extent.missing == 0 && extent.sum == 0);
            }
        }
    }
}

/// The problem of each that was not found. `shown` is the snapshot with this root, in words.
fn missing(
    reader: &Reader<'_>,
    snapshot: NodePointer,
    shared: &Shared,
    shown: &str,
) -> Vec<Foreign> {
    // What is below shared nodes was not read: is it there?
    let missing = |extent: &&SharedExtent| (extent.missing, extent.sum) != (0, 0);
    let lost: BTreeSet<u64> =
        shared.extents.iter().filter(missing).flat_map(|extent| extent.range.range()).collect();
    let mut known = HashSet::new();
    visit_nodes(reader, snapshot, &mut |node| {
        known.insert((node.address().0, node.generation()));
        let of_leaf = extents(node).filter(|_| node.level() == 0);
        for (_, extent) in of_leaf.filter(|(_, extent)| reader.contains(extent.range())) {
            let blocks = lost.range(extent.range().range());
            known.extend(blocks.map(|block| (*block, extent.generation)));
        }
    });
    let nodes = shared.nodes.values().filter(|(.., is_found)| !is_found);
    let nodes = nodes.map(|(pointer, parent, _)| {
        let (block, born) = (pointer.block, pointer.generation);
        let problem = match known.contains(&(block.0, born)) {
            true => twice(block.0),
            false => format!("the node at block {block}, born {born}, is not in {shown}"),
        };
        Foreign::node(*parent, problem)
    });
    let extents = shared.extents.iter().filter(missing);
    let extents = extents.map(|extent| {
        let (SharedExtent { range, birth, key, .. }, start) = (extent, extent.range.start);
        let is_known = range.range().all(|block| known.contains(&(block, *birth)));
        let problem = if extent.missing == 0 {
            format!("{} blocks at {start} differ from what they are in {shown}", range.blocks)
        } else if is_known {
            twice(start.0)
        } else {
            format!("{} blocks at {start}, born {birth}, are not in {shown}", range.blocks)
        };
        Foreign::extent(extent.leaf, *key, &problem)
    });
    let mut problems: Vec<Foreign> = nodes.chain(extents).collect();
    problems.sort();
    problems
}
