//! A mirror: every member holds everything. Reads come from the first one in sync.
//!
//! The [module](super) describes states, invariants, and copies that differ.
//!
//! Lock discipline: `writes` (rank `MIRROR`) is held shared while a write goes to the members, and
//! exclusively while a repair reads, compares and writes. Only the members' own locks are taken
//! under it. Labels are raised after it is released.

use super::error::ComposedError;
use super::health::DeviceHealth;
use super::label::{ComposedKind, DATA_START_BYTES};
use super::members::{Access, Candidate, Members};
use crate::aligned::AlignedBuffer;
use crate::device::{BLOCK_BYTES, BlockDevice, CheckedRange, gathered_bytes};
use crate::error::{DeviceError, Operation};
use crate::forward_to_device;
use crate::observer::DeviceObserver;
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::RwLock;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Bytes compared at once.
const CHUNK_BYTES: u64 = 1 << 20;

/// Two to eight members with the same content.
///
/// ```
/// use cairn_blockdev::composed::{Access, Candidate, ComposedKind, Mirror, make};
/// use cairn_blockdev::{BlockDevice, MemoryDevice};
/// use std::sync::Arc;
/// let disks: [Arc<dyn BlockDevice>; 2] =
///     [Arc::new(MemoryDevice::new(4 << 20)), Arc::new(MemoryDevice::new(4 << 20))];
/// make(ComposedKind::Mirror, &[("a".into(), disks[0].clone()), ("b".into(), disks[1].clone())])?;
///
/// let candidate = |name: &str, disk: Option<&Arc<dyn BlockDevice>>| Candidate {
///     name: name.into(),
///     device: disk.cloned(),
/// };
/// let both = vec![candidate("a", Some(&disks[0])), candidate("b", Some(&disks[1]))];
/// let mirror = Mirror::open(both, Access::ReadWrite, false)?;
/// mirror.write(0, &[&[7; 4096]])?;
/// mirror.flush()?;
/// drop(mirror);
///
/// let one_is_lost = vec![candidate("a", None), candidate("b", Some(&disks[1]))];
/// let mirror = Mirror::open(one_is_lost, Access::ReadWrite, true)?;
/// let mut block = vec![0; 4096];
/// mirror.read(0, &mut block)?;
/// assert_eq!(block, [7; 4096]);
/// # Ok::<(), cairn_blockdev::ComposedError>(())
/// ```
pub struct Mirror {
    pub(super) members: Members,
    writes: RwLock<()>,
    repaired_blocks: AtomicU64,
    resynchronised_blocks: AtomicU64,
}

/// Why copies differ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Difference {
    /// One of the copies was damaged.
    Damage,
    /// A crash interrupted writes.
    Crash,
}

impl Mirror {
    /// Opens the mirror of `candidates`, given in any order. A member that is missing or not in
    /// sync is accepted only with `degraded`; then the labels of the others first leave it behind.
    ///
    /// # Errors
    /// If they are not the members of one mirror, one is missing, or none is complete.
    pub fn open(
        candidates: Vec<Candidate>,
        access: Access,
        degraded: bool,
    ) -> Result<Mirror, ComposedError> {
        // Before any label changes.
        let problems = Members::look(ComposedKind::Mirror, &candidates)?;
        if !problems.is_empty() && !degraded {
            return Err(ComposedError::Degraded { members: problems });
        }
        let members = Members::open(ComposedKind::Mirror, candidates, access)?;
        if !problems.is_empty() {
            tracing::warn!("{} is degraded: {problems}", members.name);
        }
        let (repaired_blocks, resynchronised_blocks) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Mirror {
            members,
            writes: RwLock::new(Rank::MIRROR, ()),
            repaired_blocks,
            resynchronised_blocks,
        })
    }

    /// "mirror:" and the names of the members.
    pub fn name(&self) -> &str {
        &self.members.name
    }

    fn checked(
        &self,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<CheckedRange<'_>, DeviceError> {
        let range =
            CheckedRange { operation, offset_bytes, length_bytes, device: &self.members.name };
        range.check(self.length_bytes())?;
        let writes = !matches!(operation, Operation::Read);
        if writes && self.members.access != Access::ReadWrite {
            return Err(range.error(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "opened for reading only",
            )));
        }
        Ok(range)
    }

    /// Reads from the first member that works. Returns how many did not.
    pub(super) fn read_any(
        &self,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Result<usize, DeviceError> {
        let mut failure = None;
        let mut failures = 0;
        for (index, device) in self.members.usable() {
            match device.read(DATA_START_BYTES + offset_bytes, buffer) {
                Ok(()) => return Ok(failures),
                Err(error) => {
                    self.members.count_error(index, 0, &error);
                    failure.get_or_insert(error);
                    failures += 1;
                }
            }
        }
        Err(failure.unwrap_or_else(|| self.members.none_left(Operation::Read)))
    }

    /// Writes `good` over every copy that differs from it, and returns the number of blocks that
    /// differed. Does nothing if no copy equals `good`. A read-only device only counts them. The
    /// caller holds `writes` exclusively.
    fn equalise(&self, offset_bytes: u64, good: &[u8], why: Difference) -> u64 {
        let at_bytes = DATA_START_BYTES + offset_bytes;
        let mut copy = AlignedBuffer::zeroed(good.len());
        let mut differing = Vec::new();
        let mut equal = 0;
        for (index, device) in self.members.usable() {
            match device.read(at_bytes, &mut copy).is_ok().then(|| different_blocks(&copy, good)) {
                Some(blocks) if blocks.is_empty() => equal += 1,
                Some(blocks) => differing.push((index, device, blocks, why == Difference::Damage)),
                None => {
                    differing.push((index, device, (0..good.len() / BLOCK_BYTES).collect(), false))
                }
            }
        }
        if equal == 0 {
            return 0;
        }
        let mut written = 0;
        for (index, device, blocks, damaged) in differing {
            let count = blocks.len() as u64;
            let first_bytes = offset_bytes + (blocks[0] * BLOCK_BYTES) as u64;
            self.members.list[index].bad_blocks.fetch_add(count, Ordering::Relaxed);
            if damaged {
                self.members.count_checksum_errors(index, first_bytes, count);
            }
            if self.members.access == Access::ReadOnly {
                continue;
            }
            let failed = blocks.iter().find_map(|block| {
                let bytes = &good[block * BLOCK_BYTES..][..BLOCK_BYTES];
                device
                    .write(
                        at_bytes + (block * BLOCK_BYTES) as u64,
                        &[&AlignedBuffer::copy_of(bytes)],
                    )
                    .err()
            });
            match failed {
                Some(error) => {
                    self.members.count_error(index, 0, &error);
                    self.members.fail(index, &error);
                }
                None => {
                    match why {
                        Difference::Damage => {
                            self.members.count_repaired(index, first_bytes, count)
                        }
                        Difference::Crash => drop(
                            self.members.list[index]
                                .rewritten_blocks
                                .fetch_add(count, Ordering::Relaxed),
                        ),
                    }
                    written += count;
                }
            }
        }
        written
    }

    fn resynchronise_range(&self, range: &std::ops::Range<u64>) -> Result<(), DeviceError> {
        let mut at_bytes = range.start;
        while at_bytes < range.end {
            let length_bytes = CHUNK_BYTES.min(range.end - at_bytes);
            let mut bytes = AlignedBuffer::zeroed(length_bytes as usize);
            let exclusive = self.writes.write();
            self.read_any(at_bytes, &mut bytes)?;
            let written = self.equalise(at_bytes, &bytes, Difference::Crash);
            drop(exclusive);
            self.resynchronised_blocks.fetch_add(written, Ordering::Relaxed);
            at_bytes += length_bytes;
        }
        Ok(())
    }
}

fn different_blocks(copy: &[u8], good: &[u8]) -> Vec<usize> {
    let pairs = copy.chunks(BLOCK_BYTES).zip(good.chunks(BLOCK_BYTES)).enumerate();
    pairs.filter(|(_, (copy, good))| copy != good).map(|(block, _)| block).collect()
}

impl BlockDevice for Mirror {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.checked(Operation::Read, offset_bytes, buffer.len() as u64)?;
        if self.read_any(offset_bytes, buffer)? > 0 {
            // Writing a sector often makes an unreadable one readable again.
            self.repair(offset_bytes, buffer)?;
        }
        Ok(())
    }

    /// 1. Write to every member in sync. *A crash: any member has any part of it.*
    /// 2. If some failed: the others' labels leave them behind, durably.
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.checked(Operation::Write, offset_bytes, gathered_bytes(buffers))?;
        self.members.expect_open()?;
        let shared = self.writes.read();
        let outcome =
            self.members.on_each(|device| device.write(DATA_START_BYTES + offset_bytes, buffers));
        drop(shared);
        self.members.settle(outcome, Operation::Write)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.checked(Operation::Flush, 0, 0)?;
        self.members.flush_and_settle()
    }

    /// A failed discard leaves no member behind.
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        self.checked(Operation::Discard, offset_bytes, length_bytes)?;
        self.members.expect_open()?;
        let _shared = self.writes.read();
        let results: Vec<_> = self
            .members
            .usable()
            .map(|(_, device)| device.discard(DATA_START_BYTES + offset_bytes, length_bytes))
            .collect();
        results.into_iter().collect()
    }

    fn length_bytes(&self) -> u64 {
        self.members.authority.composed_bytes
    }

    /// The flush time of the slowest member.
    fn flush_time(&self) -> Duration {
        self.members.flush_time()
    }

    fn copies(&self) -> usize {
        self.members.usable().count().max(1)
    }

    fn read_copy(
        &self,
        copy: usize,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.checked(Operation::Read, offset_bytes, buffer.len() as u64)?;
        match self.members.usable().nth(copy) {
            Some((index, device)) => device
                .read(DATA_START_BYTES + offset_bytes, buffer)
                .inspect_err(|error| self.members.count_error(index, 0, error)),
            None => Err(self.members.none_left(Operation::Read)),
        }
    }

    fn repair(&self, offset_bytes: u64, good: &[u8]) -> Result<(), DeviceError> {
        self.checked(Operation::Read, offset_bytes, good.len() as u64)?;
        if self.copies() == 1 {
            return Ok(());
        }
        let exclusive = self.writes.write();
        let written = self.equalise(offset_bytes, good, Difference::Damage);
        drop(exclusive);
        self.repaired_blocks.fetch_add(written, Ordering::Relaxed);
        self.members.publish()
    }

    fn resynchronise(&self, ranges: &[std::ops::Range<u64>]) -> Result<(), DeviceError> {
        if self.members.access != Access::ReadWrite
            || !self.members.may_differ.load(Ordering::Acquire)
        {
            return Ok(());
        }
        for range in ranges {
            self.checked(Operation::Write, range.start, range.end - range.start)?;
            self.resynchronise_range(range)?;
        }
        let written = self.resynchronised_blocks.load(Ordering::Relaxed);
        if written > 0 {
            tracing::info!(
                "{}: {written} blocks differed after a crash; all copies are the same now",
                self.members.name
            );
        }
        self.members.publish()?;
        self.flush()?;
        self.members.may_differ.store(false, Ordering::Release);
        Ok(())
    }

    fn close(&self) -> Result<(), DeviceError> {
        self.members.close()
    }

    fn health(&self) -> Option<DeviceHealth> {
        Some(DeviceHealth {
            repaired_blocks: self.repaired_blocks.load(Ordering::Relaxed),
            resynchronised_blocks: self.resynchronised_blocks.load(Ordering::Relaxed),
            ..self.members.health()
        })
    }

    fn observe(&self, observer: &Arc<dyn DeviceObserver>) -> bool {
        self.members.observe(observer)
    }

    fn note_damage(&self, offset_bytes: u64, length_bytes: u64) {
        let blocks = length_bytes / BLOCK_BYTES as u64;
        self.members
            .usable()
            .for_each(|(index, _)| self.members.count_checksum_errors(index, offset_bytes, blocks));
    }

    fn keep_spare(&self, bytes: u64) -> Result<bool, DeviceError> {
        self.members.keep_spare(bytes)
    }
}

/// A device whose copy number `copy` is read first: for a caller that checks each copy of
/// everything.
pub struct CopyFirst<'a> {
    /// The device.
    pub device: &'a dyn BlockDevice,
    /// Below its [`BlockDevice::copies`].
    pub copy: usize,
}

impl BlockDevice for CopyFirst<'_> {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.device.read_copy(self.copy, offset_bytes, buffer)
    }

    forward_to_device!(self => self.device;
        write, flush, discard, length_bytes, flush_time, copies, read_copy, repair);
}
