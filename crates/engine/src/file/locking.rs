//! Locking inodes, which loads them, and their extents.
//!
//! Lock discipline: as in [`super::inode`]; several state locks are taken in ascending inode
//! number, here only.
use super::Files;
use super::inode::{Inode, InodeState, ReadGuard, WriteGuard};
use crate::InodeId;
use crate::store::Store;
use crate::{Error, Result};
use cairn_environment::lock::MutexGuard;
use cairn_format::{FileBlock, InodeItem, ItemKind};
use std::sync::Arc;

/// A rename locks so many: two directories and what both names stand for.
const LOCKED_MAX: usize = 4;

/// Exclusive access to several inodes.
pub(crate) struct LockedInodes<'a> {
    guards: [Option<(InodeId, WriteGuard<'a>)>; LOCKED_MAX],
}

impl LockedInodes<'_> {
    /// The state of one of them.
    pub(crate) fn get(&mut self, number: InodeId) -> &mut InodeState {
        let (_, guard) = self
            .guards
            .iter_mut()
            .flatten()
            .find(|(n, _)| *n == number)
            .expect("only locked inodes are asked for");
        guard
    }
}

/// The extents mutex of an inode, held.
///
/// A panic of its holder stops the volume. What the thread took to write it would otherwise count
/// as on its way for ever, and the next fsync would find nothing to do and succeed.
pub(crate) struct ExtentsGuard<'a> {
    _mutex: MutexGuard<'a, ()>,
    store: &'a Store,
}

impl Drop for ExtentsGuard<'_> {
    /// After a panic the volume refuses changes before the mutex is free: the thread that takes it
    /// next sees that.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let error = Error::Aborted("a thread that changed a file's blocks panicked".into());
            self.store.fail_under_locks(&error);
        }
    }
}

impl Files {
    /// Locks the extents of an inode.
    pub(crate) fn lock_extents<'a>(&'a self, inode: &'a Inode) -> ExtentsGuard<'a> {
        ExtentsGuard { _mutex: inode.extents.lock(), store: &self.store }
    }

    /// As [`Files::lock_extents`], unless another thread has them locked.
    pub(crate) fn try_lock_extents<'a>(&'a self, inode: &'a Inode) -> Option<ExtentsGuard<'a>> {
        Some(ExtentsGuard { _mutex: inode.extents.try_lock()?, store: &self.store })
    }

    fn load(&self, number: InodeId) -> Result<Box<InodeState>> {
        self.enter(number)?;
        let key = number.key(ItemKind::Inode, 0);
        let value = self.store.trees.of(number).get(&key)?.ok_or(Error::NotFound)?;
        let item = self.store.of_item(number, &key, InodeItem::decode(&value))?;
        // An inode that left memory may have items in the CIL: an fsync of it waits for everything
        // logged so far.
        let mut state = InodeState::new(item, self.store.log.last());
        if self.orphans.is_truncated(number) {
            state.truncated_from = Some(FileBlock::round_up(item.size));
        }
        Ok(Box::new(state))
    }

    /// Locks an inode exclusively, loading it when needed.
    pub(crate) fn write_inode<'a>(&self, inode: &'a Inode) -> Result<WriteGuard<'a>> {
        let mut guard = inode.state.write_at(inode.number.0);
        if guard.is_none() {
            *guard = Some(self.load(inode.number)?);
        }
        Ok(WriteGuard(guard))
    }

    /// Locks an inode shared, loading it when needed.
    pub(crate) fn read_inode<'a>(&self, inode: &'a Inode) -> Result<ReadGuard<'a>> {
        loop {
            let guard = inode.state.read_at(inode.number.0);
            if guard.is_some() {
                return Ok(ReadGuard(guard));
            }
            drop(guard);
            drop(self.write_inode(inode)?);
        }
    }

    /// As [`Files::read_inode`], for a caller from outside.
    ///
    /// An inode with neither a name nor a reference is being removed: for its callers it is gone.
    pub(crate) fn read_inode_in_use<'a>(&self, inode: &'a Inode) -> Result<ReadGuard<'a>> {
        let state = self.read_inode(inode)?;
        self.expect_in_use(inode.number, &state)?;
        Ok(state)
    }

    /// As [`Files::read_inode_in_use`], if the inode is loaded and nobody changes it now.
    pub(crate) fn try_read_inode_in_use<'a>(&self, inode: &'a Inode) -> Option<ReadGuard<'a>> {
        let guard = inode.state.try_read().filter(|guard| guard.is_some()).map(ReadGuard)?;
        self.expect_in_use(inode.number, &guard).ok()?;
        Some(guard)
    }

    /// As [`Files::read_inode_in_use`], exclusively, to change the inode.
    pub(crate) fn write_inode_in_use<'a>(&self, inode: &'a Inode) -> Result<WriteGuard<'a>> {
        let state = self.write_inode(inode)?;
        self.store.trees.subvolume(inode.number)?.check_writable()?;
        self.expect_in_use(inode.number, &state)?;
        Ok(state)
    }

    fn expect_in_use(&self, number: InodeId, state: &InodeState) -> Result<()> {
        self.store.trees.subvolume(number)?.check_alive()?;
        let in_use = state.item.links > 0 || self.inodes.is_referenced(number);
        if in_use { Ok(()) } else { Err(Error::NotFound) }
    }

    /// Locks up to four inodes exclusively, in ascending order; the same one may be named twice.
    pub(crate) fn lock_inodes<'a>(&self, inodes: &[&'a Arc<Inode>]) -> Result<LockedInodes<'a>> {
        assert!(inodes.len() <= LOCKED_MAX, "{} inodes to lock at once", inodes.len());
        let mut locked = LockedInodes { guards: [const { None }; LOCKED_MAX] };
        let mut before = None;
        for guard in &mut locked.guards {
            let Some(inode) = inodes
                .iter()
                .filter(|inode| Some(inode.number) > before)
                .min_by_key(|inode| inode.number)
            else {
                break;
            };
            *guard = Some((inode.number, self.write_inode(inode)?));
            before = Some(inode.number);
        }
        Ok(locked)
    }
}
