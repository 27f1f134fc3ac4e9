//! M2: a fair, sleeping reader-writer lock for each node.
//!
//! Why this kind: a thread that waits for a node sleeps, so it burns no CPU; a release wakes only
//! threads that can go on, so there is no thundering herd; the lock hands itself over fairly from
//! time to time, so no thread starves. It is `parking_lot`'s, behind `cairn_environment`.
//!
//! States: free, shared by readers, or held by one writer. A waiting writer stops new readers, so a
//! thread never reads the same node twice at a time.
//!
//! Lock discipline: a thread takes node locks from the root down, and those of one level by
//! ascending [`Class`]; the debug build checks that, also where a lock is only tried first. A walk
//! that finds a lock taken waits for it with nothing else locked (`WaitPolicy` in `walk.rs`).
//!
//! What stands behind `choice` is the seam for the comparison with the lock's predecessor: one
//! module, chosen once. The product's has the lock's type and nothing to decide.
#[cfg_attr(feature = "baselines", path = "node_lock/predecessor.rs")]
mod choice;

use crate::statistics::LockWaits;
use cairn_format::Node;
pub(crate) use choice::NodeLocks;
use std::sync::Arc;

/// Shared access to a node.
pub(crate) type ReadGuard = choice::ReadGuard;
/// Exclusive access to a node.
pub(crate) type WriteGuard = choice::WriteGuard;

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

/// The place in the order of node locks: from the root down, on each level by class.
fn place(level: u8, class: Class) -> u64 {
    u64::from(u8::MAX - level) * 4 + class as u64
}

/// The lock of one node, with the node inside. Its functions take the node's level.
pub(crate) struct NodeLock(Arc<choice::Lock>);

impl NodeLock {
    /// A free lock of the kind that `locks` makes.
    pub(crate) fn new(node: Node, locks: &NodeLocks) -> NodeLock {
        NodeLock(Arc::new(locks.lock(node)))
    }

    /// Shared access, to the first node of its level that this thread locks, if it needs no
    /// waiting.
    #[inline]
    pub(crate) fn try_read(&self, level: u8) -> Option<ReadGuard> {
        let place = place(level, Class::First);
        self.0.assert_order(place);
        self.0.try_read_arc_at(place)
    }

    /// The same after a wait, which is counted.
    pub(crate) fn await_read(&self, level: u8, waits: &LockWaits) -> ReadGuard {
        waits.count_node(level, false);
        self.0.read_arc_at(place(level, Class::First))
    }

    /// Shared access for a moment, if it needs no waiting: so it may be taken at any time.
    pub(crate) fn try_read_for_copy(&self, level: u8) -> Option<ReadGuard> {
        self.0.try_read_arc_at(place(level, Class::New))
    }

    /// Exclusive access, if it needs no waiting.
    #[inline]
    pub(crate) fn try_write(&self, level: u8, class: Class) -> Option<WriteGuard> {
        let place = place(level, class);
        self.0.assert_order(place);
        self.0.try_write_arc_at(place)
    }

    /// The same after a wait, which is counted.
    pub(crate) fn await_write(&self, level: u8, class: Class, waits: &LockWaits) -> WriteGuard {
        waits.count_node(level, true);
        self.0.write_arc_at(place(level, class))
    }

    /// Exclusive access to a node that no other thread knows yet. It needs no waiting, so it may be
    /// taken at any time.
    pub(crate) fn write_new(&self, level: u8) -> WriteGuard {
        let guard = self.0.try_write_arc_at(place(level, Class::New));
        guard.expect("no other thread knows a new node")
    }
}
