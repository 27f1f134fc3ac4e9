//! Makes one mount, from the checks to the connection's descriptor.
use super::loop_device::LoopDevice;
use super::source_name::SourceLink;
use super::table::{find_mount, real_path};
use super::{MountOptions, helper};
use crate::error::MountError;
use crate::transport::{DEVICE_PATH, TRANSFER_BYTES_MAX};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use std::ffi::CString;
use std::path::{Path, PathBuf};

/// A mount that the kernel has and that has no server yet.
#[derive(Debug)]
pub struct MadeMount {
    /// The connection.
    pub device: OwnedFd,
    /// The mount point, without symbolic links.
    pub mountpoint: PathBuf,
    /// Whether sync(2), syncfs(2) and umount(2) reach the server.
    pub forwards_sync: bool,
    /// The link that the kernel shows as source.
    pub link: Option<SourceLink>,
}

/// Mounts `source`, an image file or a block device, on `mountpoint`.
///
/// # Errors
/// See [`MountError`]; nothing is mounted then.
pub fn make_mount(
    source: &Path,
    mountpoint: &Path,
    options: &MountOptions,
) -> Result<MadeMount, MountError> {
    let mountpoint = check_mount_point(mountpoint)?;
    let source = source.canonicalize().map_err(|error| MountError::SourceUnusable {
        path: source.to_owned(),
        errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
    })?;
    if !rustix::process::geteuid().is_root() {
        // The helper opens the device; this check only gives a clear error.
        rustix::fs::stat(DEVICE_PATH).map_err(|_| MountError::FuseMissing)?;
        let device = helper::mount(shown(&source, options), &mountpoint, options)?;
        return Ok(MadeMount { device, mountpoint, forwards_sync: false, link: None });
    }
    let device = open_device()?;
    let mut made = MadeMount { device, mountpoint, forwards_sync: false, link: None };
    if !options.plain {
        made.forwards_sync = mount_as_block_device(&mut made, &source, options)?;
    }
    if !made.forwards_sync {
        mount_plain(&made.device, shown(&source, options), &made.mountpoint, options)?;
    }
    Ok(made)
}

/// The source that a mount without a block device shows.
fn shown<'a>(source: &'a Path, options: &'a MountOptions) -> &'a Path {
    options.shown.as_ref().map_or(source, |shown| Path::new(&shown.full))
}

fn check_mount_point(mountpoint: &Path) -> Result<PathBuf, MountError> {
    let path = mountpoint.to_owned();
    if let Some(mount) = find_mount(mountpoint)? {
        return Err(MountError::AlreadyMounted {
            path,
            source_shown: mount.source.display().to_string(),
        });
    }
    match rustix::fs::stat(mountpoint) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
            Ok(real_path(mountpoint))
        }
        Ok(_) => Err(MountError::MountPointNotDirectory(path)),
        Err(Errno::NOENT) => Err(MountError::MountPointMissing(path)),
        Err(Errno::NOTDIR) => Err(MountError::MountPointNotDirectory(path)),
        Err(errno) => Err(MountError::MountPointUnusable { path, errno }),
    }
}

fn open_device() -> Result<OwnedFd, MountError> {
    rustix::fs::open(DEVICE_PATH, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| {
        match errno {
            Errno::NOENT | Errno::NODEV | Errno::NXIO => MountError::FuseMissing,
            errno => MountError::FuseUnusable(errno),
        }
    })
}

/// Mounts as `fuseblk`. Returns false if `source` has no block device and can't get one.
fn mount_as_block_device(
    made: &mut MadeMount,
    source: &Path,
    options: &MountOptions,
) -> Result<bool, MountError> {
    let stat = rustix::fs::stat(source)
        .map_err(|errno| MountError::SourceUnusable { path: source.to_owned(), errno })?;
    let is_block_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    // Kept open until the mount has opened it too; otherwise the loop device would clear itself.
    let loop_device = match is_block_device {
        true => None,
        false => match LoopDevice::attach(source, options.read_only) {
            Ok(loop_device) => Some(loop_device),
            Err(error) => {
                tracing::warn!(
                    "no loop device for {}: {error}; sync(2) and umount(2) will not reach the \
                     volume",
                    source.display()
                );
                return Ok(false);
            }
        },
    };
    let block_device = loop_device.as_ref().map_or(source, |device| &device.path);
    let data = format!("{},blksize=4096", mount_data(&made.device));
    let mount = |path: &Path| mount_call(path, &made.mountpoint, "fuseblk.cairn", &data, options);
    let mounted = match &options.shown {
        // A disk has a name already.
        Some(shown) if loop_device.is_some() || shown.full != source.to_string_lossy() => {
            SourceLink::mount_by(&shown.name, block_device, mount)
        }
        _ => mount(block_device).map(|()| None),
    };
    match mounted {
        Ok(link) => {
            made.link = link;
            Ok(true)
        }
        Err(Errno::NODEV) => {
            tracing::warn!(
                "the kernel has no fuseblk; sync(2) and umount(2) will not reach the volume"
            );
            Ok(false)
        }
        Err(Errno::BUSY) => Err(MountError::SourceBusy(source.to_owned())),
        Err(errno) => Err(MountError::MountFailed { path: made.mountpoint.clone(), errno }),
    }
}

fn mount_plain(
    device: &OwnedFd,
    source: &Path,
    mountpoint: &Path,
    options: &MountOptions,
) -> Result<(), MountError> {
    mount_call(source, mountpoint, "fuse.cairn", &mount_data(device), options)
        .map_err(|errno| MountError::MountFailed { path: mountpoint.to_owned(), errno })
}

fn mount_data(device: &OwnedFd) -> String {
    let descriptor = device.as_raw_fd();
    format!(
        "fd={descriptor},rootmode=40000,user_id=0,group_id=0,default_permissions,\
         allow_other,max_read={TRANSFER_BYTES_MAX}"
    )
}

fn mount_call(
    source: &Path,
    mountpoint: &Path,
    file_system_type: &str,
    data: &str,
    options: &MountOptions,
) -> rustix::io::Result<()> {
    let flags = options.kernel.flags()
        | if options.read_only { MountFlags::RDONLY } else { MountFlags::empty() };
    let data =
        CString::new(format!("{data}{}", options.kernel.data())).map_err(|_| Errno::INVAL)?;
    rustix::mount::mount(source, mountpoint, file_system_type, flags, data.as_c_str())
}
