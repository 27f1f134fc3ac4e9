//! Finds a block that a snapshot's tree has and that is not kept for it, or the other way round.
use super::SubvolumeSnapshots;
use crate::checker::Checker;
use crate::reader::Reader;
use cairn_format::{
    BlockRange, DeadRun, Extent, Generation, ItemKind, Node, NodePointer, TREE_DEAD, TreeId,
};
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashSet};

/// Start, birth, blocks.
type Reference = (u64, u64, u64);

/// Such a block, in words. Reads the trees again.
pub(super) fn example(
    checker: &Checker<'_>,
    id: TreeId,
    of: &SubvolumeSnapshots,
    generation: Generation,
) -> Option<String> {
    let reader = &checker.reader;
    let dead = checker.snapshots.roots.get(&TREE_DEAD)?;
    let head = match of.is_nameless {
        true => &of.snapshots.last_key_value()?.1.root,
        false => checker.snapshots.roots.get(&id)?,
    };
    let lineage = checker.lineage_of(id);
    let is_own = |(_, birth, _): &Reference| !lineage.is_of_origin(Generation(*birth));
    let mut in_tree = Vec::new();
    add_references(reader, of.snapshots.get(&generation)?.root, &mut in_tree);
    let mut kept = Vec::new();
    add_references(reader, *head, &mut kept);
    in_tree.retain(is_own);
    kept.retain(|run| run.1 <= generation.0 && is_own(run));
    let lists = of.lists.range(generation..).filter(|(since, _)| !of.discards(**since));
    let lists: BTreeSet<u64> = lists.map(|(_, list)| *list).collect();
    visit_nodes(reader, *dead, &mut |leaf| {
        let of_lists = leaf.items().filter(|(key, _)| lists.contains(&key.inode));
        for run in of_lists.flat_map(|(_, value)| DeadRun::decode_all(value).unwrap_or_default()) {
            if run.birth <= generation {
                kept.push((run.range.start.0, run.birth.0, run.range.blocks));
            }
        }
    });
    difference(&joined(in_tree), &joined(kept))
}

/// Calls `visit` once with each node below a pointer that can be read.
pub(crate) fn visit_nodes(reader: &Reader<'_>, root: NodePointer, visit: &mut dyn FnMut(&Node)) {
    let (mut todo, mut met) = (vec![root], HashSet::new());
    while let Some(pointer) = todo.pop() {
        if !met.insert(pointer.block) {
            continue;
        }
        let Ok(node) = reader.node(pointer.block) else { continue };
        if node.level() != pointer.level {
            continue;
        }
        visit(&node);
        if let Some(level) = node.level().checked_sub(1) {
            let children = (0..node.count()).map(|index| node.child(index));
            todo.extend(children.map(|child| NodePointer {
                block: child.block,
                generation: child.generation,
                level,
            }));
        }
    }
}

fn add_references(reader: &Reader<'_>, root: NodePointer, references: &mut Vec<Reference>) {
    visit_nodes(reader, root, &mut |node| {
        let range = BlockRange::node(node.address());
        references.push((range.start.0, node.generation().0, range.blocks));
        let extents =
            node.items().filter(|(key, _)| node.level() == 0 && key.kind == ItemKind::Extent as u8);
        references.extend(
            extents
                .filter_map(|(_, value)| Extent::decode(value).ok())
                .map(|extent| (extent.start.0, extent.generation.0, extent.blocks)),
        );
    });
}

/// The same references in the fewest runs, in the order of their blocks.
fn joined(mut references: Vec<Reference>) -> Vec<Reference> {
    references.sort_unstable();
    let mut joined: Vec<Reference> = Vec::new();
    for (start, birth, blocks) in references {
        match joined.last_mut() {
            Some((first, same, length)) if *same == birth && *first + *length == start => {
                *length += blocks;
            }
            _ => joined.push((start, birth, blocks)),
        }
    }
    joined
}

/// The first block at which the two differ.
fn difference(in_tree: &[Reference], kept: &[Reference]) -> Option<String> {
    let only_in_tree = |block: u64, birth: u64| {
        format!("block {block}, born {birth}, is in its tree, but is not kept for it")
    };
    let only_kept = |block: u64, birth: u64| {
        format!("block {block}, born {birth}, is kept for it, but is not in its tree")
    };
    let at = in_tree.iter().zip(kept).take_while(|(one, other)| one == other).count();
    match (in_tree.get(at), kept.get(at)) {
        (None, None) => None,
        (Some((block, birth, _)), None) => Some(only_in_tree(*block, *birth)),
        (None, Some((block, birth, _))) => Some(only_kept(*block, *birth)),
        (Some(one), Some(other)) => Some(match (one.0, one.1).cmp(&(other.0, other.1)) {
            Ordering::Less => only_in_tree(one.0, one.1),
            Ordering::Greater => only_kept(other.0, other.1),
            Ordering::Equal if one.2 > other.2 => only_in_tree(one.0 + other.2, one.1),
            Ordering::Equal => only_kept(one.0 + one.2, one.1),
        }),
    }
}
