//! A node in memory as its users hold it: a handle, and guards that keep the node alive.
//!
//! What never changes while a node stands at its block (block, tree, level, generation) can be read
//! without its lock. Nodes of committed transactions never change at all, so a lock on them only
//! ever waits for the thread that copies them.
//!
//! Invariant: a guard releases its lock before its handle goes.
//!
//! Lock discipline: that of `node_lock.rs`.
use crate::node_lock::{Class, NodeLocks, ReadGuard, WriteGuard};
use crate::routes::NodeBody;
use crate::statistics::LockWaits;
use cairn_format::{ChildPointer, Node, NodePointer};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A node in memory. While a handle or a guard exists, the cache doesn't evict the node.
#[derive(Clone)]
pub(crate) struct NodeHandle(Arc<NodeBody>);

impl Deref for NodeHandle {
    type Target = NodeBody;

    fn deref(&self) -> &NodeBody {
        &self.0
    }
}

impl NodeHandle {
    /// Gives `node` a lock.
    pub(crate) fn new(node: Node, locks: &NodeLocks) -> NodeHandle {
        NodeHandle(Arc::new(NodeBody::new(node, locks)))
    }

    /// A handle of the node.
    pub(crate) fn from_body(body: Arc<NodeBody>) -> NodeHandle {
        NodeHandle(body)
    }

    /// What the handles of the node share.
    pub(crate) fn body(&self) -> &Arc<NodeBody> {
        &self.0
    }

    /// The node, if this was the last handle and no other one can be made.
    pub(crate) fn into_last(self) -> Result<NodeBody, NodeHandle> {
        Arc::try_unwrap(self.0).map_err(NodeHandle)
    }

    /// Shared access, to the first node of its level that this thread locks.
    pub(crate) fn read(self, waits: &LockWaits) -> ReadNode {
        self.try_read().unwrap_or_else(|handle| ReadNode {
            guard: handle.lock.await_read(handle.level, waits),
            handle,
        })
    }

    /// As [`Self::read`], if it needs no waiting.
    pub(crate) fn try_read(self) -> Result<ReadNode, NodeHandle> {
        match self.lock.try_read(self.level) {
            Some(guard) => Ok(ReadNode { guard, handle: self }),
            None => Err(self),
        }
    }

    /// Exclusive access.
    pub(crate) fn write(self, class: Class, waits: &LockWaits) -> WriteNode {
        self.try_write(class).unwrap_or_else(|handle| WriteNode {
            guard: handle.lock.await_write(handle.level, class, waits),
            handle,
        })
    }

    /// As [`Self::write`], if it needs no waiting.
    pub(crate) fn try_write(self, class: Class) -> Result<WriteNode, NodeHandle> {
        match self.lock.try_write(self.level, class) {
            Some(guard) => Ok(WriteNode { guard, handle: self }),
            None => Err(self),
        }
    }

    /// Exclusive access to a node that no other thread knows yet.
    pub(crate) fn write_new(self) -> WriteNode {
        WriteNode { guard: self.lock.write_new(self.level), handle: self }
    }

    /// Whether both are the same node in memory, not only the same block.
    pub(crate) fn is(&self, other: &NodeHandle) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether this is the only reference to the node in memory.
    pub(crate) fn is_unshared(&self) -> bool {
        Arc::strong_count(&self.0) == 1
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
    guard: ReadGuard,
    /// The node.
    pub(crate) handle: NodeHandle,
}

impl Deref for ReadNode {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.guard
    }
}

impl ReadNode {
    /// Child `index`, if the routes know it.
    pub(crate) fn known_child(&self, index: usize) -> Option<NodeHandle> {
        let known = self.handle.routes.child(self, index)?;
        known.note_use();
        Some(NodeHandle(known))
    }

    /// Child `index` was found to be `child`, and its keys were checked.
    pub(crate) fn learn_child(&self, index: usize, child: &NodeHandle) {
        self.handle.routes.learn(self, index, &child.0);
    }
}

/// A node under its exclusive lock.
pub(crate) struct WriteNode {
    guard: WriteGuard,
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
    /// A change to an inner node withdraws its routes by this.
    fn deref_mut(&mut self) -> &mut Node {
        if self.handle.level > 0 {
            self.handle.routes.withdraw();
        }
        &mut self.guard
    }
}

impl WriteNode {
    /// Lets child `index` be `copy`, under the same keys: the routes stay, and lead to the copy.
    /// The old child's exclusive lock is held.
    pub(crate) fn replace_child(&mut self, index: usize, copy: &NodeHandle) {
        self.guard
            .replace(index, &copy.child_pointer().encode())
            .expect("a pointer takes another's room");
        self.handle.routes.exchange(index, &copy.0);
    }
}
