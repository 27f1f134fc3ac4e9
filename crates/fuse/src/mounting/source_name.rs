//! The source of a mount that the kernel, df(1) and findmnt(8) show.
//!
//! The source of a `fuseblk` mount must lead to a block device, and the kernel shows the path as it
//! was given. So a symbolic link in [`DIRECTORY`] has the image's name and leads to the loop
//! device.
//!
//! Invariants: the link of a living mount is never replaced, so a second volume of the same name
//! gets another one. The process that made a link removes it, unless it leads elsewhere by then.
//! Links are made, replaced and removed under a lock.
use super::table::backing_file_of;
use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The directory of the links.
const DIRECTORY: &str = "/run/cairn";

/// The lock file there. Only root can open it, and so lock it.
const LOCK: &str = ".lock";

/// The most volumes of one name mounted at the same time.
const SAME_NAMES_MAX: usize = 100;

/// The image's name where the kernel shows a mount's source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShownSource {
    /// The full name: `/data/volume.cairn`, or `mirror:/data/a,/data/b`.
    pub full: String,
    /// A file name for it: `volume.cairn`, or `mirror:a,b`.
    pub name: String,
}

/// A link with the image's name. Dropping this removes it.
#[derive(Debug)]
pub struct SourceLink {
    /// The link.
    pub path: PathBuf,
    target: PathBuf,
}

impl SourceLink {
    /// Calls `mount` with a link to `block_device` called `name`, or with the device itself if
    /// there can be no link.
    ///
    /// # Errors
    /// Those of `mount`.
    pub fn mount_by<E>(
        name: &str,
        block_device: &Path,
        mount: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<Option<Self>, E> {
        let made = lock().and_then(|lock| Ok((make(name, block_device)?, lock)));
        match made {
            // Under the lock: no process replaces the link before the kernel has followed it.
            Ok((path, _lock)) => {
                let mounted = mount(&path);
                if mounted.is_err() {
                    remove_link(&path, block_device);
                }
                mounted.map(|()| Some(Self { path, target: block_device.to_owned() }))
            }
            Err(error) => {
                tracing::debug!("no name for {} in {DIRECTORY}: {error}", block_device.display());
                mount(block_device).map(|()| None)
            }
        }
    }
}

impl Drop for SourceLink {
    fn drop(&mut self) {
        if let Ok(_lock) = lock() {
            remove_link(&self.path, &self.target);
        }
    }
}

/// Removes the link of a mount whose server was killed, if it leads nowhere any more.
pub fn remove_stale(path: &Path) {
    let ours = path.parent() == Some(Path::new(DIRECTORY));
    if ours
        && let Ok(_lock) = lock()
        && let Ok(target) = fs::read_link(path)
        && is_stale(path, &target)
    {
        remove_link(path, &target);
    }
}

fn lock() -> io::Result<OwnedFd> {
    fs::create_dir_all(DIRECTORY)?;
    let path = Path::new(DIRECTORY).join(LOCK);
    let lock = rustix::fs::open(
        path,
        OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC,
        Mode::RUSR | Mode::WUSR,
    )?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
    Ok(lock)
}

fn make(name: &str, block_device: &Path) -> io::Result<PathBuf> {
    for count in 1..=SAME_NAMES_MAX {
        let path = Path::new(DIRECTORY).join(if count == 1 {
            name.to_owned()
        } else {
            format!("{name}-{count}")
        });
        match fs::read_link(&path) {
            // Only this process has set up the device, so no other mount shows it.
            Ok(target) if target == block_device => return Ok(path),
            Ok(target) if !is_stale(&path, &target) => continue,
            Ok(_) => fs::remove_file(&path)?,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            // No link, so this program did not make it.
            Err(_) => continue,
        }
        symlink(block_device, &path)?;
        return Ok(path);
    }
    Err(ErrorKind::AlreadyExists.into())
}

/// Whether no mount can show `path` any more: its loop device is free, or no mount of this
/// namespace shows it.
fn is_stale(path: &Path, target: &Path) -> bool {
    let is_loop = target.to_str().is_some_and(|target| target.starts_with("/dev/loop"));
    if is_loop {
        return rustix::fs::stat(target).map_or(true, |stat| {
            backing_file_of(rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev))
                .is_none()
        });
    }
    super::table::sources().is_ok_and(|sources| !sources.iter().any(|source| source == path))
}

fn remove_link(path: &Path, target: &Path) {
    if fs::read_link(path).is_ok_and(|found| found == target) {
        // If this fails, the next mount of that name replaces the link.
        let _ = fs::remove_file(path);
    }
}
