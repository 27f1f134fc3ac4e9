//! Descents that lock nothing but the leaf.
//!
//! 1. Follow the published routes from the root to the parent of the leaf.
//! 2. Lock the leaf.
//! 3. Look again: the parent's routes are still published, and still lead to this leaf. If not, try again.
//!
//! Why the leaf is then the right one: whoever moves keys out of a leaf, or replaces it, withdraws its parent's routes or
//! exchanges the handle before it releases the leaf's lock (`routes.rs`). So if nothing has changed when the lock is
//! held, nothing has until then, and nothing will while it is held. A parent that left the tree has no published
//! routes. Whatever happened further up can't have changed which leaf holds the key.
//!
//! What isn't in memory, or isn't known yet, is left to the descent that locks its way down; that one also makes routes
//! known, and it runs after a few attempts in vain, so that nobody starves.
//!
//! Lock discipline: one node's lock, and no other.
use crate::expected::Bounds;
use crate::handle::{NodeHandle, ReadNode, WriteNode};
use crate::routes::Routes;
use crate::tree::{Arrival, Leaf, Tree};
use cairn_environment::published::{Published, Seen};
use cairn_format::{Generation, Key};
use std::sync::Arc;

/// Attempts before the way down is locked.
const ATTEMPTS: usize = 3;

/// How a descent found its leaf.
enum Origin<'a> {
    /// The leaf is the root.
    Root(&'a Published<crate::handle::NodeBody>),
    /// The parent, its routes and the leaf's index in them.
    Parent { parent: Seen<crate::handle::NodeBody>, routes: Seen<Routes>, index: usize },
}

/// A leaf that isn't locked yet.
struct Candidate<'a> {
    leaf: NodeHandle,
    bounds: Bounds,
    origin: Origin<'a>,
}

impl Candidate<'_> {
    /// Whether the routes still lead here. The leaf's lock is held.
    fn stands(&self) -> bool {
        match &self.origin {
            Origin::Root(place) => place.holds(self.leaf.body()),
            Origin::Parent { parent, routes, index } => match (&**parent, &**routes) {
                (Some(parent), Some(routes)) => routes.has_child(*index, self.leaf.body()) && parent.routes.published().holds(routes),
                _ => false,
            },
        }
    }
}

impl Tree {
    /// Steps 1: the leaf for `key`, if everything on the way is known.
    fn candidate(&self, key: &Key) -> Option<Candidate<'_>> {
        #[cfg(feature = "baselines")]
        if self.cache.has_locked_descents() {
            return None;
        }
        let mut node = self.root_node.load();
        let mut bounds = Bounds::ALL;
        loop {
            let body = node.as_ref()?;
            if body.level == 0 {
                let leaf = NodeHandle::from_body(Arc::clone(body));
                return Some(Candidate { leaf, bounds, origin: Origin::Root(&self.root_node) });
            }
            body.note_use();
            let routes = body.routes.published().load();
            let table = routes.as_ref()?;
            let index = table.index(key);
            bounds = table.bounds(bounds, index);
            let Some(place) = table.inner_child(index) else {
                let leaf = NodeHandle::from_body(table.child(index)?);
                leaf.note_use();
                return Some(Candidate { leaf, bounds, origin: Origin::Parent { parent: node, routes, index } });
            };
            node = place.load();
        }
    }

    /// The leaf that holds `key` if anybody does, under its shared lock.
    pub(crate) fn quick_leaf(&self, key: &Key) -> Option<Leaf> {
        for _ in 0..ATTEMPTS {
            let candidate = self.candidate(key)?;
            let node = candidate.leaf.clone().read(&self.cache.waits);
            if candidate.stands() {
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
            let is_root = matches!(candidate.origin, Origin::Root(_));
            let leaf = candidate.leaf.clone();
            if leaf.generation == running {
                let leaf: WriteNode = leaf.write(&self.cache.waits);
                if candidate.stands() {
                    self.cache.waits.count_quick(leaf.handle.block);
                    return Some(Arrival::Own { leaf, is_root });
                }
            } else {
                let leaf: ReadNode = leaf.read(&self.cache.waits);
                if candidate.stands() {
                    return Some(Arrival::Frozen(leaf));
                }
            }
        }
        None
    }
}
