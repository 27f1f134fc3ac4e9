//! A device that does what `docs/media.md` permits a device to do: lose power, tear and forget what
//! was not flushed, return errors, rot, and be slow.
//!
//! Purpose: crash tests. [`SimulatedDevice`] is a [`BlockDevice`](crate::BlockDevice) in memory
//! which knows, at every moment, what is durable and what is not, and can make the device as it
//! might look after a power failure at that moment. While it *records*, it keeps the whole run, and
//! a [`CrashExplorer`] walks through the run and makes such devices for every point in it, each at
//! a cost of the unflushed writes only.
//!
//! A write is *issued*, then *completed* (or *failed*), then *covered* by the first flush that is
//! issued after its completion and succeeds. Until it is covered it is *unflushed*: after a crash,
//! any of its sectors of 512 bytes may hold the new content and any the old one, whatever happens
//! to other writes. Where unflushed writes overlap, choosing sectors freely is the same as choosing
//! an order: whichever write "came last" at a sector is one that has it while those behind it have
//! not. So writes are always applied in the order of their issue, and nothing is lost by that.
//!
//! A failed write, and what a failed flush should have covered, is never covered by a later flush:
//! it may be durable or not, for ever, until something newer is written over it and flushed.

mod crash;
mod device;
mod explorer;
mod faults;
mod image;
mod media;

pub use crash::{Fate, SectorSet, random_fates};
pub use device::{DiscardContent, SimulatedDevice};
pub use explorer::{CrashExplorer, EventInfo};
pub use faults::Request;
pub use media::{WriteId, WriteInfo};

/// The unit in which a write may be torn.
pub const SECTOR_BYTES: u64 = 512;

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod device_tests;
