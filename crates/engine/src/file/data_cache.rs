//! Clean file data in memory: blocks of the device that were written or read a short time ago.
//!
//! The kernel keeps whole pages itself. It asks again for pages of which a program wrote only a
//! part, and for whatever COPY_FILE_RANGE copies; so this cache is for small files, for blocks that
//! are changed piece by piece, and for small reads ([`write_worth_keeping`],
//! [`read_worth_keeping`]). Large transfers pass it by.
//!
//! States of a slot: free → filled → *used* (a read found it since the hand came by) → filled →
//! free or filled anew. A full shard gives up the first slot behind its hand that nobody used (the
//! CLOCK policy), so blocks that are never read again leave before those that are. A block that was
//! written alone begins as used: the kernel has the others of a small file.
//!
//! Invariants:
//! - An entry is found by the device block *and* the checksum that the caller's extent item has for
//!   it. What a block held before it was freed is never returned for what it holds now, whichever
//!   path wrote it.
//! - Besides, a write of file data replaces or removes the entries of its blocks
//!   ([`DataCache::forget`]), so that equal checksums of different data can do no harm.
//! - The content is a copy. The cache keeps no buffer of a caller in memory, and what it holds is
//!   its slots: never more than the bytes it was given, beside an eighth of that, and at most 16
//!   MiB, which is made ahead.
//! - Only data whose checksum was computed from it (a write) or verified (a read) enters.
//!
//! Lock discipline: one mutex per shard (rank `DATA_CACHE`), for a lookup and the copy of one
//! block; nothing else is locked under it but the pool, and no device is waited for.
use cairn_blockdev::{BlockBuffer, BlockPool};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_format::{BLOCK_SIZE, BlockRange};
use rustc_hash::FxHashMap;
use std::ops::Range;

/// Files of up to so many bytes are kept as a whole, and reads of up to so many.
const SMALL_BYTES: u64 = 64 << 10;
/// A shard's memory grows by so many slots.
const CHUNK_SLOTS: usize = 256;
/// A shard with fewer slots would be full while others are empty.
const SHARD_SLOTS_MIN: usize = 256;
const SHARDS_MAX: usize = 16;
/// The part of its bytes that may be memory not used yet.
const UNUSED_SHARE: usize = 2;
/// So many neighbours on the device lie in one shard.
const NEIGHBOURS: u64 = 16;

/// Whether data is kept that is written in a run of `blocks`, to a file of `file_bytes`.
pub(crate) fn write_worth_keeping(blocks: u64, file_bytes: u64) -> bool {
    // A run of one block is one that was changed in part, or written alone.
    blocks <= 1 || file_bytes <= SMALL_BYTES
}

/// Whether data of a read of `read_bytes` is kept.
pub(crate) fn read_worth_keeping(read_bytes: usize) -> bool {
    read_bytes as u64 <= SMALL_BYTES
}

/// What the cache holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DataCacheStatistics {
    /// Blocks found.
    pub(crate) hits: u64,
    /// Blocks that were looked for, or would have been, and came from the device.
    pub(crate) misses: u64,
    /// Bytes held.
    pub(crate) bytes: u64,
}

#[derive(Clone, Copy)]
struct Slot {
    /// `None` when it is free.
    block: Option<u64>,
    checksum: u32,
    used: bool,
}

#[derive(Default)]
struct Shard {
    by_block: FxHashMap<u64, u32>,
    slots: Vec<Slot>,
    /// Content of [`CHUNK_SLOTS`] slots each.
    chunks: Vec<BlockBuffer>,
    free: Vec<u32>,
    hand: usize,
    slots_max: usize,
    hits: u64,
    misses: u64,
}

impl Shard {
    fn new(slots_max: usize) -> Self {
        Self { slots_max, ..Self::default() }
    }

    fn content(&mut self, index: u32) -> &mut [u8] {
        let from = index as usize % CHUNK_SLOTS * BLOCK_SIZE;
        &mut self.chunks[index as usize / CHUNK_SLOTS][from..from + BLOCK_SIZE]
    }

    fn find(&mut self, block: u64, checksum: u32) -> Option<u32> {
        let index = *self.by_block.get(&block)?;
        (self.slots[index as usize].checksum == checksum).then_some(index)
    }

    fn copy_to(&mut self, block: u64, checksum: u32, buffer: &mut [u8]) -> bool {
        let Some(index) = self.find(block, checksum) else { return false };
        self.slots[index as usize].used = true;
        self.hits += 1;
        buffer.copy_from_slice(self.content(index));
        true
    }

    fn remove(&mut self, block: u64) {
        if let Some(index) = self.by_block.remove(&block) {
            self.slots[index as usize].block = None;
            self.free.push(index);
        }
    }

    /// A slot to be filled, taken from another block if there is no room.
    fn take_slot(&mut self, pool: &BlockPool) -> u32 {
        if let Some(index) = self.free.pop() {
            return index;
        }
        if self.slots.len() < self.slots_max {
            if self.slots.len().is_multiple_of(CHUNK_SLOTS) {
                let slots = CHUNK_SLOTS.min(self.slots_max - self.slots.len());
                self.chunks.push(pool.take(slots * BLOCK_SIZE));
            }
            self.slots.push(Slot { block: None, checksum: 0, used: false });
            return self.slots.len() as u32 - 1;
        }
        // At most once around, and then the first again: the hand takes the mark away.
        loop {
            let index = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            if !std::mem::take(&mut self.slots[index].used) {
                if let Some(block) = self.slots[index].block.take() {
                    self.by_block.remove(&block);
                }
                return index as u32;
            }
        }
    }

    fn put(&mut self, block: u64, checksum: u32, bytes: &[u8], used: bool, pool: &BlockPool) {
        let index = match self.by_block.get(&block) {
            Some(&index) => index,
            None => {
                let index = self.take_slot(pool);
                self.by_block.insert(block, index);
                index
            }
        };
        self.slots[index as usize] = Slot { block: Some(block), checksum, used };
        self.content(index).copy_from_slice(bytes);
    }
}

/// The cache of one volume.
pub(crate) struct DataCache {
    /// None: it is off.
    shards: Vec<Mutex<Shard>>,
    pool: BlockPool,
}

impl DataCache {
    /// A cache that holds up to `bytes_max` of data, in memory that it takes as it grows; with less
    /// than a block it is off.
    pub(crate) fn new(bytes_max: u64) -> Self {
        let bytes_max = usize::try_from(bytes_max).unwrap_or(usize::MAX);
        let slots = (bytes_max / BLOCK_SIZE).min(u32::MAX as usize);
        let shards = match slots {
            0 => 0,
            _ => (slots / SHARD_SLOTS_MIN).clamp(1, SHARDS_MAX),
        };
        let shards = (0..shards).map(|index| {
            let slots_max = slots / shards + usize::from(index < slots % shards);
            Mutex::new(Rank::DATA_CACHE, Shard::new(slots_max))
        });
        Self {
            shards: shards.collect(),
            pool: BlockPool::of_ordinary_pages(bytes_max / UNUSED_SHARE),
        }
    }

    /// Where its memory comes from.
    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    fn is_off(&self) -> bool {
        self.shards.is_empty()
    }

    fn shard(&self, block: u64) -> &Mutex<Shard> {
        &self.shards[(block / NEIGHBOURS) as usize % self.shards.len()]
    }

    /// Fills `buffer` with the blocks from `first_block` on whose checksums are `checksums`, as far
    /// as they are found from either end. Returns which of them, by index, the caller must still
    /// read.
    pub(crate) fn read(
        &self,
        first_block: u64,
        checksums: &[u32],
        buffer: &mut [u8],
    ) -> Range<usize> {
        let (mut from, mut to) = (0, checksums.len());
        if self.is_off() {
            return from..to;
        }
        let mut found = |index: usize| {
            let (block, bytes) = (
                first_block + index as u64,
                &mut buffer[index * BLOCK_SIZE..(index + 1) * BLOCK_SIZE],
            );
            self.shard(block).lock().copy_to(block, checksums[index], bytes)
        };
        while from < to && found(from) {
            from += 1;
        }
        // The one at `from` is missing.
        while from + 1 < to && found(to - 1) {
            to -= 1;
        }
        from..to
    }

    /// So many blocks from `first_block` on had to be read from the device.
    pub(crate) fn missed(&self, first_block: u64, blocks: usize) {
        if !self.is_off() {
            self.shard(first_block).lock().misses += blocks as u64;
        }
    }

    /// Keeps the content of the blocks from `first_block` on, of which `checksums` are computed or
    /// verified; those that are `wanted` as if they had been read already.
    pub(crate) fn keep(&self, first_block: u64, checksums: &[u32], bytes: &[u8], wanted: bool) {
        if self.is_off() {
            return;
        }
        for (block, (checksum, bytes)) in
            (first_block..).zip(checksums.iter().zip(bytes.chunks_exact(BLOCK_SIZE)))
        {
            self.shard(block).lock().put(block, *checksum, bytes, wanted, &self.pool);
        }
    }

    /// The blocks of `range` are about to get new content: what they held before is forgotten.
    pub(crate) fn forget(&self, range: BlockRange) {
        let mut block = range.start.0;
        while block < range.end().0 && !self.is_off() {
            let end = range.end().0.min((block / NEIGHBOURS + 1) * NEIGHBOURS);
            let mut shard = self.shard(block).lock();
            (block..end).for_each(|block| shard.remove(block));
            block = end;
        }
    }

    /// What it holds and has done.
    pub(crate) fn statistics(&self) -> DataCacheStatistics {
        let mut statistics = DataCacheStatistics::default();
        for shard in &self.shards {
            let shard = shard.lock();
            statistics.hits += shard.hits;
            statistics.misses += shard.misses;
            statistics.bytes += (shard.by_block.len() * BLOCK_SIZE) as u64;
        }
        statistics
    }
}

#[cfg(test)]
#[path = "data_cache_tests.rs"]
mod tests;
