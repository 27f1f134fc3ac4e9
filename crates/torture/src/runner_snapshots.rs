//! Operations on snapshots, performed on a volume.
use crate::model::{Failure, Layout, Outcome, Value};
use crate::operation::{Operation, Subvolume};
use crate::runner::{Held, Runner, failure, new_inode, nothing};
use crate::volume_snapshots::FoundSnapshot;
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, InodeId, RenameMode, SnapshotInfo, TimeChange,
    Timestamp, Volume, XattrMode,
};

impl Runner {
    /// The root directory of a subvolume, and its id.
    pub(crate) fn subvolume(&self, of: &Subvolume) -> Result<(Held<'_>, u64), Failure> {
        let held = match of {
            Subvolume::Root => self.hold(self.volume().root()),
            Subvolume::At(path) => self.resolve(path)?,
        };
        match self.volume().subvolume_of(held.inode) {
            Ok((id, true)) => Ok((held, id)),
            Ok(_) => Err(Failure::InvalidArgument),
            Err(error) => Err(failure(&error)),
        }
    }

    pub(crate) fn perform_on_snapshots(&self, operation: &Operation) -> Outcome {
        let (volume, client) = (self.volume(), self.client());
        match operation {
            Operation::CreateSnapshot { of, name } => {
                // Whether it is the root directory of a subvolume, the volume has to notice.
                let held = match of {
                    Subvolume::Root => self.hold(volume.root()),
                    Subvolume::At(path) => self.resolve(path)?,
                };
                let made = volume.create_snapshot(held.inode, &name.bytes(client));
                let info = made.map_err(|error| failure(&error))?;
                let named = volume.snapshot_named(info.subvolume, &info.name);
                match named {
                    Ok(named) if named == info => Ok(Value::Nothing),
                    other => Err(Failure::Other(format!("made {info:?}, but there is {other:?}"))),
                }
            }
            Operation::DeleteSnapshot { of, name } => {
                let (_held, id) = self.subvolume(of)?;
                let before = volume.snapshot_named(id, &name.bytes(client));
                nothing(volume.delete_snapshot(id, &name.bytes(client)))?;
                let root = before.map_err(|error| failure(&error))?.root;
                // Another client's new snapshot may have the number by now.
                match volume.attributes(root) {
                    Err(Error::Stale) => Ok(Value::Nothing),
                    _ if self.layout() != Layout::Alone => Ok(Value::Nothing),
                    other => Err(Failure::Other(format!("a deleted snapshot has {other:?}"))),
                }
            }
            Operation::HoldSnapshot { of, name, held } => {
                let (_held, id) = self.subvolume(of)?;
                nothing(volume.hold_snapshot(id, &name.bytes(client), *held))
            }
            Operation::ReadSnapshot { of, name } => {
                let (_held, id) = self.subvolume(of)?;
                let read = volume
                    .snapshot_named(id, &name.bytes(client))
                    .and_then(|info| FoundSnapshot::read(volume, info));
                let read = read.map_err(|error| failure(&error))?;
                self.expect_unchanged(&read)?;
                let is_known = *of != Subvolume::Root || self.layout() == Layout::Alone;
                Ok(if is_known { Value::Count(read.content()) } else { Value::Nothing })
            }
            Operation::ChangeInSnapshot { of, name, change } => {
                let (_held, id) = self.subvolume(of)?;
                let changed = volume
                    .snapshot_named(id, &name.bytes(client))
                    .and_then(|info| change_in(volume, &info, *change));
                nothing(changed)
            }
            other => unreachable!("{other:?} is performed elsewhere"),
        }
    }

    /// What is in a snapshot is as it was when it was read before.
    fn expect_unchanged(&self, read: &FoundSnapshot) -> Result<(), Failure> {
        let digest = read.digest;
        let before = *self.lives.lock().entry(read.info.uuid).or_insert(digest);
        if before == digest {
            return Ok(());
        }
        Err(Failure::Other(format!("a snapshot has changed: {:?}", read.info)))
    }
}

/// The first entry of a directory that is a file, or none.
fn first_file(volume: &Volume, directory: InodeId) -> Result<Option<(Vec<u8>, InodeId)>, Error> {
    let mut found = None;
    volume.read_directory(directory, 0, &mut |item| {
        if item.file_type == FileType::Regular {
            found = Some((item.name.to_vec(), item.inode));
        }
        found.is_none()
    })?;
    Ok(found)
}

/// Tries to change a snapshot.
fn change_in(volume: &Volume, info: &SnapshotInfo, change: u8) -> Result<(), Error> {
    let root = info.root;
    let file = first_file(volume, root)?;
    let new = |file_type| new_inode(file_type, 0o644, 0, 0, None);
    let attributes = |inode, change: AttributeChange| volume.set_attributes(inode, &change);
    let Some((name, inode)) = file else {
        return volume.create(root, b"0new", &new(FileType::Regular)).map(drop);
    };
    match change {
        0 => volume.create(root, b"0new", &new(FileType::Directory)).map(drop),
        1 => volume.unlink(root, &name),
        2 => volume.rename(root, &name, root, b"0new", RenameMode::Replace),
        3 => volume.write(inode, 0, b"changed"),
        4 => volume.allocate(inode, 0, 4096, AllocateMode::PunchHole),
        5 => volume.link(inode, root, b"0new").map(drop),
        6 => volume.set_xattr(inode, b"user.new", b"changed", XattrMode::Any),
        7 => attributes(inode, AttributeChange { size: Some(1), ..AttributeChange::default() })
            .map(drop),
        8 => {
            let at = Timestamp { seconds: 1, nanoseconds: 7 };
            let modified = Some(TimeChange::At(at));
            attributes(root, AttributeChange { modified, ..AttributeChange::default() }).map(drop)
        }
        _ => volume.create_unnamed(root, &new(FileType::Regular)).map(drop),
    }
}
