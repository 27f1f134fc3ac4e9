//! Inodes and the data of files: their attributes, pages, extents, and how they reach the store.
//!
//! An [`Inode`] in memory has the state of one inode, and pages that are not written yet.
//!
//! - Reading and writing: [`read`], [`write`](mod@write), [`planned_read`], [`allocate`],
//!   [`attributes`], [`xattr`].
//! - Blocks: [`extents`] maps a file to the device, [`data_cache`] keeps clean blocks.
//! - From memory to the store: [`writeback`] (one file), [`fsync`], [`sync`] (all files),
//!   [`dirty`] (too much is dirty), [`reclaim`] (space is short).
//! - Shrinking: [`truncate`], and [`orphans`] for what has no name any more.
//!
//! What a name is, only the layer above knows. [`inode`] has the order of locks.
pub(crate) mod allocate;
pub(crate) mod attributes;
pub(crate) mod data_cache;
mod dirty;
pub(crate) mod extents;
mod forks;
pub(crate) mod fsync;
pub(crate) mod inode;
pub(crate) mod locking;
pub(crate) mod long_reads;
pub(crate) mod offsets;
pub(crate) mod orphans;
pub(crate) mod pages;
mod pieces;
pub(crate) mod planned_read;
pub(crate) mod read;
mod reclaim;
pub(crate) mod removal_queue;
pub(crate) mod snapshots;
pub(crate) mod staged;
mod subvolumes;
pub(crate) mod sync;
mod temporary_snapshots;
pub(crate) mod throttle;
pub(crate) mod truncate;
mod write;
mod write_behind;
pub(crate) mod writeback;
pub(crate) mod xattr;

use crate::VolumeOptions;
use crate::store::Store;
use cairn_blockdev::BlockPool;
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use data_cache::DataCache;
use inode::{DirtyInodes, Inode, InodeState, InodeTable};
use long_reads::LongReads;
use removal_queue::{Orphans, RemovalQueue};
use std::collections::BTreeMap;
use std::sync::Arc;
use throttle::DirtyThrottle;
use write_behind::WriteBehind;

/// Of the memory for dirty file data, this part is kept for later when it is not in use.
const UNUSED_BUFFERS_SHARE: u64 = 4;

/// The inodes and file data of an open volume.
pub(crate) struct Files {
    store: Arc<Store>,
    pub(crate) inodes: InodeTable,
    /// Memory for file data.
    pub(crate) buffers: BlockPool,
    /// Clean file data.
    pub(crate) data_cache: DataCache,
    dirty_inodes: Arc<DirtyInodes>,
    dirty_throttle: DirtyThrottle,
    write_behind: WriteBehind,
    orphans: Orphans,
    long_reads: LongReads,
}

impl Files {
    /// On `store`, which observes `removals`.
    pub(crate) fn new(
        store: Arc<Store>,
        removals: Arc<RemovalQueue>,
        options: &VolumeOptions,
    ) -> Self {
        let unused_bytes_max = options.dirty_data_bytes_max / UNUSED_BUFFERS_SHARE;
        Self {
            store,
            inodes: InodeTable::new(options.inode_cache_entries),
            buffers: BlockPool::new(usize::try_from(unused_bytes_max).unwrap_or(usize::MAX)),
            data_cache: DataCache::new(options.data_cache_bytes),
            dirty_inodes: Arc::new(Mutex::new(Rank::LEAF, BTreeMap::new())),
            dirty_throttle: DirtyThrottle::new(),
            write_behind: WriteBehind::new(),
            orphans: Orphans::new(removals),
            long_reads: LongReads::new(),
        }
    }

    /// Ends the background threads, after the store has stopped.
    pub(crate) fn stop_threads(&self) {
        self.write_behind.stop();
        self.buffers.stop_supply();
        self.data_cache.pool().stop_supply();
    }

    /// Remembers that the inode has something to write. Its state lock is held.
    fn list_dirty(&self, inode: &Arc<Inode>) {
        self.dirty_inodes.lock().entry(inode.number).or_insert_with(|| inode.clone());
    }

    /// Takes the inode off the list if it has nothing to write. Its state lock is held.
    fn unlist_clean(&self, inode: &Arc<Inode>, state: &InodeState) {
        if !state.is_dirty() {
            self.dirty_inodes.lock().remove(&inode.number);
        }
    }
}
