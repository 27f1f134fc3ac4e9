//! Reference-counted aligned memory that is used again: file data on its way between a caller and
//! the device.
//!
//! States of a buffer: [`BlockBuffer`], which one owner fills → [`SharedBlocks`], ranges of it that
//! many refer to and nobody changes → unused, in the pool, when the last of them goes.
//!
//! Invariants: what more than one refers to doesn't change; a buffer holds whatever was in it
//! before, so no memory is zeroed or faulted in again. The memory comes in large pages (`slab`);
//! with more unused than it was told, the pool gives a large page back as soon as nothing of it is
//! in use, but for one of each size.
//!
//! Lock discipline: the pool's list (rank `BUFFERS`), to push or pop one buffer; also when the last
//! reference is dropped.

use crate::aligned::AlignedBuffer;
use crate::device::BLOCK_BYTES;
use crate::slab::{Pages, Piece, SLAB_BYTES, Slab, Slabs};
use crate::slab_supply::SlabSupply;
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// Sizes that are kept: powers of two up to so many blocks.
const POOLED_BLOCKS_MAX: usize = 256;
/// The part of the unused memory that is made ahead at most.
const SUPPLY_SHARE: usize = 4;
const CLASSES: usize = POOLED_BLOCKS_MAX.ilog2() as usize + 1;

/// Unused memory in the sizes of file data. Clones share it.
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
    unused: Arc<Unused>,
}

struct Unused {
    bytes_max: usize,
    buffers: Mutex<Buffers>,
    supply: SlabSupply,
}

struct Buffers {
    /// By the logarithm of their length in blocks.
    by_class: [Slabs; CLASSES],
    /// In slabs, and not in use.
    unused_bytes: usize,
}

impl Buffers {
    fn take(&mut self, class: usize) -> Option<Piece> {
        let piece = self.by_class[class].take()?;
        self.unused_bytes -= piece.len();
        Some(piece)
    }

    fn add(&mut self, class: usize, slab: Slab) {
        self.by_class[class].add(slab);
        self.unused_bytes += SLAB_BYTES;
    }
}

impl Unused {
    fn take(&self, class: usize) -> Option<Piece> {
        if let Some(piece) = self.buffers.lock().take(class) {
            return Some(piece);
        }
        // Without the lock, since it takes long. Others may do the same meanwhile.
        let slab = self.supply.take()?;
        let mut buffers = self.buffers.lock();
        buffers.add(class, slab);
        buffers.take(class)
    }
}

impl BlockPool {
    /// A pool that keeps about `unused_bytes_max` of unused memory; with 0 every buffer has its own
    /// memory.
    pub fn new(unused_bytes_max: usize) -> BlockPool {
        Self::of(Pages::Large, unused_bytes_max)
    }

    /// As [`BlockPool::new`], for memory that no device reads or writes: ordinary pages will do,
    /// which are quicker to get one by one.
    pub fn of_ordinary_pages(unused_bytes_max: usize) -> BlockPool {
        Self::of(Pages::Ordinary, unused_bytes_max)
    }

    fn of(pages: Pages, unused_bytes_max: usize) -> BlockPool {
        let by_class = std::array::from_fn(|class| Slabs::new(BLOCK_BYTES << class));
        let buffers = Mutex::new(Rank::BUFFERS, Buffers { by_class, unused_bytes: 0 });
        let supply = SlabSupply::new(unused_bytes_max / SUPPLY_SHARE / SLAB_BYTES, pages);
        BlockPool { unused: Arc::new(Unused { bytes_max: unused_bytes_max, buffers, supply }) }
    }

    /// Makes memory before it is needed, so that [`BlockPool::take`] seldom waits for the system,
    /// until [`BlockPool::stop_supply`] is called: for a thread of its own.
    pub fn run_supply(&self) {
        self.unused.supply.run();
    }

    /// Ends [`BlockPool::run_supply`].
    pub fn stop_supply(&self) {
        self.unused.supply.stop();
    }

    /// At least `length_bytes` in whole blocks, with any content.
    pub fn take(&self, length_bytes: usize) -> BlockBuffer {
        let blocks = length_bytes.div_ceil(BLOCK_BYTES).max(1);
        let kept_blocks = blocks.next_power_of_two();
        let pooled = kept_blocks <= POOLED_BLOCKS_MAX && self.unused.bytes_max > 0;
        let piece = if pooled { self.unused.take(kept_blocks.ilog2() as usize) } else { None };
        let memory = match piece {
            Some(piece) => Memory::Pooled(Some((piece, Arc::clone(&self.unused)))),
            None => Memory::Own(AlignedBuffer::zeroed(blocks * BLOCK_BYTES)),
        };
        BlockBuffer { memory, blocks }
    }

    /// A copy of `bytes`, which are whole blocks.
    ///
    /// # Panics
    /// When they aren't.
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

/// What a buffer is made of.
enum Memory {
    /// Goes back to its pool in the end; `None` only while it is dropped.
    Pooled(Option<(Piece, Arc<Unused>)>),
    Own(AlignedBuffer),
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Memory::Pooled(piece) => piece.as_ref().map_or(&[], |(piece, _)| piece),
            Memory::Own(buffer) => buffer,
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Pooled(piece) => piece.as_mut().map_or(&mut [], |(piece, _)| piece),
            Memory::Own(buffer) => buffer,
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Memory::Pooled(piece) = self else { return };
        let Some((piece, pool)) = piece.take() else { return };
        // A large page is given back without the lock.
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

/// A buffer with one owner, who may change it.
pub struct BlockBuffer {
    memory: Memory,
    blocks: usize,
}

impl BlockBuffer {
    /// From now on many may refer to it, and nobody changes it.
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
    /// Memory of no pool.
    fn from(buffer: AlignedBuffer) -> Self {
        let blocks = buffer.len() / BLOCK_BYTES;
        Self { memory: Memory::Own(buffer), blocks }
    }
}

impl fmt::Debug for BlockBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "BlockBuffer({} blocks)", self.blocks)
    }
}

/// Whole blocks of a buffer that others may refer to as well; a clone costs no copy.
#[derive(Clone)]
pub struct SharedBlocks {
    memory: Arc<Memory>,
    /// Of the buffer.
    first: usize,
    count: usize,
}

impl SharedBlocks {
    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.count
    }

    /// Number of blocks that stay in memory because of these.
    pub fn kept_blocks(&self) -> usize {
        self.memory.len() / BLOCK_BYTES
    }

    /// Some of the blocks.
    ///
    /// # Panics
    /// When there are not as many.
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

    /// The bytes, to be changed, if nobody else refers to the buffer.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        let bytes = self.first * BLOCK_BYTES..(self.first + self.count) * BLOCK_BYTES;
        Arc::get_mut(&mut self.memory).map(|memory| &mut memory[bytes])
    }

    /// The whole buffer back, to be filled again, if nobody else refers to it.
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
        // One of each size, for whoever takes it again and again.
        drop((pool.take(1), pool.take(1)));
        assert_eq!(unused_bytes(&pool), 4 * SLAB_BYTES);
        let none = BlockPool::new(0);
        drop(none.take(1));
        assert_eq!(unused_bytes(&none), 0);
    }
}
