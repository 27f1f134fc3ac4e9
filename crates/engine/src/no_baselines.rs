//! What `baselines.rs` has, without the feature `baselines`: every mechanism is the product's, and
//! nothing is left of the calls.
use cairn_btree::NodeCache;
use cairn_space::{Reclaimer, Space};
use std::sync::{Arc, Weak};

/// Which mechanisms are replaced by what came before them: none, without the feature `baselines`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Baselines {}

impl Baselines {
    pub(crate) fn node_cache(self, cache: Arc<NodeCache>) -> Arc<NodeCache> {
        cache
    }

    pub(crate) fn of_the_log(self) -> cairn_log::Baselines {
        cairn_log::Baselines::default()
    }

    pub(crate) fn start_reclaim(self, space: &Arc<Space>, reclaimer: Weak<dyn Reclaimer>) {
        space.start(reclaimer);
    }
}
