use crate::page::{
    Neighbours, Remedy, balance, has_room, merge, put, remedy, split_index, take, underfull,
};
use crate::test_support::{VOLUME, key, value};
use cairn_format::node::{NODE_CAPACITY, SLOT_BYTES, VALUE_BYTES_MAX};
use cairn_format::{BlockNumber, ChildPointer, Generation, Key, Node, TREE_FILES};

fn empty(level: u8) -> Node {
    Node::new(VOLUME, TREE_FILES, level, BlockNumber(400), Generation(3))
}

fn leaf(keys: impl Iterator<Item = u64>, bytes: usize) -> Node {
    let mut node = empty(0);
    for index in keys {
        put(&mut node, key(index), &value(index, 0, bytes), <[u8]>::to_vec)
            .expect("the test's items fit");
    }
    node
}

fn inner(keys: impl Iterator<Item = u64>) -> Node {
    let mut node = empty(1);
    for index in keys {
        let pointer = ChildPointer { block: BlockNumber(4 * index), generation: Generation(2) };
        node.insert(node.count(), key(index), &pointer.encode()).expect("the test's children fit");
    }
    node
}

fn keys(node: &Node) -> Vec<Key> {
    node.items().map(|(key, _)| key).collect()
}

fn children(node: &Node) -> Vec<u64> {
    (0..node.count()).map(|index| node.child(index).block.0 / 4).collect()
}

#[test]
fn room_is_judged_to_the_byte() {
    let mut node = leaf(0..4, VALUE_BYTES_MAX);
    let rest = NODE_CAPACITY - 4 * (SLOT_BYTES + VALUE_BYTES_MAX) - SLOT_BYTES;
    assert!(has_room(&node, &key(9), rest) && !has_room(&node, &key(9), rest + 1));
    assert!(put(&mut node, key(9), &vec![1; rest + 1], <[u8]>::to_vec).is_err());
    assert_eq!(put(&mut node, key(9), &vec![1; rest], <[u8]>::to_vec), Ok(None));
    // A value may always be replaced by one that isn't longer.
    assert!(has_room(&node, &key(2), VALUE_BYTES_MAX) && !has_room(&node, &key(9), rest + 1));
    assert_eq!(take(&mut node, &key(9), <[u8]>::to_vec), Some(vec![1; rest]));
    assert_eq!(take(&mut node, &key(9), <[u8]>::to_vec), None);
    let most = (NODE_CAPACITY / (SLOT_BYTES + ChildPointer::BYTES)) as u64;
    assert!(
        has_room(&inner(0..most - 1), &key(0), VALUE_BYTES_MAX)
            && !has_room(&inner(0..most), &key(0), 0)
    );
}

#[test]
fn splits_leave_an_item_on_each_side_and_room_for_the_new_one() {
    for (node, position) in [
        (leaf(10..14, VALUE_BYTES_MAX), 0..20),
        (leaf(10..80, 200), 0..90),
        (inner(10..400), 0..500),
    ] {
        for index in position {
            let (mut left, mut right) = (node.clone(), empty(node.level()));
            let at = split_index(&node, &key(index));
            assert!(at > 0 && at < node.count());
            left.split_off(at, &mut right);
            let half = if key(index) < right.key(0) { &left } else { &right };
            assert!(has_room(half, &key(index), VALUE_BYTES_MAX), "key {index}");
        }
    }
    assert_eq!(
        split_index(&leaf(0..50, 100), &key(50)),
        49,
        "ascending keys leave full leaves behind"
    );
    assert_eq!(split_index(&inner(0..50), &key(49)), 49, "and full inner nodes");
    assert_eq!(split_index(&inner(0..50), &key(20)), 25);
}

#[test]
fn the_sibling_is_the_right_one_but_for_the_last_child() {
    let parent = inner(0..3);
    let siblings: Vec<_> = (0..3)
        .map(|index| Neighbours::of(&parent, index))
        .map(|pair| (pair.left, pair.sibling()))
        .collect();
    assert_eq!(siblings, [(0, 1), (1, 2), (1, 1)]);
}

/// The first key of the right node need not be its lower bound: nothing compares it. As a later
/// child's key it must be.
#[test]
fn a_merge_takes_the_separator_as_key() {
    let (mut left, right) = (inner(0..5), inner(20..25));
    assert_eq!(remedy(&left, &right), Remedy::Merge);
    merge(&mut left, &right, key(10));
    assert_eq!(keys(&left), [0, 1, 2, 3, 4, 10, 21, 22, 23, 24].map(key));
    assert_eq!(children(&left), [0, 1, 2, 3, 4, 20, 21, 22, 23, 24]);
    let mut left = leaf(0..5, 100);
    merge(&mut left, &leaf(20..22, 100), key(10));
    assert_eq!(keys(&left), [0, 1, 2, 3, 4, 20, 21].map(key));
}

#[test]
fn balancing_moves_items_either_way() {
    let (few, many) = (1_000..1_005, 2_000..2_390);
    for few_is_left in [true, false] {
        let (left, right) = if few_is_left {
            (few.clone(), many.clone())
        } else {
            (many.clone(), few.clone().start + 2_000..3_005)
        };
        let all: Vec<u64> = left.clone().chain(right.clone()).collect();
        let (mut left, mut right, separator) =
            (inner(left), inner(right.clone()), key(right.start - 1));
        let remedy = remedy(&left, &right);
        assert!(matches!(remedy, Remedy::MoveLeft(_)) == few_is_left, "{remedy:?}");
        let middle = balance(&mut left, &mut right, empty(1), separator, remedy);
        assert_eq!(middle, right.key(0));
        assert!(
            left.count().abs_diff(right.count()) <= 2 && !underfull(&left) && !underfull(&right)
        );
        assert_eq!(children(&left).into_iter().chain(children(&right)).collect::<Vec<_>>(), all);
        let expected: Vec<Key> = all
            .into_iter()
            .map(|index| if index == right_start(few_is_left) { separator } else { key(index) })
            .collect();
        assert_eq!(keys(&left).into_iter().chain(keys(&right)).collect::<Vec<_>>(), expected);
    }
}

fn right_start(few_is_left: bool) -> u64 {
    if few_is_left { 2_000 } else { 3_000 }
}

#[test]
fn nothing_moves_when_that_would_only_turn_the_tables() {
    let most = leaf(0..1, VALUE_BYTES_MAX);
    assert_eq!(remedy(&most, &leaf(1..5, VALUE_BYTES_MAX)), Remedy::MoveLeft(1));
    // Together just too large for a merge; the left one with one item more would be the larger one.
    assert_eq!(remedy(&most, &leaf(1..4, 2_850)), Remedy::Leave);
    assert_eq!(remedy(&most, &leaf(1..4, 2_700)), Remedy::Merge);
}
