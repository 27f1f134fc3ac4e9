//! The product's node locks. `predecessor.rs` stands in this module's place in a build that
//! compares them.
use cairn_environment::Rank;
use cairn_environment::lock::{ArcRwLockReadGuard, ArcRwLockWriteGuard, RwLock};
use cairn_format::Node;

/// The lock around a node.
pub(crate) type Lock = RwLock<Node>;
/// Shared access.
pub(crate) type ReadGuard = ArcRwLockReadGuard<Node>;
/// Exclusive access.
pub(crate) type WriteGuard = ArcRwLockWriteGuard<Node>;

/// How a cache locks its nodes.
pub(crate) struct NodeLocks;

impl NodeLocks {
    /// The one way.
    pub(crate) fn new() -> NodeLocks {
        NodeLocks
    }

    /// A free lock around `node`.
    #[inline]
    pub(crate) fn lock(&self, node: Node) -> Lock {
        RwLock::new(Rank::NODE, node)
    }

    /// Whether every walk locks its way down, and waits where it finds a lock taken.
    #[inline]
    pub(crate) fn walks_are_locked(&self) -> bool {
        false
    }

    /// The calling thread is about to sleep or to work for long. A sleeping lock doesn't care.
    #[inline]
    pub(crate) fn before_sleep(&self) {}
}
