//! The items of the subvolumes, against the trees and against the names.
//!
//! [`add_items`] and [`check_items`] belong to pass `Trees`, [`check_names`] to pass `Namespace`.
use crate::checker::{Checker, LostNode};
use crate::file_tree::FileTree;
use crate::forks;
use crate::names::find_inode;
use crate::object::ObjectId;
use crate::report::{Finding, PassId, Severity, Structure};
use crate::snapshots;
use cairn_format::{
    ItemKind, Key, Node, SubvolumeItem, TREE_FILES, TREE_ROOTS, TREE_SUBVOLUMES, TreeId,
};
use std::collections::{BTreeMap, BTreeSet};

fn finding(pass: PassId, structure: Structure, problem: impl Into<String>) -> Finding {
    Finding::new(pass, Severity::Error, structure, problem)
}

/// Decodes the items in a leaf of the tree of subvolumes.
pub(crate) fn add_items(checker: &mut Checker<'_>, leaf: &Node) {
    for (key, value) in leaf.items() {
        let id = TreeId(key.inode);
        let of_snapshots = checker.superblock.features.has_snapshots() && id.holds_files();
        let added = of_snapshots.then(|| snapshots::add_item(checker, key, value)).flatten();
        let problem = if let Some(added) = added {
            match added {
                Ok(()) => continue,
                Err(problem) => problem,
            }
        } else if !id.holds_files() || key != Key::subvolume(id) {
            "this item does not belong into the tree of subvolumes".to_owned()
        } else {
            match SubvolumeItem::decode(value) {
                Ok(item) => {
                    checker.subvolumes.insert(id, item);
                    continue;
                }
                Err(error) => error.problem,
            }
        };
        let finding = finding(PassId::Trees, Structure::Item, format!("{key:?}: {problem}"));
        let finding = finding.at(leaf.address().0);
        if key.kind == ItemKind::Snapshot as u8 {
            checker.snapshots.undecodable += 1;
            checker.found(finding.irretrievable("the snapshot is dropped"));
        } else {
            checker.found(finding);
        }
    }
}

/// Once all trees are read: compares the items with the root items, with the superblock, and with
/// each other. Where the items or roots are damaged, nothing can be said of what is missing.
pub(crate) fn check_items(checker: &mut Checker<'_>) {
    for (id, item) in &checker.subvolumes {
        if let Some(tree) = checker.trees.get_mut(id) {
            tree.is_dying = item.is_nameless();
        }
    }
    let lost = |tree| checker.lost_nodes.iter().any(|lost| lost.concerns(tree));
    let all_known = !lost(TREE_ROOTS) && !lost(TREE_SUBVOLUMES);
    let rootless: Vec<TreeId> = checker
        .subvolumes
        .iter()
        .filter(|(id, item)| !item.is_headless && !has_root(checker, **id))
        .map(|(id, _)| *id)
        .collect();
    // That of the first subvolume has been reported.
    for id in rootless.into_iter().filter(|id| *id != TREE_FILES) {
        checker.lost_nodes.push(LostNode::whole(id));
        if !lost_roots(checker) {
            report(checker, id, "has no tree of files");
        }
    }
    if all_known {
        check_unknown_trees(checker);
    }
    if checker.superblock.features.has_subvolumes() {
        check_numbers(checker, all_known);
        for (id, problem) in problems_of_items(checker, all_known) {
            report(checker, id, problem);
        }
        snapshots::check_items(checker, all_known);
    }
}

fn has_root(checker: &Checker<'_>, id: TreeId) -> bool {
    checker.trees.get(&id).is_some_and(|tree| tree.has_root)
}

fn lost_roots(checker: &Checker<'_>) -> bool {
    checker.lost_nodes.iter().any(|lost| lost.tree == TREE_ROOTS)
}

fn report(checker: &mut Checker<'_>, id: TreeId, problem: impl Into<String>) {
    let problem = format!("subvolume {id} {}", problem.into());
    checker.found(finding(PassId::Trees, Structure::Item, problem));
}

/// A tree of files has a root item and a subvolume item, before the log changes anything in it.
fn check_unknown_trees(checker: &mut Checker<'_>) {
    let has_subvolumes = checker.superblock.features.has_subvolumes();
    let without_item = |id: &TreeId| has_subvolumes && !checker.subvolumes.contains_key(id);
    let trees: Vec<(TreeId, bool)> = checker
        .trees
        .values()
        .filter(|tree| without_item(&tree.id))
        .map(|tree| (tree.id, tree.has_root))
        .collect();
    for (id, has_root) in trees {
        if has_root || id == TREE_FILES {
            report(checker, id, "has no item in the tree of subvolumes");
            continue;
        }
        let Some(tree) = checker.trees.remove(&id) else { continue };
        let first = tree.changes.items.values().map(|change| change.sequence).min().unwrap_or(0);
        let problem = format!("checkpoint {first} changes subvolume {id}, which does not exist");
        checker.found(finding(PassId::Log, Structure::Checkpoint, problem).in_subvolume(id));
    }
}

/// Compares ids with the superblock.
fn check_numbers(checker: &mut Checker<'_>, all_known: bool) {
    let (next, default) = (checker.superblock.next_tree, checker.superblock.default_subvolume);
    let ids: BTreeSet<TreeId> =
        checker.subvolumes.keys().chain(checker.trees.keys()).copied().collect();
    for id in ids.range(next..) {
        report(checker, *id, format!("was never made: the next one is {next}"));
    }
    let problem = match checker.subvolumes.get(&default) {
        None if all_known => "does not exist",
        Some(item) if item.is_nameless() => "is being removed",
        _ => return,
    };
    report(checker, default, format!("is to be shown by default, but {problem}"));
}

/// What in the items contradicts other items or the superblock.
fn problems_of_items(checker: &Checker<'_>, all_known: bool) -> Vec<(TreeId, String)> {
    let (items, superblock) = (&checker.subvolumes, &checker.superblock);
    let first = SubvolumeItem::first(superblock);
    let mut problems = Vec::new();
    let mut numbers: BTreeMap<u32, TreeId> = BTreeMap::new();
    for (&id, item) in items {
        if let Some(other) = numbers.insert(item.number, id) {
            problems.push((id, format!("has number {}, as subvolume {other} has", item.number)));
        }
        if id == TREE_FILES {
            if *item != first {
                problems.push((id, format!("is described as {item:?} instead of {first:?}")));
            }
            continue;
        }
        if item.generation.0 == 0 || item.generation > superblock.generation {
            let newest = superblock.generation;
            let problem = format!("has generation {}; the newest is {newest}", item.generation);
            problems.push((id, problem));
        }
        if item.is_headless && has_root(checker, id) {
            problems.push((id, "is headless, but has a tree of files".into()));
        }
        let has_snapshots = checker.snapshots.of.get(&id).is_some_and(|of| of.boundary().0 > 0);
        if all_known && item.is_headless && !item.is_dying && !has_snapshots {
            problems.push((id, "is headless, but has no snapshot".into()));
        }
        let shares = item.origin.is_some() || item.is_headless || has_snapshots;
        if all_known && item.cursor != Key::MIN && !shares {
            let problem = "has a cursor, but shares nothing with a snapshot";
            problems.push((id, problem.into()));
        }
        if item.is_nameless() || !all_known {
            continue;
        }
        let parent = item.parent;
        match items.get(&parent) {
            None => problems.push((id, format!("is in subvolume {parent}, which does not exist"))),
            Some(above) if above.is_nameless() => {
                problems.push((id, format!("is in subvolume {parent}, which is being removed")));
            }
            Some(_) => {}
        }
    }
    for (id, generation, number) in snapshots::numbers(checker) {
        if let Some(other) = numbers.insert(number, id) {
            let problem = format!(
                "has a snapshot of {generation} with number {number}, which subvolume {other} or \
                 one of its snapshots has too"
            );
            problems.push((id, problem));
        }
    }
    problems.extend(forks::problems_of_items(checker, all_known));
    let circles = circles(items);
    problems.extend(circles.into_iter().map(|id| (id, "is, by its parents, in itself".into())));
    problems
}

/// One subvolume of each circle of parents. Upwards all must lead to the first subvolume.
fn circles(items: &BTreeMap<TreeId, SubvolumeItem>) -> Vec<TreeId> {
    let (mut circles, mut settled) = (Vec::new(), BTreeSet::from([TREE_FILES]));
    for &id in items.keys() {
        let (mut at, mut path) = (id, BTreeSet::new());
        while !settled.contains(&at)
            && let Some(item) = items.get(&at)
        {
            if !path.insert(at) {
                circles.push(at);
                break;
            }
            at = item.parent;
        }
        settled.extend(path);
    }
    circles
}

/// Whether a fork has an entry from its origin that names a subvolume there, and that is still to
/// be removed from the fork.
pub(crate) fn is_left_over(
    items: &BTreeMap<TreeId, SubvolumeItem>,
    directory: ObjectId,
    named: TreeId,
) -> bool {
    let is_home = |item: &SubvolumeItem| {
        (item.parent, item.directory) == (directory.subvolume, directory.inode)
    };
    let may_be = items.get(&directory.subvolume).is_some_and(|item| item.names_others);
    may_be && !items.get(&named).is_some_and(is_home)
}

/// Each subvolume but the first and dying ones has one name, in the directory that its item names;
/// dying ones have none.
pub(crate) fn check_names(checker: &mut Checker<'_>, trees: &BTreeMap<TreeId, FileTree>) {
    let mut names: BTreeMap<TreeId, Vec<ObjectId>> = BTreeMap::new();
    let mut findings = Vec::new();
    for tree in trees.values() {
        for name in &tree.subvolume_names {
            let (id, directory) = (name.subvolume, tree.object(name.directory));
            // That it has no item has been reported.
            let has_tree = trees.get(&id).is_some_and(|tree| tree.has_root);
            let problem = if !checker.subvolumes.contains_key(&id) && !has_tree {
                format!("an entry names subvolume {id}, which does not exist")
            } else {
                names.entry(id).or_default().push(directory);
                if tree.summed.is_some() || find_inode(&tree.inodes, name.directory).is_some() {
                    continue;
                }
                format!("subvolume {id} has a name in a directory that does not exist")
            };
            let problem = finding(PassId::Namespace, Structure::Directory, problem);
            findings.push(problem.of(directory));
        }
    }
    for (&id, item) in checker.subvolumes.iter().filter(|(id, _)| **id != TREE_FILES) {
        let names = names.get(&id).map_or(&[][..], Vec::as_slice);
        let home = ObjectId { subvolume: item.parent, inode: item.directory };
        let problem = match names {
            [] if item.is_nameless() => continue,
            // Not all of its names were read.
            [] if trees.get(&item.parent).is_some_and(|tree| tree.is_partial) => continue,
            _ if item.is_nameless() => format!("is being removed but has {} names", names.len()),
            [directory] if *directory == home => continue,
            [directory] => format!("has its name in {directory} instead of {home}"),
            _ => format!("has {} names instead of 1", names.len()),
        };
        let problem = format!("subvolume {id} {problem}");
        findings.push(
            finding(PassId::Namespace, Structure::Directory, problem).of(ObjectId::root_of(id)),
        );
    }
    findings.into_iter().for_each(|finding| checker.found(finding));
}
