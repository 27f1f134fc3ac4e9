//! Removing inodes that lost their last name, once they are not in use; finishing what a crash
//! interrupted.
//!
//! An unlinked inode that is still referenced waits in `unlinked`; giving its last reference back
//! queues it. The queue is worked off by a thread of its own when the volume has background
//! threads, otherwise at once.
use crate::InodeId;
use crate::file::Files;
use crate::file::inode::Inode;
use crate::file::removal_queue::{Orphan, Removal, Taken};
use crate::store::operation::Effort;
use crate::store::recovery::meter::RecoveryMeter;
use crate::{Error, Result};
use cairn_format::{INODE_ORPHANS, ItemKind, Key, OrphanKind, decode_orphan};
use std::sync::Arc;

/// Key of an inode's orphan item.
pub(crate) fn orphan_key(inode: InodeId) -> Key {
    Key::new(INODE_ORPHANS, ItemKind::Orphan, inode.number().0)
}

impl Files {
    /// Called after an inode lost its last name.
    pub(crate) fn reap_if_unused(&self, number: InodeId) {
        self.orphans.unlinked.lock().insert(number);
        // Look after inserting: a reference given back before would not have seen it.
        if !self.inodes.is_referenced(number) {
            self.queue_orphan(number);
        }
    }

    /// An unnamed inode was created or opened: when its reference goes, so does it.
    pub(crate) fn note_unlinked(&self, number: InodeId) {
        self.orphans.unlinked.lock().insert(number);
    }

    /// It has a name again.
    pub(crate) fn note_linked(&self, number: InodeId) {
        self.orphans.unlinked.lock().remove(&number);
    }

    /// Gives back references.
    pub(crate) fn forget(&self, number: InodeId, count: u64) {
        if self.inodes.release(number, count) && self.orphans.unlinked.lock().contains(&number) {
            self.queue_orphan(number);
        }
    }

    /// Gives back all references.
    pub(crate) fn forget_all(&self) {
        self.inodes.release_all();
        let unlinked: Vec<_> = self.orphans.unlinked.lock().iter().copied().collect();
        unlinked.into_iter().for_each(|number| self.queue_orphan(number));
    }

    fn queue_orphan(&self, number: InodeId) {
        if !self.orphans.unlinked.lock().remove(&number) || self.store.options.read_only {
            return;
        }
        if !self.store.options.background {
            return self.reap(Orphan::inode(number, 0));
        }
        let blocks = self.read_inode(&self.inodes.get(number)).map_or(0, |state| state.item.blocks);
        // A damaged inode may say anything.
        let blocks = blocks.min(self.store.superblock.geometry.total_blocks);
        self.store.space.announce(blocks);
        self.orphans.queue.push(Orphan::inode(number, blocks));
    }

    /// Up to `freed` of the blocks that are `counted` for an inode are free now.
    pub(crate) fn note_freed(&self, counted: &mut u64, freed: u64) {
        let freed = freed.min(*counted);
        *counted -= freed;
        self.store.space.retract(freed);
    }

    /// Has it removed, at once if no thread of its own does that.
    pub(super) fn queue(&self, orphan: Orphan) {
        if self.store.options.background {
            self.orphans.queue.push(orphan);
        } else {
            self.reap(orphan);
        }
    }

    /// What deleted snapshots or subvolumes had was freed, or what became of it.
    pub(super) fn note_freed_or_retry(&self, orphan: Orphan, done: Result<()>) {
        match done {
            Ok(()) => self.orphans.queue.note_done(orphan),
            // Who reads it has it tried again when that ends.
            Err(Error::Busy | Error::Aborted(_) | Error::Closed) => {}
            Err(Error::NoSpace) => self.orphans.queue.postpone(orphan),
            Err(error) => {
                if self.orphans.queue.retry_later(orphan) {
                    tracing::warn!(
                        "what deleted snapshots or subvolumes had could not be freed, and is tried \
                         again later: {error}"
                    );
                }
            }
        }
    }

    pub(super) fn reap(&self, orphan: Orphan) {
        match orphan.removal {
            Removal::Subvolume => return self.reap_subvolume(orphan),
            Removal::DeadRuns => return self.reap_dead_runs(orphan),
            Removal::ForeignNames => return self.reap_foreign_names(orphan),
            Removal::Inode | Removal::Tail => {}
        }
        let inode = self.inodes.get(orphan.number);
        let _extents = self.lock_extents(&inode);
        self.reap_locked(&inode, orphan, Effort::Removal);
    }

    /// The extents mutex is held.
    fn reap_locked(&self, inode: &Arc<Inode>, orphan: Orphan, effort: Effort) {
        let Orphan { number, blocks: mut counted, removal } = orphan;
        let result = match removal {
            Removal::Tail => self.settle_truncation(inode),
            _ => self.remove_inode(inode, effort, &mut counted),
        };
        if matches!(result, Err(Error::NoSpace)) {
            self.store.space.retract(counted);
            self.orphans.queue.postpone(Orphan { blocks: counted, ..orphan });
            return;
        }
        self.note_freed(&mut counted, u64::MAX);
        match result {
            Ok(()) | Err(Error::Aborted(_) | Error::Closed | Error::Stale) => {}
            // It stays an orphan on the volume; the next mount tries again.
            Err(error) => tracing::warn!("inode {number} could not be removed: {error}"),
        }
    }

    /// Body of the thread that removes orphans.
    pub(crate) fn run_reaper(&self) {
        while let Some(taken) = self.orphans.queue.wait_and_take() {
            self.reap(taken.orphan);
        }
    }

    /// Removes what waits in the queue, on this thread: for a volume without background threads.
    pub(crate) fn reap_waiting(&self) {
        while let Some(taken) = self.orphans.queue.take() {
            self.reap(taken.orphan);
        }
    }

    /// Waits until everything queued is removed, or lacks the space to be.
    pub(crate) fn drain_orphans(&self) {
        self.orphans.queue.wait_until_idle();
    }

    /// Removes queued inodes on this thread, without waiting for space or for another thread; used
    /// by reclaim.
    pub(crate) fn reap_queued(&self) {
        // Those that lacked space may find it now.
        let postponed =
            self.orphans.queue.take_postponed(|blocks| self.store.space.announce(blocks));
        let mut busy = Vec::new();
        for taken in postponed.into_iter().chain(std::iter::from_fn(|| self.orphans.queue.take())) {
            let inode = self.inodes.get(taken.orphan.number);
            // Others wait for space. The holder of the mutex may wait for this very thread.
            if taken.orphan.removal == Removal::Inode
                && let Some(_extents) = self.try_lock_extents(&inode)
            {
                self.reap_locked(&inode, taken.orphan, Effort::Reclaim);
            } else {
                busy.push(taken);
            }
        }
        busy.into_iter().for_each(Taken::give_back);
    }

    /// At mount: does what the orphan items of the open subvolumes say. What can't be done (a full
    /// volume, damage) stays for the next mount.
    pub(crate) fn finish_orphans(&self, meter: &mut RecoveryMeter<'_>) {
        let mut done = 0;
        for subvolume in self.store.trees.open_subvolumes() {
            let root = InodeId::root_of(subvolume.slot);
            for item in subvolume.tree().range(Key::all(INODE_ORPHANS, ItemKind::Orphan)) {
                done += 1;
                meter.at("unfinished removals", done, 0);
                let finished = item.map_err(Error::from).and_then(|(key, value)| {
                    let kind = self.store.of_item(root, &key, decode_orphan(&value))?;
                    // There is no inode with an impossible number.
                    match InodeId::of_number(root.slot(), key.offset) {
                        Some(number) => self.finish_orphan(number, kind),
                        None => Ok(()),
                    }
                });
                if let Err(error) = finished {
                    tracing::warn!("an unfinished removal has to wait: {error}");
                }
            }
        }
    }

    fn finish_orphan(&self, number: InodeId, kind: OrphanKind) -> Result<()> {
        let inode = self.inodes.get(number);
        let _extents = self.lock_extents(&inode);
        match kind {
            OrphanKind::Remove => self.remove_inode(&inode, Effort::Removal, &mut 0),
            OrphanKind::Truncate => self.finish_truncation(&inode),
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "orphans_tests.rs"]
mod tests;
