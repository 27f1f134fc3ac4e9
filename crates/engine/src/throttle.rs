//! What a writer does when memory holds too much dirty data: it writes some out itself, somebody's.
//!
//! Each writer owes a multiple of what it is about to make dirty, so that dirty data shrinks
//! however many of them there are, and none of them waits for much longer than its own share takes.
//! Files take turns, by inode number: a writer takes the next one that nobody else writes, so that
//! writers don't queue for one file; and data that is overwritten or removed soon has a whole
//! turn's time to vanish unwritten.
//!
//! Only a few work at a time, the others sleep until one of these hands its place over: first come,
//! first served. If all worked, each would hold some file's extents mutex while it waits for a
//! processor among hundreds, and whoever creates or removes that file would wait as long.
//!
//! Lock discipline: places and the list of dirty inodes are locked for one step; an inode's extents
//! mutex is tried, never waited for, but the writer's own. Who waits for a place holds no lock and
//! has joined no transaction.
use crate::Result;
use crate::inode::Inode;
use crate::operation::Effort;
use crate::volume::VolumeInner;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, assert_may_block};
use cairn_format::{BLOCK_SIZE, InodeNumber};
use cairn_space::Reservation;
use std::ops::Bound;
use std::sync::Arc;

/// Of what a writer makes dirty it writes so many times as much.
const SHARE: u64 = 2;
/// When nothing can be written, so many times the limit may be dirty; then writers are told.
const STUCK_SHARE: u64 = 2;
/// Files that a writer looks at before it writes its own.
const LOOKS_MAX: usize = 64;
/// Writers that write out at once: enough to keep a device busy.
const PLACES: usize = 8;

/// Who writes out, and whose turn it is to be written.
pub(crate) struct DirtyThrottle {
    /// The last file that had its turn.
    turn: AtomicU64,
    places: Mutex<Places>,
    /// A place was handed over.
    handed: Condvar,
}

/// Free places, or those who wait for one.
struct Places {
    free: usize,
    waiting: usize,
    /// Places that belong to whoever waited longest, who doesn't run yet.
    handed: usize,
}

/// A place among those who write out; the next one gets it when this is dropped.
struct Place<'a>(&'a DirtyThrottle);

impl DirtyThrottle {
    pub(crate) fn new() -> DirtyThrottle {
        let places = Places { free: PLACES, waiting: 0, handed: 0 };
        DirtyThrottle {
            turn: AtomicU64::new(0),
            places: Mutex::new(Rank::LEAF, places),
            handed: Condvar::new(),
        }
    }

    /// Waits for a place. Whoever comes while others wait stands behind them: the condition
    /// variable wakes in that order.
    fn enter(&self) -> Place<'_> {
        assert_may_block(None);
        let mut places = self.places.lock();
        if places.free > 0 {
            places.free -= 1;
        } else {
            places.waiting += 1;
            // At least once: what is handed over now is another one's.
            loop {
                self.handed.wait(&mut places);
                if places.handed > 0 {
                    break;
                }
            }
            places.handed -= 1;
        }
        drop(places);
        Place(self)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut places = self.0.places.lock();
        if places.waiting > 0 {
            places.waiting -= 1;
            places.handed += 1;
            self.0.handed.notify_one();
        } else {
            places.free += 1;
        }
    }
}

impl VolumeInner {
    /// Makes a writer that is about to write `blocks` write when memory holds too much dirty data.
    pub(crate) fn throttle_dirty_data(&self, inode: &Arc<Inode>, blocks: u64) -> Result<()> {
        let limit = self.options.dirty_data_bytes_max / BLOCK_SIZE as u64;
        let dirty = || self.dirty_pages.load(Ordering::Relaxed);
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
        let last = InodeNumber(turn.load(Ordering::Relaxed));
        let (number, inode) = inodes
            .range((Bound::Excluded(last), Bound::Unbounded))
            .next()
            .or_else(|| inodes.iter().next())?;
        turn.store(number.0, Ordering::Relaxed);
        Some(Arc::clone(inode))
    }

    /// Writes a file's dirty data unless somebody does already; returns for how many blocks it kept
    /// space.
    pub(crate) fn write_back_if_idle(&self, inode: &Arc<Inode>) -> Result<u64> {
        let Some(_extents) = inode.extents.try_lock() else { return Ok(0) };
        let blocks = self
            .read_inode(inode)
            .map_or(0, |state| state.reservation.as_ref().map_or(0, Reservation::data_blocks));
        if blocks > 0 {
            self.write_back_locked(inode, Effort::Writeback)?;
        }
        Ok(blocks)
    }
}

#[cfg(test)]
#[path = "throttle_tests.rs"]
mod tests;
