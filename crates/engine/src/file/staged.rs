//! Copies of file data that are on the device and belong to no file yet.
//!
//! Their blocks are in flight until an operation puts them into a file. *A crash before its commit:
//! nothing refers to them, so they are free.* Who drops them gives them back.
use super::Files;
use crate::store::operation::{Effort, Operation};
use crate::{Error, InodeId, Result};
use cairn_blockdev::AlignedBuffer;
use cairn_format::{BLOCK_SIZE, Extent, ExtentKind, FileBlock, Generation};
use cairn_space::Request;
use std::cell::Cell;

/// Blocks that are copied at a time.
const STEP_BLOCKS: u64 = 256;

/// Copies of extents of one file.
pub(crate) struct Staged<'a> {
    files: &'a Files,
    /// Each with its place in the file. Their generations are those of no transaction yet.
    pieces: Vec<(FileBlock, Extent)>,
    /// They belong to a file.
    is_used: Cell<bool>,
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        let store = &self.files.store;
        if !self.is_used.get() && store.transactions.failure().is_none() {
            self.pieces.iter().for_each(|(_, extent)| store.space.cancel(extent.range()));
        }
    }
}

impl Staged<'_> {
    /// Extents that a file gets.
    pub(crate) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Where in the file they go.
    pub(crate) fn places(&self) -> impl Iterator<Item = FileBlock> + '_ {
        self.pieces.iter().map(|(at, _)| *at)
    }

    /// The extents, made by the transaction of `operation`, which puts each of them into a file.
    pub(crate) fn take(
        &self,
        operation: &Operation<'_>,
    ) -> impl Iterator<Item = (FileBlock, Extent)> + '_ {
        self.is_used.set(true);
        let generation = operation.generation();
        let made =
            move |extent: &Extent| Extent { generation, written: generation, ..extent.clone() };
        self.pieces.iter().map(move |(at, extent)| (*at, made(extent)))
    }
}

impl Files {
    /// Copies the data of these extents of `from`, which does not change.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; [`Error::DataChecksum`], [`Error::Device`].
    pub(crate) fn stage(
        &self,
        from: InodeId,
        extents: &[(FileBlock, Extent)],
    ) -> Result<Staged<'_>> {
        let mut staged = Staged { files: self, pieces: Vec::new(), is_used: Cell::new(false) };
        let data = || extents.iter().filter(|(_, extent)| extent.kind == ExtentKind::Data);
        let data_blocks = data().map(|(_, extent)| extent.blocks).sum();
        if data_blocks == 0 {
            return Ok(staged);
        }
        let request = Request { data_blocks, nodes: 0 };
        let reservation = self.store.reserve(request, Effort::Ordinary)?;
        let mut buffer = AlignedBuffer::zeroed(data_blocks.min(STEP_BLOCKS) as usize * BLOCK_SIZE);
        for (start, extent) in data() {
            let mut done = 0;
            while done < extent.blocks {
                let wanted = (extent.blocks - done).min(STEP_BLOCKS);
                let range = self.store.space.allocate_data(&reservation, wanted, None)?;
                let (at, part) = (*start + done, extent.slice(done, range.blocks));
                done += range.blocks;
                let copy = Extent {
                    start: range.start,
                    generation: Generation(0),
                    written: Generation(0),
                    ..part.clone()
                };
                // Whatever happens now, they are given back.
                staged.pieces.push((at, copy));
                let bytes = &mut buffer[..range.blocks as usize * BLOCK_SIZE];
                self.read_verified(from, at, &part, bytes)?;
                self.data_cache.forget(range);
                let written = self.store.device.write(range.start.offset_bytes(), &[bytes]);
                self.store.noted(written.map_err(Error::from))?;
            }
        }
        Ok(staged)
    }
}
