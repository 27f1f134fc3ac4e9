//! What the product's side of M2 has and its predecessor hasn't: ways that lock nothing but the
//! leaf, and waits that stop no other thread.
use crate::concurrency_tests::{Shared, Task};
use crate::node_lock::Class;
use crate::test_support::{TestVolume, key, value, version_of};
use crate::{CacheStatistics, Tree};
use cairn_environment::thread;
use std::sync::{Arc, mpsc};

/// A tree of two levels (more with larger values), all of it in memory and known to the routes.
fn warm_tree(keys: u64, bytes: usize) -> (TestVolume, Tree) {
    let volume = TestVolume::new(256 << 20, 64 << 20);
    let tree = volume.create();
    for index in 0..keys {
        volume.insert(&tree, key(index), &value(index, 1, bytes));
    }
    for index in 0..keys {
        tree.get(&key(index)).expect("readable");
    }
    (volume, tree)
}

fn quick(volume: &TestVolume) -> u64 {
    volume.cache.statistics().quick_descents
}

#[test]
fn a_lookup_and_a_change_in_place_lock_only_their_leaf() {
    for (keys, bytes) in [(500, 500), (3_000, 3_000)] {
        let (volume, tree) = warm_tree(keys, bytes);
        let root = tree.root();
        assert!(root.level >= 1);
        let reservation = volume.reserve(0);
        // A wait for the root, or for its pointer, would be a wait for this thread; the check of
        // the order of locks would report it, too.
        let pointer = tree.write_root();
        let node =
            volume.cache.cached(&tree.expected_root(root)).expect("fits").expect("in memory");
        let node = node.write(Class::First, &volume.cache.waits);
        let before = volume.cache.statistics();
        for index in (0..keys).step_by(7) {
            assert_eq!(
                version_of(index, &tree.get(&key(index)).expect("readable").expect("there")),
                1
            );
            tree.insert(&volume.change(&reservation), key(index), &value(index, 2, bytes))
                .expect("no node is allocated");
        }
        let after = volume.cache.statistics();
        drop((node, pointer));
        let descents = 2 * keys.div_ceil(7);
        assert_eq!(
            after,
            CacheStatistics { quick_descents: before.quick_descents + descents, ..before }
        );
        assert_eq!(version_of(7, &tree.get(&key(7)).expect("readable").expect("there")), 2);
    }
}

#[test]
fn a_root_that_is_a_leaf_is_found_without_its_pointer() {
    let (volume, tree) = warm_tree(3, 100);
    let pointer = tree.write_root();
    let before = quick(&volume);
    assert_eq!(version_of(2, &tree.get(&key(2)).expect("readable").expect("there")), 1);
    assert_eq!(quick(&volume), before + 1);
    drop(pointer);
}

/// The routes of a copied path go over to the copies: a commit sends no lookup back to the
/// locks.
#[test]
fn routes_survive_a_commit() {
    let (mut volume, tree) = warm_tree(3_000, 3_000);
    assert!(tree.root().level >= 2);
    volume.commit();
    assert!(volume.insert(&tree, key(1), &value(1, 2, 3_000)).is_some());
    // The root pointer's new node becomes known with the first descent that locks.
    tree.get(&key(1)).expect("readable");
    let before = quick(&volume);
    for index in 0..3_000 {
        let version = version_of(index, &tree.get(&key(index)).expect("readable").expect("there"));
        assert_eq!(version, if index == 1 { 2 } else { 1 });
    }
    assert_eq!(quick(&volume), before + 3_000);
}

/// After every single change, each key is where the next descent looks for it.
#[test]
fn routes_follow_splits_merges_and_removals() {
    let (volume, tree) = warm_tree(0, 0);
    let present = |index: u64| tree.get(&key(index)).expect("readable").is_some();
    for index in 0..120 {
        assert_eq!(volume.insert(&tree, key(index), &value(index, 1, 3_000)), None);
        assert!((0..=index).all(present) && !present(index + 1));
    }
    for index in (0..120).step_by(2).chain((1..120).step_by(2)) {
        assert!(volume.remove(&tree, key(index)).is_some());
        let even = |number: u64| number.is_multiple_of(2);
        let gone = |other: u64| {
            if even(index) { even(other) && other <= index } else { even(other) || other <= index }
        };
        assert!((0..120).all(|other| present(other) != gone(other)));
    }
    assert_eq!(tree.root().level, 0);
    assert!(quick(&volume) > 10_000);
}

/// What the cache evicts is not reached through routes any more, and comes back.
#[test]
fn routes_do_not_keep_unused_leaves() {
    let mut volume = TestVolume::new(256 << 20, 1 << 20);
    let tree = volume.create();
    for index in 0..2_000 {
        volume.insert(&tree, key(index), &value(index, 1, 3_000));
    }
    volume.commit();
    for _ in 0..3 {
        for index in 0..2_000 {
            assert_eq!(
                version_of(index, &tree.get(&key(index)).expect("readable").expect("there")),
                1
            );
        }
    }
    let statistics = volume.cache.statistics();
    assert!(statistics.evictions > 400 && statistics.nodes < 100, "{statistics:?}");
}

/// A reader stays in a leaf, as if it had lost the CPU there, and a writer wants to copy that leaf.
/// The test hangs if that stops another thread, as the predecessor did.
#[test]
fn a_wait_for_a_leaf_stops_no_other_thread() {
    let shared = Arc::new(Shared::new(16 << 20));
    let (first, last) = (0, 2000);
    (first..=last).for_each(|index| drop(shared.insert(index, &value(index, 1, 100))));
    shared.commit();
    let (entered, reader_entered) = mpsc::channel();
    let (leave, may_leave) = mpsc::channel::<()>();
    let on_thread = |name: &str, task: Task| {
        let shared = Arc::clone(&shared);
        thread::spawn(name, move || task(&shared))
    };
    let reader = on_thread(
        "reader",
        Box::new(move |shared: &Shared| {
            let stay = |_: &[u8]| {
                entered.send(()).expect("the test listens");
                may_leave.recv().expect("the test says when");
            };
            assert!(shared.tree.get_with(&key(first), stay).expect("the leaf is there").is_some());
        }),
    );
    reader_entered.recv().expect("the reader is in the leaf");
    let waits = || shared.volume.cache.statistics().leaf_write_lock_waits;
    let before = waits();
    let writer = on_thread(
        "writer",
        Box::new(move |shared: &Shared| drop(shared.insert(first, &value(first, 2, 100)))),
    );
    while waits() == before {
        thread::yield_now();
    }
    // It would never return if the writer held the parent, or the root pointer.
    assert_eq!(shared.insert(last, &value(last, 2, 100)), Some(value(last, 1, 100)));
    assert!(shared.tree.get(&key(last / 2)).expect("the leaf is there").is_some());
    assert!(!writer.is_finished());
    leave.send(()).expect("the reader listens");
    reader.join().expect("the reader ends");
    writer.join().expect("the writer ends");
    assert_eq!(
        shared.tree.get(&key(first)).expect("the leaf is there"),
        Some(value(first, 2, 100))
    );
}
