//! Creating, linking and removing names.
//!
//! Each operation locks all inodes that it changes, in ascending order, checks again what it
//! glanced at before, and logs everything in one step; a crash shows all of it or nothing.
use crate::InodeId;
use crate::file::inode::InodeState;
use crate::file::orphans::orphan_key;
use crate::names::Names;
use crate::names::entries::{FoundEntry, check_name};
use crate::store::operation::{Effort, Operation};
use crate::types::now;
use crate::types::{Attributes, NewInode};
use crate::{Error, Result};
use cairn_format::{
    EntryTarget, FileType, InodeItem, ItemKind, OrphanKind, SYMLINK_PART_BYTES, encode_orphan,
};
use std::sync::atomic::Ordering;

/// Most names of one inode.
pub(super) const LINKS_MAX: u32 = 1_000_000_000;
/// Items that the creation of a file changes: its inode, its entry, the directory's inode.
pub(crate) const CREATION_ITEMS: u64 = 3;
/// Longest target of a symbolic link.
const TARGET_BYTES_MAX: usize = 4095;
const SET_GROUP_ID: u32 = 0o2000;

impl Names {
    pub(crate) fn new_item(
        &self,
        parent: &InodeState,
        parent_number: InodeId,
        new: &NewInode<'_>,
        links: u32,
        operation: &Operation<'_>,
    ) -> InodeItem {
        let now = now();
        let inherits_group = parent.item.mode & SET_GROUP_ID != 0;
        let directory = new.file_type == FileType::Directory;
        let inherited_bit = if inherits_group && directory { SET_GROUP_ID } else { 0 };
        InodeItem {
            mode: new.file_type.mode_bits() | (new.mode & 0o7777) | inherited_bit,
            uid: new.uid,
            gid: if inherits_group { parent.item.gid } else { new.gid },
            links,
            size: new.target.map_or(0, |target| target.len() as u64),
            blocks: 0,
            device: if matches!(new.file_type, FileType::CharacterDevice | FileType::BlockDevice) {
                new.device
            } else {
                0
            },
            parent: self.parent_to_note(new.file_type, parent_number),
            entries: 0,
            flags: 0,
            generation: operation.generation(),
            accessed: now,
            modified: now,
            changed: now,
            created: now,
        }
    }

    /// What the item of something that gets a name in `directory` says of its parent.
    pub(super) fn parent_to_note(&self, file_type: FileType, directory: InodeId) -> u64 {
        if file_type == FileType::Directory || self.store.trees.note_parents {
            directory.number().0
        } else {
            0
        }
    }

    fn check_new(new: &NewInode<'_>) -> Result<()> {
        match (new.file_type, new.target) {
            (FileType::Symlink, Some([])) => Err(Error::NotFound),
            (FileType::Symlink, Some(target)) if target.len() > TARGET_BYTES_MAX => {
                Err(Error::NameLength(target.len()))
            }
            (FileType::Symlink, None) => {
                Err(Error::InvalidArgument("a symbolic link needs a target"))
            }
            _ => Ok(()),
        }
    }

    /// Creates an object with a name; takes a reference on it.
    pub(crate) fn create(
        &self,
        parent: InodeId,
        name: &[u8],
        new: &NewInode<'_>,
    ) -> Result<Attributes> {
        check_name(name)?;
        Self::check_new(new)?;
        // What a symbolic link says comes with it.
        let parts = new
            .target
            .filter(|_| new.file_type == FileType::Symlink)
            .map_or(0, |target| target.len().div_ceil(SYMLINK_PART_BYTES));
        let mut operation =
            self.files.begin(parent, CREATION_ITEMS + parts as u64, 0, Effort::Name)?;
        let directory = self.files.inodes.get(parent);
        let mut state = self.files.write_inode(&directory)?;
        state.expect_directory()?;
        let (found, free) = self.find_entry(parent, name)?;
        if found.is_some() {
            return Err(Error::Exists);
        }
        let slot = free.ok_or(Error::HashCollisions)?;
        if new.file_type == FileType::Directory && state.item.links >= LINKS_MAX {
            return Err(Error::TooManyLinks);
        }
        let number = parent.sibling(self.store.take_inode_number()?);
        let links = if new.file_type == FileType::Directory { 2 } else { 1 };
        let item = self.new_item(&state, parent, new, links, &operation);
        operation.put_new(number.key(ItemKind::Inode, 0), &item.encode())?;
        if let Some(target) = new.target.filter(|_| new.file_type == FileType::Symlink) {
            for (part, bytes) in target.chunks(SYMLINK_PART_BYTES).enumerate() {
                operation.put_new(number.key(ItemKind::Symlink, part as u64), bytes)?;
            }
        }
        operation.put_entry(
            parent,
            slot,
            EntryTarget::Inode(number.number(), new.file_type),
            name,
        )?;
        self.account_new_entry(&mut state, name, new.file_type);
        operation.put_inode(parent, &state.loggable())?;
        let sequence = operation.log();
        state.logged(sequence);
        self.files.inodes.insert_new(number, parent, InodeState::new(item, sequence));
        self.files.inodes.retain(number);
        Ok(Attributes::new(number, &item, 0))
    }

    /// Creates an object without a name (O_TMPFILE); takes a reference on it. It is gone when that
    /// is given back, unless it was linked.
    pub(crate) fn create_unnamed(&self, parent: InodeId, new: &NewInode<'_>) -> Result<Attributes> {
        if new.file_type != FileType::Regular {
            return Err(Error::InvalidArgument("only a regular file can be without a name"));
        }
        let mut operation = self.files.begin(parent, 2, 0, Effort::Name)?;
        let directory = self.files.inodes.get(parent);
        let state = self.files.read_inode(&directory)?;
        state.expect_directory()?;
        let number = parent.sibling(self.store.take_inode_number()?);
        let item = self.new_item(&state, parent, new, 0, &operation);
        operation.put_new(number.key(ItemKind::Inode, 0), &item.encode())?;
        operation.put_new(orphan_key(number), &encode_orphan(OrphanKind::Remove))?;
        let sequence = operation.log();
        self.files.inodes.insert_new(number, parent, InodeState::new(item, sequence));
        self.files.inodes.retain(number);
        self.files.note_unlinked(number);
        Ok(Attributes::new(number, &item, 0))
    }

    /// Gives `inode` a further name; takes a reference on it.
    pub(crate) fn link(&self, inode: InodeId, parent: InodeId, name: &[u8]) -> Result<Attributes> {
        check_name(name)?;
        if inode.slot() != parent.slot() {
            return Err(Error::CrossDevice);
        }
        let mut operation = self.files.begin(parent, 4, 0, Effort::Name)?;
        let (directory, target) = (self.files.inodes.get(parent), self.files.inodes.get(inode));
        let mut locked = self.files.lock_inodes(&[&directory, &target])?;
        locked.get(parent).expect_directory()?;
        let file_type = locked.get(inode).file_type();
        if file_type == FileType::Directory {
            return Err(Error::NotPermitted("a directory has one name"));
        }
        let (found, free) = self.find_entry(parent, name)?;
        if found.is_some() {
            return Err(Error::Exists);
        }
        let slot = free.ok_or(Error::HashCollisions)?;
        let state = locked.get(inode);
        if state.item.links >= LINKS_MAX {
            return Err(Error::TooManyLinks);
        }
        if state.item.links == 0 {
            // Only a file that never had a name, or is still open, gets here: its reference keeps
            // it.
            if !self.files.inodes.is_referenced(inode)
                || self.store.trees.of(inode).get(&orphan_key(inode))?.is_none()
            {
                return Err(Error::NotFound);
            }
            match state.truncated_from {
                Some(_) => {
                    operation.put(orphan_key(inode), &encode_orphan(OrphanKind::Truncate))?
                }
                None => operation.delete(orphan_key(inode))?,
            }
            self.files.note_linked(inode);
        }
        state.item.links += 1;
        state.item.parent = self.parent_to_note(file_type, parent);
        state.item.changed = now();
        operation.put_inode(inode, &state.loggable())?;
        let attributes =
            Attributes::new(inode, &state.item, self.files.delayed_blocks(inode, state));
        operation.put_entry(parent, slot, EntryTarget::Inode(inode.number(), file_type), name)?;
        self.account_new_entry(locked.get(parent), name, file_type);
        operation.put_inode(parent, &locked.get(parent).loggable())?;
        let sequence = operation.log();
        locked.get(inode).logged(sequence);
        locked.get(parent).logged(sequence);
        target.seen_in.store(parent.0, Ordering::Relaxed);
        self.files.inodes.retain(inode);
        Ok(attributes)
    }

    /// Removes the name of something that is not a directory.
    pub(crate) fn unlink(&self, parent: InodeId, name: &[u8]) -> Result<()> {
        self.remove_name(parent, name, false)
    }

    /// Removes an empty directory.
    pub(crate) fn remove_directory(&self, parent: InodeId, name: &[u8]) -> Result<()> {
        self.remove_name(parent, name, true)
    }

    fn remove_name(&self, parent: InodeId, name: &[u8], directory_wanted: bool) -> Result<()> {
        loop {
            let glance = self.peek_entry(parent, name)?.ok_or(Error::NotFound)?;
            if directory_wanted && matches!(glance.target, EntryTarget::Subvolume(_)) {
                let is_empty = |root: &Attributes| {
                    if root.size_bytes > 0 { Err(Error::NotEmpty) } else { Ok(()) }
                };
                if self.try_remove_subvolume(parent, name, glance, &is_empty)? {
                    return Ok(());
                }
                continue;
            }
            if let Some(last_name_gone) =
                self.try_remove_name(parent, name, glance, directory_wanted)?
            {
                if last_name_gone {
                    self.files.reap_if_unused(glance.inode);
                }
                return Ok(());
            }
        }
    }

    /// Removes the entry if it is still the one that was seen; whether that was the inode's last
    /// name.
    fn try_remove_name(
        &self,
        parent: InodeId,
        name: &[u8],
        seen: FoundEntry,
        directory_wanted: bool,
    ) -> Result<Option<bool>> {
        let mut operation = self.files.begin(parent, 4, 0, Effort::Removal)?;
        let (directory, target) =
            (self.files.inodes.get(parent), self.files.inodes.get(seen.inode));
        let mut locked = match self.files.lock_inodes(&[&directory, &target]) {
            Err(Error::NotFound) => {
                return self.entry_changed(parent, name, seen.inode).map(|()| None);
            }
            other => other?,
        };
        locked.get(parent).expect_directory()?;
        let found = self.expect_entry(parent, name)?;
        if found.target != seen.target {
            return Ok(None);
        }
        match (directory_wanted, found.file_type == FileType::Directory) {
            (true, false) => return Err(Error::NotDirectory),
            (false, true) => return Err(Error::IsDirectory),
            _ => {}
        }
        if directory_wanted && locked.get(found.inode).item.entries > 0 {
            return Err(Error::NotEmpty);
        }
        operation.delete(parent.key(ItemKind::DirectoryEntry, found.slot))?;
        self.account_removed_entry(locked.get(parent), name, found.file_type);
        operation.put_inode(parent, &locked.get(parent).loggable())?;
        let last_name_gone =
            self.drop_link(&mut operation, found.inode, locked.get(found.inode))?;
        let sequence = operation.log();
        locked.get(parent).logged(sequence);
        locked.get(found.inode).logged(sequence);
        Ok(Some(last_name_gone))
    }

    /// An inode that an entry named could not be loaded: fine if the entry has changed meanwhile,
    /// damage otherwise.
    pub(crate) fn entry_changed(&self, parent: InodeId, name: &[u8], seen: InodeId) -> Result<()> {
        match self.peek_entry(parent, name)? {
            Some(entry) if entry.inode == seen => {
                let problem = format!("it names inode {seen}, which does not exist");
                let key = parent.key(ItemKind::DirectoryEntry, entry.slot);
                Err(self.store.damaged_item(parent, &key, problem))
            }
            _ => Ok(()),
        }
    }

    /// Takes one name from an inode; without any it becomes an orphan. Up to two items.
    pub(crate) fn drop_link(
        &self,
        operation: &mut Operation<'_>,
        number: InodeId,
        state: &mut InodeState,
    ) -> Result<bool> {
        state.item.links = if state.file_type() == FileType::Directory {
            0
        } else {
            state.item.links.saturating_sub(1)
        };
        state.item.changed = now();
        operation.put_inode(number, &state.loggable())?;
        let last_name_gone = state.item.links == 0;
        if last_name_gone {
            operation.put(orphan_key(number), &encode_orphan(OrphanKind::Remove))?;
        }
        Ok(last_name_gone)
    }

    /// Target of a symbolic link.
    pub(crate) fn read_link(&self, number: InodeId) -> Result<Vec<u8>> {
        let inode = self.files.inodes.get(number);
        // Held, so that the items are not removed meanwhile.
        let state = self.files.read_inode_in_use(&inode)?;
        if state.file_type() != FileType::Symlink {
            return Err(Error::InvalidArgument("not a symbolic link"));
        }
        let length = state.item.size;
        let (mut target, mut in_order) = (Vec::new(), true);
        for (part, item) in
            (0..).zip(self.store.trees.of(number).range(number.keys(ItemKind::Symlink)))
        {
            let (key, value) = item?;
            in_order &= key.offset == part;
            target.extend(value);
        }
        if in_order && !target.is_empty() && target.len() as u64 == length && !target.contains(&0) {
            return Ok(target);
        }
        let problem = format!(
            "a symbolic link of {length} bytes with an impossible target of {}",
            target.len()
        );
        Err(self.store.damaged_item(number, &number.key(ItemKind::Symlink, 0), problem))
    }

    /// The directory that contains `directory`.
    pub(crate) fn parent(&self, directory: InodeId) -> Result<InodeId> {
        let inode = self.files.inodes.get(directory);
        let state = self.files.read_inode(&inode)?;
        if state.file_type() != FileType::Directory {
            return Err(Error::NotDirectory);
        }
        if directory.is_subvolume_root() && directory != InodeId::ROOT {
            return self.store.trees.named_in(directory);
        }
        let parent = state.item.parent;
        drop(state);
        InodeId::of_number(directory.slot(), parent).ok_or_else(|| {
            let problem = format!("it is in the impossible directory {parent}");
            self.store.damaged_item(directory, &directory.key(ItemKind::Inode, 0), problem)
        })
    }
}
