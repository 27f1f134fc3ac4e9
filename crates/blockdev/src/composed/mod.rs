//! Devices made of devices: a [`Mirror`] holds everything on each member, a [`Concat`] puts members
//! one behind the other.
//!
//! A member carries a label ([`label`]) outside the composed address space, which tells members
//! from strangers and a stale member from a current one (`assembly`); `members` holds the members
//! of an open device and raises their event counters; `flusher` lets members flush at the same
//! time; [`Rebuild`] fills a new member.
//!
//! States of a mirror: *complete*, every member in sync; *degraded*, at least one is; *failed*,
//! none is. A member that fails in use is left behind: first the others' labels say so durably,
//! then the request that it failed returns.
//!
//! Invariants: a member that is not in sync is never read; what a flush acknowledges is durable on
//! every member that the durable labels call in sync; a repair never overwrites what was written
//! after its bytes were read.
//!
//! **Copies that differ after an unclean stop.** Each member on its own is a state that a crash may
//! leave on a single device, since a flush succeeds only when every member's did. Reads come from
//! one member, the first in sync, so what a reader sees is such a state. Only where checks fail (a
//! checksum, a generation) it looks at another copy; what verifies there is what was written, and
//! is written to the others too. Damage apart, copies differ only in what no flush covered. Of
//! that, free blocks don't matter. Data that recovery accepts is made the same on all members when
//! it is verified. Superblocks, bitmaps and log are overwritten in place; recovery first reads them
//! with every check they have, repairing what it can, and then makes the rest the same on all
//! members before anything new is written
//! ([`BlockDevice::resynchronise`](crate::BlockDevice::resynchronise)). A crash in the middle
//! repeats that.
//!
//! No two writes of the same block may be in flight at once; the file system never does that.

mod assembly;
mod concat;
mod error;
mod flusher;
mod health;
pub mod label;
mod members;
mod mirror;
mod rebuild;

pub use assembly::MemberState;
pub use concat::Concat;
pub use error::ComposedError;
pub use health::{DeviceHealth, MemberHealth};
pub use label::{Kind, Label};
pub use members::{Access, Candidate, MemberStatus, make, status};
pub use mirror::{CopyFirst, Mirror};
pub use rebuild::{Rebuild, RebuildView};

#[cfg(test)]
mod assembly_tests;
#[cfg(test)]
mod label_tests;
#[cfg(test)]
mod mirror_tests;
#[cfg(test)]
mod rebuild_tests;
