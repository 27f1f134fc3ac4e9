//! More snapshots than are checked as wholes, each for itself.
use crate::test_snapshots::SnapshotVolume;
use crate::test_volume::TestVolume;
use crate::{PassId, Severity};
use cairn_format::*;

/// More than 64.
const SNAPSHOTS: u32 = 66;

/// A volume in which one snapshot has what `change` does. Returns the errors.
fn errors(change: impl Fn(&mut SnapshotVolume, [u64; 2], u64)) -> Vec<String> {
    let mut built = SnapshotVolume::new();
    // Room for nodes.
    built.volume.next_data += 1500;
    let directories = ["a", "b"].map(|name| built.volume.make_directory(INODE_ROOT.0, name));
    let file = built.volume.make_file(directories[0], "file", 9000);
    built.volume.link(file, directories[1], "another");
    for index in 0..20 {
        built.volume.make_file(directories[1], &format!("file-{index}"), 100);
    }
    for number in 0..SNAPSHOTS {
        built.volume.change_inode(file, |item| item.uid = number);
        let before = built.volume.items.clone();
        if number == SNAPSHOTS / 2 {
            change(&mut built, directories, file);
        }
        built.commit();
        built.snapshot(&format!("snapshot-{number}"));
        built.volume.items = before;
    }
    built.commit();
    built.write();
    let report = built.volume.check();
    assert!(report.passes.contains(&PassId::Snapshots));
    let findings = report.findings.iter();
    assert!(findings.clone().all(|finding| finding.severity == Severity::Error), "{report}");
    findings.map(ToString::to_string).collect()
}

/// A change of a tree with two directories in its root directory, `a` and `b`, and a file that has
/// a name in each.
pub(crate) type Change = fn(&mut SnapshotVolume, [u64; 2], u64);

/// All of `errors` are about `name`, and one of them has this text.
#[track_caller]
pub(crate) fn assert_all_in(errors: &[String], name: &str, text: &str) {
    let is_alone = !errors.is_empty() && errors.iter().all(|error| error.contains(name));
    assert!(is_alone, "{name}: {errors:?}");
    assert!(errors.iter().any(|error| error.contains(text)), "{text}: {errors:?}");
}

#[track_caller]
fn expect(text: &str, change: Change) {
    let name = format!("snapshot \"snapshot-{}\"", SNAPSHOTS / 2);
    assert_all_in(&errors(change), &name, text);
}

#[test]
fn many_good_ones_are_in_order() {
    assert_eq!(errors(|_, _, _| {}), [""; 0]);
    assert_eq!(errors(change_rightly), [""; 0]);
}

/// Changes that are right.
pub(crate) fn change_rightly(built: &mut SnapshotVolume, [one, two]: [u64; 2], file: u64) {
    let volume = &mut built.volume;
    let (name, _) = move_directory(volume, two, INODE_ROOT.0, one, "b");
    assert!(volume.items.contains_key(&name));
    volume.set_xattr(file, "user.large", 10_000);
    volume.make_file(two, "of one", 5000);
}

/// Moves a directory, with all counts.
fn move_directory(
    volume: &mut TestVolume,
    inode: u64,
    from: u64,
    to: u64,
    name: &str,
) -> (Key, u64) {
    let target = EntryTarget::Inode(InodeNumber(inode), FileType::Directory);
    let (key, _) = TestVolume::entry_of(target, from, name);
    volume.items.remove(&key).unwrap();
    volume.change_inode(from, |item| {
        item.entries -= 1;
        item.size -= name.len() as u64;
        item.links -= 1;
    });
    volume.add_entry(target, to, name);
    volume.change_inode(inode, |item| item.parent = to);
    let (key, _) = TestVolume::entry_of(target, to, name);
    (key, inode)
}

#[test]
fn what_is_wrong_in_one_of_many_is_named() {
    change_wrongly(expect);
}

/// Calls `expect` with changes that are wrong, and texts of the errors.
pub(crate) fn change_wrongly(expect: fn(&str, Change)) {
    expect("says 3 links, but has 2 names", |built, _, file| {
        built.volume.change_inode(file, |item| item.links = 3);
    });
    expect("says 4 blocks, but there are 3", |built, _, file| {
        built.volume.change_inode(file, |item| item.blocks = 4);
    });
    expect("entries, but there are", |built, [one, _], _| {
        built.volume.change_inode(one, |item| item.entries += 1);
    });
    expect("bytes of names, but there are", |built, [one, _], _| {
        built.volume.change_inode(one, |item| item.size += 1);
    });
    expect("which does not exist", |built, [one, _], _| {
        let target = EntryTarget::Inode(InodeNumber(17_000), FileType::Regular);
        built.volume.add_entry(target, one, "ghost");
    });
    expect("is its parent, but that is", |built, [one, two], _| {
        built.volume.change_inode(two, |item| item.parent = one);
    });
    expect("an item of an inode that does not exist", |built, _, file| {
        built.volume.items.remove(&Key::new(InodeNumber(file), ItemKind::Inode, 0)).unwrap();
    });
    expect("has no links and no orphan item", |built, _, file| {
        built.volume.change_inode(file, |item| item.links = 0);
    });
    expect("of an extended attribute is missing", |built, _, file| {
        built.volume.set_xattr(file, "user.large", 10_000);
        let is_part = |key: &Key| key.inode == file && key.kind == ItemKind::XattrPart as u8;
        let last = *built.volume.items.keys().rfind(|key| is_part(key)).unwrap();
        built.volume.items.remove(&last).unwrap();
    });
    expect("in a file of 5000 bytes", |built, _, file| {
        built.volume.change_inode(file, |item| item.size = 5000);
    });
    // All counts are right, and no name leads there.
    expect("cannot be reached from the root", |built, [one, two], _| {
        move_directory(&mut built.volume, two, INODE_ROOT.0, one, "b");
        move_directory(&mut built.volume, one, INODE_ROOT.0, two, "a");
    });
}
