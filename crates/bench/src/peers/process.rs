//! Other programs: started in a process group of their own, so that a Ctrl-C reaches this program
//! alone, which then ends them in order.
use anyhow::{Context, bail};
use cairn_environment::clock;
use cairn_harness::Interrupt;
use cairn_harness::process::{end, find_program};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Where system commands are when the user's PATH lacks them.
const SYSTEM_FOLDERS: &str = "/usr/local/sbin:/usr/sbin:/sbin";
/// Below it Debian has the programs of each version of PostgreSQL.
const POSTGRES_FOLDER: &str = "/usr/lib/postgresql";
const MESSAGE_LINES_MAX: usize = 8;

/// Where programs are looked for.
pub fn search_path() -> String {
    let newest =
        fs::read_dir(POSTGRES_FOLDER).into_iter().flatten().flatten().filter_map(|entry| {
            let version = entry.file_name().to_str()?.parse::<u32>().ok()?;
            Some((version, entry.path().join("bin")))
        });
    let postgres =
        newest.max().map(|(_, folder)| format!(":{}", folder.display())).unwrap_or_default();
    format!("{}:{SYSTEM_FOLDERS}{postgres}", std::env::var("PATH").unwrap_or_default())
}

/// Whether a command can be found.
pub fn is_installed(command: &str) -> bool {
    find_program(command, &search_path()).is_some()
}

/// A command with these arguments.
pub fn command<S: AsRef<std::ffi::OsStr>>(program: S, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

/// The settings of a user, and of a build that runs this, change what these programs do.
const SETTINGS: [&str; 9] = [
    "CARGO_TARGET_DIR",
    "CARGO_BUILD_TARGET_DIR",
    "CARGO_BUILD_TARGET",
    "CARGO_INCREMENTAL",
    "CARGO_ENCODED_RUSTFLAGS",
    "RUSTFLAGS",
    "RUSTC_WRAPPER",
    "GIT_DIR",
    "GIT_WORK_TREE",
];

/// The same command of git or cargo, without the settings of the user.
pub fn without_settings(mut command: Command) -> Command {
    for name in SETTINGS {
        command.env_remove(name);
    }
    command
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_TERMINAL_PROMPT", "0");
    command
}

/// Starts a program whose output goes to files in `folder`.
pub fn start(command: &mut Command, folder: &Path, name: &str) -> anyhow::Result<Child> {
    let output = |kind: &str| File::create(folder.join(format!("{name}.{kind}")));
    command
        .env("PATH", search_path())
        .stdin(Stdio::null())
        .stdout(output("out")?)
        .stderr(output("err")?)
        .process_group(0);
    command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))
}

/// Sleeps until the program has ended, but not for longer than an interval.
fn sleep_until_end(child: &Child) {
    let interval = Timespec { tv_sec: 0, tv_nsec: POLL_INTERVAL.as_nanos() as i64 };
    match pidfd_open(Pid::from_child(child), PidfdFlags::empty()) {
        // A signal may end it early.
        Ok(handle) => drop(poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&interval))),
        Err(_) => clock::sleep(POLL_INTERVAL),
    }
}

/// Runs a program, and returns what it wrote to standard output.
///
/// # Errors
/// When it fails, with the end of what it said; when it was interrupted, and then it has ended.
pub fn run_to_end(
    command: Command,
    folder: &Path,
    interrupt: &Interrupt,
) -> anyhow::Result<String> {
    run_timed(command, folder, interrupt).map(|(output, _)| output)
}

/// Runs a program, and returns what it wrote to standard output, and how long it took.
///
/// # Errors
/// As those of [`run_to_end`].
pub fn run_timed(
    mut command: Command,
    folder: &Path,
    interrupt: &Interrupt,
) -> anyhow::Result<(String, Duration)> {
    let begin = clock::now_monotonic();
    let mut child = start(&mut command, folder, "command")?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if interrupt.is_set() {
            end(&mut child);
            interrupt.check()?;
        }
        sleep_until_end(&child);
    };
    let elapsed = begin.elapsed();
    let output = fs::read(folder.join("command.out"))
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())?;
    if !status.success() {
        let errors = fs::read(folder.join("command.err")).unwrap_or_default();
        let said = if errors.is_empty() {
            last_lines(&output)
        } else {
            first_lines(&String::from_utf8_lossy(&errors))
        };
        bail!("{} failed ({status}): {said}", command.get_program().display());
    }
    Ok((output, elapsed))
}

fn lines_of(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
}

/// Of standard error: what is wrong comes first, help on usage after it.
fn first_lines(text: &str) -> String {
    let lines = lines_of(text);
    lines[..lines.len().min(MESSAGE_LINES_MAX)].join("; ")
}

/// Of standard output, where tools report their errors after everything else.
fn last_lines(text: &str) -> String {
    let lines = lines_of(text);
    lines[lines.len().saturating_sub(MESSAGE_LINES_MAX)..].join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn output_and_failures_are_returned() {
        let folder = tempfile::tempdir().unwrap();
        let shell = |script: &str| {
            run_to_end(command("sh", &["-c", script]), folder.path(), &Interrupt::default())
        };
        assert_eq!(shell("echo yes").unwrap(), "yes\n");
        let error = shell("echo out; echo because >&2; exit 3").unwrap_err().to_string();
        assert!(error.contains("because") && error.contains('3'), "{error}");
        assert!(shell("echo one; echo two; exit 3").unwrap_err().to_string().contains("one; two"));
        assert!(is_installed("sh") && !is_installed("no-such-command"));
        let missing =
            run_to_end(command("no-such-command", &[]), folder.path(), &Interrupt::default());
        assert!(missing.unwrap_err().to_string().contains("no-such-command"));
    }

    #[test]
    fn an_interruption_ends_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let interrupt = Interrupt::default();
        interrupt.flag().store(true, Ordering::Relaxed);
        let ended = run_to_end(command("sleep", &["3600"]), folder.path(), &interrupt);
        assert!(ended.unwrap_err().to_string().contains("interrupted"));
    }

    #[test]
    fn what_a_program_started_ends_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let pid_file = folder.path().join("pid");
        let script =
            format!("sleep 3600 & echo $! >{0}.new; mv {0}.new {0}; wait", pid_file.display());
        let mut child =
            start(&mut command("sh", &["-c", &script]), folder.path(), "parent").unwrap();
        while !pid_file.exists() {
            clock::sleep(POLL_INTERVAL);
        }
        let grandchild = fs::read_to_string(&pid_file).unwrap().trim().to_owned();
        end(&mut child);
        let stat = format!("/proc/{grandchild}/stat");
        // Until a process has waited for it, it is there without running.
        while fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
            clock::sleep(POLL_INTERVAL);
        }
    }
}
