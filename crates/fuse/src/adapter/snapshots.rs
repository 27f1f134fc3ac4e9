//! Requests about [snapshots](crate::snapshots) of a subvolume, on the thread of the request.
//!
//! The kernel keeps listings of the directories that lead to snapshots, and what it knows of a
//! deleted one, until it is told before the answer.
use super::snapshot_directories::SnapshotDirectories;
use super::subvolumes::{Asker, PAGE_BYTES, described, shown_uuid};
use super::{Answer, RequestFailure};
use crate::directory_requests::{self, Snapshot, SnapshotRequest as Request};
use crate::transport::Reply;
use cairn_engine::{Error, InodeId, SnapshotInfo, Volume};
use rustix::io::Errno;
use std::collections::HashMap;

const BLOCK_BYTES: u64 = 4096;

pub(super) fn serve(
    volume: &Volume,
    shown: &SnapshotDirectories,
    directory: InodeId,
    asker: &Asker,
    request: &Request,
    reply: &Reply,
) -> Answer<directory_requests::Answer> {
    let subvolume = match volume.subvolume_of(directory)? {
        (id, true) => id,
        (_, false) if directory.number() == InodeId::ROOT.number() => {
            return Err(Errno::OPNOTSUPP.into());
        }
        (_, false) => return Err(Errno::INVAL.into()),
    };
    if request.changes_volume() && !asker.may_act_as_owner(&volume.attributes(directory)?) {
        return Err(Errno::PERM.into());
    }
    let tell_kernel = |name: &[u8]| {
        shown.note_change();
        if let Some(node) = shown.known_node(directory) {
            reply.invalidate_entry(node.0, name);
        }
        for node in shown.known_up_to_root(volume, directory) {
            reply.invalidate_data(node.0, &(0..i64::MAX as u64));
        }
    };
    match request {
        Request::Create { name } => {
            volume.create_snapshot(directory, name)?;
            tell_kernel(name);
            let subvolumes = vec![described(volume, subvolume)?];
            return Ok(directory_requests::Answer {
                subvolumes,
                ..directory_requests::Answer::default()
            });
        }
        Request::Delete { name } => {
            volume.delete_snapshot(subvolume, name).map_err(or_no_snapshot)?;
            tell_kernel(name);
        }
        Request::Hold { name, held } => {
            volume.hold_snapshot(subvolume, name, *held).map_err(or_no_snapshot)?;
        }
        Request::List { after } => return list(volume, subvolume, *after),
    }
    Ok(directory_requests::Answer::default())
}

/// Another number than that of a missing directory.
fn or_no_snapshot(error: Error) -> RequestFailure {
    if matches!(error, Error::NotFound) { Errno::NODATA.into() } else { error.into() }
}

/// As many as fit into an answer.
fn list(volume: &Volume, subvolume: u64, after: u64) -> Answer<directory_requests::Answer> {
    let (mut page, mut bytes) = (directory_requests::Answer::default(), 0);
    let unique: Option<HashMap<u64, u64>> = volume.snapshot_usage(subvolume).ok().map(|usage| {
        usage.iter().map(|one| (one.generation, one.unique_blocks * BLOCK_BYTES)).collect()
    });
    for info in volume.snapshots(subvolume)?.iter().filter(|info| info.generation > after) {
        let unique = unique.as_ref().and_then(|all| all.get(&info.generation).copied());
        let snapshot = described_snapshot(info, unique);
        bytes += serde_json::to_string(&snapshot).map_err(|_| Errno::IO)?.len() + 1;
        if bytes > PAGE_BYTES && !page.snapshots.is_empty() {
            page.more = true;
            break;
        }
        page.snapshots.push(snapshot);
    }
    Ok(page)
}

fn described_snapshot(info: &SnapshotInfo, unique_bytes: Option<u64>) -> Snapshot {
    Snapshot {
        name: info.name.clone(),
        generation: info.generation,
        created_ns: info.created_ns,
        uuid: shown_uuid(&info.uuid),
        is_held: info.is_held,
        unique_bytes,
    }
}
