//! A device in a regular file or on a disk.
//!
//! It uses direct I/O where the host offers it. Then a completed write lies in the host's storage,
//! not in its page cache, and a flush (fdatasync) costs what the storage's flush costs.
//!
//! Invariants: while the device lives, the file is locked against other processes (exclusively, or
//! shared among readers); dropping the device unlocks it. The file never grows or shrinks. With
//! direct I/O only aligned memory reaches the kernel.
//!
//! Lock discipline: the buffer pool's lock (rank `BUFFERS`), briefly; during a write to an image
//! file with holes, that of `holes`.

use crate::aligned::{AlignedBuffer, BufferPool, is_aligned};
use crate::counters::{CounterCells, DeviceCounters};
use crate::device::{BLOCK_BYTES, BlockDevice, CheckedRange, SetWrite, gathered_bytes};
use crate::error::{DeviceError, Operation};
use crate::flush_time::FlushTime;
use crate::holes::Holes;
use crate::kernel::{self, PARTS_MAX, Storage};
use crate::raw_file::RawFile;
use crate::ring::{RingWrite, WriteRings};
use cairn_environment::{clock, thread};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, IoSlice};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The size of one copy between unaligned memory and the device.
const BOUNCE_BYTES: usize = 1 << 20;
const BOUNCE_BUFFERS_KEPT: usize = 8;

/// A tool that inspects new disks (udev) locks them briefly: the number of attempts to lock one,
/// and the pause between them.
const DISK_LOCK_ATTEMPTS: u32 = 25;
const DISK_LOCK_PAUSE: Duration = Duration::from_millis(20);

/// How to open a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Reads only, beside other readers.
    ReadOnly,
    /// Reads and writes, alone.
    ReadWrite,
}

/// A regular file or a block device of the system.
///
/// ```
/// use cairn_blockdev::{BlockDevice, FileDevice, OpenMode};
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("image");
/// FileDevice::create(&path, 1 << 20)?;
/// let device = FileDevice::open(&path, OpenMode::ReadWrite)?;
/// device.write(0, &[&[1; 4096]])?;
/// device.flush()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FileDevice {
    name: Arc<str>,
    file: Arc<File>,
    /// The file behind a loop device, locked as well: the same volume must not be in use under its
    /// other name.
    backing: Option<File>,
    storage: Storage,
    mode: OpenMode,
    direct: bool,
    length_bytes: u64,
    /// Of an image file with direct I/O.
    holes: Option<Holes>,
    /// For sets of writes, with direct I/O. Without rings, the writes of a set go one after the
    /// other.
    rings: Option<WriteRings>,
    bounce: BufferPool,
    flush_time: FlushTime,
    counters: Arc<CounterCells>,
}

impl FileDevice {
    /// Opens a regular file or a block device, and locks it.
    ///
    /// # Errors
    /// If it does not exist, may not be opened, is neither of the two, or is in use by another
    /// process ([`DeviceError::is_in_use`]).
    pub fn open(path: &Path, mode: OpenMode) -> Result<FileDevice, DeviceError> {
        let name = name_of(path);
        let failed = |error| DeviceError::new(Operation::Open, 0, 0, &name, error);
        // Checked before the open: opening a pipe would wait for its other end.
        usable(&std::fs::metadata(path).map_err(failed)?).map_err(failed)?;
        let mut options = OpenOptions::new();
        options.read(true).write(mode == OpenMode::ReadWrite);
        let file = options.open(path).map_err(failed)?;
        FileDevice::from_file(name, file, mode)
    }

    /// Creates a regular file of `length_bytes` without content: every block is a hole that reads
    /// as zeros. After an error, no new file remains.
    ///
    /// # Errors
    /// If the file exists, its length is not a multiple of 4,096, or the host refuses.
    pub fn create(path: &Path, length_bytes: u64) -> Result<FileDevice, DeviceError> {
        let name = name_of(path);
        let failed = |error| DeviceError::new(Operation::Create, 0, length_bytes, &name, error);
        if !length_bytes.is_multiple_of(BLOCK_BYTES as u64) {
            let message = format!("{length_bytes} bytes are not a multiple of {BLOCK_BYTES}");
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, message)));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(failed)?;
        let too_long = |error: io::Error| {
            io::Error::new(
                error.kind(),
                format!("{length_bytes} bytes are not possible here: {error}"),
            )
        };
        let prepared = file
            .set_len(length_bytes)
            .map_err(too_long)
            .and_then(|()| file.sync_all())
            .and_then(|()| sync_parent(path));
        let device = prepared
            .map_err(failed)
            .and_then(|()| FileDevice::from_file(name.clone(), file, OpenMode::ReadWrite));
        if device.is_err() {
            // The caller needs the first error.
            let _ = std::fs::remove_file(path);
        }
        device
    }

    fn from_file(name: Arc<str>, file: File, mode: OpenMode) -> Result<FileDevice, DeviceError> {
        let failed = |error| DeviceError::new(Operation::Open, 0, 0, &name, error);
        let storage = file.metadata().and_then(|metadata| usable(&metadata)).map_err(failed)?;
        let not_locked = |error| DeviceError::new(Operation::Lock, 0, 0, &name, error);
        lock(&file, storage, mode).map_err(not_locked)?;
        let backing = kernel::backing_file(&file).map_err(failed)?;
        if let Some(backing) = &backing {
            kernel::lock(backing, mode == OpenMode::ReadWrite).map_err(not_locked)?;
        }
        let end_bytes = kernel::length_bytes(&file).map_err(failed)?;
        let length_bytes = end_bytes - end_bytes % BLOCK_BYTES as u64;
        let direct = use_direct(&file, length_bytes).map_err(failed)?;
        if !direct {
            tracing::warn!(
                device = %name,
                "no direct I/O here: writes go through the page cache of the host"
            );
        }
        Ok(FileDevice {
            name,
            file: Arc::new(file),
            backing,
            storage,
            mode,
            direct,
            length_bytes,
            holes: (direct && storage == Storage::RegularFile).then(|| Holes::new(length_bytes)),
            rings: if direct && mode == OpenMode::ReadWrite { WriteRings::new() } else { None },
            bounce: BufferPool::new(BOUNCE_BYTES, BOUNCE_BUFFERS_KEPT),
            flush_time: FlushTime::default(),
            counters: Arc::default(),
        })
    }

    /// The same device without rings: it writes the members of a set one after the other, as on a
    /// kernel without io_uring.
    pub fn without_rings(mut self) -> FileDevice {
        self.rings = None;
        self
    }

    /// Whether the device writes the members of a set in parallel.
    pub fn has_rings(&self) -> bool {
        self.rings.is_some()
    }

    /// The path it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the device uses direct I/O and not the host's page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Whether this is a block device of the system, not a regular file.
    pub fn is_block_device(&self) -> bool {
        self.storage == Storage::BlockDevice
    }

    /// The requests that the device has completed.
    pub fn counters(&self) -> DeviceCounters {
        self.counters.snapshot()
    }

    /// Allocates a range, writes zeros to all of it, and flushes. For the areas that are rewritten
    /// between flushes (log ring, superblocks): in an image file, a first write into a hole changes
    /// the host's metadata, and the next flush then waits for the host's journal.
    ///
    /// # Errors
    /// If the host has no space, or a write or the flush fails.
    pub fn preallocate_and_zero(
        &self,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<(), DeviceError> {
        let range = self.checked(Operation::Preallocate, offset_bytes, length_bytes)?;
        self.writable(range)?;
        if length_bytes == 0 {
            return Ok(());
        }
        if self.storage == Storage::RegularFile {
            kernel::allocate(&self.file, offset_bytes, length_bytes)
                .map_err(|error| range.error(error))?;
        }
        let zeros = AlignedBuffer::zeroed(BOUNCE_BYTES.min(length_bytes as usize));
        let mut done_bytes = 0;
        while done_bytes < length_bytes {
            let part = zeros.len().min((length_bytes - done_bytes) as usize);
            self.write(offset_bytes + done_bytes, &[&zeros[..part]])?;
            done_bytes += part as u64;
        }
        // All metadata too, since the allocation must be durable.
        self.file.sync_all().map_err(|error| range.error(error))
    }

    /// Another descriptor of the open file, as a child process has it between fork and exec.
    #[cfg(test)]
    pub(crate) fn descriptor_of_a_child(&self) -> File {
        self.file.try_clone().expect("the process may have one more descriptor")
    }

    fn checked(
        &self,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<CheckedRange<'_>, DeviceError> {
        let range = CheckedRange { operation, offset_bytes, length_bytes, device: &self.name };
        range.check(self.length_bytes)?;
        Ok(range)
    }

    /// Stops filling holes when the host is full.
    fn noted(&self, error: DeviceError) -> DeviceError {
        if let Some(holes) = self.holes.as_ref().filter(|_| error.is_storage_full()) {
            holes.suspend(true);
        }
        error
    }

    fn writable(&self, range: CheckedRange<'_>) -> Result<(), DeviceError> {
        match self.mode {
            OpenMode::ReadWrite => Ok(()),
            OpenMode::ReadOnly => Err(range
                .error(io::Error::new(io::ErrorKind::PermissionDenied, "opened for reading only"))),
        }
    }

    /// Whether a ring can take the write as it is. Before a small write into a hole, the hole is
    /// filled.
    fn ready_for_ring(&self, write: &SetWrite<'_>) -> bool {
        let (offset_bytes, length_bytes) = (write.offset_bytes, gathered_bytes(&write.buffers));
        let fits = write.buffers.len() <= PARTS_MAX
            && write.buffers.iter().all(|buffer| is_aligned(buffer));
        let range = self.checked(Operation::Write, offset_bytes, length_bytes);
        if !fits || length_bytes == 0 || range.and_then(|range| self.writable(range)).is_err() {
            return false;
        }
        self.holes.as_ref().is_none_or(|holes| {
            holes.before_write(&self.file, offset_bytes, length_bytes).is_none()
        })
    }

    /// Sends through a ring those of `writes` that it can take, and returns a result for each:
    /// `None` if it must still be written.
    fn write_through_ring(
        &self,
        rings: &WriteRings,
        writes: &[SetWrite<'_>],
        meanwhile: &mut dyn FnMut(),
    ) -> Vec<Option<Result<(), DeviceError>>> {
        let mut results: Vec<_> = writes.iter().map(|_| None).collect();
        let ready: Vec<usize> =
            (0..writes.len()).filter(|&index| self.ready_for_ring(&writes[index])).collect();
        if ready.is_empty() {
            return results;
        }
        let requests: Vec<RingWrite<'_>> = ready
            .iter()
            .map(|&index| RingWrite {
                offset_bytes: writes[index].offset_bytes,
                parts: writes[index].buffers.iter().map(|buffer| IoSlice::new(buffer)).collect(),
            })
            .collect();
        let Some(written) = rings.write(&self.file, &requests, meanwhile) else { return results };
        for (index, result) in ready.into_iter().zip(written) {
            let length_bytes = gathered_bytes(&writes[index].buffers);
            let range = CheckedRange {
                operation: Operation::Write,
                offset_bytes: writes[index].offset_bytes,
                length_bytes,
                device: &self.name,
            };
            results[index] = match result {
                Ok(count) if count as u64 == length_bytes => {
                    self.counters.count_write(length_bytes);
                    Some(Ok(()))
                }
                // The write was short or the kernel refused it: write all of it again by a plain
                // call, whose errors count.
                Ok(_) => None,
                Err(error) => {
                    tracing::debug!("through a ring: {}", range.error(error));
                    None
                }
            };
        }
        results
    }

    /// Writes what no ring has written, one after the other.
    fn write_rest(
        &self,
        writes: &[SetWrite<'_>],
        written: Vec<Option<Result<(), DeviceError>>>,
    ) -> Vec<Result<(), DeviceError>> {
        let rest = |(write, done): (&SetWrite<'_>, Option<_>)| {
            done.unwrap_or_else(|| self.write(write.offset_bytes, &write.buffers))
        };
        writes.iter().zip(written).map(rest).collect()
    }

    fn read_bounced(&self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut bounce = self.bounce.take();
        let mut position = offset_bytes;
        for part in buffer.chunks_mut(BOUNCE_BYTES) {
            kernel::read_all(&self.file, position, &mut bounce[..part.len()])?;
            part.copy_from_slice(&bounce[..part.len()]);
            position += part.len() as u64;
        }
        Ok(())
    }

    /// Gathers the parts in a buffer, and writes it whenever it is full.
    fn write_bounced(&self, offset_bytes: u64, buffers: &[&[u8]]) -> io::Result<()> {
        let mut bounce = self.bounce.take();
        let mut position = offset_bytes;
        let mut filled = 0;
        for buffer in buffers {
            let mut rest = *buffer;
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(BOUNCE_BYTES - filled));
                bounce[filled..filled + now.len()].copy_from_slice(now);
                filled += now.len();
                rest = later;
                if filled == BOUNCE_BYTES {
                    kernel::write_all(&self.file, position, &[&bounce[..filled]])?;
                    position += filled as u64;
                    filled = 0;
                }
            }
        }
        kernel::write_all(&self.file, position, &[&bounce[..filled]])
    }
}

impl Drop for FileDevice {
    /// The kernel releases a lock when the last descriptor of the open file is closed. A child that
    /// another thread is starting has a copy of each descriptor between fork and exec. So the drop
    /// unlocks explicitly, and the next open finds the file free.
    fn drop(&mut self) {
        for file in [Some(&*self.file), self.backing.as_ref()].into_iter().flatten() {
            kernel::unlock(file);
        }
    }
}

fn name_of(path: &Path) -> Arc<str> {
    Arc::from(path.display().to_string())
}

fn usable(metadata: &Metadata) -> io::Result<Storage> {
    let refusal =
        || io::Error::new(io::ErrorKind::InvalidInput, "neither a regular file nor a block device");
    kernel::storage(metadata).ok_or_else(refusal)
}

fn lock(file: &File, storage: Storage, mode: OpenMode) -> io::Result<()> {
    let attempts = if storage == Storage::BlockDevice { DISK_LOCK_ATTEMPTS } else { 1 };
    for _ in 1..attempts {
        match kernel::lock(file, mode == OpenMode::ReadWrite) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                clock::sleep(DISK_LOCK_PAUSE)
            }
            result => return result,
        }
    }
    kernel::lock(file, mode == OpenMode::ReadWrite)
}

/// Turns direct I/O on, and off again if reading the first block fails: some file systems accept
/// the flag and refuse the reads.
fn use_direct(file: &File, length_bytes: u64) -> io::Result<bool> {
    if !kernel::set_direct(file, true)? {
        return Ok(false);
    }
    if length_bytes == 0 {
        return Ok(true);
    }
    match kernel::read_all(file, 0, &mut AlignedBuffer::zeroed(BLOCK_BYTES)) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            kernel::set_direct(file, false)
        }
        // The caller that reads an unreadable block gets the error.
        _ => Ok(true),
    }
}

/// Makes a new file's name durable.
fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(parent)?.sync_all()
}

impl BlockDevice for FileDevice {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        thread::will_block();
        let range = self.checked(Operation::Read, offset_bytes, buffer.len() as u64)?;
        let result = if self.direct && !is_aligned(buffer) {
            self.read_bounced(offset_bytes, buffer)
        } else {
            kernel::read_all(&self.file, offset_bytes, buffer)
        };
        result.map_err(|error| range.error(error))?;
        self.counters.count_read(range.length_bytes);
        Ok(())
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        thread::will_block();
        let range = self.checked(Operation::Write, offset_bytes, gathered_bytes(buffers))?;
        self.writable(range)?;
        let _large_write = self
            .holes
            .as_ref()
            .and_then(|holes| holes.before_write(&self.file, offset_bytes, range.length_bytes));
        let result = if self.direct && !buffers.iter().all(|buffer| is_aligned(buffer)) {
            self.write_bounced(offset_bytes, buffers)
        } else {
            kernel::write_all(&self.file, offset_bytes, buffers)
        };
        result.map_err(|error| self.noted(range.error(error)))?;
        self.counters.count_write(range.length_bytes);
        Ok(())
    }

    fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
        thread::will_block();
        match &self.rings {
            Some(rings) if writes.len() > 1 => {
                self.write_rest(writes, self.write_through_ring(rings, writes, &mut || {}))
            }
            _ => {
                writes.iter().map(|write| self.write(write.offset_bytes, &write.buffers)).collect()
            }
        }
    }

    fn write_set_while(
        &self,
        writes: &[SetWrite<'_>],
        meanwhile: &mut dyn FnMut(),
    ) -> Vec<Result<(), DeviceError>> {
        thread::will_block();
        let Some(rings) = &self.rings else {
            meanwhile();
            return self.write_set(writes);
        };
        let mut called = false;
        let mut once = || {
            if !std::mem::replace(&mut called, true) {
                meanwhile();
            }
        };
        let written = self.write_through_ring(rings, writes, &mut once);
        once();
        self.write_rest(writes, written)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        thread::will_block();
        let range = self.checked(Operation::Flush, 0, 0)?;
        self.writable(range)?;
        let begin = clock::now_monotonic();
        kernel::flush(&self.file).map_err(|error| range.error(error))?;
        self.flush_time.record(begin.elapsed());
        self.counters.count_flush();
        Ok(())
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        let range = self.checked(Operation::Discard, offset_bytes, length_bytes)?;
        self.writable(range)?;
        let _not_filled_meanwhile = self.holes.as_ref().map(Holes::during_discard);
        kernel::discard(&self.file, self.storage, offset_bytes, length_bytes)
            .map_err(|error| range.error(error))?;
        self.counters.count_discard();
        Ok(())
    }

    fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn raw_file(&self) -> Option<RawFile> {
        self.direct.then(|| RawFile::new(&self.file, &self.counters))
    }

    fn flush_time(&self) -> Duration {
        self.flush_time.average()
    }

    /// The reserve lies behind the end of the image file, where nothing is read.
    fn keep_spare(&self, bytes: u64) -> Result<bool, DeviceError> {
        let range = CheckedRange {
            operation: Operation::Preallocate,
            offset_bytes: self.length_bytes,
            length_bytes: bytes,
            device: &self.name,
        };
        self.writable(range)?;
        if self.storage != Storage::RegularFile {
            return Ok(false);
        }
        let kept = match bytes {
            0 => kernel::free_behind_end(&self.file).map(|()| true),
            _ => kernel::is_sparse(&self.file)
                .and_then(|sparse| Ok(sparse && kernel::allocate_behind_end(&self.file, bytes)?)),
        };
        if let (Ok(true), 1.., Some(holes)) = (&kept, bytes, &self.holes) {
            holes.suspend(false);
        }
        kept.map_err(|error| self.noted(range.error(error)))
    }
}
