//! Ways to a leaf that lock nothing but the leaf.
//!
//! 1. Follow the published routes from the root to the parent of the leaf.
//! 2. Lock the leaf.
//! 3. Look again: the parent's routes are still published, and still lead to this leaf. If not, try
//!    again.
//!
//! Why the leaf is then the right one: a thread that moves keys out of a leaf, or replaces it,
//! withdraws its parent's routes or exchanges the handle before it releases the leaf's lock
//! (`routes.rs`). So if nothing has changed when the lock is held, nothing has until then, and
//! nothing will while it is held. A parent that left the tree has no published routes. Changes
//! further up can't have changed which leaf holds the key.
//!
//! What isn't in memory, or isn't known yet, is left to the walk that locks its way down
//! (`walk.rs`); that one also makes routes known, and it runs after a few attempts in vain, so that
//! no thread starves.
//!
//! Lock discipline: one node's lock, and no other.
use crate::expected::Bounds;
use crate::handle::{NodeHandle, ReadNode, WriteNode};
use crate::node_lock::Class;
use crate::routes::{NodeBody, Routes};
use crate::tree::Tree;
use cairn_environment::published::Seen;
use cairn_format::{Generation, Key};
use std::sync::Arc;

/// Attempts before the way down is locked.
const ATTEMPTS: usize = 3;

/// Where a change arrived: the leaf for its key.
pub(crate) enum Arrival {
    /// A leaf of the running transaction, which may be changed in place.
    Own {
        /// The leaf.
        leaf: WriteNode,
        /// Whether the leaf is the root.
        is_root: bool,
    },
    /// A leaf that must be copied first.
    Frozen(ReadNode),
}

/// A node on the way, and what keeps it in memory.
enum Waypoint {
    Root(Seen<NodeBody>),
    Child(Seen<Routes>, usize),
}

impl Waypoint {
    fn node(&self) -> Option<&Arc<NodeBody>> {
        match self {
            Waypoint::Root(root) => root.as_ref(),
            Waypoint::Child(routes, index) => routes.as_ref()?.inner_child(*index),
        }
    }
}

/// What led to a leaf.
enum Origin {
    /// It is the root.
    Root,
    /// The parent, its routes, and the leaf's index in them.
    Parent(Waypoint, Seen<Routes>, usize),
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
        if self.cache.locks.walks_are_locked() {
            return None;
        }
        let (mut waypoint, mut bounds) = (Waypoint::Root(self.root_node.load()), Bounds::ALL);
        loop {
            let node = waypoint.node()?;
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
                let origin = Origin::Parent(waypoint, routes, index);
                return Some(Candidate { leaf, bounds, origin });
            }
            waypoint = Waypoint::Child(routes, index);
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

    /// All steps: locks the leaf for `key` by `lock`, and returns what `arrive` makes of it.
    #[inline]
    fn quickly<L, A>(
        &self,
        key: &Key,
        lock: impl Fn(NodeHandle) -> L,
        arrive: impl Fn(L, &Candidate) -> A,
    ) -> Option<A> {
        for _ in 0..ATTEMPTS {
            let candidate = self.candidate(key)?;
            let leaf = lock(candidate.leaf.clone());
            if self.stands(&candidate) {
                return Some(arrive(leaf, &candidate));
            }
        }
        None
    }

    /// The leaf that holds `key` if the tree does, under its shared lock, and its bounds.
    pub(crate) fn quick_leaf(&self, key: &Key) -> Option<(ReadNode, Bounds)> {
        let waits = &self.cache.waits;
        self.quickly(
            key,
            |leaf| leaf.read(waits),
            |leaf, candidate| {
                waits.count_quick(leaf.handle.block);
                (leaf, candidate.bounds)
            },
        )
    }

    /// The leaf for `key`: under its exclusive lock if the transaction `running` made it, otherwise
    /// under its shared lock.
    pub(crate) fn quick_arrival(&self, key: &Key, running: Generation) -> Option<Arrival> {
        let waits = &self.cache.waits;
        self.quickly(
            key,
            |leaf| {
                if leaf.generation == running {
                    Ok(leaf.write(Class::First, waits))
                } else {
                    Err(leaf.read(waits))
                }
            },
            |leaf, candidate| match leaf {
                Ok(leaf) => {
                    waits.count_quick(leaf.handle.block);
                    Arrival::Own { leaf, is_root: matches!(candidate.origin, Origin::Root) }
                }
                Err(leaf) => Arrival::Frozen(leaf),
            },
        )
    }
}
