//! Copy-on-write B-trees with a lock per node, and the cache that holds their nodes.
//!
//! A node belongs to the transaction that made it. A change to a node of an older transaction moves it to a new place first;
//! a node of the running one is changed in place, in memory. At the cut, [`NodeCache::take_dirty`] takes the nodes of the
//! transaction; from then on they are frozen by themselves, because the next transaction copies them, and
//! [`NodeCache::write`] writes them while it runs.
//!
//! The idea of sleeping fair locks per node, taken hand over hand, is that of btrfs' tree locks; preemptive splitting and
//! merging on the way down keeps the number of locks that are held at once constant.
//!
//! Lock discipline: `TREE_ROOT`, then `NODE` from the root down, then `NODE_CACHE`, `NODE_DIRTY` and the allocator's locks.
//! No exclusive lock is held while the device works.
#![forbid(unsafe_code)]

mod bound;
mod cache;
mod change;
mod descent;
mod dirty;
mod error;
mod expected;
mod handle;
mod page;
mod range;
mod shard;
mod statistics;
mod tree;

pub use cache::NodeCache;
pub use change::Change;
pub use dirty::{DirtyNodes, WriteReport};
pub use error::TreeError;
pub use range::Range;
pub use statistics::CacheStatistics;
pub use tree::Tree;

#[cfg(all(test, not(feature = "shuttle")))]
mod cache_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod concurrency_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod damage_tests;
#[cfg(all(test, feature = "shuttle"))]
mod shuttle_tests;
#[cfg(test)]
mod test_support;
#[cfg(all(test, not(feature = "shuttle")))]
mod tree_tests;
