//! What makes room when a ticket waits for space: writing delayed data, removing what has no name,
//! committing.
//!
//! `cairn_space` calls this on a thread of its own, on which others wait. So an inode's extents
//! mutex is tried, and a file that another thread writes is awaited only as long as that thread
//! certainly goes on.
use super::Files;
use super::inode::Inode;
use crate::store::operation::Effort;
use cairn_environment::atomic::Ordering;
use cairn_environment::clock;
use cairn_space::Reclaimer;
use std::sync::Arc;
use std::time::Duration;

/// How often reclaim looks whether another thread has written a file.
const WRITER_PAUSE: Duration = Duration::from_millis(1);
/// So often it looks at one that is locked and not written.
const OTHER_HOLDER_LOOKS: u32 = 10;

impl Files {
    /// Writes a file's dirty data. False if another thread has it locked, which may wait for this
    /// one.
    fn write_back_for_reclaim(&self, inode: &Arc<Inode>) -> bool {
        let Some(_extents) = self.try_lock_extents(inode) else { return false };
        if let Err(error) = self.write_back_locked(inode, Effort::Reclaim) {
            tracing::debug!("reclaim could not write inode {}: {error}", inode.number);
        }
        true
    }

    /// Writes a file's dirty data as soon as no other thread does, or until one other write-back
    /// was seen from its beginning to its end. Such a thread waits for commits only
    /// ([`Effort::Writeback`]), so this wait ends. Others that have the file locked may wait for
    /// this thread, so they get only a few looks.
    fn await_write_back(&self, inode: &Arc<Inode>, enough: &dyn Fn() -> bool) {
        let write_backs = || inode.write_backs.load(Ordering::Acquire);
        let begin = write_backs();
        let last = begin + 2 + begin % 2;
        let mut looks = 0;
        while !enough()
            && write_backs() < last
            && looks < OTHER_HOLDER_LOOKS
            && !self.write_back_for_reclaim(inode)
        {
            looks += u32::from(write_backs() % 2 == 0);
            clock::sleep(WRITER_PAUSE);
        }
    }
}

impl Reclaimer for Files {
    fn write_delayed_data(&self, blocks: Option<u64>, enough: &dyn Fn() -> bool) {
        let before = self.store.delayed_blocks.load(Ordering::Relaxed);
        let inodes: Vec<_> = self.dirty_inodes.lock().values().cloned().collect();
        let mut busy = Vec::new();
        for inode in inodes {
            let written = before.saturating_sub(self.store.delayed_blocks.load(Ordering::Relaxed));
            if blocks.is_some_and(|blocks| written >= blocks) || enough() {
                return;
            }
            if !self.write_back_for_reclaim(&inode) {
                busy.push(inode);
            }
        }
        if blocks.is_none() {
            busy.iter().for_each(|inode| self.await_write_back(inode, enough));
        }
    }

    fn commit(&self) {
        self.reap_queued();
        let done = self.store.commit_and_unpin();
        if let Err(error) = done {
            tracing::debug!("reclaim could not commit: {error}");
        }
    }
}
