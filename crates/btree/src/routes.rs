//! The nodes in memory, and the routes between them: an inner node's keys and its children in
//! memory, to be followed without a lock.
//!
//! An inner node's table of routes is made when a walk passes the node under its lock, and is
//! published beside the node. Readers follow tables from the root to the parent of a leaf, lock the
//! leaf, and then look whether the table and the child's place in it are still the same
//! (`quick.rs`).
//!
//! States of a table: *published*; *withdrawn* for good, as soon as its node's keys or its node's
//! place in the tree are about to change. While it is published, only the handles of its children
//! are exchanged.
//!
//! Invariants: a published table says what its node says, and its node is reachable in the tree.
//! A thread that moves keys out of a child, or replaces the child, withdraws the table or exchanges
//! the handle before it releases the child's exclusive lock. A handle in a table is that very
//! child, in memory; its keys were held against the bounds when it was entered.
//!
//! Inner children are kept in memory by the table, so that a reader needs not count its references;
//! leaves aren't: they are most of the tree, and the cache's clock has to find the unused ones.
//!
//! Lock discipline: tables are made, filled and withdrawn under their node's lock; the cache may
//! withdraw one at any time. A leaf's place in a table has a lock of its own (`LEAF`), which only
//! threads that want this very leaf take, for a moment.
use crate::expected::Bounds;
use crate::node_lock::{NodeLock, NodeLocks};
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::lock::{Mutex, RwLock};
use cairn_environment::published::{Published, Seen};
use cairn_format::{BlockNumber, Generation, Key, Node, TreeId};
use std::sync::{Arc, OnceLock, Weak};

/// A node in memory: what its handles share.
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
    /// The node itself, behind its lock.
    pub(crate) lock: NodeLock,
    /// Looked up since the clock's hand passed.
    used: AtomicBool,
}

impl NodeBody {
    /// `node` in memory, with a free lock.
    pub(crate) fn new(node: Node, locks: &NodeLocks) -> NodeBody {
        NodeBody {
            block: node.address(),
            tree: node.tree(),
            generation: node.generation(),
            level: node.level(),
            routes: RoutesPlace::new(node.level()),
            lock: NodeLock::new(node, locks),
            used: AtomicBool::new(true),
        }
    }

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

enum Children {
    Inner(Box<[OnceLock<Arc<NodeBody>>]>),
    Leaves(Box<[RwLock<Weak<NodeBody>>]>),
}

/// The keys and children of an inner node.
pub(crate) struct Routes {
    keys: Box<[Key]>,
    children: Children,
}

impl Routes {
    /// Routes to unknown children.
    fn unknown(keys: Box<[Key]>, to_leaves: bool) -> Routes {
        let children = if to_leaves {
            Children::Leaves(keys.iter().map(|_| RwLock::new(Rank::LEAF, Weak::new())).collect())
        } else {
            Children::Inner(keys.iter().map(|_| OnceLock::new()).collect())
        };
        Routes { keys, children }
    }

    /// The routes of `node`, with the children that `older` knows.
    fn new(node: &Node, older: Option<&Routes>) -> Routes {
        let routes = Routes::unknown(
            (0..node.count()).map(|index| node.key(index)).collect(),
            node.level() == 1,
        );
        for (index, key) in routes.keys.iter().enumerate() {
            let Some(known) =
                older.and_then(|older| older.child(older.keys.binary_search(key).ok()?))
            else {
                continue;
            };
            let pointer = node.child(index);
            if (known.block, known.generation) == (pointer.block, pointer.generation) {
                routes.learn(index, &known);
            }
        }
        routes
    }

    /// The same routes, but for inner child `changed`.
    fn with_inner_child(&self, changed: usize, child: &Arc<NodeBody>) -> Routes {
        let routes = Routes::unknown(self.keys.clone(), false);
        for index in 0..routes.keys.len() {
            if let Some(known) =
                if index == changed { Some(child) } else { self.inner_child(index) }
            {
                routes.learn(index, known);
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

    /// Whether the children are leaves.
    pub(crate) fn lead_to_leaves(&self) -> bool {
        matches!(self.children, Children::Leaves(_))
    }

    /// Child `index`, if it is known and in memory.
    pub(crate) fn child(&self, index: usize) -> Option<Arc<NodeBody>> {
        match &self.children {
            Children::Inner(children) => children[index].get().cloned(),
            Children::Leaves(children) => children[index].read().upgrade(),
        }
    }

    /// Child `index`, if it is a known inner node. Its references aren't counted: the routes keep
    /// it.
    pub(crate) fn inner_child(&self, index: usize) -> Option<&Arc<NodeBody>> {
        match &self.children {
            Children::Inner(children) => children[index].get(),
            Children::Leaves(_) => None,
        }
    }

    /// Whether child `index` is `child`.
    pub(crate) fn has_child(&self, index: usize, child: &Arc<NodeBody>) -> bool {
        match &self.children {
            Children::Inner(children) => {
                children[index].get().is_some_and(|known| Arc::ptr_eq(known, child))
            }
            Children::Leaves(children) => {
                std::ptr::eq(children[index].read().as_ptr(), Arc::as_ptr(child))
            }
        }
    }

    /// Child `index` is `child`. An inner child that is known already stays: it is the same.
    fn learn(&self, index: usize, child: &Arc<NodeBody>) {
        match &self.children {
            Children::Inner(children) => drop(children[index].set(Arc::clone(child))),
            Children::Leaves(children) => *children[index].write() = Arc::downgrade(child),
        }
    }
}

/// Where a node's routes are published; a leaf has none.
pub(crate) struct RoutesPlace(Option<Place>);

struct Place {
    current: Published<Routes>,
    /// Withdrawn routes, whose children the next ones take over.
    older: Mutex<Option<Arc<Routes>>>,
}

impl Place {
    /// The routes, made of `node` if there are none. The node's lock is held.
    fn get(&self, node: &Node) -> Arc<Routes> {
        if let Some(routes) = &*self.current.load() {
            return Arc::clone(routes);
        }
        let older = self.older.lock().take();
        let routes = Arc::new(Routes::new(node, older.as_deref()));
        self.current.store(Some(Arc::clone(&routes)));
        routes
    }
}

impl RoutesPlace {
    /// The place of a node at `level`, without routes.
    pub(crate) fn new(level: u8) -> RoutesPlace {
        RoutesPlace(
            (level > 0).then(|| Place {
                current: Published::empty(),
                older: Mutex::new(Rank::LEAF, None),
            }),
        )
    }

    /// The published routes.
    pub(crate) fn published(&self) -> Option<Seen<Routes>> {
        self.0.as_ref().map(|place| place.current.load())
    }

    /// Whether `routes` are still published.
    pub(crate) fn are(&self, routes: &Arc<Routes>) -> bool {
        self.0.as_ref().is_some_and(|place| place.current.holds(routes))
    }

    /// Child `index` of `node`, if it is known. The node's lock is held.
    pub(crate) fn child(&self, node: &Node, index: usize) -> Option<Arc<NodeBody>> {
        self.0.as_ref()?.get(node).child(index)
    }

    /// Child `index` of `node` is `child`, which was checked. The node's lock is held.
    pub(crate) fn learn(&self, node: &Node, index: usize, child: &Arc<NodeBody>) {
        let Some(place) = &self.0 else { return };
        let routes = place.get(node);
        if !routes.has_child(index, child) {
            routes.learn(index, child);
        }
    }

    /// The child `index` was replaced by `child`. The node's exclusive lock is held, and so is the
    /// old child's.
    pub(crate) fn exchange(&self, index: usize, child: &Arc<NodeBody>) {
        let Some(place) = &self.0 else { return };
        let Some(routes) = &*place.current.load() else { return };
        if routes.lead_to_leaves() {
            routes.learn(index, child);
        } else {
            place.current.store(Some(Arc::new(routes.with_inner_child(index, child))));
        }
    }

    /// The node is about to change. Its exclusive lock is held.
    pub(crate) fn withdraw(&self) {
        if let Some(place) = &self.0
            && place.current.load().is_some()
        {
            *place.older.lock() = place.current.swap(None);
        }
    }

    /// The node leaves the tree, or memory is short.
    pub(crate) fn forget(&self) {
        if let Some(place) = &self.0 {
            let older = place.older.lock().take();
            drop((older, place.current.swap(None)));
        }
    }

    /// The routes go over from `old`, whose node was copied and leaves the tree. Both exclusive
    /// locks are held.
    pub(crate) fn take_over(&self, old: &RoutesPlace) {
        if let (Some(place), Some(old)) = (&self.0, &old.0) {
            let older = old.older.lock().take();
            *place.older.lock() = older;
            place.current.store(old.current.swap(None));
        }
    }
}
