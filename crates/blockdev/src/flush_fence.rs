//! No flush reports success for data that another flush has lost.
//!
//! A device reports a failed flush to one caller only. Writes since the previous flush may then be
//! lost for ever, and yet the next flush succeeds, since it has nothing left to write (PostgreSQL
//! found that in 2018). A volume has two callers, the log and the transactions' commit, and each
//! flushes what both have written. So both flush through a [`FlushFence`]: when a flush fails, all
//! flushes that overlap with it fail, and all later ones.
//!
//! Invariant: when [`FlushFence::flush`] returns success, no flush has failed that was issued
//! before the device finished this one. To ensure that, a flush that the device has finished waits
//! for those still under way in the device at that moment, and for no others. Flushes never wait
//! for each other in a circle, since a finished flush is no longer under way.
//!
//! Lock: rank `DEVICE`, held briefly and to wait; never held during a flush.
use crate::device::BlockDevice;
use crate::error::{DeviceError, Operation};
use crate::forward_to_device;
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use std::sync::Arc;

#[derive(Default)]
struct Flushes {
    issued: u64,
    /// Numbers of the flushes that the device has not finished.
    under_way: Vec<u64>,
    /// The first error.
    error: Option<DeviceError>,
}

/// A device whose flushes all fail after one has failed.
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
    /// A fence without an error.
    pub fn new(device: Arc<dyn BlockDevice>) -> FlushFence {
        FlushFence {
            device,
            flushes: Mutex::new(Rank::DEVICE, Flushes::default()),
            finished: Condvar::new(),
        }
    }
}

/// A flush in the device. If its thread panics, its result is unknown: it counts as failed, and no
/// other flush waits for it.
struct FlushGuard<'a> {
    fence: &'a FlushFence,
    number: u64,
}

impl Drop for FlushGuard<'_> {
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
        let _guard = FlushGuard { fence: self, number };
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
        read, write, write_set, write_set_while, discard, length_bytes, flush_time, copies,
        read_copy, repair, resynchronise, close, raw_file, health,
        observe, note_damage, keep_spare);
}

#[cfg(test)]
#[path = "flush_fence_tests.rs"]
mod flush_fence_tests;
