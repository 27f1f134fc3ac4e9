//! Finding the bitmaps that belong to the superblock.
use super::superblock::read_block;
use crate::Result;
use crate::store::BitmapSlot;
use cairn_blockdev::{AlignedBuffer, BlockDevice};
use cairn_format::{
    BITMAP_BYTES, BLOCK_SIZE, Bitmap, FormatError, Structure, Superblock,
    bitmap_generations_checksum,
};

/// Groups whose bitmaps are read at once: 1 MiB of each slot.
const GROUPS_PER_READ: u64 = 256;

/// Bitmaps as the superblock sees them.
pub(super) struct Bitmaps {
    #[allow(clippy::vec_box)] // handed on as it is
    pub(super) bits: Vec<Box<[u8; BITMAP_BYTES]>>,
    pub(super) slots: Vec<BitmapSlot>,
    /// Groups with a slot that is newer than the superblock.
    pub(super) stale: Vec<u64>,
    /// The first slot that holds something, but no bitmap.
    pub(super) damaged: Option<FormatError>,
}

impl Bitmaps {
    /// Chooses the bitmap of `group` that counts from the content of its two slots.
    fn add_group(
        &mut self,
        device: &dyn BlockDevice,
        superblock: &Superblock,
        group: u64,
        slots: [&[u8]; 2],
    ) -> Result<()> {
        let mut best: Option<(Bitmap, u8)> = None;
        let mut problem = String::new();
        for (slot, bytes) in slots.into_iter().enumerate() {
            let block = superblock.geometry.bitmap_block(group, slot);
            let decode = |bytes: &[u8]| Bitmap::decode_slot(bytes, superblock, group, slot);
            let is_written = bytes.iter().any(|&byte| byte != 0);
            // What was written and is damaged may be good in another copy.
            let mut decoded = decode(bytes);
            if decoded.is_err() && is_written && device.copies() > 1 {
                decoded = read_block(device, block, decode).or(decoded);
            }
            match decoded {
                Ok(bitmap) if bitmap.generation > superblock.generation => {
                    problem = format!(
                        "generation {} is newer than the superblock's, {}",
                        bitmap.generation, superblock.generation
                    );
                    self.stale.push(group);
                }
                Ok(bitmap)
                    if best
                        .as_ref()
                        .is_none_or(|(best, _)| bitmap.generation > best.generation) =>
                {
                    best = Some((bitmap, slot as u8))
                }
                Ok(_) => {}
                Err(error) => {
                    problem = error.to_string();
                    if is_written {
                        self.damaged.get_or_insert(error);
                    }
                }
            }
        }
        let Some((bitmap, slot)) = best else {
            let block = superblock.geometry.bitmap_block(group, 0);
            return Err(FormatError::new(
                Structure::Bitmap,
                block,
                format!("group {group} has no usable bitmap: {problem}"),
            )
            .into());
        };
        self.slots.push(BitmapSlot { slot, generation: bitmap.generation });
        self.bits.push(bitmap.bits);
        Ok(())
    }

    /// The older bitmap of a group is valid too, but calls free what was used since: it must not
    /// stand in for a newest one that is damaged or was never written. The superblock decides:
    /// which generations belong to it, and the sum of the bits.
    fn check_sum(&self, superblock: &Superblock) -> Result<()> {
        let geometry = superblock.geometry;
        let set: u64 = self
            .bits
            .iter()
            .flat_map(|bits| bits.iter())
            .map(|byte| u64::from(byte.count_ones()))
            .sum();
        let fixed = geometry.groups() * (BITMAP_BYTES as u64 * 8) - geometry.allocatable().blocks;
        let recorded = superblock.bitmaps_checksum;
        let right_ones = recorded == 0
            || recorded
                == bitmap_generations_checksum(self.slots.iter().map(|slot| slot.generation));
        if right_ones && set.checked_sub(fixed) == Some(superblock.used_blocks) {
            return Ok(());
        }
        let (block, cause) = match &self.damaged {
            Some(error) => (error.block, format!(" ({error})")),
            None => (geometry.bitmap_table().start, String::new()),
        };
        let used = superblock.used_blocks;
        let found = if right_ones {
            format!("{used} blocks are in use, the bitmaps have {}", set.saturating_sub(fixed))
        } else {
            "an older bitmap stands in for the one that belongs to the superblock".to_owned()
        };
        let text = format!("{found}{cause}; `cairn fsck --repair` rebuilds them");
        Err(FormatError::new(Structure::Bitmap, block, text).into())
    }
}

/// The bitmaps that belong to the superblock; where they don't, only `read_only` goes on.
pub(super) fn read_bitmaps(
    device: &dyn BlockDevice,
    superblock: &Superblock,
    read_only: bool,
) -> Result<Bitmaps> {
    let bitmaps = newest_bitmaps(device, superblock)?;
    match bitmaps.check_sum(superblock) {
        // Nothing is allocated, so everything can be read.
        Err(error) if read_only => tracing::warn!("{error}"),
        checked => checked?,
    }
    Ok(bitmaps)
}

fn newest_bitmaps(device: &dyn BlockDevice, superblock: &Superblock) -> Result<Bitmaps> {
    let geometry = superblock.geometry;
    let mut bitmaps =
        Bitmaps { bits: Vec::new(), slots: Vec::new(), stale: Vec::new(), damaged: None };
    let groups_at_once = GROUPS_PER_READ.min(geometry.groups()) as usize;
    let mut buffers = [0, 1].map(|_| AlignedBuffer::zeroed(groups_at_once * BLOCK_SIZE));
    for first in (0..geometry.groups()).step_by(GROUPS_PER_READ as usize) {
        let count = GROUPS_PER_READ.min(geometry.groups() - first);
        for (slot, buffer) in buffers.iter_mut().enumerate() {
            let start = geometry.bitmap_block(first, slot);
            device.read(start.offset_bytes(), &mut buffer[..count as usize * BLOCK_SIZE])?;
        }
        for index in 0..count as usize {
            let slots = buffers
                .each_ref()
                .map(|buffer| &buffer[index * BLOCK_SIZE..(index + 1) * BLOCK_SIZE]);
            bitmaps.add_group(device, superblock, first + index as u64, slots)?;
        }
    }
    Ok(bitmaps)
}
