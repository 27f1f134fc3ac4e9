//! Requests about [snapshots](crate::snapshots) of a subvolume, on the thread of the request.
//!
//! The kernel keeps listings of the directories that lead to snapshots, and what it knows of a
//! deleted one, until it is told before the answer.
use super::keeper_requests::KeeperRequests;
use super::snapshot_directories::SnapshotDirectories;
use super::stored_schedule::{SCHEDULE_ATTRIBUTE, StoredSchedule};
use super::subvolumes::{Asker, described, shown_uuid};
use super::{Answer, RequestFailure};
use crate::directory_requests::{
    self, Interval, Snapshot, SnapshotPlace, SnapshotRequest as Request, path_of_bytes,
};
use crate::schedule::{Schedule, is_automatic_name};
use crate::transport::{Notifier, Reply};
use cairn_engine::{Error, InodeId, SnapshotInfo, Volume, is_temporary_name};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};

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
    if let Request::Delete { name } | Request::Hold { name, .. } = request
        && is_temporary_name(name)
    {
        return Err(Errno::NODATA.into());
    }
    let notifier = reply.notifier();
    let tell_kernel =
        |name: &[u8]| tell_kernel(volume, shown, notifier.as_ref(), directory, &[name]);
    match request {
        Request::Create { name } => {
            if shown.would_hide(volume, directory, name) {
                return Err(Errno::NOTUNIQ.into());
            }
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
            let chosen = chosen(volume, subvolume, intervals)?;
            if chosen.iter().any(|info| info.is_held) {
                return Err(Errno::BUSY.into());
            }
            let deleted = delete_all(volume, &chosen);
            // Also of those before one that failed.
            let names: Vec<&[u8]> = chosen.iter().map(|info| &info.name[..]).collect();
            self::tell_kernel(volume, shown, notifier.as_ref(), directory, &names);
            deleted.map_err(or_no_snapshot)?;
        }
        Request::Space { intervals } => {
            let mut blocks = 0;
            for (of, generations) in by_subvolume(&chosen(volume, subvolume, intervals)?) {
                let of_one = volume.space_of_snapshots(of, &generations);
                blocks += of_one.map_err(or_no_snapshot)?;
            }
            return Ok(directory_requests::Answer {
                space_bytes: Some(blocks * BLOCK_BYTES),
                ..directory_requests::Answer::default()
            });
        }
        Request::Hold { name, held } => {
            volume.hold_snapshot(subvolume, name, *held).map_err(or_no_snapshot)?;
        }
        Request::Keep { schedule } => {
            let schedule = schedule.as_deref().map(str::parse).transpose();
            let schedule: Option<Schedule> = schedule.map_err(|_| Errno::INVAL)?;
            StoredSchedule::set(&keeper.changes, volume, directory, schedule.as_ref())?;
            reply.invalidate_attributes(directory.0);
            keeper.note(subvolume, directory);
        }
        Request::ShowSchedule => {
            let stored = StoredSchedule::of(volume, directory)?;
            let shown = stored.map(|stored| shown_schedule(volume, subvolume, stored));
            return Ok(directory_requests::Answer {
                schedules: shown.into_iter().collect(),
                ..directory_requests::Answer::default()
            });
        }
        Request::List { referenced } => return list(volume, subvolume, *referenced),
    }
    Ok(directory_requests::Answer::default())
}

fn shown_schedule(
    volume: &Volume,
    subvolume: u64,
    stored: StoredSchedule,
) -> directory_requests::StoredSchedule {
    let snapshots = volume.snapshots(subvolume).unwrap_or_default();
    let is_of_it = |info: &&SnapshotInfo| stored.has(info) && is_automatic_name(&info.name);
    let newest_ns = snapshots.iter().rev().find(is_of_it).map(|info| info.created_ns);
    let text = stored.text;
    directory_requests::StoredSchedule { subvolume, path: None, text, newest_ns }
}

/// All schedules that are in force.
pub(super) fn schedules(volume: &Volume) -> Answer<directory_requests::Answer> {
    let (mut paths, mut schedules) = (volume.paths_of_subvolumes()?, Vec::new());
    for (subvolume, root, _) in volume.subvolumes_with_attribute(SCHEDULE_ATTRIBUTE)? {
        if let Some(stored) = StoredSchedule::of(volume, root)? {
            let path = paths.remove(&subvolume).map(path_of_bytes);
            let shown = shown_schedule(volume, subvolume, stored);
            schedules.push(directory_requests::StoredSchedule { path, ..shown });
        }
    }
    Ok(directory_requests::Answer { schedules, ..directory_requests::Answer::default() })
}

/// Another number than that of a missing directory.
pub(super) fn or_no_snapshot(error: Error) -> RequestFailure {
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
    let Some(notifier) = notifier else { return };
    for directory in showing(volume, directory) {
        if let Some(node) = shown.known_node(directory) {
            names.iter().for_each(|name| notifier.invalidate_entry(node.0, name));
        }
        for node in shown.known_up_to_root(volume, directory) {
            notifier.invalidate_data(node.0);
        }
    }
}

/// The directory, and if it is the root directory of a subvolume that was rolled back, or that has
/// the place of one, those of all that may show the same snapshots.
fn showing(volume: &Volume, directory: InodeId) -> Vec<InodeId> {
    let line = match volume.subvolume_of(directory) {
        Ok((id, true)) => volume.line_of_subvolume(id).unwrap_or_default(),
        _ => Vec::new(),
    };
    let mut roots: Vec<InodeId> =
        line.into_iter().filter_map(|id| volume.root_of_subvolume(id).ok()).collect();
    if !roots.contains(&directory) {
        roots.push(directory);
    }
    roots
}

/// The place of a snapshot among those that a subvolume shows.
fn place_of(info: &SnapshotInfo) -> SnapshotPlace {
    (info.generation, info.subvolume)
}

/// The snapshots that a subvolume shows. One that exists only while a comparison or an application
/// runs is not among them.
fn lasting(volume: &Volume, subvolume: u64) -> Answer<Vec<SnapshotInfo>> {
    let mut snapshots = volume.snapshots(subvolume)?;
    snapshots.retain(|info| !info.is_temporary());
    Ok(snapshots)
}

/// The snapshots in these intervals.
fn chosen(volume: &Volume, subvolume: u64, intervals: &[Interval]) -> Answer<Vec<SnapshotInfo>> {
    let mut snapshots = lasting(volume, subvolume)?;
    snapshots.retain(|info| intervals.iter().any(|one| one.contains(place_of(info))));
    Ok(snapshots)
}

/// The generations of snapshots, by the subvolumes that they are of.
fn by_subvolume<'s>(
    snapshots: impl IntoIterator<Item = &'s SnapshotInfo>,
) -> BTreeMap<u64, Vec<u64>> {
    let mut found: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for info in snapshots {
        found.entry(info.subvolume).or_default().push(info.generation);
    }
    found
}

/// Deletes snapshots, in one commit for each subvolume that they are of.
pub(super) fn delete_all<'s>(
    volume: &Volume,
    snapshots: impl IntoIterator<Item = &'s SnapshotInfo>,
) -> Result<(), Error> {
    let all = by_subvolume(snapshots);
    all.iter().try_for_each(|(of, generations)| volume.delete_snapshots(*of, generations))
}

fn list(
    volume: &Volume,
    subvolume: u64,
    with_referenced: bool,
) -> Answer<directory_requests::Answer> {
    let shown = lasting(volume, subvolume)?;
    let (mut unique, mut referenced) = (HashMap::new(), HashMap::new());
    for of in by_subvolume(&shown).into_keys() {
        if let Ok(usage) = volume.snapshot_usage(of) {
            unique.extend(usage.iter().map(|one| ((one.generation, of), one.unique_blocks)));
        }
        if with_referenced {
            let found = volume.referenced_by_snapshots(of)?.into_iter();
            referenced.extend(found.map(|(generation, blocks)| ((generation, of), blocks)));
        }
    }
    let bytes_of = |blocks: Option<&u64>| blocks.map(|blocks| blocks * BLOCK_BYTES);
    let snapshots = shown.into_iter().map(|info| {
        let place = place_of(&info);
        Snapshot {
            name: info.name,
            generation: info.generation,
            subvolume: info.subvolume,
            created_ns: info.created_ns,
            uuid: shown_uuid(&info.uuid),
            is_held: info.is_held,
            unique_bytes: bytes_of(unique.get(&place)),
            referenced_bytes: bytes_of(referenced.get(&place)),
        }
    });
    let snapshots = snapshots.collect();
    Ok(directory_requests::Answer { snapshots, ..directory_requests::Answer::default() })
}
