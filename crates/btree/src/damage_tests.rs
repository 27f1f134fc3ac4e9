use crate::test_support::{Model, TestVolume, VOLUME, all_items, assert_same, key, value};
use crate::{Tree, TreeError};
use cairn_format::node::VALUE_BYTES_MAX;
use cairn_format::{
    BlockNumber, ChildPointer, Generation, Key, NODE_BLOCKS, NODE_SIZE, Node, NodePointer,
    TREE_FILES, TREE_ROOTS, VolumeId,
};

/// A committed tree with one inner node above many leaves.
fn volume() -> (TestVolume, NodePointer) {
    let mut volume = TestVolume::new(64 << 20, 1 << 20);
    let tree = volume.create();
    for index in 0..2_000 {
        volume.insert(&tree, key(index), &value(index, 0, 200));
    }
    volume.commit();
    assert_eq!(tree.root().level, 1);
    (volume, tree.root())
}

fn node_at(volume: &TestVolume, block: BlockNumber) -> Node {
    Node::decode(volume.read_page(block), VOLUME, block).expect("undamaged so far")
}

fn write(volume: &TestVolume, block: BlockNumber, page: &[u8; NODE_SIZE]) {
    volume.device.write(block.offset_bytes(), &[page]).expect("the device works");
}

/// Every way to use the tree must give a `Damaged` error that names `block` and says `problem`.
fn expect_damage(volume: &TestVolume, root: NodePointer, block: BlockNumber, problem: &str) {
    let reservation = volume.reserve(40);
    let change = volume.change(&reservation);
    let tree: Tree = volume.open_apart(root);
    let results = [
        tree.get(&key(1_000)).map(drop),
        tree.range(key(1_000)..=key(1_001)).collect::<Result<Vec<_>, _>>().map(drop),
        tree.last(Key::MIN..=key(1_000)).map(drop),
        tree.insert(&change, key(1_000), b"value").map(drop),
        tree.remove(&change, &key(1_000)).map(drop),
    ];
    for result in results {
        match result {
            Err(TreeError::Damaged { tree: TREE_FILES, source }) => {
                assert_eq!(source.block, block, "{source}");
                assert!(source.problem.contains(problem), "{source}");
            }
            other => panic!("{problem}: {other:?}"),
        }
    }
}

/// Index of the child that holds the key which `expect_damage` asks for.
fn middle(root: &Node) -> usize {
    root.child_index(&key(1_000))
}

#[test]
fn a_bad_root_or_leaf_is_found() {
    let (volume, root) = volume();
    let child = node_at(&volume, root.block);
    let leaf = child.child(middle(&child)).block;
    for block in [leaf, root.block] {
        let mut page = volume.read_page(block);
        page[NODE_SIZE - 3] ^= 0x10;
        write(&volume, block, &page);
        expect_damage(&volume, root, block, "checksum");
        page[0] = 0;
        write(&volume, block, &page);
        expect_damage(&volume, root, block, "magic");
    }
}

/// A valid node in the place of another: each check in turn.
#[test]
fn a_node_that_its_parent_does_not_mean_is_found() {
    let (volume, root) = volume();
    let parent = node_at(&volume, root.block);
    let index = middle(&parent);
    let ChildPointer { block, generation } = parent.child(index);
    let bytes = |index: u64| value(index, 0, 16);
    let stranger = |volume_id, tree, level, address, generation| {
        Node::new(volume_id, tree, level, address, generation)
    };
    let mut cases = vec![
        (stranger(VolumeId([9; 16]), TREE_FILES, 0, block, generation), "volume"),
        (stranger(VOLUME, TREE_ROOTS, 0, block, generation), "belongs to tree"),
        (
            stranger(VOLUME, TREE_FILES, 0, BlockNumber(block.0 + NODE_BLOCKS), generation),
            "was written for block",
        ),
        (stranger(VOLUME, TREE_FILES, 0, block, Generation(generation.0 - 1)), "generation"),
    ];
    let mut inner = stranger(VOLUME, TREE_FILES, 1, block, generation);
    inner.insert(0, key(1_000), &parent.child(0).encode()).expect("empty");
    cases.push((inner, "level"));
    for index in [0, 1_999] {
        let mut outside = stranger(VOLUME, TREE_FILES, 0, block, generation);
        outside.insert(0, key(index), &bytes(index)).expect("empty");
        cases.push((outside, "outside"));
    }
    let mut long = stranger(VOLUME, TREE_FILES, 0, block, generation);
    long.insert(0, parent.key(index), &vec![1; VALUE_BYTES_MAX + 1]).expect("empty");
    cases.push((long, "bytes"));
    for (mut node, problem) in cases {
        write(&volume, block, node.seal());
        expect_damage(&volume, root, block, problem);
    }
}

/// Pointers that lead anywhere.
#[test]
fn bad_pointers_are_found() {
    let (volume, root) = volume();
    let parent = node_at(&volume, root.block);
    let index = middle(&parent);
    let good = parent.child(index);
    let end = volume.geometry.allocatable().end();
    for block in [
        BlockNumber(0),
        BlockNumber(good.block.0 + 1),
        BlockNumber(end.0 & !3),
        BlockNumber(u64::MAX - 3),
        BlockNumber(u64::MAX),
    ] {
        let mut damaged = parent.clone();
        damaged.replace(index, &ChildPointer { block, ..good }.encode()).expect("same length");
        write(&volume, root.block, damaged.seal());
        expect_damage(&volume, root, block, "pointer");
    }
    // To its own node, and to a neighbour.
    let neighbour = parent.child(index + 1).block;
    for (block, problem) in [(root.block, "level"), (neighbour, "outside")] {
        let mut damaged = parent.clone();
        damaged.replace(index, &ChildPointer { block, ..good }.encode()).expect("same length");
        write(&volume, root.block, damaged.seal());
        expect_damage(&volume, root, block, problem);
    }
}

/// The neighbour was read first, so the wrong node comes from memory. Nothing hangs on a lock that
/// is held already.
#[test]
fn a_node_with_two_parents_is_found_in_memory_too() {
    let (volume, root) = volume();
    let parent = node_at(&volume, root.block);
    let index = middle(&parent);
    let neighbour = parent.child(index + 1);
    let mut damaged = parent.clone();
    damaged.replace(index, &neighbour.encode()).expect("same length");
    write(&volume, root.block, damaged.seal());
    let tree = volume.open_apart(root);
    assert!(tree.get(&parent.key(index + 1)).expect("readable").is_some());
    let reservation = volume.reserve(40);
    let change = volume.change(&reservation);
    for result in [
        tree.get(&key(1_000)),
        tree.insert(&change, key(1_000), b"value"),
        tree.remove(&change, &key(1_000)),
    ] {
        let Err(TreeError::Damaged { source, .. }) = &result else { panic!("{result:?}") };
        assert_eq!(source.block, neighbour.block, "{result:?}");
    }
}

#[test]
fn siblings_that_are_one_block_are_found() {
    let mut volume = TestVolume::new(64 << 20, 1 << 20);
    let tree = volume.create();
    for index in 0..2_000 {
        volume.insert(&tree, key(index), &value(index, 0, 200));
    }
    volume.commit();
    let mut parent = node_at(&volume, tree.root().block);
    // An underfull leaf whose right sibling is said to be the same block.
    let (child, upper) = (parent.child(3), parent.key(4));
    let mut leaf = Node::new(VOLUME, TREE_FILES, 0, child.block, child.generation);
    leaf.insert(0, parent.key(3), b"alone").expect("empty");
    write(&volume, child.block, leaf.seal());
    parent.replace(4, &child.encode()).expect("same length");
    write(&volume, tree.root().block, parent.seal());
    let tree = volume.reopen(tree.root());
    let reservation = volume.reserve(40);
    let result = tree.remove(&volume.change(&reservation), &parent.key(3));
    assert!(
        matches!(&result, Err(TreeError::Damaged { source, .. }) if source.block == child.block),
        "{result:?} below {upper:?}"
    );
}

/// A root that is newer than the running transaction would be changed in place although it isn't
/// this transaction's.
#[test]
fn a_node_from_the_future_is_not_changed() {
    let (mut volume, root) = volume();
    volume.running = Generation(root.generation.0 - 1);
    let tree = volume.open_apart(root);
    let reservation = volume.reserve(40);
    let change = volume.change(&reservation);
    for result in [tree.insert(&change, key(1_000), b"value"), tree.remove(&change, &key(1_000))] {
        assert!(
            matches!(&result, Err(TreeError::Damaged { source, .. }) if source.block == root.block),
            "{result:?}"
        );
    }
    assert!(tree.get(&key(1_000)).expect("readable").is_some());
}

/// Random bytes anywhere in any node never panic, and are never taken for items.
#[test]
fn flipped_bytes_never_pass() {
    let (volume, root) = volume();
    let (items, blocks) = volume.check(root);
    let mut random = cairn_environment::random::Seeded::new(3);
    let blocks: Vec<_> = blocks.into_iter().collect();
    for _ in 0..300 {
        let block = blocks[random.below(blocks.len() as u64) as usize];
        let good = volume.read_page(block);
        let mut page = good.clone();
        page[random.below(NODE_SIZE as u64) as usize] ^= 1 << random.below(8);
        write(&volume, block, &page);
        let tree = volume.open_apart(root);
        let damaged = tree.range(Key::MIN..=Key::MAX).any(|item| match item {
            Ok((key, value)) => {
                assert_eq!(items.get(&key), Some(&value));
                false
            }
            Err(_) => true,
        });
        assert!(damaged, "a flipped bit in block {block} went unnoticed");
        write(&volume, block, &good);
    }
}

/// Changes the first keys of all inner nodes: some to the smallest, others to one below the second.
fn change_first_keys(volume: &TestVolume, pointer: NodePointer) -> u64 {
    let mut node = node_at(volume, pointer.block);
    let Some(level) = node.level().checked_sub(1) else { return 0 };
    let before_second = |key: Key| Key { inode: key.inode - 1, offset: u64::MAX, ..key };
    let first = if node.count().is_multiple_of(2) { Key::MIN } else { before_second(node.key(1)) };
    node.set_key(0, first);
    write(volume, pointer.block, node.seal());
    let children = (0..node.count()).map(|index| {
        let ChildPointer { block, generation } = node.child(index);
        change_first_keys(volume, NodePointer { block, generation, level })
    });
    1 + children.sum::<u64>()
}

/// The format compares no first key of an inner node, so on a device it may be any.
#[test]
fn the_first_key_of_an_inner_node_says_nothing() {
    let mut volume = TestVolume::new(64 << 20, 1 << 20);
    let tree = volume.create();
    let mut model = Model::new();
    for index in (1..=4_000).step_by(2) {
        let value = value(index, 0, 3_000);
        volume.insert(&tree, key(index), &value);
        model.insert(key(index), value);
    }
    volume.commit();
    assert_eq!(tree.root().level, 2);
    assert!(change_first_keys(&volume, tree.root()) > 2);
    let tree = volume.reopen(tree.root());
    assert_same(&all_items(&tree), &model);
    for index in (0..=4_000).rev() {
        if index % 2 == 0 {
            let value = value(index, 1, 2_000);
            assert_eq!(volume.insert(&tree, key(index), &value), None);
            model.insert(key(index), value);
        } else {
            assert_eq!(volume.remove(&tree, key(index)), model.remove(&key(index)));
        }
    }
    volume.commit();
    volume.check_holds(tree.root(), &model);
}
