//! Finding the superblock that counts, and making sure that it stays the one.
use crate::{Error, Result};
use cairn_blockdev::{AlignedBuffer, BlockDevice, read_verified};
use cairn_format::{BLOCK_SIZE, BlockNumber, FormatError, Geometry, Superblock};

/// What stands in a block, from whichever copy is good.
pub(super) fn read_block<T>(
    device: &dyn BlockDevice,
    block: BlockNumber,
    decode: impl FnMut(&[u8]) -> Decoded<T>,
) -> Result<T> {
    let mut buffer = AlignedBuffer::zeroed(BLOCK_SIZE);
    Ok(read_verified(device, block.offset_bytes(), &mut buffer, decode)??)
}

pub(super) type Decoded<T> = std::result::Result<T, FormatError>;

/// Finds the superblock that counts.
///
/// A slot that can't be *read* may hold the newest one, and the blocks of an older one may have
/// been used again: then only `read_only` goes on.
pub(crate) fn read_superblock(device: &dyn BlockDevice, read_only: bool) -> Result<Superblock> {
    let length_blocks = device.length_bytes() / BLOCK_SIZE as u64;
    if device.length_bytes() < Geometry::VOLUME_BYTES_MIN {
        return Err(Error::NotAVolume(format!(
            "it has {length_blocks} whole blocks, fewer than the smallest volume has"
        )));
    }
    let mut problems: Vec<(BlockNumber, String)> = Vec::new();
    let mut best: Option<Superblock> = None;
    // The copy stands at the volume's end, or at the device's if the slots say nothing, or
    // something older of that volume.
    let device_end = BlockNumber(length_blocks - 1);
    let mut from_device_end = false;
    for candidate in
        [Some(Geometry::SUPERBLOCKS[0]), Some(Geometry::SUPERBLOCKS[1]), Some(device_end), None]
    {
        let volume_end = || {
            best.as_ref().filter(|_| !from_device_end).map(|best| best.geometry.superblock_copy())
        };
        let Some(block) = candidate.or_else(|| volume_end().filter(|block| *block < device_end))
        else {
            continue;
        };
        match read_block(device, block, |bytes| Superblock::decode(bytes, block)) {
            Ok(superblock) => {
                let is_newer = |best: &Superblock| superblock.generation > best.generation;
                let other_volume =
                    |best: &Superblock| block == device_end && superblock.volume != best.volume;
                if best.as_ref().is_none_or(|best| is_newer(best) && !other_volume(best)) {
                    from_device_end = block == device_end;
                    best = Some(superblock);
                }
            }
            Err(error @ Error::Device(_)) if !read_only => return Err(error),
            Err(error) => problems.push((block, error.to_string())),
        }
    }
    let Some(best) = best else {
        let problems: Vec<_> = problems.into_iter().map(|(_, problem)| problem).collect();
        return Err(Error::NotAVolume(format!("no valid superblock ({})", problems.join("; "))));
    };
    let beyond_blocks = length_blocks.saturating_sub(best.geometry.total_blocks);
    if beyond_blocks > 0 {
        let (volume_bytes, beyond_bytes) =
            (best.geometry.total_blocks * BLOCK_SIZE as u64, beyond_blocks * BLOCK_SIZE as u64);
        tracing::info!(
            "the image is {beyond_bytes} bytes longer than its volume, which does not use them; `truncate -s {volume_bytes}` removes them \
             from an image file"
        );
    }
    // No superblock belongs at the end of an image that is longer than its volume.
    for (_, problem) in
        problems.iter().filter(|(block, _)| beyond_blocks == 0 || *block != device_end)
    {
        tracing::warn!("{problem}");
    }
    if best.geometry.total_blocks > length_blocks {
        return Err(Error::NotAVolume(format!(
            "the volume has {} blocks, the image only {length_blocks}: it was truncated",
            best.geometry.total_blocks
        )));
    }
    let features = best.features.read_only_compatible;
    if features != 0 && !read_only {
        return Err(Error::NotAVolume(format!(
            "it uses features {features:#x} that this version can only read; mount it read-only"
        )));
    }
    Ok(best)
}

/// Makes sure that a power failure brings back this superblock, and no other one, before anything
/// is written that another one refers to. Without a power failure before this mount, reads show too
/// little: a process that was killed may have written the superblock without a flush, a flush that
/// failed may have lost it, and one whose write failed may come back.
/// 1. Its copy at the end is written, durably. *A crash: this one or the one before, and nothing of
///    either is overwritten.*
/// 2. The other slot is written with what it holds. *A crash: the slot may be torn, and the copy is
///    there.*
pub(super) fn settle_superblocks(device: &dyn BlockDevice, superblock: &Superblock) -> Result<()> {
    let copy = superblock.geometry.superblock_copy();
    device.write(copy.offset_bytes(), &[&AlignedBuffer::copy_of(&superblock.encode(copy))])?;
    device.flush()?;
    let other = Geometry::SUPERBLOCKS[(superblock.generation.next().0 % 2) as usize];
    let mut bytes = AlignedBuffer::zeroed(BLOCK_SIZE);
    device.read(other.offset_bytes(), &mut bytes)?;
    device.write(other.offset_bytes(), &[&bytes])?;
    Ok(device.flush()?)
}

/// The bytes that are written again and again: superblocks, bitmaps, log; the superblock's copy.
pub(super) fn overwritten_in_place(geometry: Geometry) -> [std::ops::Range<u64>; 2] {
    let copy = geometry.superblock_copy();
    [
        0..geometry.data_start().offset_bytes(),
        copy.offset_bytes()..BlockNumber(copy.0 + 1).offset_bytes(),
    ]
}
