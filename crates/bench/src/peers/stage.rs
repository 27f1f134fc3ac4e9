//! What a comparison sets up, and takes down whatever happens: a folder, images, loop devices,
//! mounts.
//!
//! Invariant: what was set up last is taken down first: the mount, the loop devices, the folder.
use super::process::{self, command};
use super::{Candidate, PeersSettings, System};
use crate::resources::Resources;
use anyhow::{Context, ensure};
use cairn_blockdev::FileDevice;
use cairn_harness::console;
use cairn_harness::mounts::{detach, is_mounted_below};
use cairn_harness::server::ServerProcess;
use cairn_harness::work_folder::WorkFolder;
use rustix::fs::Advice;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

const MOUNT_TIME_MAX: Duration = Duration::from_secs(30);
const UNMOUNT_TIME_MAX: Duration = Duration::from_secs(120);
const IMAGE_STEP_BYTES: u64 = 64 << 20;

/// A candidate's place: its image, and the loop device on it.
struct Place {
    label: String,
    image: PathBuf,
    loop_device: Option<LoopDevice>,
}

/// The folder with the images; the loop devices go before it.
pub struct Stage {
    places: Vec<Place>,
    folder: WorkFolder,
}

/// Warns of what could not be taken down.
fn warn(message: fmt::Arguments<'_>) {
    console::tell(&format_args!("cairn: {message}"));
}

struct LoopDevice {
    path: PathBuf,
    folder: PathBuf,
}

/// Whether the kernel granted direct I/O, by what `state` holds: where a file system can't do that,
/// the kernel attaches without, and reports no error.
fn check_direct_io(state: &Path, image: &Path) -> anyhow::Result<()> {
    let told = fs::read_to_string(state).with_context(|| {
        format!("cannot find out whether the loop device does direct I/O: {}", state.display())
    })?;
    ensure!(
        told.trim() == "1",
        "direct I/O is not possible on a loop device on {}; name a folder on another file system \
         with --dir, or measure with --direct-io false",
        image.display(),
    );
    Ok(())
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let mut detach = command("losetup", &["--detach"]);
        detach.arg(&self.path);
        // An interruption must not keep it from being detached.
        if let Err(error) = process::run_to_end(detach, &self.folder, &Default::default()) {
            warn(format_args!("{} is left behind: {error}", self.path.display()));
        }
    }
}

impl Stage {
    /// A stage in a new folder below `parent`.
    pub fn new(parent: &Path) -> anyhow::Result<Self> {
        let folder = WorkFolder::new(parent, "cairn-bench-peers")?;
        let stage = Self { places: Vec::new(), folder };
        fs::create_dir(stage.mount_point())?;
        Ok(stage)
    }

    /// Where outputs of programs go.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn mount_point(&self) -> PathBuf {
        self.folder.path().join("mnt")
    }

    /// Writes the image of a candidate, and puts a loop device on it.
    pub fn add_image(
        &mut self,
        candidate: &Candidate,
        settings: &PeersSettings,
    ) -> anyhow::Result<()> {
        let image = self.folder.path().join(format!("{}.image", candidate.label));
        let size_bytes = candidate.system.image_bytes(settings.size_bytes);
        let device = FileDevice::create(&image, size_bytes)?;
        let mut offset_bytes = 0;
        while offset_bytes < size_bytes {
            settings.interrupt.check()?;
            let step_bytes = IMAGE_STEP_BYTES.min(size_bytes - offset_bytes);
            device.preallocate_and_zero(offset_bytes, step_bytes)?;
            offset_bytes += step_bytes;
        }
        drop(device);
        let loop_device = if candidate.system.needs_loop() {
            Some(self.attach(&image, candidate.direct_io)?)
        } else {
            None
        };
        self.places.push(Place { label: candidate.label.clone(), image, loop_device });
        Ok(())
    }

    fn attach(&self, image: &Path, direct_io: bool) -> anyhow::Result<LoopDevice> {
        let direct = if direct_io { "--direct-io=on" } else { "--direct-io=off" };
        let mut attach = command("losetup", &["--find", "--show", direct]);
        attach.arg(image);
        // Short, and what it makes would be lost if it were interrupted.
        let device = process::run_to_end(attach, self.folder(), &Default::default())?;
        let device =
            LoopDevice { path: device.trim().into(), folder: self.folder.path().to_owned() };
        if direct_io {
            let name = device.path.file_name().context("the loop device has no name")?;
            check_direct_io(&Path::new("/sys/block").join(name).join("loop/dio"), image)?;
        }
        Ok(device)
    }

    /// What a candidate is made and mounted on.
    pub fn device_of(&self, candidate: &Candidate) -> anyhow::Result<&Path> {
        let place = self
            .places
            .iter()
            .find(|place| place.label == candidate.label)
            .context("the system has no image")?;
        Ok(place.loop_device.as_ref().map_or(place.image.as_path(), |device| device.path.as_path()))
    }
}

/// A mounted file system.
pub struct Mounted<'a> {
    system: System,
    device: PathBuf,
    path: PathBuf,
    stage: &'a Stage,
    settings: &'a PeersSettings,
    server: Option<ServerProcess>,
}

impl<'a> Mounted<'a> {
    /// Mounts what is on `device`.
    pub fn new(
        system: System,
        device: &Path,
        stage: &'a Stage,
        settings: &'a PeersSettings,
    ) -> anyhow::Result<Self> {
        let path = stage.mount_point();
        let mut mounted =
            Self { system, device: device.into(), path, stage, settings, server: None };
        mounted.mount()?;
        Ok(mounted)
    }

    fn mount(&mut self) -> anyhow::Result<()> {
        let Some(mut serve) = self.system.server(&self.device, &self.path, &self.settings.program)
        else {
            let mut mount = command("mount", &[]);
            mount.arg(&self.device).arg(&self.path);
            return process::run_to_end(mount, self.stage.folder(), &Default::default()).map(drop);
        };
        serve.env("PATH", process::search_path());
        // Of an earlier server.
        let log = self.stage.folder().join("server.err");
        let _ = fs::remove_file(&log);
        let server = ServerProcess::start(serve, &log)?;
        let interrupt = &self.settings.interrupt;
        let server = self.server.insert(server);
        server.wait_for_mount(&self.path, MOUNT_TIME_MAX, || interrupt.check())
    }

    /// Nothing of it is cached any more: it is mounted anew, and its image leaves the host's page
    /// cache.
    pub fn forget(&mut self) -> anyhow::Result<()> {
        self.unmount_and_wait()?;
        let images = fs::read_dir(self.stage.folder())?
            .flatten()
            .filter(|entry| entry.path().extension().is_some_and(|kind| kind == "image"));
        for image in images {
            rustix::fs::fadvise(File::open(image.path())?, 0, None, Advice::DontNeed)?;
        }
        self.mount()
    }

    /// Where it shows.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Cairn's counters; `None` for the others.
    pub fn statistics(&self) -> anyhow::Result<Option<serde_json::Value>> {
        if !self.system.is_volume() {
            return Ok(None);
        }
        let mut ask = command(&self.settings.program, &["stats", "--json"]);
        ask.arg(&self.path);
        let answer = process::run_to_end(ask, self.stage.folder(), &self.settings.interrupt)?;
        serde_json::from_str(&answer).map(Some).context("the server's statistics are not JSON")
    }

    /// What its server has used; nothing for a file system of the kernel.
    pub fn server_resources(&self) -> Resources {
        self.server.as_ref().map_or_else(Resources::default, |server| {
            Resources::of_process(&server.id().to_string())
        })
    }

    fn unmount(&mut self) -> anyhow::Result<()> {
        if !is_mounted_below(&self.path) {
            return Ok(());
        }
        let mut unmount = if self.system.is_volume() {
            command(&self.settings.program, &["umount"])
        } else {
            command("umount", &[])
        };
        unmount.arg(&self.path);
        process::run_to_end(unmount, self.stage.folder(), &Default::default()).map(drop)
    }

    /// Unmounts, and waits for the server.
    pub fn end(mut self) -> anyhow::Result<()> {
        self.unmount_and_wait()
    }

    fn unmount_and_wait(&mut self) -> anyhow::Result<()> {
        self.unmount()?;
        if let Some(mut server) = self.server.take() {
            server.wait_for_end(UNMOUNT_TIME_MAX)?;
        }
        Ok(())
    }
}

impl Drop for Mounted<'_> {
    /// After an error: in order when possible, otherwise out of the tree.
    fn drop(&mut self) {
        if let Err(error) = self.unmount() {
            warn(format_args!("unmounting {} by force: {error}", self.path.display()));
            if let Err(error) = detach(&self.path) {
                warn(format_args!("{} is left mounted: {error}", self.path.display()));
            }
        }
        // It may have mounted only now.
        if let Some(server) = &mut self.server {
            server.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_io_that_was_not_granted_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("dio");
        let check = || check_direct_io(&state, Path::new("/images/ext4.image"));
        assert!(check().unwrap_err().to_string().contains("cannot find out"));
        fs::write(&state, "1\n").unwrap();
        check().unwrap();
        fs::write(&state, "0\n").unwrap();
        let error = check().unwrap_err().to_string();
        assert!(
            error.contains("/images/ext4.image") && error.contains("--direct-io false"),
            "{error}"
        );
    }
}
