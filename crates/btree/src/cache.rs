//! The node cache: every node in memory, clean or dirty, of all trees of a volume.
//!
//! Invariants:
//! - A block has at most one node in memory, as long as a reference to that node exists. A cache
//!   of snapshots may keep a node whose block is used again, and reads anew then.
//! - A node that was read was validated: checksum, volume, address, and what its parent says
//!   (`expected.rs`).
//! - A freed node leaves the cache before its block is given back, unless several trees had it. A
//!   new node takes the place of what was known of its block, so none is ever served stale.
//! - The clean nodes stay within the limit, but for those in use; dirty nodes aren't limited here,
//!   the commit is.
//!
//! Lock discipline: shards have the rank `NODE_CACHE`, one at a time; the dirty lists `NODE_DIRTY`.
//! Neither is held while the device works. [`NodeCache::fetch`] may read from the device: its
//! caller holds at most shared node locks, which also keeps the pointer valid that it came from.
use crate::dirty::DirtyLists;
use crate::error::TreeError;
use crate::expected::Expected;
use crate::handle::{NodeHandle, WriteNode};
use crate::node_lock::NodeLocks;
use crate::shard::{Lookup, Shard};
use crate::statistics::{CacheStatistics, LockWaits};
use cairn_blockdev::{BlockDevice, DeviceError};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, assert_not_exclusive};
use cairn_format::node::VALUE_BYTES_MAX;
use cairn_format::{
    BlockNumber, BlockRange, Generation, Geometry, NODE_BLOCKS, NODE_SIZE, Node, VolumeId,
};
use std::sync::{Arc, OnceLock, Weak};

/// Nodes that a shard should have room for, at least.
const SHARD_NODES_MIN: u64 = 64;
/// Most shards.
const SHARDS_MAX: u64 = 64;

struct Section {
    shard: Mutex<Shard>,
    /// A load ended.
    loaded: Condvar,
}

/// A node that this thread reads from the device. Dropping it, however the reading ended, wakes the
/// threads that wait for that node.
struct Load<'a> {
    section: &'a Section,
    block: BlockNumber,
    node: Option<NodeHandle>,
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        let evicted = self.section.shard.lock().end_load(self.block, self.node.take());
        self.section.loaded.notify_all();
        drop(evicted);
    }
}

/// The nodes in memory of one volume.
pub struct NodeCache {
    pub(crate) device: Arc<dyn BlockDevice>,
    pub(crate) dirty: DirtyLists,
    pub(crate) waits: LockWaits,
    pub(crate) locks: NodeLocks,
    volume: VolumeId,
    geometry: Geometry,
    /// Of a cache of snapshots: where their nodes may be in memory already. Its own are only read,
    /// and nobody says when their blocks are used again.
    live: Option<Arc<NodeCache>>,
    /// Of a live cache: that of its snapshots, where nodes may be that it had no room for.
    of_snapshots: OnceLock<Weak<NodeCache>>,
    sections: Vec<Section>,
}

impl NodeCache {
    /// An empty cache that keeps up to `limit_bytes` of clean nodes.
    pub fn new(
        device: Arc<dyn BlockDevice>,
        volume: VolumeId,
        geometry: Geometry,
        limit_bytes: u64,
    ) -> Arc<NodeCache> {
        Arc::new(Self::with(device, volume, geometry, limit_bytes, None))
    }

    /// An empty cache beside `live`, for trees of committed transactions that are only read, and
    /// whose blocks may be used again without this cache being told. Each of the two, if it is the
    /// first one beside `live`, copies nodes that the other has in memory.
    pub fn of_snapshots(live: &Arc<NodeCache>, limit_bytes: u64) -> Arc<NodeCache> {
        let (device, beside) = (Arc::clone(&live.device), Some(Arc::clone(live)));
        let cache = Self::with(device, live.volume, live.geometry, limit_bytes, beside);
        let cache = Arc::new(cache);
        let _is_first = live.of_snapshots.set(Arc::downgrade(&cache));
        cache
    }

    fn with(
        device: Arc<dyn BlockDevice>,
        volume: VolumeId,
        geometry: Geometry,
        limit_bytes: u64,
        live: Option<Arc<NodeCache>>,
    ) -> NodeCache {
        let limit_nodes = (limit_bytes / NODE_SIZE as u64).max(1);
        let shards = (limit_nodes / SHARD_NODES_MIN).clamp(1, SHARDS_MAX);
        let clean_max = usize::try_from(limit_nodes / shards).unwrap_or(usize::MAX);
        let section = |_| Section {
            shard: Mutex::new(Rank::NODE_CACHE, Shard::new(clean_max)),
            loaded: Condvar::new(),
        };
        let sections = (0..shards).map(section).collect();
        NodeCache {
            device,
            dirty: DirtyLists::new(),
            waits: LockWaits::default(),
            locks: NodeLocks::new(),
            volume,
            geometry,
            live,
            of_snapshots: OnceLock::new(),
            sections,
        }
    }

    /// The volume whose nodes these are.
    pub(crate) fn volume(&self) -> VolumeId {
        self.volume
    }

    /// What the cache holds and has done.
    pub fn statistics(&self) -> CacheStatistics {
        let mut statistics =
            CacheStatistics { dirty: self.dirty.count(), ..CacheStatistics::default() };
        for section in &self.sections {
            let shard = section.shard.lock();
            statistics.hits += shard.hits;
            statistics.misses += shard.misses;
            statistics.evictions += shard.evictions;
            statistics.nodes += shard.count() as u64;
        }
        self.waits.report(&mut statistics);
        statistics
    }

    /// Bytes of the nodes that aren't on the device yet, those being written included.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty.count() * NODE_SIZE as u64
    }

    fn section(&self, block: BlockNumber) -> &Section {
        let hash = (block.0 / NODE_BLOCKS).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.sections[hash as usize % self.sections.len()]
    }

    /// The node, if it is in memory.
    ///
    /// # Errors
    /// When it isn't the node that its parent describes.
    pub(crate) fn cached(&self, expected: &Expected) -> Result<Option<NodeHandle>, TreeError> {
        let lookup = self.section(expected.block).shard.lock().lookup(expected.block);
        let Lookup::Found(node) = lookup else { return Ok(None) };
        if self.is_stale(&node, expected) {
            return Ok(None);
        }
        expected.check_identity(node.tree, node.level, node.generation)?;
        Ok(Some(node))
    }

    /// The node, read from the device if need be. Threads that want the same node read it once.
    ///
    /// # Errors
    /// When the device fails, or what it returns isn't the node that its parent describes.
    pub(crate) fn fetch(&self, expected: &Expected) -> Result<NodeHandle, TreeError> {
        let section = self.section(expected.block);
        let mut shard = section.shard.lock();
        loop {
            match shard.lookup(expected.block) {
                Lookup::Found(node) if self.is_stale(&node, expected) => {
                    let removed = shard.remove(expected.block);
                    drop(shard);
                    drop((node, removed));
                    shard = section.shard.lock();
                }
                Lookup::Found(node) => {
                    drop(shard);
                    expected.check_identity(node.tree, node.level, node.generation)?;
                    return Ok(node);
                }
                Lookup::Loading => {
                    self.locks.before_sleep();
                    section.loaded.wait(&mut shard);
                }
                Lookup::Absent => break,
            }
        }
        shard.begin_load(expected.block);
        drop(shard);
        let mut load = Load { section, block: expected.block, node: None };
        self.locks.before_sleep();
        let node = match self.beside().and_then(|other| other.copy_of(expected)) {
            Some(node) => node,
            None => self.read(expected)?,
        };
        let node = NodeHandle::new(node, &self.locks);
        load.node = Some(node.clone());
        Ok(node)
    }

    fn beside(&self) -> Option<Arc<NodeCache>> {
        let of_snapshots = || self.of_snapshots.get().and_then(Weak::upgrade);
        self.live.clone().or_else(of_snapshots)
    }

    /// A copy of a node of a committed transaction, if it is in memory and needs no waiting. What
    /// is at a block was written once in a generation.
    fn copy_of(&self, expected: &Expected) -> Option<Node> {
        let node = self.section(expected.block).shard.lock().peek(expected.block)?;
        expected.check_identity(node.tree, node.level, node.generation).ok()?;
        let node = node.lock.try_read_for_copy(node.level)?;
        expected.check_keys(&node).ok()?;
        Some(Node::clone(&node))
    }

    /// Whether the block of `node` is used again, and its tree is gone.
    fn is_stale(&self, node: &NodeHandle, expected: &Expected) -> bool {
        self.live.is_some() && node.generation != expected.generation
    }

    fn read(&self, expected: &Expected) -> Result<Node, TreeError> {
        assert_not_exclusive(Rank::NODE);
        let Expected { block, .. } = *expected;
        if !block.0.is_multiple_of(NODE_BLOCKS)
            || block.0.checked_add(NODE_BLOCKS).is_none()
            || !self.geometry.contains(BlockRange::node(block))
        {
            return Err(expected.damaged("the pointer leads out of the space for nodes".into()));
        }
        let offset_bytes = block.offset_bytes();
        let first = self.read_with(expected, |page| self.device.read(offset_bytes, page));
        let copies = self.device.copies();
        if first.is_ok() {
            return first;
        }
        // A copy that is the node that its parent describes is good, and the others become like it.
        let read = |copy| {
            self.read_with(expected, |page| self.device.read_copy(copy, offset_bytes, page)).ok()
        };
        let Some(node) = (0..copies).filter(|_| copies > 1).find_map(read) else {
            if matches!(first, Err(TreeError::Damaged { .. })) {
                self.device.note_damage(offset_bytes, NODE_SIZE as u64);
            }
            return first;
        };
        // The reader has what it wants; a copy that can't be repaired has been dropped, with a
        // warning.
        let _ = self.device.repair(offset_bytes, &node.page()[..]);
        Ok(node)
    }

    /// The node, as `read` fills its page, if it is the one that is expected.
    fn read_with(
        &self,
        expected: &Expected,
        read: impl FnOnce(&mut [u8]) -> Result<(), DeviceError>,
    ) -> Result<Node, TreeError> {
        let (tree, block) = (expected.owner.tree, expected.block);
        let mut page: Box<[u8; NODE_SIZE]> =
            vec![0; NODE_SIZE].into_boxed_slice().try_into().expect("size matches");
        read(&mut page[..]).map_err(|source| TreeError::Device { tree, block, source })?;
        let node = Node::decode(page, self.volume, block)
            .map_err(|source| TreeError::Damaged { tree, source })?;
        expected.check_identity(node.tree(), node.level(), node.generation())?;
        expected.check_keys(&node)?;
        if let Some((key, value)) = node.items().find(|(_, value)| value.len() > VALUE_BYTES_MAX) {
            return Err(expected.damaged(format!("value of {key:?} has {} bytes", value.len())));
        }
        Ok(node)
    }

    /// Takes a node that the running transaction made, and returns it locked: no other thread
    /// can have seen it before.
    pub(crate) fn insert_new(&self, node: Node) -> WriteNode {
        let handle = NodeHandle::new(node, &self.locks);
        let locked = handle.clone().write_new();
        self.dirty.insert(handle.clone());
        self.section(handle.block).shard.lock().insert(handle, true);
        locked
    }

    /// Forgets a node that the transaction `running` frees. If an older transaction made it, and
    /// its commit is still writing it, that goes on.
    pub(crate) fn remove(&self, node: &NodeHandle, running: Generation) {
        if node.generation == running {
            self.dirty.remove(node);
        }
        let removed = self.section(node.block).shard.lock().remove(node.block);
        drop(removed);
    }

    /// `node` is on the device: it may be evicted when it is unused.
    pub(crate) fn set_clean(&self, node: &NodeHandle) {
        self.section(node.block).shard.lock().set_clean(node);
    }

    /// Evicts what exceeds the limit.
    pub(crate) fn trim(&self) {
        for section in &self.sections {
            let evicted = section.shard.lock().evict();
            drop(evicted);
        }
    }
}
