//! Insertions and removals.
//!
//! A change first descends with shared locks and takes an exclusive one on the leaf only; that is
//! enough when the running transaction made the leaf, and it neither overflows nor underflows.
//! Otherwise it descends a second time with exclusive locks (`descent.rs`): from the lowest node
//! that the running transaction made and that has room, else from the root.
//!
//! The exclusive descent never reads from the device. If it misses a node, it releases everything,
//! the node is read under shared locks and kept in memory, and the change starts again; what it
//! changed until then is a valid tree. It does the same when it meets a lock that is taken, and
//! waits for that one alone. `bound.rs` says why that costs no node twice.
use crate::TreeError;
use crate::descent::{Descent, Patience, Stop};
use crate::handle::NodeHandle;
use crate::page::{Neighbours, has_room, put, take, underfull};
use crate::tree::{Arrival, Tree};
use cairn_format::node::VALUE_BYTES_MAX;
use cairn_format::{Generation, Key, Node};
use cairn_space::Reservation;

/// The transaction that a change belongs to, and what it may allocate.
///
/// Whoever holds one has joined the transaction: the cut waits for it.
#[derive(Clone, Copy)]
pub struct Change<'a> {
    /// The running transaction.
    pub generation: Generation,
    /// Nodes that the change may allocate; [`Tree::worst_case`] says how many suffice.
    pub reservation: &'a Reservation,
}

impl Tree {
    /// Puts `value` under `key`, and returns the value that stood there.
    ///
    /// # Errors
    /// When a node can't be read or allocated; the items are then as they were. When the allocator
    /// refuses to take a node back, the bitmaps contradict the trees; the change may then have
    /// happened, and the transaction must not commit.
    ///
    /// # Panics
    /// When the value is longer than [`VALUE_BYTES_MAX`].
    pub fn insert(
        &self,
        change: &Change<'_>,
        key: Key,
        value: &[u8],
    ) -> Result<Option<Vec<u8>>, TreeError> {
        self.insert_with(change, key, value, <[u8]>::to_vec)
    }

    /// As [`Tree::insert`], and returns what `read` makes of the value that stood there. It runs
    /// under the leaf's lock, so it must not use a tree, and may run again.
    ///
    /// # Errors
    /// As those of [`Tree::insert`].
    ///
    /// # Panics
    /// As [`Tree::insert`].
    pub fn insert_with<R>(
        &self,
        change: &Change<'_>,
        key: Key,
        value: &[u8],
        read: impl Fn(&[u8]) -> R,
    ) -> Result<Option<R>, TreeError> {
        assert!(
            value.len() <= VALUE_BYTES_MAX,
            "a value of {} bytes doesn't fit into a node",
            value.len()
        );
        self.in_attempts(&key, false, |_, patience| {
            if let Some(Arrival::Own { mut leaf, .. }) = self.quick_arrive(&key, change.generation)
                && let Ok(old) = put(&mut leaf, key, value, &read)
            {
                return Ok(old);
            }
            // The lowest node that was safe; it is looked at again when it is locked.
            let mut safe_level = None;
            let safe = |node: &Node| {
                node.generation() == change.generation && has_room(node, &key, value.len())
            };
            let arrival = self.arrive(&key, change.generation, |node| {
                if safe(node) {
                    safe_level = Some(node.level());
                }
            })?;
            match arrival {
                Arrival::Own { mut leaf, .. } => {
                    if let Ok(old) = put(&mut leaf, key, value, &read) {
                        return Ok(old);
                    }
                }
                Arrival::Frozen(leaf) => drop(leaf),
            }
            let anchor = match safe_level {
                Some(level) => self
                    .anchor(&key, level, change.generation, patience)?
                    .filter(|(node, _)| safe(node)),
                None => None,
            };
            Descent::begin(self, change, anchor, patience)?.insert(key, value, &read)
        })
    }

    /// Removes the item under `key`, and returns its value.
    ///
    /// # Errors
    /// When a node can't be read or allocated; the items are then as they were. When the allocator
    /// refuses to take a node back, the bitmaps contradict the trees; the change may then have
    /// happened, and the transaction must not commit.
    pub fn remove(&self, change: &Change<'_>, key: &Key) -> Result<Option<Vec<u8>>, TreeError> {
        self.remove_with(change, key, <[u8]>::to_vec)
    }

    /// As [`Tree::remove`], and returns what `read` makes of the value. It runs under the leaf's
    /// lock, so it must not use a tree.
    ///
    /// # Errors
    /// As those of [`Tree::remove`].
    pub fn remove_with<R>(
        &self,
        change: &Change<'_>,
        key: &Key,
        read: impl Fn(&[u8]) -> R,
    ) -> Result<Option<R>, TreeError> {
        self.in_attempts(key, true, |complete, patience| {
            match self.quick_arrive(key, change.generation) {
                Some(Arrival::Own { mut leaf, is_root })
                    if is_root || leaf.search(key).is_err() || !underfull(&leaf) =>
                {
                    return Ok(take(&mut leaf, key, &read));
                }
                Some(Arrival::Frozen(leaf)) if leaf.search(key).is_err() => return Ok(None),
                _ => {}
            }
            // The lowest node that was safe; it is looked at again when it is locked.
            let mut safe_level = None;
            let safe = |node: &Node| node.generation() == change.generation && !underfull(node);
            let arrival = self.arrive(key, change.generation, |node| {
                if safe(node) {
                    safe_level = Some(node.level());
                }
            })?;
            match arrival {
                Arrival::Own { mut leaf, is_root } => {
                    if is_root || leaf.search(key).is_err() || !underfull(&leaf) {
                        return Ok(take(&mut leaf, key, &read));
                    }
                }
                Arrival::Frozen(leaf) => {
                    if leaf.search(key).is_err() {
                        return Ok(None);
                    }
                }
            }
            let anchor = match safe_level {
                Some(level) => self
                    .anchor(key, level, change.generation, patience)?
                    .filter(|(node, _)| safe(node)),
                None => None,
            };
            Descent::begin(self, change, anchor, patience)?.remove(key, complete, &read)
        })
    }

    /// Runs `attempt` until it misses no node, and meets no lock that is taken or may wait for it.
    /// It is told whether the nodes on the way were read just before.
    fn in_attempts<T>(
        &self,
        key: &Key,
        removing: bool,
        attempt: impl Fn(bool, Patience) -> Result<T, Stop>,
    ) -> Result<T, TreeError> {
        let (mut path, mut begun_again) = (Vec::new(), 0);
        loop {
            match attempt(!path.is_empty(), self.patience(begun_again)) {
                Ok(done) => return Ok(done),
                Err(Stop::Failed(error)) => return Err(error),
                Err(Stop::Missing) => path = self.load_path(key, removing)?,
                Err(Stop::Busy(node, exclusive)) => {
                    self.await_node(node, exclusive);
                    begun_again += 1;
                }
            }
        }
    }

    /// Reads the nodes on the way to `key`, and the siblings that a removal may need, into memory.
    /// They stay there as long as the result lives. What others put in their place meanwhile is
    /// dirty, so it is in memory, too.
    fn load_path(&self, key: &Key, removing: bool) -> Result<Vec<NodeHandle>, TreeError> {
        self.patiently(|patience| {
            let pointer = self.read_root();
            let mut expected = self.expected_root(*pointer);
            let mut node = self.read_below(self.cache.fetch(&expected)?, &expected, patience)?;
            drop(pointer);
            let mut path = vec![node.handle.clone()];
            while node.level() > 0 {
                let (index, bounds) = (node.child_index(key), expected.bounds);
                expected = self.child(&node, bounds, index);
                let child = self.read_below(self.cache.fetch(&expected)?, &expected, patience)?;
                path.push(child.handle.clone());
                if removing && underfull(&child) && node.count() > 1 {
                    path.push(self.cache.fetch(&self.child(
                        &node,
                        bounds,
                        Neighbours::of(&node, index).sibling(),
                    ))?);
                }
                node = child;
            }
            Ok(path)
        })
    }
}
