//! A device in memory: its content lives as long as the process.
//!
//! Lock discipline: one lock of rank `DEVICE` per MiB, one at a time. So a request that spans two
//! of them is not atomic, as on a disk.

use crate::aligned::AlignedBuffer;
use crate::counters::{CounterCells, DeviceCounters};
use crate::device::{BlockDevice, CheckedRange, gathered_bytes};
use crate::error::{DeviceError, Operation};
use cairn_environment::Rank;
use cairn_environment::lock::RwLock;
use std::sync::Arc;
use std::time::Duration;

const CHUNK_BYTES: usize = 1 << 20;

/// A block device in memory. It allocates memory per MiB, at the first write.
pub struct MemoryDevice {
    name: Arc<str>,
    length_bytes: u64,
    /// Each covers one MiB; `None` reads as zeros.
    chunks: Vec<RwLock<Option<AlignedBuffer>>>,
    counters: CounterCells,
}

impl MemoryDevice {
    /// A device of zeros; `length_bytes` is rounded down to whole blocks.
    pub fn new(length_bytes: u64) -> MemoryDevice {
        let length_bytes = length_bytes - length_bytes % crate::BLOCK_BYTES as u64;
        let chunks = (0..length_bytes.div_ceil(CHUNK_BYTES as u64))
            .map(|_| RwLock::new(Rank::DEVICE, None))
            .collect();
        MemoryDevice {
            name: Arc::from("memory"),
            length_bytes,
            chunks,
            counters: CounterCells::default(),
        }
    }

    /// The requests that the device has completed.
    pub fn counters(&self) -> DeviceCounters {
        self.counters.snapshot()
    }

    fn check(
        &self,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<(), DeviceError> {
        CheckedRange { operation, offset_bytes, length_bytes, device: &self.name }
            .check(self.length_bytes)
    }

    fn store(&self, offset_bytes: u64, mut bytes: &[u8]) {
        let mut offset = offset_bytes as usize;
        while !bytes.is_empty() {
            let (index, within) = (offset / CHUNK_BYTES, offset % CHUNK_BYTES);
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK_BYTES - within));
            let mut chunk = self.chunks[index].write();
            let memory = chunk.get_or_insert_with(|| AlignedBuffer::zeroed(CHUNK_BYTES));
            memory[within..within + now.len()].copy_from_slice(now);
            drop(chunk);
            (offset, bytes) = (offset + now.len(), later);
        }
    }
}

impl BlockDevice for MemoryDevice {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.check(Operation::Read, offset_bytes, buffer.len() as u64)?;
        let mut done = 0;
        while done < buffer.len() {
            let position = offset_bytes as usize + done;
            let (index, within) = (position / CHUNK_BYTES, position % CHUNK_BYTES);
            let part = (buffer.len() - done).min(CHUNK_BYTES - within);
            let target = &mut buffer[done..done + part];
            match &*self.chunks[index].read() {
                Some(memory) => target.copy_from_slice(&memory[within..within + part]),
                None => target.fill(0),
            }
            done += part;
        }
        self.counters.count_read(buffer.len() as u64);
        Ok(())
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let length_bytes = gathered_bytes(buffers);
        self.check(Operation::Write, offset_bytes, length_bytes)?;
        let mut position = offset_bytes;
        for buffer in buffers {
            self.store(position, buffer);
            position += buffer.len() as u64;
        }
        self.counters.count_write(length_bytes);
        Ok(())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.counters.count_flush();
        Ok(())
    }

    /// Frees whole MiB. Smaller ranges keep their content, as a device may.
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        self.check(Operation::Discard, offset_bytes, length_bytes)?;
        let first = (offset_bytes as usize).div_ceil(CHUNK_BYTES);
        let end = (offset_bytes + length_bytes) as usize / CHUNK_BYTES;
        for chunk in self.chunks.iter().take(end).skip(first) {
            *chunk.write() = None;
        }
        self.counters.count_discard();
        Ok(())
    }

    fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn flush_time(&self) -> Duration {
        Duration::ZERO
    }
}
