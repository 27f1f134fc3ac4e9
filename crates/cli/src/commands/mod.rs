//! One file per command.
pub mod bench;
mod bench_ab;
mod bench_report;
mod bench_transport;
pub mod device;
pub mod dump;
pub mod fsck;
pub mod info;
pub mod mkfs;
pub mod mount;
pub mod mount_helper;
pub mod shutdown;
pub mod stats;
pub mod sync;
pub mod torture;
mod torture_mounted;
pub mod trim;
pub mod umount;
