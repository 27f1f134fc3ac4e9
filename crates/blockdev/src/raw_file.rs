//! The open file behind a device, for callers that let the kernel read from it during other work.
//!
//! Invariants: offsets are those of the device; reads are of whole blocks, at whole blocks, into
//! aligned memory, inside the device. Nothing is written this way: writes have rules of their own
//! ([`BlockDevice::write`](crate::BlockDevice::write)). If such a read fails, the caller repeats it
//! by [`BlockDevice::read`](crate::BlockDevice::read), which returns the error and counts the
//! failure.
//!
//! Lock discipline: takes no lock.

use crate::counters::CounterCells;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The file of a device that is one file or disk with direct I/O, see
/// [`BlockDevice::raw_file`](crate::BlockDevice::raw_file). It stays open as long as this value
/// lives.
#[derive(Clone)]
pub struct RawFile {
    file: Arc<File>,
    counters: Arc<CounterCells>,
}

impl RawFile {
    pub(crate) fn new(file: &Arc<File>, counters: &Arc<CounterCells>) -> Self {
        Self { file: Arc::clone(file), counters: Arc::clone(counters) }
    }

    /// The file of a device of another crate, as models have one. Its reads are not counted.
    pub fn of(file: File) -> Self {
        Self { file: Arc::new(file), counters: Arc::default() }
    }

    /// Counts a completed read of `length_bytes` as one of the device.
    pub fn count_read(&self, length_bytes: u64) {
        self.counters.count_read(length_bytes);
    }
}

impl AsFd for RawFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl std::fmt::Debug for RawFile {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RawFile").field("file", &self.file).finish_non_exhaustive()
    }
}
