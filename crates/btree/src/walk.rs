//! The walk from the root down to a node. All that locks its way to a node takes it: lookups,
//! cursors, changes, and what a change reads into memory.
//!
//! 1. Lock the root pointer, shared; the root is ahead.
//! 2. As long as the node ahead isn't the wanted one: lock it, shared, and check its keys; make its
//!    way known to the routes; release the lock above; the child for the key is ahead.
//! 3. The caller locks the node ahead, shared or exclusively. Then the lock above is released.
//!
//! Invariant: while a lock is held on a parent, its pointers are valid, since a thread that frees a
//! child holds the parent's exclusive lock. So the node ahead is what its parent says, until it is
//! locked itself.
//!
//! Lock discipline: root pointer (`TREE_ROOT`), then nodes (`NODE`) from the root down, hand over
//! hand: a node and the one above it. A walk may read from the device; the locks that it holds then
//! are shared ones. If a lock is taken, the walk releases all and waits for that lock alone, then
//! begins again ([`WaitPolicy`]).
use crate::error::TreeError;
use crate::expected::{Bounds, Expected, Owner};
use crate::handle::{NodeHandle, ReadNode, WriteNode};
use crate::node_lock::Class;
use crate::page::Neighbours;
use crate::tree::Tree;
use cairn_environment::lock::RwLockReadGuard;
use cairn_format::{Generation, Key, NodePointer};

/// So often a walk begins again; then it waits where it is, or a leaf that is never free could
/// starve it.
const BEGIN_AGAIN_MAX: u32 = 4;

/// Why a walk ended early.
pub(crate) enum Stop {
    /// A node isn't in memory, and the locks that are held forbid to read it.
    Missing,
    /// Another thread holds a node's lock; whether this walk wanted it exclusively.
    Busy(NodeHandle, bool),
    /// It can't be done.
    Failed(TreeError),
}

impl From<TreeError> for Stop {
    fn from(error: TreeError) -> Stop {
        Stop::Failed(error)
    }
}

/// What a walk does when it meets a lock that is taken, while it holds the one above.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitPolicy {
    /// It releases everything and waits for that lock alone, then begins again. Otherwise a node
    /// whose holder lost the CPU would stop all threads that pass the nodes above it.
    BeginAgain,
    /// It waits, for it has begun again often enough.
    WaitHere,
}

/// The lock above the node ahead.
enum LockAbove<'a> {
    Pointer { _lock: RwLockReadGuard<'a, NodePointer> },
    Parent(Parent),
}

/// An inner node that a walk passes, under its shared lock.
pub(crate) struct Parent {
    owner: Owner,
    node: ReadNode,
    bounds: Bounds,
    /// The child that the walk goes to.
    index: usize,
}

impl LockAbove<'_> {
    /// Lets the routes of the parent know that the node ahead is `child`, whose keys were checked.
    /// Returns the parent; the root has none.
    #[inline]
    fn learn(&self, child: &NodeHandle) -> Option<&Parent> {
        let LockAbove::Parent(parent) = self else { return None };
        parent.node.learn_child(parent.index, child);
        Some(parent)
    }
}

impl Parent {
    /// What the node says about a sibling of the child, if there is one.
    pub(crate) fn sibling(&self) -> Option<Expected> {
        let Parent { owner, node, bounds, index } = self;
        (node.count() > 1).then(|| {
            let sibling = Neighbours::of(node, *index).sibling();
            Expected::child(*owner, node, *bounds, sibling)
        })
    }
}

/// The node where a walk ends: in memory, and not locked yet.
pub(crate) struct NodeAhead<'a> {
    tree: &'a Tree,
    policy: WaitPolicy,
    /// What keeps the node in its place.
    above: LockAbove<'a>,
    node: NodeHandle,
    expected: Expected,
}

impl NodeAhead<'_> {
    /// Step 3, shared. `visit` sees the node and its parent.
    #[inline]
    pub(crate) fn read(
        self,
        visit: &mut impl FnMut(Option<&Parent>, &ReadNode) -> Result<(), TreeError>,
    ) -> Result<(ReadNode, Bounds), Stop> {
        let node = self.tree.read_below(self.node, &self.expected, self.policy)?;
        visit(self.above.learn(&node.handle), &node)?;
        Ok((node, self.expected.bounds))
    }

    /// Step 3, exclusively.
    #[inline]
    pub(crate) fn write(self) -> Result<(WriteNode, Bounds), Stop> {
        let node = self.tree.write_below(self.node, Class::First, &self.expected, self.policy)?;
        self.above.learn(&node.handle);
        Ok((node, self.expected.bounds))
    }

    /// Whether the node is the root.
    pub(crate) fn is_root(&self) -> bool {
        matches!(self.above, LockAbove::Pointer { .. })
    }

    /// Height above the leaves.
    pub(crate) fn level(&self) -> u8 {
        self.node.level
    }

    /// Transaction that made the node.
    pub(crate) fn generation(&self) -> Generation {
        self.node.generation
    }
}

/// For a walk of which only the end is of interest.
pub(crate) fn unseen(_: Option<&Parent>, _: &ReadNode) -> Result<(), TreeError> {
    Ok(())
}

impl Tree {
    /// Steps 1 and 2: walks to the node at `level` for `key`; to the root, if it stands lower.
    /// `visit` sees each node that is passed, and its parent, while both are locked; it may see a
    /// way more than once.
    #[inline]
    pub(crate) fn walk(
        &self,
        key: &Key,
        level: u8,
        policy: WaitPolicy,
        visit: &mut impl FnMut(Option<&Parent>, &ReadNode) -> Result<(), TreeError>,
    ) -> Result<NodeAhead<'_>, Stop> {
        let pointer = self.read_root();
        let mut expected = self.expected_root(*pointer);
        let mut node = self.fetch_root(&expected)?;
        let mut above = LockAbove::Pointer { _lock: pointer };
        while node.level > level {
            let passed = self.read_below(node, &expected, policy)?;
            visit(above.learn(&passed.handle), &passed)?;
            drop(above);
            let (bounds, index) = (expected.bounds, passed.child_index(key));
            expected = Expected::child(self.owner(), &passed, bounds, index);
            node = match passed.known_child(index) {
                Some(known) => known,
                None => self.cache.fetch(&expected)?,
            };
            above = LockAbove::Parent(Parent { owner: self.owner(), node: passed, bounds, index });
        }
        Ok(NodeAhead { tree: self, policy, above, node, expected })
    }

    /// Locks `node` shared, below another one that is locked, and checks its keys.
    fn read_below(
        &self,
        node: NodeHandle,
        expected: &Expected,
        policy: WaitPolicy,
    ) -> Result<ReadNode, Stop> {
        let node = match policy {
            WaitPolicy::BeginAgain => node.try_read().map_err(|node| Stop::Busy(node, false))?,
            WaitPolicy::WaitHere => node.read(&self.cache.waits),
        };
        expected.check_keys(&node)?;
        Ok(node)
    }

    /// Locks `node` exclusively, below another one that is locked, and checks its keys.
    pub(crate) fn write_below(
        &self,
        node: NodeHandle,
        class: Class,
        expected: &Expected,
        policy: WaitPolicy,
    ) -> Result<WriteNode, Stop> {
        let node = match policy {
            WaitPolicy::BeginAgain => {
                node.try_write(class).map_err(|node| Stop::Busy(node, true))?
            }
            WaitPolicy::WaitHere => node.write(class, &self.cache.waits),
        };
        expected.check_keys(&node)?;
        Ok(node)
    }

    /// Runs a walk until it meets no lock that is taken, or may wait for it.
    pub(crate) fn with_retries<T>(
        &self,
        mut attempt: impl FnMut(WaitPolicy) -> Result<T, Stop>,
    ) -> Result<T, TreeError> {
        let mut begun_again = 0;
        loop {
            match attempt(self.policy(begun_again)) {
                Ok(done) => return Ok(done),
                Err(Stop::Failed(error)) => return Err(error),
                // With no lock of the tree held, so that no other thread waits for this one.
                Err(Stop::Busy(node, true)) => drop(node.write(Class::First, &self.cache.waits)),
                Err(Stop::Busy(node, false)) => drop(node.read(&self.cache.waits)),
                Err(Stop::Missing) => unreachable!("what is missing was read"),
            }
            begun_again += 1;
        }
    }

    /// That of a walk which has begun again so often.
    fn policy(&self, begun_again: u32) -> WaitPolicy {
        if begun_again < BEGIN_AGAIN_MAX && !self.cache.locks.walks_are_locked() {
            WaitPolicy::BeginAgain
        } else {
            WaitPolicy::WaitHere
        }
    }
}
