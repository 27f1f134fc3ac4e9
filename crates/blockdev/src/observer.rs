//! Failures of the members of a device, reported to the owner of the whole: a mirror that reads
//! around a bad member returns no error, and its owner still has to know.

use crate::error::{DeviceError, Operation};

/// What happened on a device or on a member of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEventKind {
    /// A read failed.
    ReadError,
    /// A write, a flush or a discard failed.
    WriteError,
    /// Blocks hold something else than what was written there.
    ChecksumError,
    /// Blocks were written again from another copy.
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
    /// The member's name; none on a device without members.
    pub member: Option<&'a str>,
    /// Where, on the device as a whole; none for a flush.
    pub offset_bytes: Option<u64>,
    /// How many blocks of 4 KiB.
    pub blocks: u64,
    /// What the system said, of a request that failed.
    pub error: Option<&'a DeviceError>,
}

/// Whoever wants to know of the events of a device, see [`crate::BlockDevice::observe`]. It is
/// called on the thread of the request, which may hold locks of the device: it must neither use the
/// device nor wait.
pub trait DeviceObserver: Send + Sync {
    /// Called once for each event.
    fn observe(&self, event: &DeviceEvent<'_>);
}
