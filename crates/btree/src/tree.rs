//! A tree: its cache, its allocator, and its root pointer.
//!
//! Invariant: `root_node` is the node that the root pointer names, or nothing. It is set under the
//! root pointer's lock, and withdrawn under its exclusive one.
//!
//! Lock discipline: the root pointer has the rank `TREE_ROOT`; node locks come after it. All walks
//! to a node are in `walk.rs` and, without locks, in `quick.rs`.
use crate::cache::NodeCache;
use crate::error::TreeError;
use crate::expected::{Expected, Owner};
use crate::handle::NodeHandle;
use crate::routes::NodeBody;
use cairn_environment::Rank;
use cairn_environment::lock::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use cairn_environment::published::Published;
use cairn_format::{NodePointer, TreeId};
use cairn_space::{Boundary, Space};
use std::sync::Arc;

/// A B-tree of items, used by many threads at once.
pub struct Tree {
    pub(crate) cache: Arc<NodeCache>,
    pub(crate) space: Arc<Space>,
    id: TreeId,
    /// Which of its nodes are a snapshot's or its origin's, too.
    pub(crate) boundary: Arc<Boundary>,
    root: RwLock<NodePointer>,
    /// The root in memory, for lookups that take no lock on the way to a leaf.
    pub(crate) root_node: Published<NodeBody>,
}

/// The root pointer under its exclusive lock.
pub(crate) struct RootGuard<'a> {
    tree: &'a Tree,
    guard: RwLockWriteGuard<'a, NodePointer>,
}

impl RootGuard<'_> {
    /// Where the root is.
    pub(crate) fn pointer(&self) -> NodePointer {
        *self.guard
    }

    /// Gives the tree another root.
    pub(crate) fn set(&mut self, pointer: NodePointer) {
        self.tree.root_node.store(None);
        *self.guard = pointer;
        self.tree.cache.dirty.note_new_root(self.tree.id);
    }
}

impl Tree {
    /// The tree whose root is at `root`; no snapshot has its nodes. Nothing is read yet.
    pub fn open(cache: Arc<NodeCache>, space: Arc<Space>, id: TreeId, root: NodePointer) -> Tree {
        Tree::open_shared(cache, space, id, root, Arc::default())
    }

    /// As [`Tree::open`]; nodes up to `boundary` are a snapshot's or its origin's, too.
    pub fn open_shared(
        cache: Arc<NodeCache>,
        space: Arc<Space>,
        id: TreeId,
        root: NodePointer,
        boundary: Arc<Boundary>,
    ) -> Tree {
        Tree {
            cache,
            space,
            id,
            boundary,
            root: RwLock::new(Rank::TREE_ROOT, root),
            root_node: Published::empty(),
        }
    }

    /// Which of its nodes are a snapshot's or its origin's, too.
    pub fn boundary(&self) -> &Arc<Boundary> {
        &self.boundary
    }

    /// The tree's id.
    pub fn id(&self) -> TreeId {
        self.id
    }

    /// Whose the nodes are.
    pub(crate) fn owner(&self) -> Owner {
        Owner { tree: self.id, inherited: self.boundary.made_until() }
    }

    /// Where the root is. At the cut this is what the root tree must remember.
    pub fn root(&self) -> NodePointer {
        *self.root.read()
    }

    /// The root pointer, to look at.
    pub(crate) fn read_root(&self) -> RwLockReadGuard<'_, NodePointer> {
        self.root.try_read().unwrap_or_else(|| {
            self.cache.waits.count_root(false);
            self.root.read()
        })
    }

    /// The root pointer, to change.
    pub(crate) fn write_root(&self) -> RootGuard<'_> {
        let guard = self.root.try_write().unwrap_or_else(|| {
            self.cache.waits.count_root(true);
            self.root.write()
        });
        RootGuard { tree: self, guard }
    }

    /// What the root pointer says about the root.
    pub(crate) fn expected_root(&self, pointer: NodePointer) -> Expected {
        Expected::root(self.owner(), pointer)
    }

    /// The root in memory; its pointer's lock is held.
    pub(crate) fn fetch_root(&self, expected: &Expected) -> Result<NodeHandle, TreeError> {
        let node = self.cache.fetch(expected)?;
        if !self.root_node.holds(node.body()) {
            self.root_node.store(Some(Arc::clone(node.body())));
        }
        Ok(node)
    }
}
