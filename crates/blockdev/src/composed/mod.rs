//! Devices made of devices: a [`Mirror`] holds everything on each member, a [`Concat`] puts members
//! end to end.
//!
//! A member carries a label ([`label`]) outside the composed address space. It distinguishes
//! members from other devices, and a stale member from a current one (`assembly`). `members` holds
//! the members of an open device and raises their event counters. `flusher` flushes members at the
//! same time. [`Rebuild`] fills a new member.
//!
//! States of a mirror: *complete*, every member is in sync; *degraded*, at least one is; *failed*,
//! none is. A member that fails in use is left behind: first the others' labels say so durably,
//! then the failed request returns.
//!
//! Invariants: a member that is not in sync is never read; what a flush acknowledges is durable on
//! every member that the durable labels list as in sync; a repair never overwrites data that was
//! written after the repair read.
//!
//! **Copies that differ after an unclean shutdown.** Each member on its own is a state that a crash
//! may leave on a single device, since a flush succeeds only if every member's did. Reads come from
//! one member, the first in sync, so a reader sees such a state. Only if a check fails (a checksum,
//! a generation) does it read another copy; a copy that verifies holds what was written, and it is
//! written to the others too. Damage apart, copies differ only in what no flush covered. There,
//! free blocks don't matter. Data that recovery accepts is made the same on all members when it is
//! verified. Superblocks, bitmaps and log are overwritten in place: recovery first reads them with
//! every check they have and repairs what it can. Then it makes the rest the same on all members,
//! before it writes anything new
//! ([`BlockDevice::resynchronise`](crate::BlockDevice::resynchronise)). After a crash in the
//! middle, recovery does that again.
//!
//! No two writes of one block may be in flight at once; the file system ensures that.

mod assembly;
mod concat;
mod error;
mod flusher;
mod health;
pub mod label;
mod making;
mod members;
mod mirror;
mod rebuild;

pub use assembly::MemberState;
pub use concat::Concat;
pub use error::ComposedError;
pub use health::{DeviceHealth, MemberHealth};
pub use label::{ComposedKind, Label};
pub use making::make;
pub use members::{Access, Candidate, MemberStatus, status};
pub use mirror::{CopyFirst, Mirror};
pub use rebuild::{Rebuild, RebuildView};

#[cfg(test)]
mod assembly_tests;
#[cfg(test)]
mod label_tests;
#[cfg(test)]
mod mirror_tests;
#[cfg(test)]
mod rebuild_fault_tests;
#[cfg(test)]
mod rebuild_tests;
