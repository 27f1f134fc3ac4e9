//! Makes, finds and removes mounts.
//!
//! Root mounts with mount(2). If the volume is a block device, or can be made one (by a loop device
//! over an image file), root mounts it as `fuseblk.cairn`: only then do sync(2), syncfs(2) and
//! umount(2) reach the server. Other users mount with `fusermount3`.
//!
//! Invariant: a mount that cannot be completed leaves neither a mount nor a loop device behind. The
//! loop device clears itself at the last close.

pub(crate) mod helper;
mod kernel_options;
mod loop_device;
mod mount_call;
mod source_name;
mod table;
mod tuning;

pub use kernel_options::KernelOptions;
pub use mount_call::{MadeMount, make_mount};
pub use source_name::{ShownSource, SourceLink, remove_stale};
pub use table::{MountInfo, find_mount, find_mount_of_device, mount_point_of, mount_points_below};
pub use tuning::lengthen_read_ahead;

use crate::error::MountError;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};

/// The transport of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// FUSE over io_uring where the kernel allows it, else `/dev/fuse`.
    #[default]
    Auto,
    /// FUSE over io_uring. Root enables it for the whole machine.
    Ring,
    /// `/dev/fuse`.
    Device,
}

/// Options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// Threads that read requests; over io_uring, threads for requests that may wait for the
    /// device.
    pub threads: usize,
    /// Whether the kernel caches written data. Without that, each write(2) is a request, and
    /// reports a lack of space.
    pub writeback: bool,
    /// Whether other users have access, subject to permissions. Root's mounts always allow it.
    pub allow_other: bool,
    /// Whether the mount is read-only.
    pub read_only: bool,
    /// The transport of requests.
    pub transport: Transport,
    /// Mount as plain `fuse` even if a block device is available; then sync(2) and umount(2) do not
    /// reach the server.
    pub plain: bool,
    /// Whether the listing of the root directory has `.snapshots`.
    pub show_snapshots: bool,
    /// Options that the kernel handles for any file system: `nosuid`, `noexec` and the like.
    pub kernel: KernelOptions,
    /// The image's name in lists of mounts; `None` for its path.
    pub shown: Option<ShownSource>,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            threads: 8,
            writeback: false,
            allow_other: false,
            read_only: false,
            transport: Transport::Auto,
            plain: false,
            show_snapshots: false,
            kernel: KernelOptions::default(),
            shown: None,
        }
    }
}

/// Unmounts `mountpoint`, which must not be in use. With `detach` it vanishes from the tree now and
/// ends with its last user.
pub(crate) fn take_away(mountpoint: &Path, detach: bool) -> Result<(), MountError> {
    let path = || PathBuf::from(mountpoint);
    if !rustix::process::geteuid().is_root() {
        return helper::unmount(mountpoint, detach);
    }
    let flags =
        UnmountFlags::NOFOLLOW | if detach { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    rustix::mount::unmount(mountpoint, flags).map_err(|errno| match errno {
        Errno::BUSY => MountError::MountBusy(path()),
        Errno::INVAL => MountError::NotMounted(path()),
        errno => MountError::UnmountFailed { path: path(), errno },
    })
}
