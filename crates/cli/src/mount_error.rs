//! What an error of a mount means to its user, and what to do about it.
use crate::image::Image;
use crate::shell::{self, quoted};
use crate::signature;
use anyhow::anyhow;
use cairn_engine::Error;
use cairn_fuse::MountError;
use rustix::fs::StatVfsMountFlags;
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
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
        MountError::NoAnswer { path, errno: errno @ (Errno::NOTCONN | Errno::CONNABORTED) } => {
            server_has_ended(&path, errno)
        }
        MountError::NoAnswer { path, errno: Errno::PERM } => anyhow!(
            "{}: only root and the user who has mounted the volume may do this",
            shown(&path)
        ),
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
            match errno {
                Errno::IO => refuse_shut_down(&path)?,
                Errno::NOTCONN | Errno::CONNABORTED => return Err(server_has_ended(&path, errno)),
                Errno::NOTDIR | Errno::INVAL => refuse_image(&path)?,
                _ => {}
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
        "the volume of {root} was shut down; run `{}`, then mount the image again",
        shell::command("cairn umount", &[&root])
    ))
}

/// Refuses the image of a volume where a directory of its mount is meant.
fn refuse_image(path: &Path) -> anyhow::Result<()> {
    let may_be_image =
        path.metadata().is_ok_and(|found| found.is_file() || found.file_type().is_block_device());
    let file = may_be_image.then(|| File::open(path).ok()).flatten();
    let Some(found) = file.and_then(|file| signature::recognise(&file).ok().flatten()) else {
        return Ok(());
    };
    let is_volume = found == signature::CAIRN || found == signature::MEMBER;
    if !is_volume {
        return Ok(());
    }
    let mount = match cairn_fuse::mount_point_of(path) {
        Some(directory) => format!("it is mounted on {}", shown(&directory)),
        None => "mount it (`cairn mount IMAGE DIR`)".to_owned(),
    };
    Err(anyhow!(
        "{} is {found}, and no directory: {mount}; name a directory of the mount",
        shown(path)
    ))
}

/// What a mount is whose server was killed: before a command, or, with ECONNABORTED, during it.
pub fn server_has_ended(path: &Path, errno: Errno) -> anyhow::Error {
    let root = cairn_fuse::mount_root_of(path).unwrap_or_else(|| path.to_owned());
    let root = shown(&root);
    let during = match errno {
        Errno::CONNABORTED => ", and shows whether this command has taken effect",
        _ => "",
    };
    anyhow!(
        "the server of the mount {root} has ended; remove the mount with `{}`, then mount the \
         image again: that recovers the volume{during}",
        shell::command("cairn umount", &[&root])
    )
}

/// Why nothing changes in a directory (EROFS).
pub fn read_only(directory: &Path) -> &'static str {
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let status = rustix::fs::statvfs(directory);
    match status.is_ok_and(|status| status.f_flag.contains(StatVfsMountFlags::RDONLY)) {
        true => "the volume is mounted read-only",
        false => "its directory belongs to snapshots, which nothing changes",
    }
}
