//! The node locks of a build that compares the product's with their predecessor: each cache has one
//! kind or the other, and follows routes or locks its way down.
//!
//! In this crate's own tests caches have the predecessor's side of both, so that with the feature
//! the tests run over it.
use cairn_environment::Rank;
use cairn_environment::lock::{ArcRwLockReadGuard, ArcRwLockWriteGuard};
use cairn_environment::waking::{EitherLock, RwLock, block_held};
use cairn_format::Node;

/// The lock around a node.
pub(crate) type Lock = RwLock<Node>;
/// Shared access.
pub(crate) type ReadGuard = ArcRwLockReadGuard<Node, EitherLock>;
/// Exclusive access.
pub(crate) type WriteGuard = ArcRwLockWriteGuard<Node, EitherLock>;

/// How a cache locks its nodes.
pub(crate) struct NodeLocks {
    /// Nodes get the predecessor's lock.
    pub(crate) waking: bool,
    /// Every walk locks its way down.
    pub(crate) locked_walks: bool,
}

impl NodeLocks {
    /// The product's way, until a switch is set; in this crate's own tests the predecessor's.
    pub(crate) fn new() -> NodeLocks {
        NodeLocks { waking: cfg!(test), locked_walks: cfg!(test) }
    }

    /// A free lock around `node`.
    pub(crate) fn lock(&self, node: Node) -> Lock {
        if self.waking {
            RwLock::waking(Rank::NODE, node)
        } else {
            RwLock::sleeping(Rank::NODE, node)
        }
    }

    /// Whether every walk locks its way down, and waits where it finds a lock taken.
    pub(crate) fn walks_are_locked(&self) -> bool {
        self.locked_walks
    }

    /// The calling thread is about to sleep or to work for long: its waking locks stop to spin.
    pub(crate) fn before_sleep(&self) {
        if self.waking {
            block_held();
        }
    }
}
