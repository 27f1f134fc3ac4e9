//! The system calls of [`FileDevice`](crate::FileDevice). Each repeats interrupted calls and
//! completes short ones.
//!
//! States: none. Lock discipline: takes no lock.

use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use rustix::io::Errno;
use std::fs::{File, Metadata};
use std::io::{self, IoSlice, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// The most that is allocated behind the end of a file.
const BEHIND_END_BYTES_MAX: u64 = 64 << 20;

/// The most parts of one system call (`IOV_MAX`).
pub(crate) const PARTS_MAX: usize = 1024;

/// The kinds of storage for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    RegularFile,
    BlockDevice,
}

/// The kind of storage, or `None` for a directory, a pipe and the like.
pub(crate) fn storage(metadata: &Metadata) -> Option<Storage> {
    let kind = metadata.file_type();
    if kind.is_file() {
        Some(Storage::RegularFile)
    } else if kind.is_block_device() {
        Some(Storage::BlockDevice)
    } else {
        None
    }
}

/// The size of a regular file or of a block device.
pub(crate) fn length_bytes(file: &File) -> io::Result<u64> {
    let mut file = file;
    io::Seek::seek(&mut file, SeekFrom::End(0))
}

/// The first hole in `range`, clipped to it. Unwritten allocated blocks count as holes.
pub(crate) fn next_hole(file: &File, range: Range<u64>) -> io::Result<Option<Range<u64>>> {
    let start = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(range.start))?;
    if start >= range.end {
        return Ok(None);
    }
    let end = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(start)) {
        Ok(end) => end.min(range.end),
        Err(Errno::NXIO) => range.end,
        Err(error) => return Err(error.into()),
    };
    Ok(Some(start..end))
}

/// Locks the file against other processes, without waiting. Fails with `WouldBlock` if another
/// process holds the lock.
pub(crate) fn lock(file: &File, exclusive: bool) -> io::Result<()> {
    let operation = if exclusive {
        FlockOperation::NonBlockingLockExclusive
    } else {
        FlockOperation::NonBlockingLockShared
    };
    Ok(rustix::io::retry_on_intr(|| rustix::fs::flock(file, operation))?)
}

/// Unlocks an open file, even while other descriptors of it exist.
pub(crate) fn unlock(file: &File) {
    // The close that follows would do it too, unless another process has a descriptor.
    let _ = rustix::io::retry_on_intr(|| rustix::fs::flock(file, FlockOperation::Unlock));
}

/// The file behind a loop device, if this is one and the file still has its name.
pub(crate) fn backing_file(device: &File) -> io::Result<Option<File>> {
    let metadata = device.metadata()?;
    if storage(&metadata) != Some(Storage::BlockDevice) {
        return Ok(None);
    }
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    match std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/loop/backing_file")) {
        Ok(name) => Ok(File::open(name.trim_end_matches('\n')).ok()),
        Err(_) => Ok(None),
    }
}

/// Turns direct I/O on. Returns whether the file's system accepts it.
pub(crate) fn set_direct(file: &File, direct: bool) -> io::Result<bool> {
    let mut flags = rustix::fs::fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, direct);
    match rustix::fs::fcntl_setfl(file, flags) {
        Ok(()) => Ok(direct),
        Err(Errno::INVAL) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Fills `buffer`.
pub(crate) fn read_all(
    file: &File,
    mut offset_bytes: u64,
    mut buffer: &mut [u8],
) -> io::Result<()> {
    while !buffer.is_empty() {
        let count =
            rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut *buffer, offset_bytes))?;
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends here"));
        }
        offset_bytes += count as u64;
        buffer = &mut buffer[count..];
    }
    Ok(())
}

/// Writes all buffers, one after the other, with as few system calls as possible.
pub(crate) fn write_all(file: &File, mut offset_bytes: u64, buffers: &[&[u8]]) -> io::Result<()> {
    let mut slices: Vec<IoSlice<'_>> = buffers
        .iter()
        .filter(|buffer| !buffer.is_empty())
        .map(|buffer| IoSlice::new(buffer))
        .collect();
    let mut rest = slices.as_mut_slice();
    while !rest.is_empty() {
        let now = &rest[..rest.len().min(PARTS_MAX)];
        let count = rustix::io::retry_on_intr(|| rustix::io::pwritev(file, now, offset_bytes))?;
        if count == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        offset_bytes += count as u64;
        IoSlice::advance_slices(&mut rest, count);
    }
    Ok(())
}

/// Makes completed writes durable, and the file's own metadata as far as reads need it.
///
/// Never repeated after an interruption: the kernel reports an error of fdatasync once, and a
/// second call would hide it.
pub(crate) fn flush(file: &File) -> io::Result<()> {
    Ok(rustix::fs::fdatasync(file)?)
}

/// Allocates blocks of a regular file.
pub(crate) fn allocate(file: &File, offset_bytes: u64, length_bytes: u64) -> io::Result<()> {
    let call = || rustix::fs::fallocate(file, FallocateFlags::empty(), offset_bytes, length_bytes);
    unless_unsupported(rustix::io::retry_on_intr(call))
}

/// Allocates `bytes` behind the end of a regular file, which does not grow. Returns whether its
/// file system can.
pub(crate) fn allocate_behind_end(file: &File, bytes: u64) -> io::Result<bool> {
    let end = length_bytes(file)?;
    let call = || rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, end, bytes);
    match rustix::io::retry_on_intr(call) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::FBIG) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Frees what is allocated behind the end of a regular file. One of the two calls does it; which
/// one depends on the file system.
pub(crate) fn free_behind_end(file: &File) -> io::Result<()> {
    let end = length_bytes(file)?;
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    unless_unsupported(rustix::io::retry_on_intr(|| {
        rustix::fs::fallocate(file, mode, end, BEHIND_END_BYTES_MAX)
    }))?;
    file.set_len(end)
}

/// Whether a regular file has less storage than its length.
pub(crate) fn is_sparse(file: &File) -> io::Result<bool> {
    let metadata = file.metadata()?;
    Ok(metadata.blocks() * 512 < metadata.len())
}

/// Discards a range of the host's file system or of the disk. Does nothing where that is not
/// supported.
pub(crate) fn discard(
    file: &File,
    storage: Storage,
    offset_bytes: u64,
    length_bytes: u64,
) -> io::Result<()> {
    if length_bytes == 0 {
        return Ok(());
    }
    match storage {
        Storage::RegularFile => {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            unless_unsupported(rustix::io::retry_on_intr(|| {
                rustix::fs::fallocate(file, mode, offset_bytes, length_bytes)
            }))
        }
        Storage::BlockDevice => {
            unless_unsupported(discard_blocks(file, offset_bytes, length_bytes))
        }
    }
}

/// `ioctl(BLKDISCARD)`.
fn discard_blocks(file: &File, offset_bytes: u64, length_bytes: u64) -> Result<(), Errno> {
    const BLKDISCARD: rustix::ioctl::Opcode = rustix::ioctl::opcode::none(0x12, 119);
    // SAFETY: BLKDISCARD reads two 64-bit words, offset and length in bytes, which is what the
    // array holds.
    let request =
        unsafe { rustix::ioctl::Setter::<BLKDISCARD, [u64; 2]>::new([offset_bytes, length_bytes]) };
    // SAFETY: the request changes no memory of this process; the descriptor is a block device
    // opened by the caller, and the caller gave up the content of the range.
    unsafe { rustix::ioctl::ioctl(file, request) }
}

fn unless_unsupported(result: Result<(), Errno>) -> io::Result<()> {
    match result {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
