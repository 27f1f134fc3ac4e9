//! Attributes of inodes.
use super::Files;
use super::inode::InodeState;
use crate::InodeId;
use crate::store::operation::Effort;
use crate::types::{AttributeChange, Attributes, TimeChange, WriteTimes, now};
use crate::{Error, Result};
use cairn_environment::atomic::Ordering;
use cairn_format::{FileType, Timestamp};

const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;

fn resolve(change: TimeChange) -> Timestamp {
    match change {
        TimeChange::Now => now(),
        TimeChange::At(time) => time,
    }
}

fn apply(state: &mut InodeState, change: &AttributeChange) {
    let keeps = change.times == Some(WriteTimes::Keep) && state.file_type() == FileType::Regular;
    let item = &mut state.item;
    if let Some(mode) = change.mode {
        item.mode = (item.mode & !0o7777) | (mode & 0o7777);
    }
    if change.clear_set_id {
        item.mode &= !SET_USER_ID;
        if item.mode & GROUP_EXECUTE != 0 || change.not_in_group {
            item.mode &= !SET_GROUP_ID;
        }
    }
    item.uid = change.uid.unwrap_or(item.uid);
    item.gid = change.gid.unwrap_or(item.gid);
    if let Some(time) = change.accessed {
        item.accessed = resolve(time);
    }
    if let Some(time) = change.modified {
        item.modified = resolve(time);
    }
    item.changed = match change.changed {
        Some(time) => resolve(time),
        None if keeps => item.changed,
        None => now(),
    };
}

impl Files {
    /// Attributes of an inode.
    pub(crate) fn attributes(&self, number: InodeId) -> Result<Attributes> {
        let inode = self.inodes.get(number);
        let state = self.read_inode_in_use(&inode)?;
        Ok(Attributes::new(number, &state.item, self.delayed_blocks(number, &state)))
    }

    /// Attributes of an inode that has a name; takes a reference on it. For one that is found by
    /// its number alone, as in a file handle.
    pub(crate) fn lookup_inode(&self, number: InodeId) -> Result<Attributes> {
        let inode = self.inodes.get(number);
        let state = self.read_inode(&inode)?;
        if state.item.links == 0 {
            return Err(Error::NotFound);
        }
        // Its last name needs the lock to go, and the thread that removes the inode after that
        // looks for references first.
        self.inodes.retain(number);
        Ok(Attributes::new(number, &state.item, self.delayed_blocks(number, &state)))
    }

    /// Attributes of an inode with a name in `directory`.
    pub(crate) fn attributes_in(&self, directory: InodeId, number: InodeId) -> Result<Attributes> {
        let inode = self.inodes.get(number);
        inode.seen_in.store(directory.0, Ordering::Relaxed);
        let state = self.read_inode_in_use(&inode)?;
        Ok(Attributes::new(number, &state.item, self.delayed_blocks(number, &state)))
    }

    /// Changes attributes; a change of size comes first.
    pub(crate) fn set_attributes(
        &self,
        number: InodeId,
        change: &AttributeChange,
    ) -> Result<Attributes> {
        let inode = self.inodes.get(number);
        if let Some(size) = change.size {
            self.set_size(&inode, size, change.times.unwrap_or(WriteTimes::Now))?;
        }
        let rest = AttributeChange { size: None, ..*change };
        let only_size = change.size.is_some()
            && rest.mode.is_none()
            && rest.uid.is_none()
            && rest.gid.is_none()
            && rest.accessed.is_none()
            && rest.modified.is_none()
            && rest.changed.is_none()
            && !rest.clear_set_id;
        if only_size {
            return self.attributes(number);
        }
        let mut operation = self.begin(inode.number, 1, 0, Effort::Writeback)?;
        let mut state = self.write_inode_in_use(&inode)?;
        apply(&mut state, &rest);
        operation.put_inode(number, &state.loggable())?;
        let sequence = operation.log();
        state.logged(sequence);
        Ok(Attributes::new(number, &state.item, self.delayed_blocks(number, &state)))
    }

    /// Data and attributes changed now.
    pub(crate) fn touch(&self, state: &mut InodeState) {
        let now = now();
        state.item.modified = now;
        state.item.changed = now;
    }
}
