//! The commands that the checks run: `cairn mkfs`, `mount --foreground`, `umount`, `fsck`; and the
//! kill.
use super::session::Mounts;
use super::workers::Problem;
use cairn_environment::clock;
use cairn_harness::mounts;
use cairn_harness::process::output_of;
use cairn_harness::server::ServerProcess;
use rustix::fs::{FlockOperation, flock};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const MOUNT_TIME_MAX: Duration = Duration::from_secs(60);
/// Time for a server to end after `cairn umount` has waited for it.
const END_TIME_MAX: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Time for a server to open its image.
const OPEN_TIME_MAX: Duration = Duration::from_secs(10);
const OPEN_POLL_INTERVAL: Duration = Duration::from_micros(200);
/// Time for other processes to leave a mount before it ends.
const BUSY_TIME_MAX: Duration = Duration::from_secs(10);
/// This program, even when another one has taken its place.
const PROGRAM: &str = "/proc/self/exe";

/// A command of this program, in a process group of its own: a Ctrl-C is not meant for it.
pub fn cairn(arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg0("cairn").args(arguments).process_group(0).stdin(Stdio::null());
    command
}

/// Where the volume is and how to reach it.
pub struct Server {
    image: PathBuf,
    mountpoint: PathBuf,
    mounts: Mounts,
}

/// An error as a problem.
pub fn text(error: std::io::Error) -> Problem {
    error.to_string()
}

/// An error and its causes as a problem.
pub fn full_text(error: anyhow::Error) -> Problem {
    format!("{error:#}")
}

impl Server {
    /// With an image and a mount point in the folder `work`.
    pub fn new(work: &Path, mounts: &Mounts) -> Self {
        Self { mounts: mounts.clone(), ..Self::with_image(work, work.join("image")) }
    }

    /// For an image that has a volume already.
    pub fn with_image(work: &Path, image: PathBuf) -> Self {
        Self { image, mountpoint: work.join("mount"), mounts: Mounts::default() }
    }

    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    pub fn make_volume(&self, size: &str, log_size: &str) -> Result<(), Problem> {
        fs::create_dir_all(&self.mountpoint).map_err(text)?;
        let image = self.image.to_string_lossy();
        self.run(&["mkfs", &image, "--force", "--size", size, "--log-size", log_size])
    }

    /// Starts a server, and returns when the mount answers.
    pub fn start(&self, options: &[&str]) -> Result<ServerProcess, Problem> {
        let mut running = self.spawn(options)?;
        running.wait_for_mount(&self.mountpoint, MOUNT_TIME_MAX, || Ok(())).map_err(full_text)?;
        Ok(running)
    }

    /// Starts a server and kills it when it has had the image open for the time `delay`. Returns
    /// whether the mount did not stand by then.
    pub fn start_and_kill(&self, delay: Duration) -> Result<bool, Problem> {
        let mut running = self.spawn(&[])?;
        let begin = clock::now_monotonic();
        let image = fs::canonicalize(&self.image).map_err(text)?;
        // The kill says if the server has ended by itself.
        while !has_open(running.id(), &image) && begin.elapsed() < OPEN_TIME_MAX {
            clock::sleep(OPEN_POLL_INTERVAL);
        }
        clock::sleep(delay);
        running.kill().map_err(full_text)?;
        let is_recovering = !mounts::is_mounted_below(&self.mountpoint);
        self.take_away_dead_mount()?;
        Ok(is_recovering)
    }

    fn spawn(&self, options: &[&str]) -> Result<ServerProcess, Problem> {
        let mut command = cairn(&["mount"]);
        command
            .arg(&self.image)
            .arg(&self.mountpoint)
            .arg("--foreground")
            .args(self.mounts.arguments())
            .args(options);
        ServerProcess::start(command, &self.log()).map_err(full_text)
    }

    /// What the servers wrote.
    fn log(&self) -> PathBuf {
        self.image.with_extension("log")
    }

    /// Takes away the mount whose server is dead, and waits until the kernel has released the
    /// image.
    pub fn take_away_dead_mount(&self) -> Result<(), Problem> {
        let begin = clock::now_monotonic();
        while mounts::is_mounted_below(&self.mountpoint) {
            // One that stays shows in the table.
            let _ = mounts::detach(&self.mountpoint);
            if begin.elapsed() > MOUNT_TIME_MAX {
                return Err("the dead mount cannot be removed".into());
            }
            clock::sleep(POLL_INTERVAL);
        }
        // A mount that was taken away may live on for a moment, in the sync(2) of another process,
        // and holds its loop device that long; what a dead server had in an io_uring holds its
        // files until the kernel has cleaned up.
        let image = fs::canonicalize(&self.image).map_err(text)?;
        let file = fs::File::open(&image).map_err(text)?;
        while is_behind_a_loop_device(&image)
            || flock(&file, FlockOperation::NonBlockingLockExclusive).is_err()
        {
            if begin.elapsed() > MOUNT_TIME_MAX {
                return Err("the kernel still holds the image".into());
            }
            clock::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Ends the mount in order; the server must end well, too. Another process may look into the
    /// mount for a moment, an indexer or a file manager: that is no finding.
    pub fn unmount(&self, running: &mut ServerProcess) -> Result<(), Problem> {
        let begin = clock::now_monotonic();
        loop {
            match self.run(&["umount", &self.mountpoint.to_string_lossy()]) {
                Err(problem) if problem.contains("is busy") && begin.elapsed() < BUSY_TIME_MAX => {
                    clock::sleep(POLL_INTERVAL)
                }
                other => break other?,
            }
        }
        running.wait_for_end(END_TIME_MAX).map_err(full_text)
    }

    /// A check that must find nothing.
    pub fn fsck(&self, data: bool) -> Result<(), Problem> {
        let image = self.image.to_string_lossy();
        if data { self.run(&["fsck", "--data", &image]) } else { self.run(&["fsck", &image]) }
    }

    /// `cairn shutdown`, which leaves the mount.
    pub fn shut_down(&self, flush: bool) -> Result<(), Problem> {
        let mountpoint = self.mountpoint.to_string_lossy();
        if flush {
            self.run(&["shutdown", &mountpoint])
        } else {
            self.run(&["shutdown", "--no-log-flush", &mountpoint])
        }
    }

    pub fn sync(&self) -> Result<(), Problem> {
        self.run(&["sync", &self.mountpoint.to_string_lossy()])
    }

    fn run(&self, arguments: &[&str]) -> Result<(), Problem> {
        let output = output_of(&mut cairn(arguments)).map_err(text)?;
        if output.status.success() {
            return Ok(());
        }
        let told = [output.stdout, output.stderr].concat();
        Err(format!(
            "cairn {}: {}\n{}",
            arguments.join(" "),
            output.status,
            String::from_utf8_lossy(&told)
        ))
    }
}

/// Whether a process has this file open.
fn has_open(process_id: u32, file: &Path) -> bool {
    let open = fs::read_dir(format!("/proc/{process_id}/fd")).into_iter().flatten().flatten();
    open.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|target| target == file)
}

fn is_behind_a_loop_device(image: &Path) -> bool {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    devices
        .filter_map(|device| fs::read_to_string(device.path().join("loop/backing_file")).ok())
        .any(|file| Path::new(file.trim_end()) == image)
}
