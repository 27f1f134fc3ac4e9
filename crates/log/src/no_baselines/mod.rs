//! What `baselines/` has, without the feature `baselines`: every mechanism is the product's, and
//! nothing is left of the calls.
use crate::item_list::ItemList;
use crate::item_list::batch::Batch;
use cairn_format::LogSeq;

pub(crate) mod boxed_values;

/// Which mechanisms are replaced by what came before them: none, without the feature `baselines`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Baselines {}

impl Baselines {
    pub(crate) fn insert(self, _: &ItemList, _: &mut Batch) -> Option<(LogSeq, bool)> {
        None
    }

    pub(crate) fn blocks_asked(self, needed: u64, _free: u64) -> u64 {
        needed
    }
}
