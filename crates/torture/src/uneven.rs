//! A device that takes as long as it likes: before it does what it was asked to, and after, until the caller hears of it.
//!
//! Between the moment at which a request fails and the one at which somebody knows, others write, flush and acknowledge. A
//! simulated device tells at once.
use cairn_blockdev::{BlockDevice, DeviceError, SetWrite, forward_to_device};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, clock};
use std::sync::Arc;
use std::time::Duration;

/// See the [module](self).
pub struct Uneven {
    device: Arc<dyn BlockDevice>,
    random: Mutex<Seeded>,
    write_us_max: u64,
    flush_us_max: u64,
}

impl Uneven {
    /// Each write waits for up to `write_us_max` before and after, each flush for up to `flush_us_max`; half of them don't.
    pub fn new(device: Arc<dyn BlockDevice>, seed: u64, write_us_max: u64, flush_us_max: u64) -> Arc<Uneven> {
        Arc::new(Uneven { device, random: Mutex::new(Rank::LEAF, Seeded::new(seed)), write_us_max, flush_us_max })
    }

    fn pause(&self, us_max: u64) {
        let chosen_us = {
            let mut random = self.random.lock();
            if random.chance(1, 2) { random.below(us_max + 1) } else { 0 }
        };
        if chosen_us > 0 {
            clock::sleep(Duration::from_micros(chosen_us));
        }
    }

    fn around<R>(&self, us_max: u64, request: impl FnOnce() -> R) -> R {
        self.pause(us_max);
        let result = request();
        self.pause(us_max);
        result
    }
}

impl BlockDevice for Uneven {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.around(self.write_us_max, || self.device.write(offset_bytes, buffers))
    }

    fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
        self.around(self.write_us_max, || self.device.write_set(writes))
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.around(self.flush_us_max, || self.device.flush())
    }

    forward_to_device!(self => self.device; read, discard, length_bytes, flush_time);
}
