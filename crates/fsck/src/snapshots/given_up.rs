//! Damaged snapshots that a repair drops.
//!
//! Of most a part can be read, so they stay until the user gives them up. One of which nothing can
//! be read goes in any case.
use super::shown;
use crate::checker::Checker;
use crate::report::DamagedSnapshot;
use crate::trees::{ExpectedNode, children, contradiction};
use cairn_format::{Generation, SnapshotItem, TREE_FILES, TreeId, node::LEVELS_MAX};
use std::collections::BTreeSet;

/// Those to drop, if the user has given these up: `[ID/]NAME`, or `ID/` for all damaged ones of a
/// subvolume. Paths among them are those of files.
pub(crate) fn to_drop(checker: &Checker<'_>, names: &[String]) -> BTreeSet<(TreeId, Generation)> {
    let drops = |(id, generation, item): &(TreeId, Generation, &SnapshotItem)| {
        let root = ExpectedNode::root(*id, item.root, *generation);
        names.iter().any(|argument| is_named(argument, *id, item))
            || !has_leaf(checker, &root.with(checker.lineage_of(*id)))
    };
    let named = spoilt(checker).filter(|(_, _, item)| !item.is_hidden);
    named.filter(drops).map(|(id, generation, _)| (id, generation)).collect()
}

/// The damaged snapshots, those without a name among them.
fn spoilt<'c>(
    checker: &'c Checker<'_>,
) -> impl Iterator<Item = (TreeId, Generation, &'c SnapshotItem)> {
    checker.snapshots.spoilt.iter().filter_map(|&(id, generation)| {
        let item = checker.snapshots.of.get(&id)?.snapshots.get(&generation)?;
        Some((id, generation, item))
    })
}

/// The same for the report.
pub(crate) fn damaged(checker: &Checker<'_>) -> Vec<DamagedSnapshot> {
    let damaged = |(id, generation, item): (TreeId, Generation, &SnapshotItem)| DamagedSnapshot {
        subvolume: id.0,
        name: (!item.is_hidden).then(|| crate::names::shown(&item.name)),
        shown: shown(item, generation),
    };
    spoilt(checker).map(damaged).collect()
}

fn is_named(argument: &str, id: TreeId, item: &SnapshotItem) -> bool {
    let (of, name) = match argument.split_once('/') {
        Some((of, name)) => (of.parse().ok().map(TreeId), name),
        None => (Some(TREE_FILES), argument),
    };
    let is_all = name.is_empty() && argument.ends_with('/');
    of == Some(id) && (is_all || name == crate::names::shown(&item.name))
}

/// Whether a leaf of the tree can be read.
fn has_leaf(checker: &Checker<'_>, expected: &ExpectedNode) -> bool {
    let (reader, pointer) = (&checker.reader, &expected.pointer);
    if pointer.level >= LEVELS_MAX || !reader.has_node(pointer.block) {
        return false;
    }
    match reader.node(pointer.block) {
        Ok(node) if contradiction(expected, &node).is_some() => false,
        Ok(node) if node.level() == 0 => true,
        Ok(node) => children(expected, &node).iter().any(|child| has_leaf(checker, child)),
        Err(_) => false,
    }
}
