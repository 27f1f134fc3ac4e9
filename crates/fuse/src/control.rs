//! What a program does with a mount, its own or another's: unmount, sync, trim, shut down, and read
//! statistics.
//!
//! Only the root directory of a mount has the attributes [`XATTR_STATISTICS`], [`XATTR_SERVER`] and
//! [`XATTR_SHUTDOWN`]. No listing shows them.
use crate::error::MountError;
use crate::kernel;
use crate::mounting::{self, MountInfo, find_mount};
use crate::owner::as_owner;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};
use std::path::{Path, PathBuf};

/// Extended attribute of a mount's root directory: the volume's statistics as JSON.
pub const XATTR_STATISTICS: &str = "user.cairn.statistics";
/// Extended attribute of a mount's root directory: the process id of its server, in decimal.
pub const XATTR_SERVER: &str = "user.cairn.server";
/// Extended attribute of a mount's root directory, present once the volume was shut down.
pub const XATTR_SHUTDOWN: &str = "user.cairn.shutdown";

/// How long a server may take to end after its mount has ended.
const SERVER_END_SECONDS_MAX: u64 = 60;
/// Type that statfs(2) gives for `fuse` and `fuseblk`.
const FUSE_MAGIC: u64 = 0x6573_5546;
/// Major device number of mounts without a block device.
const ANONYMOUS_MAJOR: u32 = 0;
const XATTR_BYTES_MAX: usize = 64 * 1024;

/// Unmounts `mountpoint`. On return all changes are durable and the server has released the
/// volume.
///
/// # Errors
/// If it is no mount of Cairn, is in use, or its server does not end.
pub fn unmount(mountpoint: &Path) -> Result<(), MountError> {
    let mount = cairn_mount(mountpoint)?;
    let server = server_of(&mount.mountpoint);
    // umount(2) does not reach the server of a plain mount, so its error could not be reported. A
    // dead server does not prevent the unmount.
    if !mount.forwards_sync() && server.is_some() && !is_shut_down(&mount.mountpoint) {
        sync(&mount.mountpoint)?;
    }
    let process = server.and_then(open_other_process);
    mounting::take_away(&mount.mountpoint, false)?;
    if server.is_none() {
        mounting::remove_stale(&mount.device);
    }
    match process {
        Some((process_id, process)) => wait_for_end(&mount, process_id, &process),
        None => Ok(()),
    }
}

/// Makes everything durable that was written below `directory`, which is in a mount of Cairn.
///
/// # Errors
/// If it is not, or something could not be written.
pub fn sync(directory: &Path) -> Result<(), MountError> {
    as_owner(directory, sync_as_oneself)
}

fn sync_as_oneself(directory: &Path) -> Result<(), MountError> {
    let no_answer = |errno| no_answer(directory, errno);
    let open = open_in_mount(directory)?;
    let synced = rustix::fs::syncfs(&open).map_err(no_answer);
    // For `fuseblk` the kernel has waited until all cached data was written, and has then sent a
    // sync request. For plain `fuse` an older kernel has only begun to write, and sends none; the
    // server waits for the rest.
    let device = rustix::fs::fstat(&open).map_err(no_answer)?.st_dev;
    if rustix::fs::major(device) != ANONYMOUS_MAJOR {
        return synced;
    }
    // Even if the kernel reports an error of one file: the other files must be written.
    kernel::request_sync(&open).map_err(no_answer).and(synced)
}

/// Has the server receive everything that was written before to the mount in which `directory` is,
/// before a snapshot or a fork is made: what the kernel caches, and pages of mappings.
///
/// # Errors
/// If it is in no mount of Cairn, or something could not be written.
pub(crate) fn send_cached_data_of(directory: &Path) -> Result<(), MountError> {
    match sync_as_oneself(directory) {
        // Something for a file of another snapshot was refused, which is not in this one. If the
        // volume itself is read-only, the request says so.
        Ok(()) | Err(MountError::NoAnswer { errno: Errno::ROFS, .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Stops the volume that `directory` shows, as a crash would; with `flush`, everything becomes
/// durable first. From then on every request except an unmount fails with EIO. Only root and the
/// server's user may do this.
///
/// # Errors
/// If it is in no mount of Cairn, or not everything became durable; the volume is stopped all the
/// same.
pub fn shut_down(directory: &Path, flush: bool) -> Result<(), MountError> {
    let no_answer = |errno| no_answer(directory, errno);
    let open = open_in_mount(directory)?;
    // The kernel sends its cached data first; the server waits until it has arrived.
    let synced = if flush { rustix::fs::syncfs(&open).map_err(no_answer) } else { Ok(()) };
    kernel::request_shutdown(&open, flush).map_err(no_answer).and(synced)
}

/// Discards the free space of the volume that `directory` shows, so that its image file takes less
/// room. Returns the number of free bytes. Only root and the server's user may do this.
///
/// # Errors
/// If it is in no mount of Cairn, or the volume can't be changed.
pub fn trim(directory: &Path) -> Result<u64, MountError> {
    let no_answer = |errno| no_answer(directory, errno);
    let open = open_in_mount(directory)?;
    kernel::request_trim(&open).map_err(no_answer)
}

/// Whether the volume mounted on `mountpoint` was shut down and its mount has not ended yet.
pub fn is_shut_down(mountpoint: &Path) -> bool {
    as_owner(mountpoint, |mountpoint| attribute(mountpoint, XATTR_SHUTDOWN)).is_ok()
}

/// The root directory of the mount that `path` is in, if its volume was shut down.
pub fn mount_shut_down(path: &Path) -> Option<PathBuf> {
    // The kernel resolves no path in it any more.
    let absolute = std::path::absolute(path).unwrap_or_default();
    let all = path.ancestors().chain(absolute.ancestors());
    let mut named = all.filter(|one| !one.as_os_str().is_empty());
    named.find(|one| is_shut_down(one)).map(Path::to_owned)
}

/// The root directory of the mount of Cairn that `path` is in, also if its server is dead.
pub fn mount_root_of(path: &Path) -> Option<PathBuf> {
    let absolute = std::path::absolute(path).unwrap_or_default();
    let is_root = |one: &&Path| {
        !one.as_os_str().is_empty()
            && find_mount(one).is_ok_and(|found| found.is_some_and(|mount| mount.may_be_cairn()))
    };
    path.ancestors().chain(absolute.ancestors()).find(is_root).map(Path::to_owned)
}

fn no_answer(directory: &Path, errno: Errno) -> MountError {
    match errno {
        Errno::NOTTY => MountError::NotInCairn(directory.to_owned()),
        errno => MountError::NoAnswer { path: directory.to_owned(), errno },
    }
}

/// Opens a directory, which must be in a mount of FUSE.
pub(crate) fn open_in_mount(directory: &Path) -> Result<OwnedFd, MountError> {
    let no_answer = |errno| no_answer(directory, errno);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = rustix::fs::open(directory, flags, Mode::empty())
        .map_err(|errno| unusable(directory, errno).unwrap_or(no_answer(errno)))?;
    let file_system = rustix::fs::fstatfs(&open).map_err(no_answer)?;
    if file_system.f_type as u64 == FUSE_MAGIC {
        Ok(open)
    } else {
        Err(MountError::NotInCairn(directory.to_owned()))
    }
}

/// The problem of the path itself, if it has one.
fn unusable(path: &Path, errno: Errno) -> Option<MountError> {
    if errno == Errno::ACCESS {
        return Some(MountError::MayNotOpen(path.to_owned()));
    }
    let of_path = matches!(errno, Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG);
    of_path.then(|| MountError::PathUnusable { path: path.to_owned(), errno })
}

/// Statistics of the volume mounted on `mountpoint`, as JSON.
///
/// # Errors
/// If it is no mount of Cairn, or does not answer.
pub fn statistics(mountpoint: &Path) -> Result<String, MountError> {
    let mount = cairn_mount(mountpoint)?;
    let value = as_owner(&mount.mountpoint, |mountpoint| attribute(mountpoint, XATTR_STATISTICS))
        .map_err(|errno| match errno {
        Errno::NODATA | Errno::NOTSUP => MountError::NotCairn {
            path: mount.mountpoint.clone(),
            file_system_type: mount.file_system_type.clone(),
        },
        errno => MountError::NoAnswer { path: mount.mountpoint.clone(), errno },
    })?;
    Ok(String::from_utf8_lossy(&value).into_owned())
}

fn cairn_mount(mountpoint: &Path) -> Result<MountInfo, MountError> {
    let not_mounted = || {
        let missing =
            rustix::fs::stat(mountpoint).err().and_then(|errno| unusable(mountpoint, errno));
        missing.unwrap_or_else(|| MountError::NotMounted(mountpoint.to_owned()))
    };
    let mount = find_mount(mountpoint)?.ok_or_else(not_mounted)?;
    if mount.may_be_cairn() {
        return Ok(mount);
    }
    Err(MountError::NotCairn { path: mount.mountpoint, file_system_type: mount.file_system_type })
}

fn attribute(path: &Path, name: &str) -> rustix::io::Result<Vec<u8>> {
    let mut value = vec![0; XATTR_BYTES_MAX];
    let length_bytes = rustix::fs::getxattr(path, name, &mut value[..])?;
    value.truncate(length_bytes);
    Ok(value)
}

/// Process id of a mount's server, if it answers.
fn server_of(mountpoint: &Path) -> Option<u32> {
    let value = as_owner(mountpoint, |mountpoint| attribute(mountpoint, XATTR_SERVER)).ok()?;
    std::str::from_utf8(&value).ok()?.trim().parse().ok()
}

/// A descriptor of a running process other than this one.
fn open_other_process(process_id: u32) -> Option<(u32, OwnedFd)> {
    if process_id == std::process::id() {
        return None;
    }
    let pid = Pid::from_raw(i32::try_from(process_id).ok()?)?;
    Some((process_id, rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?))
}

fn wait_for_end(mount: &MountInfo, process_id: u32, process: &OwnedFd) -> Result<(), MountError> {
    let timeout = Timespec { tv_sec: SERVER_END_SECONDS_MAX as i64, tv_nsec: 0 };
    let running = || MountError::ServerStillRunning {
        path: mount.mountpoint.clone(),
        process_id,
        seconds: SERVER_END_SECONDS_MAX,
    };
    match rustix::event::poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&timeout)) {
        Ok(0) => Err(running()),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(MountError::NoAnswer { path: mount.mountpoint.clone(), errno }),
    }
}
