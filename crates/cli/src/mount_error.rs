//! What an error of a mount means to its user, and what to do about it.
use crate::commands::fsck::quoted;
use crate::image::Image;
use anyhow::{anyhow, ensure};
use cairn_engine::Error;
use cairn_fuse::MountError;
use rustix::io::Errno;
use std::path::Path;

/// What to do on a full volume.
pub const MAKE_ROOM: &str = "remove files, or delete snapshots, forks, and subvolumes from before \
                             a rollback; `cairn stats DIR` names them";

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
        error @ MountError::AlreadyMounted { .. } => {
            anyhow!("{error}; unmount it first, or use another directory")
        }
        error => after_unmount(error),
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
                path.display()
            )
        }
        error => error.into(),
    }
}

/// Refuses a volume that was shut down: nothing of it can become durable any more, and the shutdown
/// reported to its caller what was lost.
pub fn refuse_shut_down(path: &Path) -> anyhow::Result<()> {
    let shown = path.display();
    ensure!(
        !cairn_fuse::is_shut_down(path),
        "the volume of {shown} was shut down; run `cairn umount {shown}`, then mount the image again"
    );
    Ok(())
}

/// What a mount point is whose server was killed.
pub fn server_has_ended(path: &Path) -> anyhow::Error {
    let path = path.display();
    anyhow!(
        "the server of the mount {path} has ended; remove the mount with `cairn umount {path}`, then mount the image again"
    )
}
