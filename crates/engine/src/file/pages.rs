//! The data of one file that is in memory because the device doesn't have it yet.
//!
//! It lies in runs: blocks that are consecutive in the file, of one state, in one buffer. A write
//! brings its buffer along, and writing out uses slices of it; nothing is copied in between. A run
//! in flight is referred to by whoever writes it, so a change of some of its blocks replaces them
//! here and leaves the buffer alone.
//!
//! States of a block: see [`PageState`].
//!
//! Invariants: runs don't overlap; the counts are those of the runs; a dirty run is at least
//! [`KEPT_SHARE_MIN`] of the buffer that it keeps in memory when it enters and after each time it
//! is cut by a change, so memory is bounded by what is dirty.
//!
//! Lock discipline: belongs to the inode's state, under its lock.
use cairn_blockdev::{BlockBuffer, BlockPool, SharedBlocks};
use cairn_format::{BLOCK_SIZE, FileBlock};
use std::collections::BTreeMap;
use std::ops::Range;

/// One part in so many of a buffer must be in use for its sake; less is copied out of it.
const KEPT_SHARE_MIN: usize = 4;

/// What a block in memory waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PageState {
    /// Changed since its last writeback began.
    Dirty,
    /// Being written by whoever holds the extents mutex; not in the tree yet.
    Writing,
    /// In tree and log, and in the hands of the log; the number is its
    /// [`crate::file::inode::Flight`]'s. Whoever changes or drops it leaves blocks behind that may
    /// still be written to: they are pinned until the transaction is durable, which comes later.
    Logged(u64),
}

/// Consecutive blocks of a file.
pub(crate) struct Segment {
    pub(crate) block: FileBlock,
    pub(crate) data: SharedBlocks,
}

impl Segment {
    pub(crate) fn end(&self) -> FileBlock {
        self.block + self.data.blocks() as u64
    }

    pub(crate) fn blocks(&self) -> Range<FileBlock> {
        self.block..self.end()
    }
}

struct Run {
    data: SharedBlocks,
    state: PageState,
}

impl Run {
    fn blocks(&self) -> u64 {
        self.data.blocks() as u64
    }
}

/// Whether holding `data` is worth the whole buffer.
pub(crate) fn is_worth_its_buffer(data: &SharedBlocks) -> bool {
    data.blocks() * KEPT_SHARE_MIN >= data.kept_blocks()
}

/// File data in memory.
#[derive(Default)]
pub(crate) struct Pages {
    /// By first block.
    runs: BTreeMap<FileBlock, Run>,
    blocks: u64,
    dirty: u64,
    logged: u64,
}

impl Pages {
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Blocks in memory.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Dirty ones of them.
    pub(crate) fn dirty(&self) -> u64 {
        self.dirty
    }

    /// Logged ones of them.
    pub(crate) fn logged(&self) -> u64 {
        self.logged
    }

    /// The last block in memory.
    pub(crate) fn last(&self) -> Option<FileBlock> {
        self.runs.last_key_value().map(|(&block, run)| block + run.blocks() - 1)
    }

    /// The run that begins at `block` or covers it.
    fn covering(&self, block: FileBlock) -> Option<(FileBlock, &Run)> {
        let (&first, run) = self.runs.range(..=block).next_back()?;
        (block < first + run.blocks()).then_some((first, run))
    }

    pub(crate) fn contains(&self, block: FileBlock) -> bool {
        self.covering(block).is_some()
    }

    /// What is in memory of `wanted`, in order.
    pub(crate) fn within(
        &self,
        wanted: Range<FileBlock>,
    ) -> impl Iterator<Item = (Range<FileBlock>, &[u8])> {
        let start = self.covering(wanted.start).map_or(wanted.start, |(first, _)| first);
        self.runs.range(start..wanted.end.max(start)).filter_map(move |(&first, run)| {
            let blocks = first.max(wanted.start)..(first + run.blocks()).min(wanted.end);
            let bytes = (blocks.start - first) as usize * BLOCK_SIZE
                ..(blocks.end - first) as usize * BLOCK_SIZE;
            (!blocks.is_empty()).then(|| (blocks, &run.data[bytes]))
        })
    }

    /// Blocks that are not in the tree as they are here, in stretches as long as possible.
    pub(crate) fn delayed_stretches(&self) -> impl Iterator<Item = Range<FileBlock>> {
        let mut runs = self
            .runs
            .iter()
            .filter(|(_, run)| !matches!(run.state, PageState::Logged(_)))
            .peekable();
        std::iter::from_fn(move || {
            let (&first, run) = runs.next()?;
            let mut end = first + run.blocks();
            while let Some((_, run)) = runs.next_if(|(block, _)| **block == end) {
                end += run.blocks();
            }
            Some(first..end)
        })
    }

    fn count_in(&mut self, state: PageState, blocks: u64) {
        self.blocks += blocks;
        match state {
            PageState::Dirty => self.dirty += blocks,
            PageState::Logged(_) => self.logged += blocks,
            PageState::Writing => {}
        }
    }

    fn count_out(&mut self, state: PageState, blocks: u64) {
        self.blocks -= blocks;
        match state {
            PageState::Dirty => self.dirty -= blocks,
            PageState::Logged(_) => self.logged -= blocks,
            PageState::Writing => {}
        }
    }

    /// No run reaches across the beginning of `block` afterwards.
    fn split_at(&mut self, block: FileBlock) {
        let Some((&first, run)) = self.runs.range_mut(..block).next_back() else { return };
        let before = (block - first) as usize;
        if before < run.data.blocks() {
            let data = run.data.slice(before..run.data.blocks());
            run.data = run.data.slice(0..before);
            let state = run.state;
            self.runs.insert(block, Run { data, state });
        }
    }

    /// Copies the run that begins at `block`, or covers it, out of its buffer if it is a small part
    /// of it. What is in flight leaves memory soon.
    fn leave_large_buffer(&mut self, block: FileBlock, pool: &BlockPool) {
        if let Some((_, run)) = self.runs.range_mut(..=block).next_back()
            && run.state == PageState::Dirty
            && !is_worth_its_buffer(&run.data)
        {
            run.data = pool.copy_of(&run.data);
        }
    }

    /// Gives the blocks from `block` on new content; they are dirty.
    pub(crate) fn insert(&mut self, block: FileBlock, data: SharedBlocks, pool: &BlockPool) {
        let blocks = data.blocks() as u64;
        if blocks == 0 {
            return;
        }
        self.remove(block..block + blocks, pool);
        self.runs.insert(block, Run { data, state: PageState::Dirty });
        self.count_in(PageState::Dirty, blocks);
    }

    /// Changes a part of a block; it is dirty. If it isn't in memory, it held `base`, or zeros.
    pub(crate) fn edit(
        &mut self,
        block: FileBlock,
        base: Option<BlockBuffer>,
        pool: &BlockPool,
        change: impl FnOnce(&mut [u8]),
    ) {
        let content = match self.runs.range_mut(..=block).next_back() {
            Some((&first, run)) if block < first + run.blocks() => {
                let bytes = (block - first) as usize * BLOCK_SIZE
                    ..((block - first) as usize + 1) * BLOCK_SIZE;
                if run.state == PageState::Dirty
                    && let Some(alone) = run.data.get_mut()
                {
                    return change(&mut alone[bytes]);
                }
                let mut copy = pool.take(BLOCK_SIZE);
                copy.copy_from_slice(&run.data[bytes]);
                Some(copy)
            }
            _ => base,
        };
        let mut content = content.unwrap_or_else(|| {
            let mut zeros = pool.take(BLOCK_SIZE);
            zeros.fill(0);
            zeros
        });
        change(&mut content);
        self.insert(block, content.share(), pool);
    }

    /// Forgets `gone`.
    pub(crate) fn remove(&mut self, gone: Range<FileBlock>, pool: &BlockPool) {
        if self.within(gone.clone()).next().is_none() {
            return;
        }
        self.remove_where(gone.clone(), |_| true);
        if gone.start > FileBlock::FIRST {
            self.leave_large_buffer(gone.start - 1, pool);
        }
        self.leave_large_buffer(gone.end, pool);
    }

    fn remove_where(&mut self, within: Range<FileBlock>, chosen: impl Fn(PageState) -> bool) {
        self.split_at(within.start);
        self.split_at(within.end);
        let (mut dirty, mut logged, mut blocks) = (0, 0, 0);
        for (_, run) in self.runs.extract_if(within, |_, run| chosen(run.state)) {
            blocks += run.blocks();
            dirty += if run.state == PageState::Dirty { run.blocks() } else { 0 };
            logged += if matches!(run.state, PageState::Logged(_)) { run.blocks() } else { 0 };
        }
        self.blocks -= blocks;
        self.dirty -= dirty;
        self.logged -= logged;
    }

    /// Blocks of `within` in state `before` get the state `after`; how many.
    fn change_where(
        &mut self,
        within: Range<FileBlock>,
        before: PageState,
        after: PageState,
    ) -> u64 {
        self.split_at(within.start);
        self.split_at(within.end);
        let mut blocks = 0;
        for (_, run) in self.runs.range_mut(within).filter(|(_, run)| run.state == before) {
            run.state = after;
            blocks += run.blocks();
        }
        self.count_out(before, blocks);
        self.count_in(after, blocks);
        blocks
    }

    /// Takes dirty blocks from `from` on to be written, at most `blocks_max`, in at most
    /// `stretches_max` stretches that are consecutive in the file.
    pub(crate) fn take_dirty(
        &mut self,
        from: FileBlock,
        blocks_max: u64,
        stretches_max: usize,
    ) -> Vec<Segment> {
        self.split_at(from);
        let (mut blocks, mut stretches, mut end) = (0, 0, None);
        for (&first, run) in
            self.runs.range(from..).filter(|(_, run)| run.state == PageState::Dirty)
        {
            if end != Some(first) {
                if stretches == stretches_max {
                    break;
                }
                stretches += 1;
            }
            let taken = run.blocks().min(blocks_max - blocks);
            if taken == 0 {
                break;
            }
            blocks += taken;
            end = Some(first + taken);
        }
        let Some(end) = end else { return Vec::new() };
        self.split_at(end);
        let dirty = self.runs.range_mut(from..end).filter(|(_, run)| run.state == PageState::Dirty);
        let segments = dirty.map(|(&block, run)| {
            run.state = PageState::Writing;
            Segment { block, data: run.data.clone() }
        });
        let segments: Vec<Segment> = segments.collect();
        self.dirty -= blocks;
        segments
    }

    /// Those of `blocks` that nobody changed since they were taken: they are on the device, or with
    /// `flight` in the hands of the log.
    pub(crate) fn written(&mut self, blocks: Range<FileBlock>, flight: Option<u64>) {
        match flight {
            Some(number) => {
                self.change_where(blocks, PageState::Writing, PageState::Logged(number));
            }
            None => self.remove_where(blocks, |state| state == PageState::Writing),
        }
    }

    /// Those of `blocks` that nobody changed since they were taken are dirty again.
    pub(crate) fn not_written(&mut self, blocks: Range<FileBlock>) {
        self.change_where(blocks, PageState::Writing, PageState::Dirty);
    }

    /// A flight has ended: what is left of it leaves memory, or is dirty again.
    pub(crate) fn landed(&mut self, blocks: Range<FileBlock>, flight: u64, written: bool) {
        if written {
            self.remove_where(blocks, |state| state == PageState::Logged(flight));
        } else {
            self.change_where(blocks, PageState::Logged(flight), PageState::Dirty);
        }
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
