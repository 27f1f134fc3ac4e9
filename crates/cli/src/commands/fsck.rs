//! `cairn fsck`: checks a volume that is not mounted.
use crate::EXIT_UNSOUND;
use crate::commands::extract;
use crate::image::{self, Image};
use crate::repair_backup::{self, BackingUp};
use crate::shell::{quoted, quoted_name};
use anyhow::Context;
use cairn_blockdev::composed::CopyFirst;
use cairn_blockdev::{BlockDevice, OpenMode};
use cairn_format::{TREE_FILES, TreeId};
use cairn_fsck::{CheckOptions, Finding, FsckError, Progress, Report, Structure};
use cairn_harness::console;
use cairn_harness::progress::ProgressBar;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

/// Exit code of a check that could not be done.
pub const EXIT_FAILURE: u8 = FsckError::EXIT_CODE;

const EXIT_REPAIRED: u8 = 1;

/// Files with damage whose owner gets advice.
const ADVISED_MAX: usize = 20;

/// Check a volume that is not mounted, or copy its files out of it. Exit code: 0 clean, 1 repaired
/// (the last line names the losses), 4 errors left or a member of a mirror is missing, 8 the check
/// failed.
#[derive(clap::Args)]
pub struct Arguments {
    /// Image file or block device; or several: mirror:A,B, concat:A,B.
    image: Image,
    /// Read all file data too, and compare it with its checksums; of a mirror, every copy.
    #[arg(long)]
    data: bool,
    /// Repair what can be repaired. Files and directories that lost their name move to lost+found
    /// of their subvolume; the report names the losses.
    #[arg(long)]
    repair: bool,
    /// With --repair: file that saves what the repair overwrites [default: IMAGE.before-repair].
    #[arg(long, value_name = "FILE", requires = "repair")]
    backup: Option<PathBuf>,
    /// With --repair: give up the damaged data of the file at this path in the volume, as the
    /// report shows it. Its damaged blocks become holes, which read as zeros; the rest of the file
    /// stays. Or drop a damaged snapshot: [ID/]NAME, as for --snapshot, or ID/ for all that are
    /// damaged in the subvolume with this id. Can be given several times; implies --data.
    #[arg(long, value_name = "PATH", requires = "repair", value_parser = loss)]
    accept_loss: Vec<String>,
    /// Undo a repair, with the file that it saved.
    #[arg(long, value_name = "FILE", conflicts_with = "repair")]
    undo: Option<PathBuf>,
    /// Copy all files into DIR, a new or empty directory. This mounts nothing and only reads the
    /// image. Damaged data becomes holes; the report names what is lost.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["data", "repair", "undo"])]
    extract: Option<PathBuf>,
    /// With --extract: copy the files of this snapshot. NAME is one of the first subvolume;
    /// snapshots of others have their subvolume's id before the name.
    #[arg(long, value_name = "[ID/]NAME", requires = "extract")]
    snapshot: Option<OsString>,
    /// Repair a mirror without its missing members, and do not count them as errors.
    #[arg(long)]
    degraded: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
}

/// A path as reports show it, from the volume's root; or a snapshot.
fn loss(text: &str) -> Result<String, String> {
    let is_snapshot = match text.split_once('/') {
        Some((id, name)) => id.parse::<u64>().is_ok() && !name.contains('/'),
        None => !text.is_empty(),
    };
    if text.starts_with('/') || is_snapshot {
        Ok(text.to_owned())
    } else {
        Err(format!("a path in the volume begins with \"/\", as in the report: /{text}"))
    }
}

/// The subvolume and the name that an argument of `--snapshot` names.
fn snapshot_of(argument: &OsStr) -> anyhow::Result<(TreeId, &[u8])> {
    let bytes = argument.as_bytes();
    let Some(at) = bytes.iter().position(|byte| *byte == b'/') else {
        return Ok((TREE_FILES, bytes));
    };
    let id = std::str::from_utf8(&bytes[..at]).ok().and_then(|id| id.parse().ok());
    let id = id.with_context(|| {
        format!("{}: before \"/\" stands the id of a subvolume", argument.display())
    })?;
    Ok((TreeId(id), &bytes[at + 1..]))
}

/// Runs the command.
///
/// # Errors
/// When the check could not be done.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let writes = arguments.repair || arguments.undo.is_some();
    let mode = if writes { OpenMode::ReadWrite } else { OpenMode::ReadOnly };
    let device = arguments.image.open(mode, arguments.degraded || !writes)?;
    image::warn_if_degraded(&*device);
    if let Some(directory) = &arguments.extract {
        let snapshot = arguments.snapshot.as_deref().map(snapshot_of).transpose()?;
        return extract::run(&*device, &arguments.image, directory, snapshot, arguments.json);
    }
    if let Some(file) = &arguments.undo {
        let writes = repair_backup::undo(&*device, file)?;
        device.close()?;
        console::print_text(&format_args!("{}: {writes} writes undone", arguments.image))?;
        return Ok(ExitCode::SUCCESS);
    }
    let backup = BackingUp::new(
        device.clone(),
        arguments.backup.clone().unwrap_or_else(|| backup_place(&arguments.image)),
    );
    let checked: &dyn BlockDevice = if arguments.repair { &backup } else { &*device };
    let data = arguments.data || !arguments.accept_loss.is_empty();
    let options = CheckOptions { data, repair: arguments.repair };
    let bar = ProgressBar::items("superblocks", 0);
    let mut show = show_on(&bar);
    let result = cairn_fsck::check_accepting(checked, &options, &arguments.accept_loss, &mut show);
    // What the first copy has is good by now, or known to be bad; the others are read for their own
    // sake.
    let comparable = !may_differ(&*device) && result.is_ok();
    let other_copies = if data && comparable { 1..device.copies() } else { 0..0 };
    for copy in other_copies {
        let _same_report =
            cairn_fsck::check(&CopyFirst { device: &*device, copy }, &options, &mut show);
    }
    drop(show);
    drop(bar);
    if let Some(file) = backup.file() {
        console::tell(&format_args!(
            "cairn: the repair saved what it overwrote in {0}; `cairn fsck {1} --undo {0}` undoes the repair",
            file.display(),
            arguments.image
        ));
    }
    let report = result.with_context(|| arguments.image.to_string())?;
    console::print(&report, arguments.json)?;
    if arguments.repair {
        device.flush().with_context(|| arguments.image.to_string())?;
    }
    image::warn_if_storage_is_full(&arguments.image);
    advise(&report, arguments);
    let degraded = device.health().is_some_and(|health| health.degraded) && !arguments.degraded;
    let members = if degraded { EXIT_UNSOUND } else { tell_bad_copies(&*device, arguments.repair) };
    Ok(ExitCode::from(report.exit_code().max(members)))
}

/// Shows on `bar` how far a check is.
pub fn show_on(bar: &ProgressBar) -> impl FnMut(Progress) {
    let mut pass = None;
    move |progress| {
        if pass.replace(progress.pass) != Some(progress.pass) {
            bar.restart(&progress.pass.to_string(), progress.total);
        }
        bar.set(progress.done);
    }
}

/// Prints what the user can do about the errors that are left.
fn advise(report: &Report, arguments: &Arguments) {
    let image = quoted(&arguments.image.to_string());
    let data = |finding: &&Finding| finding.structure == Structure::Data;
    for path in arguments.accept_loss.iter().filter(|path| path.starts_with('/')) {
        if !report.findings.iter().filter(data).any(|finding| finding.path.as_ref() == Some(path)) {
            console::tell(&format_args!(
                "cairn: {path}: its data is not damaged, so nothing was given up"
            ));
        }
    }
    let is_snapshot = |argument: &String| !argument.starts_with('/');
    if report.losses.snapshots == 0 && arguments.accept_loss.iter().any(is_snapshot) {
        console::tell(&"cairn: no snapshot of that name is damaged, so none was dropped");
    }
    let others = report.errors
        - report.findings.iter().filter(|finding| finding.is_lost_data()).count() as u64;
    if report.missing_bytes > 0 {
        console::tell(&format_args!(
            "cairn: {image} is {} bytes shorter than its volume: it was truncated, or it is an unfinished copy. It cannot be repaired \
             without the missing bytes; restore it from a complete copy",
            report.missing_bytes
        ));
    } else if others > 0 && !arguments.repair {
        if report.is_repairable {
            console::tell(&format_args!(
                "cairn: `cairn fsck {image} --repair` repairs what can be repaired, and names what is lost"
            ));
        } else if let Some(obstacle) = report.rebuild_obstacle {
            console::tell(&format_args!("cairn: {image} can't be repaired: {obstacle}"));
        }
    }
    let can_give_up = report.rebuild_obstacle.is_none();
    // One advice for each file, in the order in which they were found.
    let mut files: Vec<(Option<u64>, Option<&str>)> = Vec::new();
    for finding in report.findings.iter().filter(|finding| finding.is_lost_data()) {
        let file = (finding.inode, finding.path.as_deref());
        if !files.contains(&file) {
            files.push(file);
        }
    }
    for (inode, path) in files.iter().take(ADVISED_MAX) {
        match (path, inode) {
            (Some(path), _) => console::tell(&format_args!(
                "cairn: {path}: its data is damaged, and there is no good copy. Mount the volume (`cairn mount {image} DIR`) and restore \
                 the file from a backup, or remove it: rm DIR{}{}",
                quoted_name(path),
                to_give_up(can_give_up, "; or give up only the damaged blocks", &image, path)
            )),
            (None, Some(inode)) => console::tell(&format_args!(
                "cairn: inode {inode}: the data of a file without a name is damaged; the next mount removes the file"
            )),
            (None, None) => {}
        }
    }
    advise_on_snapshots(report, can_give_up, &image);
    if files.len() > ADVISED_MAX {
        console::tell(&format_args!(
            "cairn: {} more files have damaged data; the report above lists them",
            files.len() - ADVISED_MAX
        ));
    }
}

/// How to give up what is at this path, or this snapshot; nothing if a repair refuses it.
fn to_give_up(is_possible: bool, what: &str, image: &str, path: &str) -> String {
    match is_possible {
        true => format!("{what}: cairn fsck {image} --repair --accept-loss {}", quoted(path)),
        false => String::new(),
    }
}

/// The same about damaged snapshots.
fn advise_on_snapshots(report: &Report, can_give_up: bool, image: &str) {
    let named = report.damaged_snapshots.iter().filter(|snapshot| snapshot.name.is_some());
    let named: Vec<String> = named.map(ToString::to_string).collect();
    for snapshot in named.iter().take(ADVISED_MAX) {
        console::tell(&format_args!(
            "cairn: snapshot {snapshot} is damaged, and there is no good copy. Copy out what can be read: \
             cairn fsck {image} --extract DIR --snapshot {}{}",
            quoted_name(snapshot),
            to_give_up(can_give_up, "; and then drop it", image, snapshot)
        ));
    }
    if named.len() > ADVISED_MAX && can_give_up {
        console::tell(&format_args!(
            "cairn: {} more snapshots are damaged; --accept-loss ID/ drops all damaged ones of the \
             subvolume with this id",
            named.len() - ADVISED_MAX
        ));
    }
    if report.damaged_snapshots.iter().any(|snapshot| snapshot.name.is_none()) {
        console::tell(&format_args!(
            "cairn: a snapshot without a name is damaged. It goes when the forks that began as it are removed"
        ));
    }
}

/// Beside an image file; of a block device in the current folder.
fn backup_place(image: &Image) -> PathBuf {
    let source = image.mount_source();
    let mut name = source.file_name().unwrap_or_default().to_owned();
    name.push(".before-repair");
    if source.is_file() { source.with_file_name(name) } else { name.into() }
}

fn may_differ(device: &dyn BlockDevice) -> bool {
    device.health().is_some_and(|health| health.copies_may_differ)
}

/// Reports which members hold blocks that are good in another copy; returns the exit code for that.
fn tell_bad_copies(device: &dyn BlockDevice, repair: bool) -> u8 {
    let Some(health) = device.health() else { return 0 };
    if health.copies_may_differ {
        console::tell(&format_args!(
            "cairn: the mirror was not unmounted, so copies may differ; the next mount makes them the same"
        ));
        return 0;
    }
    let mut exit_code = 0;
    for member in health.members.iter().filter(|member| member.bad_blocks > 0) {
        let (name, bad, left) =
            (&member.name, member.bad_blocks, member.bad_blocks - member.rewritten_blocks);
        let what = match (repair, left) {
            (true, 0) => "written again".to_owned(),
            (true, left) => format!("{left} of them could not be written again"),
            (false, _) => "`cairn fsck --data --repair` writes them again".to_owned(),
        };
        console::tell(&format_args!(
            "cairn: {name}: {bad} blocks are bad in this copy and good in another; {what}"
        ));
        exit_code = exit_code.max(if repair && left == 0 { EXIT_REPAIRED } else { EXIT_UNSOUND });
    }
    exit_code
}
