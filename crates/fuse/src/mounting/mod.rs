//! Making, finding and taking away mounts.
//!
//! Root mounts with mount(2), as `fuseblk.cairn` where the volume is or can be made a block device
//! (a loop device for an image file): only then do sync(2), syncfs(2) and umount(2) reach the
//! server. Other users mount with `fusermount3`.
//!
//! Invariant: a mount that cannot be completed leaves neither a mount nor a loop device behind: the
//! loop device clears itself when the last who has it open closes it.

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
pub use table::{MountInfo, find_mount, find_mount_of_device, is_mounted};
pub use tuning::lengthen_read_ahead;

use crate::error::MountError;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};

/// How requests travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// FUSE over io_uring where the kernel allows it, else `/dev/fuse`.
    #[default]
    Auto,
    /// FUSE over io_uring; root switches it on, for the whole machine.
    Ring,
    /// `/dev/fuse`.
    Device,
}

/// How a volume is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// Threads that read requests; over io_uring, those for requests that may wait for the device.
    pub threads: usize,
    /// Whether the kernel keeps written data for a while. Without it, each write(2) is a request,
    /// and reports a lack of space.
    pub writeback: bool,
    /// Whether other users may enter, subject to permissions. Root's mounts always allow it.
    pub allow_other: bool,
    /// No writing.
    pub read_only: bool,
    /// How requests travel.
    pub transport: Transport,
    /// Mount as plain `fuse` also where a block device could be had; sync(2) and umount(2) do not
    /// reach the server then.
    pub plain: bool,
    /// What the kernel does for any file system: `nosuid`, `noexec` and the like.
    pub kernel: KernelOptions,
    /// How the image is called where mounts are listed; without it, by its path.
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
            kernel: KernelOptions::default(),
            shown: None,
        }
    }
}

/// Takes the mount at `mountpoint` away; it must not be in use, unless `detach`: then it vanishes
/// from the tree now and ends with its last user.
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
