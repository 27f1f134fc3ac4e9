//! Subvolumes that are nested in the origin. They stay where they are, so they may be in the way.
use super::changes::{InodeChange, SideChanges};
use super::merge::{Found, Subject};
use crate::Result;
use crate::names::Names;
use crate::names::differences::gathered::Side;
use crate::types::ConflictKind;
use cairn_format::{
    DirectoryEntry, EntryTarget, InodeNumber, ItemKind, Key, hash_name, name_slot_range,
};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

impl Names {
    /// What the fork has changed and the origin can't take over: an entry where the name of a
    /// subvolume stands, and the removal of a directory in which one does.
    pub(super) fn prevented(
        &self,
        origin: Side<'_>,
        theirs: &SideChanges,
    ) -> Result<BTreeSet<Found>> {
        let mut found = BTreeSet::new();
        for (key, change) in &theirs.entries {
            let (directory, name) = key;
            let slots = name_slot_range(hash_name(&self.store.superblock.hash_seed, name));
            let is_it = |entry: &DirectoryEntry| entry.name == *name;
            if change.after.is_some() && names_subvolume(origin, *directory, slots, &is_it)? {
                found.insert((Subject::Entry(key.clone()), ConflictKind::BothNamed));
            }
        }
        let gone = |change: &InodeChange| change.is_gone() && change.is_directory();
        for (number, _) in theirs.inodes.iter().filter(|(_, change)| gone(change)) {
            if names_subvolume(origin, *number, 0..=u64::MAX, &|_| true)? {
                found.insert((Subject::Inode(*number), ConflictKind::RemovedInFork));
            }
        }
        Ok(found)
    }
}

/// Whether an entry in one of these slots names a subvolume, and `is_it`.
fn names_subvolume(
    side: Side<'_>,
    directory: InodeNumber,
    slots: RangeInclusive<u64>,
    is_it: &dyn Fn(&DirectoryEntry) -> bool,
) -> Result<bool> {
    let key = |slot| Key::new(directory, ItemKind::DirectoryEntry, slot);
    for item in side.tree.range(key(*slots.start())..=key(*slots.end())) {
        let (key, value) = item?;
        let entry = side.of_item(&key, DirectoryEntry::decode(&value))?;
        if matches!(entry.target, EntryTarget::Subvolume(_)) && is_it(&entry) {
            return Ok(true);
        }
    }
    Ok(false)
}
