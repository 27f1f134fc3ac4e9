//! Subvolumes of a mounted volume, for programs.
use crate::control::{open_in_mount, send_cached_data_of};
use crate::directory_requests::{Request, ask, path_of_bytes};
use crate::error::MountError;
use cairn_engine::InodeId;
use rustix::fs::{FileType, Mode, Stat};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

pub use crate::directory_requests::Subvolume;

/// The directory in which a path's last name stands, and that name.
fn place(path: &Path) -> Result<(PathBuf, &OsStr), MountError> {
    let invalid = || MountError::Refused { path: path.to_owned(), errno: Errno::INVAL };
    let name = path.file_name().ok_or_else(invalid)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok((directory.unwrap_or(Path::new(".")).to_owned(), name))
}

/// The same of the subvolume that `path` leads to: also "." and ".." have a name somewhere.
///
/// # Errors
/// INVAL if it is no directory, BUSY if it is the root directory of a mount, which no name in that
/// mount leads to.
fn place_of_subvolume(path: &Path) -> Result<(PathBuf, OsString), MountError> {
    let refused = |errno| match errno {
        Errno::ACCESS => MountError::MayNotOpen(path.to_owned()),
        errno => MountError::Refused { path: path.to_owned(), errno },
    };
    let found = rustix::fs::lstat(path).map_err(refused)?;
    if !FileType::from_raw_mode(found.st_mode).is_dir() {
        return Err(refused(Errno::INVAL));
    }
    let is_named = path.file_name().is_some();
    let real = if is_named { None } else { std::fs::canonicalize(path).ok() };
    if let Ok((directory, name)) = place(real.as_deref().unwrap_or(path))
        && rustix::fs::stat(&directory).map_err(refused)?.st_dev == found.st_dev
    {
        return Ok((directory, name.to_owned()));
    }
    ask(path, &Request::Show)?;
    Err(refused(Errno::BUSY))
}

/// `failure` of what concerns `path`.
fn about(path: &Path, failure: MountError) -> MountError {
    match failure {
        MountError::Refused { errno, .. } => MountError::Refused { path: path.to_owned(), errno },
        MountError::NotInCairn(_) => MountError::NotInCairn(path.to_owned()),
        MountError::OtherBuild(_) => MountError::OtherBuild(path.to_owned()),
        failure => failure,
    }
}

/// The status of the root directory of a subvolume or snapshot: the server learns only the number
/// of one that a request names beside the directory that it goes to.
///
/// # Errors
/// INVAL if it is another directory, or something else.
pub(crate) fn status_of_root(path: &Path) -> Result<Stat, MountError> {
    let refused = |errno| MountError::Refused { path: path.to_owned(), errno };
    let open = open_in_mount(path).map_err(|error| match error {
        MountError::PathUnusable { errno: Errno::NOTDIR, .. } => refused(Errno::INVAL),
        MountError::PathUnusable { errno, .. } => refused(errno),
        error => error,
    })?;
    let status = rustix::fs::fstat(&open).map_err(refused)?;
    let inode = InodeId(status.st_ino);
    let is_root = inode.made_up_number().is_none() && inode.number() == InodeId::ROOT.number();
    if is_root { Ok(status) } else { Err(refused(Errno::INVAL)) }
}

/// Makes a subvolume: a directory at `path`, in a mount of Cairn, with permissions as mkdir(2)
/// gives them. It is durable then.
///
/// # Errors
/// As of mkdir(2), or if it is in no mount of Cairn.
pub fn create_subvolume(path: &Path) -> Result<(), MountError> {
    if rustix::fs::lstat(path).is_ok() {
        return Err(MountError::Refused { path: path.to_owned(), errno: Errno::EXIST });
    }
    let (directory, name) = place(path)?;
    let umask = rustix::process::umask(Mode::empty());
    rustix::process::umask(umask);
    let name = name.as_bytes().to_vec();
    let request = Request::Create { name, mode: 0o777 & !umask.as_raw_mode() };
    ask(&directory, &request).map(drop).map_err(|failure| about(path, failure))
}

/// Makes a fork at `path` of the subvolume or snapshot with the root directory at `source`, in the
/// same mount, with everything that was written before. It is durable then; an `early` one is once
/// anything in it, or all of the mount, has been synced. For the owner of the source, root, and the
/// server's user.
///
/// # Errors
/// As of mkdir(2); INVAL of the source if it is no subvolume or snapshot; XDEV if it is in another
/// mount.
pub fn fork(source: &Path, path: &Path, early: bool) -> Result<(), MountError> {
    let refused = |at: &Path, errno| MountError::Refused { path: at.to_owned(), errno };
    if rustix::fs::lstat(path).is_ok() {
        return Err(refused(path, Errno::EXIST));
    }
    let (directory, name) = place(path)?;
    let from = status_of_root(source)?;
    let to = rustix::fs::stat(&directory).map_err(|errno| refused(&directory, errno))?;
    if from.st_dev != to.st_dev {
        return Err(refused(path, Errno::XDEV));
    }
    send_cached_data_of(source)?;
    let request = Request::Fork { name: name.as_bytes().to_vec(), source: from.st_ino, early };
    ask(&directory, &request).map(drop).map_err(|failure| about(path, failure))
}

/// Removes the subvolume at `path` with everything in it. That is durable then; its space comes
/// back later. For its owner, root, and the server's user.
///
/// # Errors
/// INVAL if it is no subvolume; BUSY if it is shown at the root of a mount or by default, or has
/// snapshots; or if it may not be removed.
pub fn remove_subvolume(path: &Path) -> Result<(), MountError> {
    let (directory, name) = place_of_subvolume(path)?;
    let name = name.as_bytes().to_vec();
    let removed = ask(&directory, &Request::Remove { name });
    removed.map(drop).map_err(|failure| about(path, failure))
}

/// A subvolume that was rolled back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rollback {
    /// What the snapshot holds: the path, without `.` and `..` at its end.
    pub new: PathBuf,
    /// What it was before.
    pub old: PathBuf,
    /// Other subvolumes are nested there.
    pub has_nested: bool,
}

/// Has the subvolume at `path` become what its snapshot of this name holds. That is durable then.
/// What it was before stands beside it under another name, and whoever uses it goes on there. For
/// the owner of the subvolume, root, and the server's user.
///
/// # Errors
/// If it is no subvolume, or has no such snapshot (NODATA); or if it is the root directory of a
/// mount (BUSY), which no name in that mount leads to.
pub fn rollback(path: &Path, snapshot: &[u8]) -> Result<Rollback, MountError> {
    let (directory, name) = place_of_subvolume(path)?;
    let request = Request::Rollback { name: name.as_bytes().to_vec(), snapshot: snapshot.to_vec() };
    let answer = ask(&directory, &request).map_err(|failure| about(path, failure))?;
    let done = answer.rolled_back.ok_or_else(|| MountError::OtherBuild(path.to_owned()))?;
    let old = directory.join(path_of_bytes(done.old_name));
    // The kernel learns where the working directories of other programs are now.
    let new = if path.file_name().is_some() { path.to_owned() } else { directory.join(name) };
    for path in [&new, &old] {
        let _ = rustix::fs::stat(path);
    }
    Ok(Rollback { new, old, has_nested: done.has_nested })
}

/// All subvolumes of the volume that `directory` shows, by ascending id. For root and the server's
/// user: it names directories that others may not read.
///
/// # Errors
/// If it is in no mount of Cairn, or one can't be read.
pub fn subvolumes(directory: &Path) -> Result<Vec<Subvolume>, MountError> {
    Ok(ask(directory, &Request::List)?.subvolumes)
}

/// The subvolume whose root directory is at `path`.
///
/// # Errors
/// If it is the root directory of none.
pub fn subvolume_at(path: &Path) -> Result<Subvolume, MountError> {
    let refused = |errno| MountError::Refused { path: path.to_owned(), errno };
    ask(path, &Request::Show)?.subvolumes.pop().ok_or_else(|| refused(Errno::INVAL))
}

/// Has later mounts show the subvolume at `path` at their root. For root and the server's user.
///
/// # Errors
/// If there is no subvolume.
pub fn set_default_subvolume(path: &Path) -> Result<(), MountError> {
    ask(path, &Request::SetDefault).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_a_directory_and_a_name() {
        let place = |path| super::place(Path::new(path)).map(|(at, name)| (at, name.to_owned()));
        assert_eq!(place("/a/b"), Ok(("/a".into(), "b".into())));
        assert_eq!(place("b"), Ok((".".into(), "b".into())));
        assert_eq!(place("a/b/"), Ok(("a".into(), "b".into())));
        assert!(place("/").is_err() && place("..").is_err());
    }
}
