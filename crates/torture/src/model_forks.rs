//! Forks in the [`Model`]: copies of a subvolume, or of a snapshot of it, that go their own way.
use crate::model::{Body, Effects, Failure, Model, NewFork, Node, NodeId, Outcome, Value};
use crate::operation::{Name, Path, Subvolume};
use std::collections::BTreeMap;

/// The nodes of a subvolume that have names, without names that lead to other subvolumes.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    root: NodeId,
    nodes: BTreeMap<NodeId, Node>,
}

impl Tree {
    /// Of the subvolume with the root directory `root` as it is.
    pub(crate) fn of(model: &Model, root: NodeId) -> Self {
        let (mut nodes, mut todo) = (BTreeMap::new(), vec![root]);
        while let Some(id) = todo.pop() {
            let mut node = model.nodes[&id].clone();
            node.handles = 0;
            if let Body::Directory(entries, _) = &mut node.body {
                entries.retain(|_, child| model.nodes[child].subvolume == root);
                let is_directory = |child: &&NodeId| model.nodes[child].is_directory();
                node.links = 2 + entries.values().filter(is_directory).count() as u32;
                todo.extend(entries.values());
            }
            nodes.insert(id, node);
        }
        Self { root, nodes }
    }
}

impl Model {
    pub(crate) fn fork(
        &mut self,
        of: &Subvolume,
        snapshot: Option<Name>,
        to: &Path,
        effects: &mut Effects,
    ) -> Outcome {
        if *of == Subvolume::Root && !self.knows_all(0) {
            return Err(Failure::InvalidArgument);
        }
        let origin = self.root_of(of);
        let (origin, snapshot) = match snapshot {
            Some(name) => {
                let key = self.snapshot_key(of, name)?;
                (origin, self.snapshots.get(&key).cloned())
            }
            // Of a path it is the last thing to be noticed that it is no subvolume.
            None if origin == Err(Failure::InvalidArgument) => (origin, None),
            None => (Ok(origin?), None),
        };
        let (parent, name) = self.place(to)?;
        Self::expect_name(&name)?;
        let origin = origin?;
        self.expect_directory(parent)?;
        if self.entries(parent).contains_key(&name) {
            return Err(Failure::Exists);
        }
        let live = || Tree::of(self, origin);
        let tree = snapshot.as_ref().map_or_else(live, |snapshot| (*snapshot.tree).clone());
        let copies: BTreeMap<NodeId, NodeId> =
            tree.nodes.keys().map(|old| (*old, self.new_id())).collect();
        let root = copies[&tree.root];
        for (old, mut node) in tree.nodes {
            node.subvolume = root;
            if let Body::Directory(entries, above) = &mut node.body {
                entries.values_mut().for_each(|child| *child = copies[child]);
                *above = if old == tree.root { parent } else { copies[above] };
            }
            self.nodes.insert(copies[&old], node);
        }
        // Where the fork's name stands, the fork has the time at which it was made.
        if let Some(copy) = copies.get(&parent).filter(|_| snapshot.is_none()) {
            self.get(*copy).modified_seconds = None;
        }
        self.get(parent).links += 1;
        self.entries(parent).insert(name, root);
        self.entry_changed(parent, effects);
        self.origins.insert(root, origin);
        effects.is_durable = true;
        effects.fork = Some(NewFork {
            nodes: copies.into_iter().map(|(old, new)| (new, old)).collect(),
            snapshot: snapshot.map(|snapshot| snapshot.id),
        });
        Ok(Value::Nothing)
    }
}
