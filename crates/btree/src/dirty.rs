//! The lists of the nodes that a transaction made and whose write hasn't ended.
//!
//! States of a dirty node: *running* (in its generation's list, may change, may be freed again),
//! *taken* by the cut (frozen: the next transaction copies instead of changing), *written* (clean).
//! A taken node that the next transaction frees is still written: the superblock to come refers to
//! it.
//!
//! Invariants: `count` is the number of running and taken nodes; a tree that has another root than
//! at the last cut is in `new_roots`.
//!
//! Lock discipline: the lists have the rank `NODE_DIRTY`; nothing else is locked under it.
use crate::handle::NodeHandle;
use crate::shard::BlockMap;
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_format::{Generation, TreeId};
use std::collections::{BTreeMap, BTreeSet};

/// The dirty nodes by generation.
pub(crate) struct DirtyLists {
    running: Mutex<BTreeMap<Generation, BlockMap<NodeHandle>>>,
    /// Trees that have got another root since the last cut.
    new_roots: Mutex<BTreeSet<TreeId>>,
    /// Running and taken nodes.
    count: AtomicU64,
}

impl DirtyLists {
    /// No nodes.
    pub(crate) fn new() -> DirtyLists {
        DirtyLists {
            running: Mutex::new(Rank::NODE_DIRTY, BTreeMap::new()),
            new_roots: Mutex::new(Rank::NODE_DIRTY, BTreeSet::new()),
            count: AtomicU64::new(0),
        }
    }

    /// Nodes that aren't on the device yet.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Takes a generation's list, for the cut.
    pub(crate) fn take(&self, generation: Generation) -> Vec<NodeHandle> {
        let list = self.running.lock().remove(&generation).unwrap_or_default();
        list.into_values().collect()
    }

    /// A tree has another root.
    pub(crate) fn note_new_root(&self, tree: TreeId) {
        self.new_roots.lock().insert(tree);
    }

    /// The trees that have got another root since the last cut.
    pub(crate) fn new_roots(&self) -> BTreeSet<TreeId> {
        self.new_roots.lock().clone()
    }

    /// The same for the cut, which begins anew.
    pub(crate) fn take_new_roots(&self) -> BTreeSet<TreeId> {
        std::mem::take(&mut *self.new_roots.lock())
    }

    /// A taken node is on the device.
    pub(crate) fn note_written(&self) {
        let before = self.count.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a node was counted as written twice");
    }

    /// Adds a node to its generation's list.
    pub(crate) fn insert(&self, node: NodeHandle) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.running.lock().entry(node.generation).or_default().insert(node.block, node);
    }

    /// Removes a node that was freed by the transaction that made it.
    pub(crate) fn remove(&self, node: &NodeHandle) {
        let removed =
            self.running.lock().get_mut(&node.generation).and_then(|list| list.remove(&node.block));
        if removed.is_some() {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
