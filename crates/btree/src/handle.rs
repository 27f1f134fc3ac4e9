//! A node in memory: its lock, and guards that keep it alive.
//!
//! What never changes while a node stands at its block (block, tree, level, generation) can be read without its lock.
//! Nodes of committed transactions never change at all, so a lock on them only ever waits for the one who copies them.
use crate::statistics::LockWaits;
use cairn_environment::Rank;
use cairn_environment::lock::{ArcRwLockReadGuard, ArcRwLockWriteGuard, RwLock};
use cairn_format::{BlockNumber, ChildPointer, Generation, Node, NodePointer, TreeId};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A node in memory. While a handle or a guard exists, the cache doesn't evict the node.
#[derive(Clone)]
pub(crate) struct NodeHandle {
    /// First block of the node.
    pub(crate) block: BlockNumber,
    /// Tree that the node belongs to.
    pub(crate) tree: TreeId,
    /// Transaction that made the node.
    pub(crate) generation: Generation,
    /// Height above the leaves.
    pub(crate) level: u8,
    lock: Arc<RwLock<Node>>,
}

impl NodeHandle {
    /// Gives `node` a lock.
    pub(crate) fn new(node: Node) -> NodeHandle {
        NodeHandle::with_lock(node, |node| RwLock::new(Rank::NODE, node))
    }

    /// Puts `node` behind the lock that `lock` makes.
    pub(crate) fn with_lock(node: Node, lock: impl FnOnce(Node) -> RwLock<Node>) -> NodeHandle {
        NodeHandle {
            block: node.address(),
            tree: node.tree(),
            generation: node.generation(),
            level: node.level(),
            lock: Arc::new(lock(node)),
        }
    }

    /// Shared access.
    pub(crate) fn read(self, waits: &LockWaits) -> ReadNode {
        let guard = self.lock.try_read_arc().unwrap_or_else(|| {
            waits.count_node(self.level);
            self.lock.read_arc()
        });
        ReadNode { guard, handle: self }
    }

    /// Exclusive access.
    pub(crate) fn write(self, waits: &LockWaits) -> WriteNode {
        let guard = self.lock.try_write_arc().unwrap_or_else(|| {
            waits.count_node(self.level);
            self.lock.write_arc()
        });
        WriteNode { guard, handle: self }
    }

    /// Whether both are the same node in memory, not only the same block.
    pub(crate) fn is(&self, other: &NodeHandle) -> bool {
        Arc::ptr_eq(&self.lock, &other.lock)
    }

    /// Whether nobody else refers to the node in memory.
    pub(crate) fn is_unshared(&self) -> bool {
        Arc::strong_count(&self.lock) == 1
    }

    /// What the tree's owner stores when this node is the root.
    pub(crate) fn root_pointer(&self) -> NodePointer {
        NodePointer { block: self.block, generation: self.generation, level: self.level }
    }

    /// What the parent stores.
    pub(crate) fn child_pointer(&self) -> ChildPointer {
        ChildPointer { block: self.block, generation: self.generation }
    }
}

/// A node under its shared lock.
pub(crate) struct ReadNode {
    // The lock is released before the handle goes.
    guard: ArcRwLockReadGuard<Node>,
    /// The node.
    pub(crate) handle: NodeHandle,
}

impl Deref for ReadNode {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.guard
    }
}

/// A node under its exclusive lock.
pub(crate) struct WriteNode {
    guard: ArcRwLockWriteGuard<Node>,
    /// The node.
    pub(crate) handle: NodeHandle,
}

impl Deref for WriteNode {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.guard
    }
}

impl DerefMut for WriteNode {
    fn deref_mut(&mut self) -> &mut Node {
        &mut self.guard
    }
}
