//! A context: the newest state of every item that changed during a contiguous run of operations.
//!
//! Invariants: each item is there once; `index` tells where in `vectors`; `entry_bytes` is the sum over `vectors`; all
//! operations in it belong to one transaction. A context has no lock of its own; the list that it stands in has.
use crate::batch::{Identity, LogVector, Merged};
use crate::data::{Lost, flags_without};
use cairn_format::{BLOCK_SIZE, CHECKPOINT_HEADER_BYTES, CheckpointBuilder, CheckpointEntry, Generation, LogSeq};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};

/// Most items for which a new context makes room beforehand.
const CAPACITY_MAX: usize = 16 * 1024;

/// Hands on the hash that an [`Identity`] carries.
#[derive(Default)]
pub(crate) struct CarriedHash(u64);

impl Hasher for CarriedHash {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        debug_assert!(bytes.is_empty(), "an identity hashes as one number");
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

pub(crate) struct Context {
    index: HashMap<Identity, usize, BuildHasherDefault<CarriedHash>>,
    vectors: Vec<LogVector>,
    entry_bytes: usize,
    /// Transaction of its operations.
    pub(crate) generation: Generation,
    /// Its last operation.
    pub(crate) last: LogSeq,
}

impl Context {
    /// An empty context with room for about as many items as the one before it had.
    pub(crate) fn with_capacity(items: usize, generation: Generation) -> Self {
        let capacity = items.min(CAPACITY_MAX);
        Self {
            index: HashMap::with_capacity_and_hasher(capacity, BuildHasherDefault::default()),
            vectors: Vec::with_capacity(capacity),
            entry_bytes: 0,
            generation,
            last: LogSeq(0),
        }
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

    /// Blocks that its checkpoint takes; an empty context needs no checkpoint.
    pub(crate) fn blocks(&self) -> u64 {
        if self.is_empty() { 0 } else { (CHECKPOINT_HEADER_BYTES + self.entry_bytes).div_ceil(BLOCK_SIZE) as u64 }
    }

    /// Applies one change. What is no longer needed goes back into `newer`.
    pub(crate) fn apply(&mut self, newer: &mut LogVector) {
        let at = match self.index.entry(newer.identity) {
            Entry::Vacant(entry) => {
                entry.insert(self.vectors.len());
                let vector = newer.take();
                self.entry_bytes += vector.entry_bytes();
                self.vectors.push(vector);
                return;
            }
            Entry::Occupied(entry) => *entry.get(),
        };
        self.entry_bytes -= self.vectors[at].entry_bytes();
        match self.vectors[at].merge(newer) {
            Merged::Kept => self.entry_bytes += self.vectors[at].entry_bytes(),
            Merged::Whiteout => self.forget(at, newer),
        }
    }

    fn forget(&mut self, at: usize, displaced: &mut LogVector) {
        self.index.remove(&displaced.identity);
        *displaced = self.vectors.swap_remove(at);
        if let Some(moved) = self.vectors.get(at) {
            self.index.insert(moved.identity, at);
        }
    }

    /// The entries of its checkpoint, which calls no data new that was `lost`.
    pub(crate) fn format(&self, lost: &[Lost]) -> CheckpointBuilder {
        let mut builder = CheckpointBuilder::with_capacity(self.entry_bytes);
        for vector in &self.vectors {
            let Identity { tree, key, .. } = vector.identity;
            let flags = flags_without(lost, key.kind, vector.flags, &vector.value);
            builder.push(CheckpointEntry { tree, key, flags, value: &vector.value });
        }
        debug_assert_eq!(builder.blocks(), self.blocks());
        builder
    }
}
