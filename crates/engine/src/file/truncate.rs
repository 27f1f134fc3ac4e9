//! Changing the length of a file, and removing all of it.
//!
//! Shortening a file, with its extents mutex held:
//! 1. In one operation: the new size, the last block rewritten with zeros past the new end (its
//!    data is written before it is logged), the first extents past the end removed; if more remain,
//!    an orphan item.
//! 2. In further operations: the remaining extents, some at a time; the last one removes the orphan
//!    item.
//!
//! *A crash after step 1 leaves an orphan item, and the next mount does step 2.* No data can enter
//! the file past its end meanwhile, since that takes the extents mutex.
use crate::InodeId;
use crate::file::Files;
use crate::file::inode::{Inode, InodeState};
use crate::file::offsets::checked_end;
use crate::file::orphans::orphan_key;
use crate::store::operation::{Effort, Operation};
use crate::types::WriteTimes;
use crate::{Error, Result};
use cairn_format::{
    BLOCK_SIZE, Extent, ExtentKind, FileBlock, FileType, ItemKind, Key, OrphanKind, checksum,
    encode_orphan,
};
use std::sync::Arc;

impl Files {
    /// Sets the length of a file.
    pub(crate) fn set_size(&self, inode: &Arc<Inode>, size: u64, times: WriteTimes) -> Result<()> {
        checked_end(size, 0)?;
        let _extents = self.lock_extents(inode);
        self.read_inode_in_use(inode)?.expect_regular()?;
        self.settle_truncation(inode)?;
        let finished = self.cut_to_size(inode, size, times)?;
        if finished { Ok(()) } else { self.finish_truncation(inode) }
    }

    /// Step 1; whether nothing remains to be done.
    fn cut_to_size(&self, inode: &Arc<Inode>, size: u64, times: WriteTimes) -> Result<bool> {
        let number = inode.number;
        let first_gone = FileBlock::round_up(size);
        // The items changed: inode, orphan, boundary (drop 2, insert 1), removed extents.
        let (mut operation, batch) = self.store.begin_batch(number, 6, 1, Effort::Removal)?;
        let mut state = self.write_inode(inode)?;
        state.expect_regular()?;
        // Also to the length that the file has: blocks that were allocated behind its end go.
        let shrinks = size < state.item.size;
        let mut remaining = false;
        if size <= state.item.size {
            // What may fail comes before what can't be taken back.
            self.extents_in(number, first_gone..FileBlock::END, batch + 1)?;
            if shrinks {
                self.rewrite_boundary(&mut operation, number, &mut state, size)?;
            }
            // Read again: the boundary may have been cut out of the first of them.
            let gone = self.extents_in(number, first_gone..FileBlock::END, batch + 1)?;
            self.drop_pages(&mut state, first_gone..FileBlock::END);
            remaining = gone.len() > batch;
            state.truncated_from = remaining.then_some(first_gone);
            if remaining && state.item.links > 0 {
                operation.put(orphan_key(number), &encode_orphan(OrphanKind::Truncate))?;
            }
            if !remaining {
                self.drop_extents(
                    &mut operation,
                    number,
                    &mut state,
                    first_gone..FileBlock::END,
                    &gone,
                )?;
            }
        }
        if size != state.item.size || remaining {
            state.item.size = size;
            // Also where data in memory has no place yet: what sets a length counts at once, and
            // an orphan item cuts from there.
            state.disk_size = size;
        }
        if times == WriteTimes::Now {
            self.touch(&mut state);
        }
        operation.put_inode(number, &state.loggable())?;
        let sequence = operation.log();
        state.logged(sequence);
        self.unlist_clean(inode, &state);
        Ok(!remaining)
    }

    /// Gives the block in which the file will end zeros past the end. If the device has an older
    /// version of it, the new one is written at once and enters the tree with the new size;
    /// otherwise it stays in memory.
    fn rewrite_boundary(
        &self,
        operation: &mut Operation<'_>,
        number: InodeId,
        state: &mut InodeState,
        size: u64,
    ) -> Result<()> {
        let tail = (size % BLOCK_SIZE as u64) as usize;
        if tail == 0 {
            return Ok(());
        }
        let block = FileBlock::round_down(size);
        let existing = self.extents_in(number, block..block.next(), 1)?;
        if !existing.iter().any(|(_, extent)| extent.kind == ExtentKind::Data) {
            if state.pages.contains(block) {
                // Not in a tree, and the extents mutex is held: it was dirty before, too.
                state.pages.edit(block, None, &self.buffers, |bytes| bytes[tail..].fill(0));
            }
            return Ok(());
        }
        let mut content = self.read_block(number, state, block)?;
        content[tail..].fill(0);
        let range = self.store.space.allocate_data(operation.reservation(), 1, None)?;
        self.data_cache.forget(range);
        if let Err(error) = self.store.device.write(range.start.offset_bytes(), &[&content]) {
            self.store.space.cancel(range);
            return Err(error.into());
        }
        let extent = Extent {
            start: range.start,
            blocks: 1,
            kind: ExtentKind::Data,
            generation: operation.generation(),
            written: operation.generation(),
            checksums: vec![checksum(&content)],
        };
        self.drop_extents(operation, number, state, block..block.next(), &existing)?;
        self.insert_extent(operation, number, state, block, extent)?;
        self.drop_pages(state, block..block.next());
        Ok(())
    }

    /// Finishes a truncation that an error interrupted. The extents mutex is held; without this
    /// nothing may enter the file.
    pub(crate) fn settle_truncation(&self, inode: &Arc<Inode>) -> Result<()> {
        let unfinished = self.read_inode(inode)?.truncated_from.is_some();
        if unfinished { self.finish_truncation(inode) } else { Ok(()) }
    }

    /// Step 2, for a file whose orphan item says `Truncate`. The extents mutex is held.
    pub(crate) fn finish_truncation(&self, inode: &Arc<Inode>) -> Result<()> {
        loop {
            let (mut operation, batch) =
                self.store.begin_batch(inode.number, 4, 0, Effort::Removal)?;
            let mut state = self.write_inode(inode)?;
            let first_gone =
                state.truncated_from.unwrap_or_else(|| FileBlock::round_up(state.disk_size));
            let gone = self.extents_in(inode.number, first_gone..FileBlock::END, batch)?;
            let finished = gone.len() < batch;
            self.drop_extents(
                &mut operation,
                inode.number,
                &mut state,
                first_gone..FileBlock::END,
                &gone,
            )?;
            if finished {
                state.truncated_from = None;
                self.orphans.note_finished(inode.number);
                if state.item.links > 0 {
                    operation.delete(orphan_key(inode.number))?;
                }
            }
            operation.put_inode(inode.number, &state.loggable())?;
            let sequence = operation.log();
            state.logged(sequence);
            if finished {
                return Ok(());
            }
        }
    }

    /// Removes an inode without names: its items some at a time, then itself. A crash on the way
    /// leaves its orphan item. The extents mutex is held. `counted` are the blocks of it that were
    /// announced to the allocator.
    pub(crate) fn remove_inode(
        &self,
        inode: &Arc<Inode>,
        effort: Effort,
        counted: &mut u64,
    ) -> Result<()> {
        loop {
            let (mut operation, batch) = self.begin_removal(inode.number, effort, *counted)?;
            let mut state = match self.write_inode(inode) {
                Err(Error::NotFound) => return Ok(()),
                other => other?,
            };
            if state.item.links > 0 || self.inodes.is_referenced(inode.number) {
                return Ok(());
            }
            self.drop_pages(&mut state, FileBlock::FIRST..FileBlock::END);
            let blocks_before = state.item.blocks;
            let finished = self.remove_items(&mut operation, inode.number, &mut state, batch)?;
            self.note_freed(counted, blocks_before - state.item.blocks);
            if finished {
                operation.delete(inode.number.key(ItemKind::Inode, 0))?;
                operation.delete(orphan_key(inode.number))?;
            } else {
                operation.put_inode(inode.number, &state.loggable())?;
            }
            let sequence = operation.log();
            state.logged(sequence);
            if finished {
                state.size_dirty = false;
                self.unlist_clean(inode, &state);
                state.unload();
                return Ok(());
            }
        }
    }

    /// Begins a step of a removal of which `counted` blocks are announced. While it waits for space
    /// itself, nobody should wait for them.
    fn begin_removal(
        &self,
        inode: InodeId,
        effort: Effort,
        counted: u64,
    ) -> Result<(Operation<'_>, usize)> {
        let begin = |effort| self.store.begin_batch(inode, 3, 0, effort);
        if effort == Effort::Reclaim {
            return begin(effort);
        }
        self.store.throttle()?;
        match begin(Effort::Reclaim) {
            Err(Error::NoSpace) => {
                self.store.space.retract(counted);
                let begun = begin(effort);
                self.store.space.announce(counted);
                begun
            }
            begun => begun,
        }
    }

    /// Removes up to `batch` of an inode's other items; whether none is left.
    fn remove_items(
        &self,
        operation: &mut Operation<'_>,
        number: InodeId,
        state: &mut InodeState,
        batch: usize,
    ) -> Result<bool> {
        if state.file_type() == FileType::Directory && state.item.entries > 0 {
            return Err(Error::NotEmpty);
        }
        let mut removed = 0;
        let items: Vec<_> = self
            .store
            .trees
            .of(number)
            .range(Key::all_of_inode(number.number()))
            .take(batch + 1)
            .collect::<std::result::Result<_, _>>()?;
        let finished = items.len() <= batch;
        for (key, value) in items {
            if key.kind == ItemKind::Inode as u8 || removed == batch {
                continue;
            }
            removed += 1;
            let extent = if key.kind == ItemKind::Extent as u8 {
                Some(self.store.of_item(number, &key, Extent::decode_of(&key, &value))?)
            } else {
                None
            };
            if let Some(extent) = &extent {
                self.expect_referenced(extent)?;
            }
            operation.delete(key)?;
            if let Some(extent) = extent {
                operation.free(&extent)?;
                state.item.blocks = state.item.blocks.saturating_sub(extent.blocks);
            }
        }
        Ok(finished)
    }
}
