//! Forks, in cases by hand: each goes its own way from where it began, a removed one gives its
//! space back, and names of subvolumes stay where they were. `fork_histories.rs` has random
//! changes.
mod small_volume;

use cairn_blockdev::MemoryDevice;
use cairn_engine::{
    AllocateMode, Difference, DifferenceKind, Error, ForkOptions, InodeId, RenameMode, Volume,
    VolumeOptions, XattrMode,
};
use small_volume::gated::{Gated, Held};
use small_volume::{DIRECTORY, FILE, FIRST, device, get, open, open_with, put, used};
use std::sync::Arc;
use std::thread;

/// An empty volume, and how many blocks of it are in use: the trees that forks need stay.
fn volume_that_had_a_fork() -> (Arc<MemoryDevice>, Volume, u64) {
    let device = device();
    let volume = open(&device, None);
    let fork = volume.fork(volume.root(), volume.root(), b"first").unwrap().inode;
    volume.forget(fork, 1);
    volume.remove_subvolume(volume.root(), b"first").unwrap();
    let before = used(&volume);
    (device, volume, before)
}

fn names_in(volume: &Volume, directory: InodeId) -> Vec<String> {
    let mut names = Vec::new();
    let mut take = |item: cairn_engine::DirectoryItem<'_>| {
        names.push(String::from_utf8_lossy(item.name).into_owned());
        true
    };
    volume.read_directory(directory, 0, &mut take).unwrap();
    names.sort();
    names
}

#[test]
fn a_fork_goes_its_own_way() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let base = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
    let file = put(&volume, base, b"file", &[1; 50_000]);
    put(&volume, base, b"gone", b"in the base");
    let fork = volume.fork(base, root, b"fork").unwrap();
    assert!(matches!(volume.fork(base, root, b"fork"), Err(Error::Exists)));
    assert!(matches!(volume.fork(file, root, b"x"), Err(Error::InvalidArgument(_))));
    let fork = fork.inode;
    assert_eq!(get(&volume, fork, b"file").unwrap(), [1; 50_000]);
    let forked = volume.lookup(fork, b"file").unwrap().inode;
    assert_eq!(forked.number(), file.number());
    volume.write(forked, 20_000, &[2; 100]).unwrap();
    volume.write(file, 40_000, &[3; 100]).unwrap();
    volume.unlink(base, b"gone").unwrap();
    put(&volume, fork, b"new", b"in the fork");
    // A fork of a fork, and one of a snapshot of a fork.
    let (id, is_root) = volume.subvolume_of(fork).unwrap();
    assert!(is_root);
    let second = volume.fork(fork, fork, b"second").unwrap().inode;
    let snapshot = volume.create_snapshot(fork, b"then").unwrap().root;
    volume.unlink(fork, b"new").unwrap();
    let third = volume.fork(snapshot, root, b"third").unwrap().inode;
    let check = |volume: &Volume, [base, fork, second, third]: [InodeId; 4]| {
        let file = get(volume, base, b"file").unwrap();
        assert_eq!((file[20_050], file[40_050]), (1, 3));
        for fork in [fork, second, third] {
            let file = get(volume, fork, b"file").unwrap();
            assert_eq!((file[20_050], file[40_050]), (2, 1));
            assert_eq!(get(volume, fork, b"gone").unwrap(), b"in the base");
        }
        assert_eq!(names_in(volume, base), ["file"]);
        assert_eq!(names_in(volume, fork), ["file", "gone", "second"]);
        assert_eq!(names_in(volume, second), ["file", "gone", "new"]);
        assert_eq!(names_in(volume, third), ["file", "gone", "new"]);
    };
    check(&volume, [base, fork, second, third]);
    volume.sync().unwrap();
    for is_clean in [false, true, true] {
        let volume = open(&device, None);
        let root = volume.root();
        let find = |from: InodeId, name: &[u8]| volume.lookup(from, name).unwrap().inode;
        let fork = find(root, b"fork");
        check(&volume, [find(root, b"base"), fork, find(fork, b"second"), find(root, b"third")]);
        let origins: Vec<_> = volume.subvolumes().unwrap().iter().map(|one| one.origin).collect();
        assert_eq!(origins.iter().flatten().count(), 3, "{origins:?}");
        assert_eq!(origins[3].unwrap().0, id);
        if is_clean {
            volume.close().unwrap();
        }
    }
}

#[test]
fn what_is_told_of_a_fork_needs_no_opening() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let base = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
    volume.set_xattr(base, b"user.a", b"1", XattrMode::Create).unwrap();
    volume.fork(base, root, b"fork").unwrap();
    // Now the fork alone has the nodes of its origin.
    put(&volume, base, b"new", b"");
    volume.close().unwrap();
    let volume = open(&device, None);
    let told = volume.subvolumes_with_attribute(b"user.a").unwrap();
    let mut values = told.iter().map(|(_, _, value)| value.as_slice());
    assert!(told.len() == 2 && values.all(|value| value == b"1"), "{told:?}");
    assert_eq!(volume.statistics().failures.count(), 0);
}

#[test]
fn a_removed_fork_gives_back_what_it_had() {
    let (_device, volume, before) = volume_that_had_a_fork();
    let root = volume.root();
    let file = put(&volume, root, b"file", &[1; 400_000]);
    volume.forget(file, 1);
    let with_file = used(&volume);
    let fork = volume.fork(root, root, b"fork").unwrap().inode;
    volume.forget(fork, 1);
    assert!(used(&volume) < with_file + 20, "it shares the blocks");
    let forked = volume.lookup(fork, b"file").unwrap().inode;
    volume.write(forked, 0, &[2; 200_000]).unwrap();
    volume.forget(forked, 1);
    assert!(used(&volume) > with_file + 48);
    // Its origin is a snapshot without a name.
    assert_eq!(volume.snapshots(FIRST).unwrap(), []);
    volume.remove_subvolume(root, b"fork").unwrap();
    assert!(matches!(volume.attributes(fork), Err(Error::Stale)));
    assert_eq!(used(&volume), with_file);
    // What the source gives up stays as long as the fork has it.
    volume.fork(root, root, b"fork").unwrap();
    volume.unlink(root, b"file").unwrap();
    assert!(used(&volume) > before + 98);
    volume.remove_subvolume(root, b"fork").unwrap();
    assert_eq!(used(&volume), before);
    volume.close().unwrap();
}

#[test]
fn a_deleted_snapshot_stays_for_its_forks() {
    let (device, volume, before) = volume_that_had_a_fork();
    let root = volume.root();
    put(&volume, root, b"file", &[1; 400_000]);
    let snapshot = volume.create_snapshot(root, b"one").unwrap().root;
    for name in [&b"a"[..], b"b"] {
        volume.fork(snapshot, root, name).unwrap();
    }
    volume.unlink(root, b"file").unwrap();
    // Its deletion frees nothing now.
    let made = volume.snapshot_named(FIRST, b"one").unwrap().generation;
    assert_eq!(volume.space_of_snapshots(FIRST, &[made]).unwrap(), 0);
    assert_eq!(volume.snapshot_usage(FIRST).unwrap()[0].unique_blocks, 0);
    assert!(volume.referenced_by_snapshots(FIRST).unwrap()[0].1 >= 98);
    volume.delete_snapshot(FIRST, b"one").unwrap();
    assert_eq!(volume.snapshots(FIRST).unwrap(), []);
    assert!(matches!(volume.lookup(snapshot, b"file"), Err(Error::Stale)));
    assert!(matches!(volume.fork(snapshot, root, b"c"), Err(Error::Stale)));
    // The name is free.
    volume.create_snapshot(root, b"one").unwrap();
    volume.delete_snapshot(FIRST, b"one").unwrap();
    volume.sync().unwrap();
    volume.remove_subvolume(root, b"a").unwrap();
    volume.close().unwrap();
    let volume = open(&device, None);
    let root = volume.root();
    let fork = volume.lookup(root, b"b").unwrap().inode;
    assert_eq!(get(&volume, fork, b"file").unwrap(), [1; 400_000]);
    // What names others can't be removed; what only has forks can.
    volume.create_subvolume(fork, b"inner", &DIRECTORY).unwrap();
    assert!(matches!(volume.remove_subvolume(root, b"b"), Err(Error::NotEmpty)));
    let inner = volume.lookup(fork, b"inner").unwrap().inode;
    volume.fork(inner, root, b"other").unwrap();
    volume.remove_subvolume(fork, b"inner").unwrap();
    volume.remove_subvolume(root, b"b").unwrap();
    volume.remove_subvolume(root, b"other").unwrap();
    assert_eq!(used(&volume), before);
    volume.close().unwrap();
}

#[test]
fn names_of_subvolumes_stay_where_they_are() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let inner = volume.create(root, b"inner", &DIRECTORY).unwrap().inode;
    volume.create_subvolume(inner, b"sub", &DIRECTORY).unwrap();
    put(&volume, inner, b"file", b"1");
    let old = volume.create_snapshot(root, b"old").unwrap().root;
    let check = |volume: &Volume, fork: InodeId| {
        let inner = volume.lookup(fork, b"inner").unwrap();
        assert_eq!(names_in(volume, inner.inode), ["file"]);
        assert_eq!(inner.links, 2);
        assert!(matches!(volume.lookup(inner.inode, b"sub"), Err(Error::NotFound)));
        // The names are free, and the directory can be removed.
        volume.create(inner.inode, b"sub", &FILE).unwrap();
        volume.unlink(inner.inode, b"sub").unwrap();
        volume.unlink(inner.inode, b"file").unwrap();
        volume.remove_directory(fork, b"inner").unwrap();
    };
    // Of the live subvolume, into itself; then of a snapshot.
    for (source, name) in [(root, &b"live"[..]), (old, b"of-old"), (root, b"again")] {
        let fork = volume.fork(source, root, name).unwrap().inode;
        assert!(!names_in(&volume, fork).contains(&"live".into()));
        check(&volume, fork);
        volume.create_subvolume(fork, b"own", &DIRECTORY).unwrap();
    }
    assert_eq!(names_in(&volume, inner), ["file", "sub"]);
    assert_eq!(names_in(&volume, root), ["again", "inner", "live", "of-old"]);
    volume.sync().unwrap();
    let volume = open(&device, None);
    let root = volume.root();
    for name in [&b"live"[..], b"of-old", b"again"] {
        let fork = volume.lookup(root, name).unwrap().inode;
        assert_eq!(names_in(&volume, fork), ["own"]);
        let to = volume.rename(fork, b"own", root, &[name, b"-own"].concat(), RenameMode::Replace);
        to.unwrap();
        volume.remove_subvolume(root, name).unwrap();
    }
    volume.close().unwrap();
}

/// What differs between a subvolume and its forks, by path.
#[test]
fn forks_can_be_compared() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let base = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
    let other = volume.create_subvolume(root, b"other", &DIRECTORY).unwrap().inode;
    for name in [&b"a"[..], b"b", b"c", b"d"] {
        put(&volume, base, name, &[1; 10_000]);
    }
    let fork = volume.fork(base, root, b"fork").unwrap().inode;
    let second = volume.fork(fork, root, b"second").unwrap().inode;
    let shown = |old: InodeId, new: InodeId| -> Vec<String> {
        let found = volume.differences(old, new).unwrap();
        let line = |one: &Difference| {
            let sign = match &one.kind {
                DifferenceKind::Added => "+".to_owned(),
                DifferenceKind::Removed => "-".to_owned(),
                DifferenceKind::Moved { from } => format!("{} >", String::from_utf8_lossy(from)),
                DifferenceKind::Changed(changes) if changes.data => "M".to_owned(),
                DifferenceKind::Changed(_) => "m".to_owned(),
            };
            format!("{sign} {}", String::from_utf8_lossy(&one.path))
        };
        found.iter().map(line).collect()
    };
    assert_eq!(shown(base, fork), [""; 0]);
    put(&volume, fork, b"new", b"in the fork");
    put(&volume, base, b"new", b"in the base");
    let file = volume.lookup(fork, b"b").unwrap().inode;
    volume.write(file, 5000, b"changed").unwrap();
    volume.rename(fork, b"c", fork, b"moved", RenameMode::Replace).unwrap();
    volume.unlink(base, b"d").unwrap();
    let found = shown(base, fork);
    // The file of another number has the same name.
    assert!(found.contains(&"M new".into()) || found.contains(&"m new".into()), "{found:?}");
    let rest: Vec<_> = found.iter().filter(|line| !line.ends_with("new")).collect();
    assert_eq!(rest, ["M b", "+ d", "c > moved"]);
    assert_eq!(shown(second, fork), ["M b", "c > moved", "+ new"]);
    assert_eq!(shown(fork, second), ["M b", "moved > c", "- new"]);
    assert!(matches!(volume.differences(base, other), Err(Error::CrossDevice)));
    volume.close().unwrap();
}

/// Subvolumes and their forks are removed in any order, whatever is left to do.
#[test]
fn removed_forks_do_not_keep_their_origin() {
    let device = device();
    let volume = open_with(&device, VolumeOptions::default());
    let root = volume.root();
    for round in 0..10 {
        let base = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
        for number in 0..200 {
            put(&volume, base, format!("{number}").as_bytes(), &[1; 5000]);
        }
        let fork = volume.fork(base, root, b"fork").unwrap().inode;
        for number in (0..200).step_by(1 + round) {
            let file = volume.lookup(fork, format!("{number}").as_bytes()).unwrap().inode;
            volume.write(file, 0, &[2; 5000]).unwrap();
        }
        let second = volume.fork(fork, root, b"second").unwrap().inode;
        put(&volume, second, b"own", &[3; 100_000]);
        let mut names = [&b"second"[..], b"fork", b"base"];
        names.rotate_left(round % 3);
        if round % 2 == 0 {
            names.reverse();
        }
        for name in names {
            volume.remove_subvolume(root, name).unwrap();
        }
    }
    assert_eq!(names_in(&volume, root), [""; 0]);
    volume.close().unwrap();
}

/// Removes the subvolume with this name in the root directory of the volume on `device`, closing
/// the volume again and again, until only `left` subvolumes are there. Returns how often.
fn remove_interrupted(device: &Arc<MemoryDevice>, name: &[u8], left: usize) -> u32 {
    let mut volume = open_with(device, VolumeOptions::default());
    volume.remove_subvolume(volume.root(), name).unwrap();
    let (mut rounds, mut is_left) = (0, true);
    while is_left {
        volume.close().unwrap();
        volume = open_with(device, VolumeOptions::default());
        let free = volume.space().free_blocks;
        is_left = volume.subvolumes().unwrap().len() > left;
        // Some of it is done before the next interruption.
        while is_left && volume.space().free_blocks == free {
            volume.commit().unwrap();
            is_left = volume.subvolumes().unwrap().len() > left;
        }
        rounds += 1;
    }
    volume.close().unwrap();
    rounds
}

/// What a fork has made is given back in many steps, between which the volume may be closed.
#[test]
fn an_interrupted_removal_goes_on() {
    let (device, volume, before) = volume_that_had_a_fork();
    let root = volume.root();
    let name = |number: u32| format!("a-file-with-a-longer-name-{number}").into_bytes();
    for number in 0..4000 {
        let file = put(&volume, root, &name(number), &[1; 100]);
        volume.forget(file, 1);
    }
    // A leaf that its name splits stays split.
    let directory = volume.create(root, b"fork", &DIRECTORY).unwrap().inode;
    volume.forget(directory, 1);
    volume.remove_directory(root, b"fork").unwrap();
    let with_files = used(&volume);
    volume.fork(root, root, b"fork").unwrap();
    let fork = volume.lookup(root, b"fork").unwrap().inode;
    for number in (0..4000).filter(|number| number % 40 < 25) {
        volume.unlink(fork, &name(number)).unwrap();
    }
    for number in 0..300 {
        put(&volume, fork, format!("new-{number}").as_bytes(), &[2; 9000]);
    }
    volume.close().unwrap();
    eprintln!("{} rounds", remove_interrupted(&device, b"fork", 1));
    let volume = open(&device, None);
    assert_eq!(volume.snapshots(FIRST).unwrap(), []);
    assert_eq!(used(&volume), with_files);
    for number in 0..4000 {
        assert_eq!(get(&volume, volume.root(), &name(number)).unwrap(), [1; 100]);
        volume.unlink(volume.root(), &name(number)).unwrap();
    }
    assert_eq!(used(&volume), before);
    volume.close().unwrap();
}

/// The same, of subvolumes that others have come from: each part of them goes in many steps.
#[test]
fn an_interrupted_removal_of_a_source_goes_on() {
    let (device, volume, before) = volume_that_had_a_fork();
    let (root, inodes) = (volume.root(), volume.space().inodes);
    let base = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
    let name = |number: u32| format!("a-file-with-a-longer-name-{number}").into_bytes();
    let mut content: Vec<Vec<Option<Vec<u8>>>> = Vec::new();
    for round in 0..3_u32 {
        for number in (0..2000).filter(|number| number % 3 != round) {
            let file = match volume.lookup(base, &name(number)) {
                Ok(file) => file.inode,
                Err(_) => volume.create(base, &name(number), &FILE).unwrap().inode,
            };
            volume.write(file, 0, &[round as u8 + 1; 5000]).unwrap();
        }
        for number in (0..2000).filter(|number| number % 100 == round) {
            let _ = volume.unlink(base, &name(number));
        }
        content.push((0..2000).map(|number| get(&volume, base, &name(number)).ok()).collect());
        volume.fork(base, root, format!("fork-{round}").as_bytes()).unwrap();
    }
    // The head has something, too.
    for number in (0..2000).filter(|number| number % 3 == 1) {
        put(&volume, base, format!("more-{number}").as_bytes(), &[9; 9000]);
    }
    volume.close().unwrap();
    eprintln!("{} rounds for the head", remove_interrupted(&device, b"base", 4));
    let compare = |forks: std::ops::Range<usize>| {
        let volume = open(&device, None);
        for fork in forks {
            let name_of_fork = format!("fork-{fork}").into_bytes();
            let root = volume.lookup(volume.root(), &name_of_fork).unwrap().inode;
            let found: Vec<Option<Vec<u8>>> =
                (0..2000).map(|number| get(&volume, root, &name(number)).ok()).collect();
            assert!(found == content[fork], "fork {fork}");
        }
        volume.close().unwrap();
    };
    compare(0..3);
    for fork in (0..3).rev() {
        let rounds = remove_interrupted(&device, format!("fork-{fork}").as_bytes(), fork + 1);
        eprintln!("{rounds} rounds for fork {fork}");
        compare(0..fork);
    }
    let volume = open(&device, None);
    assert_eq!((used(&volume), volume.space().inodes), (before, inodes));
    volume.close().unwrap();
}

/// A snapshot is deleted, and at once the subvolume, which a fork has come from before: what the
/// snapshot had is freed first, also if the volume is closed meanwhile.
#[test]
fn a_removal_waits_for_cleanups() {
    let (device, volume, before) = volume_that_had_a_fork();
    volume.close().unwrap();
    for round in 0..5 {
        let volume = open_with(&device, VolumeOptions::default());
        let root = volume.root();
        let base = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
        let id = volume.subvolume_of(base).unwrap().0;
        volume.fork(base, root, b"fork").unwrap();
        let files: Vec<_> = (0..1500)
            .map(|number| put(&volume, base, format!("{number}").as_bytes(), &[1; 5000]))
            .collect();
        volume.create_snapshot(base, b"later").unwrap();
        for file in files {
            volume.write(file, 0, &[2; 5000]).unwrap();
        }
        volume.sync().unwrap();
        volume.delete_snapshot(id, b"later").unwrap();
        volume.remove_subvolume(root, b"base").unwrap();
        volume.close().unwrap();
        let volume = open(&device, None);
        volume.remove_subvolume(volume.root(), b"fork").unwrap();
        assert_eq!(used(&volume), before, "round {round}");
        volume.close().unwrap();
    }
}

/// What a subvolume alone had becomes free when it is removed; what forks have stays, and goes with
/// the last of them.
#[test]
fn a_source_can_go_before_its_forks() {
    for order in [[0, 1, 2, 3], [1, 0, 2, 3], [2, 1, 0, 3], [1, 3, 0, 2], [3, 2, 1, 0]] {
        let (device, volume, before) = volume_that_had_a_fork();
        let (root, inodes) = (volume.root(), volume.space().inodes);
        let names = [&b"base"[..], b"first", b"second", b"third"];
        let base = volume.create_subvolume(root, names[0], &DIRECTORY).unwrap().inode;
        put(&volume, base, b"shared", &[1; 400_000]);
        let mut source = base;
        for (fork, name) in names.iter().enumerate().skip(1) {
            // Each has something that the next one inherits, and something of its own.
            put(&volume, source, b"inherited", &[fork as u8; 200_000]);
            let fork = volume.fork(source, root, name).unwrap().inode;
            put(&volume, source, b"own", &[7; 100_000]);
            volume.unlink(source, b"inherited").unwrap();
            volume.unlink(fork, b"inherited").unwrap();
            source = fork;
        }
        volume.sync().unwrap();
        let (mut volume, mut used_before) = (open(&device, None), u64::MAX);
        for (at, gone) in order.into_iter().enumerate() {
            let root = volume.root();
            volume.remove_subvolume(root, names[gone]).unwrap();
            assert!(matches!(volume.lookup(root, names[gone]), Err(Error::NotFound)));
            let used_now = used(&volume);
            assert!(used_now < used_before, "{order:?}: {used_now} of {used_before} blocks");
            used_before = used_now;
            assert_eq!(volume.subvolumes().unwrap().len(), 4 - at);
            assert_eq!(volume.paths_of_subvolumes().unwrap().len(), 4 - at);
            volume.sync().unwrap();
            volume = open(&device, None);
            for stays in order.iter().skip(at + 1) {
                let root = volume.lookup(volume.root(), names[*stays]).unwrap().inode;
                assert_eq!(get(&volume, root, b"shared").unwrap(), [1; 400_000]);
                assert_eq!(get(&volume, root, b"own").is_ok(), *stays < 3, "{order:?}: {stays}");
            }
        }
        assert_eq!((used(&volume), volume.space().inodes), (before, inodes), "{order:?}");
        volume.close().unwrap();
    }
}

/// Snapshots with names keep a subvolume; when it is gone, nothing shows it any more.
#[test]
fn snapshots_with_names_keep_a_subvolume() {
    let (device, volume, before) = volume_that_had_a_fork();
    let root = volume.root();
    let base = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
    let file = put(&volume, base, b"file", &[1; 100_000]);
    let id = volume.subvolume_of(base).unwrap().0;
    let snapshot = volume.create_snapshot(base, b"kept").unwrap().root;
    let fork = volume.fork(snapshot, root, b"fork").unwrap().inode;
    volume.write(file, 0, &[2; 100_000]).unwrap();
    assert!(matches!(volume.remove_subvolume(root, b"base"), Err(Error::Busy)));
    volume.delete_snapshot(id, b"kept").unwrap();
    volume.remove_subvolume(root, b"base").unwrap();
    for check in 0..2 {
        assert!(matches!(volume.snapshots(id), Err(Error::NotFound)), "{check}");
        assert!(matches!(volume.snapshot_usage(id), Err(Error::NotFound)));
        assert!(matches!(volume.set_default_subvolume(id), Err(Error::NotFound)));
        assert!(matches!(volume.attributes(base), Err(Error::Stale)));
        assert!(matches!(volume.attributes(snapshot), Err(Error::Stale)));
        assert_eq!(volume.subvolumes().unwrap().len(), 2);
        volume.commit().unwrap();
    }
    // Numbers are used once in a mount, ids once for all.
    let other = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
    assert!(other != base && volume.subvolume_of(other).unwrap().0 > id);
    volume.close().unwrap();
    let volume = open(&device, None);
    let root = volume.root();
    assert!(matches!(volume.attributes(base), Err(Error::NotFound | Error::Stale)));
    let fork = volume.lookup(root, b"fork").unwrap().inode.min(fork);
    assert_eq!(get(&volume, fork, b"file").unwrap(), [1; 100_000]);
    volume.remove_subvolume(root, b"fork").unwrap();
    volume.remove_subvolume(root, b"base").unwrap();
    assert_eq!(used(&volume), before);
    volume.close().unwrap();
}

/// Preallocated blocks that a fork has inherited are its origin's.
#[test]
fn preallocated_blocks_are_not_written_by_two() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let file = volume.create(root, b"file", &FILE).unwrap().inode;
    let mode = AllocateMode::Allocate { keep_size: false };
    volume.allocate(file, 0, 100_000, mode).unwrap();
    let fork = volume.fork(root, root, b"fork").unwrap().inode;
    let forked = volume.lookup(fork, b"file").unwrap().inode;
    volume.write(forked, 8192, &[2; 30_000]).unwrap();
    volume.sync().unwrap();
    assert_eq!(get(&volume, root, b"file").unwrap(), [0; 100_000]);
    volume.write(file, 0, &[3; 20_000]).unwrap();
    volume.sync().unwrap();
    let check = |volume: &Volume| {
        let root = volume.root();
        let fork = volume.lookup(root, b"fork").unwrap().inode;
        let (file, forked) = (get(volume, root, b"file"), get(volume, fork, b"file"));
        let (file, forked) = (file.unwrap(), forked.unwrap());
        assert!(file[..20_000] == [3; 20_000] && file[20_000..] == [0; 80_000]);
        assert!(forked[8192..38_192] == [2; 30_000] && forked[..8192] == [0; 8192]);
    };
    check(&volume);
    drop(volume);
    check(&open(&device, None));
}

/// Forks that are wanted while a commit is under way come to be with one commit, all of them: of a
/// live tree, of a snapshot, and early ones.
#[test]
fn forks_that_wait_share_a_commit() {
    const FORKS: u32 = 256;
    // Room for what all of them may take, so that none waits for a commit before.
    let gated = Gated::new(1 << 30);
    let Gated { gate, volume, base } = &gated;
    let root = volume.root();
    let snapshot = volume.create_snapshot(*base, b"then").unwrap().root;
    put(volume, *base, b"new", b"since then");
    volume.sync().unwrap();
    let before = volume.statistics().commits;
    thread::scope(|scope| {
        gate.set(Held::Superblocks);
        volume.create(root, b"something to commit", &FILE).unwrap();
        scope.spawn(|| volume.commit().unwrap());
        gate.wait_until_one_is_held();
        let links = volume.attributes(root).unwrap().links;
        for number in 0..FORKS {
            let (source, early) = match number % 3 {
                0 => (snapshot, false),
                rest => (*base, rest == 1),
            };
            scope.spawn(move || {
                let name = format!("fork {number}").into_bytes();
                volume.fork_with(source, root, &name, ForkOptions { early }).unwrap();
            });
        }
        // Each has its name, and waits.
        while volume.attributes(root).unwrap().links < links + FORKS {
            thread::yield_now();
        }
        assert_eq!(volume.statistics().commits, before);
        gate.set(Held::Nothing);
    });
    assert_eq!(volume.statistics().commits, before + 2, "one was under way before the forks");
    let crashed = gate.after_a_crash();
    for number in 0..FORKS {
        let name = format!("fork {number}").into_bytes();
        let fork = crashed.lookup(crashed.root(), &name).unwrap().inode;
        assert_eq!(get(&crashed, fork, b"new").is_ok(), number % 3 != 0, "fork {number}");
    }
    crashed.close().unwrap();
    volume.close().unwrap();
}

/// Forks are made, changed and removed by many at once.
#[test]
fn many_forks_at_once() {
    const THREADS: usize = 16;
    let device = device();
    let volume = open_with(&device, VolumeOptions::default());
    let root = volume.root();
    let base = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
    put(&volume, base, b"file", &[1; 20_000]);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let volume = &volume;
            scope.spawn(move || {
                for round in 0..4 {
                    let name = format!("fork-{thread}-{round}").into_bytes();
                    let fork = volume.fork(base, root, &name).unwrap().inode;
                    put(volume, fork, b"own", &name);
                    let file = volume.lookup(fork, b"file").unwrap().inode;
                    volume.write(file, 0, &name).unwrap();
                    assert_eq!(get(volume, fork, b"own").unwrap(), name);
                    assert_eq!(get(volume, fork, b"file").unwrap()[..name.len()], name);
                    volume.forget(file, 1);
                    volume.forget(fork, 1);
                    if round % 2 == 0 {
                        volume.remove_subvolume(root, &name).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(get(&volume, base, b"file").unwrap(), [1; 20_000]);
    assert_eq!(names_in(&volume, root).len(), 1 + THREADS * 2);
    volume.close().unwrap();
    let volume = open(&device, None);
    for thread in 0..THREADS {
        let name = format!("fork-{thread}-3").into_bytes();
        let fork = volume.lookup(volume.root(), &name).unwrap().inode;
        assert_eq!(get(&volume, fork, b"own").unwrap(), name);
    }
    volume.close().unwrap();
}
