//! `cairn subvolume`: makes, removes and shows the subvolumes of a mounted volume.
use crate::commands::snapshot::selection;
use crate::shell;
use crate::{each, mount_error};
use anyhow::Context;
use cairn_fuse::MountError;
use cairn_fuse::snapshots::{self, Snapshot};
use cairn_fuse::subvolumes::{self, Subvolume};
use cairn_harness::console;
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Subvolumes of a mounted volume: directories with inodes of their own.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Make subvolumes, as mkdir makes directories: what fails is reported, and the next one made.
    Create {
        /// Directories that do not exist yet, in a mount of Cairn.
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
    /// Remove subvolumes with everything in them, for good. Forks of them stay as they are. `.`
    /// is the one whose root directory is the working directory.
    Delete {
        /// Root directories of subvolumes.
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
    /// List all subvolumes of a volume.
    List {
        /// Directory that shows the volume.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show one subvolume.
    Show {
        /// Root directory of the subvolume.
        path: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show a subvolume at the root of later mounts that don't say which.
    SetDefault {
        /// Root directory of the subvolume.
        path: PathBuf,
    },
}

/// Runs the command.
///
/// # Errors
/// When it is in no mount of Cairn, or the volume refuses.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let done = match &arguments.action {
        Action::Create { paths } => {
            return Ok(each(paths, |path| {
                subvolumes::create_subvolume(path).map_err(|error| explain(error, created))
            }));
        }
        Action::Delete { paths } => return Ok(each(paths, |path| delete(path))),
        Action::List { dir, json } => {
            let found = subvolumes::subvolumes(dir).map_err(|error| explain(error, shown))?;
            if *json {
                print_json(&found.iter().map(Shown::new).collect::<Vec<_>>())
            } else {
                let lines: Vec<String> = found.iter().map(line).collect();
                console::print_text(&lines.join("\n"))
            }
        }
        Action::Show { path, json } => {
            let found = subvolumes::subvolume_at(path).map_err(|error| explain(error, shown))?;
            if *json {
                print_json(&Shown::new(&found))
            } else {
                console::print_text(&details(&found))
            }
        }
        Action::SetDefault { path } => {
            subvolumes::set_default_subvolume(path).map_err(|error| explain(error, shown))
        }
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn delete(path: &Path) -> anyhow::Result<()> {
    subvolumes::remove_subvolume(path).map_err(|error| match error {
        MountError::Refused { errno: Errno::BUSY, .. } => {
            explain_kept(path).unwrap_or_else(|| explain(error, deleted))
        }
        error => explain(error, deleted),
    })
}

fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    console::print_text(&serde_json::to_string_pretty(value).context("JSON")?)
}

/// A subvolume in JSON.
#[derive(serde::Serialize)]
struct Shown<'s> {
    id: u64,
    /// As [`cairn_fsck::shown_path`] shows it.
    path: Option<String>,
    parent: u64,
    uuid: &'s str,
    created_ns: u64,
    generation: u64,
    is_default: bool,
    is_being_removed: bool,
    /// Of a fork.
    origin_subvolume: Option<u64>,
    origin_generation: Option<u64>,
    /// It has the place of that, after a rollback.
    continues: bool,
    forks: u64,
}

impl<'s> Shown<'s> {
    fn new(subvolume: &'s Subvolume) -> Self {
        Self {
            id: subvolume.id,
            path: path_shown(subvolume),
            parent: subvolume.parent,
            uuid: &subvolume.uuid,
            created_ns: subvolume.created_ns,
            generation: subvolume.generation,
            is_default: subvolume.is_default,
            is_being_removed: subvolume.is_being_removed,
            origin_subvolume: subvolume.origin.map(|origin| origin.0),
            origin_generation: subvolume.origin.map(|origin| origin.1),
            continues: subvolume.continues,
            forks: subvolume.forks,
        }
    }
}

/// What an error means here, and what to do: `reason` says it for one command.
fn explain(error: MountError, reason: fn(Errno) -> Option<&'static str>) -> anyhow::Error {
    let (path, errno) = match mount_error::refusal(error) {
        Ok(refusal) => refusal,
        Err(explained) => return explained,
    };
    let why = mount_error::read_only(path.parent().unwrap_or(Path::new("/")));
    let is_subvolume = errno == Errno::EXIST && subvolumes::subvolume_at(&path).is_ok();
    let path = mount_error::shown(&path);
    match reason(errno) {
        None if errno == Errno::ROFS => anyhow::anyhow!("{path}: nothing was changed: {why}"),
        None if is_subvolume => anyhow::anyhow!("{path} is a subvolume already"),
        None if errno == Errno::EXIST => anyhow::anyhow!("{path} exists already"),
        None if errno == Errno::NOSPC => {
            anyhow::anyhow!("{path}: the volume is full; {}", mount_error::MAKE_ROOM)
        }
        Some(reason) => anyhow::anyhow!("{path} {reason}"),
        None => anyhow::anyhow!("{path}: {errno}"),
    }
}

/// Why one was not made.
fn created(errno: Errno) -> Option<&'static str> {
    match errno {
        Errno::INVAL => Some("has no name for a subvolume"),
        Errno::MLINK => Some(
            "was not made: no number is left for a subvolume; delete some, then mount the volume \
             again",
        ),
        _ => None,
    }
}

/// What keeps a subvolume from being deleted, unless it is that a mount shows it.
fn explain_kept(path: &Path) -> Option<anyhow::Error> {
    let found = subvolumes::subvolume_at(path).ok()?;
    if found.is_default || found.path.as_deref() == Some(Path::new("/")) {
        return None;
    }
    let snapshots = snapshots::snapshots(path, false).ok()?;
    let shown = mount_error::shown(path);
    Some(match own_snapshots(&snapshots, found.id) {
        Some(own) => {
            anyhow::anyhow!("{shown} {}", own.advice(&shown))
        }
        // Or a thread of the server still has to make or free something.
        None => anyhow::anyhow!(
            "{shown} is in use by a `cairn diff`, `cairn apply` or `cairn fork`; delete it after \
             that"
        ),
    })
}

/// The snapshots that a subvolume has itself.
#[derive(Debug, PartialEq, Eq)]
struct OwnSnapshots {
    count: usize,
    /// For `cairn snapshot delete`.
    named: Vec<String>,
    /// Those to be released before, if any.
    held: Vec<String>,
}

/// Those of `snapshots`, which `subvolume` shows by age, that are its own. Others are of the
/// subvolumes whose place it has.
fn own_snapshots(snapshots: &[Snapshot], subvolume: u64) -> Option<OwnSnapshots> {
    let word = |one: &&Snapshot| cairn_fsck::shown_path(&one.name);
    let is_own = |one: &&Snapshot| one.subvolume == subvolume;
    let own: Vec<&Snapshot> = snapshots.iter().filter(is_own).collect();
    let runs = snapshots.chunk_by(|one, other| one.subvolume == other.subvolume);
    let are_together = runs.filter(|run| run[0].subvolume == subvolume).count() == 1
        && !own.iter().any(|one| selection::may_be_interval(OsStr::from_bytes(&one.name)));
    let named = match own[..] {
        [] => return None,
        [first, .., last] if are_together => {
            let interval = [&first.name[..], b"..", &last.name].concat();
            vec![cairn_fsck::shown_path(&interval)]
        }
        _ => own.iter().map(word).collect(),
    };
    let held = own.iter().filter(|one| one.is_held).map(word).collect();
    Some(OwnSnapshots { count: own.len(), named, held })
}

impl OwnSnapshots {
    /// What to do, behind the path of the subvolume, which is `path`.
    fn advice(&self, path: &str) -> String {
        let Self { count, named, held } = self;
        let (snapshots, them) = match count {
            1 => ("a snapshot".to_owned(), "it"),
            count => (format!("{count} snapshots"), "them"),
        };
        let command = |name, of: &[String]| {
            let path = std::iter::once(path);
            let all: Vec<&str> = path.chain(of.iter().map(String::as_str)).collect();
            shell::command(name, &all)
        };
        let release = match held.is_empty() {
            true => String::new(),
            false => format!("`{}`, then ", command("cairn snapshot release", held)),
        };
        format!(
            "has {snapshots} of its own; to delete {them} first, also for what a rollback has put \
             in its place: {release}`{}`",
            command("cairn snapshot delete", named)
        )
    }
}

/// Why one was not deleted.
fn deleted(errno: Errno) -> Option<&'static str> {
    match errno {
        Errno::INVAL => Some("is not the root directory of a subvolume"),
        Errno::NOTEMPTY => {
            Some("holds other subvolumes; delete those first (`cairn subvolume list`)")
        }
        Errno::BUSY => Some(
            "is shown at the root of a mount, or by default: make another one the default with \
             `cairn subvolume set-default`, and delete it through a mount that shows that",
        ),
        Errno::PERM => Some("is not yours: only its owner and root may delete it"),
        _ => None,
    }
}

/// Why one was not shown, or not made the default.
fn shown(errno: Errno) -> Option<&'static str> {
    match errno {
        Errno::INVAL => Some("is not the root directory of a subvolume"),
        Errno::OPNOTSUPP => {
            Some("is a snapshot, not a subvolume: `cairn snapshot list` shows what is known of it")
        }
        Errno::PERM => Some("answers this to root and the user of its server only"),
        _ => None,
    }
}

fn path_shown(subvolume: &Subvolume) -> Option<String> {
    subvolume.path.as_deref().map(mount_error::shown)
}

fn path_or_note(subvolume: &Subvolume) -> String {
    path_shown(subvolume).unwrap_or_else(|| "(not in this mount)".to_owned())
}

/// One subvolume of a list.
fn line(subvolume: &Subvolume) -> String {
    let notes = [
        (subvolume.continues, "  (rolled back)"),
        (subvolume.is_default, "  (default)"),
        (subvolume.is_being_removed, "  (being removed)"),
    ];
    let notes: String = notes.iter().filter(|note| note.0).map(|note| note.1).collect();
    let fork = subvolume.origin.map_or(String::new(), |(of, _)| format!("  (fork of {of})"));
    format!("{:>6}  {}{fork}{notes}", subvolume.id, path_or_note(subvolume))
}

/// A time in UTC.
fn shown_time(ns: u64) -> String {
    let time = jiff::Timestamp::from_nanosecond(i128::from(ns)).unwrap_or_default();
    format!("{time:.0}")
}

fn details(subvolume: &Subvolume) -> String {
    let of = subvolume.origin.map(|(of, made)| format!("{of}, as it was at generation {made}"));
    let lines = [
        ("path", path_or_note(subvolume)),
        ("id", subvolume.id.to_string()),
        ("parent", subvolume.parent.to_string()),
        ("uuid", subvolume.uuid.clone()),
        ("created", shown_time(subvolume.created_ns)),
        ("generation", subvolume.generation.to_string()),
        ("default", if subvolume.is_default { "yes" } else { "no" }.to_owned()),
        ("fork of", of.unwrap_or_else(|| "nothing".to_owned())),
        ("rolled back", if subvolume.continues { "yes" } else { "no" }.to_owned()),
        ("forks", subvolume.forks.to_string()),
    ];
    let lines = lines.iter().map(|(name, value)| format!("{:<13}{value}", format!("{name}:")));
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(name: &[u8], subvolume: u64, is_held: bool) -> Snapshot {
        Snapshot {
            name: name.to_vec(),
            generation: 0,
            subvolume,
            created_ns: 0,
            uuid: String::new(),
            is_held,
            unique_bytes: None,
            referenced_bytes: None,
        }
    }

    #[test]
    fn the_advice_deletes_what_is_its_own() {
        let one = |name: &[u8], of| snapshot(name, of, false);
        let named = |all: &[Snapshot]| own_snapshots(all, 301).map(|own| own.named.join(" "));
        let inherited = one(b"before", 300);
        assert_eq!(named(std::slice::from_ref(&inherited)), None);
        let all = [inherited.clone(), one(b"a", 301), one(b"b", 301), one(b"it's", 301)];
        assert_eq!(named(&all[..2]).as_deref(), Some("a"));
        assert_eq!(named(&all).as_deref(), Some("a..it's"));
        // What another one has made meanwhile is not its own.
        let all = [one(b"a", 301), inherited, one(b"\xe9", 301)];
        assert_eq!(named(&all).as_deref(), Some(r"a \xe9"));
        let held = [one(b"a", 301), snapshot(b"b", 301, true)];
        let told = own_snapshots(&held, 301).unwrap().advice("dir/home");
        assert!(told.starts_with("has 2 snapshots of its own; "), "{told}");
        let end = "`cairn snapshot release dir/home b`, then `cairn snapshot delete dir/home a..b`";
        assert!(told.ends_with(end), "{told}");
        let odd = [one(b"a", 301), one(b"-x y", 301)];
        let told = own_snapshots(&odd, 301).unwrap().advice(r"\xff");
        assert!(told.ends_with(r"`cairn snapshot delete $'\xff' 'a..-x y'`"), "{told}");
        let told = own_snapshots(&odd[1..], 301).unwrap().advice("dir");
        assert!(told.ends_with("`cairn snapshot delete -- dir '-x y'`"), "{told}");
    }
}
