//! The server of a mount, as a program of its own that a run starts and watches.
//!
//! States: *started* → *mounted*, from where on the mount answers → *ended*: by an unmount, by
//! itself, or killed. Dropped, it is killed.
use crate::process::{self, wait_at_most, was_for_the_run};
use anyhow::{Context, bail};
use cairn_environment::clock;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A server that was started.
pub struct ServerProcess {
    command: Command,
    child: Child,
    log: PathBuf,
}

impl ServerProcess {
    /// Starts `command`, in a process group of its own. Its standard error goes to the end of the
    /// file `log`.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn start(mut command: Command, log: &Path) -> anyhow::Result<Self> {
        let errors = OpenOptions::new().create(true).append(true).open(log);
        let errors = errors.with_context(|| log.display().to_string())?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors).process_group(0);
        let child = spawn(&mut command)?;
        Ok(Self { command, child, log: log.to_owned() })
    }

    /// Waits until the mount at `mountpoint` answers. `go_on` is asked again and again; its error
    /// ends the wait.
    ///
    /// # Errors
    /// When the server ends instead, with its last words; when that takes longer than `time_max`.
    pub fn wait_for_mount(
        &mut self,
        mountpoint: &Path,
        time_max: Duration,
        mut go_on: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let outside = device_of(mountpoint.parent().unwrap_or(Path::new("/")))
            .with_context(|| format!("{}: there is no such folder", mountpoint.display()))?;
        let begin = clock::now_monotonic();
        while device_of(mountpoint).is_none_or(|device| device == outside) {
            go_on()?;
            if let Some(status) = self.child.try_wait()? {
                if was_for_the_run(status) {
                    self.child = spawn(&mut self.command)?;
                    continue;
                }
                bail!("the volume cannot be mounted: {status}{}", self.last_words());
            }
            if begin.elapsed() > time_max {
                bail!("no mount after {time_max:?}{}", self.last_words());
            }
            clock::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn last_words(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        log.lines().last().map_or(String::new(), |line| format!(": {line}"))
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, and wait until it is gone.
    ///
    /// # Errors
    /// When it had ended before.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait()?.filter(|status| !was_for_the_run(*status)) {
            bail!("the server had ended by itself: {status}");
        }
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Ends it in order, as far as it can; what it has mounted, it unmounts.
    pub fn end(&mut self) {
        process::end(&mut self.child);
    }

    /// Waits until it has ended after an unmount.
    ///
    /// # Errors
    /// When it ends badly, or has not ended after `time_max`: then it is made to end.
    pub fn wait_for_end(&mut self, time_max: Duration) -> anyhow::Result<()> {
        let ended: Option<ExitStatus> = wait_at_most(&mut self.child, time_max)?;
        match ended {
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("the server ended with {status}{}", self.last_words()),
            None => {
                self.end();
                bail!("the server has not ended after {time_max:?}");
            }
        }
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(command: &mut Command) -> anyhow::Result<Child> {
    command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))
}

fn device_of(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.dev())
}
