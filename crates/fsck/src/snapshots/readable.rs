//! The tree of one snapshot, for readers of its files.
use super::{shown, shown_by};
use crate::FsckError;
use crate::checker::Checker;
use crate::readable_tree::ReadableTree;
use crate::reader::Reader;
use crate::report::{Finding, PassId, Severity, Structure};
use crate::trees::{ExpectedNode, children, contradiction};
use cairn_format::{BlockNumber, Key, SnapshotItem, TREE_SUBVOLUMES, TreeId};
use std::collections::BTreeMap;

/// Leaves in key order, and keys whose items are lost.
#[derive(Default)]
struct Found {
    leaves: Vec<(Key, BlockNumber)>,
    gaps: Vec<(Key, Option<Key>)>,
    problems: Vec<(BlockNumber, String)>,
}

/// The tree of the snapshot with this name that the subvolume shows, once the trees have been read;
/// and what is damaged in it.
///
/// # Errors
/// There is no such snapshot, or damage hides it.
pub(crate) fn readable(
    checker: &Checker<'_>,
    subvolume: TreeId,
    name: &[u8],
) -> Result<(ReadableTree, Vec<Finding>), FsckError> {
    let mut all = shown_by(checker, subvolume);
    let found = all.find(|(_, _, item)| item.name == name);
    let Some((owner, generation, snapshot)) = found else {
        let text = |(id, _, item): (TreeId, _, &SnapshotItem)| {
            format!("{id}/{}", crate::names::shown(&item.name))
        };
        let names: Vec<String> = shown_by(checker, subvolume).map(text).collect();
        let names = if names.is_empty() { "none".into() } else { names.join(", ") };
        let (subvolume, name) = (subvolume.0, crate::names::shown(name));
        let is_damaged = checker.lost_nodes.iter().any(|lost| lost.concerns(TREE_SUBVOLUMES));
        return Err(match is_damaged {
            true => FsckError::HiddenSnapshot { subvolume, name, names },
            false => FsckError::NoSnapshot { subvolume, name, names },
        });
    };
    let mut found = Found::default();
    let root = ExpectedNode::root(owner, snapshot.root, generation);
    visit(&checker.reader, &root.with(checker.lineage_of(owner)), &mut found);
    let Found { leaves, gaps, problems } = found;
    let finding = |(block, problem): (BlockNumber, String)| {
        let problem = format!("{}: {problem}", shown(snapshot, generation));
        let (pass, structure) = (PassId::Snapshots, Structure::Node);
        Finding::new(pass, Severity::Error, structure, problem).in_subvolume(owner).at(block.0)
    };
    let findings = problems.into_iter().map(finding).collect();
    if gaps.is_empty() {
        return Ok((ReadableTree::of_leaves(leaves), findings));
    }
    let mut items = BTreeMap::new();
    for (_, block) in leaves {
        let leaf = checker.reader.node(block).map_err(|_| FsckError::Changed { block: block.0 })?;
        items.extend(leaf.items().map(|(key, value)| (key, value.to_vec())));
    }
    Ok((ReadableTree::damaged(items, gaps), findings))
}

fn visit(reader: &Reader<'_>, expected: &ExpectedNode, found: &mut Found) {
    let block = expected.pointer.block;
    let node = reader.node(block).and_then(|node| match contradiction(expected, &node) {
        Some(problem) => Err(problem),
        None => Ok(node),
    });
    match node {
        Err(problem) => {
            found.gaps.push((expected.lower, expected.upper));
            found.problems.push((block, problem));
        }
        Ok(node) if node.level() == 0 => found.leaves.push((expected.lower, block)),
        Ok(node) => {
            children(expected, &node).iter().for_each(|child| visit(reader, child, found));
        }
    }
}
