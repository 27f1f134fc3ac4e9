//! The layers of an open volume, and the operations that need all of them: opening, closing,
//! trimming, free space.
use crate::file::Files;
use crate::file::removal_queue::RemovalQueue;
use crate::names::Names;
use crate::names::directory::CREATION_ITEMS;
use crate::store::Store;
use crate::store::recovery::meter::{RecoveryMeter, RecoveryPhase};
use crate::types::SpaceInfo;
use crate::{Result, VolumeOptions};
use cairn_blockdev::BlockDevice;
use cairn_format::{BLOCK_SIZE, NODE_BLOCKS};
use cairn_space::Reclaimer;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

/// So many empty files fit, about, into the room of a block: an inode and a name each, in leaves
/// that are half to wholly full.
const INODES_PER_BLOCK: u64 = 8;

/// The layers of an open volume, from the bottom to the top.
pub(crate) struct Layers {
    pub(crate) store: Arc<Store>,
    pub(crate) files: Arc<Files>,
    pub(crate) names: Arc<Names>,
    /// What opening the volume took; known when it is open.
    pub(crate) recovery: OnceLock<Vec<RecoveryPhase>>,
}

impl Layers {
    /// Steps 1 to 6 of recovery.
    pub(crate) fn recover(
        device: Arc<dyn BlockDevice>,
        options: VolumeOptions,
        meter: &mut RecoveryMeter<'_>,
    ) -> Result<Self> {
        let removals = Arc::new(RemovalQueue::new());
        let store = Arc::new(Store::recover(device, options, removals.clone(), meter)?);
        let files = Arc::new(Files::new(store.clone(), removals, &store.options));
        let names = Arc::new(Names::new(store.clone(), files.clone()));
        Ok(Self { store, files, names, recovery: OnceLock::new() })
    }

    /// From now on, a ticket that finds no space may wait for it.
    pub(crate) fn start_reclaim(&self) {
        let files: Weak<Files> = Arc::downgrade(&self.files);
        let reclaimer: Weak<dyn Reclaimer> = files;
        self.store.options.baselines.start_reclaim(&self.store.space, reclaimer);
    }

    /// Makes everything durable, and marks the volume clean.
    pub(crate) fn finish(&self) -> Result<()> {
        self.store.check_alive()?;
        let background = self.store.options.background;
        self.files.interrupt_subvolume_removals();
        // Data of what was removed is not written any more, which would take space.
        if background {
            self.files.drain_orphans();
        } else {
            self.files.reap_waiting();
        }
        // With data on its way, the commit does not learn how that ends.
        let written = if self.store.log.unwritten_blocks() > 0 {
            self.files.settle_all()
        } else {
            self.files.write_back_all()
        };
        if background {
            self.files.drain_orphans();
        }
        let committed = self.store.commit_last(written.is_ok());
        written.and(committed)
    }

    /// Discards the free blocks of the volume in `bytes` that lie in runs of at least
    /// `least_bytes`; returns how many bytes.
    /// 1. What was removed becomes free: inodes without names end, and the transaction is
    ///    committed.
    /// 2. Run by run, free blocks are held, discarded, and released. *A crash: nothing durable
    ///    refers to any of them.*
    pub(crate) fn trim(&self, bytes: Range<u64>, least_bytes: u64) -> Result<u64> {
        self.store.check_writable()?;
        if self.store.options.background {
            self.files.drain_orphans();
        }
        self.store.commit_and_unpin()?;
        self.store.discard_free(bytes, least_bytes)
    }

    /// What a writer can really get: also what comes back when delayed data is written, a commit
    /// unpins, and removed files are gone; but not the last few blocks, with which no file could be
    /// created.
    pub(crate) fn space_info(&self) -> SpaceInfo {
        let report = self.store.space.report();
        let least_blocks = self.store.trees.shown().worst_case_joined(CREATION_ITEMS) * NODE_BLOCKS;
        let available_blocks = if self.store.storage_room.is_tight() {
            0
        } else {
            report.obtainable_blocks.saturating_sub(least_blocks)
        };
        let inodes = self.store.inode_count.get();
        SpaceInfo {
            total_blocks: report.total_blocks,
            free_blocks: (report.total_blocks + report.returning)
                .saturating_sub(report.used + report.reserved_data),
            available_blocks,
            inodes,
            inodes_available: if inodes > 0 { available_blocks * INODES_PER_BLOCK } else { 0 },
            block_size: BLOCK_SIZE as u32,
        }
    }
}
