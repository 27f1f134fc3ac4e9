//! Names of subvolumes: made, removed. [`rename`](super::rename) moves them.
//!
//! The entry that names a subvolume stands in a directory like any other, and counts there as a
//! subdirectory. What makes or removes one is durable when it returns.
use crate::file::inode::InodeState;
use crate::names::Names;
use crate::names::directory::LINKS_MAX;
use crate::names::entries::{FoundEntry, check_name};
use crate::store::operation::Effort;
use crate::types::{Attributes, NewInode};
use crate::{Error, InodeId, Result};
use cairn_format::{EntryTarget, FileType, INODE_ROOT, InodeItem, ItemKind, TreeId};

/// Items of its parent's tree that a subvolume's creation or removal changes: entry and directory.
const NAME_ITEMS: u64 = 2;

impl Names {
    /// Makes a subvolume with a name; takes a reference on its root directory.
    pub(crate) fn create_subvolume(
        &self,
        parent: InodeId,
        name: &[u8],
        new: &NewInode<'_>,
    ) -> Result<Attributes> {
        check_name(name)?;
        let new = NewInode { file_type: FileType::Directory, target: None, device: 0, ..*new };
        self.files.enter(parent)?;
        let attributes = {
            let mut operation = self.store.begin_for_subvolume(parent, NAME_ITEMS, Effort::Name)?;
            let directory = self.files.inodes.get(parent);
            let mut state = self.files.write_inode(&directory)?;
            state.expect_directory()?;
            let (found, free) = self.find_entry(parent, name)?;
            if found.is_some() {
                return Err(Error::Exists);
            }
            let slot = free.ok_or(Error::HashCollisions)?;
            if state.item.links >= LINKS_MAX {
                return Err(Error::TooManyLinks);
            }
            let root = self.new_item(&state, parent, &new, 2, &operation);
            let root = InodeItem { parent: INODE_ROOT.0, ..root };
            let (id, inode) = operation.make_subvolume(parent, &root)?;
            operation.put_entry(parent, slot, EntryTarget::Subvolume(id), name)?;
            self.account_new_entry(&mut state, name, FileType::Directory);
            operation.put_inode(parent, &state.loggable())?;
            let sequence = operation.log();
            state.logged(sequence);
            self.files.inodes.insert_new(inode, parent, InodeState::new(root, sequence));
            self.files.inodes.retain(inode);
            Attributes::new(inode, &root, 0)
        };
        self.store.commit()?;
        Ok(attributes)
    }

    /// Removes a subvolume with all that is in it.
    pub(crate) fn remove_subvolume(&self, parent: InodeId, name: &[u8]) -> Result<()> {
        loop {
            let glance = self.peek_entry(parent, name)?.ok_or(Error::NotFound)?;
            if self.try_remove_subvolume(parent, name, glance, false)? {
                return Ok(());
            }
        }
    }

    /// The path of a subvolume from the root, if it has one that can be found.
    pub(crate) fn path_of_subvolume(&self, id: u64) -> Result<Option<Vec<u8>>> {
        self.path_of(InodeId::root_of(self.store.trees.slot_of(TreeId(id))?))
    }

    /// Removes the subvolume if the entry is still the one that was seen.
    pub(super) fn try_remove_subvolume(
        &self,
        parent: InodeId,
        name: &[u8],
        seen: FoundEntry,
        must_be_empty: bool,
    ) -> Result<bool> {
        if !matches!(seen.target, EntryTarget::Subvolume(_)) {
            return Err(Error::InvalidArgument("not a subvolume"));
        }
        self.files.enter(parent)?;
        {
            let mut operation =
                self.store.begin_for_subvolume(parent, NAME_ITEMS, Effort::Removal)?;
            let (directory, root) =
                (self.files.inodes.get(parent), self.files.inodes.get(seen.inode));
            let mut locked = match self.files.lock_inodes(&[&directory, &root]) {
                // Another thread has just removed it, or its parent.
                Err(Error::Stale) => return Ok(false),
                locked => locked?,
            };
            locked.get(parent).expect_directory()?;
            let found = self.expect_entry(parent, name)?;
            if found.target != seen.target {
                return Ok(false);
            }
            if must_be_empty && locked.get(found.inode).item.entries > 0 {
                return Err(Error::NotEmpty);
            }
            operation.begin_removal(found.inode)?;
            operation.delete(parent.key(ItemKind::DirectoryEntry, found.slot))?;
            self.account_removed_entry(locked.get(parent), name, FileType::Directory);
            operation.put_inode(parent, &locked.get(parent).loggable())?;
            let sequence = operation.log();
            locked.get(parent).logged(sequence);
        }
        self.store.commit()?;
        self.files.queue_subvolume(seen.inode);
        Ok(true)
    }
}
