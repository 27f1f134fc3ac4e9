use crate::test_support::{Model, TestVolume, all_items, assert_same, key, value};
use crate::{Tree, TreeError};
use cairn_environment::random::Seeded;
use cairn_format::node::{NODE_CAPACITY, VALUE_BYTES_MAX};
use cairn_format::{BlockNumber, Generation, Key, NODE_BLOCKS, Node};
use cairn_space::SpaceError;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Step {
    Insert(u64, usize),
    Remove(u64),
    RemoveRun(u64, u64),
    Last(u64, u64),
    Commit,
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let largest = VALUE_BYTES_MAX - 50..=VALUE_BYTES_MAX;
    let bytes = prop_oneof![4 => 0..200usize, 2 => 200..2000usize, 1 => largest];
    let step = prop_oneof![
        30 => (0..600u64, bytes).prop_map(|(index, bytes)| Step::Insert(index, bytes)),
        8 => (0..600u64).prop_map(Step::Remove),
        2 => (0..600u64, 1..80u64).prop_map(|(first, count)| Step::RemoveRun(first, count)),
        4 => (0..600u64, 0..600u64).prop_map(|(first, last)| Step::Last(first, last)),
        1 => Just(Step::Commit),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..700)
}

fn check_last(tree: &Tree, model: &Model, first: u64, last: u64) {
    let found = tree.last(key(first)..=key(last)).expect("readable");
    let expected =
        if first <= last { model.range(key(first)..=key(last)).next_back() } else { None };
    assert_eq!(found.as_ref().map(|(key, value)| (key, value)), expected);
}

fn check_range(tree: &Tree, model: &Model, first: u64, last: u64) {
    let found: Model =
        tree.range(key(first)..=key(last)).map(|item| item.expect("readable")).collect();
    let expected = if first <= last {
        model.range(key(first)..=key(last)).map(|(k, v)| (*k, v.clone())).collect()
    } else {
        Model::new()
    };
    assert_same(&found, &expected);
}

/// The blocks of the nodes that a visit shows, with their transactions.
fn visited(tree: &Tree, oldest: Generation) -> BTreeMap<BlockNumber, Generation> {
    let mut found = BTreeMap::new();
    let mut visit = |node: &Node| {
        assert_eq!(found.insert(node.address(), node.generation()), None, "shown twice");
        true
    };
    tree.visit_younger(oldest, &mut visit).expect("readable");
    found
}

fn check_visit(volume: &TestVolume, tree: &Tree, number: u64) {
    let all = visited(tree, Generation(0));
    assert!(all.keys().copied().eq(volume.check(tree.root()).1));
    let oldest = Generation(number % (volume.running.0 + 1));
    let mut younger = all;
    younger.retain(|_, generation| *generation > oldest);
    assert_eq!(visited(tree, oldest), younger);
}

fn run(steps: Vec<Step>) {
    let mut volume = TestVolume::new(256 << 20, 1 << 20);
    let mut tree = volume.create();
    let mut model = Model::new();
    for (version, step) in steps.into_iter().enumerate() {
        match step {
            Step::Insert(index, bytes) => {
                let value = value(index, version as u64, bytes);
                let value = &value[..bytes.clamp(16, VALUE_BYTES_MAX)];
                assert_eq!(
                    volume.insert(&tree, key(index), value),
                    model.insert(key(index), value.to_vec())
                );
                assert_eq!(tree.get(&key(index)).expect("readable").as_deref(), Some(value));
            }
            Step::Remove(index) => {
                assert_eq!(volume.remove(&tree, key(index)), model.remove(&key(index)))
            }
            Step::RemoveRun(first, count) => {
                for index in first..first + count {
                    assert_eq!(volume.remove(&tree, key(index)), model.remove(&key(index)));
                }
            }
            Step::Last(first, last) => {
                check_last(&tree, &model, first, last);
                check_range(&tree, &model, first, last);
            }
            Step::Commit | Step::Reopen => {
                volume.commit();
                volume.check_holds(tree.root(), &model);
                check_visit(&volume, &tree, version as u64);
                if matches!(step, Step::Reopen) {
                    tree = volume.reopen(tree.root());
                }
            }
        }
    }
    assert_same(&all_items(&tree), &model);
    volume.commit();
    volume.check_holds(tree.root(), &model);
    for key in model.keys() {
        assert!(volume.remove(&tree, *key).is_some());
    }
    volume.commit();
    volume.check_holds(tree.root(), &Model::new());
    assert_eq!((tree.root().level, volume.referenced_blocks()), (0, NODE_BLOCKS));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]
    #[test]
    fn behaves_like_a_map(steps in steps()) {
        run(steps);
    }
}

/// Inserts `order` over several transactions and checks the tree.
fn filled(volume: &mut TestVolume, order: &[u64], bytes: usize) -> (Tree, Model) {
    let (tree, mut model) = (volume.create(), Model::new());
    for (done, &index) in order.iter().enumerate() {
        let value = value(index, 0, bytes);
        assert_eq!(volume.insert(&tree, key(index), &value), None);
        model.insert(key(index), value);
        if done % 1000 == 999 {
            volume.commit();
        }
    }
    volume.commit();
    volume.check_holds(tree.root(), &model);
    (tree, model)
}

fn shuffled(count: u64, seed: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..count).collect();
    let mut random = Seeded::new(seed);
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    order
}

/// Nodes that would hold `count` items of `bytes` if full.
fn full_leaves(count: u64, bytes: usize) -> u64 {
    count.div_ceil((NODE_CAPACITY / (24 + bytes)) as u64)
}

#[test]
fn ascending_keys_fill_their_nodes() {
    let mut volume = TestVolume::new(128 << 20, 64 << 20);
    let order: Vec<u64> = (0..20_000).collect();
    let (tree, _) = filled(&mut volume, &order, 100);
    assert_eq!(tree.root().level, 1);
    let nodes = volume.referenced_blocks() / NODE_BLOCKS;
    assert!(nodes <= full_leaves(20_000, 100) * 11 / 10, "{nodes} nodes");
}

#[test]
fn descending_and_random_keys_keep_their_nodes_half_full() {
    let descending: Vec<u64> = (0..6_000).rev().collect();
    for order in [descending, shuffled(6_000, 1)] {
        let mut volume = TestVolume::new(128 << 20, 64 << 20);
        filled(&mut volume, &order, 200);
        let nodes = volume.referenced_blocks() / NODE_BLOCKS;
        assert!(nodes <= full_leaves(6_000, 200) * 22 / 10, "{nodes} nodes");
    }
}

/// Three levels, so that inner nodes split, merge and balance, too.
#[test]
fn a_tall_tree_grows_shrinks_and_vanishes() {
    let mut volume = TestVolume::new(256 << 20, 8 << 20);
    let count = 4_000;
    let (tree, mut model) = filled(&mut volume, &shuffled(count, 2), VALUE_BYTES_MAX);
    assert_eq!(tree.root().level, 2);
    assert!(volume.cache.take_with_new_roots().contains(&tree.id()));
    let mut root = tree.root();
    for (done, index) in shuffled(count, 3).into_iter().enumerate() {
        assert_eq!(volume.remove(&tree, key(index)), model.remove(&key(index)));
        let is_known = volume.cache.with_new_roots().contains(&tree.id());
        assert_eq!(is_known, tree.root() != root);
        if done % 250 == 249 {
            root = tree.root();
            volume.cache.take_with_new_roots();
            volume.commit();
            volume.check_holds(tree.root(), &model);
            let nodes = volume.referenced_blocks() / NODE_BLOCKS;
            // No leaf is empty, and there are few nodes above them.
            assert!(nodes <= 5 + model.len() as u64, "{nodes} nodes for {} items", model.len());
        }
    }
    assert_eq!((tree.root().level, volume.referenced_blocks()), (0, NODE_BLOCKS));
}

#[test]
fn small_items_merge_when_most_are_removed() {
    let mut volume = TestVolume::new(128 << 20, 64 << 20);
    let count = 60_000;
    let (tree, mut model) = filled(&mut volume, &shuffled(count, 4), 60);
    for index in shuffled(count, 5).into_iter().take(count as usize * 9 / 10) {
        assert_eq!(volume.remove(&tree, key(index)), model.remove(&key(index)));
    }
    volume.commit();
    volume.check_holds(tree.root(), &model);
    let nodes = volume.referenced_blocks() / NODE_BLOCKS;
    assert!(nodes <= 5 * full_leaves(model.len() as u64, 60), "{nodes} nodes");
}

#[test]
fn ascending_removal_shrinks_the_tree() {
    let mut volume = TestVolume::new(256 << 20, 8 << 20);
    let order: Vec<u64> = (0..4_000).collect();
    let (tree, mut model) = filled(&mut volume, &order, 3_000);
    for index in order {
        assert_eq!(volume.remove(&tree, key(index)), model.remove(&key(index)));
        if index % 500 == 499 {
            volume.commit();
            volume.check_holds(tree.root(), &model);
        }
    }
    assert_eq!((tree.root().level, volume.referenced_blocks()), (0, NODE_BLOCKS));
}

#[test]
fn an_old_root_reads_the_old_state_until_its_blocks_are_free() {
    let mut volume = TestVolume::new(128 << 20, 1 << 20);
    let (tree, old) = filled(&mut volume, &shuffled(3_000, 6), 300);
    let old_root = tree.root();
    let mut new = old.clone();
    for index in shuffled(3_000, 7).into_iter().take(1_500) {
        volume.remove(&tree, key(index));
        new.remove(&key(index));
        volume.insert(&tree, key(index + 10_000), b"new item, as it were");
        new.insert(key(index + 10_000), b"new item, as it were".to_vec());
    }
    let nodes = volume.cache.take_dirty(volume.running);
    volume.cache.write(&nodes).expect("the device works");
    // Written, not unpinned: what a crash before the superblock would find.
    assert_same(&all_items(&volume.open_apart(old_root)), &old);
    assert_same(&volume.check(old_root).0, &old);
    assert_same(&all_items(&volume.open_apart(tree.root())), &new);
    assert_same(&all_items(&tree), &new);
}

/// What single changes and batches take never exceeds the bound, with copies on every level and in
/// trees of any height.
#[test]
fn the_bound_on_nodes_holds() {
    let mut random = Seeded::new(8);
    let mut used_most = 0;
    for bytes in [16, 400, VALUE_BYTES_MAX] {
        let mut volume = TestVolume::new(512 << 20, 64 << 20);
        let tree = volume.create();
        let keys = 3_000;
        for round in 0..600 {
            let batch = [1, 1, 2, 5, 30][random.below(5) as usize];
            let bound = tree.worst_case_joined(batch);
            let reservation = volume.reserve(bound);
            let change = volume.change(&reservation);
            let inserts = if round % 200 < 140 { 4 } else { 1 };
            for _ in 0..batch {
                let index = random.below(keys);
                if random.chance(inserts, 5) {
                    tree.insert(&change, key(index), &value(index, 0, bytes))
                        .expect("the bound holds");
                } else {
                    tree.remove(&change, &key(index)).expect("the bound holds");
                }
            }
            used_most = used_most.max((bound - reservation.nodes()) * 100 / bound);
            drop(reservation);
            if random.chance(1, 3) {
                volume.commit();
            }
        }
    }
    assert!(used_most >= 40, "the bound is far too high: at most {used_most} % of it was used");
    assert_eq!(Tree::worst_case_nodes(0, 3), 0);
}

/// So many changes by one operation that each node is copied and split, in keys that ascend,
/// descend, or come in any order.
#[test]
fn the_bound_on_nodes_of_a_large_operation_holds() {
    let mut random = Seeded::new(9);
    let mut used_most = 0;
    for round in 0..90 {
        let bytes = [16, 400, VALUE_BYTES_MAX][round % 3];
        let mut volume = TestVolume::new(1 << 30, 256 << 20);
        let before = random.below(3_000);
        let (tree, _) = filled(&mut volume, &shuffled(before, round as u64), 50);
        volume.commit();
        let count = 1 + random.below(if round % 3 == 2 { 800 } else { 6_000 });
        let mut keys: Vec<u64> = (0..count).map(|_| random.below(20_000)).collect();
        match random.below(3) {
            0 => keys.sort_unstable(),
            1 => keys.sort_unstable_by(|one, other| other.cmp(one)),
            _ => {}
        }
        let changes: Vec<(u64, bool)> =
            keys.into_iter().map(|key| (key, random.chance(4, 5))).collect();
        let growing = changes.iter().filter(|(_, grows)| *grows).count() as u64;
        let bound = Tree::worst_case_alone(tree.count_nodes().unwrap(), growing);
        let reservation = volume.reserve(bound);
        let change = volume.change(&reservation);
        for (index, grows) in changes {
            if grows {
                tree.insert(&change, key(index), &value(index, 0, bytes)).expect("the bound holds");
            } else {
                tree.remove(&change, &key(index)).expect("the bound holds");
            }
        }
        used_most = used_most.max((bound - reservation.nodes()) * 100 / bound);
        drop(reservation);
        volume.commit();
        let nodes = volume.referenced_blocks() / NODE_BLOCKS;
        assert_eq!(tree.count_nodes().unwrap(), nodes);
    }
    assert!(used_most >= 30, "the bound is far too high: at most {used_most} % of it was used");
}

#[test]
fn a_reservation_that_is_too_small_is_an_error_and_leaves_the_items() {
    let mut volume = TestVolume::new(128 << 20, 1 << 20);
    let (tree, model) = filled(&mut volume, &shuffled(4_000, 9), 200);
    for nodes in 0..2 {
        let reservation = volume.reserve(nodes);
        let result = tree.insert(&volume.change(&reservation), key(9_999), b"x");
        assert!(
            matches!(
                result,
                Err(TreeError::Space { source: SpaceError::ReservationExhausted { .. }, .. })
            ),
            "{nodes}: {result:?}"
        );
    }
    assert_same(&all_items(&tree), &model);
    volume.insert(&tree, key(9_999), b"x");
    assert_eq!(tree.get(&key(9_999)).expect("readable").as_deref(), Some(&b"x"[..]));
}

#[test]
fn empty_and_extreme_ranges() {
    let volume = TestVolume::new(64 << 20, 1 << 20);
    let tree = volume.create();
    assert_eq!(tree.last(Key::MIN..=Key::MAX).expect("readable"), None);
    assert_eq!(tree.range(Key::MIN..=Key::MAX).count(), 0);
    for key in [Key::MIN, Key::MAX] {
        assert_eq!(volume.insert(&tree, key, b"extreme"), None);
    }
    assert_eq!(tree.range(Key::MIN..=Key::MAX).count(), 2);
    assert_eq!(tree.range(Key::MAX..=Key::MIN).count(), 0);
    assert_eq!(
        tree.last(Key::MIN..=key(0)).expect("readable"),
        Some((Key::MIN, b"extreme".to_vec()))
    );
    assert_eq!(
        tree.last(key(0)..=Key::MAX).expect("readable"),
        Some((Key::MAX, b"extreme".to_vec()))
    );
    assert_eq!(tree.last(Key::MAX..=Key::MIN).expect("readable"), None);
}

/// A first leaf that becomes empty although merging and balancing don't help: its keys pass to the
/// next one.
#[test]
fn an_empty_first_leaf_leaves_its_keys_to_the_next() {
    let mut volume = TestVolume::new(64 << 20, 1 << 20);
    let (tree, mut model) = (volume.create(), Model::new());
    // Ascending: leaves of the items 0 to 2, 3 to 6, 7 and 8.
    for index in 0..9 {
        let value = value(index, 0, if (4..7).contains(&index) { 2_850 } else { VALUE_BYTES_MAX });
        volume.insert(&tree, key(index), &value);
        model.insert(key(index), value);
    }
    for index in [3, 0, 1, 2] {
        assert_eq!(volume.remove(&tree, key(index)), model.remove(&key(index)));
    }
    volume.commit();
    volume.check_holds(tree.root(), &model);
    assert_eq!(
        (tree.root().level, volume.referenced_blocks()),
        (1, 3 * NODE_BLOCKS),
        "a root and two leaves are left"
    );
    for index in 0..3 {
        assert_eq!(volume.insert(&tree, key(index), &value(index, 1, 100)), None);
        model.insert(key(index), value(index, 1, 100));
    }
    volume.commit();
    volume.check_holds(tree.root(), &model);
}

/// Nothing is in memory, and the sibling isn't on the way.
#[test]
fn a_removal_reads_the_sibling_that_it_merges_with() {
    let mut volume = TestVolume::new(64 << 20, 1 << 20);
    let order: Vec<u64> = (0..42).collect();
    let (tree, mut model) = filled(&mut volume, &order, 1_000);
    assert_eq!(
        volume.referenced_blocks(),
        4 * NODE_BLOCKS,
        "a root and three leaves of fourteen items"
    );
    for index in (0..11).chain(14..20) {
        assert_eq!(volume.remove(&tree, key(index)), model.remove(&key(index)));
    }
    volume.commit();
    assert_eq!(
        volume.referenced_blocks(),
        4 * NODE_BLOCKS,
        "three items in the first leaf, eight in the next"
    );
    let tree = volume.reopen(tree.root());
    assert_eq!(volume.remove(&tree, key(11)), model.remove(&key(11)));
    volume.commit();
    volume.check_holds(tree.root(), &model);
    assert_eq!(volume.referenced_blocks(), 3 * NODE_BLOCKS, "the two were merged");
}
