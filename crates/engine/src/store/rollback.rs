//! A fork takes the place of a subvolume.
//!
//! 1. The next cut makes a fork of the snapshot that has no name yet. Its item says *dying*, so it
//!    ends if nothing follows. *A crash: the next mount removes it, as any dying fork.*
//! 2. One operation gives the fork the subvolume's name, and the subvolume another one; the fork's
//!    item is dying no more, and [*continues*](super::trees) the subvolume. A commit follows. *A
//!    crash before its superblock: as after 1, since nothing of an operation that changes the tree
//!    of subvolumes is replayed without it. After it: all of it is done.*
//!
//! Until step 2 nobody sees the fork: it counts as *forming*.
use super::Store;
use super::forks::Forming;
use super::operation::Operation;
use crate::{Error, InodeId, Result};
use cairn_format::{Generation, SnapshotItem, SubvolumeItem, TreeId};

impl Store {
    /// The fork without a name is not wanted any more; after a commit it may be removed.
    pub(crate) fn end_unnamed_fork(&self, forming: &Forming) -> Result<()> {
        // Its tree is needed to remove it; without, that is left to the next mount.
        let opened = self.trees.open_slot(forming.root.slot(), |_| Ok(()));
        self.trees.subvolume(forming.root)?.end();
        self.show_fork(forming);
        opened.map(drop)
    }

    /// Whether the subvolume with the root directory `root` shows the snapshot with the root
    /// directory `snapshot`.
    pub(crate) fn shows(&self, root: InodeId, snapshot: InodeId) -> Result<bool> {
        let (shown, of) = (self.trees.subvolume(snapshot)?, self.trees.subvolume(root)?);
        Ok(shown.snapshot.is_some() && self.trees.continued_by(of.id)?.contains(&shown.id))
    }

    /// Whether names of other subvolumes stand in the one with the root directory `root`.
    pub(crate) fn has_nested(&self, root: InodeId) -> Result<bool> {
        self.trees.lock_records().any_named_in(self.trees.subvolume(root)?.id)
    }

    /// Fails if a snapshot in the line of `id` has this name, or will have it.
    pub(super) fn expect_new_name(&self, id: TreeId, name: &[u8]) -> Result<()> {
        for id in self.trees.line_of(id)? {
            let slot = self.trees.slot_for_work(id)?;
            if self.trees.is_name_of_snapshot(id, name)? || self.cut_work.wants(slot, Some(name)) {
                return Err(Error::Exists);
            }
        }
        Ok(())
    }

    /// The snapshot with this name that `id` shows: its own, or that of one that it continues.
    pub(super) fn expect_shown(
        &self,
        id: u64,
        name: &[u8],
    ) -> Result<(TreeId, Generation, SnapshotItem)> {
        for id in self.trees.continued_by(self.expect_subvolume(id)?)? {
            if let Some((made, item)) = self.trees.snapshot_named(id, name)? {
                return Ok((id, made, item));
            }
        }
        Err(Error::NotFound)
    }

    /// The subvolumes of the line of `id`.
    pub(crate) fn line_of(&self, id: u64) -> Result<Vec<u64>> {
        Ok(self.trees.line_of(TreeId(id))?.into_iter().map(|one| one.0).collect())
    }
}

impl Operation<'_> {
    /// Step 2, but for the names: the fork takes the place of the subvolume with the root directory
    /// `old`, in whose parent the operation changes names. The directory there is locked. If `old`
    /// is shown by default, the fork is from now on.
    pub(crate) fn take_place(&mut self, forming: &Forming, old: InodeId) -> Result<()> {
        let store = self.store();
        let (old, fork) = (store.trees.subvolume(old)?, store.trees.subvolume(forming.root)?);
        let records = store.trees.lock_records();
        old.check_alive()?;
        let parent = records.item(old.id)?.parent;
        if parent != self.tree().id() {
            return Err(store.trees.damaged(format!("the subvolume {} is in another one", old.id)));
        }
        let (item, first) = (records.item(fork.id)?, store.trees.first_of_line(old.id)?);
        if records.find(parent)?.is_none_or(|item| item.is_nameless()) {
            return Err(Error::Stale);
        }
        let item = SubvolumeItem { is_dying: false, continues: true, ..item };
        self.note_unlogged_change();
        records.put(&self.change(), &store.superblock, fork.id, &item)?;
        if store.trees.default_subvolume() == old.id {
            records.set_default(fork.id);
        }
        records.note_continued(fork.id, first);
        Ok(())
    }
}
