//! The extent items of a file: finding, dropping and inserting them.
//!
//! Invariants: extents of a file don't overlap; they change only with the file's extents mutex and
//! its state lock held exclusively, in a joined operation; `item.blocks` equals the sum of their
//! lengths.
use crate::InodeId;
use crate::file::Files;
use crate::file::data_cache::read_worth_keeping;
use crate::file::inode::InodeState;
use crate::store::failures::in_file;
use crate::store::operation::Operation;
use crate::{Error, Result};
use cairn_blockdev::read_verified;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, Extent, ExtentKind, FileBlock, FormatError, Structure,
    checksum,
};
use cairn_space::Boundary;
use std::borrow::Cow;
use std::ops::Range;

/// Appends within one transaction grow an extent up to this many blocks; a longer item would make
/// each append log too many checksums again.
const MERGE_BLOCKS_MAX: u64 = 64;

/// Stretches of data in memory for which `stat` looks up what is allocated below them.
const STRETCHES_MAX: usize = 256;

/// Where a reader takes data from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// Memory, and the device for what is not there.
    Anywhere,
    /// Memory alone: the reader must not wait for the device.
    Memory,
}

impl Files {
    /// Blocks of data in memory that come on top of those that `item.blocks` counts: what will
    /// replace allocated blocks, or is written into preallocated ones, does not. Looks at a limited
    /// number of stretches; those behind count as new.
    pub(crate) fn delayed_blocks(&self, number: InodeId, state: &InodeState) -> u64 {
        let delayed = state.pages.blocks() - state.pages.logged();
        if delayed == 0 || state.item.blocks == 0 {
            return delayed;
        }
        let allocated = |stretch: Range<FileBlock>| {
            let blocks = stretch.end - stretch.start;
            // What can't be read counts as new: the reader of the data gets the error.
            let extents = self.extents_in(number, stretch.clone(), usize::MAX).unwrap_or_default();
            let missing: u64 = gaps(stretch, &extents).iter().map(|gap| gap.end - gap.start).sum();
            blocks - missing
        };
        delayed - state.pages.delayed_stretches().take(STRETCHES_MAX).map(allocated).sum::<u64>()
    }

    /// The extents that overlap `blocks` of the file, whole, in order, with their first blocks; at
    /// most `limit`.
    pub(crate) fn extents_in(
        &self,
        inode: InodeId,
        blocks: Range<FileBlock>,
        limit: usize,
    ) -> Result<Vec<(FileBlock, Extent)>> {
        let key = |block| inode.extent_key(block);
        let mut found = Vec::new();
        if blocks.is_empty() {
            return Ok(found);
        }
        let up_to_start = key(FileBlock::FIRST)..=key(blocks.start);
        if let Some((first, value)) = self.store.trees.of(inode).last(up_to_start)? {
            let extent = self.store.of_item(inode, &first, Extent::decode_of(&first, &value))?;
            if first.file_block() + extent.blocks > blocks.start {
                found.push((first.file_block(), extent));
            }
        }
        if blocks.start + 1 < blocks.end {
            let behind_start = key(blocks.start + 1)..=key(blocks.end - 1);
            for item in self.store.trees.of(inode).range(behind_start) {
                if found.len() >= limit {
                    break;
                }
                let (key, value) = item?;
                let extent = self.store.of_item(inode, &key, Extent::decode_of(&key, &value))?;
                found.push((key.file_block(), extent));
            }
        }
        Ok(found)
    }

    /// Removes `blocks` from the file. `overlapping` are the extents there, from
    /// [`Files::extents_in`]. Changes at most their number + 1 items.
    pub(crate) fn drop_extents(
        &self,
        operation: &mut Operation<'_>,
        inode: InodeId,
        state: &mut InodeState,
        blocks: Range<FileBlock>,
        overlapping: &[(FileBlock, Extent)],
    ) -> Result<()> {
        for (_, extent) in overlapping {
            self.expect_referenced(extent)?;
        }
        for &(start, ref extent) in overlapping {
            let end = start + extent.blocks;
            let cut = blocks.start.max(start)..blocks.end.min(end);
            if cut.is_empty() {
                continue;
            }
            if start < cut.start {
                operation.put_extent(inode, start, &extent.slice(0, cut.start - start))?;
            } else {
                operation.delete(inode.extent_key(start))?;
            }
            if cut.end < end {
                let rest = extent.slice(cut.end - start, end - cut.end);
                operation.put_extent(inode, cut.end, &rest)?;
            }
            let gone = extent.slice(cut.start - start, cut.end - cut.start);
            operation.free(&gone)?;
            state.item.blocks = state.item.blocks.saturating_sub(gone.blocks);
        }
        Ok(())
    }

    /// Inserts an extent whose blocks were just allocated; joins it with its predecessor where that
    /// is cheap. The place is empty. Changes one item.
    pub(crate) fn insert_extent(
        &self,
        operation: &mut Operation<'_>,
        inode: InodeId,
        state: &mut InodeState,
        file_block: FileBlock,
        extent: Extent,
    ) -> Result<()> {
        let (start, merged) = self.merge(inode, file_block, &extent)?;
        operation.reference(extent.range());
        state.item.blocks += extent.blocks;
        operation.put_extent(inode, start, &merged)
    }

    /// An extent whose blocks the allocator knows as free is damage; found before anything is
    /// changed, it is no more than that operation's failure.
    pub(crate) fn expect_referenced(&self, extent: &Extent) -> Result<()> {
        if self.store.space.is_referenced(extent.range()) {
            return Ok(());
        }
        let problem =
            format!("{} blocks belong to an extent but are not marked in use", extent.blocks);
        Err(FormatError::new(Structure::Bitmap, extent.start, problem).into())
    }

    /// Makes data of unwritten blocks that an extent held already. The place is empty; the blocks
    /// stay the file's.
    pub(crate) fn put_merged(
        &self,
        operation: &mut Operation<'_>,
        inode: InodeId,
        file_block: FileBlock,
        extent: Extent,
    ) -> Result<()> {
        let (start, merged) = self.merge(inode, file_block, &extent)?;
        operation.put_extent(inode, start, &merged)
    }

    /// Where the extent's item goes and what it holds: joined with its predecessor where that is
    /// cheap.
    fn merge(
        &self,
        inode: InodeId,
        file_block: FileBlock,
        extent: &Extent,
    ) -> Result<(FileBlock, Extent)> {
        if file_block > FileBlock::FIRST
            && let Some((start, mut before)) =
                self.extents_in(inode, file_block - 1..file_block, 1)?.pop()
            && before.kind == ExtentKind::Data
            && extent.kind == ExtentKind::Data
            && before.generation == extent.generation
            && before.written == extent.written
            && before.range().end() == extent.start
            && start + before.blocks == file_block
            && before.blocks + extent.blocks <= MERGE_BLOCKS_MAX
        {
            before.blocks += extent.blocks;
            before.checksums.extend_from_slice(&extent.checksums);
            return Ok((start, before));
        }
        Ok((file_block, extent.clone()))
    }

    /// Fills `buffer` (whole blocks) with file blocks from the device or the data cache, verifying
    /// checksums; holes and unwritten extents read as zeros. Extents that overlap are damage:
    /// nobody can say whose data is meant. Returns false, with anything in the buffer, if something
    /// is not where `source` allows to take it from.
    pub(crate) fn read_mapped(
        &self,
        inode: InodeId,
        first_block: FileBlock,
        buffer: &mut [u8],
        source: Source,
    ) -> Result<bool> {
        let blocks = first_block..first_block + (buffer.len() / BLOCK_SIZE) as u64;
        let end_block = blocks.end;
        let bytes = |from: FileBlock, to: FileBlock| {
            (from - first_block) as usize * BLOCK_SIZE..(to - first_block) as usize * BLOCK_SIZE
        };
        if source == Source::Memory && !self.extents_in_memory(inode, blocks.clone()) {
            return Ok(false);
        }
        let keep = read_worth_keeping(buffer.len());
        let mut at = first_block;
        let mut behind = FileBlock::FIRST;
        for (start, extent) in self.extents_in(inode, blocks, usize::MAX)? {
            if start < behind {
                let problem = format!(
                    "inode {inode}: the extent at file block {start} begins inside the one before it"
                );
                return Err(FormatError::new(Structure::Item, extent.start, problem).into());
            }
            behind = start + extent.blocks;
            let (from, to) = (start.max(at), end_block.min(behind));
            if extent.kind != ExtentKind::Data || from >= to {
                continue;
            }
            buffer[bytes(at, from)].fill(0);
            let extent = extent.slice(from - start, to - from);
            let here = &mut buffer[bytes(from, to)];
            let missing = self.data_cache.read(extent.start.0, &extent.checksums, here);
            if !missing.is_empty() {
                if source == Source::Memory {
                    return Ok(false);
                }
                let extent = extent.slice(missing.start as u64, missing.len() as u64);
                let here = &mut here[missing.start * BLOCK_SIZE..missing.end * BLOCK_SIZE];
                self.read_verified(inode, from + missing.start as u64, &extent, here)?;
                self.data_cache.missed(extent.start.0, missing.len());
                if keep {
                    self.data_cache.keep(extent.start.0, &extent.checksums, here, false);
                }
            }
            at = to;
        }
        buffer[bytes(at, end_block)].fill(0);
        Ok(true)
    }

    /// Whether the leaves that hold the extents of `blocks`, which are not many, are in memory. A
    /// leaf that leaves it right afterwards is read again.
    pub(crate) fn extents_in_memory(&self, inode: InodeId, blocks: Range<FileBlock>) -> bool {
        let tree = self.store.trees.of(inode);
        let known = |block| tree.is_in_memory(&inode.extent_key(block));
        known(blocks.start) && (blocks.end <= blocks.start + 1 || known(blocks.end - 1))
    }

    pub(super) fn read_verified(
        &self,
        inode: InodeId,
        file_block: FileBlock,
        extent: &Extent,
        buffer: &mut [u8],
    ) -> Result<()> {
        in_file(inode, Some((extent.start, file_block)), || {
            self.read_extent(inode, file_block, extent, buffer)
        })
    }

    fn read_extent(
        &self,
        inode: InodeId,
        file_block: FileBlock,
        extent: &Extent,
        buffer: &mut [u8],
    ) -> Result<()> {
        if !self.store.superblock.geometry.contains(extent.range()) {
            return Err(Error::DataChecksum { inode, file_block, block: extent.start.0 });
        }
        let read = self.store.device.read(extent.start.offset_bytes(), buffer);
        if read.is_err() && self.store.device.copies() == 1 {
            return Ok(read?);
        }
        for (index, (bytes, expected)) in
            (0..).zip(buffer.chunks_exact_mut(BLOCK_SIZE).zip(&extent.checksums))
        {
            if read.is_ok() && checksum(bytes) == *expected {
                continue;
            }
            let block = BlockNumber(extent.start.0 + index);
            let verify = |bytes: &[u8]| if checksum(bytes) == *expected { Ok(()) } else { Err(()) };
            read_verified(&*self.store.device, block.offset_bytes(), bytes, verify)?.map_err(
                |()| {
                    self.store.device.note_damage(block.offset_bytes(), BLOCK_SIZE as u64);
                    Error::DataChecksum { inode, file_block: file_block + index, block: block.0 }
                },
            )?;
        }
        Ok(())
    }
}

/// The parts of `blocks` that none of `extents` (in order) covers.
pub(crate) fn gaps(
    blocks: Range<FileBlock>,
    extents: &[(FileBlock, Extent)],
) -> Vec<Range<FileBlock>> {
    let mut gaps = Vec::new();
    let mut at = blocks.start;
    for &(start, ref extent) in extents {
        if start > at {
            gaps.push(at..start.min(blocks.end));
        }
        at = at.max(start + extent.blocks);
    }
    if at < blocks.end {
        gaps.push(at..blocks.end);
    }
    gaps
}

/// Preallocated blocks of a file.
#[derive(Clone, Copy)]
pub(crate) struct UnwrittenRun {
    pub(crate) range: BlockRange,
    /// Unwritten blocks of the same extent before them.
    pub(crate) skipped_blocks: u64,
}

/// Those that a fork has not inherited: preallocated blocks that it has are its origin's, too.
pub(crate) fn own_extents<'a>(
    extents: &'a [(FileBlock, Extent)],
    boundary: &Boundary,
) -> Cow<'a, [(FileBlock, Extent)]> {
    let is_own = |(_, extent): &&(FileBlock, Extent)| extent.generation > boundary.origin_seen();
    if extents.iter().all(|one| is_own(&one)) {
        return Cow::Borrowed(extents);
    }
    extents.iter().filter(is_own).cloned().collect()
}

/// The blocks that a run of `blocks` file blocks from `file_block` occupies in `extents`, if one
/// unwritten extent covers its beginning; shorter when that extent ends before.
pub(crate) fn unwritten_run(
    extents: &[(FileBlock, Extent)],
    file_block: FileBlock,
    blocks: u64,
) -> Option<UnwrittenRun> {
    extents
        .iter()
        .find(|(start, extent)| {
            extent.kind == ExtentKind::Unwritten
                && (*start..*start + extent.blocks).contains(&file_block)
        })
        .map(|(start, extent)| {
            let skip = file_block - *start;
            let range = extent.slice(skip, blocks.min(extent.blocks - skip)).range();
            UnwrittenRun { range, skipped_blocks: skip }
        })
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use cairn_format::{Generation, Inheritance};

    /// A crash may find a superblock by which a fork is not joined yet.
    #[test]
    fn a_joined_fork_writes_nothing_in_place_that_it_had_inherited() {
        let origin = Generation(5);
        let inheritance = Inheritance { origin, made_until: Generation(6), is_noted: true };
        let boundary = Boundary::default().inheriting(inheritance);
        let extent = |generation: u64| Extent {
            start: BlockNumber(generation * 100),
            blocks: 1,
            kind: ExtentKind::Unwritten,
            generation: Generation(generation),
            written: Generation(generation),
            checksums: Vec::new(),
        };
        let extents = [5, 6].map(|generation| (FileBlock(generation), extent(generation)));
        for _ in 0..2 {
            assert_eq!(own_extents(&extents, &boundary).as_ref(), &extents[1..]);
            boundary.join(Generation(0));
        }
    }
}
