//! LOOKUP and all requests that make, move or remove names.
use super::attributes::negative_entry;
use super::{Answer, VolumeHandler, answer_bytes, answer_status, fail, snapshot_directories};
use crate::protocol::wire::{CreateOut, OPEN_KEEP_CACHE, OpenOut};
use crate::protocol::{Operation, RequestHeader};
use crate::transport::Reply;
use cairn_engine::{Attributes, Error, FileType, InodeId, NewInode, RenameMode};
use rustix::fs::RenameFlags;
use rustix::io::Errno;

/// Permission bits with set-id and sticky.
const PERMISSION_BITS: u32 = 0o7777;

fn new_inode<'a>(header: &RequestHeader, file_type: FileType, mode: u32) -> NewInode<'a> {
    NewInode {
        file_type,
        mode: mode & PERMISSION_BITS,
        uid: header.uid,
        gid: header.gid,
        device: 0,
        target: None,
    }
}

/// The mode of a rename, and whether it leaves a whiteout at the old name.
fn rename_mode(flags: u32) -> Answer<(RenameMode, bool)> {
    let flags = RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
    let whiteout = flags.contains(RenameFlags::WHITEOUT);
    match flags - RenameFlags::WHITEOUT {
        rest if rest.is_empty() => Ok((RenameMode::Replace, whiteout)),
        RenameFlags::NOREPLACE => Ok((RenameMode::NoReplace, whiteout)),
        RenameFlags::EXCHANGE if !whiteout => Ok((RenameMode::Exchange, false)),
        _ => Err(Errno::INVAL.into()),
    }
}

impl VolumeHandler {
    pub(super) fn handle_names(
        &self,
        header: &RequestHeader,
        operation: &Operation<'_>,
        reply: Reply,
    ) {
        let parent = InodeId(header.node);
        if let Some(errno) = self.refused_at_snapshots(parent, operation) {
            return reply.error(errno);
        }
        match *operation {
            Operation::Lookup { name } => self.lookup(parent, name, reply),
            Operation::ReadLink => {
                answer_bytes(reply, self.volume.read_link(parent).map_err(Into::into))
            }
            Operation::Symlink { name, target } => {
                let link = NewInode {
                    target: Some(target),
                    ..new_inode(header, FileType::Symlink, 0o777)
                };
                self.answer_made(
                    reply,
                    parent,
                    self.volume.create(parent, name, &link).map_err(Into::into),
                );
            }
            Operation::MakeNode { name, mode, device } => {
                self.answer_made(reply, parent, self.make_node(header, name, mode, device));
            }
            Operation::MakeDirectory { name, mode } => {
                let created =
                    self.volume.create(parent, name, &new_inode(header, FileType::Directory, mode));
                self.answer_made(reply, parent, created.map_err(Into::into));
            }
            Operation::Link { node, new_name } => {
                self.answer_made(
                    reply,
                    parent,
                    self.volume.link(InodeId(node), parent, new_name).map_err(Into::into),
                );
            }
            Operation::TemporaryFile { mode } => {
                let created =
                    self.volume.create_unnamed(parent, &new_inode(header, FileType::Regular, mode));
                self.answer_opened(reply, created.map_err(Into::into));
            }
            Operation::Unlink { name } => self.answer_changed(
                reply,
                parent,
                self.volume.unlink(parent, name).map_err(Into::into),
            ),
            Operation::RemoveDirectory { name } => {
                self.answer_changed(
                    reply,
                    parent,
                    self.volume.remove_directory(parent, name).map_err(Into::into),
                );
            }
            Operation::Rename { old_name, new_parent, new_name, flags } => {
                let new_parent = InodeId(new_parent);
                let renamed = rename_mode(flags).and_then(|(mode, whiteout)| match whiteout {
                    false => {
                        Ok(self.volume.rename(parent, old_name, new_parent, new_name, mode)?)
                    }
                    true => {
                        // Device 0/0 without permissions, as in all file systems.
                        let left = new_inode(header, FileType::CharacterDevice, 0);
                        Ok(self
                            .volume
                            .rename_leaving(parent, old_name, new_parent, new_name, mode, &left)?)
                    }
                });
                self.answer_changed(reply, parent, renamed);
            }
            _ => reply.error(Errno::NOSYS),
        }
    }

    /// Why a change of names is refused that concerns what leads to snapshots: the kernel takes
    /// `.snapshots` for a directory like others.
    fn refused_at_snapshots(&self, parent: InodeId, operation: &Operation<'_>) -> Option<Errno> {
        let is_snapshots = |parent, name| self.is_snapshots(parent, name);
        match *operation {
            Operation::Symlink { name, .. }
            | Operation::MakeNode { name, .. }
            | Operation::MakeDirectory { name, .. }
            | Operation::Link { new_name: name, .. } => {
                is_snapshots(parent, name).then_some(Errno::EXIST)
            }
            Operation::RemoveDirectory { name } => {
                is_snapshots(parent, name).then_some(Errno::BUSY)
            }
            Operation::Rename { old_name, new_parent, new_name, .. } => {
                let new_parent = InodeId(new_parent);
                if new_parent.made_up_number().is_some() {
                    return Some(Errno::ROFS);
                }
                (is_snapshots(parent, old_name) || is_snapshots(new_parent, new_name))
                    .then_some(Errno::BUSY)
            }
            _ => None,
        }
    }

    /// `.` and `..` are no entries of a directory: the kernel asks for them when a file handle
    /// names an inode that it does not know. If the inode does not exist, the handle is stale.
    fn lookup(&self, parent: InodeId, name: &[u8], reply: Reply) {
        let reply = match name {
            b".." => match self.look_up_above_snapshot(parent, reply) {
                Some(reply) => reply,
                None => return,
            },
            _ => reply,
        };
        let found = match name {
            b"." => self.volume.lookup_inode(parent),
            b".." => self.volume.parent(parent).and_then(|parent| self.volume.lookup_inode(parent)),
            name => self.volume.lookup(parent, name),
        };
        match found {
            Err(Error::NotFound)
                if parent == InodeId::ROOT && name == snapshot_directories::NAME =>
            {
                self.answer_snapshots(reply);
            }
            Err(Error::NotFound) => drop(reply.structure(&negative_entry())),
            found => self.answer_entry(reply, found.map_err(Into::into)),
        }
    }

    fn make_node(
        &self,
        header: &RequestHeader,
        name: &[u8],
        mode: u32,
        device: u32,
    ) -> Answer<Attributes> {
        let file_type = FileType::from_mode(mode)
            .filter(|&file_type| !matches!(file_type, FileType::Directory | FileType::Symlink));
        let node = NewInode {
            device: u64::from(device),
            ..new_inode(header, file_type.ok_or(Errno::INVAL)?, mode)
        };
        Ok(self.volume.create(InodeId(header.node), name, &node)?)
    }

    /// Answers a change of names in `parent`.
    fn answer_changed(&self, reply: Reply, parent: InodeId, result: Answer<()>) {
        answer_status(reply, result.and_then(|()| self.settle_change(parent)));
    }

    /// Answers the creation of a name in `parent`.
    fn answer_made(&self, reply: Reply, parent: InodeId, result: Answer<Attributes>) {
        let settled = result.and_then(|attributes| match self.settle_change(parent) {
            Ok(()) => Ok(attributes),
            Err(failure) => {
                self.forget(attributes.inode.0, 1);
                Err(failure)
            }
        });
        self.answer_entry(reply, settled);
    }

    fn answer_entry(&self, reply: Reply, result: Answer<Attributes>) {
        match result {
            Ok(attributes) => {
                self.deliver_reference(reply, attributes.inode.0, &self.entry(&attributes))
            }
            Err(failure) => fail(reply, &failure),
        }
    }

    fn answer_opened(&self, reply: Reply, result: Answer<Attributes>) {
        match result {
            Ok(attributes) => {
                let open = OpenOut { handle: 0, open_flags: OPEN_KEEP_CACHE, backing_id: 0 };
                self.deliver_reference(
                    reply,
                    attributes.inode.0,
                    &CreateOut { entry: self.entry(&attributes), open },
                );
            }
            Err(failure) => fail(reply, &failure),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rename_flags_are_distinguished() {
        assert_eq!(rename_mode(0).ok(), Some((RenameMode::Replace, false)));
        assert_eq!(rename_mode(1).ok(), Some((RenameMode::NoReplace, false)));
        assert_eq!(rename_mode(2).ok(), Some((RenameMode::Exchange, false)));
        assert_eq!(rename_mode(4).ok(), Some((RenameMode::Replace, true)));
        assert_eq!(rename_mode(5).ok(), Some((RenameMode::NoReplace, true)));
        for refused in [3, 6, 7, 8, 1 << 20] {
            assert_eq!(rename_mode(refused).unwrap_err().errno(), Errno::INVAL);
        }
    }
}
