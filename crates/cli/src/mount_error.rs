//! What an error of a mount means to its user, and what to do about it.
use crate::commands::fsck::quoted;
use crate::image::Image;
use anyhow::anyhow;
use cairn_engine::Error;
use cairn_fuse::MountError;
use rustix::io::Errno;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What to do on a full volume.
pub const MAKE_ROOM: &str = "remove files, or delete snapshots, forks, and subvolumes from before \
                             a rollback; `cairn stats DIR` names them";

/// A path in a message: another one for each path.
pub fn shown(path: &Path) -> String {
    cairn_fsck::shown_path(path.as_os_str().as_bytes())
}

/// The error of a volume that could not be opened, or of a part without which it is of no use.
pub fn of_volume(error: Error, image: &Image, part: Option<&str>) -> anyhow::Error {
    let place = part.map_or_else(|| image.to_string(), |part| format!("{image}: {part}"));
    match error {
        Error::Damaged(damage) if !damage.problem.contains("cairn fsck") => anyhow!(
            "{place}: {damage}; `cairn fsck {}` shows all damage, and what helps",
            quoted(&image.to_string())
        ),
        error => anyhow::Error::new(error).context(place),
    }
}

/// The error of a mount that is to stay.
pub fn explain(error: MountError) -> anyhow::Error {
    match error {
        MountError::NoAnswer { path, errno: Errno::NOTCONN } => server_has_ended(&path),
        MountError::NoAnswer { ref path, errno: Errno::IO } => {
            refuse_shut_down(path).err().unwrap_or_else(|| after_unmount(error))
        }
        error @ MountError::AlreadyMounted { .. } => {
            anyhow!("{error}; unmount it first, or use another directory")
        }
        error => after_unmount(error),
    }
}

/// The path and the errno with which a mount has refused a request, for a command that says what
/// that means there.
///
/// # Errors
/// The explanation of what means the same for every command.
pub fn refusal(error: MountError) -> anyhow::Result<(PathBuf, Errno)> {
    match error {
        MountError::Refused { path, errno } | MountError::PathUnusable { path, errno } => {
            if errno == Errno::IO {
                refuse_shut_down(&path)?;
            }
            Ok((path, errno))
        }
        error => Err(explain(error)),
    }
}

/// The same for a mount that is gone, so that no advice is needed.
pub fn after_unmount(error: MountError) -> anyhow::Error {
    match error {
        // syncfs(2) reports once, to its first caller, that the kernel could not write something
        // from its page cache; ROFS: into a file of a snapshot.
        MountError::NoAnswer {
            path,
            errno: errno @ (Errno::NOSPC | Errno::DQUOT | Errno::IO | Errno::ROFS),
        } => {
            anyhow!(
                "{}: the data of a file could not be written, now or earlier: {errno}",
                shown(&path)
            )
        }
        error => error.into(),
    }
}

/// Refuses what is in a volume that was shut down: nothing of it can become durable any more, and
/// the shutdown reported to its caller what was lost.
pub fn refuse_shut_down(path: &Path) -> anyhow::Result<()> {
    let Some(root) = cairn_fuse::mount_shut_down(path) else { return Ok(()) };
    let root = shown(&root);
    Err(anyhow!(
        "the volume of {root} was shut down; run `cairn umount {root}`, then mount the image again"
    ))
}

/// What a mount point is whose server was killed.
pub fn server_has_ended(path: &Path) -> anyhow::Error {
    let path = shown(path);
    anyhow!(
        "the server of the mount {path} has ended; remove the mount with `cairn umount {path}`, then mount the image again"
    )
}
