//! `cairn fork`: makes a writable copy of a subvolume or snapshot of a mounted volume.
use crate::mount_error;
use cairn_fuse::{MountError, subvolumes};
use rustix::io::Errno;
use std::path::{Path, PathBuf};

/// Make a writable copy of a subvolume, or of a snapshot, that copies nothing.
///
/// The fork is a subvolume that begins as SOURCE is now, with everything that was written before.
/// Both share their blocks until one of them changes. Other subvolumes that are nested in SOURCE
/// are left out. It is durable when the command returns, unless --early is given. For the owner of
/// SOURCE, root, and the user of the mount.
///
/// `cairn subvolume delete` removes it again: that costs what it has changed, however large it is.
/// SOURCE can be deleted before its forks. What they have of it keeps its space as long.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Root directory of a subvolume, or of a snapshot in `.snapshots`.
    source: PathBuf,
    /// Directory that does not exist yet, in the same mount.
    new: PathBuf,
    /// Return before the fork is durable. A crash soon afterwards may leave nothing of it. An fsync
    /// of anything in it makes it durable, and so does `cairn sync`.
    #[arg(long)]
    early: bool,
}

const EXAMPLES: &str = "\
Examples:
  cairn fork /mnt/project /mnt/trial
  cairn fork /mnt/.snapshots/project/before-update /mnt/as-before
  cairn subvolume delete /mnt/trial";

/// Runs the command.
///
/// # Errors
/// When it is in no mount of Cairn, or the volume refuses.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { source, new, early } = arguments;
    subvolumes::fork(source, new, *early).map_err(|error| explain(source, new, error))
}

/// What an error means here, and what to do.
fn explain(source: &Path, new: &Path, error: MountError) -> anyhow::Error {
    let (path, errno) = match mount_error::refusal(error) {
        Ok(refusal) => refusal,
        Err(explained) => return explained,
    };
    let is_new = path == new;
    let why = mount_error::read_only(new.parent().unwrap_or(Path::new("/")));
    let is_subvolume = errno == Errno::EXIST && subvolumes::subvolume_at(new).is_ok();
    let (path, source) = (mount_error::shown(&path), mount_error::shown(source));
    match errno {
        Errno::INVAL if is_new => anyhow::anyhow!("{path} has no name for a subvolume"),
        Errno::INVAL => anyhow::anyhow!(
            "{path} is not the root directory of a subvolume or snapshot: only these can be forked \
             (`cairn subvolume list` and `cairn snapshot list` show them)"
        ),
        Errno::XDEV => anyhow::anyhow!("{path} is not in the same mount as {source}"),
        Errno::PERM => anyhow::anyhow!(
            "{source}, or the subvolume that it is a snapshot of, is not yours: only the owner and \
             root may fork it"
        ),
        Errno::MLINK => anyhow::anyhow!(
            "{path} was not made: no number is left for a subvolume; delete some, then mount the \
             volume again"
        ),
        Errno::NOSPC => {
            anyhow::anyhow!("{path} was not made: the volume is full; {}", mount_error::MAKE_ROOM)
        }
        Errno::ROFS => anyhow::anyhow!("{path} was not made: {why}"),
        Errno::EXIST if is_subvolume => anyhow::anyhow!("{path} is a subvolume already"),
        Errno::EXIST => anyhow::anyhow!("{path} exists already"),
        errno => anyhow::anyhow!("{path}: {errno}"),
    }
}
