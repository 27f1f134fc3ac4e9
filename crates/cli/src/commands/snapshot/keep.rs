//! `cairn snapshot keep`: sets, shows and ends the schedules by which snapshots are made.
use super::{explain, shown_time};
use crate::mount_error;
use anyhow::Context;
use cairn_environment::{calendar, clock};
use cairn_fuse::schedule::Schedule;
use cairn_fuse::snapshots::{self, Kept};
use cairn_fuse::{MountError, subvolumes};
use cairn_harness::console;
use rustix::fs::StatVfsMountFlags;
use rustix::io::Errno;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The schedule that was given can't be one.
const EXIT_WRONG_USAGE: u8 = 2;

const KEEP_HELP: &str = "\
Examples:
  cairn snapshot keep /mnt/home --every 10m --keep 6x10m,24x1h,7x1d
  cairn snapshot keep /mnt/home
  cairn snapshot keep /mnt --all
  cairn snapshot keep /mnt/home --off";

/// Have snapshots made and deleted by a schedule, or show it.
///
/// The schedule stays with the subvolume: any mount of the volume follows it. A snapshot
/// auto-TIME is made when an interval begins, if anything has changed since the one before.
/// Only snapshots with such names are deleted, and held ones are not. For the owner of the
/// subvolume, root, and the user of the mount.
#[derive(clap::Args)]
#[command(after_help = KEEP_HELP)]
pub struct Arguments {
    /// Root directory of the subvolume; with --all any directory of the mount.
    path: PathBuf,
    /// Make one so often: 30s, 10m, 1h, 1d, 1w.
    #[arg(long, value_name = "TIME", requires = "keep")]
    every: Option<String>,
    /// Keep these: 24x1h keeps the last one of each of the last 24 hours that have any; several
    /// rules with commas between them.
    #[arg(long, value_name = "RULES", requires = "every")]
    keep: Option<String>,
    /// End the schedule. The snapshots stay.
    #[arg(long, conflicts_with_all = ["every", "keep"])]
    off: bool,
    /// Show the schedules of all subvolumes of the volume. For root and the user of the mount.
    #[arg(long, conflicts_with_all = ["every", "keep", "off"])]
    all: bool,
    /// Print JSON.
    #[arg(long, conflicts_with_all = ["every", "keep", "off"])]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When it is in no mount of Cairn, or the volume refuses.
pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { path, every, keep, off, all, json } = arguments;
    match (every, keep) {
        (Some(every), Some(keep)) => match schedule_of(every, keep) {
            Ok(schedule) => {
                set(path, Some(&schedule))?;
                for rule in schedule.finer_rules() {
                    let count = rule.split('x').next().unwrap_or_default();
                    console::tell(&format_args!(
                        "cairn: {rule} keeps the last {count} snapshots: one is made every {} at \
                         most",
                        schedule.every()
                    ));
                }
            }
            Err(problem) => {
                console::tell(&format_args!("cairn: {problem}"));
                return Ok(ExitCode::from(EXIT_WRONG_USAGE));
            }
        },
        _ if *off => end(path)?,
        _ if *all => show_all(path, *json)?,
        _ => show(path, *json)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn schedule_of(every: &str, keep: &str) -> Result<Schedule, String> {
    let schedule = Schedule::new(every, keep)?;
    match schedule.repeated_rule() {
        Some(rule) => Err(format!("{rule}: another rule is for the same length of time")),
        None => Ok(schedule),
    }
}

fn set(path: &Path, schedule: Option<&Schedule>) -> anyhow::Result<()> {
    snapshots::set_schedule(path, schedule).map_err(|error| explained(path, error))
}

fn end(path: &Path) -> anyhow::Result<()> {
    let before = snapshots::schedule(path).map_err(|error| explained(path, error))?;
    set(path, None)?;
    if before.is_none() { say_none(path) } else { Ok(()) }
}

fn say_none(path: &Path) -> anyhow::Result<()> {
    console::print_text(&format_args!("{} has no schedule", mount_error::shown(path)))
}

fn explained(path: &Path, error: MountError) -> anyhow::Error {
    explain(path, OsStr::new(""), error)
}

fn show(path: &Path, json: bool) -> anyhow::Result<()> {
    let found = snapshots::schedule(path).map_err(|error| explained(path, error))?;
    let now = now(path);
    if json {
        let of = subvolumes::subvolume_at(path).ok().and_then(|one| one.path);
        let shown = found.map(|kept| Shown::new(&Kept { path: of, ..kept }, now));
        return print_json(&shown);
    }
    let Some(kept) = found else { return say_none(path) };
    let (last, next) = times(&kept, now);
    console::print_text(&format_args!("{}\nlast {last}, next {next}", kept.schedule))
}

fn show_all(path: &Path, json: bool) -> anyhow::Result<()> {
    let found = snapshots::schedules(path).map_err(|error| match error {
        MountError::Refused { errno: Errno::PERM, .. } => anyhow::anyhow!(
            "{}: only root and the user of the mount see all schedules",
            mount_error::shown(path)
        ),
        error => explained(path, error),
    })?;
    let now = now(path);
    if json {
        return print_json(&found.iter().map(|kept| Shown::new(kept, now)).collect::<Vec<_>>());
    }
    if found.is_empty() {
        return Ok(());
    }
    let row = |[last, next, path, schedule]: [&str; 4]| {
        format!("{last:<20}  {next:<20}  {path:<20}  {schedule}")
    };
    let lines = found.iter().map(|kept| {
        let (last, next) = times(kept, now);
        let path = match &kept.path {
            Some(path) => mount_error::shown(path),
            None => format!("(subvolume {})", kept.subvolume),
        };
        row([&last, &next, &path, &kept.schedule.to_string()])
    });
    let head = row(["last", "next", "path", "schedule"]);
    console::print_text(&std::iter::once(head).chain(lines).collect::<Vec<_>>().join("\n"))
}

fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    console::print_text(&serde_json::to_string_pretty(value).context("JSON")?)
}

/// The time, in seconds since 1970, if schedules are followed in this mount.
fn now(path: &Path) -> Option<i64> {
    let is_read_only = rustix::fs::statvfs(path)
        .is_ok_and(|status| status.f_flag.contains(StatVfsMountFlags::RDONLY));
    (!is_read_only).then(|| clock::now_wall().0)
}

fn next(kept: &Kept, now: Option<i64>) -> Option<String> {
    now.map(|now| calendar::utc_text(kept.schedule.next(now)))
}

/// When the last one was made, and when the next one is due.
fn times(kept: &Kept, now: Option<i64>) -> (String, String) {
    let last = kept.newest_ns.map(shown_time);
    let (none, read_only) = (|| "none".to_owned(), || "not while read-only".to_owned());
    (last.unwrap_or_else(none), next(kept, now).unwrap_or_else(read_only))
}

/// A schedule in JSON.
#[derive(serde::Serialize)]
struct Shown {
    subvolume: u64,
    /// As [`cairn_fsck::shown_path`] shows it.
    path: Option<String>,
    every: String,
    keep: Vec<String>,
    /// When the newest snapshot was made by it.
    last: Option<String>,
    last_ns: Option<u64>,
    /// When one is due, if something has changed.
    next: Option<String>,
}

impl Shown {
    fn new(kept: &Kept, now: Option<i64>) -> Self {
        Self {
            subvolume: kept.subvolume,
            path: kept.path.as_deref().map(mount_error::shown),
            every: kept.schedule.every(),
            keep: kept.schedule.rules(),
            last: kept.newest_ns.map(shown_time),
            last_ns: kept.newest_ns,
            next: next(kept, now),
        }
    }
}
