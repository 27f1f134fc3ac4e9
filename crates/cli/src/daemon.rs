//! Runs the server of a mount as a process of its own.
//!
//! `cairn mount` starts itself once more, with `--serve`, before it has made any thread. The
//! child's standard output is a pipe: one line on it says that the mount stands. Until then the
//! child's standard error is the user's, so that errors reach the user; then the child goes its own
//! way ([`detach`]).
use crate::logging;
use anyhow::{Context, bail};
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};

const READY: &str = "ready";

/// Starts this program with `arguments` and none of this process's open files. Returns when the
/// program says that it is ready; or with its exit code when it ended instead, after it reported
/// why.
///
/// # Errors
/// When the program can't be started, or was killed.
pub fn start(arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe().context("cannot find the program's own file")?;
    let mut command = Command::new(program);
    // This program's file may bear the name of mount(8)'s helper.
    command.arg0("cairn").args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
    // A script's lock or pipe would stay open as long as the mount.
    cairn_fuse::hand_on_standard_streams_only();
    let mut child = command.spawn().context("cannot start the server")?;
    let mut line = String::new();
    let output = child.stdout.take().context("the server has no standard output")?;
    BufReader::new(output).read_line(&mut line).context("cannot read from the server")?;
    if line.trim_end() == READY { Ok(ExitCode::SUCCESS) } else { exit_code(&mut child) }
}

fn exit_code(child: &mut Child) -> anyhow::Result<ExitCode> {
    let status = child.wait().context("cannot wait for the server")?;
    match status.code() {
        Some(code) => {
            Ok(ExitCode::from(u8::try_from(code).ok().filter(|code| *code != 0).unwrap_or(1)))
        }
        None => bail!("the server ended before it mounted the volume: {status}"),
    }
}

/// Where output goes that no process reads. It is opened before the mount stands: no step that can
/// fail comes after.
pub struct Nowhere(File);

impl Nowhere {
    /// # Errors
    /// The system refuses.
    pub fn open() -> anyhow::Result<Self> {
        let open = OpenOptions::new().read(true).write(true).open("/dev/null");
        Ok(Self(open.context("cannot open /dev/null")?))
    }
}

/// Reports to the waiting parent that the mount stands, then leaves its terminal, its folder and
/// its output; messages go to `log`, or to the system's log at `socket`.
///
/// # Errors
/// When the system refuses; the parent then sees the process end without the line.
pub fn detach(log: Option<File>, socket: &Path, nowhere: &Nowhere) -> anyhow::Result<()> {
    let Nowhere(nowhere) = nowhere;
    // This fails in a process that leads its group already, which has left its terminal as well.
    let _ = rustix::process::setsid();
    std::env::set_current_dir(Path::new("/")).context("cannot change to /")?;
    rustix::stdio::dup2_stderr(log.as_ref().unwrap_or(nowhere))?;
    if log.is_none() {
        logging::go_to_system_log(socket);
    }
    // A parent that is gone has no use for the line.
    let _ = writeln!(std::io::stdout(), "{READY}");
    rustix::stdio::dup2_stdout(nowhere)?;
    Ok(())
}

/// As many open files as the system allows: a limit that suits a shell is too low for a server.
pub fn raise_open_files_limit() {
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum;
    // What can't be had is not needed by most mounts.
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
}
