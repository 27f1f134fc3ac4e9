//! The calls of a volume that only a mount makes, each in place of the simple one that it must
//! agree with: reads from memory or in two steps, copies of what is in memory, writes of shared
//! buffers, lists with attributes, an fsync that finds that nothing is left to do.
//!
//! A client takes one of the ways for each operation, by its index, so a repetition takes the same.
//! Lock discipline: takes no lock.
use cairn_blockdev::{AlignedBuffer, BlockPool};
use cairn_engine::{
    Attributes, DirectoryItem, Error, FsyncKind, InodeId, ReadAtOnce, Volume, WritePlace,
    WriteTimes,
};

const BLOCK_BYTES: usize = 4096;

/// Reads like [`Volume::read`].
pub(crate) fn read(
    volume: &Volume,
    way: usize,
    inode: InodeId,
    offset_bytes: u64,
    length_bytes: usize,
) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    if way.is_multiple_of(4) {
        volume.read(inode, offset_bytes, length_bytes, &mut bytes)?;
        return Ok(bytes);
    }
    let mut buffer = AlignedBuffer::zeroed(length_bytes);
    let read = match way % 4 {
        // Whole blocks may come from the device without a copy.
        1 => read_in_two_steps(volume, inode, offset_bytes, &mut buffer),
        2 => volume.read_cached_into(inode, offset_bytes, &mut buffer[..length_bytes]),
        _ => None,
    };
    let read = match read {
        Some(read) => read.min(length_bytes),
        None => volume.read_into(inode, offset_bytes, &mut buffer[..length_bytes])?,
    };
    bytes.extend_from_slice(&buffer[..read]);
    Ok(bytes)
}

/// As a request thread does that has the kernel read the device. A simulated device is no file, so
/// of it nothing is planned.
fn read_in_two_steps(
    volume: &Volume,
    inode: InodeId,
    offset_bytes: u64,
    buffer: &mut [u8],
) -> Option<usize> {
    match volume.read_at_once(inode, offset_bytes, buffer)? {
        ReadAtOnce::Done(read) => Some(read),
        ReadAtOnce::Planned(planned) => {
            let part = &mut buffer[planned.bytes()];
            let length_bytes = part.len();
            let read = rustix::io::pread(planned.file(), part, planned.device_offset_bytes());
            (read.ok()? == length_bytes).then(|| volume.finish_read(&planned, buffer))?
        }
    }
}

/// Writes like [`Volume::write`].
pub(crate) fn write(
    volume: &Volume,
    way: usize,
    inode: InodeId,
    offset_bytes: u64,
    bytes: &[u8],
) -> Result<(), Error> {
    if way.is_multiple_of(2) {
        return volume.write(inode, offset_bytes, bytes);
    }
    // So that blocks of the file are blocks of the buffer, which then become the file's; or not.
    let before = if way % 4 == 1 { offset_bytes as usize % BLOCK_BYTES } else { 0 };
    let range = before..before + bytes.len();
    let mut buffer = BlockPool::new(0).take(range.end);
    buffer[range.clone()].copy_from_slice(bytes);
    let place = WritePlace::At(offset_bytes);
    volume.write_shared(inode, place, &buffer.share(), range, WriteTimes::Now).map(|_| ())
}

/// Copies like [`Volume::copy_range`].
pub(crate) fn copy_range(
    volume: &Volume,
    way: usize,
    from: (InodeId, u64),
    to: (InodeId, u64),
    length_bytes: u64,
) -> Result<u64, Error> {
    let at_once = match way % 2 {
        0 => None,
        _ => volume.copy_cached(from, to, length_bytes, WriteTimes::Now),
    };
    at_once.unwrap_or_else(|| volume.copy_range(from.0, from.1, to.0, to.1, length_bytes))
}

/// Makes an inode durable like [`Volume::fsync_blocking`].
pub(crate) fn fsync(
    volume: &Volume,
    way: usize,
    inode: InodeId,
    kind: FsyncKind,
) -> Result<(), Error> {
    if way % 2 == 1 && volume.is_durable(inode, kind) {
        return Ok(());
    }
    volume.fsync_blocking(inode, kind)
}

/// Lists like [`Volume::read_directory`]; attributes that are not those of the entry are an error.
pub(crate) fn read_directory(
    volume: &Volume,
    way: usize,
    directory: InodeId,
    cookie: u64,
    take: &mut dyn FnMut(DirectoryItem<'_>) -> bool,
) -> Result<(), Error> {
    if way.is_multiple_of(2) {
        return volume.read_directory(directory, cookie, take);
    }
    let (mut referenced, mut others) = (Vec::new(), 0);
    let result = volume.read_directory_plus(directory, cookie, &mut |item, attributes| {
        let Attributes { inode, file_type, .. } = *attributes;
        others += u64::from((inode, file_type) != (item.inode, item.file_type));
        let takes = take(item);
        if takes {
            referenced.push(inode);
        }
        takes
    });
    referenced.into_iter().for_each(|inode| volume.forget(inode, 1));
    match others {
        0 => result,
        // No operation of a client expects this error of a list.
        _ => Err(Error::InvalidArgument("an entry is listed with another's attributes")),
    }
}
