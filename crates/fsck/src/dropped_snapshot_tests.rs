//! Damaged snapshots that a repair drops, with all else left as it was.
use crate::dump::dump_tree;
use crate::extract::extract_snapshot;
use crate::test_forks::{self, FORK, NESTED};
use crate::test_snapshots::SnapshotVolume;
use crate::test_volume::TestVolume;
use crate::{CheckOptions, Losses, Report, check_accepting};
use cairn_format::*;
use std::collections::BTreeSet;
use std::sync::atomic::AtomicBool;

fn repair(volume: &TestVolume, given_up: &[&str]) -> Report {
    let given_up: Vec<String> = given_up.iter().map(|name| (*name).to_owned()).collect();
    let options = CheckOptions { data: true, repair: true };
    check_accepting(&volume.device, &options, &given_up, &mut |_| {}).unwrap()
}

fn items(volume: &TestVolume, tree: TreeId) -> String {
    dump_tree(&volume.device, tree, None).unwrap().to_string()
}

fn has_snapshot(volume: &TestVolume, name: &str) -> bool {
    items(volume, TREE_SUBVOLUMES).contains(&format!("\"{name}\""))
}

fn damaged(report: &Report) -> Vec<String> {
    report.damaged_snapshots.iter().map(ToString::to_string).collect()
}

/// Names and bytes of the files of a snapshot.
fn files(volume: &TestVolume, subvolume: TreeId, name: &str) -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().unwrap();
    let (stop, snapshot) = (AtomicBool::new(false), (subvolume, name.as_bytes()));
    let report =
        extract_snapshot(&volume.device, snapshot, folder.path(), &stop, &mut |_| {}).unwrap();
    assert!(report.complete && report.losses.is_empty(), "{report:?}");
    let (mut folders, mut files) = (vec![folder.path().to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => files.push((path.display().to_string(), std::fs::read(&path).unwrap())),
            }
        }
    }
    let (mut names, prefix) = (files, folder.path().display().to_string());
    names.iter_mut().for_each(|(path, _)| *path = path[prefix.len()..].to_owned());
    names.sort();
    names
}

/// The nodes of a snapshot's tree.
fn nodes_of(built: &SnapshotVolume, name: &str) -> BTreeSet<BlockNumber> {
    let root = built.snapshots[&built.named(name)].root;
    let (mut todo, mut nodes) = (vec![root.block], BTreeSet::new());
    while let Some(block) = todo.pop() {
        let node = built.volume.read_node(block);
        if node.level() > 0 {
            todo.extend((0..node.count()).map(|index| node.child(index).block));
        }
        nodes.insert(block);
    }
    nodes
}

/// The nodes that only this snapshot has.
fn own_nodes(built: &SnapshotVolume, name: &str, other: &str) -> Vec<BlockNumber> {
    let head: BTreeSet<BlockNumber> = built.head_nodes().into_iter().collect();
    let others: BTreeSet<BlockNumber> = &nodes_of(built, other) | &head;
    nodes_of(built, name).difference(&others).copied().collect()
}

fn full() -> SnapshotVolume {
    let mut built = SnapshotVolume::full();
    built.write();
    built
}

/// Each node that one snapshot alone has, in turn.
#[test]
fn a_snapshot_that_is_given_up_goes_and_all_else_stays() {
    let own = [("first", "third"), ("third", "first")];
    let own = own.map(|(name, other)| (name, other, own_nodes(&full(), name, other)));
    assert!(own[0].2.len() > 3, "{own:?}");
    for (name, other, blocks) in own {
        for block in blocks {
            let built = full();
            let volume = &built.volume;
            let is_root = built.snapshots[&built.named(name)].root.block == block;
            let head = items(volume, TREE_FILES);
            let (kept, free) =
                (files(volume, TREE_FILES, other), volume.check().statistics.free_blocks);
            volume.flip(block, 5000, 1);
            let before = volume.check();
            assert_eq!(damaged(&before), [format!("256/{name}")]);
            if !is_root {
                // A part of it can be read.
                let refused = repair(volume, &[other, "257/", "none"]);
                assert_eq!((refused.exit_code(), refused.losses), (4, Losses::default()));
                assert!(refused.to_string().contains("until they are given up"), "{refused}");
                assert!(has_snapshot(volume, name));
            }
            let whole = format!("256/{name}");
            let given_up = [name, &whole, "256/"][block.0 as usize / 4 % 3];
            let given_up = [given_up];
            let repaired = repair(volume, &given_up[usize::from(is_root)..]);
            let text = repaired.to_string();
            assert_eq!((repaired.errors, repaired.exit_code()), (0, 1), "{text}");
            assert_eq!(repaired.losses, Losses { snapshots: 1, ..Losses::default() });
            let line = format!("snapshot \"{name}\" (of generation {})", built.named(name));
            assert!(text.contains(&format!("(/): {line} (dropped: ")), "{text}");
            assert!(text.contains("(gone with the snapshot)"), "{text}");
            volume.assert_clean();
            assert!(!has_snapshot(volume, name) && has_snapshot(volume, other), "{text}");
            // Its nodes stay where they were.
            assert_eq!(items(volume, TREE_FILES), head);
            assert!(files(volume, TREE_FILES, other) == kept);
            assert!(volume.check().statistics.free_blocks > free);
        }
    }
}

/// What both have is damaged: each goes when it is given up.
#[test]
fn of_several_damaged_snapshots_those_go_that_are_given_up() {
    let built = full();
    let volume = &built.volume;
    let both: BTreeSet<_> = &nodes_of(&built, "first") & &nodes_of(&built, "third");
    let head: BTreeSet<BlockNumber> = built.head_nodes().into_iter().collect();
    volume.flip(*both.intersection(&head).next().unwrap(), 5000, 1);
    assert_eq!(damaged(&volume.check()), ["256/first", "256/third"]);
    let repaired = repair(volume, &["first"]);
    assert_eq!((repaired.losses.snapshots, damaged(&repaired)), (1, vec!["256/third".into()]));
    assert!(repaired.exit_code() == 4 && !has_snapshot(volume, "first"), "{repaired}");
    let repaired = repair(volume, &["256/"]);
    assert_eq!((repaired.losses.snapshots, repaired.exit_code()), (1, 1), "{repaired}");
    volume.assert_clean();
    assert!(!has_snapshot(volume, "third"));
}

#[test]
fn a_snapshot_with_damaged_data_is_dropped() {
    let built = full();
    let volume = &built.volume;
    let removed = built.dead.values().flatten().find(|run| !run.is_node && run.birth.0 == 6);
    volume.flip(removed.unwrap().range.start, 7, 1);
    let head = items(volume, TREE_FILES);
    let refused = repair(volume, &["third"]);
    assert_eq!((damaged(&refused), refused.exit_code()), (vec!["256/first".to_owned()], 4));
    assert!(has_snapshot(volume, "first") && has_snapshot(volume, "third"));
    let repaired = repair(volume, &["first"]);
    assert_eq!((repaired.losses.snapshots, repaired.exit_code()), (1, 1), "{repaired}");
    volume.assert_clean();
    assert!(!has_snapshot(volume, "first") && has_snapshot(volume, "third"));
    assert_eq!(items(volume, TREE_FILES), head);
}

/// The origin keeps what the forks have inherited, so it goes with them.
#[test]
fn an_origin_that_is_given_up_loses_its_name_and_its_forks_nothing() {
    let mut built = test_forks::full();
    let origin = built.named("first");
    built.write();
    let fork_has: BTreeSet<BlockNumber> = {
        let (mut todo, mut met) = (vec![built.lineage(FORK).root.block], BTreeSet::new());
        while let Some(block) = todo.pop() {
            let node = built.volume.read_node(block);
            if node.level() > 0 {
                todo.extend((0..node.count()).map(|index| node.child(index).block));
            }
            met.insert(block);
        }
        met
    };
    let head: BTreeSet<BlockNumber> = built.head_nodes().into_iter().collect();
    let own: Vec<BlockNumber> =
        nodes_of(&built, "first").difference(&(&fork_has | &head)).copied().collect();
    assert!(own.len() > 1);
    for block in own {
        let mut built = test_forks::full();
        built.write();
        let volume = &built.volume;
        let heads = [TREE_FILES, FORK, NESTED].map(|id| items(volume, id));
        let kept = files(volume, FORK, "of the fork");
        volume.flip(block, 5000, 1);
        let repaired = repair(volume, &["256/"]);
        let dropped = format!("(/): snapshot \"first\" (of generation {origin}) (dropped: ");
        assert!(repaired.to_string().contains(&dropped), "{repaired}");
        assert_eq!(repaired.losses, Losses { snapshots: 1, ..Losses::default() });
        assert!(!has_snapshot(volume, "first"), "{repaired}");
        let after = volume.check();
        assert!(after.damaged_snapshots.iter().all(|snapshot| snapshot.name.is_none()), "{after}");
        assert_eq!([TREE_FILES, FORK, NESTED].map(|id| items(volume, id)), heads);
        assert!(files(volume, FORK, "of the fork") == kept);
        // No repair is due for what is hidden.
        let again = repair(volume, &["256/"]);
        assert_eq!((again.repaired, again.generation), (0, after.generation), "{again}");
    }
}
