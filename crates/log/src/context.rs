//! A context: the newest state of every item that changed during a contiguous run of operations.
//!
//! An item has a log vector, which says what to log, and a place for its value in the [`Arena`]; neither is an allocation
//! of its own. Logging an item again overwrites both. A context that was written or dropped is emptied and used again with
//! all its memory, so that in the long run neither inserting nor switching the list allocates anything.
//!
//! Invariants: each item is there once; `index` tells where in `vectors`; `entry_bytes` is the sum over `vectors`; all
//! operations in it belong to one transaction. A context has no lock of its own; the list that it stands in has.
use crate::arena::{Arena, Place};
use crate::batch::{Change, Identity};
use crate::data::{Lost, flags_without};
use crate::index::Index;
use cairn_format::{
    BLOCK_SIZE, CHECKPOINT_HEADER_BYTES, CheckpointBuilder, CheckpointEntry, ENTRY_HEADER_BYTES, EntryFlags, Generation, LogSeq,
};

/// An emptied context keeps room for at most this many items.
const ITEMS_KEPT: usize = 16 * 1024;

/// The newest state of one item.
#[derive(Debug)]
struct LogVector {
    identity: Identity,
    place: Place,
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
    /// Transaction of its operations.
    pub(crate) generation: Generation,
    /// Its last operation.
    pub(crate) last: LogSeq,
}

impl Context {
    /// An empty context without memory.
    pub(crate) fn new(generation: Generation) -> Self {
        Self { index: Index::default(), vectors: Vec::new(), values: Arena::new(), entry_bytes: 0, generation, last: LogSeq(0) }
    }

    /// Empties the context and keeps its memory, within limits.
    pub(crate) fn clear(&mut self) {
        self.index.clear(ITEMS_KEPT);
        self.vectors.clear();
        self.vectors.shrink_to(ITEMS_KEPT);
        self.values.clear();
        self.entry_bytes = 0;
        self.last = LogSeq(0);
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
        if self.is_empty() { 0 } else { (CHECKPOINT_HEADER_BYTES + self.entry_bytes).div_ceil(BLOCK_SIZE) as u64 }
    }

    /// Applies one change.
    pub(crate) fn apply(&mut self, change: &Change, value: &[u8]) {
        let (identity, vectors) = (&change.identity, &self.vectors);
        let Some(at) = self.index.find(identity.hash, |at| vectors[at as usize].identity == *identity) else {
            return self.add(change, value);
        };
        let at = at as usize;
        let vector = &mut self.vectors[at];
        if change.is_removal() && vector.created {
            // Created and removed within one context: nothing needs to be logged.
            self.forget(at);
            return;
        }
        let new_data = !change.is_removal() && vector.is_unproven();
        vector.flags = if new_data { EntryFlags(change.flags.0 | EntryFlags::NEW_DATA.0) } else { change.flags };
        vector.place = self.values.replace(vector.place, value);
        self.entry_bytes = self.entry_bytes + value.len() - vector.value_bytes as usize;
        vector.value_bytes = value.len() as u32;
    }

    fn add(&mut self, change: &Change, value: &[u8]) {
        let Change { identity, flags, created, .. } = *change;
        self.index.insert(identity.hash, self.vectors.len() as u32);
        let place = self.values.store(value);
        let vector = LogVector { identity, place, value_bytes: value.len() as u32, flags, created };
        self.entry_bytes += vector.entry_bytes();
        self.vectors.push(vector);
    }

    fn forget(&mut self, at: usize) {
        let vector = self.vectors.swap_remove(at);
        self.entry_bytes -= vector.entry_bytes();
        self.values.release(vector.place);
        self.index.remove(vector.identity.hash, at as u32);
        if let Some(moved) = self.vectors.get(at) {
            self.index.moved(moved.identity.hash, self.vectors.len() as u32, at as u32);
        }
    }

    /// The entries of its checkpoint, which calls no data new that was `lost`.
    pub(crate) fn format(&self, lost: &[Lost]) -> CheckpointBuilder {
        let mut builder = CheckpointBuilder::with_capacity(self.entry_bytes);
        for vector in &self.vectors {
            let Identity { tree, key, .. } = vector.identity;
            let value = self.values.value(vector.place, vector.value_bytes as usize);
            let flags = flags_without(lost, key.kind, vector.flags, value);
            builder.push(CheckpointEntry { tree, key, flags, value });
        }
        debug_assert_eq!(builder.blocks(), self.blocks());
        builder
    }
}
