//! Requests about [subvolumes](crate::subvolumes), each on a thread of its own, since it may wait
//! for a commit.
//!
//! They change names behind the kernel's back, which keeps names and attributes for ever: it is
//! told before the answer. No request waits for the thread that tells it.
use super::set_id::has_group;
use super::{Answer, VolumeHandler, fail, snapshots};
use crate::protocol::RequestHeader;
use crate::protocol::wire::IoctlOut;
use crate::subvolumes::{self, BUFFER_BYTES, Request, Subvolume, path_of_bytes};
use crate::transport::Reply;
use cairn_engine::{Attributes, Error, FileType, InodeId, NewInode, SubvolumeInfo, Volume};
use cairn_environment::thread;
use rustix::io::Errno;
use std::fmt::Write;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Bits of write and search permission.
const CHANGE_NAMES: u32 = 0o3;
/// Of the buffer, at most so much is filled with whole answers.
pub(super) const PAGE_BYTES: usize = BUFFER_BYTES - 256;

/// Who asks.
pub(super) struct Asker {
    uid: u32,
    gid: u32,
    pid: u32,
    is_privileged: bool,
}

impl Asker {
    /// Whether names in the directory may be changed.
    fn may_change(&self, directory: &Attributes) -> bool {
        let shift = if self.uid == directory.uid {
            6
        } else if self.gid == directory.gid || has_group(self.pid, directory.gid) {
            3
        } else {
            0
        };
        self.is_privileged || directory.mode >> shift & CHANGE_NAMES == CHANGE_NAMES
    }

    /// Whether what is the owner's alone is permitted.
    pub(super) fn may_act_as_owner(&self, of: &Attributes) -> bool {
        self.is_privileged || self.uid == of.uid
    }
}

impl VolumeHandler {
    pub(super) fn subvolumes(
        &self,
        header: &RequestHeader,
        is_privileged: bool,
        input: &[u8],
        reply: Reply,
    ) {
        let Some(request) = subvolumes::decode::<Request>(input) else {
            return reply.error(Errno::INVAL);
        };
        let asker = Asker { uid: header.uid, gid: header.gid, pid: header.pid, is_privileged };
        let (volume, directory) = (self.volume.clone(), InodeId(header.node));
        let shown = Arc::clone(&self.snapshots);
        thread::spawn("cairn-subvolume", move || {
            let done = match &request {
                Request::Snapshots(request) => {
                    snapshots::serve(&volume, &shown, directory, &asker, request, &reply)
                }
                request => serve(&volume, directory, &asker, request, &reply),
            };
            match done.and_then(|done| Ok(subvolumes::encode(&done).ok_or(Errno::MSGSIZE)?)) {
                Ok(buffer) => {
                    let _delivery =
                        reply.bytes(&[IoctlOut::default().as_bytes(), &buffer[..]].concat());
                }
                Err(failure) => fail(reply, &failure),
            }
        });
    }
}

fn serve(
    volume: &Volume,
    directory: InodeId,
    asker: &Asker,
    request: &Request,
    reply: &Reply,
) -> Answer<subvolumes::Answer> {
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
        Request::List { after } => {
            // It shows names in directories that others may not read.
            if !asker.is_privileged {
                return Err(Errno::PERM.into());
            }
            return list(volume, *after);
        }
        Request::Show => {
            let subvolumes = vec![described(volume, root_of(volume, directory)?)?];
            return Ok(subvolumes::Answer { subvolumes, ..subvolumes::Answer::default() });
        }
        Request::SetDefault => {
            if !asker.is_privileged {
                return Err(Errno::PERM.into());
            }
            volume.set_default_subvolume(root_of(volume, directory)?)?;
        }
        Request::Snapshots(_) => return Err(Errno::INVAL.into()),
    }
    Ok(subvolumes::Answer::default())
}

/// The id of the subvolume whose root directory this is.
fn root_of(volume: &Volume, directory: InodeId) -> Answer<u64> {
    match volume.subvolume_of(directory)? {
        (id, true) => Ok(id),
        (_, false) => Err(Errno::INVAL.into()),
    }
}

/// What is known of a subvolume.
pub(super) fn described(volume: &Volume, id: u64) -> Answer<Subvolume> {
    let info = volume.subvolumes()?.into_iter().find(|info| info.id == id);
    let path = volume.paths_of_subvolumes()?.remove(&id);
    Ok(shown(&info.ok_or(Errno::NOENT)?, path))
}

/// A name in the directory has changed.
fn tell_kernel(reply: &Reply, directory: InodeId, name: &[u8]) {
    reply.invalidate_entry(directory.0, name);
    reply.invalidate_attributes(directory.0);
}

/// As many as fit into an answer.
fn list(volume: &Volume, after: u64) -> Answer<subvolumes::Answer> {
    let (mut page, mut bytes) = (subvolumes::Answer::default(), 0);
    let mut paths = volume.paths_of_subvolumes()?;
    for info in volume.subvolumes()?.iter().filter(|info| info.id > after) {
        let subvolume = shown(info, paths.remove(&info.id));
        bytes += serde_json::to_string(&subvolume).map_err(|_| Errno::IO)?.len() + 1;
        if bytes > PAGE_BYTES && !page.subvolumes.is_empty() {
            page.more = true;
            break;
        }
        page.subvolumes.push(subvolume);
    }
    Ok(page)
}

/// An identity in digits.
pub(super) fn shown_uuid(uuid: &[u8; 16]) -> String {
    uuid.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

pub(super) fn shown(info: &SubvolumeInfo, path: Option<Vec<u8>>) -> Subvolume {
    Subvolume {
        id: info.id,
        // Two digits for each byte; one that fills more than half of a page is left out.
        path: path.filter(|path| path.len() <= PAGE_BYTES / 4).map(path_of_bytes),
        parent: info.parent,
        uuid: shown_uuid(&info.uuid),
        created_ns: info.created_ns,
        generation: info.generation,
        is_default: info.is_default,
        is_being_removed: info.is_dying,
    }
}
