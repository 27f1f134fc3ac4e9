//! Committing a transaction.
//!
//! 1. *CommitStart*: new joins wait; the joined operations leave. *A crash: the superblock before
//!    counts, and the log goes on from its tail.*
//! 2. *CommitDoing*, the cut: what died and is a snapshot's enters the dead lists; snapshots and
//!    forks that are wanted are made; the new roots enter the root tree; the dirty nodes, the
//!    changed bitmaps, the next inode number and the log's head are taken; the log's context is
//!    closed. *Unblocked*: joins go on, into the next transaction. *A crash: as before.*
//! 3. Nodes and bitmaps are written, and the data that the log still holds. That comes first if an
//!    [early fork](super::forks) waits for it. *A crash: the trees of the superblock before are
//!    untouched, and the bitmaps are in the slots that it does not use.*
//! 4. Flush. *A crash: as before.*
//! 5. The superblock is written, into the slot that the one before does not use. *A crash: torn or
//!    not there, it leaves the one before; whole, it may count already. Both are sound, and no
//!    waiter has returned. The next mount settles which of them counts.*
//! 6. Flush. *SuperCommitted*: this superblock counts, and all fsyncs that wait for it return
//!    before anything else is done ([early wake-up](crate::FsyncWait)). *A crash: the log is
//!    replayed from the new tail.*
//! 7. The copy of the superblock at the end of the device is written; the next flush covers it. *A
//!    crash: torn, it is made anew by the next mount.*
//! 8. The blocks that this transaction freed are discarded, if asked for, and become free:
//!    *Completed*. Only now does nothing durable refer to them. *A crash: they are free, since the
//!    bitmaps of step 3 say so.*
//!
//! One commit runs at a time. The commit that ends a mount ends the transactions at step 2: joins
//! and commits fail from then on, so nothing follows the superblock that calls the volume clean.
use crate::options::FsyncWait;
use crate::store::transaction::Commit;
use crate::store::trees::Settings;
use crate::store::{BitmapSlot, Store};

use crate::{Error, Result};
use cairn_blockdev::AlignedBuffer;
use cairn_btree::{Change, DirtyNodes};
use cairn_format::{
    Bitmap, Features, Generation, Geometry, Key, LogPosition, NodePointer, RootItem, Superblock,
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
    settings: Settings,
    log_tail: LogPosition,
    /// Somebody waits until the data can be read.
    has_early_fork: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Only if something changed.
    Ordinary,
    /// In any case: makes this mount's log epoch durable.
    First,
    /// In any case: nothing is changed after it. Marks the volume clean unless something could not
    /// be written before.
    Last { clean: bool },
}

impl Store {
    /// Commits the running transaction, or waits for the thread that does. Returns at
    /// *SuperCommitted*.
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
                // Another thread committed it meanwhile.
                None if kind == Kind::Ordinary => return Ok(()),
                None => {}
            }
        };
        let nothing_to_do = || !self.trees.any_changed() && !self.cut_work.is_any_wanted();
        if kind == Kind::Ordinary && nothing_to_do() {
            return Ok(());
        }
        self.finish_commit(&mut commit, kind)
    }

    /// Commits the transaction that nobody has joined any more.
    pub(super) fn finish_commit(&self, commit: &mut Commit<'_>, kind: Kind) -> Result<()> {
        // A panic is a failure, too: the waiters get an error.
        let result = catch_unwind(AssertUnwindSafe(|| self.run_commit(commit, kind)));
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

    /// Steps 2 to 8.
    fn run_commit(&self, commit: &mut Commit<'_>, kind: Kind) -> Result<()> {
        // 2. The cut.
        let frozen = self.cut(commit.generation())?;
        if matches!(kind, Kind::Last { .. }) {
            commit.end()
        } else {
            commit.unblock()
        }
        if frozen.has_early_fork {
            self.log.write_data()?;
            commit.data_written();
        }
        // 3. Nodes, bitmaps, and data. What this transaction freed must not become free while the
        //    log writes to it.
        let written = self.write_with_spare(|| Ok(self.cache.write(&frozen.dirty)?))?;
        self.counters.nodes_written.fetch_add(written.nodes, Ordering::Relaxed);
        let slots = self.write_with_spare(|| self.write_bitmaps(&frozen.bitmaps))?;
        self.log.write_data()?;
        // 4. They are durable before a superblock refers to them.
        self.device.flush()?;
        // 5. The superblock.
        let superblock = self.next_superblock(&frozen, &slots, kind);
        let slot = Geometry::SUPERBLOCKS[(frozen.generation.0 % 2) as usize];
        self.device
            .write(slot.offset_bytes(), &[&AlignedBuffer::copy_of(&superblock.encode(slot))])?;
        // 6. It counts.
        self.device.flush()?;
        *self.bitmap_slots.lock() = slots;
        self.trees.note_durable(frozen.generation);
        commit.super_committed();
        if self.options.fsync_wait == FsyncWait::Super {
            self.log.super_committed(frozen.generation);
        }
        self.counters.commits.fetch_add(1, Ordering::Relaxed);
        self.observer.committed(&self.space);
        // 7. The copy.
        let copy = self.superblock.geometry.superblock_copy();
        self.device
            .write(copy.offset_bytes(), &[&AlignedBuffer::copy_of(&superblock.encode(copy))])?;
        // 8. The freed blocks. The right to commit is still held, so generations are unpinned in
        //    their order.
        if self.options.background {
            self.unpinner.push(frozen.generation);
        } else {
            self.unpin(frozen.generation);
        }
        Ok(())
    }

    /// Step 2: no operation is joined.
    fn cut(&self, generation: Generation) -> Result<Frozen> {
        self.write_dead_runs(generation)?;
        self.make_requested_snapshots(generation)?;
        let has_early_fork = self.make_requested_forks(generation)?;
        self.record_roots(generation)?;
        let dirty = self.cache.take_dirty(generation);
        let snapshot = self.space.snapshot(generation);
        let cut = self.log.cut(generation.next());
        Ok(Frozen {
            generation,
            dirty,
            bitmaps: snapshot.bitmaps,
            used_blocks: snapshot.used_blocks,
            root: self.trees.roots.root(),
            next_inode: self.next_inode.load(Ordering::Relaxed),
            inodes: self.inode_count.get(),
            settings: self.trees.settings(),
            log_tail: cut.position,
            has_early_fork,
        })
    }

    /// Puts the roots that changed into the root tree.
    fn record_roots(&self, generation: Generation) -> Result<()> {
        let (changed, roots) = (self.trees.take_changed(), &self.trees.roots);
        for (tree, root) in changed {
            let request = Request { data_blocks: 0, nodes: roots.worst_case(1) };
            let reservation = self.space.reserve(request, Urgency::Commit)?;
            let change = Change { generation, reservation: &reservation };
            roots.insert(&change, Key::root(tree.tree.id()), &RootItem { root }.encode())?;
            tree.note_recorded(root);
        }
        for ended in self.trees.take_ended() {
            let request = Request { data_blocks: 0, nodes: roots.worst_case(1) };
            let reservation = self.space.reserve(request, Urgency::Commit)?;
            roots.remove(&Change { generation, reservation: &reservation }, &Key::root(ended))?;
        }
        Ok(())
    }

    fn next_superblock(&self, frozen: &Frozen, slots: &[BitmapSlot], kind: Kind) -> Superblock {
        let settings = frozen.settings;
        let mut features = self.superblock.features;
        if settings.has_subvolumes {
            features.incompatible |= Features::SUBVOLUMES;
        }
        if settings.has_snapshots {
            features.incompatible |= Features::SNAPSHOTS;
        }
        if settings.has_forks {
            features.incompatible |= Features::FORKS;
        }
        if settings.has_joining {
            features.incompatible |= Features::JOINING;
        }
        Superblock {
            generation: frozen.generation,
            features,
            next_tree: settings.next_tree,
            default_subvolume: settings.default_subvolume,
            next_list: settings.next_list,
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

    /// Step 8.
    pub(crate) fn unpin(&self, generation: Generation) {
        self.discard_pinned(generation);
        self.space.unpin(generation);
        if self.options.fsync_wait == FsyncWait::Complete {
            // Until now the closed contexts stayed in the list and the ring was not freed.
            self.log.super_committed(generation);
        }
        self.transactions.complete(generation);
    }
}
