//! Forks in the [`Model`]: copies of a subvolume, or of a snapshot of it, that go their own way, or
//! take its place.
use crate::model::{Body, Effects, Failure, Model, NewFork, Node, NodeId, Outcome, Value};
use crate::operation::{Name, Path, Subvolume, before_rollback};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The nodes of a subvolume that have names, without names that lead to other subvolumes.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    root: NodeId,
    pub(crate) nodes: BTreeMap<NodeId, Node>,
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
                (Ok(key.0), self.snapshots.get(&key).cloned())
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
        let live = || Arc::new(Tree::of(self, origin));
        let tree = snapshot.as_ref().map_or_else(live, |snapshot| Arc::clone(&snapshot.tree));
        let (root, copies) = self.insert_copy(&tree, parent);
        self.begins.insert(root, (origin, tree));
        // Where the fork's name stands, the fork has the time at which it was made.
        if let Some(copy) = copies.get(&parent).filter(|_| snapshot.is_none()) {
            self.get(*copy).modified_seconds = None;
        }
        self.get(parent).links += 1;
        self.entries(parent).insert(name, root);
        self.entry_changed(parent, effects);
        self.origins.insert(root, origin);
        effects.fork = Some(NewFork {
            nodes: copies.into_iter().map(|(old, new)| (new, old)).collect(),
            snapshot: snapshot.map(|snapshot| snapshot.id),
        });
        Ok(Value::Nothing)
    }

    /// Inserts a copy of a tree as a subvolume in the directory `parent`, without a name. Returns
    /// its root directory, and of each node the copy.
    fn insert_copy(&mut self, tree: &Tree, parent: NodeId) -> (NodeId, BTreeMap<NodeId, NodeId>) {
        let copies: BTreeMap<NodeId, NodeId> =
            tree.nodes.keys().map(|old| (*old, self.new_id())).collect();
        let root = copies[&tree.root];
        for (old, mut node) in tree.nodes.clone() {
            node.subvolume = root;
            if let Body::Directory(entries, above) = &mut node.body {
                entries.values_mut().for_each(|child| *child = copies[child]);
                *above = if old == tree.root { parent } else { copies[above] };
            }
            self.nodes.insert(copies[&old], node);
        }
        (root, copies)
    }

    /// The subvolumes that have had the place of `root`, itself included, the oldest first: they
    /// share the names of their snapshots.
    pub(crate) fn line_of(&self, root: NodeId) -> Vec<NodeId> {
        let first = self.firsts.get(&root).copied().unwrap_or(root);
        let others = self.firsts.iter().filter(|(_, of)| **of == first).map(|(other, _)| *other);
        std::iter::once(first).chain(others).collect()
    }

    /// Those whose snapshots `root` shows: itself, and the ones before it.
    pub(crate) fn continued_by(&self, root: NodeId) -> Vec<NodeId> {
        let mut line = self.line_of(root);
        line.retain(|other| *other <= root);
        line
    }

    /// How many snapshots `root` shows.
    pub(crate) fn shown_snapshots(&self, root: NodeId) -> u32 {
        let shown = self.continued_by(root);
        self.snapshots.keys().filter(|(of, _)| shown.contains(of)).count() as u32
    }

    pub(crate) fn rollback(
        &mut self,
        path: &Path,
        snapshot: Name,
        effects: &mut Effects,
    ) -> Outcome {
        let (parent, name) = self.resolve_parent(path)?;
        let old = *self.entries(parent).get(&name).ok_or(Failure::NotFound)?;
        if !self.is_subvolume(old) {
            return Err(Failure::InvalidArgument);
        }
        let key = self.shown_key(old, snapshot)?;
        let snapshot = self.snapshots[&key].clone();
        let (root, copies) = self.insert_copy(&snapshot.tree, parent);
        let is_free =
            |number: &u64| !self.entries(parent).contains_key(&before_rollback(&name, *number));
        let number = (1..).find(is_free).expect("a directory has an end");
        let old_name = before_rollback(&name, number);
        self.get(parent).links += 1;
        self.entries(parent).insert(old_name, old);
        self.entries(parent).insert(name, root);
        self.entry_changed(parent, effects);
        self.origins.insert(root, key.0);
        let first = self.firsts.get(&old).copied().unwrap_or(old);
        self.firsts.insert(root, first);
        effects.is_durable = true;
        effects.fork = Some(NewFork {
            nodes: copies.into_iter().map(|(old, new)| (new, old)).collect(),
            snapshot: Some(snapshot.id),
        });
        Ok(Value::Count(number))
    }
}
