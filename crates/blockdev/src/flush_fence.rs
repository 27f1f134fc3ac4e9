//! No flush claims success for what another flush lost.
//!
//! A device tells one of its callers that a flush failed. What was written since the flush before
//! may then be lost, for ever, and a flush that follows succeeds all the same: it has nothing left
//! to do (PostgreSQL learned that in 2018). A volume has two callers, the log and the transactions'
//! commit, and each flushes what both have written. So they flush through a [`FlushFence`]: when a
//! flush fails, those that overlap with it fail, and all that come later.
//!
//! Invariant: when [`FlushFence::flush`] returns success, no flush has failed that was issued
//! before the device finished this one. To know that, it waits for those that are still under way
//! at that moment, and for no others: it has not returned itself, but has ended, so nobody waits in
//! a circle.
//!
//! Lock: rank `DEVICE`, for moments and to wait; never held during a flush.
use crate::device::BlockDevice;
use crate::error::{DeviceError, Operation};
use crate::forward_to_device;
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use std::sync::Arc;

#[derive(Default)]
struct Flushes {
    issued: u64,
    /// Numbers of those that the device has not finished.
    under_way: Vec<u64>,
    /// The first one.
    error: Option<DeviceError>,
}

/// A device whose flushes fail for ever once one of them has.
///
/// ```
/// use cairn_blockdev::{BlockDevice, FlushFence, Operation, SimulatedDevice};
/// use std::sync::Arc;
/// let device = Arc::new(SimulatedDevice::new(1 << 20));
/// let fence = FlushFence::new(device.clone());
/// device.fail_next(Operation::Flush, 1);
/// assert!(fence.flush().is_err());
/// assert!(device.flush().is_ok());
/// assert!(fence.flush().is_err());
/// ```
pub struct FlushFence {
    device: Arc<dyn BlockDevice>,
    flushes: Mutex<Flushes>,
    finished: Condvar,
}

impl FlushFence {
    /// Nothing has failed yet.
    pub fn new(device: Arc<dyn BlockDevice>) -> FlushFence {
        FlushFence {
            device,
            flushes: Mutex::new(Rank::DEVICE, Flushes::default()),
            finished: Condvar::new(),
        }
    }
}

/// What became of a flush whose thread panics is not known: it counts as failed, and nobody waits
/// for it.
struct Watch<'a> {
    fence: &'a FlushFence,
    number: u64,
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let mut flushes = self.fence.flushes.lock();
        flushes.under_way.retain(|other| *other != self.number);
        let name = Arc::from("device");
        let error = || {
            DeviceError::new(
                Operation::Flush,
                0,
                0,
                &name,
                std::io::Error::other("the thread that flushed it panicked"),
            )
        };
        flushes.error.get_or_insert_with(error);
        self.fence.finished.notify_all();
    }
}

impl BlockDevice for FlushFence {
    fn flush(&self) -> Result<(), DeviceError> {
        let number = {
            let mut flushes = self.flushes.lock();
            if let Some(error) = &flushes.error {
                return Err(error.clone());
            }
            flushes.issued += 1;
            let number = flushes.issued;
            flushes.under_way.push(number);
            number
        };
        let _watch = Watch { fence: self, number };
        let result = self.device.flush();
        let mut flushes = self.flushes.lock();
        flushes.under_way.retain(|other| *other != number);
        if let Err(error) = result {
            flushes.error.get_or_insert(error);
        }
        self.finished.notify_all();
        let issued = flushes.issued;
        while flushes.error.is_none() && flushes.under_way.iter().any(|other| *other <= issued) {
            self.finished.wait(&mut flushes);
        }
        flushes.error.clone().map_or(Ok(()), Err)
    }

    forward_to_device!(self => self.device;
        read, write, write_set, write_set_while, discard, length_bytes, flush_time, copies, read_copy, repair, resynchronise, close, raw_file, health,
        observe, note_damage, keep_spare);
}

#[cfg(test)]
#[path = "flush_fence_tests.rs"]
mod flush_fence_tests;
