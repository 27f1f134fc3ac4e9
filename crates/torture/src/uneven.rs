//! A device that takes as long as it likes: before it does what it was asked to, and after, until
//! the caller gets the result.
//!
//! Between the moment at which a request fails and the one at which its caller knows, other threads
//! write, flush and acknowledge. A simulated device reports at once.
//!
//! Some devices answer in moments for hours, and then, once, after seconds: they collect garbage,
//! or a disk spins up. Such a *spike* lets timeouts end and queues fill that otherwise never do.
use cairn_blockdev::{BlockDevice, DeviceError, SetWrite, forward_to_device};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, clock};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Before a request, and after it: one pause in this many is a spike.
const SPIKE_ONE_OF: u64 = 200;

/// See the [module](self).
pub struct Uneven {
    device: Arc<dyn BlockDevice>,
    random: Mutex<Seeded>,
    write_us_max: u64,
    flush_us_max: u64,
    spike_ms_max: u64,
    /// Not a point of the scheduler.
    spikes: AtomicU64,
}

impl Uneven {
    /// Each write waits for up to `write_us_max` before and after, each flush for up to
    /// `flush_us_max`; half of them don't.
    pub fn new(
        device: Arc<dyn BlockDevice>,
        seed: u64,
        write_us_max: u64,
        flush_us_max: u64,
    ) -> Arc<Uneven> {
        Uneven::with_spikes(device, seed, write_us_max, flush_us_max, 0)
    }

    /// Moreover, any request, reads as well, may take up to `spike_ms_max` before and after, but
    /// rarely.
    pub fn with_spikes(
        device: Arc<dyn BlockDevice>,
        seed: u64,
        write_us_max: u64,
        flush_us_max: u64,
        spike_ms_max: u64,
    ) -> Arc<Uneven> {
        let (random, spikes) = (Mutex::new(Rank::LEAF, Seeded::new(seed)), AtomicU64::new(0));
        Arc::new(Uneven { device, random, write_us_max, flush_us_max, spike_ms_max, spikes })
    }

    /// Spikes so far.
    pub fn spikes(&self) -> u64 {
        self.spikes.load(Ordering::Relaxed)
    }

    fn pause(&self, us_max: u64) {
        let chosen_us = {
            let mut random = self.random.lock();
            if self.spike_ms_max > 0 && random.chance(1, SPIKE_ONE_OF) {
                self.spikes.fetch_add(1, Ordering::Relaxed);
                1000 * (1 + random.below(self.spike_ms_max))
            } else if us_max > 0 && random.chance(1, 2) {
                random.below(us_max + 1)
            } else {
                0
            }
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
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.around(0, || self.device.read(offset_bytes, buffer))
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.around(self.write_us_max, || self.device.write(offset_bytes, buffers))
    }

    fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
        self.around(self.write_us_max, || self.device.write_set(writes))
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.around(self.flush_us_max, || self.device.flush())
    }

    forward_to_device!(self => self.device;
        discard, length_bytes, flush_time, close, observe, note_damage);
}
