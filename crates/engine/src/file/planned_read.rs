//! Reads whose device part somebody else does: planned and finished here, with what is in memory
//! and without waiting for anyone.
//!
//! 1. [`Volume::read_at_once`](crate::Volume::read_at_once) finds all in memory, or says which
//!    bytes of the device it lacks.
//! 2. The caller has the kernel read them, and meanwhile does other things. No lock is held.
//! 3. [`Volume::finish_read`](crate::Volume::finish_read) looks again: the file must have the same
//!    blocks in the same place, of the same generation and with the same checksums, with no newer
//!    data in memory; and what was read must have these checksums.
//!
//! Invariants:
//! - A finished read returns what the file holds when it is finished. Blocks that are being read so
//!   may be freed, and given to others, who write to them: then the file does not have them any
//!   more, or has them by a later generation (blocks freed in a transaction are not given away
//!   before it is durable), and the read is not finished.
//! - What is not simple is not planned: several places on the device, holes between data, dirty
//!   pages, a device that is not one file. What is not as planned is not finished. In both cases
//!   the caller reads by [`Volume::read_into`](crate::Volume::read_into), which waits, repairs,
//!   counts failures and reports them; here nothing of that happens.
//!
//! Locks: the inode's, shared and only if nobody has it; those of a lookup in memory.
use crate::InodeId;
use crate::file::Files;
use crate::file::data_cache::read_worth_keeping;
use crate::file::inode::InodeState;
use crate::file::offsets::{BLOCK, blocks_of};
use cairn_blockdev::{RawFile, is_aligned};
use cairn_format::{BLOCK_SIZE, Extent, ExtentKind, checksum};
use std::ops::Range;

/// What a read that waits for nobody has come to.
#[derive(Debug)]
pub enum ReadAtOnce {
    /// So many bytes were in memory and are read; fewer than wanted at the end of the file.
    Done(usize),
    /// Something must come from the device first.
    Planned(PlannedRead),
}

/// A read that lacks some bytes of the device.
#[derive(Debug)]
pub struct PlannedRead {
    file: RawFile,
    inode: InodeId,
    offset_bytes: u64,
    /// What was asked for.
    length_bytes: usize,
    run: Run,
    /// Blocks of the run that are not in memory.
    missing: Range<usize>,
}

impl PlannedRead {
    /// Where it is to be read from.
    pub fn file(&self) -> &RawFile {
        &self.file
    }

    /// The place there.
    pub fn device_offset_bytes(&self) -> u64 {
        (self.run.start() + self.missing.start as u64) * BLOCK
    }

    /// The bytes of the buffer that are to be filled from there; the others stay as they are.
    pub fn bytes(&self) -> Range<usize> {
        self.missing.start * BLOCK_SIZE..self.missing.end * BLOCK_SIZE
    }
}

/// A part of a file that lies in one piece on the device.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    /// In order, one behind the other in the file and on the device; at least one.
    extents: Vec<Extent>,
    /// Of the file; less than the whole blocks at its end.
    length_bytes: usize,
}

impl Run {
    fn start(&self) -> u64 {
        self.extents[0].start.0
    }

    fn blocks(&self) -> usize {
        self.extents.iter().map(|extent| extent.checksums.len()).sum()
    }

    /// Those of its blocks.
    fn checksums(&self) -> impl Iterator<Item = u32> {
        self.extents.iter().flat_map(|extent| extent.checksums.iter().copied())
    }
}

impl Files {
    /// The part of the file behind `offset_bytes`, up to `length_bytes`, as one run of the device,
    /// if it is one and this is known in memory.
    fn run_at(
        &self,
        number: InodeId,
        state: &InodeState,
        offset_bytes: u64,
        length_bytes: usize,
    ) -> Option<Run> {
        state.expect_regular().ok()?;
        let end = offset_bytes.saturating_add(length_bytes as u64).min(state.item.size);
        let blocks = blocks_of(offset_bytes..end.max(offset_bytes));
        let whole = offset_bytes.is_multiple_of(BLOCK)
            && !blocks.is_empty()
            && state.truncated_from.is_none_or(|gone| gone >= blocks.end);
        if !whole
            || state.pages.within(blocks.clone()).next().is_some()
            || !self.extents_in_memory(number, blocks.clone())
        {
            return None;
        }
        let mut run =
            Run { extents: Vec::with_capacity(1), length_bytes: (end - offset_bytes) as usize };
        let mut at = blocks.start;
        for (start, extent) in self.extents_in(number, blocks.clone(), usize::MAX).ok()? {
            if at == blocks.end
                || start > at
                || extent.kind != ExtentKind::Data
                || !self.store.superblock.geometry.contains(extent.range())
            {
                return None;
            }
            // An extent that begins inside the one before it is damage.
            let skip = at - start;
            if skip > 0 && at > blocks.start {
                return None;
            }
            let part = extent.slice(skip, (extent.blocks - skip).min(blocks.end - at));
            if run.extents.last().is_some_and(|last| last.range().end() != part.start) {
                return None;
            }
            at += part.blocks;
            run.extents.push(part);
        }
        (at == blocks.end).then_some(run)
    }

    /// Reads from memory, or plans a read of the device; `None` if neither can be done at once.
    /// `buffer` may then hold anything.
    pub(crate) fn read_at_once(
        &self,
        number: InodeId,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Option<ReadAtOnce> {
        let length_bytes = buffer.len();
        let run = {
            let inode = self.inodes.get(number);
            let state = self.try_read_inode_in_use(&inode)?;
            self.run_at(number, &state, offset_bytes, length_bytes)
        };
        let run = run.filter(|run| is_aligned(buffer) && run.blocks() * BLOCK_SIZE <= length_bytes);
        let Some(run) = run else {
            return self.read_cached_into(number, offset_bytes, buffer).map(ReadAtOnce::Done);
        };
        let mut missing: Option<Range<usize>> = None;
        let mut from = 0;
        for extent in &run.extents {
            let here = &mut buffer[from * BLOCK_SIZE..(from + extent.checksums.len()) * BLOCK_SIZE];
            let lacks = self.data_cache.read(extent.start.0, &extent.checksums, here);
            if !lacks.is_empty() {
                let start = missing.map_or(from + lacks.start, |range| range.start);
                missing = Some(start..from + lacks.end);
            }
            from += extent.checksums.len();
        }
        match missing {
            None => Some(ReadAtOnce::Done(run.length_bytes)),
            Some(missing) => {
                let file = self.store.device.raw_file()?;
                Some(ReadAtOnce::Planned(PlannedRead {
                    file,
                    inode: number,
                    offset_bytes,
                    length_bytes,
                    run,
                    missing,
                }))
            }
        }
    }

    /// Ends a planned read whose bytes of the device are in `buffer`, the one that it was planned
    /// with. `None` if the file is not as it was planned, the data is damaged, or to say would mean
    /// to wait.
    pub(crate) fn finish_read(&self, planned: &PlannedRead, buffer: &[u8]) -> Option<usize> {
        let PlannedRead { file, inode: number, offset_bytes, length_bytes, run, missing } = planned;
        file.count_read((missing.len() * BLOCK_SIZE) as u64);
        let inode = self.inodes.get(*number);
        let state = self.try_read_inode_in_use(&inode)?;
        if self.run_at(*number, &state, *offset_bytes, *length_bytes)? != *run {
            return None;
        }
        let read = buffer.get(planned.bytes())?;
        let expected = || run.checksums().skip(missing.start).take(missing.len());
        if !read.chunks_exact(BLOCK_SIZE).map(checksum).eq(expected()) {
            return None;
        }
        let first_block = run.start() + missing.start as u64;
        self.data_cache.missed(first_block, missing.len());
        if read_worth_keeping(run.blocks() * BLOCK_SIZE) {
            let checksums: Vec<u32> = expected().collect();
            self.data_cache.keep(first_block, &checksums, read, false);
        }
        Some(run.length_bytes)
    }
}
