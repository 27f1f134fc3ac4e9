//! How many writers write out at once when memory holds too much dirty data, and which files come
//! first ([`super::dirty`] does the writing).
//!
//! Each writer owes a multiple of what it is about to make dirty, so that dirty data shrinks
//! however many of them there are, and none of them waits for much longer than its own share takes.
//! Files take turns, by inode number: a writer takes the next one that nobody else writes, so that
//! writers don't queue for one file; and data that is overwritten or removed soon has a whole
//! turn's time to vanish unwritten.
//!
//! Only a few work at a time, the others sleep until one of these hands its place over: first come,
//! first served. If all worked, each would hold some file's extents mutex while it waits for a
//! processor among hundreds, and a thread that creates or removes that file would wait as long.
//!
//! Lock discipline: places and the list of dirty inodes are locked for one step; an inode's extents
//! mutex is tried, never waited for, but the writer's own. A thread that waits for a place holds no
//! lock and has joined no transaction.
use cairn_environment::atomic::AtomicU64;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, assert_may_block};

/// Writers that write out at once: enough to keep a device busy.
const PLACES: usize = 8;

/// The threads that write out, and which file has its turn.
pub(crate) struct DirtyThrottle {
    /// The last file that had its turn.
    pub(super) turn: AtomicU64,
    places: Mutex<Places>,
    /// A place was handed over.
    handed: Condvar,
}

/// Free places, or the number of threads that wait for one.
struct Places {
    free: usize,
    waiting: usize,
    /// Places that belong to the threads that waited longest, which don't run yet.
    handed: usize,
}

/// A place among the threads that write out; the next one gets it when this is dropped.
pub(super) struct Place<'a>(&'a DirtyThrottle);

impl DirtyThrottle {
    pub(crate) fn new() -> DirtyThrottle {
        let places = Places { free: PLACES, waiting: 0, handed: 0 };
        DirtyThrottle {
            turn: AtomicU64::new(0),
            places: Mutex::new(Rank::LEAF, places),
            handed: Condvar::new(),
        }
    }

    /// Waits for a place. A thread that comes while others wait stands behind them: the
    /// condition variable wakes in that order.
    pub(super) fn enter(&self) -> Place<'_> {
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

#[cfg(test)]
#[path = "throttle_tests.rs"]
mod tests;
