//! `cairn diff`: shows what differs between snapshots of a subvolume of a mounted volume, or
//! between a snapshot and the subvolume as it is now.
//!
//! Exit codes are those of diff(1).
use crate::mount_error;
use anyhow::Context;
use cairn_fuse::MountError;
use cairn_fuse::differences::{self, Changes, Compared, Difference, DifferenceKind};
use cairn_harness::console;
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Something differs.
const EXIT_DIFFERENT: u8 = 1;
/// They could not be compared.
pub const EXIT_FAILURE: u8 = 2;

/// What differs between two snapshots of a subvolume, or a snapshot and the subvolume.
///
/// The time is in proportion to what differs, but for the search for the names of changed files.
/// Of each path there is a line, below the root directory of the subvolume, which itself is ".":
///
///   R OLD -> PATH       was moved or renamed, with what is in it
///   M PATH (WHAT, …)    has changed: data, mode, owner, xattrs, times; or was replaced
///   + PATH              is new
///   - PATH              is gone
///
/// A file that was written counts as changed, also if its content is the same. Times of last access
/// are not compared. Nested subvolumes are left out. For root and the user of the mount.
///
/// The exit code is 0 if nothing differs, 1 if something does, 2 after an error: also if damage of
/// the volume hides some differences, and the others are listed.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, verbatim_doc_comment)]
pub struct Arguments {
    /// Root directory of a snapshot, or of a subvolume.
    old: PathBuf,
    /// Another one of the same subvolume.
    new: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  cairn diff /mnt/.snapshots/home/monday /mnt/.snapshots/home/tuesday
  cairn diff /mnt/.snapshots/home/monday /mnt/home";

/// Runs the command.
///
/// # Errors
/// When they are not of one subvolume of a mount of Cairn, or can't be read.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { old, new, json } = arguments;
    let Compared { differences: found, damage } =
        differences::differences(old, new).map_err(|error| explain(old, new, error))?;
    if *json {
        let shown: Vec<_> = found.iter().map(Shown::new).collect();
        console::print_text(&serde_json::to_string_pretty(&shown).context("JSON")?)?;
    } else if !found.is_empty() {
        console::print_text(&found.iter().map(line).collect::<Vec<_>>().join("\n"))?;
    }
    if !damage.is_empty() {
        for one in &damage {
            console::tell(&format_args!("cairn: {one}"));
        }
        let [old, new] = [&**old, new].map(mount_error::shown);
        anyhow::bail!(
            "{old} and {new} could not be compared where the volume is damaged: more may differ \
             than is listed; unmount the volume, then `cairn fsck IMAGE` shows all damage, and \
             what helps"
        );
    }
    Ok(if found.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_DIFFERENT) })
}

/// A difference in JSON, with paths as [`cairn_fsck::shown_path`] shows them.
#[derive(serde::Serialize)]
struct Shown {
    path: String,
    /// `added`, `removed`, `moved` or `changed`.
    kind: &'static str,
    /// Of what was moved, the path before.
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    /// Of what has changed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    changes: Vec<&'static str>,
}

impl Shown {
    fn new(difference: &Difference) -> Self {
        let (kind, from, changes) = match &difference.kind {
            DifferenceKind::Removed => ("removed", None, Vec::new()),
            DifferenceKind::Added => ("added", None, Vec::new()),
            DifferenceKind::Moved { from } => {
                ("moved", Some(cairn_fsck::shown_path(from)), Vec::new())
            }
            DifferenceKind::Changed(changes) => ("changed", None, names(*changes)),
        };
        Self { path: cairn_fsck::shown_path(&difference.path), kind, from, changes }
    }
}

/// What has changed, in words.
fn names(changes: Changes) -> Vec<&'static str> {
    let Changes { replaced, data, mode, owner, xattrs, times } = changes;
    let named = [
        (replaced, "replaced"),
        (data, "data"),
        (mode, "mode"),
        (owner, "owner"),
        (xattrs, "xattrs"),
        (times, "times"),
    ];
    named.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name).collect()
}

fn line(difference: &Difference) -> String {
    let path = cairn_fsck::shown_path(&difference.path);
    match &difference.kind {
        DifferenceKind::Removed => format!("- {path}"),
        DifferenceKind::Added => format!("+ {path}"),
        DifferenceKind::Moved { from } => {
            format!("R {} -> {path}", cairn_fsck::shown_path(from))
        }
        DifferenceKind::Changed(changes) => format!("M {path} ({})", names(*changes).join(", ")),
    }
}

/// What an error means here, and what to do.
fn explain(old: &Path, new: &Path, error: MountError) -> anyhow::Error {
    let (path, errno) = match mount_error::refusal(error) {
        Ok(refusal) => refusal,
        Err(explained) => return explained,
    };
    let [old, new, path] = [old, new, &*path].map(mount_error::shown);
    let reason = match errno {
        Errno::NOENT => format!("{path} does not exist; `cairn snapshot list` shows snapshots"),
        Errno::INVAL | Errno::NOTDIR => format!(
            "{path} is not the root directory of a subvolume or snapshot: name the \
             directory of a subvolume, or DIR/.snapshots/PATH/NAME"
        ),
        Errno::XDEV => format!(
            "{old} and {new} are not of the same subvolume, so they have nothing in common to \
             compare"
        ),
        Errno::PERM => format!(
            "differences name files in directories that you may not read: only root and the user \
             of the mount compare {old} and {new}"
        ),
        Errno::STALE => "a snapshot was deleted meanwhile, or the server waited too long for this \
                         command; run it again"
            .to_owned(),
        Errno::NOSPC | Errno::MLINK => format!(
            "a subvolume is compared through a temporary snapshot, for which the volume has no \
             room: compare two snapshots, or {}",
            mount_error::MAKE_ROOM
        ),
        errno => format!("{path}: {errno}"),
    };
    anyhow::anyhow!(reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_what_differs() {
        let all = Changes {
            replaced: true,
            data: true,
            mode: true,
            owner: true,
            xattrs: true,
            times: true,
        };
        let shown = |kind| line(&Difference { path: b"a/\xff\n".to_vec(), kind });
        let path = cairn_fsck::shown_path(b"a/\xff\n");
        assert!(!path.contains('\n'));
        assert_eq!(shown(DifferenceKind::Removed), format!("- {path}"));
        assert_eq!(shown(DifferenceKind::Moved { from: b"b".to_vec() }), format!("R b -> {path}"));
        assert_eq!(
            shown(DifferenceKind::Changed(all)),
            format!("M {path} (replaced, data, mode, owner, xattrs, times)")
        );
    }
}
