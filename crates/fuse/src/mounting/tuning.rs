//! Read-ahead: the kernel's default for a FUSE mount is 128 KiB, an eighth of what one READ may
//! carry.
//!
//! Measured on Linux 6.18: the first read of a large file is up to half faster with the longer one.
//! (Raising the share of dirty pages, `max_ratio`, made no difference.)
use super::MountInfo;
use crate::transport::TRANSFER_BYTES_MAX;

/// Sets the read-ahead of `mount`, which needs root. If that fails, it stays as it is.
pub fn lengthen_read_ahead(mount: &MountInfo) {
    let (major, minor) = mount.device_number;
    let suffix = if mount.forwards_sync() { "-fuseblk" } else { "" };
    let path = format!("/sys/class/bdi/{major}:{minor}{suffix}/read_ahead_kb");
    if let Err(error) = std::fs::write(&path, (TRANSFER_BYTES_MAX / 1024).to_string()) {
        tracing::debug!("{path} cannot be set: {error}");
    }
}
