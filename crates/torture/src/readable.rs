//! A simulated device that callers may also read through a file, as they read an image: so the
//! volume plans reads ([`cairn_engine::PlannedRead`]) in runs whose device fails.
//!
//! The file holds what reads of the device return. What fails or loses power is the device: reads
//! through the file succeed always. A write is in the file before its caller learns that it has
//! succeeded; a block that is being written reads as anything, as on a real device.
use cairn_blockdev::{
    BlockDevice, DeviceError, RawFile, SetWrite, SimulatedDevice, forward_to_device,
};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Bytes that are copied at once.
const PART_BYTES: usize = 1 << 20;

/// See the [module](self).
pub struct ReadableDevice {
    device: Arc<SimulatedDevice>,
    file: File,
}

impl ReadableDevice {
    /// With a file in memory. Nothing uses `device` yet, and it does not fail.
    ///
    /// # Errors
    /// There is no room for the file.
    pub fn new(device: Arc<SimulatedDevice>) -> io::Result<Arc<Self>> {
        let file = memfd_create("readable device", MemfdFlags::CLOEXEC)?;
        let file = File::from(file);
        file.set_len(device.length_bytes())?;
        let readable = Self { device, file };
        readable.copy(0, readable.device.length_bytes());
        Ok(Arc::new(readable))
    }

    /// Writes what the device holds into the file, except for zeros.
    fn copy(&self, offset_bytes: u64, length_bytes: u64) {
        let mut buffer = vec![0; PART_BYTES];
        let mut at = offset_bytes;
        while at < offset_bytes + length_bytes {
            let length = (offset_bytes + length_bytes - at).min(PART_BYTES as u64) as usize;
            if self.device.read(at, &mut buffer[..length]).is_ok()
                && buffer[..length].iter().any(|byte| *byte != 0)
            {
                self.store(at, &[&buffer[..length]]);
            }
            at += length as u64;
        }
    }

    fn store(&self, offset_bytes: u64, buffers: &[&[u8]]) {
        let mut at = offset_bytes;
        for buffer in buffers {
            self.file
                .write_all_at(buffer, at)
                .expect("there is room for a file as long as the device");
            at += buffer.len() as u64;
        }
    }
}

impl BlockDevice for ReadableDevice {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.device.write(offset_bytes, buffers)?;
        self.store(offset_bytes, buffers);
        Ok(())
    }

    fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
        let results = self.device.write_set(writes);
        for (write, _) in writes.iter().zip(&results).filter(|(_, result)| result.is_ok()) {
            self.store(write.offset_bytes, &write.buffers);
        }
        results
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        self.device.discard(offset_bytes, length_bytes)?;
        self.copy(offset_bytes, length_bytes);
        Ok(())
    }

    fn raw_file(&self) -> Option<RawFile> {
        self.file.try_clone().ok().map(RawFile::of)
    }

    forward_to_device!(self => self.device; read, flush, length_bytes, flush_time);
}
