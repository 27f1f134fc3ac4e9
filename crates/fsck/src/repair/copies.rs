//! Second copies of what two claim: where a block can stay with one of them only, the other one
//! gets blocks of its own, with the same data.
//!
//! Copies go to clusters that nothing refers to and that no bitmap marks used, before the repair's
//! superblock is written: a crash leaves the volume as it was. They take at most half of what the
//! new trees leave free. What finds no room, or can't be read any more, is lost, and named. Where a
//! copy can't be written, another place is tried; a device that refuses several ends the repair.
//!
//! A cluster is discarded before a copy goes there, if what it holds is surely of no use: a device
//! that saves what is overwritten need not save that. All bitmaps are those of the superblock then,
//! no other superblock can be newer, and nothing in the log may be left to replay.
use super::extents::good_blocks;
use super::gather::GatheredTrees;
use super::snapshots::References;
use super::write::file_items;
use crate::bitmaps::Allocation;
use crate::block_set::BlockSet;
use crate::checker::Checker;
use crate::reader::{Reader, read_data, write_block};
use crate::report::{Finding, PassId};
use cairn_blockdev::DeviceError;
use cairn_format::{
    BlockNumber, BlockRange, Extent, ExtentKind, Generation, NODE_BLOCKS, NODE_SIZE,
};

/// Bytes in an item besides its value, and more.
const ITEM_BYTES: usize = 32;
/// Writes of copies that may fail.
const FAILED_WRITES_MAX: usize = 3;
/// Nodes of the trees that have no items of files, and inner nodes of small trees.
const OTHER_NODES: usize = 16;

/// Finds room for copies.
pub(super) struct Copier<'a> {
    reader: Reader<'a>,
    /// The repair's transaction.
    generation: Generation,
    /// Free runs, the last one first: where they begin and end.
    free: Vec<(u64, u64)>,
    /// Blocks that may still be used.
    left: u64,
    /// Whether what is free is surely of no use.
    is_free_known: bool,
    /// Blocks that were copied.
    copied: u64,
    failed_writes: Vec<DeviceError>,
}

impl<'a> Copier<'a> {
    /// Uses none of the blocks in `allocation` and `nodes`, nor those that `trees`, the check or
    /// snapshots refer to.
    pub(super) fn new(
        checker: &Checker<'a>,
        trees: &GatheredTrees,
        references: &References,
        allocation: &Allocation,
        nodes: [&BlockSet; 2],
        generation: Generation,
    ) -> Self {
        let reader = checker.reader;
        let mut claimed = BlockSet::new(reader.blocks_present());
        references.add_blocks(&mut claimed);
        let (mut bytes, mut new_nodes) = (0, OTHER_NODES);
        for tree in trees.values() {
            let items = file_items(tree);
            bytes += items.iter().map(|(_, value)| value.len() + ITEM_BYTES).sum::<usize>();
            new_nodes += 1;
            let extents = tree.inodes.values().flat_map(|inode| inode.extents.values());
            for extent in extents.filter(|extent| reader.contains(extent.range())) {
                claimed.insert(extent.range());
            }
        }
        bytes += references.runs.len() * ITEM_BYTES;
        // Each node but the last of its level is half full at least.
        new_nodes += 4 * bytes / NODE_SIZE;
        let used = [&allocation.used, nodes[0], nodes[1], &claimed, &checker.referenced];
        let is_used = |block: u64| used.iter().any(|set| set.contains(block));
        let allocatable = checker.superblock.geometry.allocatable().range();
        let last = allocatable.end.min(reader.blocks_present());
        let (mut free, mut blocks) = (Vec::<(u64, u64)>::new(), 0);
        for start in (allocatable.start..last).step_by(NODE_BLOCKS as usize) {
            let end = start + NODE_BLOCKS;
            if end > last || (start..end).any(is_used) {
                continue;
            }
            blocks += NODE_BLOCKS;
            match free.last_mut() {
                Some(run) if run.1 == start => run.1 = end,
                _ => free.push((start, end)),
            }
        }
        let left = blocks.saturating_sub(new_nodes as u64 * NODE_BLOCKS) / 2;
        let is_doubtful =
            |finding: &Finding| matches!(finding.pass, PassId::Superblocks | PassId::Log);
        let report = &checker.report;
        let is_free_known = allocation.trusted
            && checker.superblock.clean
            && report.findings_dropped == 0
            && !report.findings.iter().any(is_doubtful);
        let failed_writes = Vec::new();
        Self { reader, generation, free, left, is_free_known, copied: 0, failed_writes }
    }

    /// Copies the blocks of an extent that can be read and match their checksums. Returns the
    /// copies, and where in the extent each begins.
    pub(super) fn copy(&mut self, extent: &Extent) -> Vec<(u64, Extent)> {
        let mut copies = Vec::new();
        // Preallocated blocks may be more than the device has.
        if extent.blocks > self.left {
            return copies;
        }
        let good = good_blocks(&self.reader, extent);
        let mut at = 0;
        for run in good.chunk_by(|one, other| one == other) {
            let (first, end) = (at, at + run.len() as u64);
            at = end;
            let mut skip = first;
            while run[0]
                && skip < end
                && self.failed_writes.len() <= FAILED_WRITES_MAX
                && let Some(range) = self.take(end - skip)
            {
                match self.copy_to(&extent.slice(skip, range.blocks), range) {
                    Ok(copy) => {
                        copies.extend(copy.map(|copy| (skip, copy)));
                        skip += range.blocks;
                    }
                    Err(error) => self.failed_writes.push(error),
                }
            }
        }
        copies
    }

    /// Everything was copied that can be; how many blocks.
    ///
    /// # Errors
    /// Writes failed that no other place could stand in for.
    pub(super) fn finish(mut self) -> Result<u64, DeviceError> {
        let is_refused = self.failed_writes.len() > FAILED_WRITES_MAX;
        self.failed_writes.pop().filter(|_| is_refused).map_or(Ok(self.copied), Err)
    }

    /// The copy of a part, unless that can't be read any more.
    ///
    /// # Errors
    /// It can't be written.
    fn copy_to(&mut self, part: &Extent, range: BlockRange) -> Result<Option<Extent>, DeviceError> {
        if part.kind == ExtentKind::Data {
            let read = read_data(self.reader.device, part.range(), &part.checksums);
            let Ok(data) = read else { return Ok(None) };
            if self.is_free_known {
                // A hint.
                let _ = self.reader.device.discard(range.start.offset_bytes(), data.len() as u64);
            }
            write_block(self.reader.device, range.start, &data)?;
        }
        self.copied += part.blocks;
        let (generation, written) = (self.generation, self.generation);
        Ok(Some(Extent { start: range.start, generation, written, ..part.clone() }))
    }

    /// At most so many free blocks.
    fn take(&mut self, blocks: u64) -> Option<BlockRange> {
        let run = self.free.last_mut()?;
        let taken = blocks.min(run.1 - run.0).min(self.left);
        let range = BlockRange::new(BlockNumber(run.0), taken);
        run.0 += taken;
        self.left -= taken;
        if run.0 == run.1 {
            self.free.pop();
        }
        (taken > 0).then_some(range)
    }
}
