//! What came before the committed item list was optimised: insertion in two passes, after the
//! description in Dave Chinner's patch "xfs: optimise CIL insertion during transaction commit"
//! (2013) of the code that it replaced. For measurements only.
//!
//! As that text says, and as it is here:
//! - "an initial loop across the transaction items outside the lock to allocate log vectors,
//!   buffers and copy the data into": two allocations per item, for its vector and for its data, of
//!   exactly their sizes; nothing is used again;
//! - "a second pass across the log vectors that then inserts them into the CIL, modifies the CIL
//!   state and frees the old": under the lock, once for all items; "we are freeing objects with the
//!   spinlock held";
//! - what the patch puts into the same critical section (there busy extents and the accounting)
//!   takes the lock once more: here the decision whether the list is long enough to be pushed.
//!
//! Not as there: the order of pushes has a lock of its own, in cache lines of its own, as it has in
//! the optimised list; items are found in an index, where XFS has a pointer in its item; the
//! whiteout is younger than that patch. The batch copies a value once more than XFS did, which
//! costs a few nanoseconds. All of this is the same for both sides, or favours neither by much.
//!
//! Correctness is that of the optimised list: one critical section makes an operation's items
//! visible, in the same order. The tests of the log run with this insertion, too.
use super::Context;
use crate::batch::{Batch, Identity};
use crate::shared::Shared;
use cairn_environment::atomic::Ordering;
use cairn_format::{EntryFlags, LogSeq};

/// A log vector: one allocation for it, and one for its data.
#[derive(Debug)]
pub(super) struct Vector {
    identity: Identity,
    flags: EntryFlags,
    created: bool,
    pub(super) data: Box<[u8]>,
}

/// The first pass: allocates and copies, without a lock.
#[allow(clippy::vec_box)] // The vector's own allocation is what is measured.
fn prepare(batch: &Batch) -> Vec<Box<Vector>> {
    let vector_of = |(change, value): (&crate::batch::Change, &[u8])| {
        let (identity, flags, created) = (change.identity, change.flags, change.created);
        Box::new(Vector { identity, flags, created, data: value.into() })
    };
    batch.changes().map(vector_of).collect()
}

impl Context {
    /// Links one vector into the list and frees the one that it displaces.
    fn link(&mut self, vector: Box<Vector>) {
        let (flags, bytes) = (vector.flags, vector.data.len());
        let removal = flags.contains(EntryFlags::DELETE);
        let Some(at) = self.find(&vector.identity) else {
            self.add_vector(vector.identity, flags, vector.created, bytes);
            self.two_pass.push(vector);
            return;
        };
        if removal && self.vectors[at].created {
            self.forget(at);
            self.two_pass.swap_remove(at);
            return;
        }
        self.supersede(at, flags, bytes);
        self.two_pass[at] = vector;
    }
}

impl Shared {
    /// As [`crate::Log::two_pass_items`].
    pub(crate) fn two_pass_items(&self) -> usize {
        self.list.lock().current.two_pass.len()
    }

    /// As [`crate::Log::insert`].
    pub(crate) fn insert_in_two_passes(&self, batch: &mut Batch) -> LogSeq {
        let vectors = prepare(batch);
        batch.clear();
        let sequence = {
            let mut list = self.list.lock();
            let sequence = list.number_operation();
            if !self.dead.load(Ordering::Acquire) {
                vectors.into_iter().for_each(|vector| list.current.link(vector));
            }
            self.last.store(sequence.0, Ordering::Release);
            sequence
        };
        let next = self.list.lock().after_insertion(&self.options);
        self.do_next(next);
        sequence
    }
}
