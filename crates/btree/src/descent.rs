//! The descent of a change with exclusive locks: copies, splits, merges, balances, grows and
//! collapses on the way down, the same for an insertion and a removal.
//!
//! 1. Begin at the anchor, a node that this change leaves in its place, or at the root, copied.
//! 2. Put a new root above a root without room.
//! 3. Lock the child for the key.
//! 4. Give the child what it lacks: split it for room; merge or balance it with a sibling for
//!    items. Copy what an older transaction made, and let the parent's pointers follow.
//! 5. After a removal, replace a root with one child by that child.
//! 6. Enter the child, which releases the parent. Repeat from step 3 until it is a leaf.
//! 7. Change the leaf. A leaf that becomes empty leaves the tree, so its parent is kept for that.
//!
//! Each step leaves a valid tree: a full child is split and an underfull one is merged before the
//! descent enters it, so nothing has to go back up. The parent has room for the split's pointer
//! because it was treated the same way before.
//!
//! Invariants: the node at hand belongs to the running transaction. The first key of an inner node
//! is its lower bound. A leaf other than the root isn't left empty.
//!
//! Lock discipline: exclusive locks, hand over hand: at most the parent, the child and one sibling,
//! siblings from left to right; the root pointer's lock until the root needs no further change. All
//! nodes come from memory. A descent that meets a lock that is taken doesn't wait for it below
//! others, unless it has begun again several times (`WaitPolicy`).
use crate::copy_on_write::Change;
use crate::edit::{Edit, Lack};
use crate::error::TreeError;
use crate::expected::{Bounds, Expected};
use crate::handle::WriteNode;
use crate::node_lock::Class;
use crate::page::{Neighbours, Remedy, balance, merge, remedy, split_index};
use crate::tree::{RootGuard, Tree};
use crate::walk::{Stop, WaitPolicy};
use cairn_format::{Key, NodePointer};

/// A descent that has arrived at `node`, which the running transaction made.
pub(crate) struct Descent<'a> {
    tree: &'a Tree,
    change: &'a Change<'a>,
    policy: WaitPolicy,
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
    /// Step 1.
    pub(crate) fn begin(
        tree: &'a Tree,
        change: &'a Change<'a>,
        anchor: Option<(WriteNode, Bounds)>,
        policy: WaitPolicy,
    ) -> Result<Descent<'a>, Stop> {
        if let Some((node, bounds)) = anchor {
            return Ok(Descent { tree, change, policy, root: None, node, bounds });
        }
        let mut root = tree.write_root();
        let mut node =
            tree.lock_cached(Class::First, &tree.expected_root(root.pointer()), policy)?;
        if node.generation() != change.generation {
            let copy = tree.copy_within(change, &node, Bounds::ALL)?;
            root.set(copy.handle.root_pointer());
            tree.release(change, node)?;
            node = copy;
        }
        Ok(Descent { tree, change, policy, root: Some(root), node, bounds: Bounds::ALL })
    }

    /// Steps 2 to 7. `read` sees the old value. With `loaded`, the siblings that could be read were
    /// read.
    pub(crate) fn run<R>(
        mut self,
        edit: &Edit<'_>,
        loaded: bool,
        read: impl Fn(&[u8]) -> R,
    ) -> Result<Option<R>, Stop> {
        let key = edit.key();
        // 2. A root without room.
        if edit.lack(&self.node) == Lack::Room {
            self.grow()?;
        }
        while self.node.level() > 0 {
            // 3. The child for the key.
            let child = self.lock_child(self.node.child_index(key), Class::First)?;
            // 4. Copied, and with all it lacks.
            let child = match edit.lack(&child.node) {
                Lack::Room => self.split(child, key)?,
                Lack::Items if self.node.count() > 1 => self.refill(child, key, loaded)?,
                Lack::Items | Lack::Nothing => self.own(child)?,
            };
            // 5. A root with one child.
            if edit.removes() && self.root.is_some() && self.node.count() == 1 {
                self.collapse_into(child)?;
                continue;
            }
            // 7. A leaf that becomes empty.
            if child.node.level() == 0 && edit.empties(&child.node) {
                return Ok(self.empty(child, edit, read)?);
            }
            // 6. One level down.
            self.enter(child);
        }
        // 7. Any other leaf.
        Ok(edit.apply(&mut self.node, read))
    }

    /// Makes `child`, which must be the running transaction's, the node at hand; the parent and the
    /// root pointer are released.
    fn enter(&mut self, child: Child) {
        self.root = None;
        self.bounds = child.bounds;
        self.node = child.node;
    }

    fn expected_child(&self, index: usize) -> Expected {
        Expected::child(self.tree.owner(), &self.node, self.bounds, index)
    }

    fn lock_child(&self, index: usize, class: Class) -> Result<Child, Stop> {
        let expected = self.expected_child(index);
        Ok(Child {
            node: self.tree.lock_cached(class, &expected, self.policy)?,
            index,
            bounds: expected.bounds,
        })
    }

    /// Copies the child, if an older transaction made it.
    fn own(&mut self, child: Child) -> Result<Child, Stop> {
        if child.node.generation() == self.change.generation {
            return Ok(child);
        }
        let copy = self.tree.copy_within(self.change, &child.node, child.bounds)?;
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

    /// Copies and splits a full child, and returns the half that `key` belongs to.
    fn split(&mut self, child: Child, key: &Key) -> Result<Child, Stop> {
        let Child { node: mut left, index, bounds } = self.own(child)?;
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

    /// Copies an underfull child, and merges or balances it with a sibling. Returns the node that
    /// `key` belongs to.
    fn refill(&mut self, mut child: Child, key: &Key, loaded: bool) -> Result<Child, Stop> {
        let index = child.index;
        let pair = Neighbours::of(&self.node, index);
        let expected = self.expected_child(pair.sibling());
        if expected.block == child.node.handle.block {
            return Err(expected.damaged("two pointers lead here".into()).into());
        }
        let Some(sibling) = self.tree.cache.cached(&expected)? else {
            // A node with one child must get more, or its leaf could become empty and stay.
            return if loaded && (child.node.level() == 0 || child.node.count() > 1) {
                self.own(child)
            } else {
                Err(Stop::Missing)
            };
        };
        let (left, right) = if pair.child_is_left {
            (
                child,
                Child {
                    node: self.tree.write_below(sibling, Class::Right, &expected, self.policy)?,
                    index: pair.left + 1,
                    bounds: expected.bounds,
                },
            )
        } else {
            // The left one's lock comes first. The parent's lock keeps both nodes where they are
            // meanwhile.
            drop(child);
            let left = Child {
                node: self.tree.write_below(sibling, Class::First, &expected, self.policy)?,
                index: pair.left,
                bounds: expected.bounds,
            };
            child = self.lock_child(index, Class::Right)?;
            (left, child)
        };
        self.tree.cache.locks.before_sleep();
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
        let empty = self.tree.empty_node(self.change, right.node.level(), right.node.handle.block);
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

    /// Takes the last item out of a leaf below the node at hand. The leaf goes, and the root with
    /// it if only one child is left.
    fn empty<R>(
        mut self,
        mut leaf: Child,
        edit: &Edit<'_>,
        read: impl Fn(&[u8]) -> R,
    ) -> Result<Option<R>, TreeError> {
        let value = edit.apply(&mut leaf.node, read);
        if self.node.count() == 1 {
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
    /// Copies a node with these bounds. On the device the first key of an inner node may be any.
    fn copy_within(
        &self,
        change: &Change<'_>,
        node: &WriteNode,
        bounds: Bounds,
    ) -> Result<WriteNode, TreeError> {
        let mut copy = self.copy(change, node)?;
        if copy.level() > 0 {
            copy.set_key(0, bounds.lower);
        }
        Ok(copy)
    }

    /// Locks a node exclusively, if it is in memory.
    fn lock_cached(
        &self,
        class: Class,
        expected: &Expected,
        policy: WaitPolicy,
    ) -> Result<WriteNode, Stop> {
        let node = self.cache.cached(expected)?.ok_or(Stop::Missing)?;
        self.write_below(node, class, expected, policy)
    }
}
