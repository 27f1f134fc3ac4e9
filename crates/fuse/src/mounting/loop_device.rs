//! A block device over an image file, so that it can be mounted as `fuseblk`. It carries no data.
use crate::kernel;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::{self, Errno};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The number of attempts while other processes take free devices.
const ATTEMPTS_MAX: usize = 32;

/// A configured loop device. It detaches its file when this value and the mount are gone.
#[derive(Debug)]
pub struct LoopDevice {
    /// `/dev/loopN`.
    pub path: PathBuf,
    _open: OwnedFd,
}

impl LoopDevice {
    /// Sets up a free loop device over `image`.
    ///
    /// # Errors
    /// If there are no loop devices, or this process may not use them.
    pub fn attach(image: &Path, read_only: bool) -> io::Result<Self> {
        let (access, flags) = match read_only {
            true => (OFlags::RDONLY, kernel::LOOP_AUTOCLEAR | kernel::LOOP_READ_ONLY),
            false => (OFlags::RDWR, kernel::LOOP_AUTOCLEAR),
        };
        let open =
            |path: &Path, access| rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty());
        let backing = open(image, access)?;
        let control = open(Path::new("/dev/loop-control"), OFlags::RDWR)?;
        for _ in 0..ATTEMPTS_MAX {
            let path = PathBuf::from(format!("/dev/loop{}", kernel::free_loop_device(&control)?));
            let device = open(&path, access)?;
            match kernel::configure_loop_device(
                &device,
                &backing,
                flags,
                image.as_os_str().as_bytes(),
            ) {
                Ok(()) => return Ok(Self { path, _open: device }),
                Err(Errno::BUSY) => continue,
                Err(error) => return Err(error),
            }
        }
        Err(Errno::BUSY)
    }
}
