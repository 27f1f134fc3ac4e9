//! A device in memory over an image that many of them share: a copy costs what was changed.
//!
//! Lock discipline: one lock of rank `DEVICE` around the changes, held for moments.
use cairn_blockdev::{BLOCK_BYTES, BlockDevice, DeviceError, Operation};
use cairn_environment::Rank;
use cairn_environment::lock::RwLock;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

type Block = Box<[u8]>;

/// Blocks that hold anything but zeros.
pub type Image = HashMap<u64, Block>;

/// A shared image, and what was written over it.
pub struct OverlayDevice {
    base: Arc<Image>,
    changed: RwLock<Image>,
    length_bytes: u64,
}

impl OverlayDevice {
    /// A device of `length_bytes` bytes with the content of `base`.
    pub fn new(base: Arc<Image>, length_bytes: u64) -> Self {
        Self { base, changed: RwLock::new(Rank::DEVICE, Image::new()), length_bytes }
    }

    /// The image below the changes.
    pub fn base_image(&self) -> Arc<Image> {
        self.base.clone()
    }

    /// Another device with the same content.
    pub fn copy(&self) -> Self {
        let changed = RwLock::new(Rank::DEVICE, self.changed.read().clone());
        Self { base: self.base.clone(), changed, length_bytes: self.length_bytes }
    }

    /// The same content, cut off at `length_bytes`.
    pub fn cut(self, length_bytes: u64) -> Self {
        Self { length_bytes: length_bytes.min(self.length_bytes), ..self }
    }

    /// The content of a block.
    pub fn block(&self, block: u64) -> Block {
        let changed = self.changed.read();
        let found = changed.get(&block).or_else(|| self.base.get(&block));
        found.cloned().unwrap_or_else(|| vec![0; BLOCK_BYTES].into())
    }

    /// Changes the content of a block.
    pub fn set_block(&self, block: u64, bytes: &[u8]) {
        self.changed.write().insert(block, bytes.into());
    }

    fn check(
        &self,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<(), DeviceError> {
        assert!(
            offset_bytes.is_multiple_of(BLOCK_BYTES as u64)
                && length_bytes.is_multiple_of(BLOCK_BYTES as u64),
            "not in whole blocks"
        );
        match offset_bytes.checked_add(length_bytes) {
            Some(end) if end <= self.length_bytes => Ok(()),
            _ => {
                let source = io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the range reaches past the device's end",
                );
                Err(DeviceError::new(
                    operation,
                    offset_bytes,
                    length_bytes,
                    &Arc::from("image"),
                    source,
                ))
            }
        }
    }
}

impl BlockDevice for OverlayDevice {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.check(Operation::Read, offset_bytes, buffer.len() as u64)?;
        let changed = self.changed.read();
        for (block, bytes) in
            (offset_bytes / BLOCK_BYTES as u64..).zip(buffer.chunks_exact_mut(BLOCK_BYTES))
        {
            match changed.get(&block).or_else(|| self.base.get(&block)) {
                Some(content) => bytes.copy_from_slice(content),
                None => bytes.fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let length_bytes = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        self.check(Operation::Write, offset_bytes, length_bytes)?;
        let mut changed = self.changed.write();
        let blocks = buffers.iter().flat_map(|buffer| buffer.chunks_exact(BLOCK_BYTES));
        for (block, bytes) in (offset_bytes / BLOCK_BYTES as u64..).zip(blocks) {
            changed.insert(block, bytes.into());
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        self.check(Operation::Discard, offset_bytes, length_bytes)
    }

    fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn flush_time(&self) -> Duration {
        Duration::ZERO
    }
}
