//! A part of a simulated device as a device of its own: members of a composed device with one
//! record of them all, in which the power fails for all of them at once.
use super::device::SimulatedDevice;
use crate::device::{BlockDevice, CheckedRange, SetWrite, gathered_bytes};
use crate::error::{DeviceError, Operation};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A part. Its flushes cover its own writes alone.
pub struct SimulatedPart {
    name: Arc<str>,
    device: Arc<SimulatedDevice>,
    range_bytes: Range<u64>,
}

impl SimulatedPart {
    pub(super) fn new(device: Arc<SimulatedDevice>, range_bytes: Range<u64>) -> SimulatedPart {
        SimulatedPart { name: Arc::from("part of a simulated device"), device, range_bytes }
    }

    fn check(
        &self,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<u64, DeviceError> {
        let range = CheckedRange { operation, offset_bytes, length_bytes, device: &self.name };
        range.check(self.length_bytes())?;
        Ok(self.range_bytes.start + offset_bytes)
    }
}

impl BlockDevice for SimulatedPart {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let at = self.check(Operation::Read, offset_bytes, buffer.len() as u64)?;
        self.device.read(at, buffer)
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let at = self.check(Operation::Write, offset_bytes, gathered_bytes(buffers))?;
        self.device.write(at, buffers)
    }

    fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
        let moved = writes.iter().map(|write| {
            let length_bytes = gathered_bytes(&write.buffers);
            let offset_bytes = self.check(Operation::Write, write.offset_bytes, length_bytes)?;
            Ok(SetWrite { offset_bytes, buffers: write.buffers.clone() })
        });
        match moved.collect::<Result<Vec<_>, DeviceError>>() {
            Ok(moved) => self.device.write_set(&moved),
            // One does not lie in the part: one by one, so that each gets its own error.
            Err(_) => {
                writes.iter().map(|write| self.write(write.offset_bytes, &write.buffers)).collect()
            }
        }
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.device.flush_within(&self.range_bytes)
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        let at = self.check(Operation::Discard, offset_bytes, length_bytes)?;
        self.device.discard(at, length_bytes)
    }

    fn length_bytes(&self) -> u64 {
        self.range_bytes.end - self.range_bytes.start
    }

    fn flush_time(&self) -> Duration {
        self.device.flush_time()
    }
}
