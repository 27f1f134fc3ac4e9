//! `fusermount3`: the set-uid program by which users other than root mount. It opens `/dev/fuse`,
//! mounts, and sends the descriptor over the socket in `_FUSE_COMMFD`.
use super::{MountOptions, find_mount};
use crate::error::MountError;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::FdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
};
use std::io::{ErrorKind, IoSliceMut};
use std::mem::MaybeUninit;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const PROGRAM: &str = "fusermount3";

/// Mounts `source` as `fuse.cairn`. Returns the descriptor of the connection.
pub fn mount(
    source: &Path,
    mountpoint: &Path,
    wanted: &MountOptions,
) -> Result<OwnedFd, MountError> {
    let shown = source.to_string_lossy().replace('\\', r"\\").replace(',', r"\,");
    let mut options = format!(
        "fsname={shown},subtype=cairn,default_permissions,max_read={}",
        crate::transport::TRANSFER_BYTES_MAX
    );
    if wanted.allow_other {
        options.push_str(",allow_other");
    }
    if wanted.read_only {
        options.push_str(",ro");
    }
    options.push_str(&wanted.kernel.helper_options());
    let failed = |errno: rustix::io::Errno| MountError::HelperFailed(errno.to_string());
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed)?;
    rustix::io::fcntl_setfd(&theirs, FdFlags::empty()).map_err(failed)?;
    let mut command = Command::new(PROGRAM);
    command
        .arg("-o")
        .arg(options)
        .arg("--")
        .arg(mountpoint)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string());
    run(command)?;
    drop(theirs);
    receive_descriptor(&ours)
}

/// Unmounts `mountpoint`.
pub fn unmount(mountpoint: &Path, detach: bool) -> Result<(), MountError> {
    let mut command = Command::new(PROGRAM);
    command.args(if detach { &["-u", "-z", "--"][..] } else { &["-u", "--"] }).arg(mountpoint);
    run(command).map_err(|error| match error {
        MountError::HelperFailed(message) if message.contains("busy") => {
            MountError::MountBusy(mountpoint.to_owned())
        }
        other => of_other_user(mountpoint).unwrap_or(other),
    })
}

/// The helper unmounts only what its caller has mounted; for other mounts it reports that they are
/// in no table.
fn of_other_user(mountpoint: &Path) -> Option<MountError> {
    let user = find_mount(mountpoint).ok()??.user?;
    let path = || mountpoint.to_owned();
    match user {
        0 => Some(MountError::MountedByRoot(path())),
        user if user == rustix::process::getuid().as_raw() => None,
        user => Some(MountError::MountedByOther { path: path(), by: format!("user {user}") }),
    }
}

fn run(mut command: Command) -> Result<(), MountError> {
    let Output { status, stderr, .. } = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .map_err(|error| match error.kind() {
            ErrorKind::NotFound => MountError::HelperMissing,
            _ => MountError::HelperFailed(error.to_string()),
        })?;
    if status.success() {
        return Ok(());
    }
    let message =
        String::from_utf8_lossy(&stderr).trim().trim_start_matches("fusermount3: ").to_owned();
    Err(MountError::HelperFailed(if message.is_empty() { status.to_string() } else { message }))
}

fn receive_descriptor(socket: &OwnedFd) -> Result<OwnedFd, MountError> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )
    .map_err(|errno| MountError::HelperFailed(format!("no descriptor arrived: {errno}")))?;
    control
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        })
        .ok_or_else(|| MountError::HelperFailed("no descriptor arrived".into()))
}
