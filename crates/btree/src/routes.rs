//! The routes of an inner node: its keys and its children in memory, to be followed without a lock.
//!
//! An inner node's table is made when somebody passes it under its lock, and published beside the node. Readers follow
//! tables from the root to the parent of a leaf, lock the leaf, and then look whether the table and the child's place in it
//! are still the same (`quick.rs`).
//!
//! States of a table: *published*; *withdrawn* for good, as soon as its node's keys or its node's place in the tree are
//! about to change. While it is published, only the handles of its children are exchanged.
//!
//! Invariants: a published table says what its node says, and its node is reachable in the tree. Whoever moves keys out of
//! a child, or replaces the child, withdraws the table or exchanges the handle before it releases the child's exclusive
//! lock. A handle in a table is that very child, in memory; its keys were held against the bounds when it was entered.
//!
//! Inner children are kept in memory by the table, so that a reader needs not count its references; leaves aren't: they
//! are most of the tree, and the cache's clock has to find those that nobody uses.
//!
//! Lock discipline: tables are made, filled and withdrawn under their node's lock; the cache may withdraw one at any time.
use crate::expected::Bounds;
use crate::handle::NodeBody;
use cairn_environment::published::{Published, PublishedWeak};
use cairn_format::{Key, Node};
use std::sync::Arc;

enum Children {
    Inner(Box<[Published<NodeBody>]>),
    Leaves(Box<[PublishedWeak<NodeBody>]>),
}

/// The keys and children of an inner node.
pub(crate) struct Routes {
    keys: Box<[Key]>,
    children: Children,
}

impl Routes {
    /// The routes of `node`, with the children that `older` knows.
    fn new(node: &Node, older: Option<&Routes>) -> Routes {
        let keys: Box<[Key]> = (0..node.count()).map(|index| node.key(index)).collect();
        let children = if node.level() == 1 {
            Children::Leaves(keys.iter().map(|_| PublishedWeak::empty()).collect())
        } else {
            Children::Inner(keys.iter().map(|_| Published::empty()).collect())
        };
        let routes = Routes { keys, children };
        for (index, key) in routes.keys.iter().enumerate() {
            let Some(known) = older.and_then(|older| older.child(older.keys.binary_search(key).ok()?)) else { continue };
            let pointer = node.child(index);
            if (known.block, known.generation) == (pointer.block, pointer.generation) {
                routes.set_child(index, &known);
            }
        }
        routes
    }

    /// Which child `key` belongs to.
    pub(crate) fn index(&self, key: &Key) -> usize {
        self.keys.partition_point(|first| first <= key).saturating_sub(1)
    }

    /// The bounds of child `index`, if the node has the bounds `bounds`.
    pub(crate) fn bounds(&self, bounds: Bounds, index: usize) -> Bounds {
        let lower = if index == 0 { bounds.lower } else { self.keys[index] };
        Bounds { lower, upper: self.keys.get(index + 1).copied().or(bounds.upper) }
    }

    /// Child `index`, if it is known and in memory.
    pub(crate) fn child(&self, index: usize) -> Option<Arc<NodeBody>> {
        match &self.children {
            Children::Inner(children) => children[index].load().clone(),
            Children::Leaves(children) => children[index].load(),
        }
    }

    /// The place of inner child `index`, to be followed without counting a reference; `None` if the children are leaves.
    pub(crate) fn inner_child(&self, index: usize) -> Option<&Published<NodeBody>> {
        match &self.children {
            Children::Inner(children) => Some(&children[index]),
            Children::Leaves(_) => None,
        }
    }

    /// Whether child `index` is `child`.
    pub(crate) fn has_child(&self, index: usize, child: &Arc<NodeBody>) -> bool {
        match &self.children {
            Children::Inner(children) => children[index].holds(child),
            Children::Leaves(children) => children[index].holds(child),
        }
    }

    fn set_child(&self, index: usize, child: &Arc<NodeBody>) {
        match &self.children {
            Children::Inner(children) => children[index].store(Some(Arc::clone(child))),
            Children::Leaves(children) => children[index].store(child),
        }
    }
}

/// Where a node's routes are published.
pub(crate) struct RoutesPlace {
    current: Published<Routes>,
    /// Withdrawn routes, whose children the next ones take over.
    older: Published<Routes>,
}

impl RoutesPlace {
    /// No routes.
    pub(crate) fn empty() -> RoutesPlace {
        RoutesPlace { current: Published::empty(), older: Published::empty() }
    }

    /// The published routes.
    pub(crate) fn published(&self) -> &Published<Routes> {
        &self.current
    }

    /// The routes, made of `node` if there are none. The node's lock is held.
    fn get(&self, node: &Node) -> Arc<Routes> {
        if let Some(routes) = &*self.current.load() {
            return Arc::clone(routes);
        }
        let older = self.older.swap(None);
        let routes = Arc::new(Routes::new(node, older.as_deref()));
        self.current.store(Some(Arc::clone(&routes)));
        routes
    }

    /// Child `index` of `node`, if it is known. The node's lock is held.
    pub(crate) fn child(&self, node: &Node, index: usize) -> Option<Arc<NodeBody>> {
        self.get(node).child(index)
    }

    /// Child `index` of `node` is `child`, which was checked. The node's lock is held.
    pub(crate) fn learn(&self, node: &Node, index: usize, child: &Arc<NodeBody>) {
        let routes = self.get(node);
        if !routes.has_child(index, child) {
            routes.set_child(index, child);
        }
    }

    /// The child `index` was replaced by `child`. The node's exclusive lock is held, and so is the old child's.
    pub(crate) fn exchange(&self, index: usize, child: &Arc<NodeBody>) {
        if let Some(routes) = &*self.current.load() {
            routes.set_child(index, child);
        }
    }

    /// The node is about to change. Its exclusive lock is held.
    pub(crate) fn withdraw(&self) {
        if self.current.load().is_some() {
            self.older.store(self.current.swap(None));
        }
    }

    /// The node leaves the tree, or memory is short.
    pub(crate) fn forget(&self) {
        self.current.store(None);
        self.older.store(None);
    }

    /// The routes go over from `old`, whose node was copied and leaves the tree. Both exclusive locks are held.
    pub(crate) fn take_over(&self, old: &RoutesPlace) {
        self.current.store(old.current.swap(None));
        self.older.store(old.older.swap(None));
    }
}
