//! The items that one operation changed, made into log vectors before any lock is taken.
//!
//! A log vector is what the list stores of an item: its identity, and one allocation that holds its value. Inserting a
//! batch moves its vectors into the context; for an item that the context already holds the two exchange their
//! allocations, so the displaced one comes back in the batch and is freed after the lock was released.
use cairn_format::{ENTRY_HEADER_BYTES, EntryFlags, Key, TreeId};
use std::hash::{Hash, Hasher};
use std::mem;

/// Which item: tree and key, with their hash, which is computed outside the lock under which it is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Identity {
    hash: u64,
    pub(crate) tree: TreeId,
    pub(crate) key: Key,
}

impl Identity {
    pub(crate) fn new(tree: TreeId, key: Key) -> Self {
        let mut hash = 0x9e37_79b9_7f4a_7c15_u64;
        for word in [tree.0, key.inode, key.offset, u64::from(key.kind)] {
            hash = (hash ^ word).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            hash ^= hash >> 31;
        }
        Self { hash, tree, key }
    }
}

impl Hash for Identity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// The newest state of one item.
#[derive(Debug)]
pub(crate) struct LogVector {
    pub(crate) identity: Identity,
    pub(crate) flags: EntryFlags,
    /// The item did not exist before the context that holds this vector.
    created: bool,
    pub(crate) value: Box<[u8]>,
}

/// What an older vector became when a newer one came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Merged {
    /// It holds the newer state.
    Kept,
    /// Created and removed within one context: nothing needs to be logged.
    Whiteout,
}

impl LogVector {
    /// Bytes that it takes in a checkpoint.
    pub(crate) fn entry_bytes(&self) -> usize {
        ENTRY_HEADER_BYTES + self.value.len()
    }

    fn is_removal(&self) -> bool {
        self.flags.contains(EntryFlags::DELETE)
    }

    /// Moves the vector out, leaving one without an allocation.
    pub(crate) fn take(&mut self) -> LogVector {
        LogVector { identity: self.identity, flags: self.flags, created: self.created, value: mem::take(&mut self.value) }
    }

    /// Takes over the state of `newer`, a later change of the same item; the displaced allocation goes to `newer`.
    pub(crate) fn merge(&mut self, newer: &mut LogVector) -> Merged {
        debug_assert_eq!(self.identity, newer.identity);
        let unproven = |vector: &LogVector| !vector.is_removal() && vector.flags.contains(EntryFlags::NEW_DATA);
        if newer.is_removal() {
            if self.created {
                return Merged::Whiteout;
            }
            self.flags = newer.flags;
        } else {
            let new_data = unproven(self) || unproven(newer);
            self.flags = if new_data { EntryFlags(newer.flags.0 | EntryFlags::NEW_DATA.0) } else { newer.flags };
        }
        mem::swap(&mut self.value, &mut newer.value);
        Merged::Kept
    }
}

/// The changed items of one operation. It can be used again after [`crate::Log::insert`], which empties it.
///
/// ```
/// use cairn_format::{EntryFlags, InodeNumber, ItemKind, Key, TREE_FILES};
/// let mut batch = cairn_log::Batch::new();
/// batch.put(TREE_FILES, Key::new(InodeNumber(7), ItemKind::Symlink, 0), b"target", EntryFlags::default());
/// batch.delete(TREE_FILES, Key::new(InodeNumber(8), ItemKind::Symlink, 0));
/// assert!(!batch.is_empty());
/// ```
#[derive(Debug, Default)]
pub struct Batch {
    pub(crate) vectors: Vec<LogVector>,
}

impl Batch {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// The item at `key` has this value now; whether it existed before is not known, or it did.
    pub fn put(&mut self, tree: TreeId, key: Key, value: &[u8], flags: EntryFlags) {
        self.add(tree, key, value, flags, false);
    }

    /// As [`Batch::put`], for an item that did not exist before this change. If it is removed again before it was
    /// written to the log, nothing is written.
    pub fn put_new(&mut self, tree: TreeId, key: Key, value: &[u8], flags: EntryFlags) {
        self.add(tree, key, value, flags, true);
    }

    /// The item at `key` is gone.
    pub fn delete(&mut self, tree: TreeId, key: Key) {
        self.add(tree, key, &[], EntryFlags::DELETE, false);
    }

    fn add(&mut self, tree: TreeId, key: Key, value: &[u8], flags: EntryFlags, created: bool) {
        self.vectors.push(LogVector { identity: Identity::new(tree, key), flags, created, value: value.into() });
    }

    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Number of changes.
    pub fn len(&self) -> usize {
        self.vectors.len()
    }

    /// Forgets the changes.
    pub fn clear(&mut self) {
        self.vectors.clear();
    }
}
