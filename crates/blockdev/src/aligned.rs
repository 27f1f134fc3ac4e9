//! Memory aligned to 4 KiB, as direct I/O needs it, and a pool of it.
//!
//! Lock discipline: the pool's list is a lock of rank `BUFFERS`, held to push or pop one buffer.

use crate::device::BLOCK_BYTES;
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use std::fmt;
use std::ops::{Deref, DerefMut};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// One block of memory at an address that is a multiple of 4,096.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
pub(crate) struct Page(pub(crate) [u8; BLOCK_BYTES]);

/// Whether direct I/O can use this memory as it is.
pub fn is_aligned(memory: &[u8]) -> bool {
    memory.as_ptr().addr().is_multiple_of(BLOCK_BYTES)
}

/// Bytes in whole blocks, at an address that is a multiple of 4,096.
///
/// ```
/// use cairn_blockdev::{is_aligned, AlignedBuffer};
/// let mut buffer = AlignedBuffer::zeroed(8192);
/// buffer[5000] = 1;
/// assert!(is_aligned(&buffer));
/// assert_eq!(buffer.len(), 8192);
/// ```
#[derive(Clone, Default)]
pub struct AlignedBuffer {
    pages: Vec<Page>,
}

impl AlignedBuffer {
    /// Zeros, `length_bytes` of them, rounded up to whole blocks.
    ///
    /// # Panics
    /// If there is not enough memory.
    pub fn zeroed(length_bytes: usize) -> AlignedBuffer {
        let pages = length_bytes.div_ceil(BLOCK_BYTES);
        match Page::new_vec_zeroed(pages) {
            Ok(pages) => AlignedBuffer { pages },
            Err(_) => panic!("no memory for a buffer of {pages} blocks"),
        }
    }

    /// Copies the blocks into one buffer, in order. The memory is touched once.
    pub fn of_blocks<'a>(
        blocks: impl ExactSizeIterator<Item = &'a [u8; BLOCK_BYTES]>,
    ) -> AlignedBuffer {
        AlignedBuffer { pages: blocks.map(|block| Page(*block)).collect() }
    }

    /// A copy of `bytes`, followed by zeros up to a whole block.
    pub fn copy_of(bytes: &[u8]) -> AlignedBuffer {
        let mut buffer = AlignedBuffer::zeroed(bytes.len());
        buffer[..bytes.len()].copy_from_slice(bytes);
        buffer
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.pages.as_slice().as_bytes()
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.pages.as_mut_slice().as_mut_bytes()
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "AlignedBuffer({} bytes)", self.len())
    }
}

/// A pool of aligned buffers of one size.
///
/// ```
/// use cairn_blockdev::BufferPool;
/// let pool = BufferPool::new(1 << 20, 4);
/// let buffer = pool.take();
/// assert_eq!(buffer.len(), 1 << 20);
/// ```
pub struct BufferPool {
    buffer_bytes: usize,
    kept_max: usize,
    free: Mutex<Vec<AlignedBuffer>>,
}

impl BufferPool {
    /// A pool of buffers of `buffer_bytes`, which keeps at most `kept_max` unused ones.
    pub fn new(buffer_bytes: usize, kept_max: usize) -> BufferPool {
        BufferPool { buffer_bytes, kept_max, free: Mutex::new(Rank::BUFFERS, Vec::new()) }
    }

    /// A buffer with any content; it returns to the pool when dropped.
    pub fn take(&self) -> PooledBuffer<'_> {
        let kept = self.free.lock().pop();
        PooledBuffer {
            pool: self,
            buffer: Some(kept.unwrap_or_else(|| AlignedBuffer::zeroed(self.buffer_bytes))),
        }
    }
}

/// A buffer on loan from a [`BufferPool`].
pub struct PooledBuffer<'a> {
    pool: &'a BufferPool,
    /// `None` only while it is dropped.
    buffer: Option<AlignedBuffer>,
}

impl Deref for PooledBuffer<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or_default()
    }
}

impl DerefMut for PooledBuffer<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for PooledBuffer<'_> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            let mut free = self.pool.free.lock();
            if free.len() < self.pool.kept_max {
                free.push(buffer);
            }
        }
    }
}
