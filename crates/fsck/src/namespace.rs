//! Pass `Namespace`: every inode has the number of names that it states, every directory is
//! reachable from the root of its subvolume, and only inodes without a name are orphans; every
//! subvolume has its name.
//!
//! A dying subvolume has lost some of its items, so only what is left of them is checked.
use crate::FsckError;
use crate::checker::Checker;
use crate::file_tree::FileTree;
use crate::names::{InodeFacts, NameFacts, find_inode, names_of};
use crate::report::{Finding, PassId, Severity, Structure};
use crate::subvolumes;
use cairn_format::{FileType, INODE_ROOT, OrphanKind};

/// Inodes between two reports of progress.
const PROGRESS_INODES: usize = 4096;

/// Runs the pass.
pub(crate) fn check(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    let mut trees = checker.take_trees();
    let inodes_all = trees.values().map(|tree| tree.inodes.len()).sum();
    let mut inodes_done = 0;
    for tree in trees.values_mut() {
        tree.names.sort_unstable();
        if !tree.is_dying && !tree.lacks_leaves() {
            check_tree(checker, tree, (inodes_done, inodes_all));
        }
        inodes_done += tree.inodes.len();
    }
    subvolumes::check_names(checker, &trees);
    checker.trees = trees;
    Ok(())
}

/// The names of a snapshot's tree, after pass `Items`.
pub(crate) fn check_snapshot(checker: &mut Checker<'_>, tree: &mut FileTree) {
    tree.names.sort_unstable();
    let inodes = tree.inodes.len();
    check_tree(checker, tree, (0, inodes));
}

/// The names of one tree. Before it, `done` inodes of `all` were checked.
fn check_tree(checker: &mut Checker<'_>, tree: &FileTree, (done, all): (usize, usize)) {
    check_entries(checker, tree);
    for (index, facts) in tree.inodes.iter().enumerate() {
        if index.is_multiple_of(PROGRESS_INODES) {
            checker.progress(PassId::Namespace, (done + index) as u64, all as u64);
        }
        for problem in problems_of(facts, names_of(&tree.names, facts.inode)) {
            let structure = if facts.file_type == FileType::Directory {
                Structure::Directory
            } else {
                Structure::Inode
            };
            checker.found(finding(tree, facts.inode, structure, problem));
        }
    }
    if find_inode(&tree.inodes, INODE_ROOT.0).is_none() {
        let problem = "there is no root directory";
        checker.found(finding(tree, INODE_ROOT.0, Structure::Directory, problem));
    }
    check_reachability(checker, tree);
}

fn finding(
    tree: &FileTree,
    inode: u64,
    structure: Structure,
    problem: impl Into<String>,
) -> Finding {
    Finding::new(PassId::Namespace, Severity::Error, structure, problem).of(tree.object(inode))
}

/// Each entry must name an inode of its type.
fn check_entries(checker: &mut Checker<'_>, tree: &FileTree) {
    let inodes = &tree.inodes;
    for name in &tree.names {
        let problem = match find_inode(inodes, name.child) {
            None => format!("an entry names inode {}, which does not exist", name.child),
            Some(facts) if facts.file_type as u8 != name.file_type => {
                format!(
                    "an entry says type {} of inode {}, which has type {}",
                    name.file_type, name.child, facts.file_type as u8
                )
            }
            Some(_) if find_inode(inodes, name.directory).is_none() => {
                format!("inode {} has a name in a directory that does not exist", name.child)
            }
            Some(_) => continue,
        };
        checker.found(finding(tree, name.directory, Structure::Directory, problem));
    }
}

/// The problems of an inode that has these names.
fn problems_of(facts: &InodeFacts, names: &[NameFacts]) -> Vec<String> {
    let mut problems = Vec::new();
    let mut require = |condition: bool, problem: String| {
        if !condition {
            problems.push(problem);
        }
    };
    let removed = facts.orphan == Some(OrphanKind::Remove);
    let is_root = facts.inode == INODE_ROOT.0;
    require(
        removed == (facts.links == 0),
        match removed {
            true => format!("is to be removed but has {} links", facts.links),
            false => "has no links and no orphan item".into(),
        },
    );
    if facts.file_type != FileType::Directory {
        require(!is_root, "the root is not a directory".into());
        require(
            facts.links as usize == names.len(),
            format!("says {} links, but has {} names", facts.links, names.len()),
        );
        return problems;
    }
    let expected_names = usize::from(!is_root && facts.links > 0);
    require(
        names.len() == expected_names,
        format!("a directory with {} names instead of {expected_names}", names.len()),
    );
    if facts.links > 0 {
        let expected = 2 + facts.subdirectories;
        require(
            u64::from(facts.links) == expected,
            format!("says {} links, but its subdirectories make {expected}", facts.links),
        );
        let parent =
            if is_root { Some(facts.inode) } else { names.first().map(|name| name.directory) };
        if let Some(parent) = parent {
            require(
                facts.parent == parent,
                format!("says inode {} is its parent, but that is {parent}", facts.parent),
            );
        }
    } else {
        require(facts.entries == 0, format!("was removed with {} entries", facts.entries));
    }
    problems
}

/// Each directory with a name must lead to the root, upwards from name to name.
///
/// Each directory has one name (others have been reported). So a walk upwards that meets neither
/// the root nor a directory known to be reachable ends in a circle.
fn check_reachability(checker: &mut Checker<'_>, tree: &FileTree) {
    let (inodes, names) = (&tree.inodes, &tree.names);
    const UNKNOWN: u8 = 0;
    const WALKING: u8 = 1;
    const REACHABLE: u8 = 2;
    const LOST: u8 = 3;
    let index_of = |inode: u64| inodes.binary_search_by_key(&inode, |facts| facts.inode).ok();
    let mut states = vec![UNKNOWN; inodes.len()];
    if let Some(root) = index_of(INODE_ROOT.0) {
        states[root] = REACHABLE;
    }
    for start in 0..inodes.len() {
        if inodes[start].file_type != FileType::Directory
            || names_of(names, inodes[start].inode).is_empty()
        {
            continue;
        }
        let mut path = Vec::new();
        let mut at = Some(start);
        let end = loop {
            match at {
                None => break LOST,
                Some(index) if states[index] == UNKNOWN => {
                    states[index] = WALKING;
                    path.push(index);
                    at = names_of(names, inodes[index].inode)
                        .first()
                        .and_then(|name| index_of(name.directory));
                }
                Some(index) if states[index] == REACHABLE => break REACHABLE,
                Some(_) => break LOST,
            }
        };
        for &index in &path {
            states[index] = end;
        }
        if end == LOST && !path.is_empty() {
            let problem = "cannot be reached from the root";
            checker.found(finding(tree, inodes[start].inode, Structure::Directory, problem));
        }
    }
}
