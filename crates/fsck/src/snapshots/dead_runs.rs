//! The leaves of the tree of dead runs.
use super::finding;
use crate::checker::Checker;
use crate::report::Structure;
use cairn_format::{
    DeadRun, Generation, ItemKind, Key, Node, TREE_DEAD, TREE_ROOTS, TREE_SUBVOLUMES,
};

/// Bits of a key's offset behind the transaction.
const COUNT_BITS: u32 = 16;

/// Claims the blocks of all runs in a leaf, and counts what they keep. The items of the tree of
/// subvolumes are known.
pub(crate) fn add_items(checker: &mut Checker<'_>, leaf: &Node) {
    for (key, value) in leaf.items() {
        let problems = if key.kind == ItemKind::DeadRuns as u8 {
            match DeadRun::decode_all(value) {
                Ok(runs) => of_item(checker, key, &runs),
                Err(error) => {
                    let owner = checker.snapshots.list_owners.get(&key.inode).copied();
                    if let Some((id, _)) = owner {
                        checker.snapshots.add_uncountable(id);
                    }
                    vec![error.problem]
                }
            }
        } else {
            vec!["this item does not belong into the tree of dead runs".to_owned()]
        };
        for problem in problems {
            let finding = finding(Structure::Item, format!("{key:?}: {problem}"));
            checker.found(finding.at(leaf.address().0));
        }
    }
}

fn of_item(checker: &mut Checker<'_>, key: Key, runs: &[DeadRun]) -> Vec<String> {
    let mut problems = Vec::new();
    let owner = checker.snapshots.list_owners.get(&key.inode).copied();
    let added = Generation(key.offset >> COUNT_BITS);
    let newest = checker.superblock.generation;
    checker.snapshots.lists_used.insert(key.inode);
    let lists_known =
        !checker.lost_nodes.iter().any(|lost| matches!(lost.tree, TREE_ROOTS | TREE_SUBVOLUMES));
    match owner {
        None if lists_known => problems.push(format!("there is no dead list {}", key.inode)),
        Some((_, since)) if added <= since || added > newest => problems.push(format!(
            "it was added by transaction {added} to a list since {since}; the newest is {newest}"
        )),
        _ => {}
    }
    for run in runs {
        if let Some(problem) = of_run(checker, run, owner) {
            let (blocks, start, birth) = (run.range.blocks, run.range.start, run.birth);
            problems.push(format!("{blocks} blocks at {start}, born {birth}: {problem}"));
        }
    }
    problems
}

fn of_run(
    checker: &mut Checker<'_>,
    run: &DeadRun,
    owner: Option<(cairn_format::TreeId, Generation)>,
) -> Option<String> {
    if !checker.reader.contains(run.range) {
        return Some("they lie outside the volume".into());
    }
    let origin = owner.and_then(|(id, _)| checker.lineage_of(id).origin).unwrap_or_default();
    if let Some((id, since)) = owner
        && let Some(of) = checker.snapshots.of.get(&id).filter(|of| of.discards(since))
    {
        // The newest snapshot or the origin has them, and is counted.
        let counted = of.boundary().max(origin).min(since);
        let is_possible = (1..=counted.0).contains(&run.birth.0);
        return (!is_possible).then(|| "impossible in a list that is discarded".into());
    }
    if let Some((id, since)) = owner {
        let lineage = checker.lineage_of(id);
        if lineage.is_of_origin(run.birth) && lineage.notes_inherited {
            // The origin has them, and is counted.
            checker.snapshots.inherited_dead.push((id, *run));
            let is_possible = (1..=since.0).contains(&run.birth.0);
            return (!is_possible).then(|| format!("impossible in a list since {since}"));
        }
    }
    let twice = checker.referenced.insert(run.range);
    let (id, since) = owner?;
    let is_of_origin = checker.lineage_of(id).is_of_origin(run.birth);
    let of = checker.snapshots.of.get_mut(&id)?;
    let is_kept = !is_of_origin && of.keep(run.range, run.birth, Some(since));
    let is_to_be_freed = of.is_to_be_freed(run.birth, since);
    if let Some(block) = twice {
        return Some(format!("block {block} is referred to twice"));
    }
    if run.birth.0 == 0 || run.birth > since {
        return Some(format!("impossible in a list since {since}"));
    }
    if is_of_origin {
        return Some("the subvolume is a fork that has them from its origin".into());
    }
    // While a snapshot or its item is missing, others may need it.
    let items_known = !checker.lost_nodes.iter().any(|lost| lost.concerns(TREE_SUBVOLUMES));
    match (is_kept, is_to_be_freed) {
        (false, false) if items_known => Some(format!(
            "no snapshot from {} to {since} needs them, and no cleanup frees them",
            run.birth
        )),
        (true, true) => Some("a cleanup would free them, but a snapshot needs them".into()),
        _ => None,
    }
}

/// Whether all runs could be counted.
pub(super) fn are_known(checker: &Checker<'_>) -> bool {
    let lost = |tree| checker.lost_nodes.iter().any(|lost| lost.concerns(tree));
    !lost(TREE_DEAD) && !lost(TREE_SUBVOLUMES)
}
