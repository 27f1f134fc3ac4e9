//! What `baselines/` has, without the feature `baselines`: every mechanism is the product's, and
//! nothing is left of the calls.
use crate::item_list::ItemList;
use crate::item_list::batch::Batch;
use cairn_format::LogSeq;

/// Which mechanisms are replaced by what came before them: none, without the feature `baselines`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Baselines;

impl Baselines {
    pub(crate) fn insert(self, _: &ItemList, _: &mut Batch) -> Option<(LogSeq, bool)> {
        None
    }

    pub(crate) fn blocks_asked(self, needed: u64, _free: u64) -> u64 {
        needed
    }
}

pub(crate) mod boxed_values {
    //! Values that stand outside of a context's arena: none.

    #[derive(Debug, Default)]
    pub(crate) struct BoxedValues;

    impl BoxedValues {
        pub(crate) fn value(&self, _at: usize) -> Option<&[u8]> {
            None
        }

        pub(crate) fn clear(&mut self) {}
    }
}
