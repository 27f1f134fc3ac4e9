//! A device that does what `docs/media.md` permits a device to do: lose power, tear and lose
//! unflushed writes, return errors, rot, and be slow.
//!
//! Purpose: crash tests. [`SimulatedDevice`] is a [`BlockDevice`](crate::BlockDevice) in memory. It
//! knows at every moment what is durable, and it can make the device as a power failure at that
//! moment might leave it. While it *records*, it keeps the whole run. A [`CrashExplorer`] walks
//! through the recording and makes such devices for every point in it, each at the cost of the
//! unflushed writes only.
//!
//! A write is *issued*, then *completed* (or *failed*), then *covered* by the first successful
//! flush that is issued after its completion. Until then it is *unflushed*: after a crash, any of
//! its 512-byte sectors may hold the new content and any the old one, independently of other
//! writes. Where unflushed writes overlap, a free choice of sectors is the same as a choice of
//! order: the write that "came last" at a sector is one that has the sector while the later ones do
//! not. So writes are always applied in the order of their issue, and no state is missed.
//!
//! A discard is a write whose content is the device's choice: zeros, garbage, or what was there. A
//! crash state can be had for each of these ([`DiscardContent`]), whatever reads returned before,
//! and also long after a flush, until the blocks are written again.
//!
//! A failed write, and a write that a failed flush should have covered, is never covered by a later
//! flush: it may be durable or not, for ever, until something newer is written over it and flushed.

mod crash;
mod device;
mod digest;
mod explorer;
mod faults;
mod gated;
mod image;
mod media;
mod part;

pub use crash::{Fate, SectorSet, random_fates};
pub use device::SimulatedDevice;
pub use explorer::{CrashExplorer, EventInfo};
pub use faults::RequestInfo;
pub use gated::GatedDevice;
pub use media::{DiscardContent, WriteId, WriteInfo};
pub use part::SimulatedPart;

/// The unit in which a write may be torn.
pub const SECTOR_BYTES: u64 = 512;

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod device_tests;
