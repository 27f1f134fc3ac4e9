//! Rollback: a subvolume becomes what one of its snapshots holds.
//!
//! 1. A fork of the snapshot is made that has no name, and names of other subvolumes are removed
//!    from it. *A crash leaves a dying fork, which the next mount removes.*
//! 2. In one operation the name leads to the fork, and the subvolume gets another name beside it.
//!    Then a commit ([`rollback`](crate::store::rollback)). *A crash before its superblock: as
//!    after 1. After it: all is done.*
//!
//! Whoever uses the subvolume goes on with it: only names change. If the name leads elsewhere when
//! step 2 has locked the directory, the fork is removed, and all begins again.
//!
//! An attribute of the root directory may belong to the place instead of what is in it. It goes
//! over in the same operation: the fork has it before, and the subvolume loses it there.
//!
//! Lock discipline: the directory and the subvolume's root directory, as a removal.
use crate::names::Names;
use crate::names::directory::LINKS_MAX;
use crate::names::entries::{FoundEntry, check_name};
use crate::store::forks::Forming;
use crate::store::operation::Effort;
use crate::types::{Attributes, XattrMode, now};
use crate::{Error, InodeId, Result};
use cairn_environment::atomic::Ordering;
use cairn_format::{DirectoryEntry, EntryTarget, FileType, ItemKind};

/// Items of its parent's tree that a rollback changes: two entries and the directory; and of the
/// subvolume: an attribute and the root directory.
const ROLLBACK_ITEMS: u64 = 3;

/// Of an old value of an attribute, and the ids of the old and the new subvolume: the new value, if
/// it goes over.
pub type CarriedValue<'a> = &'a dyn Fn(&[u8], u64, u64) -> Option<Vec<u8>>;

/// An attribute that stays with the name.
struct Carried {
    slot: u64,
    /// What the old subvolume has.
    value: Vec<u8>,
    /// What the fork is to have.
    new: Vec<u8>,
}

/// What [`Volume::rollback_with`](crate::Volume::rollback_with) looks at besides.
#[derive(Clone, Copy)]
pub struct RollbackOptions<'a> {
    /// Whether the root directory of what is rolled back permits it.
    pub permits: &'a dyn Fn(&Attributes) -> Result<()>,
    /// The name of an attribute of the root directory that may stay with the name, and the value
    /// that it has then.
    pub carried: Option<(&'a [u8], CarriedValue<'a>)>,
}

impl std::fmt::Debug for RollbackOptions<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("RollbackOptions")
    }
}

/// A subvolume that was rolled back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rollback {
    /// The root directory that has the name now.
    pub root: InodeId,
    /// The root directory that had it before.
    pub old: InodeId,
    /// The name beside it by which that is found.
    pub old_name: Vec<u8>,
    /// Other subvolumes are nested in that, and stay there.
    pub has_nested: bool,
}

const OLD_NAME: &str = "~before-rollback-";

/// Whether a rollback gives such names to what it puts aside.
///
/// ```
/// assert!(cairn_engine::is_name_before_rollback(b"home~before-rollback-12"));
/// assert!(!cairn_engine::is_name_before_rollback(b"home~before-rollback-x"));
/// ```
pub fn is_name_before_rollback(name: &[u8]) -> bool {
    let digits = name.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    digits > 0 && name[..name.len() - digits].ends_with(OLD_NAME.as_bytes())
}

/// The name of what `name` led to before, of this number.
fn old_name(name: &[u8], number: u64) -> Vec<u8> {
    let suffix = format!("{OLD_NAME}{number}");
    let end = name.len().min(DirectoryEntry::NAME_BYTES_MAX - suffix.len());
    // A character has up to four bytes; what is none may be cut anywhere.
    let is_end = |end: &usize| name.get(*end).is_none_or(|byte| byte & 0xC0 != 0x80);
    let end = (end.saturating_sub(3)..=end).rev().find(is_end).unwrap_or(end);
    [&name[..end], suffix.as_bytes()].concat()
}

impl Names {
    /// Has the subvolume `name` become what its snapshot with the root directory `snapshot` holds.
    pub(crate) fn rollback(
        &self,
        parent: InodeId,
        name: &[u8],
        snapshot: InodeId,
        options: RollbackOptions<'_>,
    ) -> Result<Rollback> {
        check_name(name)?;
        if !snapshot.is_subvolume_root() {
            return Err(Error::InvalidArgument("not the root directory of a snapshot"));
        }
        loop {
            let seen = self.peek_entry(parent, name)?.ok_or(Error::NotFound)?;
            if !seen.is_subvolume() {
                return Err(Error::InvalidArgument("not a subvolume"));
            }
            match self.enter_for_rollback(parent, seen.inode, snapshot, options) {
                Err(Error::Stale) if self.has_changed(parent, name, seen)? => continue,
                entered => entered?,
            }
            let forming = self.fork_without_name(snapshot, parent)?;
            let done = self.replace_by(&forming, (parent, name), seen, options);
            if let Ok(Some(done)) = done {
                self.store.commit()?;
                return Ok(done);
            }
            self.end_fork(&forming)?;
            done?;
        }
    }

    /// The fork is not needed.
    fn end_fork(&self, forming: &Forming) -> Result<()> {
        self.store.end_unnamed_fork(forming)?;
        self.store.commit()?;
        self.files.queue_subvolume(forming.root);
        Ok(())
    }

    fn has_changed(&self, parent: InodeId, name: &[u8], seen: FoundEntry) -> Result<bool> {
        let found = self.peek_entry(parent, name)?;
        Ok(found.is_none_or(|found| found.target != seen.target))
    }

    fn enter_for_rollback(
        &self,
        parent: InodeId,
        old: InodeId,
        snapshot: InodeId,
        options: RollbackOptions<'_>,
    ) -> Result<()> {
        for inode in [parent, old, snapshot] {
            self.files.enter(inode)?;
        }
        if !self.store.shows(old, snapshot)? {
            return Err(Error::InvalidArgument("not a snapshot of the subvolume"));
        }
        (options.permits)(&self.files.attributes(old)?)
    }

    /// Step 1.
    fn fork_without_name(&self, snapshot: InodeId, parent: InodeId) -> Result<Forming> {
        let forming = {
            let (mut operation, reservation) =
                self.store.begin_fork(snapshot, parent, 0, Effort::Name)?;
            let forming = operation.want_fork(snapshot, parent, false, false, reservation)?.1;
            operation.log();
            forming
        };
        let formed = self.store.wait_for_fork(&forming)?;
        if let Err(error) = self.files.enter(forming.root) {
            self.end_fork(&forming)?;
            return Err(error);
        }
        if self.store.trees.subvolume(forming.root)?.names_others()
            && self.files.remove_foreign_names(forming.root, formed.directories.as_deref()).is_err()
        {
            // They stay hidden for now.
            self.files.queue_foreign_names(forming.root);
        }
        Ok(forming)
    }

    /// Step 2, if the name still leads to what was seen.
    fn replace_by(
        &self,
        forming: &Forming,
        (parent, name): (InodeId, &[u8]),
        seen: FoundEntry,
        options: RollbackOptions<'_>,
    ) -> Result<Option<Rollback>> {
        let old = seen.inode;
        let mut is_given = false;
        loop {
            let carried = self.carry(forming, old, options)?;
            match (&carried, options.carried) {
                (Some(_), _) => is_given = true,
                (None, Some((attribute, _))) if is_given => {
                    self.files.remove_xattr(forming.root, attribute)?;
                    is_given = false;
                }
                (None, _) => {}
            }
            let mut operation =
                self.store.begin_for_move(parent, old, ROLLBACK_ITEMS, Effort::Name)?;
            let (directory, root) = (self.files.inodes.get(parent), self.files.inodes.get(old));
            let mut locked = match self.files.lock_inodes(&[&directory, &root]) {
                // Another thread has just removed it, or its parent.
                Err(Error::Stale) => return Ok(None),
                locked => locked?,
            };
            locked.get(parent).expect_directory()?;
            let found = self.expect_entry(parent, name)?;
            if found.target != seen.target {
                return Ok(None);
            }
            (options.permits)(&Attributes::new(old, &locked.get(old).item, 0))?;
            let now_carried = self.carried_by(forming, old, options)?;
            if now_carried.as_ref().map(|carried| &carried.value) != carried.as_ref() {
                // It was set meanwhile.
                continue;
            }
            let slot = now_carried.map(|carried| carried.slot);
            if locked.get(parent).item.links >= LINKS_MAX {
                return Err(Error::TooManyLinks);
            }
            let (old_name, old_slot) = self.free_old_name(parent, name)?;
            let has_nested = self.store.has_nested(old)?;
            operation.take_place(forming, old)?;
            let fork = EntryTarget::Subvolume(self.store.trees.subvolume(forming.root)?.id);
            operation.put_entry(parent, found.slot, fork, name)?;
            operation.put_entry(parent, old_slot, seen.target, &old_name)?;
            self.account_new_entry(locked.get(parent), &old_name, FileType::Directory);
            operation.put_inode(parent, &locked.get(parent).loggable())?;
            if let Some(slot) = slot {
                operation.delete_of(old, old.key(ItemKind::Xattr, slot))?;
                locked.get(old).item.changed = now();
                operation.put_inode(old, &locked.get(old).loggable())?;
            }
            let sequence = operation.log();
            locked.get(parent).logged(sequence);
            if slot.is_some() {
                locked.get(old).logged(sequence);
            }
            self.files.inodes.get(forming.root).seen_in.store(parent.0, Ordering::Relaxed);
            return Ok(Some(Rollback { root: forming.root, old, old_name, has_nested }));
        }
    }

    /// Gives the fork the attribute that stays with the name. Returns the value that `old` has if
    /// it is to lose it.
    fn carry(
        &self,
        forming: &Forming,
        old: InodeId,
        options: RollbackOptions<'_>,
    ) -> Result<Option<Vec<u8>>> {
        let found = {
            let inode = self.files.inodes.get(old);
            let _state = self.files.read_inode(&inode)?;
            self.carried_by(forming, old, options)?
        };
        let (Some(Carried { value, new, .. }), Some((attribute, _))) = (found, options.carried)
        else {
            return Ok(None);
        };
        self.files.set_xattr(forming.root, attribute, &new, XattrMode::Any)?;
        Ok(Some(value))
    }

    /// The attribute of `old`, which is locked, that stays with the name.
    fn carried_by(
        &self,
        forming: &Forming,
        old: InodeId,
        options: RollbackOptions<'_>,
    ) -> Result<Option<Carried>> {
        let Some((attribute, carried)) = options.carried else { return Ok(None) };
        let Some((slot, value)) = self.files.inline_xattr(old, attribute)? else {
            return Ok(None);
        };
        let id = |root| Ok::<_, Error>(self.store.trees.subvolume(root)?.id.0);
        let new = carried(&value, id(old)?, id(forming.root)?);
        Ok(new.map(|new| Carried { slot, value, new }))
    }

    /// A name for what `name` leads to, that nothing else has, and a slot for it.
    fn free_old_name(&self, parent: InodeId, name: &[u8]) -> Result<(Vec<u8>, u64)> {
        let mut number = 1;
        loop {
            let old_name = old_name(name, number);
            match self.find_entry(parent, &old_name) {
                Ok((None, Some(slot))) => return Ok((old_name, slot)),
                // Of a fork that is not to be seen yet.
                Ok(_) | Err(Error::Exists) => number += 1,
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_names_are_short_enough_and_whole() {
        assert_eq!(old_name(b"home", 12), b"home~before-rollback-12");
        let long = old_name(&[b'x'; 255], 1);
        assert_eq!(long.len(), 255);
        assert!(long.ends_with(b"x~before-rollback-1"));
        // Characters of three bytes, which don't end where there is no more room.
        let long = String::from_utf8(old_name("\u{20AC}".repeat(85).as_bytes(), 10)).unwrap();
        assert_eq!(long.len(), 78 * 3 + "~before-rollback-10".len());
        assert_eq!(old_name(&[0x80; 255], 1).len(), 255);
    }
}
