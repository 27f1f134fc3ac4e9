//! Names of subvolumes: made, removed. [`rename`](super::rename) moves them.
//!
//! The entry that names a subvolume stands in a directory like any other, and counts there as a
//! subdirectory. What makes or removes one is durable when it returns.
use crate::names::Names;
use crate::names::directory::LINKS_MAX;
use crate::names::entries::{FoundEntry, check_name};
use crate::store::operation::Effort;
use crate::types::{Attributes, NewInode};
use crate::{Error, InodeId, Result};
use cairn_environment::atomic::Ordering;
use cairn_format::{EntryTarget, FileType, INODE_ROOT, InodeItem, ItemKind};
use std::collections::{HashMap, HashSet};

/// Times that a removal looks whether anything keeps a subvolume.
const LOOKS_AGAIN: u32 = 3;

/// Items of its parent's tree that a subvolume's creation or removal changes: entry and directory.
pub(super) const NAME_ITEMS: u64 = 2;

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
            // Its state is loaded later: its place may be before that of the directory, which is
            // locked.
            self.files.inodes.get(inode).seen_in.store(parent.0, Ordering::Relaxed);
            self.files.inodes.retain(inode);
            Attributes::new(inode, &root, 0)
        };
        self.store.commit()?;
        Ok(attributes)
    }

    /// Removes a subvolume with all that is in it, if `permits` its root directory.
    pub(crate) fn remove_subvolume(
        &self,
        parent: InodeId,
        name: &[u8],
        permits: &dyn Fn(&Attributes) -> Result<()>,
    ) -> Result<()> {
        let mut looks = 1..LOOKS_AGAIN;
        loop {
            let glance = self.peek_entry(parent, name)?.ok_or(Error::NotFound)?;
            match self.try_remove_subvolume(parent, name, glance, permits) {
                // What kept it may have gone between two looks. A fork of it that is wanted keeps
                // it until a commit has made that.
                Err(Error::Busy) if looks.next().is_some() => self.store.commit()?,
                Ok(true) => return Ok(()),
                removed => drop(removed?),
            }
        }
    }

    /// The paths of subvolumes from the root, of those that can be found. Each directory in which
    /// some are named is listed once.
    pub(crate) fn paths_of_subvolumes(&self) -> Result<HashMap<u64, Vec<u8>>> {
        let mut names: HashMap<InodeId, Vec<(u64, Vec<u8>)>> = HashMap::new();
        let (mut listed, mut paths) = (HashSet::new(), HashMap::new());
        for place in self.store.trees.places()? {
            let Ok(slot) = self.store.trees.slot_of(place.subvolume) else { continue };
            let Some(directory) = InodeId::of_number(slot, place.directory.0) else { continue };
            if !listed.insert(directory) {
                continue;
            }
            let found = names.entry(directory).or_default();
            // What can't be read has no names.
            let _ = self.read_directory(directory, 0, &mut |item| {
                if item.inode.is_subvolume_root()
                    && let Ok(subvolume) = self.store.trees.subvolume(item.inode)
                {
                    found.push((subvolume.id.0, item.name.to_vec()));
                }
                true
            });
        }
        if let Ok(shown) = self.store.trees.subvolume(InodeId::ROOT) {
            paths.insert(shown.id.0, b"/".to_vec());
        }
        for (directory, names) in names.into_iter().filter(|(_, names)| !names.is_empty()) {
            let Ok(Some(above)) = self.path_of(directory) else { continue };
            for (id, name) in names {
                let above = if above == b"/" { &[][..] } else { &above[..] };
                paths.insert(id, [above, b"/", &name].concat());
            }
        }
        Ok(paths)
    }

    /// Removes the subvolume if the entry is still the one that was seen.
    pub(super) fn try_remove_subvolume(
        &self,
        parent: InodeId,
        name: &[u8],
        seen: FoundEntry,
        permits: &dyn Fn(&Attributes) -> Result<()>,
    ) -> Result<bool> {
        if !matches!(seen.target, EntryTarget::Subvolume(_)) {
            return Err(Error::InvalidArgument("not a subvolume"));
        }
        self.files.enter(parent)?;
        let mut is_removed = false;
        {
            // A volume that is full of forks must let go of them.
            let mut operation =
                self.store.begin_for_subvolume(parent, NAME_ITEMS, Effort::Cleanup)?;
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
            permits(&Attributes::new(found.inode, &locked.get(found.inode).item, 0))?;
            match operation.begin_removal(found.inode) {
                Err(Error::Busy) if self.store.has_cleanups(found.inode)? => {}
                begun => {
                    begun?;
                    operation.delete(parent.key(ItemKind::DirectoryEntry, found.slot))?;
                    self.account_removed_entry(locked.get(parent), name, FileType::Directory);
                    operation.put_inode(parent, &locked.get(parent).loggable())?;
                    let sequence = operation.log();
                    locked.get(parent).logged(sequence);
                    is_removed = true;
                }
            }
        }
        if !is_removed {
            // Its snapshots are deleted, and their blocks are being freed.
            self.files.finish_cleanups(seen.inode)?;
            return Ok(false);
        }
        self.store.commit()?;
        self.files.queue_subvolume(seen.inode);
        Ok(true)
    }
}
