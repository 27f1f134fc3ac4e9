//! What differs between two trees, beside a comparison of all items; and that only what differs is
//! read, as a count of nodes.
use crate::test_support::{Model, TestVolume, key, value};
use crate::{ItemDifference, Tree, TreeError};
use cairn_blockdev::{BlockDevice, DeviceError, MemoryDevice, forward_to_device};
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::random::Seeded;
use cairn_format::node::VALUE_BYTES_MAX;
use cairn_format::{Key, NodePointer};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const KEYS: u64 = 6000;

fn seed() -> u64 {
    std::env::var("CAIRN_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Writes the nodes of the running transaction. What it freed is never used again.
fn cut(volume: &mut TestVolume, tree: &Tree) -> NodePointer {
    let nodes = volume.cache.take_dirty(volume.running);
    volume.cache.write(&nodes).unwrap();
    volume.running = volume.running.next();
    tree.root()
}

/// What the walk finds, and how many nodes it reads.
fn differences(left: &Tree, right: &Tree) -> (Vec<ItemDifference>, u64) {
    let mut found = left.differences(right);
    let items: Result<Vec<_>, TreeError> = found.by_ref().collect();
    let items = items.unwrap();
    assert!(items.is_sorted_by(|one, next| one.key < next.key), "keys ascend");
    (items, found.nodes_read())
}

/// What a comparison of all items finds.
fn naive(left: &Model, right: &Model) -> Vec<ItemDifference> {
    let keys: BTreeSet<&Key> = left.keys().chain(right.keys()).collect();
    let differs = |key: &Key| {
        let (left, right) = (left.get(key).cloned(), right.get(key).cloned());
        (left != right).then_some(ItemDifference { key: *key, left, right })
    };
    keys.into_iter().filter_map(differs).collect()
}

/// A number up to 1024, mostly a small one.
fn skewed(random: &mut Seeded) -> u64 {
    let most = 1 << random.below(11);
    1 + random.below(most)
}

fn change_at_random(volume: &TestVolume, tree: &Tree, random: &mut Seeded) {
    match random.below(10) {
        // A run: leaves go as a whole.
        0 => {
            let first = random.below(KEYS);
            let count = skewed(random);
            for index in first..first + count {
                volume.remove(tree, key(index));
            }
        }
        1 | 2 => {
            volume.remove(tree, key(random.below(KEYS)));
        }
        _ => {
            let bytes = [20, 200, VALUE_BYTES_MAX as u64][random.below(3) as usize];
            let index = random.below(KEYS);
            let value = value(index, random.below(3), (16 + random.below(bytes)) as usize);
            volume.insert(tree, key(index), &value[..value.len().min(VALUE_BYTES_MAX)]);
        }
    }
}

#[test]
fn random_trees_differ_as_their_items_do() {
    for run in 0..6 {
        let mut random = Seeded::new(seed().wrapping_mul(1000) + run);
        let mut volume = TestVolume::new(512 << 20, 1 << 20);
        let tree = volume.create();
        let mut roots = vec![cut(&mut volume, &tree)];
        for _ in 0..12 {
            // Sometimes nothing, mostly little, sometimes much.
            for _ in 1..skewed(&mut random) {
                change_at_random(&volume, &tree, &mut random);
            }
            roots.push(cut(&mut volume, &tree));
        }
        let checked: Vec<_> = roots.iter().map(|root| volume.check(*root)).collect();
        let opened = volume.open_apart(roots[0]);
        let opened: Vec<Tree> = roots
            .iter()
            .map(|root| Tree::open(opened.cache.clone(), volume.space.clone(), tree.id(), *root))
            .collect();
        for (left, (items, blocks)) in opened.iter().zip(&checked) {
            for (right, (other_items, other_blocks)) in opened.iter().zip(&checked) {
                let (found, nodes_read) = differences(left, right);
                assert!(found == naive(items, other_items), "run {run}");
                let unshared = blocks.symmetric_difference(other_blocks).count() as u64;
                let levels = u64::from(left.root().level.max(right.root().level)) + 1;
                assert!(nodes_read >= unshared, "run {run}: an unshared node was left out");
                // Where one side's nodes end, a node that both have may be read down to one leaf.
                let most = unshared + unshared / 10 + 4 * levels;
                assert!(nodes_read <= most, "run {run}: {nodes_read} nodes, {unshared} unshared");
            }
        }
    }
}

#[test]
fn few_changes_in_a_large_tree_need_few_nodes() {
    let mut volume = TestVolume::new(256 << 20, 1 << 20);
    let tree = volume.create();
    let items = 40_000;
    for index in 0..items {
        volume.insert(&tree, key(index), &value(index, 0, 400));
    }
    let before = cut(&mut volume, &tree);
    assert!(before.level >= 2, "{before:?}");
    let mut random = Seeded::new(seed());
    let changes = 10;
    for _ in 0..changes {
        let index = random.below(items);
        match random.below(3) {
            0 => drop(volume.remove(&tree, key(index))),
            1 => drop(volume.insert(&tree, key(items + index), &[1; 400])),
            _ => drop(volume.insert(&tree, key(index), &value(index, 1, 400))),
        }
    }
    let after = cut(&mut volume, &tree);
    let nodes = volume.check(after).1.len() as u64;
    let [left, right] = [before, after].map(|root| volume.open_apart(root));
    let (found, nodes_read) = differences(&left, &right);
    assert!((1..=changes as usize).contains(&found.len()), "{}", found.len());
    let levels = u64::from(before.level.max(after.level)) + 1;
    // A change has a way to a leaf of its own on both sides, and one neighbour to merge with.
    let most = 2 * levels * 2 * changes;
    assert!(nodes_read <= most && most < nodes / 4, "{nodes_read} nodes, at most {most}, {nodes}");
    let (none, nodes_read) = differences(&left, &left);
    assert_eq!((none.len(), nodes_read), (0, 0));
}

#[test]
fn damage_ends_the_walk() {
    let mut volume = TestVolume::new(64 << 20, 1 << 20);
    let tree = volume.create();
    for index in 0..2000 {
        volume.insert(&tree, key(index), &value(index, 0, 100));
    }
    let before = cut(&mut volume, &tree);
    volume.insert(&tree, key(1), b"changed");
    let after = cut(&mut volume, &tree);
    volume.device.write(after.block.offset_bytes(), &[&[0; 4096]]).unwrap();
    let (left, right) = (volume.open_apart(before), volume.open_apart(after));
    let mut found = left.differences(&right);
    assert!(matches!(found.next(), Some(Err(TreeError::Damaged { .. }))));
    assert!(found.next().is_none());
}

/// A device whose reads wait for another one until two were under way at once, if they are to meet.
struct Meeting {
    inner: MemoryDevice,
    /// How many reads, and whether two have met.
    under_way: Mutex<(u64, bool)>,
    changed: Condvar,
    reads: AtomicU64,
}

impl Meeting {
    const PATIENCE: Duration = Duration::from_millis(200);

    fn new(inner: MemoryDevice) -> Self {
        let under_way = Mutex::new(Rank::LEAF, (0, true));
        Self { inner, under_way, changed: Condvar::new(), reads: AtomicU64::new(0) }
    }
}

impl BlockDevice for Meeting {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let mut state = self.under_way.lock();
        state.0 += 1;
        if state.0 > 1 {
            state.1 = true;
            self.changed.notify_all();
        } else if !state.1 {
            self.changed.wait_for(&mut state, Self::PATIENCE);
        }
        drop(state);
        let done = self.inner.read(offset_bytes, buffer);
        self.under_way.lock().0 -= 1;
        done
    }

    forward_to_device!(self => self.inner; write, flush, discard, length_bytes, flush_time);
}

#[test]
fn what_has_to_be_read_is_read_together_and_once() {
    let device = Arc::new(Meeting::new(MemoryDevice::new(256 << 20)));
    let mut volume = TestVolume::on(device.clone(), 1 << 20);
    let tree = volume.create();
    let items = 20_000;
    for index in 0..items {
        volume.insert(&tree, key(index), &value(index, 0, 400));
    }
    let before = cut(&mut volume, &tree);
    for index in (0..items / 2).step_by(10) {
        volume.insert(&tree, key(index), &value(index, 1, 400));
    }
    let after = cut(&mut volume, &tree);
    let nodes = volume.check(after).1.len() as u64;
    let [left, right] = [before, after].map(|root| volume.open_apart(root));
    device.reads.store(0, Ordering::Relaxed);
    device.under_way.lock().1 = false;
    let (found, nodes_read) = differences(&left, &right);
    assert_eq!(found.len() as u64, items / 20);
    // Half of each side.
    assert!(nodes / 2 < nodes_read && nodes_read < nodes / 2 * 3, "{nodes_read} of {nodes} each");
    assert_eq!(device.reads.load(Ordering::Relaxed), nodes_read, "each once, and no other");
    assert!(device.under_way.lock().1, "no two reads were under way at once");
}
