//! Reference-counted aligned memory from a pool: file data between a caller and the device.
//!
//! States of a buffer: [`BlockBuffer`], which one owner fills → [`SharedBlocks`], ranges of it
//! with many owners, read-only → unused, in the pool, when the last reference is dropped.
//!
//! Invariants: memory with more than one reference doesn't change. A buffer keeps its old content,
//! so the pool neither zeroes memory nor faults it in again. The memory comes in large pages
//! (`slab`). While the pool holds more unused memory than its limit, it frees a large page as soon
//! as no piece of it is in use; it keeps one of each size.
//!
//! Lock discipline: the pool's list (rank `BUFFERS`) is locked to push or pop one buffer; dropping
//! the last reference pushes one.

use crate::aligned::AlignedBuffer;
use crate::device::BLOCK_BYTES;
use crate::slab::{PageKind, SLAB_BYTES, Slab, SlabPiece, Slabs};
use crate::slab_supply::SlabSupply;
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// The pool keeps sizes that are powers of two, up to this many blocks.
const POOLED_BLOCKS_MAX: usize = 256;
/// The supply makes at most this part (1/n) of the unused memory ahead.
const SUPPLY_SHARE: usize = 4;
const CLASSES: usize = POOLED_BLOCKS_MAX.ilog2() as usize + 1;

/// UnusedMemory memory in the sizes of file data. Clones share it.
///
/// ```
/// use cairn_blockdev::BlockPool;
/// let pool = BlockPool::new(1 << 20);
/// let mut buffer = pool.take(8192);
/// buffer.fill(7);
/// let shared = buffer.share();
/// let second = shared.slice(1..2);
/// drop(shared);
/// assert_eq!(second[..], [7; 4096]);
/// ```
#[derive(Clone)]
pub struct BlockPool {
    unused: Arc<UnusedMemory>,
}

struct UnusedMemory {
    bytes_max: usize,
    buffers: Mutex<UnusedSlabs>,
    supply: SlabSupply,
}

struct UnusedSlabs {
    /// By the logarithm of their length in blocks.
    by_class: [Slabs; CLASSES],
    /// Bytes of the slabs that are not in use.
    unused_bytes: usize,
}

impl UnusedSlabs {
    fn take(&mut self, class: usize) -> Option<SlabPiece> {
        let piece = self.by_class[class].take()?;
        self.unused_bytes -= piece.len();
        Some(piece)
    }

    fn add(&mut self, class: usize, slab: Slab) {
        self.by_class[class].add(slab);
        self.unused_bytes += SLAB_BYTES;
    }
}

impl UnusedMemory {
    fn take(&self, class: usize) -> Option<SlabPiece> {
        if let Some(piece) = self.buffers.lock().take(class) {
            return Some(piece);
        }
        // Without the lock: making a slab takes long. Other threads may make one too.
        let slab = self.supply.take()?;
        let mut buffers = self.buffers.lock();
        buffers.add(class, slab);
        buffers.take(class)
    }
}

impl BlockPool {
    /// A pool that keeps about `unused_bytes_max` of unused memory. With 0, every buffer gets its
    /// own memory.
    pub fn new(unused_bytes_max: usize) -> BlockPool {
        Self::of(PageKind::Large, unused_bytes_max)
    }

    /// As [`BlockPool::new`], for memory that no device reads or writes. It uses ordinary pages,
    /// which the kernel provides faster, one by one.
    pub fn of_ordinary_pages(unused_bytes_max: usize) -> BlockPool {
        Self::of(PageKind::Ordinary, unused_bytes_max)
    }

    fn of(pages: PageKind, unused_bytes_max: usize) -> BlockPool {
        let by_class = std::array::from_fn(|class| Slabs::new(BLOCK_BYTES << class));
        let buffers = Mutex::new(Rank::BUFFERS, UnusedSlabs { by_class, unused_bytes: 0 });
        let supply = SlabSupply::new(unused_bytes_max / SUPPLY_SHARE / SLAB_BYTES, pages);
        BlockPool {
            unused: Arc::new(UnusedMemory { bytes_max: unused_bytes_max, buffers, supply }),
        }
    }

    /// Makes memory ahead, so that [`BlockPool::take`] seldom waits for the kernel. Runs on a
    /// thread of its own until [`BlockPool::stop_supply`] is called.
    pub fn run_supply(&self) {
        self.unused.supply.run();
    }

    /// Ends [`BlockPool::run_supply`].
    pub fn stop_supply(&self) {
        self.unused.supply.stop();
    }

    /// A buffer of at least `length_bytes`, in whole blocks, with any content.
    pub fn take(&self, length_bytes: usize) -> BlockBuffer {
        let blocks = length_bytes.div_ceil(BLOCK_BYTES).max(1);
        let kept_blocks = blocks.next_power_of_two();
        let pooled = kept_blocks <= POOLED_BLOCKS_MAX && self.unused.bytes_max > 0;
        let piece = if pooled { self.unused.take(kept_blocks.ilog2() as usize) } else { None };
        let memory = match piece {
            Some(piece) => BufferMemory::Pooled(Some((piece, Arc::clone(&self.unused)))),
            None => BufferMemory::Own(AlignedBuffer::zeroed(blocks * BLOCK_BYTES)),
        };
        BlockBuffer { memory, blocks }
    }

    /// A copy of `bytes`.
    ///
    /// # Panics
    /// If `bytes` are not whole blocks.
    pub fn copy_of(&self, bytes: &[u8]) -> SharedBlocks {
        let mut buffer = self.take(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer.share()
    }
}

impl fmt::Debug for BlockPool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "BlockPool({} bytes unused)", self.unused.buffers.lock().unused_bytes)
    }
}

/// The memory of a buffer.
enum BufferMemory {
    /// The drop returns it to its pool; `None` only during the drop.
    Pooled(Option<(SlabPiece, Arc<UnusedMemory>)>),
    Own(AlignedBuffer),
}

impl Deref for BufferMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            BufferMemory::Pooled(piece) => piece.as_ref().map_or(&[], |(piece, _)| piece),
            BufferMemory::Own(buffer) => buffer,
        }
    }
}

impl DerefMut for BufferMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            BufferMemory::Pooled(piece) => piece.as_mut().map_or(&mut [], |(piece, _)| piece),
            BufferMemory::Own(buffer) => buffer,
        }
    }
}

impl Drop for BufferMemory {
    fn drop(&mut self) {
        let BufferMemory::Pooled(piece) = self else { return };
        let Some((piece, pool)) = piece.take() else { return };
        // A large page is unmapped after the lock is released.
        let _surplus;
        let mut buffers = pool.buffers.lock();
        let buffers = &mut *buffers;
        buffers.unused_bytes += piece.len();
        let class = (piece.len() / BLOCK_BYTES).ilog2() as usize;
        let surplus =
            buffers.by_class[class].give_back(piece, buffers.unused_bytes > pool.bytes_max);
        if surplus.is_some() {
            buffers.unused_bytes -= SLAB_BYTES;
        }
        _surplus = surplus;
    }
}

/// A buffer with one owner, which may change it.
pub struct BlockBuffer {
    memory: BufferMemory,
    blocks: usize,
}

impl BlockBuffer {
    /// Makes the buffer shareable and read-only.
    pub fn share(self) -> SharedBlocks {
        SharedBlocks { memory: Arc::new(self.memory), first: 0, count: self.blocks }
    }
}

impl Deref for BlockBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[..self.blocks * BLOCK_BYTES]
    }
}

impl DerefMut for BlockBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.blocks * BLOCK_BYTES]
    }
}

impl From<AlignedBuffer> for BlockBuffer {
    /// Memory that belongs to no pool.
    fn from(buffer: AlignedBuffer) -> Self {
        let blocks = buffer.len() / BLOCK_BYTES;
        Self { memory: BufferMemory::Own(buffer), blocks }
    }
}

impl fmt::Debug for BlockBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "BlockBuffer({} blocks)", self.blocks)
    }
}

/// Whole blocks of a buffer that may have other references. A clone copies no data.
#[derive(Clone)]
pub struct SharedBlocks {
    memory: Arc<BufferMemory>,
    /// The first block, counted from the start of the buffer.
    first: usize,
    count: usize,
}

impl SharedBlocks {
    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.count
    }

    /// Number of blocks that this reference keeps in memory.
    pub fn kept_blocks(&self) -> usize {
        self.memory.len() / BLOCK_BYTES
    }

    /// A part of the blocks.
    ///
    /// # Panics
    /// If `blocks` reaches past the end.
    pub fn slice(&self, blocks: Range<usize>) -> SharedBlocks {
        assert!(
            blocks.start <= blocks.end && blocks.end <= self.count,
            "blocks {blocks:?} of {}",
            self.count
        );
        SharedBlocks {
            memory: Arc::clone(&self.memory),
            first: self.first + blocks.start,
            count: blocks.end - blocks.start,
        }
    }

    /// The bytes, writable, if there is no other reference to the buffer.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        let bytes = self.first * BLOCK_BYTES..(self.first + self.count) * BLOCK_BYTES;
        Arc::get_mut(&mut self.memory).map(|memory| &mut memory[bytes])
    }

    /// Turns the whole buffer back into a writable one, if there is no other reference to it.
    pub fn reclaim(self) -> Option<BlockBuffer> {
        Arc::into_inner(self.memory)
            .map(|memory| BlockBuffer { blocks: memory.len() / BLOCK_BYTES, memory })
    }
}

impl Deref for SharedBlocks {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.first * BLOCK_BYTES..(self.first + self.count) * BLOCK_BYTES]
    }
}

impl fmt::Debug for SharedBlocks {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SharedBlocks({} of {})", self.count, self.kept_blocks())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::is_aligned;

    fn unused_bytes(pool: &BlockPool) -> usize {
        pool.unused.buffers.lock().unused_bytes
    }

    #[test]
    fn memory_returns_with_its_last_reference_and_is_used_again() {
        let pool = BlockPool::new(64 << 20);
        let mut buffer = pool.take(5 * BLOCK_BYTES);
        assert!(is_aligned(&buffer) && buffer.len() == 5 * BLOCK_BYTES);
        buffer.fill(9);
        let address = buffer.as_ptr();
        let shared = buffer.share();
        let (head, tail) = (shared.slice(0..2), shared.slice(2..5));
        assert_eq!((head.blocks(), tail.blocks(), tail.kept_blocks()), (2, 3, 8));
        drop((shared, head));
        assert_eq!(unused_bytes(&pool), SLAB_BYTES - 8 * BLOCK_BYTES);
        drop(tail);
        assert_eq!(unused_bytes(&pool), SLAB_BYTES);
        let again = pool.take(8 * BLOCK_BYTES);
        assert_eq!(again.as_ptr(), address);
        assert_eq!(again[..5 * BLOCK_BYTES], [9; 5 * BLOCK_BYTES]);
    }

    #[test]
    fn what_is_shared_does_not_change() {
        let pool = BlockPool::new(1 << 20);
        let mut shared = pool.copy_of(&[1; 2 * BLOCK_BYTES]);
        let mut second = shared.slice(1..2);
        assert!(shared.get_mut().is_none() && second.get_mut().is_none());
        drop(shared);
        second.get_mut().expect("alone now").fill(2);
        assert_eq!(second[..], [2; BLOCK_BYTES]);
        let other = second.clone();
        assert!(second.reclaim().is_none());
        let buffer = other.reclaim().expect("alone");
        assert_eq!((buffer.len(), buffer[0], buffer[BLOCK_BYTES]), (2 * BLOCK_BYTES, 1, 2));
    }

    #[test]
    fn the_pool_keeps_about_as_much_as_it_may() {
        let pool = BlockPool::new(3 * SLAB_BYTES);
        let buffers: Vec<_> = (0..20).map(|_| pool.take(1 << 20)).collect();
        assert_eq!(unused_bytes(&pool), 0);
        drop(buffers);
        assert_eq!(unused_bytes(&pool), 3 * SLAB_BYTES);
        drop(pool.take((POOLED_BLOCKS_MAX + 1) * BLOCK_BYTES));
        assert_eq!(unused_bytes(&pool), 3 * SLAB_BYTES);
        // One of each size stays, for a caller that takes it again and again.
        drop((pool.take(1), pool.take(1)));
        assert_eq!(unused_bytes(&pool), 4 * SLAB_BYTES);
        let none = BlockPool::new(0);
        drop(none.take(1));
        assert_eq!(unused_bytes(&none), 0);
    }
}
