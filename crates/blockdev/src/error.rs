//! The one error of this crate.

use std::fmt;
use std::io;
use std::sync::Arc;

/// An operation of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Opening a file or a block device.
    Open,
    /// Creating an image file.
    Create,
    /// Locking against other processes.
    Lock,
    /// Reading blocks.
    Read,
    /// Writing blocks.
    Write,
    /// Making writes durable.
    Flush,
    /// Discarding blocks.
    Discard,
    /// Allocating blocks of an image file.
    Preallocate,
}

impl fmt::Display for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Operation::Open => "open",
            Operation::Create => "create",
            Operation::Lock => "lock",
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Flush => "flush",
            Operation::Discard => "discard",
            Operation::Preallocate => "preallocation",
        })
    }
}

/// A request that a device could not complete. Cheap to clone: every waiter of a group gets one.
#[derive(Clone, Debug)]
pub struct DeviceError {
    /// The requested operation.
    pub operation: Operation,
    /// The offset; zero for a request that has none.
    pub offset_bytes: u64,
    /// The length; zero for a request that has none.
    pub length_bytes: u64,
    /// The device's name: the path of a file.
    pub device: Arc<str>,
    /// The system's error.
    pub source: Arc<io::Error>,
}

impl DeviceError {
    /// An error of `device`.
    pub fn new(
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
        device: &Arc<str>,
        source: io::Error,
    ) -> DeviceError {
        DeviceError {
            operation,
            offset_bytes,
            length_bytes,
            device: Arc::clone(device),
            source: Arc::new(source),
        }
    }

    /// The kind of the system's error.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }

    /// The system's error number, if it came from the system.
    pub fn system_error_number(&self) -> Option<i32> {
        self.source.raw_os_error()
    }

    /// Whether the storage below the device is full: the disk of an image file, the pool of a thin
    /// volume, a quota.
    pub fn is_storage_full(&self) -> bool {
        matches!(self.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }

    /// Whether another process uses the device.
    pub fn is_in_use(&self) -> bool {
        self.operation == Operation::Lock && self.kind() == io::ErrorKind::WouldBlock
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceError { operation, offset_bytes, length_bytes, device, source } = self;
        match operation {
            Operation::Lock if self.is_in_use() => {
                write!(formatter, "{device} is in use by another process")
            }
            Operation::Open | Operation::Create | Operation::Lock => {
                write!(formatter, "cannot {operation} {device}: {source}")
            }
            Operation::Flush => write!(formatter, "{device}: {operation} failed: {source}"),
            Operation::Read | Operation::Write | Operation::Discard | Operation::Preallocate => {
                write!(
                    formatter,
                    "{device}: {operation} of {length_bytes} bytes at {offset_bytes} failed: \
                     {source}"
                )
            }
        }
    }
}

impl std::error::Error for DeviceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.source)
    }
}
