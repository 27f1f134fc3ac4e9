//! Cairn's own FUSE transport, and the mount that serves a volume.
//!
//! Layers, with imports pointing down: [`mount`] and what a program does with a mount ([`unmount`],
//! [`sync`], [`trim`], [`shut_down`], [`statistics`], [`find_mount`]); the adapter that answers
//! requests with a volume ([`VolumeHandler`]); the session (INIT to unmount); making mounts;
//! [`transport`] (reads requests, writes replies); [`protocol`] (the bytes). Two modules have
//! `unsafe`: one wraps ioctls, the other io_uring.
//!
//! Requests of this crate only: ioctl `_IO(0xCA, 1)` = `0xca01` on a directory of the mount makes
//! everything durable, `0xca02` does so and stops the volume, `0xca03` stops it at once. FITRIM and
//! the GOINGDOWN of other file systems work as there. The root directory's attributes
//! [`XATTR_STATISTICS`], [`XATTR_SERVER`] and [`XATTR_SHUTDOWN`] hold the statistics, the server's
//! process id, and whether the volume was stopped.
//!
//! ```no_run
//! use cairn_blockdev::{FileDevice, OpenMode};
//! use cairn_engine::{Volume, VolumeOptions};
//! use cairn_fuse::MountOptions;
//! use std::{path::Path, sync::Arc};
//! let image = Path::new("volume.cairn");
//! let device = Arc::new(FileDevice::open(image, OpenMode::ReadWrite)?);
//! let volume = Volume::open(device, VolumeOptions::default())?;
//! let mounted = cairn_fuse::mount(volume, image, Path::new("/mnt"), &MountOptions::default())?;
//! mounted.run()?; // until the unmount
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

mod adapter;
pub mod apply;
mod control;
pub mod differences;
mod directory_requests;
mod error;
mod kernel;
mod mounted;
mod mounting;
mod negotiation;
mod owner;
mod path_text;
pub mod protocol;
pub mod schedule;
mod session;
pub mod snapshots;
pub mod subvolumes;
pub mod transport;

#[cfg(test)]
mod session_tests;
#[cfg(test)]
mod tiny_file_system;

pub use adapter::VolumeHandler;
pub use control::{
    XATTR_SERVER, XATTR_SHUTDOWN, XATTR_STATISTICS, is_shut_down, mount_root_of, mount_shut_down,
    shut_down, statistics, sync, trim, unmount,
};
pub use error::MountError;
pub use kernel::hand_on_standard_streams_only;
pub use mounted::{MountEnder, MountedVolume, mount};
pub use mounting::{
    KernelOptions, MountInfo, MountOptions, ShownSource, Transport, find_mount, mount_point_of,
    mount_points_below,
};
pub use negotiation::Agreement;
pub use session::{Session, SessionError, Unmounter};
