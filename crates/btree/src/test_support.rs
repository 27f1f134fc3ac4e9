//! A small volume for tests: a device, its space, a cache, and commits; and a checker that trusts
//! none of them.
#![cfg_attr(feature = "shuttle", allow(dead_code))] // the models use a part of it
use crate::{Change, NodeCache, Tree, TreeError, WriteReport};
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_format::{
    BlockNumber, Generation, Geometry, InodeNumber, ItemKind, Key, NODE_BLOCKS, NODE_SIZE, Node,
    NodePointer, TREE_FILES, VolumeId,
};
use cairn_space::{Request, Reservation, Space, Urgency};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub(crate) const VOLUME: VolumeId = VolumeId(*b"btree test bytes");
pub(crate) type Model = BTreeMap<Key, Vec<u8>>;

/// A cache. With the feature `baselines` it is the predecessor's side (`node_lock/predecessor.rs`):
/// so the tests run over both.
fn new_cache(
    device: &Arc<dyn BlockDevice>,
    geometry: Geometry,
    cache_bytes: u64,
) -> Arc<NodeCache> {
    NodeCache::new(Arc::clone(device), VOLUME, geometry, cache_bytes)
}

/// Everything a tree needs, and the running transaction.
pub(crate) struct TestVolume {
    pub(crate) device: Arc<dyn BlockDevice>,
    pub(crate) geometry: Geometry,
    pub(crate) space: Arc<Space>,
    pub(crate) cache: Arc<NodeCache>,
    pub(crate) running: Generation,
    cache_bytes: u64,
}

impl TestVolume {
    pub(crate) fn new(volume_bytes: u64, cache_bytes: u64) -> TestVolume {
        TestVolume::on(Arc::new(MemoryDevice::new(volume_bytes)), cache_bytes)
    }

    pub(crate) fn on(device: Arc<dyn BlockDevice>, cache_bytes: u64) -> TestVolume {
        let geometry =
            Geometry::for_size(device.length_bytes(), None).expect("the volume is large enough");
        let space = Space::new(geometry, Space::fresh_bitmaps(&geometry));
        let cache = new_cache(&device, geometry, cache_bytes);
        TestVolume { device, geometry, space, cache, running: Generation(7), cache_bytes }
    }

    pub(crate) fn reserve(&self, nodes: u64) -> Reservation {
        self.space
            .reserve(Request { data_blocks: 0, nodes }, Urgency::Commit)
            .expect("the volume has room")
    }

    pub(crate) fn create(&self) -> Tree {
        let reservation = self.reserve(1);
        Tree::create(
            Arc::clone(&self.cache),
            Arc::clone(&self.space),
            TREE_FILES,
            &self.change(&reservation),
        )
        .expect("one node")
    }

    pub(crate) fn change<'a>(&self, reservation: &'a Reservation) -> Change<'a> {
        Change { generation: self.running, reservation }
    }

    /// Inserts with the reservation that the bound asks for, and checks that it sufficed.
    pub(crate) fn insert(&self, tree: &Tree, key: Key, value: &[u8]) -> Option<Vec<u8>> {
        let reservation = self.reserve(tree.worst_case(1));
        tree.insert(&self.change(&reservation), key, value).expect("insertion works")
    }

    pub(crate) fn remove(&self, tree: &Tree, key: Key) -> Option<Vec<u8>> {
        let reservation = self.reserve(tree.worst_case(1));
        tree.remove(&self.change(&reservation), &key).expect("removal works")
    }

    /// Cut, write, unpin. Returns what was written.
    pub(crate) fn commit(&mut self) -> WriteReport {
        let nodes = self.cache.take_dirty(self.running);
        let report = self.cache.write(&nodes).expect("the device works");
        self.space.unpin(self.running);
        self.running = self.running.next();
        report
    }

    /// The committed tree at `root`, through an empty cache.
    pub(crate) fn reopen(&mut self, root: NodePointer) -> Tree {
        self.cache = self.fresh_cache();
        Tree::open(Arc::clone(&self.cache), Arc::clone(&self.space), TREE_FILES, root)
    }

    /// A tree that shares no memory with the others.
    pub(crate) fn open_apart(&self, root: NodePointer) -> Tree {
        Tree::open(self.fresh_cache(), Arc::clone(&self.space), TREE_FILES, root)
    }

    fn fresh_cache(&self) -> Arc<NodeCache> {
        new_cache(&self.device, self.geometry, self.cache_bytes)
    }

    /// Blocks that the allocator believes to be referenced.
    pub(crate) fn referenced_blocks(&self) -> u64 {
        self.space.snapshot(self.running).used_blocks
    }

    pub(crate) fn read_page(&self, block: BlockNumber) -> Box<[u8; NODE_SIZE]> {
        let mut page = vec![0; NODE_SIZE].into_boxed_slice();
        self.device.read(block.offset_bytes(), &mut page).expect("the device works");
        page.try_into().expect("size matches")
    }

    /// Reads the committed tree at `root` from the device, checks everything that is said of its
    /// structure, and returns the items and the nodes' blocks.
    pub(crate) fn check(&self, root: NodePointer) -> (Model, BTreeSet<BlockNumber>) {
        let mut checker = Checker { volume: self, items: Model::new(), blocks: BTreeSet::new() };
        checker.node(root, Key::MIN, None, true);
        (checker.items, checker.blocks)
    }

    /// Checks the committed tree, that it holds `model`, and that no node was lost.
    pub(crate) fn check_holds(&self, root: NodePointer, model: &Model) {
        let (items, blocks) = self.check(root);
        assert_same(&items, model);
        assert_eq!(
            self.referenced_blocks(),
            blocks.len() as u64 * NODE_BLOCKS,
            "nodes that are referenced but not reachable"
        );
    }
}

struct Checker<'a> {
    volume: &'a TestVolume,
    items: Model,
    blocks: BTreeSet<BlockNumber>,
}

impl Checker<'_> {
    fn node(&mut self, pointer: NodePointer, lower: Key, upper: Option<Key>, is_root: bool) {
        let node = Node::decode(self.volume.read_page(pointer.block), VOLUME, pointer.block)
            .expect("a written node is valid");
        assert!(self.blocks.insert(pointer.block), "two pointers to {}", pointer.block);
        assert_eq!(
            (node.generation(), node.level(), node.tree()),
            (pointer.generation, pointer.level, TREE_FILES)
        );
        assert!(
            node.items().all(|(key, _)| key >= lower && upper.is_none_or(|upper| key < upper)),
            "keys within bounds"
        );
        if node.level() == 0 {
            assert!(is_root || node.count() > 0, "empty leaf at {}", pointer.block);
            self.items.extend(node.items().map(|(key, value)| (key, value.to_vec())));
            return;
        }
        assert_eq!(node.key(0), lower, "the first key of an inner node is its lower bound");
        assert!(!is_root || node.count() > 1, "a root with one child");
        for index in 0..node.count() {
            let child = node.child(index);
            let pointer = NodePointer {
                block: child.block,
                generation: child.generation,
                level: node.level() - 1,
            };
            let next = if index + 1 < node.count() { Some(node.key(index + 1)) } else { upper };
            self.node(pointer, node.key(index), next, false);
        }
    }
}

/// The items that a tree gives in `range`, through its cursor.
pub(crate) fn all_items(tree: &Tree) -> Model {
    let items: Result<Vec<_>, TreeError> = tree.range(Key::MIN..=Key::MAX).collect();
    let items = items.expect("the tree can be read");
    assert!(items.is_sorted_by(|left, right| left.0 < right.0), "the cursor ascends");
    items.into_iter().collect()
}

/// Compares without printing megabytes.
pub(crate) fn assert_same(items: &Model, model: &Model) {
    assert_eq!(items.len(), model.len(), "number of items");
    for ((key, value), (model_key, model_value)) in items.iter().zip(model) {
        assert_eq!(key, model_key);
        assert!(value == model_value, "value of {key:?} differs");
    }
}

/// Key number `index`, in order.
pub(crate) fn key(index: u64) -> Key {
    Key::new(InodeNumber(10 + index / 64), ItemKind::Extent, index % 64)
}

/// A value that says which key and version it belongs to.
pub(crate) fn value(index: u64, version: u64, bytes: usize) -> Vec<u8> {
    let mut value = vec![(index + version) as u8; bytes.max(16)];
    value[..8].copy_from_slice(&index.to_le_bytes());
    value[8..16].copy_from_slice(&version.to_le_bytes());
    value
}

/// Checks that `value` is whole and belongs to key `index`, and returns its version.
pub(crate) fn version_of(index: u64, value: &[u8]) -> u64 {
    let word = |at: usize| u64::from_le_bytes(value[at..at + 8].try_into().expect("eight bytes"));
    assert_eq!(word(0), index, "value of another key");
    assert!(value[16..].iter().all(|byte| *byte == (index + word(8)) as u8), "torn value");
    word(8)
}
