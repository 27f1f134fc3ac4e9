//! A device on which nothing becomes durable for a while, so that what waits for that keeps
//! waiting.
//!
//! States: *open*, where it is a plain device in memory, and *shut*, where flushes wait.
//!
//! Lock discipline: `shut` is a leaf, and is not held while the memory is used.
use crate::{BlockDevice, DeviceError, MemoryDevice, forward_to_device};
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use std::time::Duration;

/// A device in memory whose flushes wait while it is shut: no commit ends, and no fsync.
///
/// ```
/// use cairn_blockdev::{BlockDevice, simulated::GatedDevice};
///
/// let device = GatedDevice::new(1 << 20);
/// device.set_shut(true);
/// device.write(0, &[&[7; 4096]])?;
/// device.set_shut(false);
/// device.flush()?;
/// # Ok::<(), cairn_blockdev::DeviceError>(())
/// ```
pub struct GatedDevice {
    device: MemoryDevice,
    shut: Mutex<bool>,
    opened: Condvar,
}

impl GatedDevice {
    /// An open one of `length_bytes`, all zeros.
    pub fn new(length_bytes: u64) -> Self {
        Self {
            device: MemoryDevice::new(length_bytes),
            shut: Mutex::new(Rank::LEAF, false),
            opened: Condvar::new(),
        }
    }

    /// Shuts it, or opens it: then the flushes that wait go on.
    pub fn set_shut(&self, shut: bool) {
        *self.shut.lock() = shut;
        self.opened.notify_all();
    }
}

impl BlockDevice for GatedDevice {
    fn flush(&self) -> Result<(), DeviceError> {
        let mut shut = self.shut.lock();
        while *shut {
            self.opened.wait(&mut shut);
        }
        drop(shut);
        self.device.flush()
    }

    fn flush_time(&self) -> Duration {
        Duration::ZERO
    }

    forward_to_device!(self => self.device; read, write, discard, length_bytes);
}
