//! Coming to a subvolume for the first time, and what operations need of it before they begin.
//!
//! What a crash left unfinished in the subvolume that the volume is opened with is finished while
//! that is opened. For each other subvolume it is noted when the first of its inodes is wanted: a
//! removal is queued; a truncation is queued, too, and until it is done its file counts as one
//! whose truncation an error has interrupted.
//!
//! Lock discipline: as the subvolume is opened, the states of inodes may be locked, so nothing is
//! changed then.
use super::Files;
use super::removal_queue::{Orphan, Removal};
use crate::store::lineage_end::Ending;
use crate::store::operation::{Effort, Operation};
use crate::{Error, InodeId, Result};
use cairn_format::{FileBlock, INODE_ORPHANS, ItemKind, Key, OrphanKind, decode_orphan};
use std::cell::RefCell;

impl Files {
    /// Opens the subvolume of `inode` unless it is open.
    ///
    /// # Errors
    /// [`Error::Stale`] once it was removed.
    pub(crate) fn enter(&self, inode: InodeId) -> Result<()> {
        let (mut unfinished, mut is_first) = (Vec::new(), false);
        self.store.open_subvolume(inode.slot(), |tree| {
            is_first = true;
            for item in tree.range(Key::all(INODE_ORPHANS, ItemKind::Orphan)) {
                let (key, value) = item?;
                let removal = match decode_orphan(&value)? {
                    OrphanKind::Remove => Removal::Inode,
                    OrphanKind::Truncate => Removal::Tail,
                };
                // There is no inode with an impossible number.
                if let Some(number) = InodeId::of_number(inode.slot(), key.offset) {
                    unfinished.push(Orphan { number, blocks: 0, removal });
                }
            }
            let truncated = unfinished.iter().filter(|one| one.removal == Removal::Tail);
            self.orphans.note_truncated(truncated.map(|one| one.number));
            Ok(())
        })?;
        let subvolume = self.store.trees.subvolume(inode)?;
        subvolume.check_alive()?;
        if !self.store.options.read_only {
            if is_first && subvolume.names_others() && !self.store.trees.is_forming(subvolume.id) {
                self.queue_foreign_names(InodeId::root_of(subvolume.slot));
            }
            unfinished.into_iter().for_each(|orphan| self.orphans.queue.push(orphan));
        }
        Ok(())
    }

    /// A subvolume has lost its name, durably: removes what is in it, or has it removed.
    pub(crate) fn queue_subvolume(&self, root: InodeId) {
        self.queue(Orphan { number: root, blocks: 0, removal: Removal::Subvolume });
    }

    /// At mount: goes on with removals that were interrupted.
    pub(crate) fn resume_subvolume_removals(&self) {
        self.store.dying_subvolumes().into_iter().for_each(|root| self.queue_subvolume(root));
    }

    /// The volume is being closed: removals of subvolumes are left to the next mount.
    pub(crate) fn interrupt_subvolume_removals(&self) {
        self.orphans.queue.close();
    }

    /// Removes what is in a subvolume that has lost its name; then what others had only for it.
    pub(super) fn reap_subvolume(&self, orphan: Orphan) {
        let mut next = vec![orphan.number];
        while let Some(number) = next.pop() {
            let orphan = Orphan { number, ..orphan };
            let due = RefCell::new(Vec::new());
            let ending = Ending {
                is_interrupted: &|| self.orphans.queue.is_closing(),
                unload: &|snapshot| self.unload_unless_read(snapshot, orphan),
                is_applied: &|fork| self.long_reads.postpones(fork, orphan),
                due: &|root| due.borrow_mut().push(root),
            };
            let removed = self.unload_and_remove(number, &ending);
            for other in due.take() {
                self.queue_cleanup(other);
                next.push(other);
            }
            self.note_freed_or_retry(orphan, removed);
        }
    }

    fn unload_and_remove(&self, root: InodeId, ending: &Ending<'_>) -> Result<()> {
        if self.store.trees.subvolume(root)?.check_alive().is_ok() {
            return Ok(());
        }
        self.unload_subvolume(root);
        self.store.remove_subvolume(root, ending)
    }

    /// As [`Files::unload_subvolume`], of a deleted snapshot for `work`.
    ///
    /// # Errors
    /// [`Error::Busy`] if somebody reads it for long: `work` is queued again when that has ended.
    pub(super) fn unload_unless_read(&self, root: InodeId, work: Orphan) -> Result<()> {
        if self.long_reads.postpones(root, work) {
            return Err(Error::Busy);
        }
        self.unload_subvolume(root);
        Ok(())
    }

    /// Its inodes leave memory with their dirty data, once those who use them have ended; nobody
    /// can load them again.
    pub(super) fn unload_subvolume(&self, root: InodeId) {
        for inode in self.inodes.of_subvolume(root.slot()) {
            let _extents = self.lock_extents(&inode);
            let mut state = inode.state.write_at(inode.number.0);
            if let Some(mut state) = state.take() {
                self.drop_pages(&mut state, FileBlock::FIRST..FileBlock::END);
            }
            self.dirty_inodes.lock().remove(&inode.number);
        }
    }

    /// [`Store::begin`](crate::store::Store::begin) in the subvolume of `inode`.
    pub(crate) fn begin(
        &self,
        inode: InodeId,
        items: u64,
        data_blocks: u64,
        effort: Effort,
    ) -> Result<Operation<'_>> {
        self.enter(inode)?;
        self.store.begin(inode, items, data_blocks, effort)
    }
}
