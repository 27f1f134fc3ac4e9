//! The end of a tree that shares nodes: those that only it has are given back, some at a time.
//!
//! What its snapshots or its origin have, too, stays, unread: that was born up to its boundary. So
//! the end costs what was changed since then, however large the tree is. The tree itself isn't
//! changed meanwhile: a *cursor* says how far the work is, and nodes wholly below it are never read
//! again.
//!
//! Invariant: an inner node is given back together with the last leaf below it, so the way to what
//! is above the cursor can be read.
//!
//! Nobody else uses the tree, so its nodes are locked one at a time.
use crate::copy_on_write::Change;
use crate::error::TreeError;
use crate::expected::Expected;
use crate::handle::NodeHandle;
use crate::node_lock::Class;
use crate::tree::Tree;
use cairn_format::Key;

/// Items from which on a part is large enough.
const ITEMS_ENOUGH: usize = 128;

/// Some nodes that only one tree has, and the items of the leaves among them.
#[derive(Default)]
pub struct OwnNodes {
    nodes: Vec<NodeHandle>,
    /// The items, by ascending key.
    pub items: Vec<(Key, Vec<u8>)>,
    /// The cursor behind these nodes; nothing if none are left.
    pub next: Option<Key>,
    has_all: bool,
}

impl Tree {
    /// The nodes that only this tree has, from the cursor `from` on: at least those of one leaf.
    ///
    /// # Errors
    /// When a node can't be read.
    pub fn own_nodes(&self, from: Key) -> Result<OwnNodes, TreeError> {
        let mut own = OwnNodes { has_all: true, ..OwnNodes::default() };
        self.gather_own(&self.expected_root(self.root()), from, &mut own)?;
        if own.has_all {
            own.next = None;
        }
        Ok(own)
    }

    /// Gives back `own`, for the last time that its nodes are used.
    ///
    /// # Errors
    /// The allocator says that one is not in use.
    pub fn release_own(&self, change: &Change<'_>, own: OwnNodes) -> Result<(), TreeError> {
        own.nodes
            .into_iter()
            .try_for_each(|node| self.release(change, node.write(Class::First, &self.cache.waits)))
    }

    /// Adds the node and what is below it, until there is enough.
    fn gather_own(
        &self,
        expected: &Expected,
        from: Key,
        own: &mut OwnNodes,
    ) -> Result<(), TreeError> {
        let is_done = expected.bounds.upper.is_some_and(|upper| upper <= from);
        if is_done || expected.generation <= self.boundary.shared_until() {
            return Ok(());
        }
        if expected.level == 0 && own.items.len() >= ITEMS_ENOUGH {
            own.has_all = false;
        }
        if !own.has_all {
            return Ok(());
        }
        let handle = self.cache.fetch(expected)?;
        let children: Vec<Expected> = {
            let node = handle.clone().read(&self.cache.waits);
            expected.check_keys(&node)?;
            if node.level() == 0 {
                let items = (0..node.count()).map(|at| (node.key(at), node.value(at).to_vec()));
                own.items.extend(items);
            }
            let children = if node.level() == 0 { 0 } else { node.count() };
            let child = |at| Expected::child(self.owner(), &node, expected.bounds, at);
            (0..children).map(child).collect()
        };
        children.iter().try_for_each(|child| self.gather_own(child, from, own))?;
        if own.has_all {
            own.nodes.push(handle);
            own.next = expected.bounds.upper;
        }
        Ok(())
    }
}
