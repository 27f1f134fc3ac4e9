//! What differs between snapshots, or a snapshot and its subvolume, in cases by hand, and while
//! others change it. `difference_histories.rs` has random changes.
mod small_volume;

use cairn_blockdev::{BlockDevice, MemoryDevice, SimulatedDevice};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{
    AllocateMode, AttributeChange, Difference, Error, FileType, InodeId, NewInode, RenameMode,
    TimeChange, Timestamp, Volume, VolumeOptions, XattrMode,
};
use small_volume::shown::line;
use small_volume::{DIRECTORY, FILE, FIRST, device, open, open_with, put};
use std::sync::Arc;

fn lines(volume: &Volume, old: InodeId, new: InodeId) -> Vec<String> {
    volume.differences(old, new).unwrap().iter().map(line).collect()
}

fn snapshot(volume: &Volume, name: &str) -> InodeId {
    volume.create_snapshot(volume.root(), name.as_bytes()).unwrap().root
}

fn directory(volume: &Volume, parent: InodeId, name: &[u8]) -> InodeId {
    volume.create(parent, name, &DIRECTORY).unwrap().inode
}

fn rename(volume: &Volume, from: (InodeId, &[u8]), to: (InodeId, &[u8])) {
    volume.rename(from.0, from.1, to.0, to.1, RenameMode::Replace).unwrap();
}

/// Changes a subvolume, and compares what differs then with `expected`; from the newer one to the
/// older one with `backwards`.
#[track_caller]
fn check(
    before: impl FnOnce(&Volume, InodeId),
    change: impl FnOnce(&Volume, InodeId),
    expected: &[&str],
    backwards: &[&str],
) {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    before(&volume, root);
    let old = snapshot(&volume, "old");
    change(&volume, root);
    assert_eq!(lines(&volume, old, root), expected, "to the subvolume");
    assert_eq!(lines(&volume, root, old), backwards, "from the subvolume");
    let new = snapshot(&volume, "new");
    assert_eq!(lines(&volume, old, new), expected);
    assert_eq!(lines(&volume, new, old), backwards);
    assert_eq!(lines(&volume, new, root), [""; 0]);
    assert_eq!(volume.snapshots(FIRST).unwrap().len(), 2, "temporary ones are gone");
    volume.close().unwrap();
    // A volume that is only read.
    let volume = open_with(&device, VolumeOptions { read_only: true, ..VolumeOptions::default() });
    let old = volume.snapshot_named(FIRST, b"old").unwrap().root;
    assert_eq!(lines(&volume, old, volume.root()), expected, "read-only");
    volume.close().unwrap();
}

#[test]
fn names_come_and_go() {
    check(
        |volume, root| {
            let a = directory(volume, root, b"a");
            put(volume, a, b"file", b"1");
            put(volume, root, b"gone", b"1");
            put(volume, root, b"stays", b"1");
        },
        |volume, root| {
            volume.unlink(root, b"gone").unwrap();
            let b = directory(volume, root, b"b");
            let c = directory(volume, b, b"c");
            put(volume, c, b"new", b"2");
            let a = volume.lookup(root, b"a").unwrap().inode;
            volume.unlink(a, b"file").unwrap();
            volume.remove_directory(root, b"a").unwrap();
        },
        &["- a", "- a/file", "+ b", "+ b/c", "+ b/c/new", "- gone"],
        &["+ a", "+ a/file", "- b", "- b/c", "- b/c/new", "+ gone"],
    );
}

#[test]
fn a_moved_directory_is_one_line() {
    check(
        |volume, root| {
            let a = directory(volume, root, b"a");
            let inner = directory(volume, a, b"inner");
            put(volume, inner, b"same", b"1");
            put(volume, inner, b"changed", b"1");
            directory(volume, root, b"z");
        },
        |volume, root| {
            let z = volume.lookup(root, b"z").unwrap().inode;
            rename(volume, (root, b"a"), (z, b"moved"));
            let moved = volume.lookup(z, b"moved").unwrap().inode;
            let inner = volume.lookup(moved, b"inner").unwrap().inode;
            let changed = volume.lookup(inner, b"changed").unwrap().inode;
            volume.write(changed, 0, b"2").unwrap();
        },
        &["R a -> z/moved", "M z/moved/inner/changed (data)"],
        &["R z/moved -> a", "M a/inner/changed (data)"],
    );
}

#[test]
fn names_are_exchanged_and_replaced() {
    check(
        |volume, root| {
            put(volume, root, b"a", b"1");
            put(volume, root, b"b", b"2");
            put(volume, root, b"saved", b"old");
            put(volume, root, b"kind", b"file");
            put(volume, root, b"over", b"1");
            put(volume, root, b"target", b"2");
        },
        |volume, root| {
            volume.rename(root, b"a", root, b"b", RenameMode::Exchange).unwrap();
            put(volume, root, b"saved.new", b"new");
            rename(volume, (root, b"saved.new"), (root, b"saved"));
            volume.unlink(root, b"kind").unwrap();
            directory(volume, root, b"kind");
            rename(volume, (root, b"over"), (root, b"target"));
        },
        &[
            "R b -> a",
            "R a -> b",
            "- kind",
            "+ kind",
            "M saved (replaced)",
            "- target",
            "R over -> target",
        ],
        &[
            "R b -> a",
            "R a -> b",
            "- kind",
            "+ kind",
            "R target -> over",
            "M saved (replaced)",
            "+ target",
        ],
    );
}

#[test]
fn a_file_with_several_names_is_listed_with_each() {
    check(
        |volume, root| {
            let a = directory(volume, root, b"a");
            let file = put(volume, root, b"one", b"1");
            volume.link(file, a, b"two").unwrap();
            volume.link(file, root, b"three").unwrap();
            let other = put(volume, root, b"left", b"1");
            volume.link(other, root, b"right").unwrap();
        },
        |volume, root| {
            let a = volume.lookup(root, b"a").unwrap().inode;
            let file = volume.lookup(root, b"one").unwrap().inode;
            volume.write(file, 0, b"2").unwrap();
            volume.link(file, a, b"four").unwrap();
            rename(volume, (root, b"three"), (a, b"moved"));
            volume.unlink(root, b"left").unwrap();
        },
        &[
            "R three -> a/four",
            "M a/four (data)",
            "+ a/moved",
            "M a/two (data)",
            "- left",
            "M one (data)",
        ],
        &[
            "- a/moved",
            "M a/two (data)",
            "+ left",
            "M one (data)",
            "R a/four -> three",
            "M three (data)",
        ],
    );
}

#[test]
fn a_path_is_kept_by_a_file_in_another_directory() {
    check(
        |volume, root| {
            let d = directory(volume, root, b"d");
            put(volume, d, b"kept", b"1");
            put(volume, d, b"gone", b"1");
        },
        |volume, root| {
            rename(volume, (root, b"d"), (root, b"old"));
            let old = volume.lookup(root, b"old").unwrap().inode;
            let d = directory(volume, root, b"d");
            rename(volume, (old, b"kept"), (d, b"kept"));
            volume.unlink(old, b"gone").unwrap();
            volume.remove_directory(root, b"old").unwrap();
        },
        &["M d (replaced)", "- d/gone"],
        &["M d (replaced)", "+ d/gone"],
    );
}

#[test]
fn each_kind_of_change_has_a_name() {
    let at = |seconds| Some(TimeChange::At(Timestamp { seconds, nanoseconds: 5 }));
    let change = |volume: &Volume, root: InodeId, name: &[u8], change: &AttributeChange| {
        let inode = volume.lookup(root, name).unwrap().inode;
        volume.set_attributes(inode, change).unwrap();
        inode
    };
    let none = AttributeChange::default();
    let changed = [
        "M . (owner)",
        "M appended (data)",
        "M directory (mode)",
        "M mode (mode)",
        "M owner (owner)",
        "M same (data)",
        "M times (times)",
        "M truncated (data)",
        "M xattrs (xattrs)",
    ];
    check(
        |volume, root| {
            for name in
                ["accessed", "appended", "mode", "owner", "same", "times", "truncated", "xattrs"]
            {
                let file = put(volume, root, name.as_bytes(), &[1; 9000]);
                volume.set_xattr(file, b"user.a", b"1", XattrMode::Any).unwrap();
            }
            let link = NewInode { file_type: FileType::Symlink, target: Some(b"x"), ..FILE };
            volume.create(root, b"symbolic", &link).unwrap();
            directory(volume, root, b"directory");
        },
        |volume, root| {
            change(volume, root, b"accessed", &AttributeChange { accessed: at(7), ..none });
            change(volume, root, b"mode", &AttributeChange { mode: Some(0o600), ..none });
            change(volume, root, b"owner", &AttributeChange { gid: Some(77), ..none });
            change(volume, root, b"times", &AttributeChange { modified: at(7), ..none });
            change(volume, root, b"truncated", &AttributeChange { size: Some(8999), ..none });
            change(volume, root, b"directory", &AttributeChange { mode: Some(0o700), ..none });
            volume.set_attributes(root, &AttributeChange { uid: Some(3), ..none }).unwrap();
            let appended = volume.lookup(root, b"appended").unwrap().inode;
            volume.write(appended, 9000, b"more").unwrap();
            let same = volume.lookup(root, b"same").unwrap().inode;
            volume.write(same, 0, &[1; 9000]).unwrap();
            let xattrs = volume.lookup(root, b"xattrs").unwrap().inode;
            volume.set_xattr(xattrs, b"user.a", &[2; 20_000], XattrMode::Any).unwrap();
        },
        &changed,
        &changed,
    );
}

#[test]
fn holes_and_preallocation_are_data_as_far_as_they_change_anything() {
    let allocate = |volume: &Volume, name: &[u8], offset, length, mode| {
        let before = volume.lookup(volume.root(), name).unwrap();
        volume.allocate(before.inode, offset, length, mode).unwrap();
        let modified = Some(TimeChange::At(before.modified));
        let change = AttributeChange { modified, ..AttributeChange::default() };
        volume.set_attributes(before.inode, &change).unwrap();
    };
    let changed = ["M punched (data)", "M written (data)", "M zeroed (data)"];
    check(
        |volume, root| {
            for name in [b"behind", b"punche", b"zeroed", b"hollow"] {
                put(volume, root, name, &[1; 40_000]);
            }
            rename(volume, (root, b"punche"), (root, b"punched"));
            allocate(volume, b"hollow", 8192, 8192, AllocateMode::PunchHole);
            let written = put(volume, root, b"written", b"");
            let mode = AllocateMode::Allocate { keep_size: false };
            volume.allocate(written, 0, 40_000, mode).unwrap();
        },
        |volume, root| {
            let keep = AllocateMode::Allocate { keep_size: true };
            allocate(volume, b"behind", 40_960, 40_960, keep);
            allocate(volume, b"punched", 8192, 8192, AllocateMode::PunchHole);
            let keep = AllocateMode::ZeroRange { keep_size: true };
            allocate(volume, b"zeroed", 8192, 8192, keep);
            // The hole is there already.
            allocate(volume, b"hollow", 8192, 4096, AllocateMode::PunchHole);
            let written = volume.lookup(root, b"written").unwrap().inode;
            volume.write(written, 4096, &[0; 4096]).unwrap();
        },
        &changed,
        &changed,
    );
}

#[test]
fn what_has_no_name_is_not_listed() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let open_file = put(&volume, root, b"open", b"1");
    let old = snapshot(&volume, "old");
    volume.unlink(root, b"open").unwrap();
    let open_directory = directory(&volume, root, b"directory");
    let first = snapshot(&volume, "first");
    volume.remove_directory(root, b"directory").unwrap();
    let mode = AttributeChange { mode: Some(0o700), ..AttributeChange::default() };
    volume.set_attributes(open_directory, &mode).unwrap();
    let unnamed = volume.create_unnamed(root, &FILE).unwrap().inode;
    volume.write(unnamed, 0, b"1").unwrap();
    let middle = snapshot(&volume, "middle");
    assert_eq!(lines(&volume, old, middle), ["- open"]);
    assert_eq!(lines(&volume, first, middle), ["- directory"]);
    assert_eq!(lines(&volume, middle, first), ["+ directory"]);
    volume.forget(open_directory, 1);
    volume.write(open_file, 0, b"more").unwrap();
    volume.write(unnamed, 0, b"more").unwrap();
    let last = snapshot(&volume, "last");
    assert_eq!(lines(&volume, middle, last), [""; 0]);
    volume.link(unnamed, root, b"named").unwrap();
    assert_eq!(lines(&volume, last, root), ["+ named"]);
    volume.close().unwrap();
}

#[test]
fn nested_subvolumes_are_left_out() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let old = snapshot(&volume, "old");
    let home = volume.create_subvolume(root, b"home", &DIRECTORY).unwrap().inode;
    put(&volume, home, b"file", b"1");
    put(&volume, root, b"file", b"1");
    assert_eq!(lines(&volume, old, root), ["+ file"]);
    let of_home = volume.create_snapshot(home, b"one").unwrap().root;
    put(&volume, home, b"more", b"1");
    assert_eq!(lines(&volume, of_home, home), ["+ more"]);
    for (one, other) in [(of_home, old), (root, home), (old, home)] {
        assert!(matches!(volume.differences(one, other), Err(Error::CrossDevice)));
    }
    let file = volume.lookup(home, b"file").unwrap().inode;
    assert!(matches!(volume.differences(of_home, file), Err(Error::InvalidArgument(_))));
    let nobody = InodeId(u64::from(u32::MAX) << 30 | 1);
    assert!(matches!(
        volume.differences(nobody, home),
        Err(Error::NotFound | Error::InvalidArgument(_))
    ));
    volume.delete_snapshot(volume.subvolume_of(home).unwrap().0, b"one").unwrap();
    assert!(matches!(volume.differences(of_home, home), Err(Error::Stale)));
    volume.close().unwrap();
}

#[test]
fn a_temporary_snapshot_that_a_crash_left_is_deleted_by_the_next_mount() {
    let device = device();
    let volume = open(&device, None);
    let name = b".diff-0123456789abcdef";
    let made = volume.create_snapshot(volume.root(), name);
    assert!(matches!(made, Err(Error::InvalidArgument(_))), "{made:?}");
    for name in [&b".diff-0123456789abcde"[..], b".diff-0123456789abcdeg", b".diff-"] {
        volume.create_snapshot(volume.root(), name).unwrap();
    }
    volume.close().unwrap();
    // As a mount leaves it that ends while a temporary snapshot exists: a name is changed on the
    // device.
    let before = volume_with_name(&device, b".diff-0123456789abcdeg", name);
    assert!(before);
    let volume = open_with(&device, VolumeOptions { read_only: true, ..VolumeOptions::default() });
    let left = volume.snapshot_named(FIRST, name).unwrap();
    assert!(left.is_temporary());
    volume.close().unwrap();
    let volume = open(&device, None);
    assert!(matches!(volume.snapshot_named(FIRST, name), Err(Error::NotFound)));
    assert_eq!(volume.snapshots(FIRST).unwrap().len(), 2);
    volume.close().unwrap();
}

/// Gives a snapshot on the device another name of the same length, in all nodes.
fn volume_with_name(device: &Arc<MemoryDevice>, name: &[u8], other: &[u8]) -> bool {
    use cairn_blockdev::BlockDevice;
    const NODE_BYTES: usize = 16 * 1024;
    assert_eq!(name.len(), other.len());
    let (mut found, mut page) = (false, vec![0; NODE_BYTES]);
    for at in (0..device.length_bytes()).step_by(NODE_BYTES) {
        device.read(at, &mut page).unwrap();
        let is_node = page.starts_with(b"CRNN");
        let places: Vec<usize> =
            (0..NODE_BYTES - name.len()).filter(|at| page[*at..].starts_with(name)).collect();
        if is_node && !places.is_empty() {
            places.iter().for_each(|at| page[*at..][..name.len()].copy_from_slice(other));
            cairn_format::Header::seal(&mut page);
            device.write(at, &[&page]).unwrap();
            found = true;
        }
    }
    found
}

/// Files with names so long that their entries fill several nodes.
const LONG_NAMES: u32 = 300;

/// What it hides is counted.
#[test]
fn a_directory_that_cannot_be_read_is_reported_once() {
    const NODE_BYTES: usize = 16 * 1024;
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let prefix = [b'n'; 200];
    let name = |n: u32| [&prefix[..], n.to_string().as_bytes()].concat();
    let names: Vec<Vec<u8>> = (0..LONG_NAMES).map(name).collect();
    let files: Vec<_> = names.iter().map(|name| put(&volume, root, name, b"old")).collect();
    let old = snapshot(&volume, "old");
    for file in files {
        volume.write(file, 0, b"new").unwrap();
    }
    assert_eq!(lines(&volume, old, root).len(), names.len());
    volume.close().unwrap();
    let (mut page, mut reports) = (vec![0; NODE_BYTES], Vec::new());
    for at in (0..device.length_bytes()).step_by(NODE_BYTES) {
        device.read(at, &mut page).unwrap();
        let has_name = |at: &usize| page[*at..].starts_with(&prefix) && page[at - 1] != b'n';
        if !page.starts_with(b"CRNN")
            || (1..NODE_BYTES - prefix.len()).filter(has_name).count() < 20
        {
            continue;
        }
        device.write(at, &[&vec![0; NODE_BYTES]]).unwrap();
        let volume = open_with(&device, VolumeOptions { read_only: true, ..Default::default() });
        let compared = volume
            .snapshot_named(FIRST, b"old")
            .and_then(|old| volume.compare(old.root, volume.root()));
        // What is compared may stand in the node, too; or that is an earlier state of another one.
        reports.extend(compared.into_iter().map(|compared| {
            let damage: Vec<String> = compared.damage.iter().map(Error::to_string).collect();
            (compared.differences.len(), damage)
        }));
        drop(volume.close());
        device.write(at, &[&page]).unwrap();
    }
    reports.retain(|(_, damage)| !damage.is_empty());
    assert!(!reports.is_empty(), "no node had names alone");
    for (found, damage) in reports {
        let hidden = format!("it and {} more", names.len() - found - 1);
        assert!(damage.len() == 2 && damage[1].contains(&hidden), "{found} found, {damage:#?}");
    }
}

/// What others do meanwhile neither fails a comparison nor appears in it as what it is not.
#[test]
fn a_subvolume_is_compared_while_it_changes_and_snapshots_go() {
    let device = device();
    let volume = open_with(&device, VolumeOptions::default());
    let root = volume.root();
    let directories: Vec<InodeId> =
        (0..20).map(|at| directory(&volume, root, format!("d{at}").as_bytes())).collect();
    for number in 0..2000_u64 {
        let name = format!("{number}").into_bytes();
        volume.forget(put(&volume, directories[number as usize % 20], &name, b"1"), 1);
    }
    let old = snapshot(&volume, "old");
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            // Both names of a pair come and go in one operation after the other.
            for number in 0..300_u64 {
                let at = directories[number as usize % 20];
                let name = format!("new{}", number / 2);
                if number % 2 == 0 {
                    volume.forget(put(&volume, at, name.as_bytes(), b"2"), 1);
                } else {
                    let before = directories[number as usize % 20 - 1];
                    let mode = RenameMode::Replace;
                    volume.rename(before, name.as_bytes(), at, b"same", mode).unwrap();
                }
            }
        });
        let deleter = scope.spawn(|| {
            for number in 0..10 {
                let name = format!("short{number}");
                let made = snapshot(&volume, &name);
                volume.delete_snapshot(FIRST, name.as_bytes()).unwrap();
                assert!(matches!(volume.differences(old, made), Err(Error::Stale)));
            }
        });
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..10 {
                        // Never more than one new name is on its way, and each place has one.
                        let found = volume.differences(old, root).unwrap();
                        let is_new =
                            |one: &&Difference| one.path.windows(4).any(|at| at == b"/new");
                        assert!(found.iter().filter(is_new).count() <= 1, "{found:?}");
                        let known = volume.snapshots(FIRST).unwrap();
                        for info in known.iter().filter(|info| info.root != old) {
                            match volume.differences(info.root, old) {
                                Ok(_) | Err(Error::Stale) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                    }
                })
            })
            .collect();
        for thread in readers.into_iter().chain([writer, deleter]) {
            thread.join().unwrap();
        }
    });
    assert_eq!(volume.snapshots(FIRST).unwrap().len(), 1, "temporary ones are gone");
    assert_eq!(volume.statistics().failures, Default::default(), "no damage was met");
    volume.close().unwrap();
}

/// A file notes the directory in which it was last given a name, however that was: others are not
/// searched for it.
#[test]
fn files_are_found_without_a_search_of_all_directories() {
    let give: [fn(&Volume, InodeId, InodeId) -> InodeId; 5] = [
        |volume, _, to| put(volume, to, b"named", b"1"),
        |volume, from, to| {
            let inode = put(volume, from, b"a", b"1");
            rename(volume, (from, b"a"), (to, b"named"));
            inode
        },
        |volume, from, to| {
            let inode = put(volume, from, b"b", b"1");
            put(volume, to, b"named", b"2");
            let mode = RenameMode::Exchange;
            volume.rename(from, b"b", to, b"named", mode).unwrap();
            inode
        },
        |volume, from, to| {
            let inode = put(volume, from, b"a", b"1");
            volume.link(inode, to, b"named").unwrap();
            volume.unlink(from, b"a").unwrap();
            inode
        },
        |volume, from, to| {
            let inode = volume.create_unnamed(from, &FILE).unwrap().inode;
            volume.link(inode, to, b"named").unwrap();
            inode
        },
    ];
    let device = Arc::new(SimulatedDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let options = || VolumeOptions { background: false, ..VolumeOptions::default() };
    let open = || Volume::open(Arc::clone(&device) as Arc<dyn BlockDevice>, options()).unwrap();
    let volume = open();
    let root = volume.root();
    let directories: Vec<InodeId> =
        (0..40).map(|at| directory(&volume, root, format!("d{at:02}").as_bytes())).collect();
    for at in &directories {
        for number in 0..100 {
            volume.forget(put(&volume, *at, format!("{number:0>200}").as_bytes(), b""), 1);
        }
    }
    let files: Vec<InodeId> =
        (0..5).map(|way| give[way](&volume, directories[38], directories[way * 2])).collect();
    snapshot(&volume, "old");
    for (way, inode) in files.into_iter().enumerate() {
        volume.write(inode, 0, b"changed").unwrap();
        let new = format!("new{way}");
        snapshot(&volume, &new);
    }
    volume.close().unwrap();
    let mut older = "old".to_string();
    for way in 0..5 {
        let volume = open();
        let newer = format!("new{way}");
        let [old, new] = [&older, &newer]
            .map(|name| volume.snapshot_named(FIRST, name.as_bytes()).unwrap().root);
        let before = device.counters().reads;
        assert_eq!(lines(&volume, old, new), [format!("M d{:02}/named (data)", way * 2)]);
        let reads = device.counters().reads - before;
        assert!(reads < 30, "way {way}: {reads} reads; all directories have more than 80 leaves");
        volume.close().unwrap();
        older = newer;
    }
}
