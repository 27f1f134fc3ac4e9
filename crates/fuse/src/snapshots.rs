//! Snapshots of subvolumes of a mounted volume, for programs: requests to the root directory of a
//! subvolume.
use crate::control;
use crate::directory_requests::{Request, SnapshotRequest, StoredSchedule, ask, path_of_bytes};
use crate::error::MountError;
use crate::schedule::Schedule;
use std::path::{Path, PathBuf};

pub use crate::directory_requests::{Interval, Snapshot, SnapshotPlace};
pub use cairn_engine::is_temporary_name;

/// The name in the root directory of a mount that leads to all snapshots.
pub const DIRECTORY: &str = ".snapshots";

/// Makes a snapshot of the subvolume with the root directory at `path`, with everything that was
/// written before. It is durable then. For the owner of the subvolume, root, and the server's user.
/// Returns where it is shown below the root of the mount, beginning with [`DIRECTORY`], if it is.
///
/// # Errors
/// If there is no subvolume, it has a snapshot of this name, or the volume is full; NOTUNIQ if it
/// would hide the snapshots of subvolumes in a directory of this name.
pub fn create_snapshot(path: &Path, name: &[u8]) -> Result<Option<PathBuf>, MountError> {
    control::send_cached_data_of(path)?;
    let request = SnapshotRequest::Create { name: name.to_vec() };
    let answer = ask(path, &Request::Snapshots(request))?;
    let of = answer.subvolumes.into_iter().next().and_then(|subvolume| subvolume.path);
    Ok(of.map(|of| {
        let below = of.strip_prefix("/").unwrap_or(&of);
        Path::new(DIRECTORY).join(below).join(path_of_bytes(name.to_vec()))
    }))
}

/// The snapshots of the subvolume with the root directory at `path`, the oldest first. With
/// `referenced`, what each refers to is counted: the first time since the mount, that reads all
/// nodes of the newest one.
///
/// # Errors
/// If there is no subvolume, or one can't be read.
pub fn snapshots(path: &Path, referenced: bool) -> Result<Vec<Snapshot>, MountError> {
    Ok(ask(path, &Request::Snapshots(SnapshotRequest::List { referenced }))?.snapshots)
}

/// Deletes a snapshot of the subvolume with the root directory at `path`. That is durable then; its
/// space comes back later. For the owner of the subvolume, root, and the server's user.
///
/// # Errors
/// If there is no such snapshot, or it is held.
pub fn delete_snapshot(path: &Path, name: &[u8]) -> Result<(), MountError> {
    let request = SnapshotRequest::Delete { name: name.to_vec() };
    ask(path, &Request::Snapshots(request)).map(drop)
}

/// Holds a snapshot of the subvolume with the root directory at `path`, so that it can't be
/// deleted, or releases it. For the owner of the subvolume, root, and the server's user.
///
/// # Errors
/// If there is no such snapshot.
pub fn hold_snapshot(path: &Path, name: &[u8], held: bool) -> Result<(), MountError> {
    let request = SnapshotRequest::Hold { name: name.to_vec(), held };
    ask(path, &Request::Snapshots(request)).map(drop)
}

/// Bytes that only the snapshots in these intervals have, of the subvolume with the root directory
/// at `path`: the deletion of all of them gives them back.
///
/// # Errors
/// If there is no subvolume, or what is kept for its snapshots can't be read.
pub fn space_of_snapshots(path: &Path, intervals: &[Interval]) -> Result<u64, MountError> {
    let request = SnapshotRequest::Space { intervals: intervals.to_vec() };
    let answer = ask(path, &Request::Snapshots(request))?;
    answer.space_bytes.ok_or_else(|| MountError::OtherBuild(path.to_owned()))
}

/// Deletes the snapshots in these intervals, of the subvolume with the root directory at `path`, in
/// one commit for each subvolume that they are of. If one of them is held, none is deleted. For the
/// owner of the subvolume, root, and the server's user.
///
/// # Errors
/// If one is held.
pub fn delete_snapshots(path: &Path, intervals: &[Interval]) -> Result<(), MountError> {
    let request = SnapshotRequest::DeleteIntervals { intervals: intervals.to_vec() };
    ask(path, &Request::Snapshots(request)).map(drop)
}

/// Has snapshots of the subvolume with the root directory at `path` made and deleted by this
/// schedule from now on, also after later mounts; with `None` by none. Those that there are stay.
/// That is durable then. For the owner of the subvolume, root, and the server's user.
///
/// # Errors
/// If there is no subvolume, or the volume is full.
pub fn set_schedule(path: &Path, schedule: Option<&Schedule>) -> Result<(), MountError> {
    let request = SnapshotRequest::Keep { schedule: schedule.map(ToString::to_string) };
    ask(path, &Request::Snapshots(request)).map(drop)
}

/// The schedule of a subvolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Id of the subvolume.
    pub subvolume: u64,
    /// Where it is below the root of the mount, if it is there and was asked for.
    pub path: Option<PathBuf>,
    /// By this its snapshots are made.
    pub schedule: Schedule,
    /// When the newest of these was made, in nanoseconds since 1970.
    pub newest_ns: Option<u64>,
}

fn kept(asked: &Path, stored: StoredSchedule) -> Result<Kept, MountError> {
    let StoredSchedule { subvolume, path, text, newest_ns } = stored;
    let schedule = text.parse().map_err(|_| MountError::OtherBuild(asked.to_owned()))?;
    Ok(Kept { subvolume, path, schedule, newest_ns })
}

/// The schedule by which snapshots of the subvolume with the root directory at `path` are made.
///
/// # Errors
/// If there is no subvolume, or this version can't read its schedule.
pub fn schedule(path: &Path) -> Result<Option<Kept>, MountError> {
    let answer = ask(path, &Request::Snapshots(SnapshotRequest::ShowSchedule))?;
    answer.schedules.into_iter().next().map(|stored| kept(path, stored)).transpose()
}

/// All schedules of the volume that `directory` shows, by ascending id of the subvolume. For root
/// and the server's user.
///
/// # Errors
/// If it is in no mount of Cairn, or this version can't read one.
pub fn schedules(directory: &Path) -> Result<Vec<Kept>, MountError> {
    let answer = ask(directory, &Request::Schedules)?;
    answer.schedules.into_iter().map(|stored| kept(directory, stored)).collect()
}
