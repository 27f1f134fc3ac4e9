//! Cairn's own FUSE transport, and the mount that answers with a volume.
#![deny(unsafe_code)]

mod adapter;
mod control;
mod error;
mod kernel;
mod mounted;
mod mounting;
mod negotiation;
pub mod protocol;
mod session;
pub mod transport;

#[cfg(test)]
mod session_tests;
#[cfg(test)]
mod tiny_file_system;

pub use adapter::VolumeHandler;
pub use control::{XATTR_SERVER, XATTR_STATISTICS, statistics, sync, unmount};
pub use error::MountError;
pub use mounted::{MountedVolume, mount};
pub use mounting::{MountInfo, MountOptions, find_mount};
pub use negotiation::Agreement;
pub use session::{Session, SessionError, Unmounter};
