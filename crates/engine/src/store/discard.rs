//! Giving blocks back to the storage below: what a commit freed, and all that is free.
//!
//! Invariant: a block is discarded only while it cannot be allocated, and nothing durable refers to
//! it: freed blocks after their transaction is durable and before they are free; free blocks while
//! they are held ([`Space::hold_free`](cairn_space::Space::hold_free)). So after a
//! crash a discarded block is as harmless as one that was given to another file.
//!
//! Lock discipline: nothing is held while the device works.
use crate::store::Store;
use crate::{Error, Result};
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

    /// Discards the free blocks in `bytes` that lie in runs of at least `least_bytes`, run by run:
    /// they are held, discarded, and released. Returns how many bytes. *A crash: nothing durable
    /// refers to any of them.*
    pub(crate) fn discard_free(&self, bytes: Range<u64>, least_bytes: u64) -> Result<u64> {
        let end = (bytes.end / BLOCK).min(self.superblock.geometry.total_blocks);
        let mut at = bytes.start.div_ceil(BLOCK).min(end);
        let mut discarded = 0;
        while at < end {
            let under_way = self.discards.begin();
            // Checked after it counts as under way: either the thread that stops the volume sees
            // this discard, or this thread sees that the volume has stopped.
            self.check_alive()?;
            let step = self.discard_next(BlockRange::new(BlockNumber(at), end - at), least_bytes);
            drop(under_way);
            let Some((range, was_long_enough)) = step? else { break };
            at = range.end().0;
            discarded += if was_long_enough { range.blocks * BLOCK } else { 0 };
        }
        Ok(discarded)
    }

    /// The next run of free blocks, and whether it was long enough to be discarded.
    fn discard_next(
        &self,
        within: BlockRange,
        least_bytes: u64,
    ) -> Result<Option<(BlockRange, bool)>> {
        let Some(range) = self.space.hold_free(within) else { return Ok(None) };
        let bytes = range.blocks * BLOCK;
        let result = if bytes < least_bytes {
            Ok(())
        } else {
            self.device.discard(range.start.offset_bytes(), bytes)
        };
        self.space.release_held(range);
        result.map(|()| Some((range, bytes >= least_bytes))).map_err(Error::from)
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
