//! Rename: replace, no-replace, exchange; leaving something new at the old name.
//!
//! 1. If a regular file will be replaced, write the source's dirty data first, so that no prefix of
//!    operations contains the rename without the data; data that is on its way with a group is
//!    waited for.
//! 2. Join; for a directory that moves to another parent take the volume's rename lock and walk up
//!    from the new parent, so that no directory becomes its own ancestor.
//! 3. Lock both directories, the source and the target in ascending order; look both names up
//!    again.
//! 4. Change and log everything in one step.
use crate::InodeId;
use crate::file::inode::InodeState;
use crate::file::locking::LockedInodes;
use crate::names::Names;
use crate::names::entries::{FoundEntry, check_name};
use crate::store::operation::{Effort, Operation};
use crate::types::now;
use crate::types::{NewInode, RenameMode};
use crate::{Error, Result};
use cairn_environment::atomic::Ordering;
use cairn_format::{EntryTarget, FileType, InodeItem, ItemKind};
use std::sync::Arc;

/// Deeper than any path can be made in practice: a longer chain of parents is a cycle.
const DEPTH_MAX: u32 = 1 << 20;

/// One side of a rename.
#[derive(Clone, Copy)]
struct Place<'a> {
    directory: InodeId,
    name: &'a [u8],
}

/// What the caller asked for.
#[derive(Clone, Copy)]
struct Wish<'a> {
    old: Place<'a>,
    new: Place<'a>,
    mode: RenameMode,
    /// What comes to stand at the old name.
    left: Option<&'a NewInode<'a>>,
}

enum Outcome {
    Done { orphan: Option<InodeId> },
    Changed,
}

/// What replacing made.
struct Replaced {
    orphan: Option<InodeId>,
    left: Option<(InodeId, InodeItem)>,
}

impl Names {
    /// Moves an entry.
    pub(crate) fn rename(
        &self,
        old_parent: InodeId,
        old_name: &[u8],
        new_parent: InodeId,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        let (old, new) = (
            Place { directory: old_parent, name: old_name },
            Place { directory: new_parent, name: new_name },
        );
        self.rename_wished(Wish { old, new, mode, left: None })
    }

    /// Moves an entry, and creates `left` at its old name, in one step.
    pub(crate) fn rename_leaving(
        &self,
        old_parent: InodeId,
        old_name: &[u8],
        new_parent: InodeId,
        new_name: &[u8],
        mode: RenameMode,
        left: &NewInode<'_>,
    ) -> Result<()> {
        if mode == RenameMode::Exchange {
            return Err(Error::InvalidArgument("an exchange leaves no name free"));
        }
        if matches!(left.file_type, FileType::Directory | FileType::Symlink) {
            return Err(Error::InvalidArgument(
                "what a rename leaves is neither a directory nor a symbolic link",
            ));
        }
        let (old, new) = (
            Place { directory: old_parent, name: old_name },
            Place { directory: new_parent, name: new_name },
        );
        self.rename_wished(Wish { old, new, mode, left: Some(left) })
    }

    fn rename_wished(&self, wish: Wish<'_>) -> Result<()> {
        let Wish { old, new, mode, .. } = wish;
        check_name(old.name)?;
        check_name(new.name)?;
        let crosses = old.directory.slot() != new.directory.slot();
        loop {
            let source = self.peek_entry(old.directory, old.name)?.ok_or(Error::NotFound)?;
            let target = self.peek_entry(new.directory, new.name)?;
            match (mode, target) {
                (RenameMode::NoReplace, Some(_)) => return Err(Error::Exists),
                // An inode belongs to one subvolume; only the name of a subvolume can leave it.
                _ if crosses && !source.is_subvolume() => return Err(Error::CrossDevice),
                _ if crosses && target.is_some() => return Err(Error::NotEmpty),
                (RenameMode::Exchange, None) => return Err(Error::NotFound),
                (RenameMode::Exchange, Some(target))
                    if source.is_subvolume() || target.is_subvolume() =>
                {
                    return Err(Error::CrossDevice);
                }
                (RenameMode::Replace, Some(target))
                    if target.file_type == FileType::Regular
                        && source.file_type == FileType::Regular =>
                {
                    match self.files.write_back_and_wait(&self.files.inodes.get(source.inode)) {
                        // Another inode has the source's name by now, and this one is gone.
                        Err(Error::NotFound) => {
                            self.entry_changed(old.directory, old.name, source.inode)?;
                            continue;
                        }
                        other => other?,
                    }
                }
                _ => {}
            }
            match self.try_rename(wish, source, target)? {
                Outcome::Done { orphan } => {
                    if let Some(orphan) = orphan {
                        self.files.reap_if_unused(orphan);
                    }
                    return Ok(());
                }
                Outcome::Changed => {}
            }
        }
    }

    fn try_rename(
        &self,
        wish: Wish<'_>,
        source: FoundEntry,
        target: Option<FoundEntry>,
    ) -> Result<Outcome> {
        let Wish { old, new, mode, .. } = wish;
        let items = 8 + u64::from(wish.left.is_some());
        self.files.enter(old.directory)?;
        self.files.enter(new.directory)?;
        let mut operation = if source.is_subvolume() {
            self.store.begin_for_move(old.directory, new.directory, items, Effort::Name)?
        } else {
            self.store.begin(old.directory, items, 0, Effort::Name)?
        };
        let moves = |entry: &FoundEntry| {
            entry.file_type == FileType::Directory && old.directory != new.directory
        };
        let directory_moves =
            moves(&source) || (mode == RenameMode::Exchange && target.as_ref().is_some_and(moves));
        let _rename = directory_moves.then(|| self.rename_lock.lock());
        if directory_moves
            && source.file_type == FileType::Directory
            && self.is_ancestor(source.inode, new.directory)?
        {
            return Err(Error::InvalidArgument("a directory can't move into itself"));
        }
        if directory_moves
            && let Some(target) = target
            && target.file_type == FileType::Directory
            && self.is_ancestor(target.inode, old.directory)?
        {
            let exchange = mode == RenameMode::Exchange;
            return Err(if exchange {
                Error::InvalidArgument("a directory can't move into itself")
            } else {
                Error::NotEmpty
            });
        }
        let mut numbers = vec![old.directory, new.directory, source.inode];
        numbers.extend(target.map(|target| target.inode));
        let inodes: Vec<_> = numbers.iter().map(|&number| self.files.inodes.get(number)).collect();
        let mut locked = match self.files.lock_inodes(&inodes.iter().collect::<Vec<&Arc<_>>>()) {
            // The subvolume was just removed, or the one with a directory: then that says so.
            Err(Error::Stale) => return Ok(Outcome::Changed),
            Err(Error::NotFound) => {
                for (place, entry) in [(old, Some(source)), (new, target)] {
                    // Only the entry of the one that is gone must have changed.
                    if let Some(entry) = entry
                        && matches!(
                            self.files.read_inode(&self.files.inodes.get(entry.inode)),
                            Err(Error::NotFound)
                        )
                    {
                        self.entry_changed(place.directory, place.name, entry.inode)?;
                    }
                }
                return Ok(Outcome::Changed);
            }
            other => other?,
        };
        locked.get(old.directory).expect_directory()?;
        locked.get(new.directory).expect_directory()?;
        let found_source = self.expect_entry(old.directory, old.name)?;
        let (found_target, free) = self.find_entry(new.directory, new.name)?;
        if found_source.target != source.target
            || found_target.map(|t| t.target) != target.map(|t| t.target)
        {
            return Ok(Outcome::Changed);
        }
        let Replaced { orphan, left } = match (mode, found_target) {
            (_, Some(target)) if target.inode == source.inode => {
                return Ok(Outcome::Done { orphan: None });
            }
            (RenameMode::Exchange, Some(target)) => {
                self.exchange(&mut operation, &mut locked, (old, found_source), (new, target))?;
                Replaced { orphan: None, left: None }
            }
            (_, target) => {
                self.replace(&mut operation, &mut locked, wish, found_source, target, free)?
            }
        };
        let sequence = operation.log();
        for number in
            numbers.into_iter().filter(|number| !source.is_subvolume() || *number != source.inode)
        {
            locked.get(number).logged(sequence);
        }
        // Its number is not above that of a subvolume's root, which is locked: beside one it is
        // loaded when it is wanted.
        if let Some((number, item)) = left
            && !source.is_subvolume()
        {
            self.files.inodes.insert_new(number, old.directory, InodeState::new(item, sequence));
        }
        inodes[2].seen_in.store(new.directory.0, Ordering::Relaxed);
        if let (RenameMode::Exchange, Some(other)) = (mode, inodes.get(3)) {
            other.seen_in.store(old.directory.0, Ordering::Relaxed);
        }
        if directory_moves {
            self.store.trees.note_move();
        }
        Ok(Outcome::Done { orphan })
    }

    /// Whether `candidate` is `directory` or one of its ancestors.
    fn is_ancestor(&self, candidate: InodeId, directory: InodeId) -> Result<bool> {
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            if at == candidate {
                return Ok(true);
            }
            if at == InodeId::ROOT {
                return Ok(false);
            }
            at = self.parent(at)?;
        }
        let problem = format!("directory {directory} has more than {DEPTH_MAX} ancestors");
        Err(self.store.damaged_item(directory, &directory.key(ItemKind::Inode, 0), problem))
    }

    fn replace(
        &self,
        operation: &mut Operation<'_>,
        locked: &mut LockedInodes<'_>,
        wish: Wish<'_>,
        source: FoundEntry,
        target: Option<FoundEntry>,
        free: Option<u64>,
    ) -> Result<Replaced> {
        let Wish { old, new, .. } = wish;
        if let Some(target) = target {
            match (source.file_type == FileType::Directory, target.file_type == FileType::Directory)
            {
                (true, false) => return Err(Error::NotDirectory),
                (false, true) => return Err(Error::IsDirectory),
                (true, true) if target.is_subvolume() => return Err(Error::NotEmpty),
                (true, true) if locked.get(target.inode).item.entries > 0 => {
                    return Err(Error::NotEmpty);
                }
                _ => {}
            }
        }
        // A name may move between slots of one hash; when its old slot lies in the range, `free`
        // skipped it.
        let slot = target.map(|target| target.slot).or(free).ok_or(Error::HashCollisions)?;
        // Numbers may have run out: before anything is changed.
        let left = wish
            .left
            .map(|left| {
                Ok::<_, Error>((left, old.directory.sibling(self.store.take_inode_number()?)))
            })
            .transpose()?;
        // The new parent's subvolume may be on its way out: before anything is changed, too.
        if source.is_subvolume() {
            operation.place_subvolume(source.inode, new.directory)?;
        }
        operation.delete(old.directory.key(ItemKind::DirectoryEntry, source.slot))?;
        self.account_removed_entry(locked.get(old.directory), old.name, source.file_type);
        let mut orphan = None;
        if let Some(target) = target {
            self.account_removed_entry(locked.get(new.directory), new.name, target.file_type);
            if self.drop_link(operation, target.inode, locked.get(target.inode))? {
                orphan = Some(target.inode);
            }
        }
        let left = match left {
            Some((left, number)) => {
                Some((number, self.put_left(operation, locked, (old, source.slot), left, number)?))
            }
            None => None,
        };
        operation.put_entry(new.directory, slot, source.target, new.name)?;
        self.account_new_entry(locked.get(new.directory), new.name, source.file_type);
        if source.is_subvolume() {
            self.put_inodes(operation, locked, [old.directory, new.directory])?;
            return Ok(Replaced { orphan, left });
        }
        let state = locked.get(source.inode);
        state.item.changed = now();
        state.item.parent = self.parent_to_note(source.file_type, new.directory);
        self.put_inodes(operation, locked, [old.directory, new.directory, source.inode])?;
        Ok(Replaced { orphan, left })
    }

    /// Creates what is left at the old name, in the slot that it had.
    fn put_left(
        &self,
        operation: &mut Operation<'_>,
        locked: &mut LockedInodes<'_>,
        (old, slot): (Place<'_>, u64),
        left: &NewInode<'_>,
        number: InodeId,
    ) -> Result<InodeItem> {
        let item = self.new_item(locked.get(old.directory), old.directory, left, 1, operation);
        operation.put_new(number.key(ItemKind::Inode, 0), &item.encode())?;
        operation.put_entry(
            old.directory,
            slot,
            EntryTarget::Inode(number.number(), left.file_type),
            old.name,
        )?;
        self.account_new_entry(locked.get(old.directory), old.name, left.file_type);
        Ok(item)
    }

    fn exchange(
        &self,
        operation: &mut Operation<'_>,
        locked: &mut LockedInodes<'_>,
        (old, source): (Place<'_>, FoundEntry),
        (new, target): (Place<'_>, FoundEntry),
    ) -> Result<()> {
        for (place, slot, gone, comes) in
            [(old, source.slot, source, target), (new, target.slot, target, source)]
        {
            operation.put_entry(place.directory, slot, comes.target, place.name)?;
            self.account_removed_entry(locked.get(place.directory), place.name, gone.file_type);
            self.account_new_entry(locked.get(place.directory), place.name, comes.file_type);
            let state = locked.get(comes.inode);
            state.item.changed = now();
            state.item.parent = self.parent_to_note(comes.file_type, place.directory);
        }
        self.put_inodes(
            operation,
            locked,
            [old.directory, new.directory, source.inode, target.inode],
        )
    }

    /// Each of them once: both names may be in one directory.
    fn put_inodes<const N: usize>(
        &self,
        operation: &mut Operation<'_>,
        locked: &mut LockedInodes<'_>,
        numbers: [InodeId; N],
    ) -> Result<()> {
        for (index, number) in numbers.into_iter().enumerate() {
            if !numbers[..index].contains(&number) {
                operation.put_inode(number, &locked.get(number).loggable())?;
            }
        }
        Ok(())
    }
}
