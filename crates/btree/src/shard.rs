//! A part of the node cache: the nodes of some blocks, and the clock that evicts them.
//!
//! States of a block: absent, *loading* (one thread reads it, the others wait), *dirty* (made by a
//! transaction whose commit hasn't written it yet), *clean*.
//!
//! Invariants: only clean nodes without other references are evicted, so a node in use stays the
//! only copy of its block in memory, and its lock means something. Routes refer to inner nodes: the
//! clock gives up the routes of an unused node, and then what they lead to can go.
//!
//! Lock discipline: a shard knows no lock; the cache has one around each (`NODE_CACHE`). Evicted
//! nodes are returned, to be dropped without it.
use crate::handle::NodeHandle;
use crate::routes::NodeBody;
use cairn_format::BlockNumber;
use rustc_hash::FxHashMap;

/// A map from blocks.
pub(crate) type BlockMap<T> = FxHashMap<BlockNumber, T>;

#[derive(Clone, Copy)]
enum Place {
    Loading,
    At(usize),
}

struct Slot {
    node: NodeHandle,
    dirty: bool,
}

/// What a lookup found.
pub(crate) enum Lookup {
    /// The node.
    Found(NodeHandle),
    /// Another thread is reading it.
    Loading,
    /// Nothing.
    Absent,
}

/// One part of the cache.
#[derive(Default)]
pub(crate) struct Shard {
    places: BlockMap<Place>,
    ring: Vec<Slot>,
    hand: usize,
    clean: usize,
    clean_max: usize,
    /// Lookups that found a node.
    pub(crate) hits: u64,
    /// Nodes read from the device.
    pub(crate) misses: u64,
    /// Nodes evicted.
    pub(crate) evictions: u64,
}

impl Shard {
    /// An empty shard that keeps up to `clean_max` clean nodes.
    pub(crate) fn new(clean_max: usize) -> Shard {
        Shard { clean_max, ..Shard::default() }
    }

    /// Nodes held.
    pub(crate) fn count(&self) -> usize {
        self.ring.len()
    }

    /// Looks `block` up, and gives its node another round of the clock.
    pub(crate) fn lookup(&mut self, block: BlockNumber) -> Lookup {
        match self.places.get(&block) {
            None => Lookup::Absent,
            Some(Place::Loading) => Lookup::Loading,
            Some(&Place::At(index)) => {
                self.hits += 1;
                let node = &self.ring[index].node;
                node.note_use();
                Lookup::Found(node.clone())
            }
        }
    }

    /// The node at `block`, which counts as no use.
    pub(crate) fn peek(&self, block: BlockNumber) -> Option<NodeHandle> {
        let Some(&Place::At(index)) = self.places.get(&block) else { return None };
        Some(self.ring[index].node.clone())
    }

    /// The caller is going to read `block`.
    pub(crate) fn begin_load(&mut self, block: BlockNumber) {
        self.misses += 1;
        self.places.insert(block, Place::Loading);
    }

    /// The reading of `block` ended. Returns what was evicted, to be dropped without the lock.
    pub(crate) fn end_load(
        &mut self,
        block: BlockNumber,
        node: Option<NodeHandle>,
    ) -> Vec<NodeBody> {
        if !matches!(self.places.get(&block), Some(Place::Loading)) {
            // The block was given to a new node meanwhile: what was read is history.
            return Vec::new();
        }
        self.places.remove(&block);
        let Some(node) = node else { return Vec::new() };
        self.insert(node, false);
        self.evict()
    }

    /// Adds a node in place of what was known of its block.
    pub(crate) fn insert(&mut self, node: NodeHandle, dirty: bool) {
        self.remove(node.block);
        self.clean += usize::from(!dirty);
        self.places.insert(node.block, Place::At(self.ring.len()));
        self.ring.push(Slot { node, dirty });
    }

    /// Removes the node at `block`.
    pub(crate) fn remove(&mut self, block: BlockNumber) -> Option<NodeHandle> {
        let Some(&Place::At(index)) = self.places.get(&block) else { return None };
        self.places.remove(&block);
        let slot = self.ring.swap_remove(index);
        if let Some(moved) = self.ring.get(index) {
            self.places.insert(moved.node.block, Place::At(index));
        }
        self.clean -= usize::from(!slot.dirty);
        Some(slot.node)
    }

    /// `node` is on the device now.
    pub(crate) fn set_clean(&mut self, node: &NodeHandle) {
        if let Some(&Place::At(index)) = self.places.get(&node.block) {
            let slot = &mut self.ring[index];
            if slot.node.is(node) && slot.dirty {
                slot.dirty = false;
                self.clean += 1;
            }
        }
    }

    /// Moves the clock's hand until the clean nodes fit, at most three times around. Returns what
    /// was evicted, to be dropped without the lock.
    pub(crate) fn evict(&mut self) -> Vec<NodeBody> {
        let mut evicted = Vec::new();
        let mut steps = 3 * self.ring.len();
        while self.clean > self.clean_max && steps > 0 {
            steps -= 1;
            self.hand = if self.hand + 1 < self.ring.len() { self.hand + 1 } else { 0 };
            let Slot { node, dirty } = &self.ring[self.hand];
            if *dirty || node.take_use() {
                continue;
            }
            // An unused node keeps nothing else in memory.
            node.routes.forget();
            if !node.is_unshared() {
                continue;
            }
            let block = node.block;
            // A reader may follow a route to the node at this moment.
            match self.remove(block).map(NodeHandle::into_last) {
                Some(Ok(node)) => evicted.push(node),
                Some(Err(node)) => self.insert(node, false),
                None => {}
            }
        }
        self.evictions += evicted.len() as u64;
        evicted
    }
}
