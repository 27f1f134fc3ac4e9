//! Ctrl-C and its like: the first signal asks a run to end in order, the second one ends it at
//! once.
//!
//! What a run starts has a process group of its own, since a Ctrl-C is meant for the run, not for a
//! server that it tests. But from its fork until it has that group, a child belongs to the run's,
//! and a signal of the terminal ends it there, or when it is let through later. A child that ended
//! so has done nothing yet, and is started again.
use crate::{EXIT_INTERRUPTED, output};
use anyhow::Context;
use cairn_environment::thread;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Listens to signals for as long as the process lives: calls `first`, and says that the run ends
/// after `part`; then `second`, and ends the process.
///
/// # Errors
/// When the system refuses.
pub fn listen(
    part: &'static str,
    first: impl Fn() + Send + 'static,
    second: impl Fn() + Send + 'static,
) -> anyhow::Result<()> {
    let mut signals = Signals::new(SIGNALS).context("cannot listen to signals")?;
    drop(thread::spawn("signals", move || {
        for (count, _) in signals.forever().enumerate() {
            if count > 0 {
                second();
                std::process::exit(EXIT_INTERRUPTED.into());
            }
            // Before the run can end.
            output::tell(&format_args!(
                "cairn: the run ends after {part}; the same signal again ends it at once"
            ));
            first();
        }
    }));
    Ok(())
}

/// What a signal sets, of a run in memory.
#[derive(Default)]
pub struct Interrupt {
    received: Arc<AtomicBool>,
    /// Ends the run. The run may set it itself.
    pub stop: Arc<AtomicBool>,
}

impl Interrupt {
    /// Listens to signals; a second one ends the program at once.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn listen() -> anyhow::Result<Self> {
        let interrupt = Self::default();
        let flags = [interrupt.received.clone(), interrupt.stop.clone()];
        listen(
            "what is under way",
            move || flags.iter().for_each(|flag| flag.store(true, Ordering::SeqCst)),
            || {},
        )?;
        Ok(interrupt)
    }

    /// Whether a signal has come.
    pub fn is_received(&self) -> bool {
        self.received.load(Ordering::SeqCst)
    }
}

/// Whether a signal for the run has ended a child before that had a process group of its own. Later
/// it has handlers, or the signal does not reach it.
pub fn was_for_the_run(ended: ExitStatus) -> bool {
    ended.signal().is_some_and(|signal| SIGNALS.contains(&signal))
}

/// How often a command is started, at most.
const STARTS_MAX: usize = 8;

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

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn a_command_that_a_signal_for_the_run_has_ended_runs_again() {
        // Whoever runs this test may ignore signals, as nohup does, and what it starts would, too.
        if !Command::new("env")
            .args(["--default-signal", "true"])
            .output()
            .is_ok_and(|told| told.status.success())
        {
            return output::tell(&"left out: env does not know --default-signal");
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
}
