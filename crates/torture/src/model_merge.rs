//! Applications of forks in the [`Model`]: a merge of what a fork has, what it began with, and what
//! its origin has now, by the numbers that nodes share with those that they are copies of.
//!
//! The content of a node (data, attributes, xattrs) is one thing, an entry of a directory is
//! another, and so is the set of a node's names. What only one side has changed stands. What both
//! have changed is a conflict, unless they have what the same operation made. Names of nested
//! subvolumes are left out.
//!
//! Invariant: where the model can't know whether a side has changed something, as after a
//! truncation to the length that a file has, it says so ([`Merged::Unknown`]), and nobody asks for
//! the application.
use crate::contents::Contents;
use crate::model::{Applied, Body, Effects, Failure, Model, Node, NodeId, Outcome, Value};
use crate::model_forks::Tree;
use crate::operation::Path;
use std::collections::{BTreeMap, BTreeSet};

/// Number of the directory, and name.
type Key = (NodeId, Vec<u8>);

/// One of the three states, by numbers.
struct Side<'a> {
    nodes: BTreeMap<NodeId, &'a Node>,
    entries: BTreeMap<Key, NodeId>,
    /// The node of each number.
    ids: BTreeMap<NodeId, NodeId>,
}

impl<'a> Side<'a> {
    fn of(tree: &'a Tree) -> Self {
        let nodes = || tree.nodes.values();
        let entries = nodes().flat_map(|node| {
            let entries = node.entries().into_iter().flatten();
            let number = |id: &NodeId| tree.nodes[id].number;
            entries.map(move |(name, id)| ((node.number, name.clone()), number(id)))
        });
        Self {
            nodes: nodes().map(|node| (node.number, node)).collect(),
            entries: entries.collect(),
            ids: tree.nodes.iter().map(|(id, node)| (node.number, *id)).collect(),
        }
    }
}

/// Whether something is what it was.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    Some,
    Unknown,
}

/// What an application does.
#[derive(Default)]
struct Plan {
    entries: BTreeMap<Key, NodeId>,
    /// The nodes that there will be, and whether they get what the fork has.
    nodes: BTreeMap<NodeId, bool>,
    /// How many entries change.
    names: u64,
}

impl Plan {
    fn changes_anything(&self) -> bool {
        self.names > 0 || self.nodes.values().any(|taken| *taken)
    }
}

enum Merged {
    Conflicts,
    Unknown,
    Done(Plan),
}

/// What becomes of an application, as far as the model knows it beforehand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Prediction {
    Conflicts,
    ChangesNothing,
    ChangesSomething,
}

fn looks_the_same(one: &Node, other: &Node) -> bool {
    let same_content = match (&one.body, &other.body) {
        (Body::Regular(one), Body::Regular(other)) => one.same_as(other),
        _ => true,
    };
    let xattrs = |node: &Node| -> Vec<(Vec<u8>, u64)> {
        node.xattrs.iter().map(|(name, value)| (name.clone(), value.hash)).collect()
    };
    let times = (one.modified_seconds, other.modified_seconds);
    let same_times =
        one.is_directory() || !matches!(times, (Some(one), Some(other)) if one != other);
    same_content
        && same_times
        && (one.mode, one.uid, one.gid) == (other.mode, other.uid, other.gid)
        && xattrs(one) == xattrs(other)
}

fn change(before: Option<&&Node>, after: Option<&&Node>) -> Change {
    match (before, after) {
        (None, None) => Change::None,
        (Some(before), Some(after)) if before.touched == after.touched => Change::None,
        (Some(before), Some(after)) if looks_the_same(before, after) => Change::Unknown,
        _ => Change::Some,
    }
}

/// The root directory of a tree has the number `root`; `nested` are the names in the origin that
/// lead to other subvolumes.
fn merge(base: &Side, fork: &Side, origin: &Side, root: NodeId, nested: &BTreeSet<Key>) -> Merged {
    let mut plan = Plan::default();
    let mut is_unknown = false;
    let numbers = base.nodes.keys().chain(fork.nodes.keys()).chain(origin.nodes.keys());
    for number in numbers.collect::<BTreeSet<_>>() {
        let [was, their, our] = [base, fork, origin].map(|side| side.nodes.get(number));
        let taken = match (change(was, their), change(was, our)) {
            (Change::None, _) => false,
            (Change::Some, Change::None) => true,
            (Change::Some, Change::Some) => match (their, our) {
                (None, None) => continue,
                (Some(their), Some(our)) if their.touched == our.touched => false,
                (Some(their), Some(our)) if looks_the_same(their, our) => {
                    is_unknown = true;
                    false
                }
                _ => return Merged::Conflicts,
            },
            _ => {
                is_unknown = true;
                false
            }
        };
        if if taken { their } else { our }.is_some() {
            plan.nodes.insert(*number, taken);
        }
    }
    let keys = base.entries.keys().chain(fork.entries.keys()).chain(origin.entries.keys());
    // What the entries name and named that one side alone has changed.
    let (mut theirs, mut ours) = (BTreeSet::new(), BTreeSet::new());
    for key in keys.collect::<BTreeSet<_>>() {
        let all = [base, fork, origin].map(|side| side.entries.get(key).copied());
        let [was, their, our] = all;
        if their != was && their.is_some() && nested.contains(key) {
            return Merged::Conflicts;
        }
        let becomes = match () {
            () if their == was || their == our => our,
            () if our == was => their,
            () => return Merged::Conflicts,
        };
        if their != our {
            let changed = if their == was { &mut ours } else { &mut theirs };
            changed.extend(all.into_iter().flatten());
        }
        plan.names += u64::from(becomes != our);
        plan.entries.extend(becomes.map(|number| (key.clone(), number)));
    }
    let is_gone = |directory: &NodeId| {
        !fork.nodes.contains_key(directory) && base.nodes.contains_key(directory)
    };
    let is_torn = theirs.intersection(&ours).next().is_some();
    if is_torn || nested.iter().any(|(directory, _)| is_gone(directory)) {
        return Merged::Conflicts;
    }
    // What may have changed in the origin, or not, may be kept without a name.
    if is_unknown {
        return Merged::Unknown;
    }
    let node = |number: &NodeId| origin.nodes.get(number).or(fork.nodes.get(number)).copied();
    if is_sound(&plan, root, &node) { Merged::Done(plan) } else { Merged::Conflicts }
}

/// All nodes have names, each name is reached from the root directory, and each directory once.
fn is_sound<'a>(plan: &Plan, root: NodeId, node: &dyn Fn(&NodeId) -> Option<&'a Node>) -> bool {
    let (mut seen, mut next, mut reached) = (BTreeSet::from([root]), vec![root], 0);
    while let Some(directory) = next.pop() {
        for (_, child) in plan.entries.range((directory, Vec::new())..(directory + 1, Vec::new())) {
            reached += 1;
            if !plan.nodes.contains_key(child) {
                return false;
            }
            let is_new = seen.insert(*child);
            if node(child).is_some_and(Node::is_directory) {
                if !is_new {
                    return false;
                }
                next.push(*child);
            }
        }
    }
    reached == plan.entries.len() && plan.nodes.keys().all(|number| seen.contains(number))
}

impl Model {
    /// The fork with the root directory `root`: what it began with, and the subvolume that gets its
    /// changes.
    fn application(&self, root: NodeId) -> Result<(&Tree, NodeId), Failure> {
        let mut root = root;
        let mut none = Failure::InvalidArgument;
        let is_there = |root: &NodeId| self.nodes.get(root).is_some_and(|node| !node.is_stale);
        // If what it came from is gone, it counts as a fork of what that was a fork of.
        while let Some((origin, tree)) = self.begins.get(self.firsts.get(&root).unwrap_or(&root)) {
            if let Some(target) = self.line_of(*origin).into_iter().rfind(is_there) {
                return Ok((tree, target));
            }
            (root, none) = (*origin, Failure::NotFound);
        }
        Err(none)
    }

    /// The names in a subvolume that lead to other ones.
    fn nested_in(&self, tree: &Tree, root: NodeId) -> BTreeSet<Key> {
        let names = tree.nodes.keys().flat_map(|directory| {
            let entries = self.nodes[directory].entries().into_iter().flatten();
            let nested = entries.filter(|(_, child)| self.nodes[child].subvolume != root);
            nested.map(|(name, _)| (self.nodes[directory].number, name.clone()))
        });
        names.collect()
    }

    fn merged(&self, root: NodeId, began: &Tree, target: NodeId) -> Merged {
        let (fork, origin) = (Tree::of(self, root), Tree::of(self, target));
        let nested = self.nested_in(&origin, target);
        let number = self.nodes[&target].number;
        let [base, theirs, ours] = [began, &fork, &origin].map(Side::of);
        let merged = merge(&base, &theirs, &ours, number, &nested);
        let Merged::Done(plan) = &merged else { return merged };
        // What has been there before may still be removed.
        let new = plan.nodes.keys().filter(|number| !ours.nodes.contains_key(number));
        let comes_again = |number: &NodeId| self.given.contains(&(target, *number));
        if new.copied().any(|number| comes_again(&number)) { Merged::Unknown } else { merged }
    }

    /// What becomes of the application of the fork with the root directory `root`; nothing, if the
    /// model does not know it.
    pub(crate) fn predict_application(&self, root: NodeId) -> Option<Prediction> {
        let (began, target) = self.application(root).ok()?;
        // Of what has no path that the client uses, times are not known.
        if !self.paths().iter().any(|(_, id)| *id == target) {
            return None;
        }
        match self.merged(root, began, target) {
            Merged::Conflicts => Some(Prediction::Conflicts),
            Merged::Unknown => None,
            Merged::Done(plan) if plan.changes_anything() => Some(Prediction::ChangesSomething),
            Merged::Done(_) => Some(Prediction::ChangesNothing),
        }
    }

    /// Whether the model knows what becomes of the application of what has this path.
    pub(crate) fn knows_application(&self, path: &Path) -> bool {
        let known = |root| {
            !self.is_subvolume(root)
                || self.application(root).is_err()
                || self.predict_application(root).is_some()
        };
        self.resolve(path).map_or(true, known)
    }

    pub(crate) fn apply_fork(&mut self, path: &Path, effects: &mut Effects) -> Outcome {
        let root = self.resolve(path)?;
        if !self.is_subvolume(root) {
            return Err(Failure::InvalidArgument);
        }
        let (began, target) = self.application(root)?;
        let Merged::Done(plan) = self.merged(root, began, target) else {
            return Err(Failure::Conflicts);
        };
        if plan.changes_anything() {
            self.execute(root, target, &plan, effects);
        }
        Ok(Value::Count(plan.names))
    }

    fn execute(&mut self, root: NodeId, target: NodeId, plan: &Plan, effects: &mut Effects) {
        let (fork, origin) = (Tree::of(self, root), Tree::of(self, target));
        let (theirs, ours) = (Side::of(&fork), Side::of(&origin));
        let mut ids = ours.ids.clone();
        let mut applied = Applied::default();
        for number in plan.nodes.iter().filter(|(_, taken)| **taken).map(|(number, _)| number) {
            let source = theirs.ids[number];
            let their = self.nodes[&source].clone();
            let id = match ours.ids.get(number) {
                Some(id) => {
                    let began = ours.nodes[number].contents();
                    let node = self.get(*id);
                    if let (Body::Regular(contents), Some(their)) =
                        (&mut node.body, their.contents())
                    {
                        *contents = their.applied_to(began.unwrap_or(&Contents::default()));
                    }
                    if !node.is_directory() {
                        node.modified_seconds = their.modified_seconds;
                    }
                    (node.mode, node.uid, node.gid) = (their.mode, their.uid, their.gid);
                    (node.xattrs, node.touched) = (their.xattrs, their.touched);
                    *id
                }
                None => {
                    let body = match their.body {
                        Body::Directory(..) => Body::Directory(BTreeMap::new(), target),
                        Body::Regular(contents) => {
                            Body::Regular(contents.applied_to(&Contents::default()))
                        }
                        other => other,
                    };
                    let id = self.new_id();
                    let new = Node { body, links: 0, handles: 0, subvolume: target, ..their };
                    self.nodes.insert(id, new);
                    self.given.insert((target, *number));
                    *ids.entry(*number).or_insert(id)
                }
            };
            effects.metadata.insert(id);
            applied.nodes.insert(id, source);
        }
        self.name_applied(target, plan, &ids, effects);
        let gone = ours.ids.iter().filter(|(number, _)| !plan.nodes.contains_key(number));
        for id in gone.map(|(_, id)| *id) {
            self.get(id).links = 0;
            effects.metadata.insert(id);
            self.reap(id);
        }
        (effects.is_durable, effects.applied) = (true, Some(applied));
    }

    /// Gives all nodes of a subvolume their names and link counts.
    fn name_applied(
        &mut self,
        target: NodeId,
        plan: &Plan,
        ids: &BTreeMap<NodeId, NodeId>,
        effects: &mut Effects,
    ) {
        let mut links: BTreeMap<NodeId, u32> = BTreeMap::new();
        let mut above: BTreeMap<NodeId, NodeId> = BTreeMap::new();
        for ((directory, _), number) in &plan.entries {
            *links.entry(ids[number]).or_default() += 1;
            above.insert(ids[number], ids[directory]);
        }
        let is_directory = |model: &Self, id: &NodeId| model.nodes[id].is_directory();
        for id in ids.values().copied().collect::<Vec<_>>() {
            let number = self.nodes[&id].number;
            let Some(old) = self.nodes[&id].entries().cloned() else {
                let new = links.get(&id).copied().unwrap_or(0);
                if self.nodes[&id].links != new {
                    self.get(id).links = new;
                    effects.metadata.insert(id);
                }
                continue;
            };
            let mut new = old.clone();
            new.retain(|_, child| self.nodes[child].subvolume != target);
            let named = plan.entries.range((number, Vec::new())..(number + 1, Vec::new()));
            new.extend(named.map(|((_, name), child)| (name.clone(), ids[child])));
            if new != old {
                self.entry_changed(id, effects);
            }
            // What has lost or got a name has another time, also if it has as many as before.
            for (one, other) in [(&old, &new), (&new, &old)] {
                let changed = one.iter().filter(|(name, child)| other.get(*name) != Some(*child));
                effects.metadata.extend(changed.map(|(_, child)| *child));
            }
            let subdirectories = new.values().filter(|child| is_directory(self, child)).count();
            let node = self.get(id);
            node.links = 2 + subdirectories as u32;
            if let Body::Directory(entries, parent) = &mut node.body {
                *entries = new;
                *parent = above.get(&id).copied().unwrap_or(*parent);
            }
        }
    }
}
