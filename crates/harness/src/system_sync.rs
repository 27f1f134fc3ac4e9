//! sync(2) by a program of its own: it waits for every file system of the machine, also for one
//! whose server stands still, and what waits so can't even be killed.
use cairn_environment::clock;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A machine whose sync takes longer has a file system that stands still.
const TIME_MAX: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A sync that may go on.
pub struct SystemSync(Child);

impl SystemSync {
    /// Begins one.
    ///
    /// # Errors
    /// When the program `sync` can't be started.
    pub fn begin() -> std::io::Result<Self> {
        Command::new("sync").stdin(Stdio::null()).spawn().map(Self)
    }

    /// Whether it ends well within a minute.
    pub fn ends(&mut self) -> bool {
        let begin = clock::now_monotonic();
        loop {
            match self.0.try_wait() {
                Ok(Some(status)) => return status.success(),
                Ok(None) if begin.elapsed() < TIME_MAX => clock::sleep(POLL_INTERVAL),
                _ => return false,
            }
        }
    }
}

/// Whether a sync ends on this machine, before a run adds file systems of its own. On one where
/// some file system stands still for good, nothing can be learned from sync(2).
pub fn ends_here() -> bool {
    SystemSync::begin().is_ok_and(|mut sync| sync.ends())
}
