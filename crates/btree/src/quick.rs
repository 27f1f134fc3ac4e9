//! Descents that lock nothing but the leaf.
//!
//! 1. Follow the published routes from the root to the parent of the leaf.
//! 2. Lock the leaf.
//! 3. Look again: the parent's routes are still published, and still lead to this leaf. If not, try
//!    again.
//!
//! Why the leaf is then the right one: whoever moves keys out of a leaf, or replaces it, withdraws
//! its parent's routes or exchanges the handle before it releases the leaf's lock (`routes.rs`). So
//! if nothing has changed when the lock is held, nothing has until then, and nothing will while it
//! is held. A parent that left the tree has no published routes. Whatever happened further up can't
//! have changed which leaf holds the key.
//!
//! What isn't in memory, or isn't known yet, is left to the descent that locks its way down; that
//! one also makes routes known, and it runs after a few attempts in vain, so that nobody starves.
//!
//! Lock discipline: one node's lock, and no other.
use crate::expected::Bounds;
use crate::handle::{Class, NodeBody, NodeHandle};
use crate::routes::Routes;
use crate::tree::{Arrival, Leaf, Tree};
use cairn_environment::published::Seen;
use cairn_format::{Generation, Key};
use std::sync::Arc;

/// Attempts before the way down is locked.
const ATTEMPTS: usize = 3;

/// A node on the way, and what keeps it in memory.
enum Stop {
    Root(Seen<NodeBody>),
    Child(Seen<Routes>, usize),
}

impl Stop {
    fn node(&self) -> Option<&Arc<NodeBody>> {
        match self {
            Stop::Root(root) => root.as_ref(),
            Stop::Child(routes, index) => routes.as_ref()?.inner_child(*index),
        }
    }
}

/// What led to a leaf.
enum Origin {
    /// It is the root.
    Root,
    /// The parent, its routes, and the leaf's index in them.
    Parent(Stop, Seen<Routes>, usize),
}

/// A leaf that isn't locked yet.
struct Candidate {
    leaf: NodeHandle,
    bounds: Bounds,
    origin: Origin,
}

impl Tree {
    /// Step 1: the leaf for `key`, if everything on the way is known.
    fn candidate(&self, key: &Key) -> Option<Candidate> {
        #[cfg(feature = "baselines")]
        if self.cache.has_locked_descents() {
            return None;
        }
        let (mut stop, mut bounds) = (Stop::Root(self.root_node.load()), Bounds::ALL);
        loop {
            let node = stop.node()?;
            node.note_use();
            let Some(routes) = node.routes.published() else {
                let leaf = NodeHandle::from_body(Arc::clone(node));
                return Some(Candidate { leaf, bounds, origin: Origin::Root });
            };
            let table = routes.as_ref()?;
            let index = table.index(key);
            bounds = table.bounds(bounds, index);
            if table.lead_to_leaves() {
                let leaf = NodeHandle::from_body(table.child(index)?);
                leaf.note_use();
                return Some(Candidate {
                    leaf,
                    bounds,
                    origin: Origin::Parent(stop, routes, index),
                });
            }
            stop = Stop::Child(routes, index);
        }
    }

    /// Step 3: whether the routes still lead to the candidate, whose lock is held.
    fn stands(&self, candidate: &Candidate) -> bool {
        let leaf = candidate.leaf.body();
        match &candidate.origin {
            Origin::Root => self.root_node.holds(leaf),
            Origin::Parent(parent, routes, index) => match (parent.node(), &**routes) {
                (Some(parent), Some(routes)) => {
                    routes.has_child(*index, leaf) && parent.routes.are(routes)
                }
                _ => false,
            },
        }
    }

    /// The leaf that holds `key` if anybody does, under its shared lock.
    pub(crate) fn quick_leaf(&self, key: &Key) -> Option<Leaf> {
        for _ in 0..ATTEMPTS {
            let candidate = self.candidate(key)?;
            let node = candidate.leaf.clone().read(&self.cache.waits);
            if self.stands(&candidate) {
                self.cache.waits.count_quick(node.handle.block);
                return Some(Leaf { node, bounds: candidate.bounds });
            }
        }
        None
    }

    /// As [`Tree::arrive`].
    pub(crate) fn quick_arrive(&self, key: &Key, running: Generation) -> Option<Arrival> {
        for _ in 0..ATTEMPTS {
            let candidate = self.candidate(key)?;
            let is_root = matches!(candidate.origin, Origin::Root);
            let leaf = candidate.leaf.clone();
            if leaf.generation == running {
                let leaf = leaf.write(Class::First, &self.cache.waits);
                if self.stands(&candidate) {
                    self.cache.waits.count_quick(leaf.handle.block);
                    return Some(Arrival::Own { leaf, is_root });
                }
            } else {
                let leaf = leaf.read(&self.cache.waits);
                if self.stands(&candidate) {
                    return Some(Arrival::Frozen(leaf));
                }
            }
        }
        None
    }
}
