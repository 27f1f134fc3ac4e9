//! Trees in which a repair changes nothing.
use super::forks::Forks;
use super::gather::GatheredTrees;
use super::snapshots::References;
use super::write::file_items;
use crate::FsckError;
use crate::checker::Checker;
use crate::item_stream::{Item, Visitor, visit};
use cairn_format::{BlockRange, DeadRun, Key, NodePointer, Origin, TreeId};
use std::collections::BTreeMap;

/// Trees that stay where they are.
#[derive(Default)]
pub(super) struct KeptTrees {
    pub(super) roots: BTreeMap<TreeId, NodePointer>,
    /// Their own nodes.
    pub(super) nodes: Vec<BlockRange>,
    /// Nodes that forks have inherited, and the snapshots that keep them, as far as these can't be
    /// read completely.
    pub(super) inherited: Vec<(Origin, DeadRun)>,
}

/// Compares the items of a tree with others.
struct Comparison<'i> {
    others: std::slice::Iter<'i, (Key, Vec<u8>)>,
    is_same: bool,
}

impl Visitor for Comparison<'_> {
    fn item(&mut self, item: Item<'_>) -> Result<(), FsckError> {
        let other = self.others.next();
        self.is_same &=
            other.is_some_and(|(key, value)| *key == item.key && value[..] == *item.value);
        Ok(())
    }
    fn leaves_done(&mut self, _done: u64) {}
}

/// The forks that are to have the items that their trees have already. If there are no errors but
/// in snapshots and data, other subvolumes too.
pub(super) fn unchanged(
    checker: &Checker<'_>,
    forks: &Forks,
    references: &References,
    trees: &GatheredTrees,
) -> Result<KeptTrees, FsckError> {
    let mut kept = KeptTrees::default();
    for (&id, wanted) in trees {
        let origin = forks.origin_of(id);
        let Some(tree) = checker.trees.get(&id) else { continue };
        let Some(root) = checker.snapshots.root_of(id).filter(|_| tree.has_root) else { continue };
        let is_whole = !tree.is_dying
            && tree.changes.items.is_empty()
            && !checker.foreign.contains_key(&id)
            // Otherwise nothing else may keep what it has inherited.
            && (!checker.needs_rebuild || origin.is_some_and(|origin| references.is_whole(origin)))
            && !checker.lost_nodes.iter().any(|lost| lost.concerns(id));
        if !is_whole {
            continue;
        }
        let items = file_items(wanted);
        let mut comparison = Comparison { others: items.iter(), is_same: true };
        visit(&checker.reader, tree, &mut comparison)?;
        if comparison.is_same && comparison.others.next().is_none() {
            let lacks_origin = origin.is_some_and(|origin| !references.is_whole(origin));
            kept.add_nodes(checker, forks, id, root, lacks_origin);
            kept.roots.insert(id, root);
        }
    }
    Ok(kept)
}

impl KeptTrees {
    /// Adds the nodes of a tree that it has not inherited, and with `all` the others, too.
    fn add_nodes(
        &mut self,
        checker: &Checker<'_>,
        forks: &Forks,
        id: TreeId,
        root: NodePointer,
        all: bool,
    ) {
        let mut todo = vec![root];
        while let Some(pointer) = todo.pop() {
            let (range, birth) = (BlockRange::node(pointer.block), pointer.generation);
            match forks.source_of(id, birth) {
                Some(_) if !all => continue,
                Some(source) => {
                    self.inherited.push((source, DeadRun { range, birth, is_node: true }));
                }
                None => self.nodes.push(range),
            }
            let Some(level) = pointer.level.checked_sub(1) else { continue };
            let Ok(node) = checker.reader.node(pointer.block) else { continue };
            todo.extend((0..node.count()).map(|index| node.child(index)).map(|child| {
                NodePointer { block: child.block, generation: child.generation, level }
            }));
        }
    }
}
