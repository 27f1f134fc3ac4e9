//! The items that one operation changed, formatted before any lock is taken.
//!
//! A batch holds the values one behind the other in one buffer, and for each change where its value
//! lies. The buffers are the thread's: a batch takes them when it is made and gives them back when
//! it is dropped, so that in the long run making a batch allocates nothing.
use cairn_format::{EntryFlags, Key, TreeId};
use std::cell::Cell;
use std::mem;
use std::ops::Range;

/// Longer buffers are not kept for the next batch.
const KEPT_VALUE_BYTES_MAX: usize = 1 << 16;
const KEPT_CHANGES_MAX: usize = 1024;

/// Which item: tree and key, with their hash, which is computed outside the lock under which it is
/// used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Identity {
    pub(crate) hash: u64,
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

/// What happens to one item; its value is in the batch's buffer.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) identity: Identity,
    pub(crate) flags: EntryFlags,
    /// The item did not exist before.
    pub(crate) created: bool,
    value: Range<usize>,
}

impl Change {
    pub(crate) fn is_removal(&self) -> bool {
        self.flags.contains(EntryFlags::DELETE)
    }
}

#[derive(Debug, Default)]
struct Buffers {
    changes: Vec<Change>,
    values: Vec<u8>,
}

impl Buffers {
    fn clear(&mut self) {
        self.changes.clear();
        self.values.clear();
    }
}

thread_local! {
    /// Empty buffers for the thread's next batch.
    static BUFFERS: Cell<Buffers> =
        const { Cell::new(Buffers { changes: Vec::new(), values: Vec::new() }) };
}

/// The changed items of one operation. It can be used again after [`crate::Log::insert`], which
/// empties it.
///
/// ```
/// use cairn_format::{EntryFlags, InodeNumber, ItemKind, Key, TREE_FILES};
/// let mut batch = cairn_log::Batch::new();
/// let key = |inode| Key::new(InodeNumber(inode), ItemKind::Symlink, 0);
/// batch.put(TREE_FILES, key(7), b"target", EntryFlags::default());
/// batch.delete(TREE_FILES, key(8));
/// assert!(!batch.is_empty());
/// ```
#[derive(Debug)]
pub struct Batch {
    buffers: Buffers,
    needs_commit: bool,
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        let mut buffers = mem::take(&mut self.buffers);
        buffers.clear();
        if buffers.values.capacity() <= KEPT_VALUE_BYTES_MAX
            && buffers.changes.capacity() <= KEPT_CHANGES_MAX
        {
            // A thread that is ending keeps nothing.
            let _ = BUFFERS.try_with(|kept| kept.set(buffers));
        }
    }
}

impl Batch {
    /// An empty batch.
    pub fn new() -> Self {
        Self { buffers: BUFFERS.try_with(Cell::take).unwrap_or_default(), needs_commit: false }
    }

    /// The item at `key` has this value now; whether it existed before is not known, or it did.
    pub fn put(&mut self, tree: TreeId, key: Key, value: &[u8], flags: EntryFlags) {
        self.add(tree, key, value, flags, false);
    }

    /// As [`Batch::put`], for an item that did not exist before this change. If it is removed again
    /// before it was written to the log, nothing is written.
    pub fn put_new(&mut self, tree: TreeId, key: Key, value: &[u8], flags: EntryFlags) {
        self.add(tree, key, value, flags, true);
    }

    /// The item at `key` is gone.
    pub fn delete(&mut self, tree: TreeId, key: Key) {
        self.add(tree, key, &[], EntryFlags::DELETE, false);
    }

    /// The operation changed something beside its items that the log does not know. So they must
    /// not be replayed without the superblock of its transaction: until that is durable, nothing of
    /// this operation or of a later one is written to the log, and an fsync asks for a commit.
    pub fn need_commit(&mut self) {
        self.needs_commit = true;
    }

    /// See [`Batch::need_commit`].
    pub(crate) fn needs_commit(&self) -> bool {
        self.needs_commit
    }

    fn add(&mut self, tree: TreeId, key: Key, value: &[u8], flags: EntryFlags, created: bool) {
        let Buffers { changes, values } = &mut self.buffers;
        let start = values.len();
        values.extend_from_slice(value);
        changes.push(Change {
            identity: Identity::new(tree, key),
            flags,
            created,
            value: start..values.len(),
        });
    }

    /// The changes with their values, in the order in which they were made.
    pub(crate) fn changes(&self) -> impl Iterator<Item = (&Change, &[u8])> {
        self.buffers
            .changes
            .iter()
            .map(|change| (change, &self.buffers.values[change.value.clone()]))
    }

    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.buffers.changes.is_empty()
    }

    /// Forgets the changes.
    pub fn clear(&mut self) {
        self.needs_commit = false;
        self.buffers.clear();
    }
}
