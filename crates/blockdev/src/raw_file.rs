//! The open file behind a device, for those who have the kernel read from it beside other work.
//!
//! Invariants: offsets are those of the device; reads of whole blocks, at whole blocks, into
//! aligned memory, inside the device. Nothing is written this way: a write has rules of its own
//! ([`BlockDevice::write`](crate::BlockDevice::write)). Who reads so and fails reads again by
//! [`BlockDevice::read`](crate::BlockDevice::read), which returns the error, and tells whoever
//! counts failures.
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

    /// The file of a device that another crate makes, as models do. Its reads are counted for
    /// nobody.
    pub fn of(file: File) -> Self {
        Self { file: Arc::new(file), counters: Arc::default() }
    }

    /// A read of `length_bytes` has completed: it counts as one of the device.
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
