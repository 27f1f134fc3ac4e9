//! The values of a context's items as they were kept before the list had an arena: an allocation
//! for each vector, and one for its data.
use crate::item_list::batch::{Batch, Change, Identity};
use cairn_format::EntryFlags;

/// A log vector: one allocation for it, and one for its data.
#[derive(Debug)]
pub(crate) struct BoxedVector {
    pub(super) identity: Identity,
    pub(super) flags: EntryFlags,
    pub(super) created: bool,
    pub(super) data: Box<[u8]>,
}

/// Allocates a vector for each change and copies its value, without a lock.
#[allow(clippy::vec_box)] // The vector's own allocation is what is measured.
pub(super) fn prepare(batch: &Batch) -> Vec<Box<BoxedVector>> {
    let vector_of = |(change, value): (&Change, &[u8])| {
        let (identity, flags, created) = (change.identity, change.flags, change.created);
        Box::new(BoxedVector { identity, flags, created, data: value.into() })
    };
    batch.changes().map(vector_of).collect()
}

/// Beside a context's vectors, in the same order, what holds their values if items are inserted in
/// two passes; otherwise empty.
#[derive(Debug, Default)]
#[allow(clippy::vec_box)]
pub(crate) struct BoxedValues {
    pub(super) vectors: Vec<Box<BoxedVector>>,
}

impl BoxedValues {
    /// The value of the vector at `at`, if it is kept here.
    pub(crate) fn value(&self, at: usize) -> Option<&[u8]> {
        self.vectors.get(at).map(|vector| &vector.data[..])
    }

    pub(crate) fn clear(&mut self) {
        self.vectors.clear();
    }
}
