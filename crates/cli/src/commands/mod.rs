//! One file per command of the product.
pub mod device;
pub mod diff;
pub mod dump;
mod extract;
pub mod fork;
pub mod fsck;
pub mod info;
pub mod mkfs;
pub mod mount;
pub mod mount_helper;
pub mod rollback;
pub mod shutdown;
pub mod snapshot;
pub mod stats;
pub mod subvolume;
pub mod sync;
pub mod trim;
pub mod umount;
