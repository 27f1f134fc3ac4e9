//! Block devices: files and disks, mirrors and concatenations of them, memory, and a simulated
//! device that loses power and returns errors.
//!
//! The crates above see storage as a [`BlockDevice`]: reads and writes of whole blocks, and a flush
//! that makes completed writes durable. `docs/media.md` lists what Cairn assumes of a device and
//! what it does not. The [`simulated::SimulatedDevice`] may do anything that the page permits.
//!
//! Lock discipline: devices take locks of rank `DEVICE`, the buffer pool one of rank `BUFFERS`,
//! briefly. Except in [`composed`] and `holes`, no lock is held during a system call or a simulated
//! delay.

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
