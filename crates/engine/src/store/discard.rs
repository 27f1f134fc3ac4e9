//! Giving blocks back to the storage below: what a commit freed, and all that is free.
//!
//! Invariant: a block is discarded only while it cannot be allocated, and nothing durable refers to
//! it: freed blocks after their transaction is durable and before they are free; free blocks while
//! they are held ([`Space::hold_free`](cairn_space::Space::hold_free)). So after a
//! crash a discarded block is as harmless as one that was given to another file.
//!
//! Lock discipline: nothing is held while the device works.
use crate::Result;
use crate::store::Store;
use cairn_format::{BLOCK_SIZE, BlockNumber, BlockRange, Generation};
use std::ops::Range;

const BLOCK: u64 = BLOCK_SIZE as u64;

impl Store {
    /// Discards all free blocks, as far as that works, for their storage.
    pub(crate) fn discard_unused(&self) {
        match self.discard_free(0..u64::MAX, 0) {
            Ok(bytes) => tracing::debug!(bytes, "free blocks were given back to the storage"),
            Err(error) => tracing::debug!("free blocks could not be given back: {error}"),
        }
    }

    /// Discards the free blocks in `bytes` that lie in runs of at least `least_bytes`, run by run,
    /// a long one in parts: they are held, discarded, and released. Returns how many bytes. *A
    /// crash: nothing durable refers to any of them.*
    pub(crate) fn discard_free(&self, bytes: Range<u64>, least_bytes: u64) -> Result<u64> {
        let end = (bytes.end / BLOCK).min(self.superblock.geometry.total_blocks);
        let mut at = bytes.start.div_ceil(BLOCK).min(end);
        let (mut discarded, mut rest_of_a_run) = (0, None);
        while at < end {
            let under_way = self.discards.begin();
            // Checked after it counts as under way: either the thread that stops the volume sees
            // this discard, or this thread sees that the volume has stopped.
            self.check_alive()?;
            let Some((range, run_blocks)) =
                self.space.hold_free(BlockRange::new(BlockNumber(at), end - at))
            else {
                break;
            };
            let bytes = range.blocks * BLOCK;
            let is_long = run_blocks * BLOCK >= least_bytes || rest_of_a_run == Some(range.start);
            let result = match is_long {
                true => self.device.discard(range.start.offset_bytes(), bytes),
                false => Ok(()),
            };
            self.space.release_held(range);
            drop(under_way);
            result?;
            at = range.end().0;
            rest_of_a_run = (is_long && range.blocks < run_blocks).then_some(range.end());
            discarded += if is_long { bytes } else { 0 };
        }
        Ok(discarded)
    }

    /// Discards what `generation` freed, if asked for, or if the storage needs it.
    pub(crate) fn discard_pinned(&self, generation: Generation) {
        if !self.options.discard && !self.storage_room.is_tight() {
            return;
        }
        for range in self.space.pinned(generation) {
            if let Err(error) =
                self.device.discard(range.start.offset_bytes(), range.blocks * BLOCK)
            {
                tracing::warn!("discard failed: {error}");
            }
        }
    }

    /// For the end of the volume.
    pub(crate) fn wait_for_discards(&self) {
        debug_assert!(self.has_failed());
        self.discards.wait_for_end();
    }
}
