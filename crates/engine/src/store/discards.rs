//! Counting the discards of free blocks that are under way: a volume that stops waits for them,
//! since the next owner of the device may write there.
//!
//! Lock discipline: the counter's lock (rank `LEAF`), for moments.
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};

/// Discards of free blocks that are under way.
pub(super) struct Discards {
    under_way: Mutex<u64>,
    ended: Condvar,
}

impl Discards {
    pub(super) fn new() -> Self {
        Self { under_way: Mutex::new(Rank::LEAF, 0), ended: Condvar::new() }
    }

    pub(super) fn begin(&self) -> UnderWay<'_> {
        *self.under_way.lock() += 1;
        UnderWay(self)
    }

    /// The volume has failed, so none begins any more.
    pub(super) fn wait_for_end(&self) {
        let mut under_way = self.under_way.lock();
        while *under_way > 0 {
            self.ended.wait(&mut under_way);
        }
    }
}

/// A discard, until it is dropped.
pub(super) struct UnderWay<'a>(&'a Discards);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        *self.0.under_way.lock() -= 1;
        self.0.ended.notify_all();
    }
}
