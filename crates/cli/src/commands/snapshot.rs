//! `cairn snapshot`: makes, lists, holds and deletes snapshots of subvolumes of a mounted volume.
mod keep;
pub mod selection;

use crate::shell;
use crate::{each, mount_error};
use anyhow::{Context, anyhow, bail, ensure};
use cairn_environment::clock;
use cairn_fuse::MountError;
use cairn_fuse::schedule::is_automatic_name;
use cairn_fuse::snapshots::{self, Snapshot};
use cairn_fuse::subvolumes;
use cairn_harness::console;
use cairn_harness::size::Size;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

/// Longest name, in bytes.
const NAME_BYTES_MAX: usize = 255;
/// So many names are tried in the same second.
const NAMES_OF_SECOND_MAX: u32 = 1000;

/// Snapshots of the subvolumes of a mounted volume: how they were, to read.
///
/// A snapshot copies nothing when it is made. From then on it keeps what the subvolume overwrites
/// and removes, until it is deleted. It leaves out other subvolumes that are nested in this one.
///
/// `.snapshots` in the root directory of the mount leads to all of them: `.snapshots/PATH/NAME` is
/// the snapshot NAME of the subvolume PATH. The listing of the root directory has it only with the
/// mount option `show_snapshots`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

const EXAMPLES: &str = "\
Examples:
  cairn snapshot create /mnt/home before-update
  cp -a /mnt/.snapshots/home/before-update/alice/letter /mnt/home/alice/
  cairn snapshot list /mnt/home
  cairn snapshot delete /mnt/home before-update
  cairn snapshot delete --dry-run /mnt/home monday..friday
  cairn snapshot keep /mnt/home --every 10m --keep 6x10m,24x1h,7x1d";

#[derive(clap::Subcommand)]
enum Action {
    /// Make a snapshot of a subvolume, and print where it is.
    ///
    /// It has everything that was written before, and is durable when the command returns. For the
    /// owner of the subvolume, root, and the user of the mount.
    Create {
        /// Root directory of the subvolume.
        path: PathBuf,
        /// Name of the snapshot (default: the time, in UTC).
        name: Option<OsString>,
    },
    /// List the snapshots of a subvolume, the oldest first.
    ///
    /// One of a subvolume whose place this one has taken, by a rollback, names that behind it.
    ///
    /// "unique" is what a snapshot alone has: its deletion gives that back. What several have is
    /// counted for none of them; `cairn snapshot delete --dry-run` says it of several.
    List {
        /// Root directory of the subvolume.
        path: PathBuf,
        /// Also show what each snapshot refers to in all, files and metadata. The first time since
        /// the mount, this reads all metadata of the newest one.
        #[arg(long)]
        referenced: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Delete snapshots, for good.
    ///
    /// They are gone durably when the command returns; their space comes back in the background.
    /// Held ones are refused, and so is an interval with a held one; the other names that are given
    /// are deleted all the same. For the owner of the subvolume, root, and the user of the mount.
    Delete {
        /// Root directory of the subvolume.
        path: PathBuf,
        /// Names of its snapshots; `A..B` for all from A to B, both included.
        #[arg(required = true)]
        names: Vec<OsString>,
        /// Delete nothing; print what the deletion of all of them frees.
        #[arg(long)]
        dry_run: bool,
    },
    Keep(keep::Arguments),
    /// Protect snapshots from being deleted, until they are released.
    Hold {
        /// Root directory of the subvolume.
        path: PathBuf,
        /// Names of its snapshots; `A..B` for all from A to B, both included.
        #[arg(required = true)]
        names: Vec<OsString>,
    },
    /// Let held snapshots be deleted again.
    Release {
        /// Root directory of the subvolume.
        path: PathBuf,
        /// Names of its snapshots; `A..B` for all from A to B, both included.
        #[arg(required = true)]
        names: Vec<OsString>,
    },
}

/// Runs the command.
///
/// # Errors
/// When it is in no mount of Cairn, or the volume refuses.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let done = match &arguments.action {
        Action::Create { path, name } => create(path, name.as_deref()),
        Action::List { path, referenced, json } => list(path, *referenced, *json),
        Action::Delete { path, names, dry_run: true } => show_space(path, names),
        Action::Delete { path, names, dry_run: false } => {
            return Ok(each(names, |name| delete(path, name)));
        }
        Action::Keep(arguments) => return keep::run(arguments),
        Action::Hold { path, names } => return Ok(each(names, |name| hold(path, name, true))),
        Action::Release { path, names } => return Ok(each(names, |name| hold(path, name, false))),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn create(path: &Path, name: Option<&OsStr>) -> anyhow::Result<()> {
    let made = match name {
        Some(name) => {
            check_name(name)?;
            snapshots::create_snapshot(path, name.as_bytes())
                .map_err(|error| explain(path, name, error))?
        }
        None => create_named_by_time(path)?,
    };
    match made {
        // For a script: the very bytes.
        Some(below) => console::print_bytes(shown_at(path, &below).as_os_str().as_bytes()),
        // It is not in this mount.
        None => Ok(()),
    }
}

fn check_name(name: &OsStr) -> anyhow::Result<()> {
    let bytes = name.as_bytes();
    let shown = cairn_fsck::shown_path(bytes);
    ensure!(!bytes.is_empty(), "an empty name is no name for a snapshot");
    ensure!(bytes.len() <= NAME_BYTES_MAX, "the name has more than {NAME_BYTES_MAX} bytes");
    ensure!(
        !matches!(bytes, b"." | b"..") && !bytes.contains(&b'/'),
        "\"{shown}\" is no name for a snapshot: it becomes the name of a directory"
    );
    ensure!(
        !snapshots::is_temporary_name(bytes),
        "\"{shown}\" is a name of temporary snapshots, which the next mount deletes"
    );
    ensure!(
        !is_automatic_name(bytes),
        "\"{shown}\" is a name of snapshots that a schedule makes, and deletes: take another name"
    );
    Ok(())
}

fn create_named_by_time(path: &Path) -> anyhow::Result<Option<PathBuf>> {
    let name = name_of_time(clock::now_wall().0);
    for number in 1..=NAMES_OF_SECOND_MAX {
        let name =
            OsString::from(if number == 1 { name.clone() } else { format!("{name}-{number}") });
        match snapshots::create_snapshot(path, name.as_bytes()) {
            Err(MountError::Refused { errno: Errno::EXIST | Errno::NOTUNIQ, .. }) => {}
            made => return made.map_err(|error| explain(path, &name, error)),
        }
    }
    bail!(
        "{} has {NAMES_OF_SECOND_MAX} snapshots of this second; give a name",
        mount_error::shown(path)
    )
}

/// A time in UTC, without what is unusual in names.
fn name_of_time(seconds: i64) -> String {
    let time = jiff::Timestamp::from_second(seconds).unwrap_or_default();
    time.strftime("%Y-%m-%dT%H-%M-%SZ").to_string()
}

/// Where a snapshot of the subvolume at `path` is, of which `below` is the path from the root of
/// the mount.
fn shown_at(path: &Path, below: &Path) -> PathBuf {
    // Without `.snapshots` and the name.
    let of = below.strip_prefix(snapshots::DIRECTORY).unwrap_or(below);
    let levels = of.components().count().saturating_sub(1);
    let root_of = |path: &Path| {
        let of = of.parent().unwrap_or(Path::new(""));
        path.ends_with(of).then(|| path.ancestors().nth(levels).map(Path::to_owned)).flatten()
    };
    let real = |path: &Path| {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        fs::canonicalize(path).ok()
    };
    // A part of the path may be a link.
    let Some(root) = real(path).and_then(|path| root_of(&path)) else { return below.to_owned() };
    let is_plain = |given: &PathBuf| !given.components().any(|part| part == Component::ParentDir);
    let is_root = |given: &PathBuf| real(given).is_some_and(|given| given == root);
    let as_given = root_of(path).filter(|given| is_plain(given) && is_root(given));
    as_given.unwrap_or(root).join(below)
}

fn snapshots_of(path: &Path, referenced: bool) -> anyhow::Result<Vec<Snapshot>> {
    snapshots::snapshots(path, referenced).map_err(|error| explain(path, OsStr::new(""), error))
}

fn select<'s>(
    path: &Path,
    snapshots: &'s [Snapshot],
    given: &OsStr,
) -> anyhow::Result<&'s [Snapshot]> {
    selection::select(snapshots, given).map_err(|problem| {
        let list = command("list", path, &[]);
        anyhow!("{}: {problem}; `{list}` shows them", mount_error::shown(path))
    })
}

/// The names of those that can't be deleted.
fn held<'s>(snapshots: impl IntoIterator<Item = &'s Snapshot>) -> Vec<String> {
    let held = snapshots.into_iter().filter(|snapshot| snapshot.is_held);
    held.map(|snapshot| cairn_fsck::shown_path(&snapshot.name)).collect()
}

/// Those of an interval, the oldest first; none if `given` has to be a name.
fn interval(path: &Path, given: &OsStr) -> anyhow::Result<Vec<Snapshot>> {
    if !selection::may_be_interval(given) {
        return Ok(Vec::new());
    }
    Ok(select(path, &snapshots_of(path, false)?, given)?.to_vec())
}

fn delete(path: &Path, given: &OsStr) -> anyhow::Result<()> {
    let selected = interval(path, given)?;
    let explain = |error| explain(path, given, error);
    let interval = match selection::interval_of(&selected) {
        Some(interval) if selected.len() > 1 => interval,
        _ => {
            let name = selected.first().map_or(given.as_bytes(), |one| &one.name);
            return snapshots::delete_snapshot(path, name).map_err(explain);
        }
    };
    let held = held(&selected);
    if !held.is_empty() {
        bail!(
            "nothing of {} is deleted, for some are held; release them first: `{}`",
            cairn_fsck::shown_path(given.as_bytes()),
            command("release", path, &held)
        );
    }
    snapshots::delete_snapshots(path, &[interval]).map_err(explain)?;
    console::print_text(&format_args!("{} snapshots deleted", selected.len()))
}

fn hold(path: &Path, given: &OsStr, is_held: bool) -> anyhow::Result<()> {
    let selected = interval(path, given)?;
    let explain = |error| explain(path, given, error);
    if selected.is_empty() {
        return snapshots::hold_snapshot(path, given.as_bytes(), is_held).map_err(explain);
    }
    selected
        .iter()
        .try_for_each(|one| snapshots::hold_snapshot(path, &one.name, is_held).map_err(explain))
}

/// A command about snapshots of a subvolume, for a shell; of names, what reports show.
fn command(action: &str, path: &Path, names: &[String]) -> String {
    let all: Vec<String> =
        std::iter::once(mount_error::shown(path)).chain(names.iter().cloned()).collect();
    shell::command(&format!("cairn snapshot {action}"), &all)
}

fn show_space(path: &Path, names: &[OsString]) -> anyhow::Result<()> {
    let all = snapshots_of(path, false)?;
    let (mut chosen, mut intervals) = (BTreeMap::new(), Vec::new());
    for name in names {
        let selected = select(path, &all, name)?;
        let place = |snapshot: &Snapshot| (snapshot.generation, snapshot.subvolume);
        chosen.extend(selected.iter().map(|snapshot| (place(snapshot), snapshot)));
        intervals.extend(selection::interval_of(selected));
    }
    let bytes = snapshots::space_of_snapshots(path, &intervals)
        .map_err(|error| explain(path, names.first().map_or(OsStr::new(""), |name| name), error))?;
    let (count, plural) = (chosen.len(), if chosen.len() == 1 { "" } else { "s" });
    let exact = if bytes < 1024 { String::new() } else { format!(" ({bytes} bytes)") };
    let mut text = format!("{count} snapshot{plural}, would free {}{exact}", Size { bytes });
    let held = held(chosen.into_values());
    if !held.is_empty() {
        text = format!("{text}\nheld, to be released first: {}", held.join(" "));
    }
    console::print_text(&text)
}

fn list(path: &Path, referenced: bool, json: bool) -> anyhow::Result<()> {
    let found = snapshots_of(path, referenced)?;
    if json {
        let shown: Vec<_> = found.iter().map(Shown::new).collect();
        return console::print_text(&serde_json::to_string_pretty(&shown).context("JSON")?);
    }
    if found.is_empty() {
        return Ok(());
    }
    let head = line(["created", "unique", "held", "name"], referenced.then_some("referenced"));
    let own = subvolumes::subvolume_at(path).ok().map(|one| one.id);
    let others = found.iter().any(|snapshot| own.is_some_and(|own| snapshot.subvolume != own));
    let all = if others { subvolumes::subvolumes(path).unwrap_or_default() } else { Vec::new() };
    let note = |snapshot: &Snapshot| {
        let of = snapshot.subvolume;
        let place = all.iter().find(|one| one.id == of).and_then(|one| one.path.as_deref());
        match own {
            Some(own) if own != of => match place {
                Some(place) => format!("  (of {})", mount_error::shown(place)),
                None => format!("  (of subvolume {of})"),
            },
            _ => String::new(),
        }
    };
    let lines = found.iter().map(|snapshot| line_of(snapshot, referenced) + &note(snapshot));
    let lines: Vec<String> = std::iter::once(head).chain(lines).collect();
    console::print_text(&lines.join("\n"))
}

/// A snapshot in JSON.
#[derive(serde::Serialize)]
struct Shown<'s> {
    /// As [`cairn_fsck::shown_path`] shows it.
    name: String,
    created: String,
    created_ns: u64,
    generation: u64,
    subvolume: u64,
    uuid: &'s str,
    is_held: bool,
    unique_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    referenced_bytes: Option<u64>,
}

impl<'s> Shown<'s> {
    fn new(snapshot: &'s Snapshot) -> Self {
        Self {
            name: cairn_fsck::shown_path(&snapshot.name),
            created: shown_time(snapshot.created_ns),
            created_ns: snapshot.created_ns,
            generation: snapshot.generation,
            subvolume: snapshot.subvolume,
            uuid: &snapshot.uuid,
            is_held: snapshot.is_held,
            unique_bytes: snapshot.unique_bytes,
            referenced_bytes: snapshot.referenced_bytes,
        }
    }
}

fn line([created, unique, held, name]: [&str; 4], referenced: Option<&str>) -> String {
    let referenced = referenced.map_or(String::new(), |text| format!("{text:>11}  "));
    format!("{created:<20}  {unique:>11}  {referenced}{held:<4}  {name}")
}

fn line_of(snapshot: &Snapshot, with_referenced: bool) -> String {
    let size = |bytes: Option<u64>| {
        bytes.map_or_else(|| "?".to_owned(), |bytes| Size { bytes }.to_string())
    };
    let referenced = with_referenced.then(|| size(snapshot.referenced_bytes));
    let held = if snapshot.is_held { "yes" } else { "no" };
    let name = cairn_fsck::shown_path(&snapshot.name);
    let created = shown_time(snapshot.created_ns);
    line([&created, &size(snapshot.unique_bytes), held, &name], referenced.as_deref())
}

/// A time in UTC.
fn shown_time(ns: u64) -> String {
    let time = jiff::Timestamp::from_nanosecond(i128::from(ns)).unwrap_or_default();
    format!("{time:.0}")
}

/// What an error means here, and what to do.
fn explain(path: &Path, given: &OsStr, error: MountError) -> anyhow::Error {
    let errno = match mount_error::refusal(error) {
        Ok((_, errno)) => errno,
        Err(explained) => return explained,
    };
    let (shown, name) = (mount_error::shown(path), cairn_fsck::shown_path(given.as_bytes()));
    let reason = match errno {
        Errno::INVAL | Errno::NOTDIR => format!(
            "{shown} is not the root directory of a subvolume: only subvolumes have snapshots \
             (`cairn subvolume list` shows them)"
        ),
        Errno::OPNOTSUPP => format!(
            "{shown} is a snapshot, and a snapshot has none: name the directory of its subvolume"
        ),
        Errno::EXIST => {
            format!(
                "{shown} has a snapshot {name} already: take another name, or delete that first"
            )
        }
        Errno::NOTUNIQ => {
            let below = mount_error::shown(&path.join(given));
            format!(
                "a snapshot {name} of {shown} would hide the snapshots of {below}, or of \
                 subvolumes below it, in {}: take another name",
                snapshots::DIRECTORY
            )
        }
        Errno::NODATA => {
            let list = command("list", path, &[]);
            format!("{shown} has no snapshot {name}; `{list}` shows them")
        }
        Errno::BUSY => format!(
            "the snapshot {name} is held; release it first: `{}`",
            command("release", path, std::slice::from_ref(&name))
        ),
        Errno::NOSPC => format!("the volume is full; {}", mount_error::MAKE_ROOM),
        Errno::PERM => format!(
            "{shown} is not yours: only the owner of a subvolume and root make and delete its \
             snapshots"
        ),
        Errno::MLINK => "no number is left for a snapshot; delete some, then mount the volume \
                         again"
            .to_owned(),
        Errno::ROFS => format!("{shown} is mounted read-only"),
        errno => format!("{shown}: {errno}"),
    };
    anyhow!(reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_name() {
        assert_eq!(name_of_time(1_795_707_605), "2026-11-26T15-40-05Z");
        assert_eq!(name_of_time(0), "1970-01-01T00-00-00Z");
        assert!(check_name(OsStr::new(&name_of_time(1 << 32))).is_ok());
        for bad in ["", ".", "..", "a/b", &"x".repeat(256)] {
            assert!(check_name(OsStr::new(bad)).is_err(), "{bad}");
        }
        assert!(check_name(OsStr::new("...")).is_ok());
        assert!(check_name(OsStr::new(".diff-0123456789abcdef")).is_err());
        assert!(check_name(OsStr::new(".diff-today")).is_ok());
    }

    #[test]
    fn a_path_is_shown_as_it_was_given() {
        let folder = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(folder.path()).unwrap();
        fs::create_dir_all(root.join("a/b")).unwrap();
        std::os::unix::fs::symlink("a/b", root.join("b")).unwrap();
        let below = Path::new(".snapshots/a/b/name");
        let expected = root.join(below);
        for given in ["a/b", "a/../a/b", "b"] {
            assert_eq!(shown_at(&root.join(given), below), expected, "{given}");
        }
        assert_eq!(shown_at(&root, Path::new(".snapshots/x")), root.join(".snapshots/x"));
        // Of another mount, or moved meanwhile.
        assert_eq!(shown_at(&root, below), below);
    }
}
