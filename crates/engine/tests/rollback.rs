//! Rollback: a name leads to what a snapshot holds, whoever uses the subvolume goes on with it, and
//! snapshots stay with the name.
mod small_volume;

use cairn_blockdev::MemoryDevice;
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{
    Attributes, Error, InodeId, RenameMode, Rollback, RollbackOptions, Volume, VolumeOptions,
    XattrMode,
};
use cairn_environment::atomic::{AtomicBool, Ordering};
use small_volume::{DIRECTORY, FIRST, device, get, open, open_with, put, used};
use std::sync::Arc;
use std::thread;

fn make(volume: &Volume, name: &[u8]) -> InodeId {
    volume.create_subvolume(volume.root(), name, &DIRECTORY).unwrap().inode
}

fn find(volume: &Volume, name: &[u8]) -> InodeId {
    let inode = volume.lookup(volume.root(), name).unwrap().inode;
    volume.forget(inode, 1);
    inode
}

fn id_of(volume: &Volume, root: InodeId) -> u64 {
    volume.subvolume_of(root).unwrap().0
}

/// To its snapshot of this name.
fn roll_back(volume: &Volume, name: &[u8], snapshot: &[u8]) -> Result<Rollback, Error> {
    let id = id_of(volume, find(volume, name));
    let snapshot = volume.snapshot_named(id, snapshot)?.root;
    volume.rollback(volume.root(), name, snapshot)
}

/// Of the subvolume `name`, the names of the snapshots that it shows.
fn snapshots(volume: &Volume, name: &[u8]) -> Vec<String> {
    let found = volume.snapshots(id_of(volume, find(volume, name))).unwrap();
    found.into_iter().map(|info| String::from_utf8(info.name).unwrap()).collect()
}

fn text(volume: &Volume, name: &[u8]) -> String {
    String::from_utf8(get(volume, find(volume, name), b"file").unwrap()).unwrap()
}

fn set_text(volume: &Volume, name: &[u8], text: &str) {
    let root = find(volume, name);
    match volume.lookup(root, b"file") {
        Ok(file) => {
            volume.write(file.inode, 0, text.as_bytes()).unwrap();
            volume.forget(file.inode, 1);
        }
        Err(_) => volume.forget(put(volume, root, b"file", text.as_bytes()), 1),
    }
}

/// With this seed, the hashes of two names are equal.
const HASH_SEED: [u8; 16] = *b"equal name slots";
const EQUAL: [&[u8]; 2] = [b"01b2c6ef", b"0220a9cb"];

/// Between the first look at a name and the rollback, it is moved away and back, and another one
/// with the same hash gets the place in the directory that it had.
#[test]
fn another_name_of_the_same_hash_stays() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    let options = MkfsOptions { hash_seed: Some(HASH_SEED), ..MkfsOptions::default() };
    mkfs(&*device, &options).unwrap();
    let volume = open(&device, None);
    let (root, [name, other]) = (volume.root(), EQUAL);
    let old = make(&volume, name);
    let snapshot = volume.create_snapshot(old, b"then").unwrap().root;
    let has_moved = AtomicBool::new(false);
    let permits = |_: &Attributes| {
        if !has_moved.swap(true, Ordering::Relaxed) {
            volume.rename(root, name, root, b"away", RenameMode::Replace)?;
            put(&volume, root, other, b"stays");
            volume.rename(root, b"away", root, name, RenameMode::Replace)?;
        }
        Ok(())
    };
    let options = RollbackOptions { permits: &permits, carried: None };
    let done = volume.rollback_with(root, name, snapshot, options).unwrap();
    assert_eq!(find(&volume, name), done.root);
    assert_eq!(find(&volume, &done.old_name), old);
    assert_eq!(get(&volume, root, other).unwrap(), b"stays");
    let mut names = 0;
    volume
        .read_directory(root, 0, &mut |_| {
            names += 1;
            true
        })
        .unwrap();
    assert_eq!(names, 3);
    volume.close().unwrap();
}

#[test]
fn names_change_and_nothing_else() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let home = make(&volume, b"home");
    let file = put(&volume, home, b"file", b"old");
    put(&volume, home, b"only then", b"");
    let then = volume.create_snapshot(home, b"then").unwrap();
    let nested = volume.create_subvolume(home, b"nested", &DIRECTORY).unwrap().inode;
    volume.write(file, 0, b"new").unwrap();
    volume.unlink(home, b"only then").unwrap();
    let links = volume.attributes(root).unwrap().links;
    // Data that is dirty now is written where the file is.
    volume.write(file, 3, b" and dirty").unwrap();

    let done = volume.rollback(root, b"home", then.root).unwrap();
    assert_eq!((done.old, &done.old_name[..]), (home, &b"home~before-rollback-1"[..]));
    assert!(done.has_nested);
    assert_eq!(find(&volume, b"home"), done.root);
    assert_eq!(find(&volume, &done.old_name), home);
    assert_eq!(volume.attributes(root).unwrap().links, links + 1);
    volume.write(file, 0, b"NEW").unwrap();
    assert!(matches!(volume.lookup(done.root, b"nested"), Err(Error::NotFound)));
    let check = |volume: &Volume| {
        assert_eq!(text(volume, b"home"), "old");
        assert_eq!(text(volume, b"home~before-rollback-1"), "NEW and dirty");
        assert!(get(volume, find(volume, b"home"), b"only then").is_ok());
        let old = find(volume, b"home~before-rollback-1");
        assert!(matches!(get(volume, old, b"only then"), Err(Error::NotFound)));
        let nested = volume.lookup(old, b"nested").unwrap().inode;
        let path = &volume.paths_of_subvolumes().unwrap()[&id_of(volume, nested)];
        assert_eq!(path, b"/home~before-rollback-1/nested");
        let all = volume.subvolumes().unwrap();
        let continuing: Vec<u64> =
            all.iter().filter(|info| info.continues).map(|info| info.id).collect();
        assert_eq!(continuing, [id_of(volume, find(volume, b"home"))]);
        assert_eq!(snapshots(volume, b"home"), ["then"]);
        assert_eq!(snapshots(volume, b"home~before-rollback-1"), ["then"]);
    };
    check(&volume);
    assert_eq!(volume.parent(done.root).unwrap(), root);
    assert_eq!(volume.parent(nested).unwrap(), home);
    volume.sync().unwrap();
    for _ in 0..2 {
        let volume = open(&device, None);
        check(&volume);
        volume.close().unwrap();
    }
}

#[test]
fn back_and_forward_again() {
    let device = device();
    let volume = open(&device, None);
    make(&volume, b"home");
    for snapshot in ["one", "two"] {
        set_text(&volume, b"home", snapshot);
        volume.create_snapshot(find(&volume, b"home"), snapshot.as_bytes()).unwrap();
    }
    set_text(&volume, b"home", "now");
    roll_back(&volume, b"home", b"one").unwrap();
    assert_eq!((&text(&volume, b"home")[..], snapshots(&volume, b"home").len()), ("one", 2));
    // What is made between two rollbacks stays with the name, too.
    set_text(&volume, b"home", "abc");
    volume.create_snapshot(find(&volume, b"home"), b"three").unwrap();
    let done = roll_back(&volume, b"home", b"two").unwrap();
    assert_eq!(done.old_name, b"home~before-rollback-2");
    assert_eq!(text(&volume, b"home"), "two");
    let volume = {
        volume.close().unwrap();
        open(&device, None)
    };
    assert_eq!(snapshots(&volume, b"home"), ["one", "two", "three"]);
    assert_eq!(snapshots(&volume, b"home~before-rollback-2"), ["one", "two", "three"]);
    assert_eq!(snapshots(&volume, b"home~before-rollback-1"), ["one", "two"]);
    roll_back(&volume, b"home", b"three").unwrap();
    assert_eq!(text(&volume, b"home"), "abc");
    let volume = {
        volume.close().unwrap();
        open(&device, None)
    };
    let root = volume.root();
    assert_eq!(snapshots(&volume, b"home"), ["one", "two", "three"]);
    // A name is used once among them, whoever has it.
    for name in [&b"home"[..], b"home~before-rollback-1", b"home~before-rollback-2"] {
        let created = volume.create_snapshot(find(&volume, name), b"three");
        assert!(matches!(created, Err(Error::Exists)));
    }
    let head = id_of(&volume, find(&volume, b"home"));
    let first = id_of(&volume, find(&volume, b"home~before-rollback-1"));
    assert_eq!(volume.snapshot_named(head, b"one").unwrap().subvolume, first);
    let line = volume.line_of_subvolume(head).unwrap();
    assert_eq!((line.len(), line[0], line[3]), (4, first, head));
    assert_eq!(volume.line_of_subvolume(FIRST).unwrap(), [FIRST]);
    volume.hold_snapshot(head, b"one", true).unwrap();
    assert!(matches!(volume.delete_snapshot(first, b"one"), Err(Error::Busy)));
    volume.hold_snapshot(head, b"one", false).unwrap();
    // It has forks: it stays without a name.
    volume.delete_snapshot(head, b"one").unwrap();
    assert_eq!(snapshots(&volume, b"home~before-rollback-1"), ["two"]);
    assert_eq!(snapshots(&volume, b"home"), ["two", "three"]);
    assert!(matches!(roll_back(&volume, b"home", b"one"), Err(Error::NotFound)));
    // A snapshot of another subvolume, or of a later one in the same place.
    let three = volume.snapshot_named(head, b"three").unwrap().root;
    let other = volume.rollback(root, b"home~before-rollback-1", three);
    assert!(matches!(other, Err(Error::InvalidArgument(_))));
    volume.close().unwrap();
}

#[test]
fn an_exchange_of_names_takes_it_back() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    make(&volume, b"first");
    volume.remove_subvolume(root, b"first").unwrap();
    let before = used(&volume);
    make(&volume, b"home");
    set_text(&volume, b"home", "one");
    volume.create_snapshot(find(&volume, b"home"), b"one").unwrap();
    set_text(&volume, b"home", "now");
    let old = roll_back(&volume, b"home", b"one").unwrap().old_name;
    set_text(&volume, b"home", "abc");
    volume.rename(root, b"home", root, b"other", RenameMode::NoReplace).unwrap();
    volume.rename(root, &old, root, b"home", RenameMode::NoReplace).unwrap();
    assert_eq!(text(&volume, b"home"), "now");
    // Its snapshot is shown by two; the fork may go, and the one with the snapshot may not.
    assert!(matches!(volume.remove_subvolume(root, b"home"), Err(Error::Busy)));
    volume.remove_subvolume(root, b"other").unwrap();
    assert_eq!(snapshots(&volume, b"home"), ["one"]);
    let id = id_of(&volume, find(&volume, b"home"));
    volume.delete_snapshot(id, b"one").unwrap();
    volume.remove_subvolume(root, b"home").unwrap();
    // Trees that are needed from the first snapshot on.
    assert!(used(&volume) <= before + 8, "{} blocks, {before} before", used(&volume));
    let all = used(&volume);
    let rounds = |count: usize| {
        for _ in 0..count {
            make(&volume, b"home");
            set_text(&volume, b"home", "one");
            volume.create_snapshot(find(&volume, b"home"), b"one").unwrap();
            let old = roll_back(&volume, b"home", b"one").unwrap().old_name;
            volume.remove_subvolume(root, b"home").unwrap();
            let id = id_of(&volume, find(&volume, &old));
            volume.delete_snapshot(id, b"one").unwrap();
            volume.remove_subvolume(root, &old).unwrap();
        }
    };
    rounds(3);
    assert_eq!(used(&volume), all);
    volume.close().unwrap();
}

#[test]
fn names_that_are_long_or_taken() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let long = [b'n'; 255];
    make(&volume, &long);
    set_text(&volume, &long, "1");
    volume.create_snapshot(find(&volume, &long), b"one").unwrap();
    put(&volume, root, &[&long[..237], b"~before-rollback-1"].concat(), b"");
    for number in 2..12 {
        let old = roll_back(&volume, &long, b"one").unwrap().old_name;
        let suffix = format!("~before-rollback-{number}");
        assert_eq!(old, [&long[..255 - suffix.len()], suffix.as_bytes()].concat());
    }
    assert_eq!(volume.subvolumes().unwrap().len(), 12);
    volume.close().unwrap();
}

#[test]
fn what_is_refused_leaves_nothing_behind() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let home = make(&volume, b"home");
    let file = put(&volume, root, b"file", b"");
    let then = volume.create_snapshot(home, b"then").unwrap().root;
    let of_root = volume.create_snapshot(root, b"then").unwrap().root;
    let is_invalid = |done: Result<Rollback, Error>| {
        assert!(matches!(done, Err(Error::InvalidArgument(_))), "{done:?}");
    };
    is_invalid(volume.rollback(root, b"file", then));
    is_invalid(volume.rollback(root, b"home", of_root));
    is_invalid(volume.rollback(root, b"home", home));
    is_invalid(volume.rollback(root, b"home", file));
    is_invalid(volume.rollback(root, b"a/b", then));
    assert!(matches!(volume.rollback(root, b"none", then), Err(Error::NotFound)));
    let refused = Error::NotPermitted("no");
    let options = RollbackOptions { permits: &|_| Err(refused.clone()), carried: None };
    let done = volume.rollback_with(root, b"home", then, options);
    assert!(matches!(done, Err(Error::NotPermitted("no"))));
    volume.delete_snapshot(id_of(&volume, home), b"then").unwrap();
    assert!(matches!(volume.rollback(root, b"home", then), Err(Error::Stale)));
    assert_eq!(volume.subvolumes().unwrap().len(), 2);
    volume.close().unwrap();
    let volume = open_with(&device, VolumeOptions { read_only: true, ..VolumeOptions::default() });
    let root = volume.root();
    let then = volume.snapshot_named(FIRST, b"then").unwrap().root;
    assert!(volume.rollback(root, b"home", then).is_err());
}

#[test]
fn the_default_and_an_attribute_stay_with_the_name() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let home = make(&volume, b"home");
    let old_id = id_of(&volume, home);
    let then = volume.create_snapshot(home, b"then").unwrap().root;
    volume.set_default_subvolume(old_id).unwrap();
    let name = &b"user.place"[..];
    volume.set_xattr(home, name, format!("of {old_id}").as_bytes(), XattrMode::Any).unwrap();
    let carried = |value: &[u8], old: u64, new: u64| {
        (value == format!("of {old}").as_bytes()).then(|| format!("of {new}").into_bytes())
    };
    let options = RollbackOptions { permits: &|_| Ok(()), carried: Some((name, &carried)) };
    let done = volume.rollback_with(root, b"home", then, options).unwrap();
    let new_id = id_of(&volume, done.root);
    let check = |volume: &Volume, new: InodeId, old: InodeId| {
        let value = volume.get_xattr(new, name).unwrap();
        assert_eq!(value, format!("of {new_id}").as_bytes());
        assert!(matches!(volume.get_xattr(old, name), Err(Error::NoAttribute)));
        let default = volume.subvolumes().unwrap().into_iter().find(|info| info.is_default);
        assert_eq!(default.unwrap().id, new_id);
    };
    check(&volume, done.root, home);
    // One that is of no account stays, and the fork's is what the snapshot has.
    volume.set_xattr(done.root, name, b"something", XattrMode::Any).unwrap();
    let again = volume.rollback_with(root, b"home", then, options).unwrap();
    assert!(matches!(volume.get_xattr(again.root, name), Err(Error::NoAttribute)));
    assert_eq!(volume.get_xattr(again.old, name).unwrap(), b"something");
    volume.close().unwrap();
}

#[test]
fn a_full_volume_can_be_rolled_back() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    make(&volume, b"home");
    set_text(&volume, b"home", "one");
    volume.create_snapshot(find(&volume, b"home"), b"one").unwrap();
    set_text(&volume, b"home", "now");
    let filler = put(&volume, root, b"filler", b"");
    let mut end = 0;
    while volume.write(filler, end, &[7; 65_536]).is_ok() {
        end += 65_536;
    }
    volume.sync().unwrap();
    for number in 1..4 {
        roll_back(&volume, b"home", b"one").unwrap();
        assert_eq!(text(&volume, b"home"), "one");
        let old = format!("home~before-rollback-{number}");
        assert_eq!(text(&volume, old.as_bytes()), if number == 1 { "now" } else { "one" });
    }
    volume.close().unwrap();
}

/// Somebody writes all the time, some look the name up, and two roll back at once.
#[test]
fn others_go_on() {
    const ROUNDS: usize = 12;
    let device = device();
    let volume = Arc::new(open_with(&device, VolumeOptions::default()));
    let root = volume.root();
    let home = make(&volume, b"home");
    let file = put(&volume, home, b"file", b"begin");
    volume.create_snapshot(home, b"one").unwrap();
    let has_ended = AtomicBool::new(false);
    let written = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut count = 0_u64;
            while !has_ended.load(Ordering::Acquire) || count < 100 {
                volume.write(file, 8 * count, &count.to_le_bytes()).unwrap();
                let name = format!("{count}");
                volume.forget(volume.create(home, name.as_bytes(), &DIRECTORY).unwrap().inode, 1);
                count += 1;
            }
            count
        });
        let reader = scope.spawn(|| {
            while !has_ended.load(Ordering::Acquire) {
                let found = volume.lookup(root, b"home").expect("the name is always there");
                assert!(volume.lookup(found.inode, b"file").is_ok());
                volume.forget(found.inode, 1);
            }
        });
        let rollers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        roll_back(&volume, b"home", b"one").unwrap();
                    }
                })
            })
            .collect();
        rollers.into_iter().for_each(|roller| roller.join().unwrap());
        has_ended.store(true, Ordering::Release);
        reader.join().unwrap();
        writer.join().unwrap()
    });
    let mut content = Vec::new();
    volume.read(file, 0, 1 << 20, &mut content).unwrap();
    let expected: Vec<u8> = (0..written).flat_map(u64::to_le_bytes).collect();
    assert!(content == expected, "the writer's file");
    assert_eq!(text(&volume, b"home"), "begin");
    for number in 1..=2 * ROUNDS {
        let old = find(&volume, format!("home~before-rollback-{number}").as_bytes());
        assert_eq!(old == home, number == 1);
    }
    let of_line = volume.subvolumes().unwrap().iter().filter(|info| !info.is_dying).count();
    assert_eq!(of_line, 2 + 2 * ROUNDS);
    drop(volume);
    open(&device, None).close().unwrap();
}

/// One that is gone, but for a snapshot that a fork needs, stays a part of its line, as the next
/// mount sees it.
#[test]
fn a_removed_subvolume_stays_in_its_line_while_a_fork_needs_it() {
    let device = device();
    let mut volume = open(&device, None);
    let home = make(&volume, b"home");
    volume.create_snapshot(home, b"then").unwrap();
    roll_back(&volume, b"home", b"then").unwrap();
    roll_back(&volume, b"home~before-rollback-1", b"then").unwrap();
    set_text(&volume, b"home~before-rollback-1", "changed");
    let removed = find(&volume, b"home~before-rollback-1");
    let id = id_of(&volume, removed);
    volume.fork(removed, volume.root(), b"trial").unwrap();
    let line = volume.line_of_subvolume(id).unwrap();
    let origin = volume.origin_of_fork(find(&volume, b"trial")).unwrap();
    assert_eq!((line.len(), origin), (3, removed));
    volume.remove_subvolume(volume.root(), b"home~before-rollback-1").unwrap();
    let mut origins = Vec::new();
    for _ in 0..2 {
        volume.sync().unwrap();
        assert_eq!(volume.line_of_subvolume(id).unwrap(), line);
        origins.push(volume.origin_of_fork(find(&volume, b"trial")).map_err(|e| e.to_string()));
        volume.close().unwrap();
        volume = open(&device, None);
    }
    assert_eq!(origins[0], origins[1]);
}
