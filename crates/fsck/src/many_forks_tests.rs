//! More forks than are checked as wholes, each for itself.
use crate::checker::WholeMax;
use crate::many_snapshots_tests::{Change, assert_all_in, change_rightly, change_wrongly};
use crate::test_snapshots::SnapshotVolume;
use crate::{CheckOptions, Finding, Report, Severity, run};
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
    built_of(|_, _, _| {}, is_changed, change)
}

/// The same with what `prepare` does in the tree that they all began as.
fn built_of(
    prepare: Change,
    is_changed: fn(u64) -> bool,
    change: Change,
) -> (SnapshotVolume, Vec<TreeId>) {
    let mut built = SnapshotVolume::new();
    // Room for nodes.
    built.volume.next_data += 2200;
    let directories = ["a", "b"].map(|name| built.volume.make_directory(INODE_ROOT.0, name));
    let file = built.volume.make_file(directories[0], "file", 9000);
    built.volume.link(file, directories[1], "another");
    let files: Vec<u64> = (0..60)
        .map(|index| built.volume.make_file(directories[1], &format!("file-{index}"), 100))
        .collect();
    prepare(&mut built, directories, file);
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
    expect_in(built(|index| index == ONE, change), text);
}

/// All that is wrong is in the one.
#[track_caller]
fn expect_in((built, forks): (SnapshotVolume, Vec<TreeId>), text: &str) {
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

/// So many forks that are not in order are compared.
const WRONG_MAX: usize = 64;

fn check_once(built: &SnapshotVolume) -> Report {
    crate::check(&built.volume.device, &CheckOptions::default(), &mut |_| {}).unwrap()
}

fn count_wrongly(built: &mut SnapshotVolume, _: [u64; 2], file: u64) {
    built.volume.change_inode(file, |item| item.blocks = 4);
}

/// Of one in `step` forks the same is wrong. The first ones are named.
#[track_caller]
fn expect_first(report: &Report, forks: &[TreeId], step: usize) {
    let errors: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    let is_of_fork = |error: &&String| error.contains(" (/fork-");
    let of_forks: Vec<&String> = errors.iter().filter(is_of_fork).collect();
    assert_eq!(of_forks.len(), WRONG_MAX, "{report}");
    for (index, error) in of_forks.into_iter().enumerate() {
        let (at, text) = (step * index, "says 4 blocks, but there are 3");
        let name = format!(" of subvolume {} (/fork-{at}/a/file)", forks[at]);
        assert_all_in(std::slice::from_ref(error), &name, text);
    }
    let left = forks.len() / step - WRONG_MAX;
    let note = format!("within {left} forks were not compared");
    let notes: Vec<&Finding> =
        report.findings.iter().filter(|finding| finding.severity == Severity::Note).collect();
    assert!(notes.len() == 1 && notes[0].to_string().contains(&note), "{report}");
}

#[test]
fn of_many_wrong_ones_the_first_are_named() {
    let (built, forks) = built(|index| index % 3 == 0, count_wrongly);
    let report = check_once(&built);
    expect_first(&report, &forks, 3);
    assert_eq!(report.errors as usize, WRONG_MAX);
}

/// Nothing is read once for each fork, however many have it.
#[test]
fn what_is_wrong_in_all_of_them_is_named_for_the_first() {
    let (built, forks) = built_of(count_wrongly, |_| false, |_, _, _| {});
    let report = check_once(&built);
    expect_first(&report, &forks, 1);
    // Also in the subvolume and its snapshot.
    assert_eq!(report.errors as usize, WRONG_MAX + 2, "{report}");
    assert!(summed(&built).is_empty());
}

fn orphan_key(inode: u64) -> Key {
    Key::new(INODE_ORPHANS, ItemKind::Orphan, inode)
}

/// The end of the file that is being cut.
const CUT_BYTES: u64 = 20 * BLOCK_SIZE as u64 + 5;

/// A file with extents in several leaves is being cut, but for one last block.
fn cut(built: &mut SnapshotVolume, [one, _]: [u64; 2], _: u64) {
    let volume = &mut built.volume;
    let inode = volume.make_file(one, "cut", 0);
    (0..40).for_each(|at| volume.add_extent(inode, at, 1, ExtentKind::Data));
    volume.change_inode(inode, |item| item.size = CUT_BYTES);
    volume.items.insert(orphan_key(inode), encode_orphan(OrphanKind::Truncate).to_vec());
}

fn orphan(built: &SnapshotVolume) -> Key {
    let mut keys = built.volume.items.keys();
    *keys.find(|key| key.kind == ItemKind::Orphan as u8).unwrap()
}

#[test]
fn forks_with_a_file_that_is_being_cut_are_summed() {
    let (built, forks) = built_of(cut, |index| index == ONE, change_rightly);
    built.volume.assert_clean();
    assert_eq!(summed(&built), forks.into_iter().collect());
    // One has made it longer instead.
    let finish: Change = |built, _, _| {
        let key = orphan(built);
        built.volume.items.remove(&key);
        built.volume.change_inode(key.offset, |item| item.size = 40 * BLOCK_SIZE as u64);
    };
    let (built, forks) = built_of(cut, |index| index == ONE, finish);
    built.volume.assert_clean();
    assert_eq!(summed(&built), forks.into_iter().collect());
}

/// One that is noted to be cut, and ends where it should, is in order.
#[test]
fn a_file_that_is_cut_at_its_end_is_in_order() {
    let note: Change = |built, _, file| {
        let value = encode_orphan(OrphanKind::Truncate).to_vec();
        built.volume.items.insert(orphan_key(file), value);
    };
    let (built, _) = built(|index| index == ONE, note);
    built.volume.assert_clean();
}

#[test]
fn data_past_the_end_of_a_file_that_is_not_being_cut_is_named() {
    let forget: Change = |built, _, _| {
        let key = orphan(built);
        built.volume.items.remove(&key);
    };
    expect_in(
        built_of(cut, |index| index == ONE, forget),
        &format!("in a file of {CUT_BYTES} bytes"),
    );
}

#[test]
fn a_bad_block_that_all_have_is_named_in_each() {
    let (built, forks) = built(|index| index == ONE, change_rightly);
    let mut keys = built.volume.items.keys();
    let file = keys.find(|key| key.kind == ItemKind::Extent as u8).unwrap().inode;
    let block = built.extents(file)[&0].start;
    built.volume.flip(block, 0, 1);
    let report = built.volume.check();
    let paths = report.findings.iter().filter_map(|finding| finding.path.clone());
    let expected = (0..FORKS).map(|index| format!("/fork-{index}/a/file"));
    let expected: BTreeSet<String> = expected.chain(["/a/file".to_owned()]).collect();
    assert_eq!(paths.collect::<BTreeSet<_>>(), expected, "{report}");
    assert_eq!(summed(&built), forks.into_iter().collect());
}
