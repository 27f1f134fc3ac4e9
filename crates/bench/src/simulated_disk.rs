//! A simple disk with a write cache and no battery: it serves one request at a time, in the order
//! of their arrival.
//!
//! A read costs an access to the disk; a write goes to the cache and costs nothing then; a flush
//! writes the cache out, and nothing else is served meanwhile, since such disks don't queue it
//! among other commands. So it is with the disks on which the coordination of flushes was
//! published; what a flush costs others does not show on a device that only delays its answer.
//!
//! Lock: a leaf around the time at which the disk is free; a request is delayed without it. The
//! times of requests follow each other exactly, however late their threads wake up.
use cairn_blockdev::{BlockDevice, DeviceError, FlushTime, MemoryDevice, forward_to_device};
use cairn_environment::Rank;
use cairn_environment::clock::{self, Monotonic};
use cairn_environment::lock::Mutex;
use std::time::Duration;

pub(crate) struct SimulatedDisk {
    memory: MemoryDevice,
    read_time: Duration,
    flush_time: Duration,
    free_at: Mutex<Monotonic>,
    /// As measured from outside: with the wait for what came before.
    measured: FlushTime,
}

impl SimulatedDisk {
    pub(crate) fn new(size_bytes: u64, read_time: Duration, flush_time: Duration) -> Self {
        let free_at = Mutex::new(Rank::DEVICE, Monotonic::default());
        Self {
            memory: MemoryDevice::new(size_bytes),
            read_time,
            flush_time,
            free_at,
            measured: FlushTime::default(),
        }
    }

    /// The time at which a request that comes at `now` and takes `service_time` is done.
    fn admit(&self, now: Monotonic, service_time: Duration) -> Monotonic {
        let mut free_at = self.free_at.lock();
        *free_at = now.max(*free_at) + service_time;
        *free_at
    }

    fn serve(&self, service_time: Duration) {
        let now = clock::now_monotonic();
        clock::sleep(self.admit(now, service_time) - now);
    }
}

impl BlockDevice for SimulatedDisk {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.serve(self.read_time);
        self.memory.read(offset_bytes, buffer)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        let begin = clock::now_monotonic();
        self.serve(self.flush_time);
        self.measured.record(begin.elapsed());
        self.memory.flush()
    }

    fn flush_time(&self) -> Duration {
        self.measured.average()
    }

    forward_to_device!(self => self.memory; write, write_set, discard, length_bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_blockdev::SetWrite;

    #[test]
    fn requests_follow_each_other() {
        let (read, flush) = (Duration::from_millis(1), Duration::from_millis(20));
        let disk = SimulatedDisk::new(1 << 20, read, flush);
        let at = |ms: u64| Monotonic::from_nanoseconds(ms * 1_000_000);
        assert_eq!(disk.admit(at(100), read), at(101));
        assert_eq!(disk.admit(at(100), flush), at(121));
        assert_eq!(disk.admit(at(110), read), at(122), "not during the flush");
        assert_eq!(disk.admit(at(500), read), at(501));
    }

    #[test]
    fn it_holds_what_was_written_and_measures_its_flushes() {
        let disk = SimulatedDisk::new(1 << 20, Duration::ZERO, Duration::from_micros(100));
        assert_eq!(disk.flush_time(), Duration::ZERO);
        disk.write(4096, &[&[7; 4096]]).unwrap();
        assert!(
            disk.write_set(&[SetWrite { offset_bytes: 0, buffers: vec![&[8; 4096]] }])[0].is_ok()
        );
        disk.flush().unwrap();
        let mut buffer = [0; 8192];
        disk.read(0, &mut buffer).unwrap();
        assert_eq!((buffer[0], buffer[8191], disk.length_bytes()), (8, 7, 1 << 20));
        disk.discard(0, 4096).unwrap();
        assert!(disk.flush_time() >= Duration::from_micros(100));
    }
}
