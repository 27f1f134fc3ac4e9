//! The tree of one snapshot, for readers of its files.
use super::{find, shown};
use crate::FsckError;
use crate::checker::Checker;
use crate::readable_tree::ReadableTree;
use crate::reader::Reader;
use crate::report::{Finding, PassId, Severity, Structure};
use crate::trees::{ExpectedNode, children, contradiction};
use cairn_format::{BlockNumber, Key, TreeId};
use std::collections::BTreeMap;

/// Leaves in key order, and keys whose items are lost.
#[derive(Default)]
struct Found {
    leaves: Vec<(Key, BlockNumber)>,
    gaps: Vec<(Key, Option<Key>)>,
    problems: Vec<(BlockNumber, String)>,
}

/// The tree of the subvolume's snapshot with this name, once the trees have been read; and what is
/// damaged in it.
///
/// # Errors
/// There is no such snapshot.
pub(crate) fn readable(
    checker: &Checker<'_>,
    subvolume: TreeId,
    name: &[u8],
) -> Result<(ReadableTree, Vec<Finding>), FsckError> {
    let Some((generation, snapshot)) = find(checker, subvolume, name) else {
        let of = checker.snapshots.of.get(&subvolume).into_iter();
        let names = of.flat_map(|of| of.snapshots.values()).filter(|item| !item.is_hidden);
        let names: Vec<String> = names.map(|item| crate::names::shown(&item.name)).collect();
        return Err(FsckError::NoSnapshot {
            subvolume: subvolume.0,
            name: crate::names::shown(name),
            names: if names.is_empty() { "none".into() } else { names.join(", ") },
        });
    };
    let mut found = Found::default();
    let root = ExpectedNode::root(subvolume, snapshot.root, generation);
    visit(&checker.reader, &root.with(checker.lineage_of(subvolume)), &mut found);
    let Found { leaves, gaps, problems } = found;
    let finding = |(block, problem): (BlockNumber, String)| {
        let problem = format!("{}: {problem}", shown(snapshot, generation));
        let (pass, structure) = (PassId::Snapshots, Structure::Node);
        Finding::new(pass, Severity::Error, structure, problem).in_subvolume(subvolume).at(block.0)
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
