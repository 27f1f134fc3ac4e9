//! `cairn apply`: applies what has changed in a fork to the subvolume that it came from.
//!
//! Exit codes are like those of diff(1) and merge tools.
use crate::{mount_error, shell};
use anyhow::Context;
use cairn_fuse::MountError;
use cairn_fuse::apply::{
    self, Application, AppliedCounts, Conflict, ConflictKind, Outcome, Winner,
};
use cairn_fuse::subvolumes::{self, Subvolume};
use cairn_harness::console;
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// There are conflicts, and nothing was changed.
const EXIT_CONFLICTS: u8 = 1;
/// Nothing was changed, for another reason.
pub const EXIT_FAILURE: u8 = 2;

/// Apply what has changed in a fork to the subvolume that it came from (the origin).
///
/// New, changed, moved and removed files and directories of FORK become so in the origin, which may
/// have changed, too, and stays in use: programs see the new content, also in files that they have
/// open. All of it happens at once or, after a crash, nothing, and it is durable when the command
/// returns. FORK stays as it is. A second time there is nothing left to apply.
///
/// Directories are merged name by name, files are taken as a whole. Where both sides have changed
/// the same file, attribute of a directory, or name, in different ways, that is a conflict: the
/// command lists the paths, and changes nothing. `--theirs` and `--ours` decide conflicts. Nested
/// subvolumes are left out. For root and the user of the mount.
///
/// The exit code is 0 if all of it is applied, 1 if there are conflicts, 2 after an error.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Root directory of a fork.
    fork: PathBuf,
    /// Root directory of the subvolume that gets the changes, if FORK came from one that was rolled
    /// back: that one, or what has its place.
    origin: Option<PathBuf>,
    /// Decide conflicts for the fork: what it has replaces what the origin has.
    #[arg(long, conflicts_with = "ours")]
    theirs: bool,
    /// Decide conflicts for the origin: it keeps what it has, and takes everything else.
    #[arg(long)]
    ours: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  cairn fork /mnt/project /mnt/trial
  cairn diff /mnt/project /mnt/trial
  cairn apply /mnt/trial
  cairn apply --theirs /mnt/trial
  cairn subvolume delete /mnt/trial";

/// Runs the command.
///
/// # Errors
/// When it is no fork in a mount of Cairn, or the volume refuses.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { fork, origin, theirs, ours, json } = arguments;
    let winner = match (theirs, ours) {
        (true, _) => Winner::Fork,
        (_, true) => Winner::Origin,
        (false, false) => Winner::Neither,
    };
    let Application { target, outcome } =
        apply::apply(fork, origin.as_deref(), winner).map_err(|error| explain(fork, error))?;
    if *json {
        let shown = serde_json::to_string_pretty(&Shown::new(&target, &outcome));
        console::print_text(&shown.context("JSON")?)?;
    }
    let origin = named(fork, &target);
    match outcome {
        Outcome::Applied(counts) => {
            if !json {
                console::print_text(&applied(fork, &origin, counts))?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Outcome::Conflicts(conflicts) => {
            if !json {
                let lines: Vec<String> =
                    conflicts.iter().map(|one| line(one, winner, &origin)).collect();
                console::print_text(&lines.join("\n"))?;
                console::tell(&format_args!(
                    "cairn: {}",
                    advice(fork, winner, &origin, &conflicts)
                ));
            }
            Ok(ExitCode::from(EXIT_CONFLICTS))
        }
    }
}

/// How the origin is called: by its path where the user can reach it, also through a bind mount.
fn named(fork: &Path, target: &Subvolume) -> String {
    let Some(of_target) = &target.path else { return format!("the subvolume {}", target.id) };
    let of_fork = subvolumes::subvolume_at(fork).ok().and_then(|found| found.path);
    let real = std::fs::canonicalize(fork).ok();
    let reached = of_fork.and_then(|of_fork| {
        let beside = |fork| beside(fork, &of_fork, of_target);
        let mut paths = [Some(fork), real.as_deref()].into_iter().flatten().filter_map(beside);
        paths.find(|path| {
            subvolumes::subvolume_at(path).is_ok_and(|found| found.uuid == target.uuid)
        })
    });
    match reached {
        Some(path) => mount_error::shown(&path),
        None => {
            let fork = mount_error::shown(fork);
            format!("the subvolume that {fork} came from")
        }
    }
}

/// Where one subvolume should be if `fork` leads to another one; of both, the path in a mount.
fn beside(fork: &Path, of_fork: &Path, of_target: &Path) -> Option<PathBuf> {
    let pairs = of_fork.components().zip(of_target.components());
    let common = pairs.take_while(|(one, other)| one == other).count();
    let above = fork.ancestors().nth(of_fork.components().count() - common)?;
    let below: PathBuf = of_target.components().skip(common).collect();
    Some(if below.as_os_str().is_empty() { above.to_owned() } else { above.join(below) })
}

/// What was done, in JSON, with paths as [`cairn_fsck::shown_path`] shows them.
#[derive(serde::Serialize)]
struct Shown {
    /// Of the origin.
    subvolume: u64,
    /// Below the root of the mount, if it is there.
    path: Option<String>,
    applied: bool,
    /// Names that came or went.
    names: u64,
    /// Files and directories that have changed or are gone.
    files: u64,
    conflicts: Vec<ShownConflict>,
}

#[derive(serde::Serialize)]
struct ShownConflict {
    path: String,
    /// `both_changed`, `removed_in_origin`, `removed_in_fork`, `both_named`, `both_moved`, `loop`.
    kind: &'static str,
    /// The directory above it that one side has removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    removed: Option<String>,
    /// `--theirs` and `--ours` decide it.
    can_be_decided: bool,
}

impl Shown {
    fn new(target: &Subvolume, outcome: &Outcome) -> Self {
        let (applied, AppliedCounts { names, inodes: files }, conflicts) = match outcome {
            Outcome::Applied(counts) => (true, *counts, &[][..]),
            Outcome::Conflicts(conflicts) => (false, AppliedCounts::default(), &conflicts[..]),
        };
        let conflict = |conflict: &Conflict| ShownConflict {
            path: cairn_fsck::shown_path(&conflict.path),
            kind: match conflict.kind {
                ConflictKind::BothChanged => "both_changed",
                ConflictKind::RemovedInOrigin => "removed_in_origin",
                ConflictKind::RemovedInFork => "removed_in_fork",
                ConflictKind::BothNamed => "both_named",
                ConflictKind::BothMoved => "both_moved",
                ConflictKind::Loop => "loop",
            },
            removed: conflict.removed.as_deref().map(cairn_fsck::shown_path),
            can_be_decided: conflict.kind.can_be_decided(),
        };
        Self {
            subvolume: target.id,
            path: target.path.as_deref().map(mount_error::shown),
            applied,
            names,
            files,
            conflicts: conflicts.iter().map(conflict).collect(),
        }
    }
}

/// So many of something.
fn count(number: u64, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
}

fn applied(fork: &Path, origin: &str, counts: AppliedCounts) -> String {
    let fork = mount_error::shown(fork);
    if counts == AppliedCounts::default() {
        return format!("{origin} has all changes of {fork} already: nothing was changed");
    }
    let AppliedCounts { names, inodes } = counts;
    format!(
        "{origin} has the changes of {fork} now: {} came or went, {} changed",
        count(names, "name", "names"),
        count(inodes, "file or directory", "files and directories"),
    )
}

fn line(conflict: &Conflict, winner: Winner, origin: &str) -> String {
    let path = cairn_fsck::shown_path(&conflict.path);
    let removed = conflict.removed.as_deref().map(cairn_fsck::shown_path);
    let meaning = match conflict.kind {
        ConflictKind::BothChanged => "changed in both, in different ways".to_owned(),
        ConflictKind::RemovedInOrigin if let Some(removed) = &removed => match winner {
            Winner::Fork => format!(
                "it is in the directory {removed}, which was removed in {origin}: move what is new \
                 there to another directory of the fork"
            ),
            _ => format!(
                "new or changed in the fork; the directory {removed} was removed in {origin}"
            ),
        },
        ConflictKind::RemovedInFork if let Some(removed) = &removed => match winner {
            Winner::Fork => format!(
                "the directory {removed} was removed in the fork, and this is in it in {origin}: \
                 remove that first"
            ),
            _ => format!("changed in {origin}; the directory {removed} was removed in the fork"),
        },
        ConflictKind::RemovedInOrigin if winner == Winner::Fork => format!(
            "it is, or is in, a directory that was removed in {origin}: move what is new there to \
             another directory of the fork"
        ),
        ConflictKind::RemovedInOrigin => {
            format!("new or changed in the fork, removed in {origin}")
        }
        ConflictKind::RemovedInFork if winner == Winner::Fork => {
            format!("removed in the fork, and something is in it in {origin}: remove that first")
        }
        ConflictKind::RemovedInFork => format!("removed in the fork, changed in {origin}"),
        ConflictKind::BothNamed => "both have something else with this name".to_owned(),
        ConflictKind::BothMoved => {
            "moved or renamed in both, to different places: give it the same name in both"
                .to_owned()
        }
        ConflictKind::Loop => {
            "a directory would stand below itself: move it back in one of them".to_owned()
        }
    };
    format!("{path}: {meaning}")
}

/// What to do about conflicts that are left with this winner.
fn advice(fork: &Path, winner: Winner, origin: &str, conflicts: &[Conflict]) -> String {
    let fork = mount_error::shown(fork);
    let all = conflicts.len() as u64;
    let mut text = format!("nothing was changed: {}", count(all, "conflict", "conflicts"));
    let open = conflicts.iter().filter(|conflict| !conflict.kind.can_be_decided()).count() as u64;
    let option = match winner {
        Winner::Neither => None,
        Winner::Fork => Some("--theirs"),
        Winner::Origin => Some("--ours"),
    };
    if let Some(option) = option {
        text += &format!(
            " that `{option}` does not decide: change {fork} or {origin} so that they agree there"
        );
        if winner == Winner::Fork && open < all {
            text += ", or keep what is there with `--ours`";
        }
        return text;
    }
    if open > 0 {
        let those = if open == all { String::new() } else { format!(", {open} of them") };
        text += &format!(
            "{those} that no option decides: mend {} by hand as said above",
            if open == 1 { "it" } else { "them" }
        );
    }
    if open < all {
        let others = if open > 0 { "; for the others, " } else { "; " };
        text += &format!(
            "{others}`--theirs` takes what {fork} has, `--ours` keeps what {origin} has. To have \
             parts of both, merge them by hand in {fork}, then run `cairn apply --theirs`"
        );
    }
    text
}

/// What an error means here, and what to do.
fn explain(fork: &Path, error: MountError) -> anyhow::Error {
    let (path, errno) = match mount_error::refusal(error) {
        Ok(refusal) => refusal,
        Err(explained) => return explained,
    };
    let is_of_fork = path == fork;
    let continues = || subvolumes::subvolume_at(&path).is_ok_and(|found| found.continues);
    let (fork, path) = (mount_error::shown(fork), mount_error::shown(&path));
    let reason = match errno {
        Errno::NOENT => format!("{path} does not exist; `cairn subvolume list` shows forks"),
        Errno::INVAL | Errno::NOTDIR if !is_of_fork => {
            format!("{path} is not the root directory of a subvolume")
        }
        Errno::XDEV => format!(
            "nothing was changed: the subvolume that is to get the changes is not the one that \
             {fork} came from, nor one that a rollback has put in its place"
        ),
        Errno::NOTUNIQ => format!(
            "nothing was changed: the subvolume that {fork} came from was rolled back, and several \
             may be meant (`cairn subvolume list` shows them): name the one that is to get the \
             changes, `{}`",
            shell::command("cairn apply", &[&fork, "ORIGIN"])
        ),
        Errno::INVAL if continues() => format!(
            "{fork} is no fork: a rollback has put it into the place of a subvolume that was none, \
             so there is no origin that could get its changes. To try changes out, fork it: `{}`",
            shell::command("cairn fork", &[&fork, "NEW"])
        ),
        Errno::INVAL | Errno::NOTDIR => format!(
            "{fork} is not the root directory of a fork, so it has no changes to apply: `cairn \
             fork SOURCE NEW` makes one (`cairn subvolume list` shows them)"
        ),
        Errno::NODATA => format!(
            "the subvolume that {fork} came from was removed, so there is nothing to apply its \
             changes to; {fork} has all files itself, and `mv` can give it the other one's name"
        ),
        Errno::NOSPC => format!(
            "nothing was changed: the volume has no room for what would be new; {}",
            mount_error::MAKE_ROOM
        ),
        Errno::FBIG => format!(
            "nothing was changed: {fork} has changed more than can be applied at once; copy some of \
             the files that have changed over those of the subvolume that it came from, with `cp \
             -p`, and run it again"
        ),
        Errno::MLINK => "nothing was changed: both are compared through temporary snapshots, and \
                         no number is left for one; delete some, then mount the volume again"
            .to_owned(),
        Errno::BUSY => format!(
            "nothing was changed: programs change the subvolume that {fork} came from all the \
             time; run it again when they have less to do"
        ),
        Errno::PERM => format!(
            "nothing was changed: {fork} may have changed files of all owners, so only root and \
             the user of the mount apply it"
        ),
        Errno::ROFS => format!("nothing was changed: the volume of {fork} is mounted read-only"),
        Errno::STALE => format!(
            "{fork} or what it came from was removed meanwhile, or the server waited too long for \
             this command; run it again"
        ),
        errno => format!("{path}: {errno}"),
    };
    anyhow::anyhow!(reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conflict(kind: ConflictKind) -> Conflict {
        Conflict { path: b"a/\xff\n".to_vec(), kind, removed: None }
    }

    #[test]
    fn the_origin_is_found_from_the_path_of_the_fork() {
        let beside = |fork: &str, of_fork: &str, of_target: &str| {
            beside(Path::new(fork), Path::new(of_fork), Path::new(of_target))
        };
        let is_at = |path: &str| Some(PathBuf::from(path));
        assert_eq!(beside("dir/a/b", "/a/b", "/a/c"), is_at("dir/a/c"));
        assert_eq!(beside("dir/a/b", "/a/b", "/c/d"), is_at("dir/c/d"));
        assert_eq!(beside("dir/a", "/a", "/"), is_at("dir"));
        assert_eq!(beside("dir/a/b", "/a/b", "/a"), is_at("dir/a"));
        assert_eq!(beside("/bound/b", "/a/b", "/a/c"), is_at("/bound/c"));
        assert_eq!(beside("b", "/a/b", "/a/c"), is_at("c"));
        assert_eq!(beside("b", "/a/b", "/c"), None);
    }

    #[test]
    fn lines_say_what_conflicts() {
        let path = cairn_fsck::shown_path(b"a/\xff\n");
        assert!(!path.contains('\n'));
        let shown = |kind| line(&conflict(kind), Winner::Neither, "/project");
        assert_eq!(
            shown(ConflictKind::RemovedInFork),
            format!("{path}: removed in the fork, changed in /project")
        );
        let left = line(&conflict(ConflictKind::RemovedInFork), Winner::Fork, "/project");
        assert!(left.contains("something is in it in /project"), "{left}");
        assert!(shown(ConflictKind::Loop).contains("move it back"));
    }

    #[test]
    fn the_advice_fits_the_conflicts() {
        let with = |winner, kinds: &[ConflictKind]| {
            let conflicts: Vec<Conflict> = kinds.iter().map(|kind| conflict(*kind)).collect();
            advice(Path::new("/mnt/trial"), winner, "/project", &conflicts)
        };
        let advised = |kinds: &[ConflictKind]| with(Winner::Neither, kinds);
        let (changed, moved) = (ConflictKind::BothChanged, ConflictKind::Loop);
        let text = advised(&[changed]);
        assert!(text.starts_with("nothing was changed: 1 conflict; `--theirs`"), "{text}");
        let text = advised(&[moved, moved]);
        assert!(text.contains("2 conflicts that no option") && !text.contains("--ours"), "{text}");
        let text = advised(&[changed, moved]);
        assert!(text.contains("2 conflicts, 1 of them that no option"), "{text}");
        assert!(text.contains("mend it by hand") && text.contains("`--theirs`"), "{text}");
        let text = with(Winner::Fork, &[ConflictKind::RemovedInFork]);
        assert!(text.contains("`--theirs` does not decide") && text.contains("`--ours`"), "{text}");
        let text = with(Winner::Origin, &[ConflictKind::Loop]);
        assert!(text.contains("`--ours` does not decide"), "{text}");
        assert!(!text.contains("--theirs"), "{text}");
    }

    #[test]
    fn what_was_applied_is_counted() {
        let told = |names, inodes| {
            applied(Path::new("/mnt/trial"), "/project", AppliedCounts { names, inodes })
        };
        assert!(told(0, 0).contains("nothing was changed"));
        assert!(told(1, 2).contains("1 name came or went, 2 files and directories changed"));
    }
}
