//! Copies of file data that are on the device and belong to no file yet.
//!
//! Their blocks are in flight until an operation puts them into files. *A crash before its commit:
//! nothing refers to them, so they are free.* Who drops them gives them back.
//!
//! Data of many files is copied at a time:
//! 1. Blocks are allocated in the order of the files, so copies of small files are neighbours.
//! 2. What the data cache has comes from there. The rest is read in the order of the device,
//!    neighbours in one request, and verified.
//! 3. All is written as one set.
use super::Files;
use super::pieces::writes_of;
use crate::store::operation::{Effort, Operation};
use crate::{InodeId, Result};
use cairn_blockdev::AlignedBuffer;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, Extent, ExtentKind, FileBlock, Generation, InodeNumber,
    checksum,
};
use cairn_space::Request;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;

/// Blocks that are copied at a time.
const STEP_BLOCKS: u64 = 1024;
/// Longest piece.
const PIECE_BLOCKS_MAX: u64 = 256;

/// Extents of a file, each with its place in it.
pub(crate) type Extents = Vec<(FileBlock, Extent)>;

/// Copies of extents of files.
pub(crate) struct Staged<'a> {
    files: &'a Files,
    /// By file. Their generations are those of no transaction yet.
    pieces: BTreeMap<InodeNumber, Extents>,
    /// They belong to files.
    is_used: Cell<bool>,
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        let store = &self.files.store;
        if !self.is_used.get() && store.transactions.failure().is_none() {
            let pieces = self.pieces.values().flatten();
            pieces.for_each(|(_, extent)| store.space.cancel(extent.range()));
        }
    }
}

impl Staged<'_> {
    /// All extents.
    pub(crate) fn count(&self) -> usize {
        self.pieces.values().map(Vec::len).sum()
    }

    /// Those that a file gets.
    pub(crate) fn of(&self, file: InodeNumber) -> &[(FileBlock, Extent)] {
        self.pieces.get(&file).map_or(&[], Vec::as_slice)
    }

    /// Those that a file gets, made by the transaction of `operation`, which puts all that is
    /// staged into files.
    pub(crate) fn take(
        &self,
        file: InodeNumber,
        operation: &Operation<'_>,
    ) -> impl Iterator<Item = (FileBlock, Extent)> + '_ {
        self.is_used.set(true);
        let generation = operation.generation();
        let made =
            move |extent: &Extent| Extent { generation, written: generation, ..extent.clone() };
        self.of(file).iter().map(move |(at, extent)| (*at, made(extent)))
    }
}

/// A part of an extent.
struct Part {
    inode: InodeId,
    at: FileBlock,
    extent: Extent,
    /// Where its copy goes.
    copy: BlockRange,
    /// Where it is in the buffer.
    block: usize,
}

impl Part {
    fn bytes(&self) -> Range<usize> {
        self.block * BLOCK_SIZE..(self.block + self.extent.blocks as usize) * BLOCK_SIZE
    }

    /// So many blocks from `from` on.
    fn slice(&self, from: u64, blocks: u64) -> Self {
        Self {
            at: self.at + from,
            extent: self.extent.slice(from, blocks),
            copy: BlockRange::new(BlockNumber(self.copy.start.0 + from), blocks),
            block: self.block + from as usize,
            ..*self
        }
    }
}

impl Files {
    /// Copies the data of these extents of files, which do not change.
    ///
    /// # Errors
    /// `NoSpace`; `DataChecksum`, `Device`.
    pub(crate) fn stage(&self, wanted: &[(InodeId, Extents)]) -> Result<Staged<'_>> {
        let (pieces, is_used) = (BTreeMap::new(), Cell::new(false));
        let mut staged = Staged { files: self, pieces, is_used };
        let of_data = |(_, extent): &&(FileBlock, Extent)| extent.kind == ExtentKind::Data;
        let all = wanted.iter().flat_map(|(_, extents)| extents).filter(of_data);
        let all_blocks: u64 = all.map(|(_, extent)| extent.blocks).sum();
        let mut buffer = AlignedBuffer::zeroed(all_blocks.min(STEP_BLOCKS) as usize * BLOCK_SIZE);
        let (mut batch, mut room) = (Vec::new(), STEP_BLOCKS);
        for (inode, extents) in wanted {
            for (start, extent) in extents.iter().filter(of_data) {
                let mut done = 0;
                while done < extent.blocks {
                    let blocks = (extent.blocks - done).min(room);
                    batch.push((*inode, *start + done, extent.slice(done, blocks)));
                    done += blocks;
                    room -= blocks;
                    if room == 0 {
                        self.copy_batch(&mut batch, &mut buffer, &mut staged)?;
                        room = STEP_BLOCKS;
                    }
                }
            }
        }
        self.copy_batch(&mut batch, &mut buffer, &mut staged)?;
        Ok(staged)
    }

    /// Copies these extents of files, for which the buffer has room.
    fn copy_batch(
        &self,
        batch: &mut Vec<(InodeId, FileBlock, Extent)>,
        buffer: &mut [u8],
        staged: &mut Staged<'_>,
    ) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let mut parts = self.allocate_copies(batch, staged)?;
        batch.clear();
        parts.sort_unstable_by_key(|part| part.extent.start);
        self.read_parts(&mut parts, buffer)?;
        parts.sort_unstable_by_key(|part| part.copy.start);
        parts.iter().for_each(|part| self.data_cache.forget(part.copy));
        let data = parts.iter().map(|part| (part.copy, &buffer[part.bytes()]));
        self.write_data(&writes_of(&data.collect::<Vec<_>>()))
    }

    fn allocate_copies(
        &self,
        batch: &[(InodeId, FileBlock, Extent)],
        staged: &mut Staged<'_>,
    ) -> Result<Vec<Part>> {
        let mut data_blocks = batch.iter().map(|(.., extent)| extent.blocks).sum();
        let request = Request { data_blocks, nodes: 0 };
        let reservation = self.store.reserve(request, Effort::Ordinary)?;
        let mut room = BlockRange::new(BlockNumber(0), 0);
        let mut parts = Vec::with_capacity(batch.len());
        for (inode, start, extent) in batch {
            let pieces = staged.pieces.entry(inode.number()).or_default();
            let mut done = 0;
            while done < extent.blocks {
                if room.blocks == 0 {
                    // Whatever happens now, all of it is given back.
                    let wanted = data_blocks.min(PIECE_BLOCKS_MAX);
                    room = self.store.space.allocate_data(&reservation, wanted, None)?;
                    data_blocks -= room.blocks;
                }
                let blocks = (extent.blocks - done).min(room.blocks);
                let copy = BlockRange::new(room.start, blocks);
                room = BlockRange::new(copy.end(), room.blocks - blocks);
                let (at, extent) = (*start + done, extent.slice(done, blocks));
                done += blocks;
                let (generation, written) = (Generation(0), Generation(0));
                let staged = Extent { start: copy.start, generation, written, ..extent.clone() };
                pieces.push((at, staged));
                parts.push(Part { inode: *inode, at, extent, copy, block: 0 });
            }
        }
        Ok(parts)
    }

    /// Fills the buffer with parts in the order of the device.
    fn read_parts(&self, parts: &mut [Part], buffer: &mut [u8]) -> Result<()> {
        let (mut block, mut missing) = (0, Vec::new());
        for part in parts {
            part.block = block;
            let Extent { start, blocks, checksums, .. } = &part.extent;
            block += *blocks as usize;
            let absent = self.data_cache.read(start.0, checksums, &mut buffer[part.bytes()]);
            if !absent.is_empty() {
                self.data_cache.missed(start.0, absent.len());
                missing.push(part.slice(absent.start as u64, absent.len() as u64));
            }
        }
        let is_next = |before: &Part, after: &Part| {
            before.extent.range().end() == after.extent.start
                && before.bytes().end == after.bytes().start
        };
        for run in missing.chunk_by(is_next) {
            if run.len() > 1 && self.read_together(run, buffer) {
                continue;
            }
            for part in run {
                let bytes = &mut buffer[part.bytes()];
                self.read_verified(part.inode, part.at, &part.extent, bytes)?;
            }
        }
        Ok(())
    }

    /// Reads neighbours in one request. Returns false if one of them may be damaged: what is read
    /// alone names its file, and comes from another copy where there is one.
    fn read_together(&self, run: &[Part], buffer: &mut [u8]) -> bool {
        let geometry = &self.store.superblock.geometry;
        let (first, last) = (&run[0], &run[run.len() - 1]);
        let bytes = &mut buffer[first.bytes().start..last.bytes().end];
        run.iter().all(|part| geometry.contains(part.extent.range()))
            && self.store.device.read(first.extent.start.offset_bytes(), bytes).is_ok()
            && run
                .iter()
                .flat_map(|part| &part.extent.checksums)
                .zip(bytes.chunks_exact(BLOCK_SIZE))
                .all(|(expected, bytes)| checksum(bytes) == *expected)
    }
}
