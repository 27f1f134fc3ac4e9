//! `cairn rollback`: has a subvolume of a mounted volume become what one of its snapshots holds.
use crate::{mount_error, shell};
use anyhow::bail;
use cairn_fuse::{MountError, subvolumes};
use cairn_harness::console;
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Have a subvolume become what one of its snapshots holds, at once.
///
/// PATH leads to a writable copy of the snapshot then, which shares its blocks. What PATH was
/// before stands beside it as `PATH~before-rollback-1` (or the next number that is free), with all
/// that is in it, nested subvolumes too: programs that have files open there, or work there, go on
/// with it. It is durable when the command returns; after a crash before that, nothing or all of it
/// has happened. For the owner of the subvolume, root, and the user of the mount.
///
/// Nothing may be mounted below PATH.
///
/// All snapshots stay with PATH, as a schedule does. So a rollback to another one goes forward
/// again, and `mv` exchanges the names back. `cairn subvolume delete` removes what is not needed.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Root directory of a subvolume, but not that of the mount.
    path: PathBuf,
    /// Name of one of its snapshots.
    snapshot: OsString,
}

const EXAMPLES: &str = "\
Examples:
  cairn rollback /mnt/home before-update
  cairn diff /mnt/home~before-rollback-1 /mnt/home
  cairn snapshot list /mnt/home";

/// Runs the command.
///
/// # Errors
/// When it is in no mount of Cairn, or the volume refuses.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { path, snapshot } = arguments;
    let shown = mount_error::shown;
    // The kernel would unmount it without a word.
    if let [first, ..] = &cairn_fuse::mount_points_below(path)?[..]
        && subvolumes::subvolume_at(path).is_ok()
    {
        bail!(
            "nothing was changed: something is mounted below {}, and a rollback would unmount it; \
             unmount it first: `{}`",
            shown(path),
            shell::command("umount", &[shown(first)])
        );
    }
    let done = subvolumes::rollback(path, snapshot.as_bytes())
        .map_err(|error| explain(path, snapshot, error))?;
    let mut text = format!(
        "{} is what the snapshot {} holds; before, it was what is in {} now",
        shown(&done.new),
        cairn_fsck::shown_path(snapshot.as_bytes()),
        shown(&done.old)
    );
    if done.has_nested {
        text += "\nother subvolumes are nested there, and stayed there";
    }
    console::print_text(&text)?;
    if works_in(&done.old) {
        console::tell(&format_args!(
            "cairn: your working directory is in {} now; `{}` goes to what the snapshot holds",
            shown(&done.old),
            shell::command("cd", &[shown(&done.new)])
        ));
    }
    Ok(())
}

/// Whether the caller's working directory is in this one.
fn works_in(directory: &Path) -> bool {
    let here = std::env::current_dir();
    let directory = directory.canonicalize();
    here.is_ok_and(|here| directory.is_ok_and(|directory| here.starts_with(directory)))
}

/// What an error means here, and what to do.
fn explain(path: &Path, snapshot: &OsStr, error: MountError) -> anyhow::Error {
    let errno = match mount_error::refusal(error) {
        Ok((_, errno)) => errno,
        Err(explained) => return explained,
    };
    let why = mount_error::read_only(path.parent().unwrap_or(Path::new("/")));
    let (path, snapshot) = (mount_error::shown(path), cairn_fsck::shown_path(snapshot.as_bytes()));
    let below = |name: &str| format!("{path}/{name}");
    let new = below("NEW");
    let reason = match errno {
        Errno::INVAL | Errno::NOTDIR => format!(
            "{path} is not the root directory of a subvolume: only subvolumes can be rolled back \
             (`cairn subvolume list` shows them)"
        ),
        Errno::NODATA => {
            let list = shell::command("cairn snapshot list", &[&path]);
            format!("{path} has no snapshot {snapshot}; `{list}` shows them")
        }
        Errno::BUSY => format!(
            "{path} is the root of a mount, and no name in it leads there, so it can't be given \
             another one. Fork the snapshot, and have later mounts show the fork: `{}`, `{}`, then \
             unmount and mount the volume. `-o subvolume=ID` shows the old one again",
            shell::command("cairn fork", &[&below(&format!(".snapshots/{snapshot}")), &new]),
            shell::command("cairn subvolume set-default", &[&new])
        ),
        Errno::NOSPC => {
            format!("nothing was changed: the volume is full; {}", mount_error::MAKE_ROOM)
        }
        Errno::PERM => {
            format!("{path} is not yours: only its owner and root may roll it back")
        }
        Errno::ACCESS => {
            format!("nothing was changed: names in the directory of {path} are not yours to change")
        }
        Errno::MLINK => "no number is left for a subvolume; delete some, then mount the volume \
                         again"
            .to_owned(),
        Errno::ROFS => format!("{path} was not rolled back: {why}"),
        errno => format!("{path}: {errno}"),
    };
    anyhow::anyhow!(reason)
}
