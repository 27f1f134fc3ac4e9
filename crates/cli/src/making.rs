//! A volume in the making, which Ctrl-C or SIGTERM may interrupt.
//!
//! States: *making* until [`Making::finish`], then *finished*. Whatever ends it while making
//! removes the files that were made for the volume; a signal also says which others hold none now,
//! and ends the process. Once finished, a signal changes nothing.
//!
//! Lock discipline: the state's lock (rank LEAF) is held while a file is made, and while a signal
//! takes everything back, so a file is either not there yet or known.
use anyhow::Context;
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_environment::thread;
use cairn_harness::{EXIT_INTERRUPTED, console};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Default)]
struct State {
    made: Vec<PathBuf>,
    overwritten: Vec<PathBuf>,
    finished: bool,
}

impl State {
    /// Removes what was made; returns what a user must know of the rest.
    fn take_back(&mut self) -> Vec<String> {
        let mut messages = vec!["interrupted: no volume was made".to_owned()];
        for path in self.made.drain(..) {
            let path_shown = path.display();
            match fs::remove_file(&path) {
                Ok(()) => messages.push(format!("{path_shown} was removed")),
                Err(error) => messages
                    .push(format!("{path_shown} holds no volume and cannot be removed: {error}")),
            }
        }
        let overwritten = self.overwritten.drain(..);
        messages.extend(overwritten.map(|path| {
            format!(
                "{} holds no volume now: make it again with `cairn mkfs --force`",
                path.display()
            )
        }));
        messages
    }
}

/// What has been done for a volume that is not complete yet.
pub struct Making {
    state: Arc<Mutex<State>>,
    signals: Handle,
}

impl Making {
    /// Listens to signals from now on.
    ///
    /// # Errors
    /// When the system does not let it.
    pub fn start() -> anyhow::Result<Self> {
        let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot handle signals")?;
        let state = Arc::new(Mutex::new(Rank::LEAF, State::default()));
        let making = Self { state: Arc::clone(&state), signals: signals.handle() };
        // It ends when the signals are closed.
        let _ = thread::spawn("signals", move || {
            for _ in signals.forever() {
                let mut state = state.lock();
                if !state.finished {
                    console::tell(&format_args!("cairn: {}", state.take_back().join("; ")));
                    std::process::exit(EXIT_INTERRUPTED.into());
                }
            }
        });
        Ok(making)
    }

    /// Makes the file `path` by `make`; a signal removes it.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn create<T>(
        &self,
        path: &Path,
        make: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let mut state = self.state.lock();
        let made = make()?;
        state.made.push(path.to_owned());
        Ok(made)
    }

    /// What `path` holds is about to be overwritten.
    pub fn overwrite(&self, path: &Path) {
        self.state.lock().overwritten.push(path.to_owned());
    }

    /// There is a volume now.
    pub fn finish(&self) {
        self.state.lock().finished = true;
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        if !state.finished {
            // The error that counts is the one that ended it.
            let _ = state.take_back();
        }
        state.finished = true;
        self.signals.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_is_taken_back_and_the_rest_named() {
        let folder = tempfile::tempdir().unwrap();
        let (new, old) = (folder.path().join("new"), folder.path().join("old"));
        fs::write(&old, "x").unwrap();
        let making = Making::start().unwrap();
        making.overwrite(&old);
        making.create(&new, || Ok(fs::write(&new, "y")?)).unwrap();
        assert!(
            making
                .create(&folder.path().join("never"), || anyhow::Result::<()>::Err(
                    anyhow::anyhow!("no")
                ))
                .is_err()
        );
        let messages = making.state.lock().take_back().join("; ");
        assert!(!new.exists() && old.exists());
        assert!(
            messages.contains("new was removed")
                && messages.contains("old holds no volume now")
                && !messages.contains("never"),
            "{messages}"
        );
    }
}
