//! A rollback on request: the name of a subvolume leads to another one, and the old one gets a new
//! name.
//!
//! The kernel keeps names for ever, so it is told before the answer. Until then it takes the name
//! for the old subvolume, and a rename that it asks for moves that in its cache, but the new one on
//! the volume. It keeps the directory locked from the request until its cache has changed, and
//! being told takes the same lock. So afterwards the new subvolume's name is looked at again, and
//! the kernel is told of where it stands by then.
use super::Answer;
use super::keeper_requests::{KeeperRequests, NewSchedule};
use super::snapshot_directories::SnapshotDirectories;
use super::snapshots::{self, or_no_snapshot};
use super::stored_schedule::{SCHEDULE_ATTRIBUTE, StoredSchedule};
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
    // If the schedule makes one meanwhile, its thread adds that.
    let newest = volume.snapshots(id)?.last().map(|info| info.generation);
    let schedule_of_new =
        |value: &[u8], old, new| StoredSchedule::carried(value, (old, new), newest);
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
    let of_old = NewSchedule { subvolume: id, root: done.old, replaced: None };
    let of_new = volume.subvolume_of(done.root).ok().filter(|(_, is_live)| *is_live);
    let of_new =
        of_new.map(|(subvolume, _)| NewSchedule { subvolume, root: done.root, replaced: Some(id) });
    keeper.note_all(std::iter::once(of_old).chain(of_new));
    let rolled_back = RolledBack { old_name: done.old_name, has_nested: done.has_nested };
    Ok(directory_requests::Answer {
        rolled_back: Some(rolled_back),
        ..directory_requests::Answer::default()
    })
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
