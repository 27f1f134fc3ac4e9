//! Programs that a run starts.
//!
//! What a run starts has a process group of its own, since a Ctrl-C is meant for the run, not for a
//! server that it tests. But from its fork until it has that group, a child belongs to the run's,
//! and a signal of the terminal ends it there, or when it is let through later. A child that ended
//! so has done nothing yet, and is started again.
use crate::signals::SIGNALS;
use cairn_environment::clock;
use rustix::process::{Pid, Signal, kill_process_group};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output};
use std::time::Duration;

const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// For a program that was asked to end.
const END_TIME_MAX: Duration = Duration::from_secs(10);
/// How often a command is started, at most.
const STARTS_MAX: usize = 8;

/// Whether a signal for the run has ended a child before that had a process group of its own. Later
/// it has handlers, or the signal does not reach it.
pub fn was_for_the_run(ended: ExitStatus) -> bool {
    ended.signal().is_some_and(|signal| SIGNALS.contains(&signal))
}

/// Runs a command of a run to its end.
///
/// # Errors
/// When it cannot be started.
pub fn output_of(command: &mut Command) -> io::Result<Output> {
    for _ in 1..STARTS_MAX {
        let output = command.output()?;
        if !was_for_the_run(output.status) {
            return Ok(output);
        }
    }
    command.output()
}

/// Waits until the program has ended, for at most `time_max`; `None` when it has not.
///
/// # Errors
/// When the system refuses.
pub fn wait_at_most(child: &mut Child, time_max: Duration) -> io::Result<Option<ExitStatus>> {
    let begin = clock::now_monotonic();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begin.elapsed() > time_max {
            return Ok(None);
        }
        clock::sleep(POLL_INTERVAL);
    }
}

/// Ends a program and those that it started, which have its process group: asks them first, then
/// makes them.
pub fn end(child: &mut Child) {
    let group = Pid::from_raw(child.id() as i32);
    // They may have ended meanwhile, here and below.
    let signal = |signal| group.map(|group| kill_process_group(group, signal));
    let _ = signal(Signal::TERM);
    let _ = wait_at_most(child, END_TIME_MAX);
    let _ = signal(Signal::KILL);
    let _ = child.wait();
}

/// The file of the program `name` in one of the folders of `search_path`; a name with a slash is a
/// path of its own.
pub fn find_program(name: &str, search_path: &str) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(|path| path.is_file());
    }
    search_path.split(':').map(|folder| Path::new(folder).join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console;
    use std::process::Stdio;

    #[test]
    fn a_command_that_a_signal_for_the_run_has_ended_runs_again() {
        // The process that runs this test may ignore signals, as nohup does; its children would,
        // too.
        if !Command::new("env")
            .args(["--default-signal", "true"])
            .output()
            .is_ok_and(|told| told.status.success())
        {
            return console::tell(&"left out: env does not know --default-signal");
        }
        for signal in ["INT", "TERM", "HUP"] {
            let folder = tempfile::tempdir().unwrap();
            let mut command = Command::new("env");
            command.args([
                "--default-signal",
                "sh",
                "-c",
                &format!("[ -e second ] && exit 3; touch second; kill -{signal} $$"),
            ]);
            let ended = output_of(command.current_dir(folder.path()).stdin(Stdio::null())).unwrap();
            assert_eq!(ended.status.code(), Some(3), "{signal}");
        }
        let ended = output_of(Command::new("sh").args(["-c", "kill -KILL $$"])).unwrap();
        assert!(!was_for_the_run(ended.status) && !ended.status.success());
    }

    #[test]
    fn programs_are_found_in_the_search_path() {
        assert_eq!(find_program("sh", "/nowhere:/bin"), Some("/bin/sh".into()));
        assert_eq!(find_program("/bin/sh", ""), Some("/bin/sh".into()));
        assert_eq!(find_program("no-such-program", "/bin"), None);
        assert_eq!(find_program("/bin", ""), None);
    }
}
