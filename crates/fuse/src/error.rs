//! Why a mount could not be made, found, used or removed.
use crate::transport::RingFailure;
use rustix::io::Errno;
use std::path::PathBuf;

/// An error of mounting, unmounting, or using a mount.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum MountError {
    #[error("mount point {0} does not exist")]
    MountPointMissing(PathBuf),
    #[error("mount point {0} is not a directory")]
    MountPointNotDirectory(PathBuf),
    #[error("mount point {path} cannot be used: {errno}")]
    MountPointUnusable { path: PathBuf, errno: Errno },
    #[error("mount point {path} is the root of a mount already: {source_shown}")]
    AlreadyMounted { path: PathBuf, source_shown: String },
    #[error("{path} cannot be used as a volume: {errno}")]
    SourceUnusable { path: PathBuf, errno: Errno },
    #[error("{0} is in use: mounted already, or opened exclusively by another program")]
    SourceBusy(PathBuf),
    #[error(
        "/dev/fuse is missing: the kernel has no FUSE, or its module is not loaded (modprobe fuse)"
    )]
    FuseMissing,
    #[error("/dev/fuse cannot be opened: {0}")]
    FuseUnusable(Errno),
    #[error("fusermount3 is missing: users other than root need it to mount (package fuse3)")]
    HelperMissing,
    #[error("fusermount3 failed: {0}")]
    HelperFailed(String),
    #[error("mounting on {path} failed: {errno}")]
    MountFailed { path: PathBuf, errno: Errno },
    #[error("the kernel speaks FUSE {major}.{minor}; 7.{minor_min} or newer is needed")]
    ProtocolTooOld { major: u32, minor: u32, minor_min: u32 },
    #[error("FUSE over io_uring is not available: {0}; or mount with transport=dev")]
    NoRing(RingFailure),
    #[error("the connection to the kernel ended before it was set up")]
    NoConnection,
    #[error("{0} is not the root of a mount")]
    NotMounted(PathBuf),
    #[error("{path} is a mount of type {file_system_type}, not of Cairn")]
    NotCairn { path: PathBuf, file_system_type: String },
    #[error("{0} is not in a mount of Cairn")]
    NotInCairn(PathBuf),
    #[error("{path}: {errno}; name the directory that shows the volume")]
    PathUnusable { path: PathBuf, errno: Errno },
    #[error("{path} was mounted by {by}: only {by} and root may unmount it")]
    MountedByOther { path: PathBuf, by: String },
    #[error("{0} was mounted by root: only root may unmount it")]
    MountedByRoot(PathBuf),
    #[error("{0} is busy: a program has files open in it, or its working directory there")]
    MountBusy(PathBuf),
    #[error("unmounting {path} failed: {errno}")]
    UnmountFailed { path: PathBuf, errno: Errno },
    #[error(
        "{path} is unmounted, but its server, process {process_id}, has not ended after {seconds} s"
    )]
    ServerStillRunning { path: PathBuf, process_id: u32, seconds: u64 },
    #[error(
        "{0}: permission denied: the command opens it, so you need to read it, and to search the \
         directories above it; a mount of another user is for that user alone, without `allow_other`"
    )]
    MayNotOpen(PathBuf),
    #[error("the mount {path} does not answer: {errno}")]
    NoAnswer { path: PathBuf, errno: Errno },
    #[error("the server of {0} is another build of cairn: unmount the volume and mount it again")]
    OtherBuild(PathBuf),
    #[error("{path}: {errno}")]
    Refused { path: PathBuf, errno: Errno },
    #[error("the list of mounts cannot be read: {0}")]
    MountTable(String),
}
