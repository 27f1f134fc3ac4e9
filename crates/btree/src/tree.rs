//! A tree: its root pointer, and the descents that change nothing.
//!
//! Readers follow routes to a leaf without a lock (`quick.rs`). Where those aren't known they
//! couple hand over hand with shared locks: the child's lock is taken, then the parent's released;
//! for a child's lock that is taken they wait with nothing locked, and begin again ([`Patience`]).
//! While a lock is held on a parent, its pointers are valid: whoever frees a child holds the
//! parent's exclusive lock.
//!
//! Lock discipline: root pointer (`TREE_ROOT`), then nodes (`NODE`) from the root down. A descent
//! with shared locks may read from the device; the locks that it holds then are shared ones.
use crate::TreeError;
use crate::cache::NodeCache;
use crate::change::Change;
use crate::descent::{Patience, Stop};
use crate::expected::{Bounds, Expected};
use crate::handle::{Class, NodeBody, NodeHandle, ReadNode, WriteNode};
use crate::range::Range;
use cairn_environment::Rank;
use cairn_environment::lock::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use cairn_environment::published::Published;
use cairn_format::{Generation, Key, Node, NodePointer, TreeId};
use cairn_space::Space;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// So often a descent begins again; then it waits where it is, or a leaf that is never free could
/// starve it.
const BEGIN_AGAIN_MAX: u32 = 4;

/// A B-tree of items, used by many threads at once.
pub struct Tree {
    pub(crate) cache: Arc<NodeCache>,
    pub(crate) space: Arc<Space>,
    id: TreeId,
    root: RwLock<NodePointer>,
    /// The root in memory, for who takes no lock on the way to a leaf. Set under the root pointer's
    /// lock, and withdrawn under its exclusive one.
    pub(crate) root_node: Published<NodeBody>,
}

/// The root pointer under its exclusive lock.
pub(crate) struct RootGuard<'a> {
    tree: &'a Tree,
    guard: RwLockWriteGuard<'a, NodePointer>,
}

impl RootGuard<'_> {
    /// Where the root is.
    pub(crate) fn pointer(&self) -> NodePointer {
        *self.guard
    }

    /// Gives the tree another root.
    pub(crate) fn set(&mut self, pointer: NodePointer) {
        self.tree.root_node.store(None);
        *self.guard = pointer;
    }
}

/// A leaf that a shared descent found.
pub(crate) struct Leaf {
    pub(crate) node: ReadNode,
    pub(crate) bounds: Bounds,
}

/// Where a descent for a change arrived.
pub(crate) enum Arrival {
    /// At a leaf of the running transaction, which may be changed in place.
    Own {
        /// The leaf.
        leaf: WriteNode,
        /// Whether the leaf is the root.
        is_root: bool,
    },
    /// At a leaf that must be copied first.
    Frozen(ReadNode),
}

impl Tree {
    /// The tree whose root is at `root`. Nothing is read yet.
    pub fn open(cache: Arc<NodeCache>, space: Arc<Space>, id: TreeId, root: NodePointer) -> Tree {
        Tree {
            cache,
            space,
            id,
            root: RwLock::new(Rank::TREE_ROOT, root),
            root_node: Published::empty(),
        }
    }

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
        *tree.root.write() = pointer;
        Ok(tree)
    }

    /// The tree's id.
    pub fn id(&self) -> TreeId {
        self.id
    }

    /// Where the root is. At the cut this is what the root tree must remember.
    pub fn root(&self) -> NodePointer {
        *self.root.read()
    }

    /// The value under `key`.
    ///
    /// # Errors
    /// When a node on the way can't be read.
    pub fn get(&self, key: &Key) -> Result<Option<Vec<u8>>, TreeError> {
        self.get_with(key, <[u8]>::to_vec)
    }

    /// What `read` makes of the value under `key`. It runs under the leaf's shared lock, so it must
    /// not use a tree.
    ///
    /// # Errors
    /// When a node on the way can't be read.
    pub fn get_with<R>(
        &self,
        key: &Key,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>, TreeError> {
        let leaf = self.leaf(key)?.node;
        Ok(leaf.search(key).ok().map(|index| read(leaf.value(index))))
    }

    /// Whether the leaf that holds `key` if anybody does can be reached without the device, now.
    pub fn is_in_memory(&self, key: &Key) -> bool {
        self.quick_leaf(key).is_some()
    }

    /// The items whose keys lie in `keys`, in order. See [`Range`] for what it does while others
    /// change the tree.
    pub fn range(&self, keys: RangeInclusive<Key>) -> Range<'_> {
        Range::new(self, keys)
    }

    /// The item with the largest key in `keys`.
    ///
    /// # Errors
    /// When a node on the way can't be read.
    pub fn last(&self, keys: RangeInclusive<Key>) -> Result<Option<(Key, Vec<u8>)>, TreeError> {
        let (first, mut last) = keys.into_inner();
        while first <= last {
            let Leaf { node: leaf, bounds } = self.leaf(&last)?;
            let end = leaf.search(&last).map_or_else(|index| index, |index| index + 1);
            if let Some(index) = end.checked_sub(1) {
                let key = leaf.key(index);
                return Ok((key >= first).then(|| (key, leaf.value(index).to_vec())));
            }
            // All keys of this leaf are larger: go on before it.
            let Some(before) = predecessor(bounds.lower) else { return Ok(None) };
            last = before;
        }
        Ok(None)
    }

    /// The root pointer, to look at.
    pub(crate) fn read_root(&self) -> RwLockReadGuard<'_, NodePointer> {
        self.root.try_read().unwrap_or_else(|| {
            self.cache.waits.count_root(false);
            self.root.read()
        })
    }

    /// The root pointer, to change.
    pub(crate) fn write_root(&self) -> RootGuard<'_> {
        let guard = self.root.try_write().unwrap_or_else(|| {
            self.cache.waits.count_root(true);
            self.root.write()
        });
        RootGuard { tree: self, guard }
    }

    /// What `parent`, with the bounds `bounds`, says about its child `index`.
    pub(crate) fn child(&self, parent: &Node, bounds: Bounds, index: usize) -> Expected {
        Expected::child(self.id, parent, bounds, index)
    }

    /// What the root pointer says about the root.
    pub(crate) fn expected_root(&self, pointer: NodePointer) -> Expected {
        Expected::root(self.id, pointer)
    }

    /// Locks `node` shared, below another one that is locked, and checks its keys.
    pub(crate) fn read_below(
        &self,
        node: NodeHandle,
        expected: &Expected,
        patience: Patience,
    ) -> Result<ReadNode, Stop> {
        let node = match patience {
            Patience::BeginAgain => node.try_read().map_err(|node| Stop::Busy(node, false))?,
            Patience::Wait => node.read(&self.cache.waits),
        };
        expected.check_keys(&node)?;
        Ok(node)
    }

    /// Locks `node` exclusively, below another one that is locked, and checks its keys.
    pub(crate) fn write_below(
        &self,
        node: NodeHandle,
        class: Class,
        expected: &Expected,
        patience: Patience,
    ) -> Result<WriteNode, Stop> {
        let node = match patience {
            Patience::BeginAgain => node.try_write(class).map_err(|node| Stop::Busy(node, true))?,
            Patience::Wait => node.write(class, &self.cache.waits),
        };
        expected.check_keys(&node)?;
        Ok(node)
    }

    /// That of a descent which began again so often.
    pub(crate) fn patience(&self, begun_again: u32) -> Patience {
        #[cfg(feature = "baselines")]
        if self.cache.has_locked_descents() {
            return Patience::Wait;
        }
        if begun_again < BEGIN_AGAIN_MAX { Patience::BeginAgain } else { Patience::Wait }
    }

    /// Waits, with no lock of the tree held, until a node that stopped a descent is free.
    pub(crate) fn await_node(&self, node: NodeHandle, exclusive: bool) {
        if exclusive {
            drop(node.write(Class::First, &self.cache.waits))
        } else {
            drop(node.read(&self.cache.waits))
        }
    }

    /// Runs a shared descent until it meets no lock that is taken, or may wait for it.
    pub(crate) fn patiently<T>(
        &self,
        mut attempt: impl FnMut(Patience) -> Result<T, Stop>,
    ) -> Result<T, TreeError> {
        let mut begun_again = 0;
        loop {
            match attempt(self.patience(begun_again)) {
                Ok(done) => return Ok(done),
                Err(Stop::Failed(error)) => return Err(error),
                Err(Stop::Busy(node, exclusive)) => self.await_node(node, exclusive),
                Err(Stop::Missing) => unreachable!("a shared descent reads what is missing"),
            }
            begun_again += 1;
        }
    }

    /// The root in memory; its pointer's lock is held.
    fn fetch_root(&self, expected: &Expected) -> Result<NodeHandle, TreeError> {
        let node = self.cache.fetch(expected)?;
        if !self.root_node.holds(node.body()) {
            self.root_node.store(Some(Arc::clone(node.body())));
        }
        Ok(node)
    }

    /// Child `index` of `parent`, of which `expected` is known; the parent's lock is held.
    fn fetch_child(
        &self,
        parent: &ReadNode,
        index: usize,
        expected: &Expected,
    ) -> Result<NodeHandle, TreeError> {
        match parent.handle.routes.child(parent, index) {
            Some(known) => {
                known.note_use();
                Ok(NodeHandle::from_body(known))
            }
            None => self.cache.fetch(expected),
        }
    }

    /// The leaf that holds `key` if anybody does, under its shared lock.
    pub(crate) fn leaf(&self, key: &Key) -> Result<Leaf, TreeError> {
        if let Some(leaf) = self.quick_leaf(key) {
            return Ok(leaf);
        }
        self.patiently(|patience| {
            let pointer = self.read_root();
            let mut expected = self.expected_root(*pointer);
            let mut node = self.read_below(self.fetch_root(&expected)?, &expected, patience)?;
            drop(pointer);
            while node.level() > 0 {
                let index = node.child_index(key);
                expected = self.child(&node, expected.bounds, index);
                let child = self.read_below(
                    self.fetch_child(&node, index, &expected)?,
                    &expected,
                    patience,
                )?;
                node.learn_child(index, &child.handle);
                // The assignment drops the parent's lock, after the child's was taken.
                node = child;
            }
            self.cache.before_sleep();
            Ok(Leaf { node, bounds: expected.bounds })
        })
    }

    /// The leaf that holds `key`: under its exclusive lock if the transaction `running` made it,
    /// otherwise under its shared lock. `visit` sees each inner node on the way, under its shared
    /// lock; it may see a way more than once.
    pub(crate) fn arrive(
        &self,
        key: &Key,
        running: Generation,
        mut visit: impl FnMut(&Node),
    ) -> Result<Arrival, TreeError> {
        self.patiently(|patience| {
            let pointer = self.read_root();
            let mut expected = self.expected_root(*pointer);
            let mut handle = self.fetch_root(&expected)?;
            if handle.level == 0 && handle.generation == running {
                return Ok(Arrival::Own {
                    leaf: self.write_below(handle, Class::First, &expected, patience)?,
                    is_root: true,
                });
            }
            let mut node = self.read_below(handle, &expected, patience)?;
            drop(pointer);
            while node.level() > 0 {
                visit(&node);
                let index = node.child_index(key);
                expected = self.child(&node, expected.bounds, index);
                handle = self.fetch_child(&node, index, &expected)?;
                if handle.level == 0 && handle.generation == running {
                    let leaf = self.write_below(handle, Class::First, &expected, patience)?;
                    node.learn_child(index, &leaf.handle);
                    return Ok(Arrival::Own { leaf, is_root: false });
                }
                let child = self.read_below(handle, &expected, patience)?;
                node.learn_child(index, &child.handle);
                node = child;
            }
            Ok(Arrival::Frozen(node))
        })
    }

    /// The node at `level` on the way to `key`, under its exclusive lock, if the transaction
    /// `running` made it.
    pub(crate) fn anchor(
        &self,
        key: &Key,
        level: u8,
        running: Generation,
        patience: Patience,
    ) -> Result<Option<(WriteNode, Bounds)>, Stop> {
        let pointer = self.read_root();
        let mut expected = self.expected_root(*pointer);
        let mut handle = self.cache.fetch(&expected)?;
        // What keeps `handle` in its place until it is locked.
        let (mut pointer, mut parent) = (Some(pointer), None);
        while handle.level > level {
            let node = self.read_below(handle, &expected, patience)?;
            drop((pointer.take(), parent.take()));
            expected = self.child(&node, expected.bounds, node.child_index(key));
            handle = self.cache.fetch(&expected)?;
            parent = Some(node);
        }
        if handle.level != level || handle.generation != running {
            return Ok(None);
        }
        let node = self.write_below(handle, Class::First, &expected, patience)?;
        drop((pointer, parent));
        Ok(Some((node, expected.bounds)))
    }
}

/// The key before `key`, or `None` for the smallest.
fn predecessor(key: Key) -> Option<Key> {
    if let Some(offset) = key.offset.checked_sub(1) {
        return Some(Key { offset, ..key });
    }
    if let Some(kind) = key.kind.checked_sub(1) {
        return Some(Key { kind, offset: u64::MAX, ..key });
    }
    Some(Key { inode: key.inode.checked_sub(1)?, kind: u8::MAX, offset: u64::MAX })
}
