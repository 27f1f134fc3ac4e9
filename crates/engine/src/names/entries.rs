//! Names in directories: where a name's entry stands, and listing.
//!
//! An entry's key offset is its slot: the name's hash picks a range of 256 slots, the first free
//! one is taken. Slots serve as cookies of a listing: they never move while the entry exists.
use crate::InodeId;
use crate::file::inode::InodeState;
use crate::names::Names;
use crate::types::{Attributes, DirectoryItem};
use crate::{Error, Result};
use cairn_format::{
    BlockNumber, DirectoryEntry, EntryTarget, FileType, FormatError, ItemKind, Key, Structure,
    hash_name, name_slot_range,
};
use std::ops::{Range, RangeInclusive};

/// An entry and where it stands.
#[derive(Clone, Copy)]
pub(crate) struct FoundEntry {
    pub(crate) slot: u64,
    pub(crate) inode: InodeId,
    pub(crate) file_type: FileType,
    pub(crate) target: EntryTarget,
}

impl FoundEntry {
    /// Whether it names a subvolume.
    pub(crate) fn is_subvolume(&self) -> bool {
        matches!(self.target, EntryTarget::Subvolume(_))
    }
}

/// What the entry in a slot, whose item has this value, names, if its name is `name`.
fn if_named(
    name: &[u8],
    slot: u64,
    value: &[u8],
) -> std::result::Result<Option<(u64, EntryTarget)>, FormatError> {
    if DirectoryEntry::name_of(value)? != name {
        return Ok(None);
    }
    Ok(Some((slot, DirectoryEntry::target_of(value)?)))
}

/// Entries of a directory that are listed at a time.
const LISTED_ENTRIES: usize = 64;

struct ListedEntry {
    /// In the part's names.
    name: Range<usize>,
    target: EntryTarget,
    inode: InodeId,
    cookie: u64,
}

/// A part of a listing.
#[derive(Default)]
struct ListingPart {
    names: Vec<u8>,
    entries: Vec<ListedEntry>,
}

impl ListingPart {
    fn push(&mut self, name: &[u8], target: EntryTarget, cookie: u64) {
        let start = self.names.len();
        self.names.extend_from_slice(name);
        let (name, inode) = (start..self.names.len(), InodeId::default());
        self.entries.push(ListedEntry { name, target, inode, cookie });
    }

    fn items(&self) -> impl Iterator<Item = DirectoryItem<'_>> {
        self.entries.iter().map(|entry| {
            let ListedEntry { ref name, inode, target, cookie } = *entry;
            let name = &self.names[name.clone()];
            DirectoryItem { name, inode, file_type: target.file_type(), cookie }
        })
    }
}

/// Name, target and cookie of the entry with this key and item value.
fn listed<'v>(
    key: &Key,
    value: &'v [u8],
) -> std::result::Result<(&'v [u8], EntryTarget, u64), FormatError> {
    let target = DirectoryEntry::target_of(value)?;
    // No hash has a slot so high.
    let cookie = key.offset.checked_add(3).ok_or_else(|| {
        FormatError::new(Structure::Item, BlockNumber(0), "a name in an impossible slot")
    })?;
    Ok((DirectoryEntry::name_of(value)?, target, cookie))
}

/// Keys of the entries after `cookie`. Cookies are slot + 3: 0 to 2 belong to the start, `.` and
/// `..`.
fn listing_keys(directory: InodeId, cookie: u64) -> RangeInclusive<Key> {
    let key = |slot| directory.key(ItemKind::DirectoryEntry, slot);
    key(cookie.saturating_sub(2))..=key(u64::MAX)
}

/// Fails for a name that no entry can have.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    if name.is_empty() || name.len() > DirectoryEntry::NAME_BYTES_MAX {
        return Err(Error::NameLength(name.len()));
    }
    if name.contains(&b'/') || name.contains(&0) || name == b"." || name == b".." {
        return Err(Error::InvalidArgument("name"));
    }
    Ok(())
}

impl Names {
    /// Looks a name up; the second value is the first free slot for it. The directory's state lock
    /// is held.
    ///
    /// # Errors
    /// [`Error::Exists`] only if it names a fork that is not to be seen yet.
    pub(crate) fn find_entry(
        &self,
        directory: InodeId,
        name: &[u8],
    ) -> Result<(Option<FoundEntry>, Option<u64>)> {
        let slots = name_slot_range(hash_name(&self.store.superblock.hash_seed, name));
        let keys = directory.key(ItemKind::DirectoryEntry, *slots.start())
            ..=directory.key(ItemKind::DirectoryEntry, *slots.end());
        let mut free = Some(*slots.start());
        let mut found = Ok(None);
        self.store.trees.of(directory).scan(keys, |key, value| {
            found = if_named(name, key.offset, value).map_err(|error| (key, error));
            if free == Some(key.offset) && matches!(found, Ok(None)) {
                free = (key.offset < *slots.end()).then_some(key.offset + 1);
            }
            matches!(found, Ok(None))
        })?;
        match found {
            Ok(None) => Ok((None, free)),
            Ok(Some((_, EntryTarget::Subvolume(id)))) if self.store.trees.is_forming(id) => {
                Err(Error::Exists)
            }
            Ok(Some((slot, target))) => {
                let Some(inode) = self.named_by(directory, target)? else {
                    return Ok((None, None));
                };
                let found = FoundEntry { slot, inode, file_type: target.file_type(), target };
                Ok((Some(found), free))
            }
            Err((key, error)) => self.store.of_item(directory, &key, Err(error)),
        }
    }

    /// What an entry of `directory` names. Names of subvolumes are not seen in a snapshot: these
    /// are not in it, and may be gone. Nor is a fork seen before it is durable.
    fn named_by(&self, directory: InodeId, target: EntryTarget) -> Result<Option<InodeId>> {
        match target {
            EntryTarget::Inode(number, _) => Ok(Some(directory.sibling(number))),
            EntryTarget::Subvolume(_) if self.hides_subvolumes(directory)? => Ok(None),
            EntryTarget::Subvolume(id) if self.store.trees.is_forming(id) => Ok(None),
            EntryTarget::Subvolume(id) => Ok(Some(InodeId::root_of(self.store.trees.slot_of(id)?))),
        }
    }

    fn hides_subvolumes(&self, directory: InodeId) -> Result<bool> {
        Ok(self.store.trees.subvolume(directory)?.hides_subvolumes())
    }

    /// As [`Names::find_entry`], of what may be seen.
    fn seen_entry(&self, directory: InodeId, name: &[u8]) -> Result<Option<FoundEntry>> {
        match self.find_entry(directory, name) {
            Err(Error::Exists) => Ok(None),
            found => Ok(found?.0),
        }
    }

    /// The entry with this name, or `NotFound`.
    pub(crate) fn expect_entry(&self, directory: InodeId, name: &[u8]) -> Result<FoundEntry> {
        self.seen_entry(directory, name)?.ok_or(Error::NotFound)
    }

    /// A glance at an entry without keeping the directory locked: it may have changed when the
    /// caller locks it.
    pub(crate) fn peek_entry(&self, directory: InodeId, name: &[u8]) -> Result<Option<FoundEntry>> {
        check_name(name)?;
        let inode = self.files.inodes.get(directory);
        let state = self.files.read_inode(&inode)?;
        state.expect_directory()?;
        self.seen_entry(directory, name)
    }

    /// Finds `name` in `directory` and takes a reference on what it names.
    pub(crate) fn lookup(&self, directory: InodeId, name: &[u8]) -> Result<Attributes> {
        if name.len() > DirectoryEntry::NAME_BYTES_MAX {
            return Err(Error::NameLength(name.len()));
        }
        let found = {
            let inode = self.files.inodes.get(directory);
            let state = self.files.read_inode(&inode)?;
            state.expect_directory()?;
            let found = self.expect_entry(directory, name)?;
            self.files.inodes.retain(found.inode);
            found
        };
        self.files.attributes_in(directory, found.inode).inspect_err(|_| {
            self.files.forget(found.inode, 1);
        })
    }

    /// Calls `take` for the entries after `cookie` until it returns false. The directory stays
    /// locked for a part of the listing at a time, so entries may come and go meanwhile; those that
    /// stay are seen exactly once.
    pub(crate) fn read_directory(
        &self,
        directory: InodeId,
        cookie: u64,
        take: &mut dyn FnMut(DirectoryItem<'_>) -> bool,
    ) -> Result<()> {
        let inode = self.files.inodes.get(directory);
        let state = self.files.read_inode(&inode)?;
        if state.file_type() != FileType::Directory {
            return Err(Error::NotDirectory);
        }
        for item in self.store.trees.of(directory).range(listing_keys(directory, cookie)) {
            let (key, value) = item?;
            let item = self.listed_item(directory, &key, &value)?;
            if item.is_some_and(|item| !take(item)) {
                break;
            }
        }
        Ok(())
    }

    /// What a listing says of the entry with this key and item value. No leaf is locked.
    fn listed_item<'v>(
        &self,
        directory: InodeId,
        key: &Key,
        value: &'v [u8],
    ) -> Result<Option<DirectoryItem<'v>>> {
        let (name, target, cookie) = self.store.of_item(directory, key, listed(key, value))?;
        let file_type = target.file_type();
        let inode = self.named_by(directory, target)?;
        Ok(inode.map(|inode| DirectoryItem { name, inode, file_type, cookie }))
    }

    /// Fills `part` with the entries after `cookie`, and takes a reference for each.
    fn list_part(&self, directory: InodeId, cookie: u64, part: &mut ListingPart) -> Result<()> {
        part.names.clear();
        part.entries.clear();
        let inode = self.files.inodes.get(directory);
        let state = self.files.read_inode(&inode)?;
        if state.file_type() != FileType::Directory {
            return Err(Error::NotDirectory);
        }
        let (mut damage, hides) = (None, self.hides_subvolumes(directory)?);
        let is_hidden = |target: EntryTarget| match target {
            EntryTarget::Subvolume(id) => hides || self.store.trees.is_forming(id),
            EntryTarget::Inode(..) => false,
        };
        let scanned =
            self.store.trees.of(directory).scan(listing_keys(directory, cookie), |key, value| {
                match listed(&key, value) {
                    Ok((_, target, _)) if is_hidden(target) => {}
                    Ok((name, target, cookie)) => part.push(name, target, cookie),
                    Err(error) => damage = Some((key, error)),
                }
                damage.is_none() && part.entries.len() < LISTED_ENTRIES
            });
        for at in 0..part.entries.len() {
            match self.named_by(directory, part.entries[at].target) {
                Ok(Some(inode)) => part.entries[at].inode = inode,
                Ok(None) => {}
                Err(error) if at == 0 => {
                    part.entries.clear();
                    return Err(error);
                }
                // What comes before it is a listing; the next one begins here.
                Err(_) => {
                    part.entries.truncate(at);
                    break;
                }
            }
        }
        // The directory's lock is held, so all of them still exist.
        part.entries.iter().for_each(|entry| self.files.inodes.retain(entry.inode));
        let damage = damage.map(|(key, error)| self.store.damaged(directory, &key, error));
        match damage.or(scanned.err().map(Error::from)) {
            // What comes before it is a listing.
            Some(error) if part.entries.is_empty() => Err(error),
            _ => Ok(()),
        }
    }

    /// As [`Names::read_directory`], with attributes; each entry that `take` accepts gets a
    /// reference.
    pub(crate) fn read_directory_plus(
        &self,
        directory: InodeId,
        cookie: u64,
        take: &mut dyn FnMut(DirectoryItem<'_>, &Attributes) -> bool,
    ) -> Result<()> {
        let (mut cookie, mut part) = (cookie, ListingPart::default());
        loop {
            // A part of the entries under the directory's lock, each with a reference; their
            // attributes afterwards, since an inode is never locked inside a directory out of
            // order.
            self.list_part(directory, cookie, &mut part)?;
            let Some(last) = part.entries.last().map(|entry| entry.cookie) else { return Ok(()) };
            let (mut taking, mut taken_before) = (true, false);
            let mut failure = None;
            for item in part.items() {
                let inode = item.inode;
                let attributes = self.files.attributes_in(directory, inode);
                if matches!(attributes, Err(Error::Stale)) && inode.is_subvolume_root() {
                    // Its name was read, and then it was removed.
                    self.files.forget(inode, 1);
                    continue;
                }
                let taken = taking
                    && match attributes {
                        Ok(attributes) => take(item, &attributes),
                        Err(error) => {
                            // What was taken before is a listing; the next one begins here and
                            // reports it.
                            failure = failure.or((!taken_before).then_some(error));
                            false
                        }
                    };
                taking &= taken;
                taken_before |= taken;
                if !taken {
                    self.files.forget(inode, 1);
                }
            }
            match failure {
                Some(error) => return Err(error),
                None if !taking => return Ok(()),
                None => cookie = last,
            }
        }
    }

    /// Adds an entry for `inode`; accounts for it in `directory`'s attributes. Both are locked.
    pub(crate) fn account_new_entry(
        &self,
        directory: &mut InodeState,
        name: &[u8],
        file_type: FileType,
    ) {
        directory.add_entry(name, file_type);
        self.files.touch(directory);
    }

    /// Accounts for an entry that is gone.
    pub(crate) fn account_removed_entry(
        &self,
        directory: &mut InodeState,
        name: &[u8],
        file_type: FileType,
    ) {
        directory.remove_entry(name, file_type);
        self.files.touch(directory);
    }
}
