//! The parts of `cairn torture`. Of Ctrl-C, [`signals`] hears for all of them.
//!
//! In memory: [`faults`] and [`fuzz`] beside the commands of `commands/torture.rs`; what they do
//! lives in `cairn-torture`.
//!
//! On real mounts, of this same program: [`load`] (kill -9 and shutdowns), [`synced`], [`soak`],
//! and [`vm`] with its [`guest`]. A [`session`] is what they have in common; [`server`] is the
//! mount, [`workers`] use it and remember what was acknowledged ([`append`], [`label`],
//! [`overwrite`], [`replace`], [`reshape`], [`tree`]). A [`machine`] is a virtual one; its
//! [`journal`] and its disk's [`write_log`] tell what was on the disk when.
mod append;
mod asynchronous;
mod direct;
pub mod faults;
pub mod fuzz;
mod growth;
pub mod guest;
mod journal;
mod label;
pub mod load;
mod machine;
mod mapping;
mod memory;
mod overwrite;
mod pattern;
mod possible;
mod replace;
mod reshape;
mod server;
mod session;
pub mod signals;
pub mod soak;
mod stall;
pub mod synced;
pub mod told;
mod tree;
pub mod vm;
mod workers;
mod write_log;
