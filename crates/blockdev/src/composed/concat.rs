//! A concatenation: members end to end, in the order of their labels.
//!
//! Invariant: all members are present and in sync. There is no second copy of anything, so an
//! error of one member is an error of the whole.
//!
//! Lock discipline: none of its own.

use super::error::ComposedError;
use super::health::DeviceHealth;
use super::label::{ComposedKind, DATA_START_BYTES};
use super::members::{Access, Candidate, Members};
use crate::device::{BLOCK_BYTES, BlockDevice, CheckedRange, gathered_bytes};
use crate::error::{DeviceError, Operation};
use crate::observer::DeviceObserver;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Two to eight members, end to end.
///
/// ```
/// use cairn_blockdev::composed::{Access, Candidate, Concat, ComposedKind, make};
/// use cairn_blockdev::{BlockDevice, MemoryDevice};
/// use std::sync::Arc;
/// let disks: [Arc<dyn BlockDevice>; 2] =
///     [Arc::new(MemoryDevice::new(4 << 20)), Arc::new(MemoryDevice::new(6 << 20))];
/// make(ComposedKind::Concat, &[("a".into(), disks[0].clone()), ("b".into(), disks[1].clone())])?;
/// let candidate =
///     |disk: &Arc<_>| Candidate { name: "disk".into(), device: Some(Arc::clone(disk)) };
/// let candidates = disks.iter().map(candidate).collect();
/// let concat = Concat::open(candidates, Access::ReadWrite)?;
/// assert_eq!(concat.length_bytes(), (3 << 20) + (5 << 20));
/// # Ok::<(), cairn_blockdev::ComposedError>(())
/// ```
pub struct Concat {
    members: Members,
    /// Where each member's part begins, and the end.
    starts_bytes: Vec<u64>,
}

/// The part of a request that lies on one member.
struct MemberPart<'a> {
    index: usize,
    device: &'a Arc<dyn BlockDevice>,
    offset_bytes: u64,
    length_bytes: u64,
}

impl Concat {
    /// Opens the concatenation of `candidates`, given in any order.
    ///
    /// # Errors
    /// If they are not the members of one concatenation, or one is missing.
    pub fn open(candidates: Vec<Candidate>, access: Access) -> Result<Concat, ComposedError> {
        let problems = Members::look(ComposedKind::Concat, &candidates)?;
        if !problems.is_empty() {
            return Err(ComposedError::Incomplete { members: problems });
        }
        let members = Members::open(ComposedKind::Concat, candidates, access)?;
        let mut starts_bytes = vec![0];
        for (_, label) in members.labels() {
            starts_bytes.push(starts_bytes[label.index] + label.member_bytes);
        }
        Ok(Concat { members, starts_bytes })
    }

    /// "concat:" and the names of the members.
    pub fn name(&self) -> &str {
        &self.members.name
    }

    fn checked(
        &self,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<(), DeviceError> {
        let range =
            CheckedRange { operation, offset_bytes, length_bytes, device: &self.members.name };
        range.check(self.length_bytes())?;
        if operation != Operation::Read && self.members.access != Access::ReadWrite {
            return Err(range.error(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "opened for reading only",
            )));
        }
        Ok(())
    }

    /// Splits a range, already checked, into its parts.
    fn parts(&self, offset_bytes: u64, length_bytes: u64) -> impl Iterator<Item = MemberPart<'_>> {
        let end_bytes = offset_bytes + length_bytes;
        self.members.usable().filter_map(move |(index, device)| {
            let (start, end) = (self.starts_bytes[index], self.starts_bytes[index + 1]);
            let (from, to) = (offset_bytes.max(start), end_bytes.min(end));
            (from < to).then(|| MemberPart {
                index,
                device,
                offset_bytes: DATA_START_BYTES + from - start,
                length_bytes: to - from,
            })
        })
    }

    fn counted(
        &self,
        part: &MemberPart<'_>,
        result: Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        result.inspect_err(|error| {
            self.members.count_error(part.index, self.starts_bytes[part.index], error)
        })
    }
}

/// Cuts the first `length_bytes` off a list of buffers.
fn take<'a>(buffers: &mut Vec<&'a [u8]>, length_bytes: u64) -> Vec<&'a [u8]> {
    let mut taken = Vec::new();
    let mut left = length_bytes as usize;
    while left > 0 && !buffers.is_empty() {
        let first = buffers[0];
        if first.len() <= left {
            taken.push(buffers.remove(0));
            left -= first.len();
        } else {
            let (now, later) = first.split_at(left);
            taken.push(now);
            buffers[0] = later;
            left = 0;
        }
    }
    taken
}

impl BlockDevice for Concat {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.checked(Operation::Read, offset_bytes, buffer.len() as u64)?;
        let mut rest = buffer;
        for part in self.parts(offset_bytes, rest.len() as u64) {
            let (now, later) = rest.split_at_mut(part.length_bytes as usize);
            self.counted(&part, part.device.read(part.offset_bytes, now))?;
            rest = later;
        }
        Ok(())
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let length_bytes = gathered_bytes(buffers);
        self.checked(Operation::Write, offset_bytes, length_bytes)?;
        self.members.expect_open()?;
        let mut rest = buffers.to_vec();
        for part in self.parts(offset_bytes, length_bytes) {
            self.counted(
                &part,
                part.device.write(part.offset_bytes, &take(&mut rest, part.length_bytes)),
            )?;
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.checked(Operation::Flush, 0, 0)?;
        self.members.flush().failed.into_iter().next().map_or(Ok(()), |(_, error)| Err(error))
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        self.checked(Operation::Discard, offset_bytes, length_bytes)?;
        self.members.expect_open()?;
        self.parts(offset_bytes, length_bytes)
            .try_for_each(|part| part.device.discard(part.offset_bytes, part.length_bytes))
    }

    fn length_bytes(&self) -> u64 {
        self.members.authority.composed_bytes
    }

    /// The flush time of the slowest member.
    fn flush_time(&self) -> Duration {
        self.members.flush_time()
    }

    fn close(&self) -> Result<(), DeviceError> {
        self.members.close()
    }

    fn health(&self) -> Option<DeviceHealth> {
        Some(self.members.health())
    }

    fn observe(&self, observer: &Arc<dyn DeviceObserver>) -> bool {
        self.members.observe(observer)
    }

    fn note_damage(&self, offset_bytes: u64, length_bytes: u64) {
        for part in self.parts(offset_bytes, length_bytes) {
            let at_bytes = self.starts_bytes[part.index] + part.offset_bytes - DATA_START_BYTES;
            self.members.count_checksum_errors(
                part.index,
                at_bytes,
                part.length_bytes / BLOCK_BYTES as u64,
            );
        }
    }

    fn keep_spare(&self, bytes: u64) -> Result<bool, DeviceError> {
        self.members.keep_spare(bytes)
    }
}
