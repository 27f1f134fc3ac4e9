//! Block devices: files and disks, mirrors and concatenations of them, memory, and a simulated
//! device that loses power and returns errors.
//!
//! Everything above this crate sees storage as a [`BlockDevice`]: reads and writes of whole blocks,
//! and a flush that makes durable what was completed before it. `docs/media.md` says what is
//! assumed of a device and what is not; the [`simulated::SimulatedDevice`] may do anything that
//! page permits.
//!
//! Lock discipline: devices take locks of rank `DEVICE`, the pool of buffers one of rank `BUFFERS`,
//! for moments. But for those of [`composed`] and `holes`, no lock is held during a system call or
//! a simulated delay.

mod aligned;
mod blocks;
pub mod composed;
mod copies;
mod counters;
mod device;
mod error;
mod file;
mod flush_fence;
mod flush_time;
mod holes;
mod kernel;
mod memory;
mod observer;
mod raw_file;
mod ring;
pub mod simulated;
mod slab;
mod slab_supply;

pub use aligned::{AlignedBuffer, BufferPool, PooledBuffer, is_aligned};
pub use blocks::{BlockBuffer, BlockPool, SharedBlocks};
pub use composed::{ComposedError, DeviceHealth};
pub use copies::read_verified;
pub use counters::DeviceCounters;
pub use device::{BLOCK_BYTES, BlockDevice, SetWrite};
pub use error::{DeviceError, Operation};
pub use file::{FileDevice, OpenMode};
pub use flush_fence::FlushFence;
pub use flush_time::FlushTime;
pub use memory::MemoryDevice;
pub use observer::{DeviceEvent, DeviceEventKind, DeviceObserver};
pub use raw_file::RawFile;
pub use simulated::SimulatedDevice;

#[cfg(test)]
mod file_tests;
#[cfg(test)]
mod memory_tests;
