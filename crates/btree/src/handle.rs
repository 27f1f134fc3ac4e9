//! A node in memory: its lock, and guards that keep it alive.
//!
//! What never changes while a node stands at its block (block, tree, level, generation) can be read
//! without its lock. Nodes of committed transactions never change at all, so a lock on them only
//! ever waits for the one who copies them.
use crate::routes::RoutesPlace;
use crate::statistics::LockWaits;
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::lock::{ArcRwLockReadGuard, ArcRwLockWriteGuard, RwLock};
use cairn_format::{BlockNumber, ChildPointer, Generation, Node, NodePointer, TreeId};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// What a node is to the thread that locks it. The debug build's check of the order of locks knows
/// these as places within a level: the left sibling, or a node without one, then the right sibling,
/// then what was newly made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Class {
    /// The only one of its level, or the left sibling.
    First,
    /// The right sibling of one that is locked.
    Right,
    /// A copy, or the right half of a split.
    New,
}

/// A node in memory. While a handle or a guard exists, the cache doesn't evict the node.
#[derive(Clone)]
pub(crate) struct NodeHandle(Arc<NodeBody>);

/// What handles of a node share.
pub(crate) struct NodeBody {
    /// First block of the node.
    pub(crate) block: BlockNumber,
    /// Tree that the node belongs to.
    pub(crate) tree: TreeId,
    /// Transaction that made the node.
    pub(crate) generation: Generation,
    /// Height above the leaves.
    pub(crate) level: u8,
    /// An inner node's routes.
    pub(crate) routes: RoutesPlace,
    /// Looked up since the clock's hand passed.
    used: AtomicBool,
    lock: Arc<RwLock<Node>>,
}

impl Deref for NodeHandle {
    type Target = NodeBody;

    fn deref(&self) -> &NodeBody {
        &self.0
    }
}

impl NodeBody {
    /// The node was looked up: it gets another round of the clock.
    #[inline]
    pub(crate) fn note_use(&self) {
        // Most often it was used before: then nothing is written that others read.
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the node was looked up since this was asked last.
    pub(crate) fn take_use(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }
}

impl NodeHandle {
    /// Gives `node` a lock.
    pub(crate) fn new(node: Node) -> NodeHandle {
        NodeHandle::with_lock(node, |node| RwLock::new(Rank::NODE, node))
    }

    /// Puts `node` behind the lock that `lock` makes.
    pub(crate) fn with_lock(node: Node, lock: impl FnOnce(Node) -> RwLock<Node>) -> NodeHandle {
        NodeHandle(Arc::new(NodeBody {
            block: node.address(),
            tree: node.tree(),
            generation: node.generation(),
            level: node.level(),
            routes: RoutesPlace::new(node.level()),
            used: AtomicBool::new(true),
            lock: Arc::new(lock(node)),
        }))
    }

    /// A handle of the node.
    pub(crate) fn from_body(body: Arc<NodeBody>) -> NodeHandle {
        NodeHandle(body)
    }

    /// What the handles of the node share.
    pub(crate) fn body(&self) -> &Arc<NodeBody> {
        &self.0
    }

    /// The node, if this was the last handle and nobody can make another one.
    pub(crate) fn into_last(self) -> Result<NodeBody, NodeHandle> {
        Arc::try_unwrap(self.0).map_err(NodeHandle)
    }

    /// Shared access, to the first node of its level that this thread locks.
    pub(crate) fn read(self, waits: &LockWaits) -> ReadNode {
        self.try_read().unwrap_or_else(|handle| {
            waits.count_node(handle.level, false);
            ReadNode { guard: handle.lock.read_arc_at(handle.place(Class::First)), handle }
        })
    }

    /// As [`Self::read`], if nobody is in the way.
    pub(crate) fn try_read(self) -> Result<ReadNode, NodeHandle> {
        let place = self.place(Class::First);
        self.lock.assert_order(place);
        match self.lock.try_read_arc_at(place) {
            Some(guard) => Ok(ReadNode { guard, handle: self }),
            None => Err(self),
        }
    }

    /// Exclusive access.
    pub(crate) fn write(self, class: Class, waits: &LockWaits) -> WriteNode {
        self.try_write(class).unwrap_or_else(|handle| {
            waits.count_node(handle.level, true);
            WriteNode { guard: handle.lock.write_arc_at(handle.place(class)), handle }
        })
    }

    /// As [`Self::write`], if nobody is in the way.
    pub(crate) fn try_write(self, class: Class) -> Result<WriteNode, NodeHandle> {
        let place = self.place(class);
        self.lock.assert_order(place);
        match self.lock.try_write_arc_at(place) {
            Some(guard) => Ok(WriteNode { guard, handle: self }),
            None => Err(self),
        }
    }

    /// Exclusive access to a node that nobody else knows yet. It needs no waiting, so it may be
    /// taken at any time.
    pub(crate) fn write_new(self) -> WriteNode {
        let guard = self
            .lock
            .try_write_arc_at(self.place(Class::New))
            .expect("nobody else knows a new node");
        WriteNode { guard, handle: self }
    }

    /// The place in the order of node locks: from the root down, on each level by class.
    fn place(&self, class: Class) -> u64 {
        u64::from(u8::MAX - self.level) * 4 + class as u64
    }

    /// Whether both are the same node in memory, not only the same block.
    pub(crate) fn is(&self, other: &NodeHandle) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether nobody else refers to the node in memory.
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

impl ReadNode {
    /// Child `index` was found to be `child`, and its keys were checked.
    pub(crate) fn learn_child(&self, index: usize, child: &NodeHandle) {
        self.handle.routes.learn(self, index, &child.0);
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
    /// Whoever wants to change an inner node withdraws its routes by that.
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
