//! A power failure at any point of the application of changes of each kind: nothing of it, or all
//! of it, and fsck finds nothing wrong. It can be applied then, and the second time nothing is
//! left.
mod crashes;
mod history;

use cairn_engine::{
    Apply, AttributeChange, DirectoryItem, FileType, FsyncKind, InodeId, NewInode, RenameMode,
    Volume, Winner, XattrMode,
};
use cairn_environment::random::Seeded;
use crashes::Recorded;
use history::{DIRECTORY, FILE, device, open, seed};
use std::collections::BTreeMap;

const LINK: NewInode<'_> =
    NewInode { file_type: FileType::Symlink, mode: 0o777, target: Some(b"target"), ..DIRECTORY };
/// States at each point.
const STATES: usize = 3;
/// Is changed in the base without an fsync, while the fork is applied.
const UNSYNCED: &str = "/unsynced";

fn find(volume: &Volume, directory: InodeId, name: &str) -> InodeId {
    volume.lookup(directory, name.as_bytes()).unwrap().inode
}

fn put(volume: &Volume, directory: InodeId, name: &str, content: &[u8]) -> InodeId {
    let file = volume.create(directory, name.as_bytes(), &FILE).unwrap().inode;
    volume.write(file, 0, content).unwrap();
    file
}

type Tree = BTreeMap<String, String>;

/// Everything below a directory, by its path, but for the times of directories.
fn tree(volume: &Volume, root: InodeId) -> Tree {
    let mut tree = Tree::new();
    let mut next = vec![(String::new(), root)];
    while let Some((path, inode)) = next.pop() {
        let attributes = volume.attributes(inode).unwrap();
        let mut shown = format!("{} {:o}", inode.number().0, attributes.mode);
        let mut content = Vec::new();
        match attributes.file_type {
            FileType::Directory => {
                let mut take = |item: DirectoryItem<'_>| {
                    let name = String::from_utf8_lossy(item.name);
                    next.push((format!("{path}/{name}"), item.inode));
                    true
                };
                volume.read_directory(inode, 0, &mut take).unwrap();
            }
            FileType::Symlink => content = volume.read_link(inode).unwrap(),
            _ => volume.read(inode, 0, 1 << 20, &mut content).unwrap(),
        }
        if attributes.file_type != FileType::Directory {
            let cairn_engine::Attributes { links, modified, .. } = attributes;
            shown += &format!(" {links} {modified:?} {}", content.len());
        }
        let sum = content.iter().fold(7_u64, |sum, byte| sum.wrapping_mul(31) + u64::from(*byte));
        for name in volume.list_xattrs(inode).unwrap() {
            shown += &format!(" {name:?} {:?}", volume.get_xattr(inode, &name).unwrap());
        }
        tree.insert(path, format!("{shown} {sum}"));
    }
    tree
}

fn fill(volume: &Volume, base: InodeId) {
    for name in ["changed", "removed", "attributes", "moved", "linked", "exchanged"] {
        put(volume, base, name, &[1; 9000]);
    }
    put(volume, base, &UNSYNCED[1..], b"old");
    for name in ["directory", "old", "emptied"] {
        volume.create(base, name.as_bytes(), &DIRECTORY).unwrap();
    }
    put(volume, find(volume, base, "directory"), "inner", &[1; 20_000]);
    put(volume, find(volume, base, "emptied"), "inner", b"inner");
}

fn change(volume: &Volume, fork: InodeId) {
    let at = |name: &str| find(volume, fork, name);
    let directory = at("directory");
    volume.write(at("changed"), 5000, &[2; 100_000]).unwrap();
    volume.unlink(fork, b"removed").unwrap();
    let mode = AttributeChange { mode: Some(0o600), ..AttributeChange::default() };
    volume.set_attributes(at("attributes"), &mode).unwrap();
    volume.set_xattr(at("attributes"), b"user.a", &[7; 300], XattrMode::Any).unwrap();
    volume.rename(fork, b"moved", directory, b"here", RenameMode::NoReplace).unwrap();
    volume.link(at("linked"), directory, b"another").unwrap();
    volume.rename(fork, b"exchanged", fork, b"old", RenameMode::Exchange).unwrap();
    volume.rename(fork, b"directory", fork, b"renamed", RenameMode::NoReplace).unwrap();
    volume.unlink(at("emptied"), b"inner").unwrap();
    volume.remove_directory(fork, b"emptied").unwrap();
    let new = volume.create(fork, b"new", &DIRECTORY).unwrap().inode;
    put(volume, new, "file", &[3; 50_000]);
    volume.create(new, b"link", &LINK).unwrap();
}

/// The trees of base and fork, and what the file without an fsync has.
fn found(volume: &Volume) -> (Tree, Tree, Vec<u8>) {
    let [base, fork] = ["base", "fork"].map(|name| find(volume, volume.root(), name));
    let mut content = Vec::new();
    volume.read(find(volume, base, &UNSYNCED[1..]), 0, 100, &mut content).unwrap();
    let mut of_base = tree(volume, base);
    of_base.remove(UNSYNCED);
    (of_base, tree(volume, fork), content)
}

#[test]
fn a_crash_leaves_all_of_it_or_nothing() {
    let random = Seeded::new(seed());
    let device = device();
    let volume = open(&device, false);
    let root = volume.root();
    let base = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
    fill(&volume, base);
    let fork = volume.fork(base, root, b"fork").unwrap().inode;
    change(&volume, fork);
    // The base goes on by itself, in a directory that moves, too.
    put(&volume, find(&volume, base, "directory"), "of the base", b"base");
    volume.sync().unwrap();
    let (before, of_fork, _) = found(&volume);

    device.start_recording();
    volume.write(find(&volume, base, &UNSYNCED[1..]), 0, b"new").unwrap();
    // An fsync of something else meanwhile makes the log follow.
    let other = volume.create_unnamed(base, &FILE).unwrap().inode;
    volume.write(other, 0, b"x").unwrap();
    volume.fsync_blocking(other, FsyncKind::Full).unwrap();
    let Apply::Done(applied) = volume.apply(fork, Winner::Neither).unwrap() else {
        panic!("there are no conflicts");
    };
    assert!(applied.target == base && !applied.names.is_empty());
    let ended = device.explorer().history_len();
    let (after, _, _) = found(&volume);
    assert_ne!(after, before);
    volume.write(find(&volume, base, "changed"), 0, b"late").unwrap();
    volume.fsync_blocking(find(&volume, base, "changed"), FsyncKind::Full).unwrap();
    let written = device.explorer().history_len();
    let (late, _, _) = found(&volume);

    let (ended, outcomes) = ([ended, written], [before, after.clone(), late]);
    let recorded = Recorded { device, random, ended, outcomes };
    let of_base = |volume: &Volume| found(volume).0;
    recorded.crash_everywhere(
        STATES,
        |device| open(device, false),
        of_base,
        |volume, which, context| {
            let (_, fork, content) = found(volume);
            assert_eq!(fork, of_fork, "{context}");
            assert!(content == b"new" || content == b"old" && which == 0, "{context}");
            if which == 2 {
                return;
            }
            let root = find(volume, volume.root(), "fork");
            for is_second in [false, true] {
                let done = volume.apply(root, Winner::Neither).unwrap();
                let Apply::Done(applied) = done else { panic!("{context}: {done:?}") };
                let is_nothing = applied.names.is_empty() && applied.inodes.is_empty();
                assert_eq!(is_nothing, is_second || which == 1, "{context}");
                assert_eq!(of_base(volume), after, "{context}");
            }
        },
    );
}
