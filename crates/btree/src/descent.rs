//! The descent of a change with exclusive locks: copies, splits, merges, balances, grows and
//! collapses on the way down.
//!
//! Each step leaves a valid tree: a full child is split and an underfull one is merged before the
//! descent enters it, so nothing has to go back up. The parent has room for the split's pointer
//! because it was treated the same way before.
//!
//! Invariants: a node of an older transaction is never changed: it is copied to a new place, its
//! parent's pointer follows, and its blocks are given back once the running transaction is durable.
//! The first key of an inner node is its lower bound. A leaf other than the root isn't left empty.
//!
//! Lock discipline: exclusive locks, hand over hand: at most the parent, the child and one sibling,
//! siblings from left to right; the root pointer's lock until the root needs no further change. All
//! nodes come from memory. A descent that meets a lock that is taken doesn't wait for it below
//! others, unless it has begun again several times ([`Patience`]).
use crate::TreeError;
use crate::change::Change;
use crate::expected::{Bounds, Expected};
use crate::handle::{Class, NodeHandle, WriteNode};
use crate::page::{
    Neighbours, Remedy, balance, has_room, merge, put, remedy, split_index, take, underfull,
};
use crate::tree::{RootGuard, Tree};
use cairn_format::{BlockNumber, FormatError, Key, Node, NodePointer, Structure};
use cairn_space::SpaceError;

/// Why a descent ended early.
pub(crate) enum Stop {
    /// A node isn't in memory.
    Missing,
    /// Somebody else holds a node's lock; whether this descent wanted it exclusively.
    Busy(NodeHandle, bool),
    /// It can't be done.
    Failed(TreeError),
}

impl From<TreeError> for Stop {
    fn from(error: TreeError) -> Stop {
        Stop::Failed(error)
    }
}

/// What a descent does when it meets a lock that is taken, while it holds the one above.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// It lets go of everything and waits for that lock alone, then begins again. Otherwise a node
    /// in which somebody lost the CPU would stop everybody who passes the nodes above it.
    BeginAgain,
    /// It waits, for it has begun again often enough.
    Wait,
}

/// A descent that has arrived at `node`, which the running transaction made.
pub(crate) struct Descent<'a> {
    tree: &'a Tree,
    change: &'a Change<'a>,
    patience: Patience,
    /// Present while `node` is the root and may be replaced.
    root: Option<RootGuard<'a>>,
    node: WriteNode,
    bounds: Bounds,
}

/// A child under its exclusive lock, not copied yet.
struct Child {
    node: WriteNode,
    index: usize,
    bounds: Bounds,
}

impl<'a> Descent<'a> {
    /// Begins at `anchor`, a node that this change won't replace, or else at the root.
    pub(crate) fn begin(
        tree: &'a Tree,
        change: &'a Change<'a>,
        anchor: Option<(WriteNode, Bounds)>,
        patience: Patience,
    ) -> Result<Descent<'a>, Stop> {
        if let Some((node, bounds)) = anchor {
            return Ok(Descent { tree, change, patience, root: None, node, bounds });
        }
        let mut root = tree.write_root();
        let mut node =
            tree.lock_cached(Class::First, &tree.expected_root(root.pointer()), patience)?;
        if node.generation() != change.generation {
            let copy = tree.copy(change, &node)?;
            root.set(copy.handle.root_pointer());
            tree.release(change, node)?;
            node = copy;
        }
        Ok(Descent { tree, change, patience, root: Some(root), node, bounds: Bounds::ALL })
    }

    /// Goes down to the leaf for `key` and puts `value` there. `read` sees the old value.
    pub(crate) fn insert<R>(
        mut self,
        key: Key,
        value: &[u8],
        read: impl Fn(&[u8]) -> R,
    ) -> Result<Option<R>, Stop> {
        if !has_room(&self.node, &key, value.len()) {
            self.grow()?;
        }
        while self.node.level() > 0 {
            let child = self.lock_child(self.node.child_index(&key), Class::First)?;
            let mut child = self.own(child)?;
            if !has_room(&child.node, &key, value.len()) {
                child = self.split(child, &key)?;
            }
            self.enter(child);
        }
        Ok(put(&mut self.node, key, value, read).expect("a split makes room"))
    }

    /// Goes down to the leaf for `key` and takes the item out; `read` sees its value. With
    /// `complete`, the siblings that could be read were read.
    pub(crate) fn remove<R>(
        mut self,
        key: &Key,
        complete: bool,
        read: impl Fn(&[u8]) -> R,
    ) -> Result<Option<R>, Stop> {
        while self.node.level() > 0 {
            let child = self.child_for_removal(key, complete)?;
            if self.root.is_some() && self.node.count() == 1 {
                self.collapse_into(child)?;
                continue;
            }
            if child.node.level() == 0 {
                return Ok(self.take_from(child, key, read)?);
            }
            self.enter(child);
        }
        Ok(take(&mut self.node, key, read))
    }

    /// Makes `child`, which must be the running transaction's, the node at hand; the parent and the
    /// root pointer are released.
    fn enter(&mut self, child: Child) {
        self.root = None;
        self.bounds = child.bounds;
        self.node = child.node;
    }

    fn expected_child(&self, index: usize) -> Expected {
        self.tree.child(&self.node, self.bounds, index)
    }

    fn lock_child(&self, index: usize, class: Class) -> Result<Child, Stop> {
        let expected = self.expected_child(index);
        Ok(Child {
            node: self.tree.lock_cached(class, &expected, self.patience)?,
            index,
            bounds: expected.bounds,
        })
    }

    /// Copies the child, if an older transaction made it.
    fn own(&mut self, child: Child) -> Result<Child, Stop> {
        if child.node.generation() == self.change.generation {
            return Ok(child);
        }
        let copy = self.tree.copy(self.change, &child.node)?;
        self.node.replace_child(child.index, &copy.handle);
        self.tree.release(self.change, child.node)?;
        Ok(Child { node: copy, ..child })
    }

    /// Puts a new root above the root, which is full.
    fn grow(&mut self) -> Result<(), Stop> {
        let Some(root) = &mut self.root else { return Ok(()) };
        let mut above = self.tree.new_node(self.change, self.node.level() + 1)?;
        above
            .insert(0, Key::MIN, &self.node.handle.child_pointer().encode())
            .expect("an empty node has room");
        root.set(above.handle.root_pointer());
        self.node = above;
        Ok(())
    }

    /// Splits a full child, and returns the half that `key` belongs to.
    fn split(&mut self, child: Child, key: &Key) -> Result<Child, Stop> {
        let Child { node: mut left, index, bounds } = child;
        self.tree.cache.before_sleep();
        let mut right = self.tree.new_node(self.change, left.level())?;
        let index_right = split_index(&left, key);
        left.split_off(index_right, &mut right);
        let separator = right.key(0);
        self.node
            .insert(index + 1, separator, &right.handle.child_pointer().encode())
            .expect("a descent enters an inner node only if it has room for a pointer");
        Ok(if *key < separator {
            Child { node: left, index, bounds: Bounds { upper: Some(separator), ..bounds } }
        } else {
            Child { node: right, index: index + 1, bounds: Bounds { lower: separator, ..bounds } }
        })
    }

    /// The child for `key`, copied, and merged or balanced with a sibling if it is underfull.
    fn child_for_removal(&mut self, key: &Key, complete: bool) -> Result<Child, Stop> {
        let index = self.node.child_index(key);
        let mut child = self.lock_child(index, Class::First)?;
        if !underfull(&child.node) || self.node.count() == 1 {
            return self.own(child);
        }
        let pair = Neighbours::of(&self.node, index);
        let expected = self.expected_child(pair.sibling());
        if expected.block == child.node.handle.block {
            return Err(expected.damaged("two pointers lead here".into()).into());
        }
        let Some(sibling) = self.tree.cache.cached(&expected)? else {
            // A node with one child must get more, or its leaf could become empty and stay.
            return if complete && (child.node.level() == 0 || child.node.count() > 1) {
                self.own(child)
            } else {
                Err(Stop::Missing)
            };
        };
        let (left, right) = if pair.child_is_left {
            (
                child,
                Child {
                    node: self.tree.write_below(sibling, Class::Right, &expected, self.patience)?,
                    index: pair.left + 1,
                    bounds: expected.bounds,
                },
            )
        } else {
            // The left one's lock comes first. The parent's lock keeps both nodes where they are
            // meanwhile.
            drop(child);
            let left = Child {
                node: self.tree.write_below(sibling, Class::First, &expected, self.patience)?,
                index: pair.left,
                bounds: expected.bounds,
            };
            child = self.lock_child(index, Class::Right)?;
            (left, child)
        };
        self.tree.cache.before_sleep();
        match remedy(&left.node, &right.node) {
            Remedy::Merge => self.merge(left, right),
            Remedy::Leave => self.own(if pair.child_is_left { left } else { right }),
            remedy => self.balance(left, right, remedy, key),
        }
    }

    /// Moves everything from `right` into `left`, and returns that.
    fn merge(&mut self, left: Child, right: Child) -> Result<Child, Stop> {
        let mut left = self.own(left)?;
        merge(&mut left.node, &right.node, self.node.key(right.index));
        self.node.remove(right.index);
        self.tree.release(self.change, right.node)?;
        left.bounds.upper = right.bounds.upper;
        Ok(left)
    }

    /// Moves items between neighbours, and returns the one that `key` belongs to.
    fn balance(
        &mut self,
        left: Child,
        right: Child,
        remedy: Remedy,
        key: &Key,
    ) -> Result<Child, Stop> {
        let (mut left, mut right) = (self.own(left)?, self.own(right)?);
        let empty = self.tree.empty_node(right.node.level(), right.node.handle.block, self.change);
        let separator =
            balance(&mut left.node, &mut right.node, empty, self.node.key(right.index), remedy);
        self.node.set_key(right.index, separator);
        left.bounds.upper = Some(separator);
        right.bounds.lower = separator;
        Ok(if *key < separator { left } else { right })
    }

    /// Replaces the root, which has one child, by that child.
    fn collapse_into(&mut self, child: Child) -> Result<(), TreeError> {
        if let Some(root) = &mut self.root {
            root.set(child.node.handle.root_pointer());
        }
        let old = std::mem::replace(&mut self.node, child.node);
        self.bounds = Bounds::ALL;
        self.tree.release(self.change, old)
    }

    /// Takes the item out of the leaf below the node at hand; an empty leaf goes, and the root with
    /// it if only one child is left.
    fn take_from<R>(
        mut self,
        mut leaf: Child,
        key: &Key,
        read: impl Fn(&[u8]) -> R,
    ) -> Result<Option<R>, TreeError> {
        let value = take(&mut leaf.node, key, read);
        if leaf.node.count() > 0 || self.node.count() == 1 {
            return Ok(value);
        }
        let lower = self.node.key(0);
        self.node.remove(leaf.index);
        // The next child takes over the keys of a first one.
        self.node.set_key(0, lower);
        self.tree.release(self.change, leaf.node)?;
        if let Some(root) = &mut self.root
            && self.node.count() == 1
        {
            let pointer = self.node.child(0);
            root.set(NodePointer {
                block: pointer.block,
                generation: pointer.generation,
                level: self.node.level() - 1,
            });
            self.tree.release(self.change, self.node)?;
        }
        Ok(value)
    }
}

impl Tree {
    /// Locks a node exclusively, if it is in memory.
    fn lock_cached(
        &self,
        class: Class,
        expected: &Expected,
        patience: Patience,
    ) -> Result<WriteNode, Stop> {
        let node = self.cache.cached(expected)?.ok_or(Stop::Missing)?;
        self.write_below(node, class, expected, patience)
    }

    fn empty_node(&self, level: u8, block: BlockNumber, change: &Change<'_>) -> Node {
        Node::new(self.cache.volume(), self.id(), level, block, change.generation)
    }

    fn space_error(&self, source: SpaceError) -> TreeError {
        TreeError::Space { tree: self.id(), source }
    }

    fn allocate(&self, change: &Change<'_>) -> Result<BlockNumber, TreeError> {
        self.space.allocate_node(change.reservation).map_err(|source| self.space_error(source))
    }

    /// A new empty node of the running transaction.
    pub(crate) fn new_node(&self, change: &Change<'_>, level: u8) -> Result<WriteNode, TreeError> {
        let block = self.allocate(change)?;
        Ok(self.cache.insert_new(self.empty_node(level, block, change)))
    }

    /// A copy of `node` at a new place, which belongs to the running transaction.
    fn copy(&self, change: &Change<'_>, node: &WriteNode) -> Result<WriteNode, TreeError> {
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
        self.cache.before_sleep();
        let mut copy = Node::clone(node);
        copy.relocate(self.allocate(change)?, change.generation);
        let copy = self.cache.insert_new(copy);
        // Until the copy has the old node's place, who passes here waits for the lock of the one
        // above.
        copy.handle.routes.take_over(&node.handle.routes);
        Ok(copy)
    }

    /// Gives a node back that nothing refers to any more: first the cache forgets it, then its
    /// blocks may be used again.
    fn release(&self, change: &Change<'_>, node: WriteNode) -> Result<(), TreeError> {
        node.handle.routes.forget();
        self.cache.remove(&node.handle, change.generation);
        let freed =
            self.space.free_node(node.handle.block, node.handle.generation, change.generation);
        freed.map_err(|source| self.space_error(source))
    }
}
