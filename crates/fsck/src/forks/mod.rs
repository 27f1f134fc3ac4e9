//! Forks: subvolumes that began as a snapshot of another one, their *origin*.
//!
//! A fork's tree has nodes and extents of the origin's snapshot: those that were born in its
//! transaction or before. They count for nothing where blocks are counted, since the origin's head
//! or one of its dead lists has them. So each must be one of that snapshot ([`not_of_origin`]).
mod compare;
mod sums;

pub(crate) use compare::{Foreign, not_of_origin};
pub(crate) use sums::Sums;

use crate::checker::Checker;
use crate::report::{Finding, PassId, Severity, Structure};
use crate::trees::ExpectedNode;
use cairn_format::{Generation, Inheritance, Key, Node, Origin, SubvolumeItem, TreeId};
use std::collections::{BTreeMap, BTreeSet};

/// So few forks are read with all that they share with their origins: for more, sums are quicker.
pub(crate) const WHOLE_MAX: usize = 2;

/// What is known of a tree that may be that of a fork.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Lineage {
    /// Of a fork: the transaction that made the snapshot that it began as.
    pub(crate) origin: Option<Generation>,
    /// What was born up to there is counted where others have it: in the origin, or, of a tree that
    /// is being removed, in the newest snapshot.
    counted_elsewhere: Generation,
    /// Nodes of other trees that were made up to then may be in it.
    made_until: Generation,
    /// Its dead lists also have what it gave up of what its origin has.
    pub(crate) notes_inherited: bool,
    /// Of a tree that is being removed: what stands in nodes wholly below this was given up.
    cursor: Key,
}

impl Lineage {
    /// That of a tree whose item can't be read: any node may be that of an origin.
    pub(crate) const UNKNOWN: Self = Self {
        origin: Some(Generation(u64::MAX)),
        counted_elsewhere: Generation(u64::MAX),
        made_until: Generation(u64::MAX),
        notes_inherited: true,
        cursor: Key::MIN,
    };

    /// Of a snapshot of a subvolume with this item, or of its tree while it has a name.
    pub(crate) fn of(item: &SubvolumeItem) -> Self {
        let origin = item.origin.map(|origin| origin.generation);
        let counted_elsewhere = origin.unwrap_or_default();
        let Inheritance { made_until, is_noted: notes_inherited, .. } = item.inheritance();
        Self { origin, counted_elsewhere, made_until, notes_inherited, cursor: Key::MIN }
    }

    /// Of the tree of a subvolume that is being removed; `newest` is its newest snapshot, or 0.
    pub(crate) fn of_dying(item: &SubvolumeItem, newest: Generation) -> Self {
        let of = Self::of(item);
        let counted_elsewhere = of.counted_elsewhere.max(newest);
        Self { counted_elsewhere, cursor: item.cursor, ..of }
    }

    /// Whether what was born then is counted in another tree. A birth may be 0 by damage, and is
    /// then as good as 1, also for the engine.
    pub(crate) fn is_counted_elsewhere(&self, birth: Generation) -> bool {
        birth.max(Generation(1)) <= self.counted_elsewhere
    }

    /// Whether the superblock's number of inodes has those of the tree.
    pub(crate) fn counts_inodes(&self) -> bool {
        self.made_until == Generation(0) && self.cursor == Key::MIN
    }

    /// Whether a fork has what was born then from its origin.
    pub(crate) fn is_of_origin(&self, birth: Generation) -> bool {
        self.origin.is_some_and(|origin| birth <= origin)
    }

    /// Whether the removal of a fork has given up a node with this bound above its keys. Its blocks
    /// may be those of something else.
    pub(crate) fn has_given_up(&self, upper: Option<Key>) -> bool {
        upper.is_some_and(|upper| upper <= self.cursor)
    }

    /// Whether the removal of a fork may have given up a part of a node with keys from `lower` on.
    pub(crate) fn may_have_given_up(&self, lower: Key) -> bool {
        lower < self.cursor
    }

    /// Whether `node` may be in the tree `tree`, by the tree that made it. Ids ascend, so ancestors
    /// have lower ones. Its own nodes may have any age, as for the engine: the origin that its item
    /// names may be wrong. If that is right, an older one is an error of the origin's snapshot, or
    /// is not in that.
    pub(crate) fn accepts(&self, node: &Node, tree: TreeId) -> bool {
        self.accepts_made_by(node.tree(), node.generation(), tree)
    }

    /// As [`Self::accepts`], of a node that the tree `by` made in `generation`.
    pub(crate) fn accepts_made_by(&self, by: TreeId, generation: Generation, tree: TreeId) -> bool {
        by == tree || by.holds_files() && by < tree && generation <= self.made_until
    }
}

/// What in the items of forks and of hidden snapshots contradicts other items or the superblock.
pub(crate) fn problems_of_items(checker: &Checker<'_>, all_known: bool) -> Vec<(TreeId, String)> {
    let has_forks = checker.superblock.features.has_forks();
    let (mut problems, mut origins) = (Vec::new(), BTreeSet::new());
    for (&id, item) in &checker.subvolumes {
        if item.is_headless && !has_forks {
            let problem = "is headless, but the superblock says that there are no forks";
            problems.push((id, problem.to_owned()));
        }
        let has_joining = checker.superblock.features.has_joining();
        let noted = [
            (item.notes_inherited, "notes what it gives up of what it has inherited"),
            (item.is_joined, "was joined"),
        ];
        for (_, what) in noted.into_iter().filter(|(is_so, _)| *is_so && !has_joining) {
            let problem = format!("{what}, but the superblock says that there is no joining");
            problems.push((id, problem));
        }
        let Some(Origin { subvolume, generation }) = item.origin else { continue };
        let newest_list = checker.snapshots.of.get(&id).and_then(|of| of.lists.last_key_value());
        let is_open = newest_list.is_some_and(|(since, _)| *since >= generation);
        if all_known && item.notes_inherited && !item.is_nameless() && !is_open {
            let problem = "is a fork, but has no dead list for what it has inherited";
            problems.push((id, problem.to_owned()));
        }
        origins.insert((subvolume, generation));
        let shown = format!("is a fork of the snapshot of {generation} of subvolume {subvolume}");
        let exists = checker.snapshots.of.get(&subvolume).map(|of| &of.snapshots);
        let exists = exists.is_some_and(|snapshots| snapshots.contains_key(&generation));
        let wrong = [
            (!has_forks, "but the superblock says that there are no forks".to_owned()),
            (subvolume >= id, "but an origin has a lower number".to_owned()),
            (generation > item.generation, format!("but was made in {}", item.generation)),
            (all_known && !exists, "which does not exist".to_owned()),
        ];
        let wrong = wrong.into_iter().filter(|(is_so, _)| *is_so);
        problems.extend(wrong.map(|(_, what)| (id, format!("{shown}, {what}"))));
    }
    for (&id, of) in &checker.snapshots.of {
        let hidden = of.snapshots.iter().filter(|(_, item)| item.is_hidden);
        let useless = hidden.filter(|(at, _)| all_known && !origins.contains(&(id, **at)));
        // One that stands in for the subvolume's tree waits until it can go.
        let useless = useless.filter(|(at, _)| !of.is_nameless || **at != of.boundary());
        problems.extend(
            useless
                .map(|(at, _)| (id, format!("has a hidden snapshot of {at}, but no fork of it"))),
        );
    }
    problems.extend(names_used_twice(checker));
    problems
}

/// Subvolumes that continue each other are a line, and show each other's snapshots. The first one
/// of each subvolume's line; origins have lower ids.
pub(crate) fn firsts_of_lines(items: &BTreeMap<TreeId, SubvolumeItem>) -> BTreeMap<TreeId, TreeId> {
    let mut firsts: BTreeMap<TreeId, TreeId> = BTreeMap::new();
    for (&id, item) in items {
        let origin = item.origin.filter(|_| item.continues).map(|origin| origin.subvolume);
        let first = origin.map(|origin| *firsts.get(&origin).unwrap_or(&origin));
        firsts.insert(id, first.unwrap_or(id));
    }
    firsts
}

/// No two snapshots of a line have one name.
fn names_used_twice(checker: &Checker<'_>) -> Vec<(TreeId, String)> {
    let (mut names, mut problems) = (BTreeMap::new(), Vec::new());
    for (id, first) in firsts_of_lines(&checker.subvolumes) {
        let snapshots = checker.snapshots.of.get(&id).into_iter().flat_map(|of| &of.snapshots);
        for (_, snapshot) in snapshots.filter(|(_, snapshot)| !snapshot.is_hidden) {
            let other = names.insert((first, &snapshot.name[..]), id);
            if let Some(other) = other.filter(|other| *other != id) {
                let name = String::from_utf8_lossy(&snapshot.name);
                let problem = format!("has a snapshot named {name:?}, as subvolume {other} has");
                problems.push((id, format!("{problem}, in whose place it stands")));
            }
        }
    }
    problems
}

/// Once all trees are read: whether each fork has from its origin only what the snapshot has that
/// it began as.
pub(crate) fn check(checker: &mut Checker<'_>) {
    let ids: Vec<TreeId> = checker.subvolumes.keys().copied().collect();
    for id in ids {
        let Some(root) = checker.snapshots.root_of(id) else { continue };
        let newest = checker.superblock.generation;
        if checker.snapshots.of.get(&id).is_some_and(|of| of.is_nameless) {
            // Of a tree that is being removed nobody uses what its snapshots have.
            continue;
        }
        let root = ExpectedNode::root(id, root, newest).with(checker.lineage_of_tree(id));
        let foreign = not_of_origin(checker, &checker.snapshots.of, &root, Generation(0));
        for Foreign { block, problem, .. } in &foreign {
            let problem = format!("tree {id}: {problem}");
            let finding = Finding::new(PassId::Trees, Severity::Error, Structure::Item, problem);
            checker.found(finding.at(block.0).in_subvolume(id));
        }
        if !foreign.is_empty() {
            checker.foreign.insert(id, foreign);
        }
    }
}
