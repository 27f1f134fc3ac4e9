//! The commands that the checks run: `cairn mkfs`, `mount --foreground`, `umount`, `fsck`; and the
//! kill.
use super::session::{Mounts, detach};
use super::signals::{output_of, was_for_the_run};
use super::workers::Problem;
use cairn_bench::mounts;
use cairn_environment::clock;
use rustix::fs::{FlockOperation, flock};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const MOUNT_TIME_MAX: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// For others to leave a mount that is to end.
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

/// A server that runs.
pub struct Running(Child);

impl Running {
    /// Process id of the server.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// SIGKILL, and wait until it is gone.
    pub fn kill(&mut self) -> Result<(), Problem> {
        match self.0.try_wait().map_err(text)? {
            Some(status) if !was_for_the_run(status) => {
                return Err(format!("the server had ended by itself: {status}"));
            }
            _ => {}
        }
        self.0.kill().and_then(|()| self.0.wait()).map_err(text).map(|_| ())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An error as a problem.
pub fn text(error: std::io::Error) -> Problem {
    error.to_string()
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
    pub fn start(&self, options: &[&str]) -> Result<Running, Problem> {
        let mut running = self.spawn(options)?;
        let outside = device_of(self.mountpoint.parent().unwrap_or(Path::new("/")))
            .ok_or("no working folder")?;
        let begin = clock::now_monotonic();
        while device_of(&self.mountpoint).is_none_or(|device| device == outside) {
            if let Some(status) = running.0.try_wait().map_err(text)? {
                if was_for_the_run(status) {
                    running = self.spawn(options)?;
                    continue;
                }
                let log = fs::read_to_string(self.log()).unwrap_or_default();
                let told = log.lines().last().map_or(String::new(), |line| format!(": {line}"));
                return Err(format!("the volume cannot be mounted: {status}{told}"));
            }
            if begin.elapsed() > MOUNT_TIME_MAX {
                return Err(format!("no mount after {MOUNT_TIME_MAX:?}"));
            }
            clock::sleep(POLL_INTERVAL);
        }
        Ok(running)
    }

    /// Starts a server and kills it after `delay`, mounted or not.
    pub fn start_and_kill(&self, delay: Duration) -> Result<(), Problem> {
        let mut running = self.spawn(&[])?;
        clock::sleep(delay);
        running.kill()?;
        self.take_away_dead_mount()
    }

    fn spawn(&self, options: &[&str]) -> Result<Running, Problem> {
        let mut command = cairn(&["mount"]);
        command
            .arg(&self.image)
            .arg(&self.mountpoint)
            .arg("--foreground")
            .args(self.mounts.arguments())
            .args(options)
            .stdout(Stdio::null());
        let log =
            fs::OpenOptions::new().create(true).append(true).open(self.log()).map_err(text)?;
        Ok(Running(command.stderr(log).spawn().map_err(|error| format!("{PROGRAM}: {error}"))?))
    }

    /// What the servers wrote.
    fn log(&self) -> PathBuf {
        self.image.with_extension("log")
    }

    /// Takes away the mount whose server is dead, and waits until the kernel has let go of the
    /// image.
    pub fn take_away_dead_mount(&self) -> Result<(), Problem> {
        let begin = clock::now_monotonic();
        while mounts::is_mounted_below(&self.mountpoint) {
            detach(&self.mountpoint);
            if begin.elapsed() > MOUNT_TIME_MAX {
                return Err("the dead mount cannot be taken away".into());
            }
            clock::sleep(POLL_INTERVAL);
        }
        // A mount that was taken away may live on for a moment, in somebody's sync(2), and holds
        // its loop device so long; what a dead server had in an io_uring holds its files until the
        // kernel has cleaned up.
        let image = fs::canonicalize(&self.image).map_err(text)?;
        let file = fs::File::open(&image).map_err(text)?;
        while is_behind_a_loop_device(&image)
            || flock(&file, FlockOperation::NonBlockingLockExclusive).is_err()
        {
            if begin.elapsed() > MOUNT_TIME_MAX {
                return Err("the kernel does not let go of the image".into());
            }
            clock::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Ends the mount in order; the server must end well, too. Somebody else may look into the
    /// mount for a moment, an indexer or a file manager: that is no finding.
    pub fn unmount(&self, running: &mut Running) -> Result<(), Problem> {
        let begin = clock::now_monotonic();
        loop {
            match self.run(&["umount", &self.mountpoint.to_string_lossy()]) {
                Err(problem) if problem.contains("is busy") && begin.elapsed() < BUSY_TIME_MAX => {
                    clock::sleep(POLL_INTERVAL)
                }
                other => break other?,
            }
        }
        let status = running.0.wait().map_err(text)?;
        if status.success() { Ok(()) } else { Err(format!("the server ended with {status}")) }
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

fn is_behind_a_loop_device(image: &Path) -> bool {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    devices
        .filter_map(|device| fs::read_to_string(device.path().join("loop/backing_file")).ok())
        .any(|file| Path::new(file.trim_end()) == image)
}

fn device_of(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.dev())
}
