//! What came before the committed item list was optimised: insertion in two passes, after the
//! description in Dave Chinner's patch "xfs: optimise CIL insertion during transaction commit"
//! (2013) of the code that it replaced.
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
use super::boxed_values::{BoxedVector, prepare};
use crate::item_list::ItemList;
use crate::item_list::batch::Batch;
use crate::item_list::context::Context;
use cairn_format::{EntryFlags, LogSeq};

/// As [`ItemList::insert`].
pub(super) fn insert(list: &ItemList, batch: &mut Batch) -> (LogSeq, bool) {
    let (vectors, needs_commit) = (prepare(batch), batch.needs_commit());
    batch.clear();
    let sequence = list.add_operation(&mut list.lock(), |context| {
        vectors.into_iter().for_each(|vector| link(context, vector));
        context.note_need(needs_commit);
    });
    let upkeep = list.lock().upkeep();
    (sequence, list.keep_up(upkeep))
}

/// Links one vector into the list and frees the one that it displaces.
fn link(context: &mut Context, vector: Box<BoxedVector>) {
    let (flags, bytes) = (vector.flags, vector.data.len());
    let removal = flags.contains(EntryFlags::DELETE);
    let Some(at) = context.find(&vector.identity) else {
        context.add_vector(vector.identity, flags, vector.created, bytes);
        context.boxed.vectors.push(vector);
        return;
    };
    if removal && context.was_created(at) {
        context.forget(at);
        context.boxed.vectors.swap_remove(at);
        return;
    }
    context.supersede(at, flags, bytes);
    context.boxed.vectors[at] = vector;
}
