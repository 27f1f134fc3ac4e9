//! Copy-on-write B-trees with a lock per node, and the cache that holds their nodes.
//!
//! A node belongs to the transaction that made it. A change to a node of an older transaction moves
//! it to a new place first; a node of the running one is changed in place, in memory. At the cut,
//! [`NodeCache::take_dirty`] takes the nodes of the transaction; from then on they are frozen by
//! themselves, because the next transaction copies them, and [`NodeCache::write`] writes them while
//! it runs.
//!
//! The idea of sleeping fair locks per node, taken hand over hand, is that of btrfs' tree locks;
//! preemptive splitting and merging on the way down keeps the number of locks that are held at once
//! constant. A lookup whose way is known in memory takes the leaf's lock only (`quick.rs`), as in
//! optimistic lock coupling (Leis and others, 2016), with tables instead of versions.
//!
//! The files, each importing only from those before it:
//!
//! | files | what they hold |
//! |---|---|
//! | `error`, `statistics`, `page`, `edit`, `expected` | values and decisions, without locks |
//! | `node_lock` | M2: the lock of a node |
//! | `routes`, `handle` | nodes in memory, the routes between them, and guards |
//! | `shard`, `dirty`, `cache`, `cut` | the cache, and the write of a transaction's nodes |
//! | `tree`, `walk`, `quick` | the root pointer, and the two ways to a node: with locks, without |
//! | `lookup`, `range`, `difference` | what reads |
//! | `copy_on_write`, `descent`, `change`, `bound` | what changes |
//!
//! Lock discipline: `TREE_ROOT`, then `NODE` from the root down, then `NODE_CACHE`, `NODE_DIRTY`
//! and the allocator's locks. No exclusive lock is held while the device works.
//!
//! ```
//! use cairn_blockdev::{BlockDevice, MemoryDevice};
//! use cairn_btree::{Change, NodeCache, Tree};
//! use cairn_format::{Generation, Geometry, INODE_ROOT, ItemKind, Key, TREE_FILES, VolumeId};
//! use cairn_space::{Request, Space, Urgency};
//! use std::sync::Arc;
//!
//! let geometry = Geometry::for_size(64 << 20, None).unwrap();
//! let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(64 << 20));
//! let space = Space::new(geometry, Space::fresh_bitmaps(&geometry));
//! let cache = NodeCache::new(Arc::clone(&device), VolumeId([1; 16]), geometry, 16 << 20);
//!
//! // A transaction changes a tree.
//! let nodes = 1 + Tree::worst_case_nodes(1, 0);
//! let reservation = space.reserve(Request { data_blocks: 0, nodes }, Urgency::Ordinary)?;
//! let change = Change { generation: Generation(1), reservation: &reservation };
//! let tree = Tree::create(Arc::clone(&cache), Arc::clone(&space), TREE_FILES, &change)?;
//! let key = Key::new(INODE_ROOT, ItemKind::Extent, 7);
//! assert_eq!(tree.insert(&change, key, b"value")?, None);
//!
//! // Its commit: cut, write, flush; the superblock then says where the root is.
//! let dirty = cache.take_dirty(Generation(1));
//! assert_eq!(cache.write(&dirty)?.nodes, 1);
//! device.flush()?;
//! let root = tree.root();
//!
//! // The next mount.
//! let cache = NodeCache::new(device, VolumeId([1; 16]), geometry, 16 << 20);
//! let tree = Tree::open(cache, space, TREE_FILES, root);
//! assert_eq!(tree.last(Key::all(INODE_ROOT, ItemKind::Extent))?, Some((key, b"value".to_vec())));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

#[cfg(feature = "baselines")]
mod baselines;
mod bound;
mod cache;
mod change;
mod copy_on_write;
mod count;
mod cut;
mod descent;
mod difference;
mod dirty;
mod edit;
mod end;
mod error;
mod expected;
mod fetch_many;
mod handle;
mod lookup;
mod node_lock;
mod own;
mod page;
mod quick;
mod range;
mod read_ahead;
mod routes;
mod shard;
mod statistics;
mod tree;
mod visit;
mod walk;

pub use cache::NodeCache;
pub use copy_on_write::Change;
pub use cut::{DirtyNodes, WriteReport};
pub use difference::{Differences, ItemDifference};
pub use error::TreeError;
pub use own::OwnNodes;
pub use range::Range;
pub use statistics::CacheStatistics;
pub use tree::Tree;

#[cfg(all(test, not(feature = "shuttle")))]
mod cache_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod concurrency_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod damage_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod difference_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod order_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod own_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod page_tests;
#[cfg(all(test, not(feature = "shuttle"), not(feature = "baselines")))]
mod quick_tests;
#[cfg(all(test, feature = "shuttle"))]
mod shuttle_tests;
#[cfg(test)]
mod test_support;
#[cfg(all(test, not(feature = "shuttle")))]
mod tree_tests;
