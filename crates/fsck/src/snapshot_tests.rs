//! Volumes with snapshots: a good one, contradictions that a check must find, and what a repair
//! makes of these and of damage.
use crate::dump::dump_tree;
use crate::extract::{ExtractReport, extract_snapshot};
use crate::test_snapshots::SnapshotVolume;
use crate::test_volume::TestVolume;
use crate::{Losses, PassId, Report, Severity, TreeReader};
use cairn_blockdev::BlockDevice;
use cairn_format::*;
use std::sync::atomic::AtomicBool;

#[test]
fn a_volume_with_snapshots_is_in_order() {
    let mut built = SnapshotVolume::full();
    built.write();
    built.volume.assert_clean();
    let report = built.volume.check();
    assert!(report.passes.contains(&PassId::Snapshots));
    assert_eq!(built.snapshots.len(), 2);
    let runs: usize = built.dead.values().map(Vec::len).sum();
    assert!(runs > 10, "{:?}", built.dead);
    let cleanups = &built.cleanups;
    assert!(cleanups.len() == 1 && built.dead.values().flatten().any(|run| !run.is_node));
    let statistics = report.statistics;
    assert!(statistics.data_blocks_verified > statistics.data_blocks, "{report}");
}

/// Whether a snapshot with this name is in the superblock's state.
fn has_snapshot(volume: &TestVolume, name: &str) -> bool {
    let items = dump_tree(&volume.device, TREE_SUBVOLUMES, None).unwrap().to_string();
    items.contains(&format!("\"{name}\""))
}

fn errors(report: &Report) -> Vec<String> {
    let errors = report.findings.iter().filter(|finding| finding.severity == Severity::Error);
    errors.map(ToString::to_string).collect()
}

/// Expects an error with this text, and that a repair leaves nothing to complain about, and both
/// snapshots.
#[track_caller]
fn expect(text: &str, change: impl FnOnce(&mut SnapshotVolume)) {
    let volume = expect_error(text, change);
    volume.assert_repairable();
    for name in ["first", "third"] {
        assert!(has_snapshot(&volume, name), "{text}: {name} is lost");
    }
}

#[track_caller]
fn expect_error(text: &str, change: impl FnOnce(&mut SnapshotVolume)) -> TestVolume {
    let mut built = SnapshotVolume::full();
    change(&mut built);
    built.write();
    built.volume.assert_error(text);
    built.volume
}

/// As [`expect`], with items that are changed when all are made.
#[track_caller]
fn expect_of_items(text: &str, change: impl FnOnce(&mut TestVolume)) {
    let mut built = SnapshotVolume::full();
    built.make_items();
    change(&mut built.volume);
    built.write_made();
    built.volume.assert_error(text);
    built.volume.assert_repairable();
}

fn key(kind: ItemKind, generation: Generation) -> Key {
    Key::of_subvolume(TREE_FILES, kind, generation)
}

#[test]
fn of_two_snapshots_with_one_name_one_gets_another() {
    let volume = expect_error("two snapshots named \"first\"", |built| {
        let third = built.named("third");
        built.snapshots.get_mut(&third).unwrap().name = b"first".to_vec();
    });
    volume.assert_repairable();
    assert!(has_snapshot(&volume, "first") && has_snapshot(&volume, "first.8"));
}

/// The name that the repair would give has another one already, whatever is cut off for it.
#[test]
fn a_snapshot_gets_a_name_that_no_other_one_has() {
    for name in ["first".to_owned(), "n".repeat(SnapshotItem::NAME_BYTES_MAX)] {
        let mut built = SnapshotVolume::full();
        built.snapshot("fourth");
        let generations = ["first", "third", "fourth"].map(|name| built.named(name));
        let like = |suffix: &str| {
            let kept = name.len().min(SnapshotItem::NAME_BYTES_MAX - suffix.len());
            format!("{}{suffix}", &name[..kept])
        };
        let last = generations[2];
        let (other, new) = (like(&format!(".{last}")), like(&format!(".{last}-2")));
        for (at, name) in generations.into_iter().zip([&name, &other, &name]) {
            built.snapshots.get_mut(&at).unwrap().name = name.as_bytes().to_vec();
        }
        built.write();
        let repaired = built.volume.repair();
        assert_eq!((repaired.errors, repaired.exit_code()), (0, 1), "{repaired}");
        let before = format!("snapshot \"{name}\" (of generation {last}) of subvolume 256");
        let note = format!("{before} is named \"{new}\" now");
        assert!(repaired.to_string().contains(&note), "{repaired}");
        built.volume.assert_clean();
        assert!([&name, &other, &new].into_iter().all(|name| has_snapshot(&built.volume, name)));
    }
}

#[test]
fn lists_and_cleanups_that_cannot_be() {
    expect("but no dead list since then", |built| {
        let third = built.named("third");
        built.lists.remove(&third);
    });
    expect("there is no dead list", |built| {
        let first = built.named("first");
        built.lists.remove(&first);
    });
    expect("but the next one is", |built| built.volume.superblock.next_list = 2);
    expect("as subvolume 256 has", |built| {
        let list = built.lists[&built.named("first")];
        let third = built.named("third");
        built.lists.insert(third, list);
    });
    let cleanup = |oldest, lists_from, lists_to| CleanupItem {
        oldest: Generation(oldest),
        lists_from: Generation(lists_from),
        lists_to: Generation(lists_to),
    };
    expect("that is impossible", |built| {
        built.cleanups.insert(Generation(5), cleanup(5, 6, 7));
    });
    expect("that is impossible", |built| {
        built.cleanups.insert(Generation(5), cleanup(4, 5, 99));
    });
    expect("may need what it would free", |built| {
        let first = built.named("first").0;
        built.cleanups.insert(Generation(first), cleanup(0, first, first + 1));
    });
    expect("no snapshot from", |built| built.cleanups.clear());
    expect("with number 1, which", |built| {
        let third = built.named("third");
        built.snapshots.get_mut(&third).unwrap().number = 1;
    });
}

#[test]
fn dead_runs_that_cannot_be() {
    let run = |start, birth, blocks| DeadRun {
        range: BlockRange::new(BlockNumber(start), blocks),
        birth: Generation(birth),
        is_node: false,
    };
    expect("outside the volume", |built| built.runs_since("first").push(run(1 << 40, 5, 1)));
    expect("outside the volume", |built| built.runs_since("first").push(run(0, 5, 1)));
    expect("is referred to twice", |built| {
        let twice = built.runs_since("first")[0];
        built.runs_since("first").push(twice);
    });
    expect("is referred to twice", |built| {
        let head = built.head_nodes()[0];
        built.runs_since("first").push(run(head.0, 5, 1));
    });
    expect("impossible in a list since", |built| {
        let free = built.volume.next_data;
        built.runs_since("first").push(run(free, 7, 1));
    });
    expect("is in its tree, but is not kept for it", |built| {
        built.runs_since("first").pop().unwrap();
    });
    expect("is kept for it, but is not in its tree", |built| {
        let free = built.volume.next_data;
        built.runs_since("first").push(run(free, 5, 1));
    });
    expect("its tree refers to", |built| built.runs_since("first")[0].birth.0 -= 1);
    expect("a cleanup would free them, but a snapshot needs them", |built| {
        let third = built.named("third");
        let cleanup = built.cleanups.values_mut().next().unwrap();
        cleanup.lists_to = third.next();
        let birth = Generation(cleanup.lists_from.0);
        let free = built.volume.next_data;
        built.runs_since("third").push(run(free, birth.0, 1));
    });
}

#[test]
fn items_that_cannot_be_read() {
    let third = |volume: &TestVolume| {
        let mut keys = volume.snapshots.keys().filter(|key| key.kind == ItemKind::Snapshot as u8);
        *keys.next_back().unwrap()
    };
    expect_of_items("dead list item of 3 bytes", |volume| {
        let key = key(ItemKind::DeadList, Generation(third(volume).offset));
        volume.snapshots.insert(key, vec![0; 3]);
    });
    expect_of_items("cleanup item of 3 bytes", |volume| {
        volume.snapshots.insert(key(ItemKind::Cleanup, Generation(3)), vec![0; 3]);
    });
    expect_of_items("dead runs of 25 bytes", |volume| {
        let (_, value) = volume.dead.iter_mut().next().unwrap();
        value.resize(25, 0);
    });
    expect_of_items("does not belong into the tree of dead runs", |volume| {
        volume.dead.insert(Key::new(InodeNumber(1), ItemKind::Extent, 0), vec![0; 30]);
    });
    expect_of_items("does not belong into the tree of subvolumes", |volume| {
        volume.snapshots.insert(key(ItemKind::Extent, Generation(3)), vec![0; 30]);
    });
    expect_of_items("it was added by transaction 99", |volume| {
        let (first, value) = volume.dead.pop_first().unwrap();
        volume.dead.insert(Key::dead_runs(first.inode, Generation(99), 0), value);
    });
    expect_of_items("there is no dead list 77", |volume| {
        let (first, value) = volume.dead.pop_first().unwrap();
        volume.dead.insert(Key { inode: 77, ..first }, value);
    });
}

/// A repair can't keep these.
#[test]
fn snapshots_that_cannot_be() {
    let change = |change: fn(&mut TestVolume, Key)| {
        let mut built = SnapshotVolume::full();
        built.make_items();
        let third = key(ItemKind::Snapshot, built.named("third"));
        change(&mut built.volume, third);
        built.write_made();
        let text = built.volume.check().to_string();
        let repaired = built.volume.repair();
        assert_eq!((repaired.errors, repaired.exit_code()), (0, 1), "{text}\n{repaired}");
        assert!(repaired.to_string().contains("dropped"), "{text}\n{repaired}");
        assert!(repaired.to_string().ends_with("; lost: 1 snapshots"), "{text}\n{repaired}");
        assert_eq!(repaired.losses, Losses { snapshots: 1, ..Losses::default() });
        built.volume.assert_clean();
        let has = ["first", "third"].map(|name| has_snapshot(&built.volume, name));
        assert_eq!(has, [true, false]);
        text
    };
    let text = change(|volume, key| drop(volume.snapshots.insert(key, vec![0; 3])));
    assert!(text.contains("snapshot item of 3 bytes"), "{text}");
    let text = change(|volume, key| {
        let value = volume.snapshots.remove(&key).unwrap();
        volume.snapshots.insert(Key { offset: 99, ..key }, value);
    });
    assert!(text.contains("has a snapshot of generation 99; the newest is"), "{text}");
    let text = change(|volume, key| {
        let value = volume.snapshots.remove(&key).unwrap();
        volume.snapshots.insert(Key { inode: 300, ..key }, value);
    });
    assert!(text.contains("has snapshots or dead lists, but does not exist"), "{text}");
}

/// A damaged node in turn, and then a repair.
#[test]
fn a_repair_makes_no_snapshot_worse() {
    let mut built = SnapshotVolume::full();
    built.write();
    let (head, dead) = (built.head_nodes(), built.dead_nodes());
    let allocation = built.volume.nodes.clone();
    assert!(head.len() > 4 && dead.len() > 3 && allocation.len() > 3);
    for block in head.into_iter().chain(dead).chain(allocation) {
        let mut built = SnapshotVolume::full();
        built.write();
        let volume = &built.volume;
        let tree = volume.read_node(block).tree();
        volume.flip(block, 5000, 1);
        let before = volume.check();
        assert!(before.errors > 0, "{block}");
        let damaged = |report: &Report| {
            let of_snapshots = errors(report).into_iter();
            ["\"first\"", "\"third\""].map(|name| of_snapshots.clone().any(|e| e.contains(name)))
        };
        let repaired = volume.repair();
        let after = volume.check();
        if matches!(tree, TREE_ROOTS | TREE_SUBVOLUMES) {
            let reasons = repaired.findings.iter().map(|finding| &finding.not_repaired_because);
            let mut reasons = reasons.flatten();
            assert!(reasons.any(|reason| reason.contains("cairn fsck --extract")), "{repaired}");
            assert_eq!(errors(&before), errors(&after), "{block}");
            continue;
        }
        let others = after.findings.iter().filter(|finding| {
            finding.severity == Severity::Error && finding.pass != PassId::Snapshots
        });
        assert_eq!(others.count(), 0, "{block}: {after}\n{repaired}\n{before}");
        for (was, is) in damaged(&before).into_iter().zip(damaged(&after)) {
            assert!(was || !is, "{block}: {after}\n{before}");
        }
        // One whose root is damaged is dropped.
        let left = ["first", "third"].into_iter().filter(|name| has_snapshot(volume, name));
        assert_eq!(left.count() as u64 + repaired.losses.snapshots, 2, "{block}: {repaired}");
        let is_root = built.snapshots.values().any(|item| item.root.block == block);
        assert_eq!(repaired.losses.snapshots, u64::from(is_root), "{block}: {repaired}");
        // What is damaged in a snapshot only makes no new trees necessary.
        let again = volume.repair();
        assert_eq!((again.repaired, again.generation), (0, after.generation), "{again}");
        assert_eq!(errors(&volume.check()), errors(&after));
    }
}

/// With a damaged tree of dead runs, all are found again in the trees of the snapshots.
#[test]
fn dead_lists_are_made_anew() {
    let mut built = SnapshotVolume::full();
    built.write();
    let free = built.volume.check().statistics.free_blocks;
    let volume = &built.volume;
    let is_dead = |block: &&BlockNumber| volume.read_node(**block).tree() == TREE_DEAD;
    let leaf = *volume.nodes.iter().find(is_dead).unwrap();
    volume.flip(leaf, 5000, 1);
    let repaired = volume.repair();
    assert_eq!((repaired.exit_code(), repaired.errors), (1, 0), "{repaired}");
    assert_eq!(repaired.losses, Default::default(), "{repaired}");
    volume.assert_clean();
    // What the cleanup was to free is free.
    assert!(volume.check().statistics.free_blocks > free);
}

#[test]
fn damaged_data_of_a_snapshot_is_found() {
    let mut built = SnapshotVolume::full();
    built.write();
    let removed = built.dead.values().flatten().find(|run| !run.is_node && run.birth.0 == 6);
    let block = removed.unwrap().range.start;
    built.volume.flip(block, 7, 1);
    let report = built.volume.assert_error("don't match their checksums");
    let text = report.to_string();
    assert!(report.errors == 1 && text.contains("snapshot \"first\""), "{text}");
    let mut before = vec![0; 4096];
    built.volume.device.read(block.offset_bytes(), &mut before).unwrap();
    let repaired = built.volume.check_and_repair_data();
    assert!(repaired.errors == 1, "{repaired}");
}

fn extract(volume: &TestVolume, name: &str) -> (tempfile::TempDir, ExtractReport) {
    let folder = tempfile::tempdir().unwrap();
    let stop = AtomicBool::new(false);
    let snapshot = (TREE_FILES, name.as_bytes());
    let report =
        extract_snapshot(&volume.device, snapshot, folder.path(), &stop, &mut |_| {}).unwrap();
    (folder, report)
}

#[test]
fn a_snapshot_is_extracted() {
    let mut built = SnapshotVolume::full();
    built.write();
    let volume = &built.volume;
    let (folder, report) = extract(volume, "first");
    assert!(report.complete && report.losses.is_empty(), "{report:?}");
    let bytes = |name: &str| std::fs::metadata(folder.path().join(name)).unwrap().len();
    assert_eq!(
        (bytes("removed"), bytes("overwritten"), bytes("directory/file-7")),
        (9000, 12_000, 12_000)
    );
    // What the subvolume has written since reads as zeros.
    let allocated = std::fs::read(folder.path().join("allocated")).unwrap();
    assert!(allocated.len() == 30_000 && allocated.iter().all(|byte| *byte == 0));
    let (folder, _) = extract(volume, "third");
    assert!(!folder.path().join("removed").exists());
    let allocated = std::fs::read(folder.path().join("allocated")).unwrap();
    assert!(allocated.iter().any(|byte| *byte != 0));

    let mut reading = |_| {};
    let missing = TreeReader::open_snapshot(&volume.device, TREE_FILES, b"none", &mut reading);
    let Err(error) = missing else { panic!("there is no such snapshot") };
    assert!(error.to_string().ends_with("its snapshots: 256/first, 256/third"), "{error}");
}

/// Of a damaged snapshot the rest is extracted.
#[test]
fn a_damaged_snapshot_is_extracted() {
    let mut built = SnapshotVolume::full();
    built.write();
    let volume = &built.volume;
    let (_, whole) = extract(volume, "first");
    let is_leaf = |block: &BlockNumber| {
        let node = volume.read_node(*block);
        node.level() == 0 && node.generation() <= built.named("first")
    };
    let leaf = built.dead_nodes().into_iter().find(is_leaf).unwrap();
    volume.flip(leaf, 5000, 1);
    let (_, damaged) = extract(volume, "first");
    assert!(damaged.complete && !damaged.losses.is_empty(), "{damaged:?}");
    assert!(damaged.files > 0 && damaged.files <= whole.files, "{damaged:?}");
    let (_, other) = extract(volume, "third");
    assert!(other.losses.is_empty(), "{other:?}");
}
