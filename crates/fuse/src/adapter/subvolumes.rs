//! Requests about [subvolumes](crate::subvolumes), each on a thread of its own, since it may wait
//! for a commit.
//!
//! They change names behind the kernel's back, which keeps names and attributes for ever: it is
//! told before the answer. No request waits for the thread that tells it.
use super::Answer;
use super::set_id::has_group;
use super::snapshots;
use crate::directory_requests::{self, Request, Subvolume, path_of_bytes};
use crate::protocol::RequestHeader;
use crate::transport::Reply;
use cairn_engine::{
    Attributes, Error, FileType, ForkOptions, InodeId, NewInode, SubvolumeInfo, Volume,
};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;

/// Bits of permissions.
const SEARCH: u32 = 0o1;
const CHANGE_NAMES: u32 = 0o2 | SEARCH;

/// Who asks.
pub(super) struct Asker {
    uid: u32,
    gid: u32,
    pid: u32,
    is_privileged: bool,
}

impl Asker {
    pub(super) fn new(header: &RequestHeader, is_privileged: bool) -> Self {
        Self { uid: header.uid, gid: header.gid, pid: header.pid, is_privileged }
    }

    fn may(&self, directory: &Attributes, bits: u32) -> bool {
        let shift = if self.uid == directory.uid {
            6
        } else if self.gid == directory.gid || has_group(self.pid, directory.gid) {
            3
        } else {
            0
        };
        self.is_privileged || directory.mode >> shift & bits == bits
    }

    /// Whether names in the directory may be changed.
    pub(super) fn may_change(&self, directory: &Attributes) -> bool {
        self.may(directory, CHANGE_NAMES)
    }

    /// Whether the path from the root of the mount leads this user into the directory.
    fn may_reach(&self, volume: &Volume, directory: InodeId) -> Answer<bool> {
        let (mut at, mut seen) = (directory, BTreeSet::new());
        // Damage can lead in circles.
        while seen.insert(at) {
            let Some(directory) = unless_gone(volume.attributes(at))? else { return Ok(false) };
            if !self.may(&directory, SEARCH) {
                return Ok(false);
            }
            if at == InodeId::ROOT {
                return Ok(true);
            }
            // It may have no name in this mount.
            let Some(above) = unless_gone(volume.parent(at))? else { return Ok(false) };
            at = above;
        }
        Ok(false)
    }

    /// Whether what is the owner's alone is permitted.
    pub(super) fn may_act_as_owner(&self, of: &Attributes) -> bool {
        self.is_privileged || self.uid == of.uid
    }
}

fn unless_gone<T>(found: Result<T, Error>) -> Answer<Option<T>> {
    match found {
        Err(Error::NotFound | Error::Stale) => Ok(None),
        found => Ok(Some(found?)),
    }
}

/// Fails unless this user may copy what is in the root directory `source`. Its number is no proof
/// that a path leads there, since it can be guessed.
fn expect_may_fork(volume: &Volume, asker: &Asker, source: InodeId) -> Answer<()> {
    if source.number() != InodeId::ROOT.number() {
        return Err(Errno::INVAL.into());
    }
    let root = unless_gone(volume.lookup_inode(source))?.ok_or(Errno::INVAL)?;
    volume.forget(source, 1);
    if asker.is_privileged {
        return Ok(());
    }
    if !asker.may_act_as_owner(&root) {
        return Err(Errno::PERM.into());
    }
    let (id, is_live) = volume.subvolume_of(source)?;
    // A snapshot is shown by its subvolume, and by those that have taken the place of that.
    let line = if is_live { vec![id] } else { volume.line_of_subvolume(id)? };
    let mut refused = Errno::PERM;
    for id in line.into_iter().filter(|other| *other >= id) {
        let Some(live) = unless_gone(volume.root_of_subvolume(id))? else { continue };
        let Some(root) = unless_gone(volume.attributes(live))? else { continue };
        if asker.may_act_as_owner(&root) {
            if asker.may_reach(volume, live)? {
                return Ok(());
            }
            refused = Errno::ACCESS;
        }
    }
    Err(refused.into())
}

/// Serves a request about subvolumes.
pub(super) fn serve(
    volume: &Volume,
    directory: InodeId,
    asker: &Asker,
    request: &Request,
    reply: &Reply,
) -> Answer<directory_requests::Answer> {
    let at = |directory| volume.attributes(directory);
    match request {
        Request::Create { name, mode } => {
            if !asker.may_change(&at(directory)?) {
                return Err(Errno::ACCESS.into());
            }
            let new = NewInode {
                file_type: FileType::Directory,
                mode: mode & 0o7777,
                uid: asker.uid,
                gid: asker.gid,
                device: 0,
                target: None,
            };
            let made = volume.create_subvolume(directory, name, &new)?;
            volume.forget(made.inode, 1);
            tell_kernel(reply, directory, name);
        }
        Request::Fork { name, source, early } => {
            if !asker.may_change(&at(directory)?) {
                return Err(Errno::ACCESS.into());
            }
            let source = InodeId(*source);
            expect_may_fork(volume, asker, source)?;
            let made = volume.fork_with(source, directory, name, ForkOptions { early: *early })?;
            volume.forget(made.inode, 1);
            tell_kernel(reply, directory, name);
        }
        Request::Remove { name } => {
            let parent = at(directory)?;
            if !asker.may_change(&parent) {
                return Err(Errno::ACCESS.into());
            }
            volume.remove_subvolume_if(directory, name, &|root| {
                if asker.may_act_as_owner(root) {
                    Ok(())
                } else {
                    Err(Error::NotPermitted("only its owner removes a subvolume"))
                }
            })?;
            tell_kernel(reply, directory, name);
        }
        Request::List => {
            // It shows names in directories that others may not read.
            if !asker.is_privileged {
                return Err(Errno::PERM.into());
            }
            return list(volume);
        }
        Request::Schedules => {
            if !asker.is_privileged {
                return Err(Errno::PERM.into());
            }
            return snapshots::schedules(volume);
        }
        Request::Show => {
            let subvolumes = vec![described(volume, root_of(volume, directory)?)?];
            return Ok(directory_requests::Answer {
                subvolumes,
                ..directory_requests::Answer::default()
            });
        }
        Request::SetDefault => {
            if !asker.is_privileged {
                return Err(Errno::PERM.into());
            }
            volume.set_default_subvolume(root_of(volume, directory)?)?;
        }
        Request::Rollback { .. }
        | Request::Snapshots(_)
        | Request::Differences { .. }
        | Request::Apply { .. }
        | Request::ApplyTo { .. }
        | Request::Continue { .. } => {
            return Err(Errno::INVAL.into());
        }
    }
    Ok(directory_requests::Answer::default())
}

/// The id of the subvolume whose root directory this is; OPNOTSUPP for that of a snapshot.
fn root_of(volume: &Volume, directory: InodeId) -> Answer<u64> {
    match volume.subvolume_of(directory)? {
        (id, true) => Ok(id),
        (_, false) if directory.number() == InodeId::ROOT.number() => Err(Errno::OPNOTSUPP.into()),
        (_, false) => Err(Errno::INVAL.into()),
    }
}

/// What is known of a subvolume.
pub(super) fn described(volume: &Volume, id: u64) -> Answer<Subvolume> {
    let all = volume.subvolumes()?;
    let path = volume.paths_of_subvolumes()?.remove(&id);
    let info = all.iter().find(|info| info.id == id).ok_or(Errno::NOENT)?;
    Ok(shown(info, path, forks_of(&all).remove(&id).unwrap_or(0)))
}

/// A name in the directory has changed.
pub(super) fn tell_kernel(reply: &Reply, directory: InodeId, name: &[u8]) {
    reply.invalidate_entry(directory.0, name);
    reply.invalidate_attributes(directory.0);
}

fn list(volume: &Volume) -> Answer<directory_requests::Answer> {
    let (mut paths, all) = (volume.paths_of_subvolumes()?, volume.subvolumes()?);
    let mut forks = forks_of(&all);
    let subvolumes = all
        .iter()
        .map(|info| shown(info, paths.remove(&info.id), forks.remove(&info.id).unwrap_or(0)));
    let subvolumes = subvolumes.collect();
    Ok(directory_requests::Answer { subvolumes, ..directory_requests::Answer::default() })
}

/// An identity in digits.
pub(super) fn shown_uuid(uuid: &[u8; 16]) -> String {
    uuid.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// How many forks of each subvolume there are.
fn forks_of(all: &[SubvolumeInfo]) -> HashMap<u64, u64> {
    let mut forks = HashMap::new();
    for (origin, _) in all.iter().filter_map(|info| info.origin) {
        *forks.entry(origin).or_default() += 1;
    }
    forks
}

fn shown(info: &SubvolumeInfo, path: Option<Vec<u8>>, forks: u64) -> Subvolume {
    Subvolume {
        id: info.id,
        path: path.map(path_of_bytes),
        parent: info.parent,
        uuid: shown_uuid(&info.uuid),
        created_ns: info.created_ns,
        generation: info.generation,
        is_default: info.is_default,
        is_being_removed: info.is_dying,
        origin: info.origin,
        continues: info.continues,
        forks,
    }
}
