//! Copy-on-write: the nodes that a transaction makes, copies and gives back.
//!
//! Invariants: a node of an older transaction is never changed: it is copied to a new place, and
//! its blocks are given back once the running transaction is durable, or kept as a dead run if a
//! snapshot has them; what a fork has inherited stays its origin's. A node that is given back, and
//! that no other tree has, leaves the cache before its blocks may be used again.
//!
//! Lock discipline: a new node is locked exclusively when it is made, which needs no waiting. The
//! allocator's locks are taken under node locks.
use crate::cache::NodeCache;
use crate::error::TreeError;
use crate::handle::WriteNode;
use crate::tree::Tree;
use cairn_format::{BlockNumber, FormatError, Generation, Node, NodePointer, Structure, TreeId};
use cairn_space::{Reservation, Space, SpaceError};
use std::sync::Arc;

/// The transaction that a change belongs to, and what it may allocate.
///
/// The holder of one has joined the transaction: the cut waits for it.
#[derive(Clone, Copy)]
pub struct Change<'a> {
    /// The running transaction.
    pub generation: Generation,
    /// Nodes that the change may allocate; [`Tree::worst_case`] says how many suffice.
    pub reservation: &'a Reservation,
}

impl Tree {
    /// A new tree without items: one leaf, made by the running transaction; takes one node of the
    /// reservation.
    ///
    /// # Errors
    /// [`TreeError::Space`] when the reservation holds no node.
    pub fn create(
        cache: Arc<NodeCache>,
        space: Arc<Space>,
        id: TreeId,
        change: &Change<'_>,
    ) -> Result<Tree, TreeError> {
        let tree = Tree::open(cache, space, id, NodePointer::default());
        let pointer = tree.new_node(change, 0)?.handle.root_pointer();
        tree.write_root().set(pointer);
        Ok(tree)
    }

    /// An empty node of the running transaction for the place `block`.
    pub(crate) fn empty_node(&self, change: &Change<'_>, level: u8, block: BlockNumber) -> Node {
        Node::new(self.cache.volume(), self.id(), level, block, change.generation)
    }

    /// A new empty node of the running transaction.
    pub(crate) fn new_node(&self, change: &Change<'_>, level: u8) -> Result<WriteNode, TreeError> {
        let block = self.allocate(change)?;
        Ok(self.cache.insert_new(self.empty_node(change, level, block)))
    }

    /// A copy of `node` at a new place, which belongs to the running transaction.
    pub(crate) fn copy(
        &self,
        change: &Change<'_>,
        node: &WriteNode,
    ) -> Result<WriteNode, TreeError> {
        if node.generation() > change.generation {
            let problem = format!(
                "made in generation {}, but {} is running",
                node.generation(),
                change.generation
            );
            return Err(TreeError::Damaged {
                tree: self.id(),
                source: FormatError::new(Structure::Node, node.handle.block, problem),
            });
        }
        let block = self.allocate(change)?;
        let mut copy = Node::clone(node);
        copy.relocate(block, change.generation);
        copy.set_tree(self.id());
        let copy = self.cache.insert_new(copy);
        // Until the copy has the old node's place, a walk that passes here waits for the lock of
        // the one above.
        copy.handle.routes.take_over(&node.handle.routes);
        Ok(copy)
    }

    /// Gives a node back that nothing in this tree refers to any more: first the cache forgets it,
    /// then its blocks may be used again. One that another tree may have, whose routes may lead to
    /// it, stays in the cache like any other: such a node is found there as long as it is in use.
    pub(crate) fn release(&self, change: &Change<'_>, node: WriteNode) -> Result<(), TreeError> {
        node.handle.routes.forget();
        if node.handle.generation > self.boundary.shared_until() {
            self.cache.remove(&node.handle, change.generation);
        }
        let (block, made_in) = (node.handle.block, node.handle.generation);
        let freed = self.space.free_node(block, made_in, &self.boundary, change.generation);
        freed.map_err(|source| self.space_error(source))
    }

    /// A block of the reservation.
    fn allocate(&self, change: &Change<'_>) -> Result<BlockNumber, TreeError> {
        self.cache.locks.before_sleep();
        self.space.allocate_node(change.reservation).map_err(|source| self.space_error(source))
    }

    fn space_error(&self, source: SpaceError) -> TreeError {
        TreeError::Space { tree: self.id(), source }
    }
}
