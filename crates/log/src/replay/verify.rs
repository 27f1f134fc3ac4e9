//! Verifying the data of checkpoints that no flush is known to have covered.
//!
//! A log of small writes names tens of thousands of extents, which the allocator put side by side.
//! So extents are gathered from many checkpoints, sorted by address and read in runs of up to
//! [`RUN_BLOCKS`], small gaps included: the number of device reads follows the bytes and the places
//! on the device, not the number of extents. At most [`BATCH_BLOCKS`] blocks are gathered at once,
//! which bounds the memory and what is read behind the first checkpoint that fails.
use crate::error::ReplayError;
use cairn_blockdev::{AlignedBuffer, BlockDevice, read_verified};
use cairn_format::{BLOCK_SIZE, BlockNumber, Extent, Key, checksum};

/// Longest read: 1 MiB, as long as the longest extent.
pub(crate) const RUN_BLOCKS: u64 = 256;
/// A gap that costs less to read than another read would.
const GAP_BLOCKS: u64 = 16;
/// Blocks whose checksums are in memory at once: 256 MiB of data.
pub(crate) const BATCH_BLOCKS: u64 = 65536;

/// An extent whose data may be missing.
pub(crate) struct NewData {
    /// Number of its checkpoint in the chain.
    pub(crate) checkpoint: usize,
    pub(crate) key: Key,
    pub(crate) extent: Extent,
}

/// A checkpoint whose data is not all there.
pub(crate) struct Missing {
    pub(crate) checkpoint: usize,
    /// Which block was not written; or the error of a block that can't be read, which proves
    /// nothing.
    pub(crate) cause: Result<String, ReplayError>,
}

/// Reads what `batch` names and compares it with the checksums. What verifies is made the same in
/// all copies: no flush may have covered it, and each copy must have it before anything relies on
/// that. Returns the first checkpoint that fails.
///
/// Extents of checkpoints behind the one that fails may be made the same, too. That hurts nothing:
/// they lie in blocks that nothing durable refers to, or hold what an accepted checkpoint names as
/// well.
pub(crate) fn verify(
    device: &dyn BlockDevice,
    mut batch: Vec<NewData>,
) -> Result<Option<Missing>, ReplayError> {
    batch.sort_by_key(|new| new.extent.start);
    let mut first = None;
    let mut rest = batch.as_slice();
    while !rest.is_empty() {
        let (run, later) = rest.split_at(run_length(rest));
        verify_run(device, run, &mut first)?;
        rest = later;
    }
    Ok(first)
}

/// How many of these extents, sorted by address, are read at once.
fn run_length(extents: &[NewData]) -> usize {
    let start = extents[0].extent.start.0;
    let mut end = start;
    let joins = |new: &&NewData| {
        let range = new.extent.range();
        let joins = end == start
            || (range.start.0 <= end + GAP_BLOCKS && range.end().0 <= start + RUN_BLOCKS);
        end = end.max(range.end().0);
        joins
    };
    extents.iter().take_while(joins).count()
}

fn verify_run(
    device: &dyn BlockDevice,
    run: &[NewData],
    first: &mut Option<Missing>,
) -> Result<(), ReplayError> {
    let start = run[0].extent.start;
    let end = run.iter().map(|new| new.extent.range().end().0).max().unwrap_or(start.0);
    let mut bytes = AlignedBuffer::zeroed((end - start.0) as usize * BLOCK_SIZE);
    // A gap that can't be read says nothing of the extents: then each is read alone, and its error
    // counts.
    let whole = device.read(start.offset_bytes(), &mut bytes).is_ok();
    for new in run {
        let from = (new.extent.start.0 - start.0) as usize * BLOCK_SIZE;
        let data = &mut bytes[from..from + new.extent.blocks as usize * BLOCK_SIZE];
        let offset_bytes = new.extent.start.offset_bytes();
        let read =
            if whole { Ok(()) } else { device.read(offset_bytes, data).map_err(ReplayError::from) };
        let cause = match read.and_then(|()| block_without_copy(device, &new.extent, data)) {
            Ok(None) => {
                device.repair(offset_bytes, data)?;
                continue;
            }
            Ok(Some(block)) => Ok(format!("block {block} of item {:?} was not written", new.key)),
            Err(error) => Err(error),
        };
        if first.as_ref().is_none_or(|first| new.checkpoint < first.checkpoint) {
            *first = Some(Missing { checkpoint: new.checkpoint, cause });
        }
    }
    Ok(())
}

/// The first block of an extent that no copy holds as its checksum says.
fn block_without_copy(
    device: &dyn BlockDevice,
    extent: &Extent,
    data: &mut [u8],
) -> Result<Option<u64>, ReplayError> {
    for (block, (bytes, &sum)) in
        (extent.start.0..).zip(data.chunks_exact_mut(BLOCK_SIZE).zip(&extent.checksums))
    {
        let verify = |bytes: &[u8]| if checksum(bytes) == sum { Ok(()) } else { Err(()) };
        if verify(bytes).is_err()
            && read_verified(device, BlockNumber(block).offset_bytes(), bytes, verify)?.is_err()
        {
            return Ok(Some(block));
        }
    }
    Ok(None)
}
