//! More forks than are checked as wholes, each for itself.
use crate::checker::WholeMax;
use crate::many_snapshots_tests::{Change, assert_all_in, change_rightly, change_wrongly};
use crate::test_snapshots::SnapshotVolume;
use crate::{CheckOptions, run};
use cairn_format::*;
use std::collections::BTreeSet;

const FORKS: u64 = 300;
/// One in so many forks has changed.
const STEP: u64 = 6;

/// The one that is changed otherwise.
const ONE: u64 = FORKS / 2;

/// A volume with forks of a tree of several levels, and these forks. Those that `is_changed` says
/// have what `change` does.
fn built(is_changed: fn(u64) -> bool, change: Change) -> (SnapshotVolume, Vec<TreeId>) {
    let mut built = SnapshotVolume::new();
    // Room for nodes.
    built.volume.next_data += 2200;
    let directories = ["a", "b"].map(|name| built.volume.make_directory(INODE_ROOT.0, name));
    let file = built.volume.make_file(directories[0], "file", 9000);
    built.volume.link(file, directories[1], "another");
    let files: Vec<u64> = (0..60)
        .map(|index| built.volume.make_file(directories[1], &format!("file-{index}"), 100))
        .collect();
    built.commit();
    assert!(built.root.level > 1);
    built.snapshot("first");
    let fork = |index| built.fork("first", &format!("fork-{index}"));
    let forks: Vec<TreeId> = (0..FORKS).map(fork).collect();
    for (index, fork) in (0..).zip(&forks) {
        built.within(*fork, |built| {
            if is_changed(index) {
                change(built, directories, file);
            } else if index % STEP == 0 {
                built.overwrite(files[index as usize % files.len()], 0, 1);
            }
            built.commit();
        });
    }
    built.commit();
    built.write();
    (built, forks)
}

/// The forks of which what they share was not read.
fn summed(built: &SnapshotVolume) -> BTreeSet<TreeId> {
    let options = CheckOptions::default();
    let mut progress = |_| {};
    let checker = run(&built.volume.device, options, WholeMax::CHECK, &mut progress).unwrap();
    let trees = checker.trees.values().filter(|tree| tree.summed.is_some());
    trees.map(|tree| tree.id).collect()
}

#[test]
fn many_good_ones_are_in_order() {
    for change in [|_: &mut SnapshotVolume, _, _| {}, change_rightly] {
        let (built, forks) = built(|index| index == ONE, change);
        built.volume.assert_clean();
        assert_eq!(summed(&built), forks.into_iter().collect());
    }
}

#[track_caller]
fn expect(text: &str, change: Change) {
    let (built, forks) = built(|index| index == ONE, change);
    let report = built.volume.check();
    let errors: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    let wrong = forks[ONE as usize];
    assert_all_in(&errors, &format!(" of subvolume {wrong}"), text);
    let others = forks.into_iter().filter(|id| *id != wrong);
    assert_eq!(summed(&built), others.collect());
}

#[test]
fn what_is_wrong_in_one_of_many_is_named() {
    change_wrongly(expect);
}

/// Of most of them no names are kept from one pass to the next.
#[test]
fn many_wrong_ones_are_all_named() {
    let (built, forks) = built(
        |index| index % 3 == 0,
        |built, _, file| {
            built.volume.change_inode(file, |item| item.blocks = 4);
        },
    );
    let report = built.volume.check();
    let errors: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    assert_eq!(errors.len(), forks.len() / 3);
    for (index, error) in errors.iter().enumerate() {
        let (at, text) = (3 * index, "says 4 blocks, but there are 3");
        let name = format!(" of subvolume {} (/fork-{at}/a/file)", forks[at]);
        assert_all_in(std::slice::from_ref(error), &name, text);
    }
}
