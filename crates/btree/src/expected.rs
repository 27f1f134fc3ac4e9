//! What a parent says about its child, and the checks that hold the child to it.
//!
//! Invariants: a node's keys lie within its [`Bounds`]; its level is one below its parent's, so a
//! descent ends even in a damaged tree, and never meets a node whose lock it holds.
//!
//! Lock discipline: takes no lock; a node that is checked is locked by the caller.
use crate::error::TreeError;
use cairn_format::{
    BlockNumber, ChildPointer, FormatError, Generation, Key, Node, NodePointer, Structure, TreeId,
};

/// The keys that a node may hold: from `lower` on, below `upper`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bounds {
    /// The smallest key.
    pub(crate) lower: Key,
    /// One past the largest; `None` for the rightmost nodes.
    pub(crate) upper: Option<Key>,
}

impl Bounds {
    /// What the root may hold.
    pub(crate) const ALL: Bounds = Bounds { lower: Key::MIN, upper: None };

    fn contains(&self, key: Key) -> bool {
        key >= self.lower && self.upper.is_none_or(|upper| key < upper)
    }

    /// What child `index` of `parent`, which has these bounds, may hold.
    fn of_child(self, parent: &Node, index: usize) -> Bounds {
        let lower = if index == 0 { self.lower } else { parent.key(index) };
        let upper =
            if index + 1 < parent.count() { Some(parent.key(index + 1)) } else { self.upper };
        Bounds { lower, upper }
    }
}

/// The tree that a node is part of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    /// The tree.
    pub(crate) tree: TreeId,
    /// The last transaction whose nodes may be inherited. A tree that made one was there before
    /// this one, so it has a lower id.
    pub(crate) inherited: Generation,
}

impl Owner {
    /// Whether a node of this tree may say that it was made for `maker`.
    fn may_have(&self, maker: TreeId, generation: Generation) -> bool {
        maker == self.tree
            || generation <= self.inherited && maker < self.tree && maker.holds_files()
    }
}

/// Everything that is known about a node before it is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    /// Tree that the node belongs to.
    pub(crate) owner: Owner,
    /// Where it stands.
    pub(crate) block: BlockNumber,
    /// Transaction that made it.
    pub(crate) generation: Generation,
    /// Height above the leaves.
    pub(crate) level: u8,
    /// The keys that it may hold.
    pub(crate) bounds: Bounds,
}

impl Expected {
    /// The root of a tree.
    pub(crate) fn root(owner: Owner, pointer: NodePointer) -> Expected {
        Expected {
            owner,
            block: pointer.block,
            generation: pointer.generation,
            level: pointer.level,
            bounds: Bounds::ALL,
        }
    }

    /// Child `index` of `parent`, which is an inner node with the bounds `bounds`.
    pub(crate) fn child(owner: Owner, parent: &Node, bounds: Bounds, index: usize) -> Expected {
        let ChildPointer { block, generation } = parent.child(index);
        Expected {
            owner,
            block,
            generation,
            level: parent.level() - 1,
            bounds: bounds.of_child(parent, index),
        }
    }

    /// Whether both are the same node, whichever tree points to it: what is at a block was written
    /// once in a generation.
    pub(crate) fn is_same_node(&self, other: &Expected) -> bool {
        (self.block, self.generation) == (other.block, other.generation)
    }

    /// Checks tree, level and generation, which never change while a node stands at its block.
    ///
    /// # Errors
    /// The first that differs.
    pub(crate) fn check_identity(
        &self,
        tree: TreeId,
        level: u8,
        generation: Generation,
    ) -> Result<(), TreeError> {
        if !self.owner.may_have(tree, generation) {
            return Err(self.damaged(format!("belongs to tree {tree}")));
        }
        if level != self.level {
            return Err(
                self.damaged(format!("has level {level} where its parent expects {}", self.level))
            );
        }
        if generation != self.generation {
            return Err(self.damaged(format!(
                "was made in generation {generation}, its parent says {}",
                self.generation
            )));
        }
        Ok(())
    }

    /// Checks that the node's keys lie within the bounds. They ascend, so the first and the last
    /// decide. The first of an inner node says nothing: that child takes all below the second.
    ///
    /// # Errors
    /// When one doesn't.
    pub(crate) fn check_keys(&self, node: &Node) -> Result<(), TreeError> {
        let first = usize::from(node.level() > 0);
        let Some(last) = node.count().checked_sub(1).filter(|last| *last >= first) else {
            return Ok(());
        };
        for key in [node.key(first), node.key(last)] {
            if !self.bounds.contains(key) {
                return Err(self.damaged(format!(
                    "key {key:?} lies outside {:?}..{:?}",
                    self.bounds.lower, self.bounds.upper
                )));
            }
        }
        Ok(())
    }

    /// The error that says `problem` about this node.
    pub(crate) fn damaged(&self, problem: String) -> TreeError {
        TreeError::Damaged {
            tree: self.owner.tree,
            source: FormatError::new(Structure::Node, self.block, problem),
        }
    }
}
