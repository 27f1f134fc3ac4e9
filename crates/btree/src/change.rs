//! Insertions and removals: the steps of a change.
//!
//! 1. Follow the routes to the leaf and lock nothing else (`quick.rs`). If the running transaction
//!    made the leaf, and no other node must change for it, change it: done.
//! 2. Otherwise walk to the leaf with shared locks (`walk.rs`), with the same end; remember the
//!    lowest node that a change below leaves as it is.
//! 3. Lock that node exclusively, or else the root pointer and the root. What is above is released.
//! 4. From there go down with exclusive locks: copy, split or merge, and change the leaf
//!    (`descent.rs`).
//!
//! Step 4 never reads from the device. If it misses a node, it releases everything, the way is read
//! under shared locks and kept in memory, and the change starts again; what it changed until then
//! is a valid tree. It does the same when it meets a lock that is taken, and waits for that one
//! alone. `bound.rs` says why that costs no node twice.
//!
//! Lock discipline: as in the files that the steps name; between two steps no lock is held, but for
//! the node that step 3 locks for step 4.
use crate::copy_on_write::Change;
use crate::descent::Descent;
use crate::edit::{Edit, Lack};
use crate::error::TreeError;
use crate::expected::Bounds;
use crate::handle::{NodeHandle, ReadNode, WriteNode};
use crate::page::underfull;
use crate::quick::Arrival;
use crate::tree::Tree;
use crate::walk::{Parent, Stop, WaitPolicy, unseen};
use cairn_format::node::VALUE_BYTES_MAX;
use cairn_format::{Generation, Key, Node};

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
        self.edit(change, &Edit::Insert { key: &key, value }, read)
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
        self.edit(change, &Edit::Remove { key }, read)
    }

    /// Tries `edit` until it misses no node, and meets no lock that is taken or may wait for it.
    #[inline]
    fn edit<R>(
        &self,
        change: &Change<'_>,
        edit: &Edit<'_>,
        read: impl Fn(&[u8]) -> R,
    ) -> Result<Option<R>, TreeError> {
        let mut way = Vec::new();
        self.with_retries(|policy| {
            loop {
                // 1. By routes, to the leaf alone.
                if let Some(arrival) = self.quick_arrival(edit.key(), change.generation)
                    && let Some(done) = arrival.finish(edit, &read)
                {
                    return Ok(done);
                }
                match self.edit_by_locks(change, edit, policy, !way.is_empty(), &read) {
                    Err(Stop::Missing) => way = self.load_way(edit)?,
                    ended => return ended,
                }
            }
        })
    }

    /// Steps 2 to 4. With `loaded`, the nodes on the way were read just before.
    #[inline(never)]
    fn edit_by_locks<R>(
        &self,
        change: &Change<'_>,
        edit: &Edit<'_>,
        policy: WaitPolicy,
        loaded: bool,
        read: &impl Fn(&[u8]) -> R,
    ) -> Result<Option<R>, Stop> {
        // 2. By shared locks. The lowest safe node is looked at again when it is locked.
        let mut safe_level = None;
        let is_safe = |node: &Node| {
            node.generation() == change.generation && edit.lack(node) == Lack::Nothing
        };
        let arrival = self.arrival(edit.key(), change.generation, |node| {
            if is_safe(node) {
                safe_level = Some(node.level());
            }
        })?;
        if let Some(done) = arrival.finish(edit, read) {
            return Ok(done);
        }
        // 3. The safe node, exclusively.
        let anchor = match safe_level {
            Some(level) => self
                .anchor(edit.key(), level, change.generation, policy)?
                .filter(|(node, _)| is_safe(node)),
            None => None,
        };
        // 4. Everything below it.
        Descent::begin(self, change, anchor, policy)?.run(edit, loaded, read)
    }

    /// The leaf for `key`: under its exclusive lock if the transaction `running` made it, otherwise
    /// under its shared lock. `visit` sees each inner node on the way, under its shared lock; it
    /// may see a way more than once.
    fn arrival(
        &self,
        key: &Key,
        running: Generation,
        mut visit: impl FnMut(&Node),
    ) -> Result<Arrival, TreeError> {
        self.with_retries(|policy| {
            let leaf = self.walk(key, 0, policy, &mut |_, node| {
                visit(node);
                Ok(())
            })?;
            let is_root = leaf.is_root();
            Ok(if leaf.generation() == running {
                Arrival::Own { leaf: leaf.write()?.0, is_root }
            } else {
                Arrival::Frozen(leaf.read(&mut unseen)?.0)
            })
        })
    }

    /// The node at `level` on the way to `key`, under its exclusive lock, if the transaction
    /// `running` made it.
    fn anchor(
        &self,
        key: &Key,
        level: u8,
        running: Generation,
        policy: WaitPolicy,
    ) -> Result<Option<(WriteNode, Bounds)>, Stop> {
        let node = self.walk(key, level, policy, &mut unseen)?;
        if node.level() != level || node.generation() != running {
            return Ok(None);
        }
        node.write().map(Some)
    }

    /// Reads the nodes on the way of `edit`, and the siblings that a removal may need, into memory.
    /// They stay there as long as the result lives. What others put in their place meanwhile is
    /// dirty, so it is in memory, too.
    fn load_way(&self, edit: &Edit<'_>) -> Result<Vec<NodeHandle>, TreeError> {
        self.with_retries(|policy| {
            let mut way = Vec::new();
            let mut keep = |parent: Option<&Parent>, node: &ReadNode| {
                way.push(node.handle.clone());
                if edit.removes()
                    && underfull(node)
                    && let Some(sibling) = parent.and_then(|parent| parent.sibling())
                {
                    way.push(self.cache.fetch(&sibling)?);
                }
                Ok(())
            };
            self.walk(edit.key(), 0, policy, &mut keep)?.read(&mut keep)?;
            Ok(way)
        })
    }
}

impl Arrival {
    /// Changes the leaf, if the running transaction made it and no other node must change for that;
    /// or finds that there is nothing to change. Releases the leaf.
    #[inline(always)]
    fn finish<R>(self, edit: &Edit<'_>, read: &impl Fn(&[u8]) -> R) -> Option<Option<R>> {
        match self {
            Arrival::Own { mut leaf, is_root } => edit.apply_alone(&mut leaf, is_root, read),
            Arrival::Frozen(leaf) => edit.changes_nothing(&leaf).then_some(None),
        }
    }
}
