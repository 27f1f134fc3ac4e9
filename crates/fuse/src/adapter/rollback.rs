//! A rollback on request: the name of a subvolume leads to another one, and the old one gets a new
//! name.
//!
//! The kernel keeps names for ever, so it is told before the answer. Until then it takes the name
//! for the old subvolume, and a rename that it asks for moves that in its cache, but the new one on
//! the volume. It keeps the directory locked from the request until its cache has changed, and
//! being told takes the same lock. So afterwards the new subvolume's name is looked at again, and
//! the kernel is told of where it stands by then.
use super::Answer;
use super::keeper_requests::KeeperRequests;
use super::snapshot_directories::SnapshotDirectories;
use super::snapshots::{self, SCHEDULE_ATTRIBUTE, or_no_snapshot};
use super::subvolumes::{Asker, tell_kernel};
use crate::directory_requests::{self, RolledBack};
use crate::transport::Reply;
use cairn_engine::{Attributes, Error, InodeId, RollbackOptions, Volume};
use rustix::io::Errno;

/// Times that the new subvolume's name is looked at while others rename it.
const LOOKS: usize = 64;

/// What a rollback needs of a mount.
pub(super) struct Mount<'m> {
    pub(super) volume: &'m Volume,
    pub(super) shown: &'m SnapshotDirectories,
    pub(super) keeper: &'m KeeperRequests,
}

/// Serves the request that the subvolume `name` in `directory` become what its snapshot holds.
pub(super) fn serve(
    mount: &Mount<'_>,
    directory: InodeId,
    asker: &Asker,
    (name, snapshot): (&[u8], &[u8]),
    reply: &Reply,
) -> Answer<directory_requests::Answer> {
    let Mount { volume, shown, keeper } = *mount;
    if !asker.may_change(&volume.attributes(directory)?) {
        return Err(Errno::ACCESS.into());
    }
    let old = volume.lookup(directory, name)?;
    volume.forget(old.inode, 1);
    let (id, true) = volume.subvolume_of(old.inode)? else { return Err(Errno::INVAL.into()) };
    let permits = |root: &Attributes| match asker.may_act_as_owner(root) {
        true => Ok(()),
        false => Err(Error::NotPermitted("only its owner rolls a subvolume back")),
    };
    permits(&old)?;
    let snapshot = volume.snapshot_named(id, snapshot).map_err(or_no_snapshot)?;
    let root = volume.lookup_inode(snapshot.root).map_err(|error| match error {
        Error::Stale => Errno::NODATA.into(),
        error => or_no_snapshot(error),
    })?;
    volume.forget(snapshot.root, 1);
    if snapshot.is_temporary() {
        return Err(Errno::NODATA.into());
    }
    permits(&root)?;
    let carried = (SCHEDULE_ATTRIBUTE, &schedule_of_new as _);
    let options = RollbackOptions { permits: &permits, carried: Some(carried) };
    let done = match volume.rollback_with(directory, name, snapshot.root, options) {
        // The snapshot was deleted meanwhile.
        Err(Error::Stale) => return Err(Errno::NODATA.into()),
        done => done?,
    };
    for name in [name, &done.old_name] {
        tell_kernel(reply, directory, name);
    }
    reply.invalidate_attributes(done.old.0);
    tell_of_renames(volume, done.root, (directory, name), reply);
    let notifier = reply.notifier();
    snapshots::tell_kernel(volume, shown, notifier.as_ref(), directory, &[name, &done.old_name]);
    for root in [done.old, done.root] {
        if let Ok((id, true)) = volume.subvolume_of(root) {
            keeper.note(id, root);
        }
    }
    let rolled_back = RolledBack { old_name: done.old_name, has_nested: done.has_nested };
    Ok(directory_requests::Answer {
        rolled_back: Some(rolled_back),
        ..directory_requests::Answer::default()
    })
}

/// The schedule of the old subvolume goes over to the new one.
fn schedule_of_new(value: &[u8], old: u64, new: u64) -> Option<Vec<u8>> {
    let schedule = value.strip_prefix(old.to_string().as_bytes())?.strip_prefix(b" ")?;
    Some([new.to_string().as_bytes(), b" ", schedule].concat())
}

/// Tells the kernel of names that `root` has got since it was given `at`.
fn tell_of_renames(volume: &Volume, root: InodeId, at: (InodeId, &[u8]), reply: &Reply) {
    let mut told = (at.0, at.1.to_vec());
    for _ in 0..LOOKS {
        let found = volume.lookup(told.0, &told.1).map(|found| {
            volume.forget(found.inode, 1);
            found.inode
        });
        if found.is_ok_and(|found| found == root) {
            return;
        }
        let Some(now) = name_of(volume, root) else { return };
        tell_kernel(reply, now.0, &now.1);
        told = now;
    }
}

/// Where the name of a subvolume stands.
fn name_of(volume: &Volume, root: InodeId) -> Option<(InodeId, Vec<u8>)> {
    let directory = volume.parent(root).ok()?;
    let mut name = None;
    let mut take = |item: cairn_engine::DirectoryItem<'_>| {
        name = (item.inode == root).then(|| item.name.to_vec());
        name.is_none()
    };
    volume.read_directory(directory, 0, &mut take).ok()?;
    Some((directory, name?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_that_is_in_force_goes_over() {
        let schedule = schedule_of_new(b"300 every 1h keep 1x1h", 300, 301);
        assert_eq!(schedule.as_deref(), Some(&b"301 every 1h keep 1x1h"[..]));
        assert_eq!(schedule_of_new(b"300 every 1h keep 1x1h", 30, 301), None);
        assert_eq!(schedule_of_new(b"256 every 1h keep 1x1h", 300, 301), None);
    }
}
