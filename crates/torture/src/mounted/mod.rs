//! The runs of `cairn torture` that stop real mounts: the server of a mount is killed, its volume
//! shut down, the power of its machine cut. Whatever was acknowledged before must be there.
//!
//! They start the program that runs them again, as the server: it must be the `cairn` command.
//!
//! - [`load`] (kill -9 and shutdowns), [`synced`], [`soak`], and [`vm`] with its [`guest`] are the
//!   runs; a [`session`] is what they have in common: folder, progress, Ctrl-C, report.
//! - [`differ`] compares a mount with another file system, call by call.
//! - `server` is the mount, which `recovery` kills early; `stall` and `growth` look at it and at
//!   the machine.
//! - `workers` use the mount and remember what was acknowledged (`append`, `direct`, `label`,
//!   `lineage`, `overwrite`, `replace`, `reshape`, `tree`), by means of `pattern`, `possible`,
//!   `memory`, [`mapping`] and [`asynchronous`].
//! - `whole` makes snapshots and forks of all that they do; a `gate` says what these may show.
//! - `scheduled` is a subvolume with a schedule of snapshots.
//! - A `machine` is a virtual one; its `journal` and its disk's `write_log` show what was on the
//!   disk when.
mod append;
pub mod asynchronous;
pub mod differ;
mod direct;
mod gate;
mod growth;
pub mod guest;
mod journal;
mod label;
mod lineage;
pub mod load;
mod machine;
pub mod mapping;
mod memory;
mod overwrite;
mod pattern;
mod possible;
mod recovery;
mod replace;
mod reshape;
mod scheduled;
mod server;
pub mod session;
pub mod soak;
mod stall;
pub mod synced;
mod tree;
pub mod vm;
mod whole;
mod workers;
mod write_log;
