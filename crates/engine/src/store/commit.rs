//! Committing a transaction. `ARCHITECTURE.md` has the steps and what a crash between them leaves.
use crate::options::FsyncWait;
use crate::store::transaction::Commit;
use crate::store::{BitmapSlot, Store};

use crate::{Error, Result};
use cairn_blockdev::AlignedBuffer;
use cairn_btree::{Change, DirtyNodes};
use cairn_format::{
    Bitmap, Generation, Geometry, Key, LogPosition, NodePointer, RootItem, Superblock, TREE_FILES,
    bitmap_generations_checksum,
};
use cairn_log::LogError;
use cairn_space::{Request, Urgency};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;

/// What is fixed at the cut.
struct Frozen {
    generation: Generation,
    dirty: DirtyNodes,
    bitmaps: Vec<Bitmap>,
    used_blocks: u64,
    root: NodePointer,
    next_inode: u64,
    inodes: u64,
    log_tail: LogPosition,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Only if something changed.
    Ordinary,
    /// In any case: makes this mount's log epoch durable.
    First,
    /// In any case: nothing is changed after it. Marks the volume clean unless something could not
    /// be written before.
    Last { clean: bool },
}

impl Store {
    /// Commits the running transaction, or waits for the one who does. Returns at `SuperCommitted`.
    pub(crate) fn commit(&self) -> Result<()> {
        self.check_writable()?;
        self.commit_as(Kind::Ordinary)
    }

    /// The commit that ends recovery.
    pub(crate) fn commit_first(&self) -> Result<()> {
        self.commit_as(Kind::First)
    }

    /// The commit that ends a mount, and whether everything could be written before; waits until it
    /// is completed.
    pub(crate) fn commit_last(&self, clean: bool) -> Result<()> {
        self.commit_as(Kind::Last { clean })?;
        self.transactions.wait_completed(self.transactions.super_committed())
    }

    fn commit_as(&self, kind: Kind) -> Result<()> {
        let mut commit = loop {
            match self.transactions.begin_commit(self.transactions.generation())? {
                Some(commit) => break commit,
                // Somebody else committed it meanwhile.
                None if kind == Kind::Ordinary => return Ok(()),
                None => {}
            }
        };
        if kind == Kind::Ordinary && self.file_tree.root().generation != commit.generation() {
            return Ok(());
        }
        // A panic is a failure, too: those who wait must hear of it.
        let result = catch_unwind(AssertUnwindSafe(|| self.run_commit(&mut commit, kind)));
        // The right to commit is still held: a later transaction refers to what this one could not
        // write.
        match &result {
            Ok(Ok(())) => {}
            // The caller reports that the volume could not be opened.
            Ok(Err(error)) if kind == Kind::First => {
                let _first = self.halt(&error.clone().into_failure(), LogError::Stopped);
            }
            Ok(Err(error)) => self.fail(error),
            Err(_) => self.fail(&Error::Aborted("a commit ended with a panic".into())),
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn run_commit(&self, commit: &mut Commit<'_>, kind: Kind) -> Result<()> {
        let frozen = self.cut(commit.generation())?;
        if matches!(kind, Kind::Last { .. }) {
            commit.end()
        } else {
            commit.unblock()
        }
        // 1. Nodes and bitmaps. The old superblock's trees are untouched; the log follows it.
        let written = self.write_with_spare(|| Ok(self.cache.write(&frozen.dirty)?))?;
        self.counters.nodes_written.fetch_add(written.nodes, Ordering::Relaxed);
        let slots = self.write_with_spare(|| self.write_bitmaps(&frozen.bitmaps))?;
        // Data that the log holds, or is writing, belongs to the trees as well; and what this
        // transaction freed must not be free while it is written to.
        self.log.write_data()?;
        // 2. They must be durable before a superblock refers to them.
        self.device.flush()?;
        // 3. The superblock, into the slot that the one before doesn't use. Torn, it leaves that
        //    one.
        let superblock = self.next_superblock(&frozen, &slots, kind);
        let slot = Geometry::SUPERBLOCKS[(frozen.generation.0 % 2) as usize];
        self.device
            .write(slot.offset_bytes(), &[&AlignedBuffer::copy_of(&superblock.encode(slot))])?;
        // 4. Now it counts.
        self.device.flush()?;
        *self.bitmap_slots.lock() = slots;
        commit.super_committed();
        // Before anything else: this is what fsyncs without room in the log wait for.
        if self.options.fsync_wait == FsyncWait::Super {
            self.log.super_committed(frozen.generation);
        }
        self.counters.commits.fetch_add(1, Ordering::Relaxed);
        self.observer.committed();
        // 5. The copy at the end of the device; the next flush covers it.
        let copy = self.superblock.geometry.superblock_copy();
        self.device
            .write(copy.offset_bytes(), &[&AlignedBuffer::copy_of(&superblock.encode(copy))])?;
        // 6. The blocks that this transaction freed; only now nothing durable refers to them.
        //    `commit` is still held: another one overtaking this would unpin a later generation
        //    first.
        if self.options.background {
            self.unpinner.push(frozen.generation);
        } else {
            self.unpin(frozen.generation);
        }
        Ok(())
    }

    /// The cut: nobody is joined.
    fn cut(&self, generation: Generation) -> Result<Frozen> {
        let root = self.file_tree.root();
        if root.generation == generation {
            let nodes = self.root_tree.worst_case(1);
            let reservation =
                self.space.reserve(Request { data_blocks: 0, nodes }, Urgency::Commit)?;
            let change = Change { generation, reservation: &reservation };
            self.root_tree.insert(&change, Key::root(TREE_FILES), &RootItem { root }.encode())?;
        }
        let dirty = self.cache.take_dirty(generation);
        let snapshot = self.space.snapshot(generation);
        let cut = self.log.cut(generation.next());
        Ok(Frozen {
            generation,
            dirty,
            bitmaps: snapshot.bitmaps,
            used_blocks: snapshot.used_blocks,
            root: self.root_tree.root(),
            next_inode: self.next_inode.load(Ordering::Relaxed),
            inodes: self.inode_count.get(),
            log_tail: cut.position,
        })
    }

    fn next_superblock(&self, frozen: &Frozen, slots: &[BitmapSlot], kind: Kind) -> Superblock {
        Superblock {
            generation: frozen.generation,
            root: frozen.root,
            next_inode: frozen.next_inode,
            inodes: frozen.inodes,
            log_epoch: self.log_epoch,
            log_tail: frozen.log_tail,
            used_blocks: frozen.used_blocks,
            bitmaps_checksum: bitmap_generations_checksum(slots.iter().map(|slot| slot.generation)),
            clean: kind == Kind::Last { clean: true },
            ..self.superblock.clone()
        }
    }

    /// Writes each bitmap into the slot that is not in use; returns what counts once the superblock
    /// is durable.
    fn write_bitmaps(&self, bitmaps: &[Bitmap]) -> Result<Vec<BitmapSlot>> {
        let mut slots = self.bitmap_slots.lock().clone();
        for bitmap in bitmaps {
            let slot = 1 - slots[bitmap.group as usize].slot;
            let block = self.superblock.geometry.bitmap_block(bitmap.group, slot as usize);
            let bytes = AlignedBuffer::copy_of(&bitmap.encode(self.superblock.volume, block));
            self.device.write(block.offset_bytes(), &[&bytes])?;
            slots[bitmap.group as usize] = BitmapSlot { slot, generation: bitmap.generation };
        }
        Ok(slots)
    }

    /// Makes the blocks that `generation` freed free, after discarding them if asked for.
    pub(crate) fn unpin(&self, generation: Generation) {
        self.discard_pinned(generation);
        self.space.unpin(generation);
        if self.options.fsync_wait == FsyncWait::Complete {
            // The closed contexts stay in the list so long, and the ring is freed later: neither
            // hurts.
            self.log.super_committed(generation);
        }
        self.transactions.complete(generation);
    }
}
