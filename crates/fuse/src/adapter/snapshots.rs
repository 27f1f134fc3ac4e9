//! Requests about [snapshots](crate::snapshots) of a subvolume, on the thread of the request.
//!
//! The kernel keeps listings of the directories that lead to snapshots, and what it knows of a
//! deleted one, until it is told before the answer.
use super::keeper_requests::KeeperRequests;
use super::snapshot_directories::SnapshotDirectories;
use super::subvolumes::{Asker, PAGE_BYTES, described, shown_uuid};
use super::{Answer, RequestFailure};
use crate::directory_requests::{self, Interval, Snapshot, SnapshotRequest as Request};
use crate::schedule::Schedule;
use crate::transport::{Notifier, Reply};
use cairn_engine::{Error, FsyncKind, InodeId, SnapshotInfo, Volume, XattrMode};
use rustix::io::Errno;
use std::collections::HashMap;

const BLOCK_BYTES: u64 = 4096;

pub(super) fn serve(
    volume: &Volume,
    shown: &SnapshotDirectories,
    keeper: &KeeperRequests,
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
    let notifier = reply.notifier();
    let tell_kernel =
        |name: &[u8]| tell_kernel(volume, shown, notifier.as_ref(), directory, &[name]);
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
        Request::DeleteIntervals { intervals } => {
            let (generations, names) = chosen(volume, subvolume, intervals)?;
            let deleted = volume.delete_snapshots(subvolume, &generations);
            // Also of those before one that failed.
            let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
            self::tell_kernel(volume, shown, notifier.as_ref(), directory, &names);
            deleted.map_err(or_no_snapshot)?;
        }
        Request::Space { intervals } => {
            let (generations, _) = chosen(volume, subvolume, intervals)?;
            let blocks = volume.space_of_snapshots(subvolume, &generations);
            return Ok(directory_requests::Answer {
                space_bytes: Some(blocks.map_err(or_no_snapshot)? * BLOCK_BYTES),
                ..directory_requests::Answer::default()
            });
        }
        Request::Hold { name, held } => {
            volume.hold_snapshot(subvolume, name, *held).map_err(or_no_snapshot)?;
        }
        Request::Keep { schedule } => {
            let schedule = schedule.as_deref().map(str::parse).transpose();
            let schedule: Option<Schedule> = schedule.map_err(|_| Errno::INVAL)?;
            store_schedule(volume, directory, schedule.as_ref())?;
            reply.invalidate_attributes(directory.0);
            keeper.note(subvolume, directory);
        }
        Request::ShowSchedule => {
            return Ok(directory_requests::Answer {
                schedule: stored_schedule(volume, directory)?,
                ..directory_requests::Answer::default()
            });
        }
        Request::List { after, referenced } => {
            return list(volume, subvolume, *after, *referenced);
        }
    }
    Ok(directory_requests::Answer::default())
}

/// Another number than that of a missing directory.
fn or_no_snapshot(error: Error) -> RequestFailure {
    if matches!(error, Error::NotFound) { Errno::NODATA.into() } else { error.into() }
}

/// Snapshots of a subvolume with these names were made or deleted.
pub(super) fn tell_kernel(
    volume: &Volume,
    shown: &SnapshotDirectories,
    notifier: Option<&Notifier>,
    directory: InodeId,
    names: &[&[u8]],
) {
    shown.note_change();
    let Some(notifier) = notifier else { return };
    if let Some(node) = shown.known_node(directory) {
        names.iter().for_each(|name| notifier.invalidate_entry(node.0, name));
    }
    for node in shown.known_up_to_root(volume, directory) {
        notifier.invalidate_data(node.0);
    }
}

/// The schedule of a subvolume stands in an attribute of its root directory that no program sees:
/// the subvolume's id, a space, and the text. A fork has its origin's, where the id is another one.
pub(super) const SCHEDULE_ATTRIBUTE: &[u8] = b"system.cairn.keep";

fn store_schedule(volume: &Volume, directory: InodeId, schedule: Option<&Schedule>) -> Answer<()> {
    let stored = match schedule {
        Some(schedule) => {
            let text = format!("{} {schedule}", volume.subvolume_of(directory)?.0);
            volume.set_xattr(directory, SCHEDULE_ATTRIBUTE, text.as_bytes(), XattrMode::Any)
        }
        None => match volume.remove_xattr(directory, SCHEDULE_ATTRIBUTE) {
            Err(Error::NoAttribute) => Ok(()),
            removed => removed,
        },
    };
    stored?;
    Ok(volume.fsync_blocking(directory, FsyncKind::Full)?)
}

pub(super) fn stored_schedule(volume: &Volume, directory: InodeId) -> Answer<Option<String>> {
    match volume.get_xattr(directory, SCHEDULE_ATTRIBUTE) {
        Ok(text) => {
            let text = String::from_utf8_lossy(&text);
            let own = volume.subvolume_of(directory)?.0.to_string();
            let schedule = text.split_once(' ').filter(|(subvolume, _)| *subvolume == own);
            Ok(schedule.map(|(_, schedule)| schedule.to_owned()))
        }
        Err(Error::NoAttribute) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The generations and names of the snapshots in these intervals.
fn chosen(
    volume: &Volume,
    subvolume: u64,
    intervals: &[Interval],
) -> Answer<(Vec<u64>, Vec<Vec<u8>>)> {
    let snapshots = volume.snapshots(subvolume)?.into_iter();
    let is_chosen = |info: &SnapshotInfo| intervals.iter().any(|one| one.contains(info.generation));
    Ok(snapshots.filter(is_chosen).map(|info| (info.generation, info.name)).unzip())
}

/// As many as fit into an answer.
fn list(
    volume: &Volume,
    subvolume: u64,
    after: u64,
    referenced: bool,
) -> Answer<directory_requests::Answer> {
    let (mut page, mut bytes) = (directory_requests::Answer::default(), 0);
    let unique: Option<HashMap<u64, u64>> = volume.snapshot_usage(subvolume).ok().map(|usage| {
        usage.iter().map(|one| (one.generation, one.unique_blocks * BLOCK_BYTES)).collect()
    });
    let referenced: HashMap<u64, u64> = if referenced {
        volume.referenced_by_snapshots(subvolume)?.into_iter().collect()
    } else {
        HashMap::new()
    };
    for info in volume.snapshots(subvolume)?.into_iter().filter(|info| info.generation > after) {
        let generation = info.generation;
        let snapshot = Snapshot {
            name: info.name,
            generation,
            created_ns: info.created_ns,
            uuid: shown_uuid(&info.uuid),
            is_held: info.is_held,
            unique_bytes: unique.as_ref().and_then(|all| all.get(&generation).copied()),
            referenced_bytes: referenced.get(&generation).map(|blocks| blocks * BLOCK_BYTES),
        };
        bytes += serde_json::to_string(&snapshot).map_err(|_| Errno::IO)?.len() + 1;
        if bytes > PAGE_BYTES && !page.snapshots.is_empty() {
            page.more = true;
            break;
        }
        page.snapshots.push(snapshot);
    }
    Ok(page)
}
