//! `cairn device`: how the members of a mirror or concatenation are, and a new member in place of
//! another.
use super::fsck::show_on;
use crate::create::{self, Content};
use crate::image::{self, Image};
use crate::{EXIT_UNSOUND, signature};
use anyhow::{Context, bail, ensure};
use cairn_blockdev::composed::label::DATA_START_BYTES;
use cairn_blockdev::composed::{
    Candidate, ComposedKind, Label, MemberState, MemberStatus, Rebuild, status,
};
use cairn_blockdev::{FileDevice, OpenMode};
use cairn_fsck::{CheckOptions, FsckError};
use cairn_harness::console;
use cairn_harness::progress::ProgressBar;
use serde::Serialize;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Show the members of a mirror or concatenation, or replace one.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Show the members, and whether each can be used. Exit code: 0 all can, 4 at least one cannot.
    Status {
        /// mirror:A,B or concat:A,B; not mounted (then `cairn stats DIR` shows the same).
        image: Image,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Fill NEW from the other members of a mirror that is not mounted, and put it in the place of
    /// OLD. Can be interrupted at any time; the same command continues.
    Replace {
        /// mirror:A,B, with OLD among its members.
        image: Image,
        /// The member to replace, as it is written in IMAGE.
        old: PathBuf,
        /// The new member: a file, which is created if it doesn't exist, a block device, or OLD
        /// itself.
        new: PathBuf,
        /// Overwrite what NEW holds.
        #[arg(long)]
        force: bool,
    },
}

/// Runs the command.
///
/// # Errors
/// When the members can't be read, or the new one was not filled.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.command {
        Command::Status { image, json } => show(image, *json),
        Command::Replace { image, old, new, force } => {
            replace(image, old, new, *force).map(|()| ExitCode::SUCCESS)
        }
    }
}

#[derive(Serialize)]
struct Status {
    kind: String,
    pool: String,
    length_bytes: u64,
    state: &'static str,
    open: bool,
    members: Vec<Member>,
}

#[derive(Serialize)]
struct Member {
    index: usize,
    name: String,
    state: &'static str,
    events: Option<u64>,
    rebuilt_bytes: Option<u64>,
}

impl fmt::Display for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Status { kind, pool, length_bytes, state, open, members } = self;
        writeln!(formatter, "{kind} {pool}, {length_bytes} bytes: {state}")?;
        if *open {
            writeln!(formatter, "in use, or not unmounted: the next mount compares the copies")?;
        }
        for member in members {
            write!(formatter, "  {} {}: {}", member.index, member.name, member.state)?;
            if let Some(events) = member.events {
                write!(formatter, " (event {events})")?;
            }
            writeln!(formatter)?;
        }
        Ok(())
    }
}

fn composed(image: &Image) -> anyhow::Result<(ComposedKind, &[PathBuf])> {
    match image {
        Image::Composed(kind, paths) => Ok((*kind, paths)),
        Image::Single(path) => {
            bail!("{} is a single image; write mirror:A,B or concat:A,B", path.display())
        }
    }
}

fn show(image: &Image, json: bool) -> anyhow::Result<ExitCode> {
    let (kind, _) = composed(image)?;
    let members = status(kind, &image.candidates(OpenMode::ReadOnly, true)?)?;
    let in_sync = members.iter().filter(|member| member.state == MemberState::InSync).count();
    let Some(label) = newest_label(&members) else { bail!("{image}: no member is complete") };
    let shown = Status {
        kind: kind.to_string(),
        pool: label.pool.to_string(),
        length_bytes: label.composed_bytes,
        state: match (kind, in_sync == members.len()) {
            (_, true) => "complete",
            (ComposedKind::Mirror, false) => "degraded",
            (ComposedKind::Concat, false) => "incomplete",
        },
        open: kind == ComposedKind::Mirror && label.open,
        members: members.iter().map(member).collect(),
    };
    console::print(&shown, json)?;
    Ok(if in_sync == members.len() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_UNSOUND) })
}

fn member(status: &MemberStatus) -> Member {
    let label = status.label.as_ref();
    Member {
        index: status.index,
        name: status.name.clone(),
        state: status.state.text(),
        events: label.map(|label| label.events),
        rebuilt_bytes: label
            .filter(|_| status.state == MemberState::Rebuilding)
            .map(|label| label.rebuilt_bytes),
    }
}

/// Of a member in sync.
fn newest_label(members: &[MemberStatus]) -> Option<&Label> {
    let in_sync = members.iter().filter(|member| member.state == MemberState::InSync);
    in_sync.filter_map(|member| member.label.as_ref()).max_by_key(|label| label.events)
}

/// 1. The members but OLD, and OLD if it works, are opened, each exclusively; NEW is made or
///    opened.
/// 2. NEW gets a label that calls it incomplete; everything is copied and read back. *A crash:
///    incomplete; go on.*
/// 3. All checksums of the volume are verified on NEW; what is bad is taken from another copy.
/// 4. NEW becomes a member, OLD no longer is. *A crash in between: NEW is incomplete, go on.*
fn replace(image: &Image, old: &Path, new: &Path, force: bool) -> anyhow::Result<()> {
    let (kind, paths) = composed(image)?;
    ensure!(kind == ComposedKind::Mirror, "a {kind} has no second copy to fill a new member from");
    let position = paths.iter().position(|path| path == old || image::same_file(path, old));
    let position = position
        .with_context(|| format!("{} is not among the members of {image}", old.display()))?;
    let in_place = new == old || image::same_file(new, &paths[position]);
    let mut others = paths.to_vec();
    others.remove(position);
    for other in &others {
        ensure!(!image::same_file(other, new), "{} is a member already", new.display());
    }
    image::expect_different(paths)?;
    let open = |(at, path): (usize, &PathBuf)| match (at == position, in_place) {
        (true, true) => Ok(Candidate { name: path.display().to_string(), device: None }),
        (is_old, _) => image::candidate(path, OpenMode::ReadWrite, is_old),
    };
    let candidates: Vec<Candidate> =
        paths.iter().enumerate().map(open).collect::<anyhow::Result<_>>()?;
    let members = status(kind, &candidates)?;
    let label = newest_label(&members)
        .with_context(|| format!("{image}: no other member is complete"))?
        .clone();
    let target = open_new(new, &label, force)?;
    let mut rebuild = Rebuild::start(candidates, position, target, force)?;
    if rebuild.done_bytes() > 0 {
        console::tell(&format_args!(
            "cairn: continuing the last attempt, after {} bytes",
            rebuild.done_bytes()
        ));
    }
    let bar = ProgressBar::bytes("copying", rebuild.total_bytes());
    rebuild.copy(&mut |done| bar.set(done))?;
    drop(bar);
    if rebuild.unreadable_blocks() > 0 {
        console::tell(&format_args!(
            "cairn: warning: {} blocks could not be read from any member",
            rebuild.unreadable_blocks()
        ));
    }
    verify(&rebuild)?;
    rebuild.finish()?;
    let shown = new.display();
    if in_place {
        return console::print_text(&format_args!("{shown} is in sync again"));
    }
    let mut members = paths.to_vec();
    members[position] = new.to_owned();
    console::print_text(&format_args!(
        "{shown} has replaced {}; from now on write: {}",
        old.display(),
        Image::Composed(kind, members)
    ))
}

/// Verifies what was copied, as far as there is a volume that says what is right.
fn verify(rebuild: &Rebuild) -> anyhow::Result<()> {
    let bar = ProgressBar::items("verifying", 0);
    let checked = cairn_fsck::check(
        &rebuild.view(),
        &CheckOptions { data: true, repair: false },
        &mut show_on(&bar),
    );
    drop(bar);
    match checked {
        Ok(report) if report.errors > 0 => {
            console::tell(&format_args!(
                "cairn: warning: the volume has {} errors, which all members share; `cairn fsck --data` shows them",
                report.errors
            ));
        }
        Ok(_) => {}
        Err(FsckError::NoVolume { .. }) => console::tell(&format_args!(
            "cairn: warning: the mirror holds no volume whose checksums could be verified"
        )),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// Makes or opens the new member.
fn open_new(new: &Path, label: &Label, force: bool) -> anyhow::Result<Candidate> {
    let (shown, bytes) = (new.display(), DATA_START_BYTES + label.member_bytes);
    let content = create::content(new)?;
    let device = match content {
        Content::Missing => FileDevice::create(new, bytes)?,
        _ => {
            if fs::metadata(new)?.is_file() && fs::metadata(new)?.len() == 0 {
                fs::OpenOptions::new()
                    .write(true)
                    .open(new)?
                    .set_len(bytes)
                    .with_context(|| format!("{shown}: cannot set its size"))?;
            }
            FileDevice::open(new, OpenMode::ReadWrite)?
        }
    };
    let is_ours = || {
        Label::read(&device, &shown.to_string())
            .ok()
            .flatten()
            .is_some_and(|found| found.pool == label.pool)
    };
    if content != Content::Known(signature::MEMBER) || !is_ours() {
        create::expect_free(new, content, force)?;
    }
    Ok(Candidate { name: shown.to_string(), device: Some(Arc::new(device)) })
}
