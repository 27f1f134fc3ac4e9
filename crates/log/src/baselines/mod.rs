//! What came before the log's mechanisms, beside them in one program, so that `cairn bench ab` can
//! compare them in turns. For measurements only.
//!
//! This folder is the crate's one seam for predecessors: with the feature `baselines` it is
//! compiled, without it `no_baselines/` stands in its place, where every choice is the product's
//! and every type is empty. The product has no other condition on the feature.
//!
//! - M5, [`Baselines::two_pass_insertion`]: `two_pass.rs` inserts in two passes; the contexts hold
//!   the values in `boxed_values.rs`.
//! - Group commit as such, [`Baselines::commits_only`]: no push finds room in the ring, so that
//!   every fsync waits for a transaction commit. M1 is measured with and without it.
use crate::item_list::ItemList;
use crate::item_list::batch::Batch;
use cairn_format::LogSeq;

pub(crate) mod boxed_values;
mod inspection;
mod two_pass;
#[cfg(all(test, not(feature = "shuttle")))]
mod two_pass_tests;

/// Which mechanisms are replaced by what came before them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Baselines {
    /// Insert items as it was done before the list was optimised.
    pub two_pass_insertion: bool,
    /// Nothing is ever written to the ring: each request for durability gets a transaction commit.
    pub commits_only: bool,
}

impl Baselines {
    /// Inserts in two passes, if that is chosen: the operation's number, and whether the list has
    /// become long.
    pub(crate) fn insert(self, list: &ItemList, batch: &mut Batch) -> Option<(LogSeq, bool)> {
        self.two_pass_insertion.then(|| two_pass::insert(list, batch))
    }

    /// The blocks that a push asks of a ring with `free` free ones: too many, if nothing may be
    /// written to it.
    pub(crate) fn blocks_asked(self, needed: u64, free: u64) -> u64 {
        if self.commits_only { needed.max(free + 1) } else { needed }
    }
}
