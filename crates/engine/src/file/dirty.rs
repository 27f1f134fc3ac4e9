//! What a writer does when memory holds too much dirty data: it writes some out itself, of
//! whichever file's turn it is. [`super::throttle`] limits how many do so at once.
use super::Files;
use super::inode::Inode;
use crate::InodeId;
use crate::Result;
use crate::store::operation::Effort;
use cairn_environment::atomic::Ordering;
use cairn_format::BLOCK_SIZE;
use cairn_space::Reservation;
use std::ops::Bound;
use std::sync::Arc;

/// A writer writes out this many times what it is about to make dirty.
const SHARE: u64 = 2;
/// When nothing can be written, dirty data may reach this many times the limit; then writers get
/// errors.
const STUCK_SHARE: u64 = 2;
/// Files that a writer looks at before it writes its own.
const LOOKS_MAX: usize = 64;

impl Files {
    /// Makes a writer that is about to write `blocks` write when memory holds too much dirty data.
    pub(crate) fn throttle_dirty_data(&self, inode: &Arc<Inode>, blocks: u64) -> Result<()> {
        let limit = self.store.options.dirty_data_bytes_max / BLOCK_SIZE as u64;
        let dirty = || self.store.delayed_blocks.load(Ordering::Relaxed);
        if dirty() <= limit {
            return Ok(());
        }
        let _place = self.dirty_throttle.enter();
        let (mut written, mut looks, mut failure) = (0, 0, None);
        while dirty() > limit && written < blocks * SHARE && looks < LOOKS_MAX {
            looks += 1;
            let Some(next) = self.next_dirty() else { break };
            match self.write_back_if_idle(&next) {
                Ok(blocks) => written += blocks,
                // Another file's failure is that file's, reported to its fsync.
                Err(error) => failure = Some(error),
            }
        }
        if written > 0 || dirty() <= limit {
            return Ok(());
        }
        // Nothing but files that others write just now, that have no data, or that can't be
        // written: then its own.
        self.write_back(inode, Effort::Writeback)?;
        match failure {
            // As much again for a file that can't be written at all, so that others go on; but
            // memory has an end.
            Some(error) if dirty() > STUCK_SHARE * limit => Err(error),
            _ => Ok(()),
        }
    }

    /// The dirty inode whose turn it is.
    fn next_dirty(&self) -> Option<Arc<Inode>> {
        let (inodes, turn) = (self.dirty_inodes.lock(), &self.dirty_throttle.turn);
        let last = InodeId(turn.load(Ordering::Relaxed));
        let (number, inode) = inodes
            .range((Bound::Excluded(last), Bound::Unbounded))
            .next()
            .or_else(|| inodes.iter().next())?;
        turn.store(number.0, Ordering::Relaxed);
        Some(Arc::clone(inode))
    }

    /// Writes a file's dirty data unless another thread does already; returns for how many blocks
    /// it kept space.
    pub(crate) fn write_back_if_idle(&self, inode: &Arc<Inode>) -> Result<u64> {
        let Some(_extents) = self.try_lock_extents(inode) else { return Ok(0) };
        let blocks = self
            .read_inode(inode)
            .map_or(0, |state| state.reservation.as_ref().map_or(0, Reservation::data_blocks));
        if blocks > 0 {
            self.write_back_locked(inode, Effort::Writeback)?;
        }
        Ok(blocks)
    }
}
