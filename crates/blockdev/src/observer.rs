//! Reports failures of the members of a device to the owner of the whole. A mirror that reads
//! around a bad member returns no error, but its owner must know.

use crate::error::{DeviceError, Operation};

/// What happened on a device or on a member of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEventKind {
    /// A read failed.
    ReadError,
    /// A write, a flush or a discard failed.
    WriteError,
    /// Blocks do not hold what was written there.
    ChecksumError,
    /// Blocks were rewritten from another copy.
    Repaired,
}

impl DeviceEventKind {
    /// The kind of a request that failed.
    pub fn of(operation: Operation) -> DeviceEventKind {
        match operation {
            Operation::Read => DeviceEventKind::ReadError,
            _ => DeviceEventKind::WriteError,
        }
    }
}

/// One event.
#[derive(Clone, Copy, Debug)]
pub struct DeviceEvent<'a> {
    /// What happened.
    pub kind: DeviceEventKind,
    /// The member's name; `None` on a device without members.
    pub member: Option<&'a str>,
    /// The offset on the device as a whole; `None` for a flush.
    pub offset_bytes: Option<u64>,
    /// Number of blocks of 4 KiB.
    pub blocks: u64,
    /// The system's error, for a request that failed.
    pub error: Option<&'a DeviceError>,
}

/// Receives the events of a device, see [`crate::BlockDevice::observe`]. Called on the thread of
/// the request, which may hold locks of the device: an observer must neither use the device nor
/// wait.
pub trait DeviceObserver: Send + Sync {
    /// Called once for each event.
    fn observe(&self, event: &DeviceEvent<'_>);
}
