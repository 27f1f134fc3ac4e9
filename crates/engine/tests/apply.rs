//! What a fork has changed is applied to where it came from: all of it or nothing. Random histories
//! on both sides are merged by a model, too.
mod apply_model;
mod small_volume;

use apply_model::{Tree, forked, merge, sibling};
use cairn_engine::{
    Applied, Apply, AttributeChange, Conflict, ConflictKind, Error, InodeId, RenameMode, Volume,
    Winner,
};
use cairn_environment::random::Seeded;
use small_volume::{DIRECTORY, device, get, open, put, used};

fn done(applied: Apply) -> Applied {
    match applied {
        Apply::Done(applied) => applied,
        Apply::Conflicts(conflicts) => panic!("{conflicts:?}"),
    }
}

/// All that this side has changed since `base` is so now.
fn expect_won(now: &Tree, base: &Tree, side: &Tree, context: &str) {
    for key in base.entries.keys().chain(side.entries.keys()) {
        let entry = side.entries.get(key);
        if entry != base.entries.get(key) {
            assert_eq!(now.entries.get(key), entry, "{key:?}, {context}");
        }
    }
    for (number, node) in &side.nodes {
        if base.nodes.get(number) != Some(node) {
            assert_eq!(now.nodes.get(number), Some(node), "inode {number}, {context}");
        }
    }
}

/// What makes a file longer shows zeros there.
fn expect_nothing_behind_ends(volume: &Volume, tree: &Tree, root: InodeId, context: &str) {
    let files = tree.nodes.iter().filter(|(_, node)| node.mode & 0o170_000 == 0o100_000);
    for (number, node) in files {
        let inode = sibling(root, *number);
        let end = node.content.len() as u64;
        let change = AttributeChange { size: Some(end + 60_000), ..Default::default() };
        volume.set_attributes(inode, &change).unwrap();
        let mut behind = Vec::new();
        volume.read(inode, end, 60_000, &mut behind).unwrap();
        assert!(behind.iter().all(|byte| *byte == 0), "inode {number}, {context}");
    }
}

#[test]
fn random_histories_are_merged() {
    let seed = cairn_environment::random::u64();
    let seed = std::env::var("CAIRN_SEED").map_or(seed, |seed| seed.parse().unwrap());
    eprintln!("CAIRN_SEED={seed}");
    let mut counts = [0; 3];
    for round in 0..120 {
        let mut random = Seeded::new(seed.wrapping_add(round));
        let changes = [30, 1 + random.below(10), random.below(8)];
        let device = device();
        let volume = open(&device, None);
        let ([origin, fork], base) = forked(&volume, &mut random, changes);
        let [theirs, ours] = [fork, origin].map(|root| Tree::read(&volume, root));
        let number = origin.number().0;
        let expected = merge(&base, &theirs, &ours, number);
        let applied = volume.apply(fork, Winner::Neither).unwrap();
        let context = format!("round {round}, seed {seed}: {applied:?}");
        let mut now = Tree::read(&volume, origin);
        assert!(Tree::read(&volume, fork) == theirs, "{context}");
        match (&expected, &applied) {
            (Some(expected), Apply::Done(_)) => {
                assert_eq!(now, *expected, "{context}");
                counts[0] += 1;
            }
            (None, Apply::Conflicts(conflicts)) => {
                assert!(!conflicts.is_empty() && now == ours, "{context}");
                counts[1] += 1;
                let mut before_it = ours.clone();
                for winner in [Winner::Origin, Winner::Fork] {
                    let decided = volume.apply(fork, winner).unwrap();
                    let context = format!("{winner:?} wins, {decided:?}, {context}");
                    now = Tree::read(&volume, origin);
                    assert!(now.is_sound(number), "{context}");
                    if let (Winner::Origin, Apply::Conflicts(left)) = (winner, &decided) {
                        // The origin can win all others.
                        let is_loop = |one: &Conflict| one.kind == ConflictKind::Loop;
                        assert!(left.iter().all(is_loop), "{context}");
                    }
                    if let Apply::Done(_) = decided {
                        counts[2] += 1;
                        let side = if winner == Winner::Fork { &theirs } else { &ours };
                        expect_won(&now, &base, side, &context);
                    } else {
                        assert!(now == before_it, "{context}");
                    }
                    before_it = now.clone();
                }
            }
            _ => panic!("{:?} was expected, {context}", expected.is_some()),
        }
        if expected.is_some() {
            let again = done(volume.apply(fork, Winner::Neither).unwrap());
            assert!(again.names.is_empty() && again.inodes.is_empty(), "{again:?}, {context}");
        }
        // What has lost its last name is gone: the other inode is the root directory.
        let before = used(&volume);
        assert_eq!(volume.space().inodes, 1 + now.nodes.len() as u64, "{context}");
        if random.below(2) == 0 {
            volume.close().unwrap();
        }
        drop(volume);
        let volume = open(&device, None);
        let origin = volume.lookup(volume.root(), b"origin").unwrap().inode;
        assert!(Tree::read(&volume, origin) == now, "{context}");
        assert_eq!(used(&volume), before, "{context}");
        expect_nothing_behind_ends(&volume, &now, origin, &context);
    }
    eprintln!("{counts:?}: merged, conflicts, decided");
    assert!(counts.iter().all(|count| *count > 5), "{counts:?}");
}

#[test]
fn what_a_fork_changed_is_applied() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let origin = volume.create_subvolume(root, b"origin", &DIRECTORY).unwrap().inode;
    let file = put(&volume, origin, b"file", &[1; 50_000]);
    put(&volume, origin, b"gone", b"in the base");
    put(&volume, origin, b"mine", b"in the base");
    let fork = volume.fork(origin, root, b"fork").unwrap().inode;
    assert_eq!(volume.origin_of_fork(fork).unwrap(), origin);
    assert!(matches!(volume.apply(origin, Winner::Neither), Err(Error::InvalidArgument(_))));
    let forked = volume.lookup(fork, b"file").unwrap().inode;
    volume.write(forked, 20_000, &[2; 100]).unwrap();
    volume.unlink(fork, b"gone").unwrap();
    put(&volume, fork, b"new", b"in the fork");
    // What is open stays open, and shows what the file has now.
    let mine = volume.lookup(origin, b"mine").unwrap().inode;
    volume.write(mine, 0, b"meanwhile").unwrap();
    let applied = done(volume.apply(fork, Winner::Neither).unwrap());
    assert_eq!(applied.target, origin);
    assert!(applied.inodes.contains(&file));
    assert!(applied.names.contains(&(origin, b"new".to_vec())));
    let mut content = Vec::new();
    volume.read(file, 19_990, 20, &mut content).unwrap();
    assert_eq!(content, [[1; 10], [2; 10]].concat());
    assert_eq!(get(&volume, origin, b"mine").unwrap(), b"meanwhilese");
    assert_eq!(get(&volume, origin, b"new").unwrap(), b"in the fork");
    assert!(matches!(get(&volume, origin, b"gone"), Err(Error::NotFound)));
    // The other way round nothing changes.
    assert!(matches!(get(&volume, fork, b"mine"), Ok(text) if text == b"in the base"));
    // Both go on; now both change one file.
    volume.write(forked, 0, b"fork").unwrap();
    volume.write(file, 30_000, b"origin").unwrap();
    let Apply::Conflicts(conflicts) = volume.apply(fork, Winner::Neither).unwrap() else {
        panic!("no conflict")
    };
    assert_eq!(conflicts.len(), 1);
    assert_eq!(
        (&conflicts[0].path[..], conflicts[0].kind),
        (&b"file"[..], ConflictKind::BothChanged)
    );
    done(volume.apply(fork, Winner::Origin).unwrap());
    assert_eq!(get(&volume, origin, b"file").unwrap()[..4], [1; 4]);
    done(volume.apply(fork, Winner::Fork).unwrap());
    let text = get(&volume, origin, b"file").unwrap();
    assert_eq!((&text[..4], text[30_000], text[20_050]), (&b"fork"[..], 1, 2));
}

#[test]
fn what_was_made_in_a_removed_directory_is_no_loop() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let origin = volume.create_subvolume(root, b"origin", &DIRECTORY).unwrap().inode;
    let outer = volume.create(origin, b"outer", &DIRECTORY).unwrap().inode;
    let removed = volume.create(outer, b"inner", &DIRECTORY).unwrap().inode;
    let fork = volume.fork(origin, root, b"fork").unwrap().inode;
    let forked = volume.lookup(fork, b"outer").unwrap().inode;
    let inner = volume.lookup(forked, b"inner").unwrap().inode;
    let made = volume.create(inner, b"made", &DIRECTORY).unwrap().inode;
    volume.create(made, b"below", &DIRECTORY).unwrap();
    volume.remove_directory(outer, b"inner").unwrap();
    volume.forget(removed, 1);
    for winner in [Winner::Neither, Winner::Fork] {
        let Apply::Conflicts(conflicts) = volume.apply(fork, winner).unwrap() else {
            panic!("nothing could stand in what is gone")
        };
        let found: Vec<_> =
            conflicts.iter().map(|one| (String::from_utf8_lossy(&one.path), one.kind)).collect();
        assert!(
            found.iter().all(|(_, kind)| *kind == ConflictKind::RemovedInOrigin),
            "{winner:?}: {found:?}"
        );
        assert!(found.iter().any(|(path, _)| path == "outer/inner/made"), "{winner:?}: {found:?}");
    }
    done(volume.apply(fork, Winner::Origin).unwrap());
    volume.close().unwrap();
}

#[test]
fn nested_subvolumes_are_left_out() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let origin = volume.create_subvolume(root, b"origin", &DIRECTORY).unwrap().inode;
    let inner = volume.create(origin, b"inner", &DIRECTORY).unwrap().inode;
    volume.create_subvolume(inner, b"nested", &DIRECTORY).unwrap();
    let fork = volume.fork(origin, root, b"fork").unwrap().inode;
    let forked = volume.lookup(fork, b"inner").unwrap().inode;
    volume.create_subvolume(forked, b"other", &DIRECTORY).unwrap();
    let applied = done(volume.apply(fork, Winner::Neither).unwrap());
    assert!(applied.names.is_empty() && applied.inodes.is_empty(), "{applied:?}");
    // A directory with one in it can't go.
    volume.remove_subvolume(forked, b"other").unwrap();
    volume.remove_directory(fork, b"inner").unwrap();
    let Apply::Conflicts(conflicts) = volume.apply(fork, Winner::Fork).unwrap() else {
        panic!("no conflict")
    };
    assert_eq!(
        (&conflicts[0].path[..], conflicts[0].kind),
        (&b"inner"[..], ConflictKind::RemovedInFork)
    );
    volume.lookup(inner, b"nested").unwrap();
}

#[test]
fn a_nested_subvolume_in_the_way_is_a_conflict() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let origin = volume.create_subvolume(root, b"origin", &DIRECTORY).unwrap().inode;
    let outer = volume.create(origin, b"outer", &DIRECTORY).unwrap().inode;
    for (directory, name) in [(origin, b"early"), (outer, b"inner")] {
        volume.create_subvolume(directory, name, &DIRECTORY).unwrap();
    }
    let fork = volume.fork(origin, root, b"fork").unwrap().inode;
    // In the fork these names were free.
    let early = volume.create(fork, b"early", &DIRECTORY).unwrap().inode;
    put(&volume, early, b"below", b"below");
    put(&volume, fork, b"late", b"late");
    put(&volume, fork, b"other", b"other");
    volume.remove_directory(fork, b"outer").unwrap();
    volume.create_subvolume(origin, b"late", &DIRECTORY).unwrap();
    let found = |applied: Apply| {
        let Apply::Conflicts(conflicts) = applied else { panic!("no conflict") };
        let found = |one: Conflict| (String::from_utf8(one.path).unwrap(), one.kind);
        conflicts.into_iter().map(found).collect::<Vec<_>>()
    };
    let expected = [
        ("early".to_owned(), ConflictKind::BothNamed),
        ("late".to_owned(), ConflictKind::BothNamed),
        ("outer".to_owned(), ConflictKind::RemovedInFork),
    ];
    for winner in [Winner::Neither, Winner::Fork] {
        assert_eq!(found(volume.apply(fork, winner).unwrap()), expected, "{winner:?}");
    }
    done(volume.apply(fork, Winner::Origin).unwrap());
    assert_eq!(get(&volume, origin, b"other").unwrap(), b"other");
    for (directory, name) in [(origin, &b"early"[..]), (origin, b"late"), (outer, b"inner")] {
        assert!(volume.lookup(directory, name).unwrap().inode.number().0 == 1);
    }
}

#[test]
fn if_the_fork_wins_no_file_loses_its_last_name_and_no_directory_gets_two() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let origin = volume.create_subvolume(root, b"origin", &DIRECTORY).unwrap().inode;
    for name in [b"moved", b"other", b"third"] {
        put(&volume, origin, name, name);
    }
    volume.create(origin, b"directory", &DIRECTORY).unwrap();
    let fork = volume.fork(origin, root, b"fork").unwrap().inode;
    let rename = |of, old: &[u8], new: &[u8]| {
        volume.rename(of, old, of, new, RenameMode::Replace).unwrap();
    };
    // The fork removes what stands where the origin moves another file.
    volume.unlink(fork, b"other").unwrap();
    rename(origin, b"moved", b"other");
    done(volume.apply(fork, Winner::Fork).unwrap());
    assert_eq!(get(&volume, origin, b"moved").unwrap(), b"moved");
    assert!(matches!(get(&volume, origin, b"other"), Err(Error::NotFound)));
    // Both move a file, the origin to where a directory was.
    rename(fork, b"third", b"fork's");
    rename(origin, b"directory", b"elsewhere");
    rename(origin, b"third", b"directory");
    done(volume.apply(fork, Winner::Fork).unwrap());
    assert_eq!(get(&volume, origin, b"fork's").unwrap(), b"third");
    assert!(Tree::read(&volume, origin).is_sound(origin.number().0));
}
