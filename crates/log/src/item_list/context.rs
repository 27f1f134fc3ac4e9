//! A context: the newest state of every item that changed during a contiguous run of operations.
//!
//! An item has a log vector, which says what to log, and a place for its value in the [`Arena`];
//! neither is an allocation of its own. Logging an item again overwrites both. A context that was
//! written or dropped is emptied and used again with all its memory, so that in the long run
//! neither inserting nor switching the list allocates anything.
//!
//! Invariants: each item is there once; `index` has its position in `vectors`; `entry_bytes` is the
//! sum over `vectors`; all operations in it belong to one transaction. A context has no lock of its
//! own; the list that it stands in has.
use super::arena::{Arena, ValuePlace};
use super::batch::{Change, Identity};
use super::index::Index;
use crate::baselines::boxed_values::BoxedValues;
use crate::data::{LostBlocks, flags_without};
use cairn_format::{
    BLOCK_SIZE, CHECKPOINT_HEADER_BYTES, CheckpointBuilder, CheckpointEntry, ENTRY_HEADER_BYTES,
    EntryFlags, Generation, LogSeq,
};

/// An emptied context keeps room for at most this many items.
const ITEMS_KEPT: usize = 16 * 1024;

/// The newest state of one item.
#[derive(Debug)]
struct LogVector {
    identity: Identity,
    place: ValuePlace,
    value_bytes: u32,
    flags: EntryFlags,
    /// The item did not exist before the context that holds this vector.
    created: bool,
}

impl LogVector {
    /// Bytes that it takes in a checkpoint.
    fn entry_bytes(&self) -> usize {
        ENTRY_HEADER_BYTES + self.value_bytes as usize
    }

    fn is_unproven(&self) -> bool {
        !self.flags.contains(EntryFlags::DELETE) && self.flags.contains(EntryFlags::NEW_DATA)
    }
}

pub(crate) struct Context {
    index: Index,
    vectors: Vec<LogVector>,
    values: Arena,
    entry_bytes: usize,
    /// The values of a predecessor of the arena, if there is one.
    pub(crate) boxed: BoxedValues,
    /// Transaction of its operations.
    pub(crate) generation: Generation,
    /// Its last operation.
    pub(crate) last: LogSeq,
    /// One of its operations only becomes durable with a superblock.
    needs_commit: bool,
}

impl Context {
    /// An empty context without memory.
    pub(crate) fn new(generation: Generation) -> Self {
        Self {
            index: Index::default(),
            vectors: Vec::new(),
            values: Arena::new(),
            entry_bytes: 0,
            boxed: BoxedValues::default(),
            generation,
            last: LogSeq(0),
            needs_commit: false,
        }
    }

    /// Empties the context and keeps its memory, within limits.
    pub(crate) fn clear(&mut self) {
        self.index.clear(ITEMS_KEPT);
        self.vectors.clear();
        self.vectors.shrink_to(ITEMS_KEPT);
        self.values.clear();
        self.boxed.clear();
        self.entry_bytes = 0;
        self.last = LogSeq(0);
        self.needs_commit = false;
    }

    /// Notes what an operation needs.
    pub(crate) fn note_need(&mut self, commit: bool) {
        self.needs_commit |= commit;
    }

    /// Whether it must not be written as a checkpoint, only be covered by a superblock.
    pub(crate) fn needs_commit(&self) -> bool {
        self.needs_commit && !self.is_empty()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    pub(crate) fn items(&self) -> usize {
        self.vectors.len()
    }

    pub(crate) fn entry_bytes(&self) -> usize {
        self.entry_bytes
    }

    /// Memory that the next operations will need; see [`Arena::wants_chunk`].
    pub(crate) fn values(&mut self) -> &mut Arena {
        &mut self.values
    }

    /// Blocks that its checkpoint takes; an empty context needs no checkpoint.
    pub(crate) fn blocks(&self) -> u64 {
        if self.is_empty() {
            0
        } else {
            (CHECKPOINT_HEADER_BYTES + self.entry_bytes).div_ceil(BLOCK_SIZE) as u64
        }
    }

    /// Applies one change.
    pub(crate) fn apply(&mut self, change: &Change, value: &[u8]) {
        let Some(at) = self.find(&change.identity) else {
            let place = self.values.store(value);
            self.add_vector(change.identity, change.flags, change.created, value.len());
            self.vectors.last_mut().expect("just added").place = place;
            return;
        };
        if change.is_removal() && self.was_created(at) {
            // Created and removed within one context: nothing needs to be logged.
            self.forget(at);
            return;
        }
        self.supersede(at, change.flags, value.len());
        self.vectors[at].place = self.values.replace(self.vectors[at].place, value);
    }

    /// Where the item stands in `vectors`.
    pub(crate) fn find(&self, identity: &Identity) -> Option<usize> {
        let is_it = |at: u32| self.vectors[at as usize].identity == *identity;
        self.index.find(identity.hash, is_it).map(|at| at as usize)
    }

    /// Whether the item did not exist before this context.
    pub(crate) fn was_created(&self, at: usize) -> bool {
        self.vectors[at].created
    }

    /// Adds an item; its value follows.
    pub(crate) fn add_vector(
        &mut self,
        identity: Identity,
        flags: EntryFlags,
        created: bool,
        value_bytes: usize,
    ) {
        self.index.insert(identity.hash, self.vectors.len() as u32);
        let vector = LogVector {
            identity,
            place: ValuePlace::default(),
            value_bytes: value_bytes as u32,
            flags,
            created,
        };
        self.entry_bytes += vector.entry_bytes();
        self.vectors.push(vector);
    }

    /// The item has a newer state; its value follows.
    pub(crate) fn supersede(&mut self, at: usize, flags: EntryFlags, value_bytes: usize) {
        let vector = &mut self.vectors[at];
        let new_data = !flags.contains(EntryFlags::DELETE) && vector.is_unproven();
        vector.flags = if new_data { EntryFlags(flags.0 | EntryFlags::NEW_DATA.0) } else { flags };
        self.entry_bytes = self.entry_bytes + value_bytes - vector.value_bytes as usize;
        vector.value_bytes = value_bytes as u32;
    }

    /// Takes an item out.
    pub(crate) fn forget(&mut self, at: usize) {
        let vector = self.vectors.swap_remove(at);
        self.entry_bytes -= vector.entry_bytes();
        self.values.release(vector.place);
        self.index.remove(vector.identity.hash, at as u32);
        if let Some(moved) = self.vectors.get(at) {
            self.index.moved(moved.identity.hash, self.vectors.len() as u32, at as u32);
        }
    }

    fn value(&self, at: usize) -> &[u8] {
        if let Some(value) = self.boxed.value(at) {
            return value;
        }
        let vector = &self.vectors[at];
        self.values.value(vector.place, vector.value_bytes as usize)
    }

    /// The entries of its checkpoint, which calls no data new that was `lost`, in memory of
    /// [`Context::blocks`] blocks.
    pub(crate) fn format<'m>(
        &self,
        memory: &'m mut [u8],
        lost: &[LostBlocks],
    ) -> CheckpointBuilder<'m> {
        let mut builder = CheckpointBuilder::new(memory);
        for (at, vector) in self.vectors.iter().enumerate() {
            let Identity { tree, key, .. } = vector.identity;
            let value = self.value(at);
            let flags = flags_without(lost, key.kind, vector.flags, value);
            builder.push(CheckpointEntry { tree, key, flags, value });
        }
        debug_assert_eq!(builder.blocks(), self.blocks());
        builder
    }
}
