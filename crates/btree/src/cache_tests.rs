use crate::test_support::{Model, TestVolume, VOLUME, all_items, assert_same, key, value};
use crate::{NodeCache, Tree};
use cairn_blockdev::{BlockDevice, DeviceError, MemoryDevice, forward_to_device};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use cairn_format::node::NODE_CAPACITY;
use cairn_format::{Key, NODE_BLOCKS, NODE_SIZE, TREE_FILES};
use cairn_space::{Request, Urgency};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Counts, delays and refuses.
struct TestDevice {
    memory: MemoryDevice,
    reads: AtomicU64,
    writes: AtomicU64,
    delay: AtomicBool,
    failing: AtomicBool,
    /// The next read ends with a panic.
    panics: AtomicBool,
}

impl TestDevice {
    fn new(bytes: u64) -> Arc<TestDevice> {
        let (reads, writes) = (AtomicU64::new(0), AtomicU64::new(0));
        let [delay, failing, panics] = [const { AtomicBool::new(false) }; 3];
        Arc::new(TestDevice {
            memory: MemoryDevice::new(bytes),
            reads,
            writes,
            delay,
            failing,
            panics,
        })
    }

    /// The bytes at the offset, or beyond the end of the device while it fails.
    fn offset(&self, offset_bytes: u64) -> u64 {
        if self.delay.load(Ordering::SeqCst) {
            clock::sleep(Duration::from_millis(20));
        }
        if self.failing.load(Ordering::SeqCst) { self.memory.length_bytes() } else { offset_bytes }
    }
}

impl BlockDevice for TestDevice {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let offset = self.offset(offset_bytes);
        assert!(!self.panics.swap(false, Ordering::SeqCst), "a bug below");
        self.memory.read(offset, buffer)
    }
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.writes.fetch_add(1, Ordering::SeqCst);
        self.memory.write(self.offset(offset_bytes), buffers)
    }
    forward_to_device!(self => self.memory; flush, discard, length_bytes, flush_time);
}

fn fill(volume: &TestVolume, tree: &Tree, count: u64, bytes: usize) -> Model {
    let items: BTreeMap<Key, Vec<u8>> =
        (0..count).map(|index| (key(index), value(index, 0, bytes))).collect();
    for (key, value) in &items {
        volume.insert(tree, *key, value);
    }
    items
}

#[test]
fn the_limit_holds_for_clean_nodes() {
    let limit = 40 * NODE_SIZE as u64;
    let mut volume = TestVolume::new(128 << 20, limit);
    let tree = volume.create();
    let model = fill(&volume, &tree, 4_000, 500);
    let made = volume.cache.statistics();
    assert!(made.nodes == made.dirty && made.nodes > 100, "dirty nodes are kept: {made:?}");
    assert_eq!(volume.cache.dirty_bytes(), made.dirty * NODE_SIZE as u64);
    volume.commit();
    let written = volume.cache.statistics();
    assert_eq!((written.dirty, volume.cache.dirty_bytes()), (0, 0));
    assert!(written.nodes <= 40, "{written:?}");
    assert_eq!(written.evictions, made.nodes - written.nodes);
    let mut random = Seeded::new(1);
    for _ in 0..2_000 {
        let index = random.below(4_000);
        assert_eq!(tree.get(&key(index)).expect("readable").as_ref(), model.get(&key(index)));
        assert!(volume.cache.statistics().nodes <= 40);
    }
    let read = volume.cache.statistics();
    assert!(read.misses > 500 && read.hits > 500, "{read:?}");
    assert_same(&all_items(&tree), &model);
}

#[test]
fn a_node_that_many_want_is_read_once() {
    let device = TestDevice::new(64 << 20);
    let mut volume = TestVolume::on(Arc::clone(&device) as Arc<dyn BlockDevice>, 1 << 20);
    let tree = volume.create();
    volume.insert(&tree, key(1), b"wanted by many");
    volume.commit();
    let tree = Arc::new(volume.reopen(tree.root()));
    let before = device.reads.load(Ordering::SeqCst);
    device.delay.store(true, Ordering::SeqCst);
    let readers: Vec<_> = (0..8)
        .map(|_| {
            let tree = Arc::clone(&tree);
            thread::spawn("reader", move || tree.get(&key(1)).expect("readable").expect("there"))
        })
        .collect();
    for reader in readers {
        assert_eq!(reader.join().expect("no panic"), b"wanted by many");
    }
    assert_eq!(device.reads.load(Ordering::SeqCst) - before, 1);
    let statistics = volume.cache.statistics();
    assert_eq!((statistics.misses, statistics.hits), (1, 7));
}

#[test]
fn neighbours_are_written_together() {
    let device = TestDevice::new(128 << 20);
    let mut volume = TestVolume::on(Arc::clone(&device) as Arc<dyn BlockDevice>, 64 << 20);
    let tree = volume.create();
    fill(&volume, &tree, 5_000, 500);
    let nodes = volume.cache.statistics().dirty;
    let report = volume.commit();
    assert_eq!((report.nodes, report.bytes), (nodes, nodes * NODE_SIZE as u64));
    assert_eq!(device.writes.load(Ordering::SeqCst), report.writes);
    // Nodes allocated one after the other lie side by side; 64 of them make 1 MiB.
    assert!(report.writes <= nodes.div_ceil(64) + 8, "{report:?}");
    assert_eq!(volume.commit(), crate::WriteReport::default());
}

#[test]
fn a_change_to_a_committed_tree_writes_one_path() {
    let mut volume = TestVolume::new(128 << 20, 64 << 20);
    let tree = volume.create();
    let mut model = fill(&volume, &tree, 5_000, 100);
    volume.commit();
    let old = tree.root();
    volume.insert(&tree, key(77), b"changed, really");
    volume.insert(&tree, key(77), b"changed once more");
    model.insert(key(77), b"changed once more".to_vec());
    let report = volume.commit();
    assert_eq!(report.nodes, u64::from(tree.root().level) + 1);
    assert_ne!(tree.root().block, old.block);
    assert_eq!(tree.root().generation.0 + 1, volume.running.0);
    volume.check_holds(tree.root(), &model);
}

/// The next transaction changes and frees nodes while the last one's are written: what reaches the
/// device is the state of the cut.
#[test]
fn what_is_written_is_the_state_of_the_cut() {
    let mut volume = TestVolume::new(128 << 20, 64 << 20);
    let tree = volume.create();
    let cut = fill(&volume, &tree, 3_000, 200);
    let (root, nodes) = (tree.root(), volume.cache.take_dirty(volume.running));
    assert_eq!(nodes.generation(), volume.running);
    volume.running = volume.running.next();
    for index in 0..3_000 {
        if index % 3 == 0 {
            volume.insert(&tree, key(index), &value(index, 1, 300));
        } else {
            volume.remove(&tree, key(index));
        }
    }
    let dirty = volume.cache.statistics().dirty;
    let report = volume.cache.write(&nodes).expect("the device works");
    assert_eq!(report.nodes, nodes.len() as u64);
    assert_eq!(volume.cache.statistics().dirty, dirty - report.nodes);
    let (items, _) = volume.check(root);
    assert_same(&items, &cut);
    volume.commit();
    let next = (0..1_000).map(|index| (key(index * 3), value(index * 3, 1, 300))).collect();
    volume.check_holds(tree.root(), &next);
}

#[test]
fn a_node_freed_by_its_own_transaction_is_never_written() {
    let mut volume = TestVolume::new(128 << 20, 64 << 20);
    let tree = volume.create();
    fill(&volume, &tree, 3_000, 200);
    for index in 0..3_000 {
        volume.remove(&tree, key(index));
    }
    assert_eq!(volume.cache.statistics().nodes, 1);
    assert_eq!(volume.commit().nodes, 1);
    assert_eq!(volume.referenced_blocks(), NODE_BLOCKS);
}

#[test]
fn a_failed_write_leaves_the_nodes_dirty() {
    let device = TestDevice::new(64 << 20);
    let volume = TestVolume::on(Arc::clone(&device) as Arc<dyn BlockDevice>, 64 << 20);
    let tree = volume.create();
    let model = fill(&volume, &tree, 1_000, 100);
    let nodes = volume.cache.take_dirty(volume.running);
    device.failing.store(true, Ordering::SeqCst);
    let error = volume.cache.write(&nodes).expect_err("the device fails");
    assert!(matches!(error, crate::TreeError::Device { tree: TREE_FILES, .. }), "{error}");
    assert_eq!(volume.cache.statistics().dirty, nodes.len() as u64);
    device.failing.store(false, Ordering::SeqCst);
    for _ in 0..2 {
        volume.cache.write(&nodes).expect("the device works again");
        assert_eq!(volume.cache.dirty_bytes(), 0);
    }
    assert_same(&volume.check(tree.root()).0, &model);
}

#[test]
fn a_failed_read_is_an_error_each_time_and_passes_with_its_cause() {
    let device = TestDevice::new(64 << 20);
    let mut volume = TestVolume::on(Arc::clone(&device) as Arc<dyn BlockDevice>, 64 << 20);
    let tree = volume.create();
    let model = fill(&volume, &tree, 1_000, 100);
    volume.commit();
    let tree = volume.reopen(tree.root());
    device.failing.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        let error = tree.get(&key(5)).expect_err("the device fails");
        assert!(error.to_string().contains(&format!("block {}", tree.root().block)), "{error}");
    }
    let error = tree.range(Key::MIN..=Key::MAX).collect::<Vec<_>>();
    assert!(error.len() == 1 && error[0].is_err(), "a cursor ends at its error");
    device.failing.store(false, Ordering::SeqCst);
    assert_same(&all_items(&tree), &model);
}

/// Blocks go round: every transaction frees nodes whose blocks later ones use again. A stale node
/// would show old values.
#[test]
fn blocks_that_are_used_again_are_never_served_stale() {
    let mut volume = TestVolume::new(16 << 20, 1 << 20);
    let tree = volume.create();
    let mut model = fill(&volume, &tree, 300, 500);
    let mut random = Seeded::new(2);
    for version in 1..400 {
        for _ in 0..20 {
            let index = random.below(300);
            let value = value(index, version, 500);
            volume.insert(&tree, key(index), &value);
            model.insert(key(index), value);
        }
        volume.commit();
        let index = random.below(300);
        assert_eq!(tree.get(&key(index)).expect("readable").as_ref(), model.get(&key(index)));
    }
    assert_same(&all_items(&tree), &model);
    volume.check_holds(tree.root(), &model);
}

#[test]
fn nodes_of_snapshots_that_are_in_memory_are_not_read() {
    let device = TestDevice::new(64 << 20);
    let mut volume = TestVolume::on(Arc::clone(&device) as Arc<dyn BlockDevice>, 16 << 20);
    let tree = volume.create();
    let model = fill(&volume, &tree, 2_000, 500);
    volume.commit();
    let root = tree.root();
    let snapshot = |volume: &TestVolume| {
        let cache = NodeCache::of_snapshots(&volume.cache, 16 << 20);
        Tree::open(cache, Arc::clone(&volume.space), TREE_FILES, root)
    };
    let seen = snapshot(&volume);
    assert_same(&all_items(&seen), &model);
    assert_eq!(device.reads.load(Ordering::SeqCst), 0);

    // Only blocks of the snapshot are free, and nodes that are not on the device get them.
    for index in 0..2_000 {
        volume.insert(&tree, key(index), &value(index, 1, 500));
    }
    let one = Request { data_blocks: 0, nodes: 1 };
    while let Ok(reservation) = volume.space.try_reserve(one, Urgency::Commit) {
        volume.space.allocate_node(&reservation).expect("reserved");
    }
    volume.commit();
    for index in 0..1_000 {
        volume.insert(&tree, key(index), &value(index, 2, 500));
    }
    assert_same(&all_items(&seen), &model);
    let reads = device.reads.load(Ordering::SeqCst);
    assert_same(&all_items(&snapshot(&volume)), &model);
    assert!(device.reads.load(Ordering::SeqCst) > reads);
}

#[test]
fn nodes_that_a_snapshot_has_in_memory_are_not_read() {
    let device = TestDevice::new(64 << 20);
    let mut volume = TestVolume::on(Arc::clone(&device) as Arc<dyn BlockDevice>, 16 << 20);
    let tree = volume.create();
    let model = fill(&volume, &tree, 2_000, 500);
    volume.commit();
    let [(live, _seen), (unused, _other)] = [(); 2].map(|()| {
        let live = volume.open_apart(tree.root());
        let cache = NodeCache::of_snapshots(&live.cache, 16 << 20);
        let snapshot = Tree::open(cache, Arc::clone(&volume.space), TREE_FILES, tree.root());
        assert_same(&all_items(&snapshot), &model);
        (live, snapshot)
    });
    let reads = device.reads.load(Ordering::SeqCst);
    assert!(reads > 0);
    assert_same(&all_items(&live), &model);
    assert_eq!(device.reads.load(Ordering::SeqCst), reads);

    // The snapshot is gone, and other nodes get its blocks.
    for index in 0..2_000 {
        volume.insert(&tree, key(index), &value(index, 1, 500));
    }
    let one = Request { data_blocks: 0, nodes: 1 };
    while let Ok(reservation) = volume.space.try_reserve(one, Urgency::Commit) {
        volume.space.allocate_node(&reservation).expect("reserved");
    }
    volume.commit();
    for index in 0..1_000 {
        volume.insert(&tree, key(index), &value(index, 2, 500));
    }
    volume.commit();
    let space = Arc::clone(&volume.space);
    let later = Tree::open(Arc::clone(&unused.cache), space, TREE_FILES, tree.root());
    assert_same(&all_items(&later), &all_items(&tree));
}

/// A removal fetches neighbours while it has the lock of a node.
#[test]
fn nodes_that_a_snapshot_has_are_copied_while_others_are_locked() {
    let mut volume = TestVolume::new(64 << 20, 0);
    let tree = volume.create();
    let mut model = fill(&volume, &tree, 3_000, NODE_CAPACITY / 20);
    volume.commit();
    let before = model.clone();
    let cache = NodeCache::of_snapshots(&volume.cache, 64 << 20);
    let snapshot = Tree::open(cache, Arc::clone(&volume.space), TREE_FILES, tree.root());
    assert_same(&all_items(&snapshot), &before);
    for index in 0..2_900 {
        volume.remove(&tree, key(index));
        model.remove(&key(index));
    }
    assert_same(&all_items(&tree), &model);
    assert_same(&all_items(&snapshot), &before);
}

#[test]
fn the_smallest_cache_works() {
    let mut volume = TestVolume::new(64 << 20, 0);
    let tree = volume.create();
    let mut model = fill(&volume, &tree, 3_000, NODE_CAPACITY / 20);
    volume.commit();
    assert!(volume.cache.statistics().nodes <= 1);
    for index in 0..2_900 {
        volume.remove(&tree, key(index));
        model.remove(&key(index));
        if index % 100 == 0 {
            volume.commit();
        }
    }
    volume.commit();
    volume.check_holds(tree.root(), &model);
    let empty = NodeCache::new(Arc::clone(&volume.device), VOLUME, volume.geometry, u64::MAX);
    assert_eq!(empty.statistics(), crate::CacheStatistics::default());
}

/// The thread that reads a node for others ends with a panic; they read it themselves.
#[test]
fn a_reader_that_panics_keeps_nobody_waiting() {
    let device = TestDevice::new(64 << 20);
    let mut volume = TestVolume::on(Arc::clone(&device) as Arc<dyn BlockDevice>, 1 << 20);
    let tree = volume.create();
    volume.insert(&tree, key(1), b"wanted by many");
    volume.commit();
    let tree = Arc::new(volume.reopen(tree.root()));
    device.delay.store(true, Ordering::SeqCst);
    device.panics.store(true, Ordering::SeqCst);
    let readers: Vec<_> = (0..4)
        .map(|_| {
            let tree = Arc::clone(&tree);
            thread::spawn("reader", move || tree.get(&key(1)).expect("readable").expect("there"))
        })
        .collect();
    let ends: Vec<_> = readers.into_iter().map(|reader| reader.join().is_ok()).collect();
    assert_eq!(
        ends.iter().filter(|read| **read).count(),
        3,
        "the first read panics, no other: {ends:?}"
    );
}
