//! File contents of the model, block by block, and the pattern that test data is made of.
//!
//! Invariants: bytes at and after `size_bytes` are zero; a block that is absent reads as zeros.
//! What was written is allocated, and so is what fallocate asked for, also behind the end, until
//! all of a block is cut off or punched out.
//! Blocks are shared by reference, so that every version of a block in a file's history costs 4 KiB
//! once.
use crate::snapshot::hash;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of one block.
pub const BLOCK_BYTES: u64 = 4096;

/// One block of a file.
pub type Block = Arc<[u8; BLOCK_BYTES as usize]>;

/// What a regular file holds.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub struct Contents {
    size_bytes: u64,
    blocks: BTreeMap<u64, Block>,
    allocated: Arc<BTreeSet<u64>>,
    /// Of these, those that hold no data, each with a number of what has reserved it.
    reserved: Arc<BTreeMap<u64, u64>>,
}

impl Contents {
    /// Length of the file.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The blocks that may hold anything but zeros.
    pub fn blocks(&self) -> &BTreeMap<u64, Block> {
        &self.blocks
    }

    /// The blocks that have a place on the device, once all is written.
    pub fn allocated(&self) -> &Arc<BTreeSet<u64>> {
        &self.allocated
    }

    /// Allocates the blocks that a range touches; those that were not hold no data, and are told
    /// from others by `number`.
    pub fn reserve(&mut self, offset_bytes: u64, length_bytes: u64, number: u64) {
        let mut new: Vec<u64> = Self::touched(offset_bytes, length_bytes).collect();
        new.retain(|block| !self.allocated.contains(block));
        if !new.is_empty() {
            Arc::make_mut(&mut self.allocated).extend(&new);
            Arc::make_mut(&mut self.reserved).extend(new.into_iter().map(|block| (block, number)));
        }
    }

    fn touched(offset_bytes: u64, length_bytes: u64) -> Range<u64> {
        let end = (offset_bytes + length_bytes).div_ceil(BLOCK_BYTES);
        offset_bytes / BLOCK_BYTES..if length_bytes > 0 { end } else { 0 }
    }

    /// What `began` becomes that is what these contents once were, when they are applied to it:
    /// blocks that were reserved since then are not.
    pub(crate) fn applied_to(&self, began: &Contents) -> Contents {
        let is_new = |block: &u64| {
            let reserved = self.reserved.get(block);
            reserved.is_some() && reserved != began.reserved.get(block)
        };
        let mut contents = self.clone();
        Arc::make_mut(&mut contents.allocated).retain(|block| !is_new(block));
        let kept = &contents.allocated;
        Arc::make_mut(&mut contents.reserved).retain(|block, _| kept.contains(block));
        contents
    }

    /// Whether both hold the same, in the same places.
    pub(crate) fn same_as(&self, other: &Contents) -> bool {
        let same = |block: &u64| self.blocks.get(block) == other.blocks.get(block);
        (self.size_bytes, &self.allocated, &self.reserved)
            == (other.size_bytes, &other.allocated, &other.reserved)
            && self.changed_blocks(other).iter().all(same)
    }

    /// Writes `bytes` at `offset_bytes`; the file grows as needed.
    pub fn write(&mut self, offset_bytes: u64, bytes: &[u8]) {
        let blocks = Self::touched(offset_bytes, bytes.len() as u64);
        if blocks.clone().any(|block| !self.allocated.contains(&block)) {
            Arc::make_mut(&mut self.allocated).extend(blocks.clone());
        }
        if self.reserved.range(blocks.start..blocks.end.max(blocks.start)).next().is_some() {
            Arc::make_mut(&mut self.reserved).retain(|block, _| !blocks.contains(block));
        }
        let mut done = 0;
        while done < bytes.len() {
            let position = offset_bytes + done as u64;
            let within = (position % BLOCK_BYTES) as usize;
            let part = (bytes.len() - done).min(BLOCK_BYTES as usize - within);
            let block = self
                .blocks
                .entry(position / BLOCK_BYTES)
                .or_insert_with(|| Arc::new([0; BLOCK_BYTES as usize]));
            Arc::make_mut(block)[within..within + part].copy_from_slice(&bytes[done..done + part]);
            done += part;
        }
        if !bytes.is_empty() {
            self.size_bytes = self.size_bytes.max(offset_bytes + bytes.len() as u64);
        }
    }

    /// Makes a range read as zeros, without changing the size; what is a whole block of it becomes
    /// a hole, and so does the block of the end, if the range reaches that.
    pub fn zero(&mut self, offset_bytes: u64, length_bytes: u64) {
        let end = offset_bytes.saturating_add(length_bytes);
        if offset_bytes >= end {
            return;
        }
        let whole_end = match end >= self.size_bytes {
            true => end.max(self.size_bytes.next_multiple_of(BLOCK_BYTES)),
            false => end,
        };
        let whole = offset_bytes.div_ceil(BLOCK_BYTES)..whole_end / BLOCK_BYTES;
        if self.allocated.iter().any(|block| whole.contains(block)) {
            Arc::make_mut(&mut self.allocated).retain(|block| !whole.contains(block));
            Arc::make_mut(&mut self.reserved).retain(|block, _| !whole.contains(block));
        }
        let touched: Vec<u64> = self
            .blocks
            .range(offset_bytes / BLOCK_BYTES..=(end - 1) / BLOCK_BYTES)
            .map(|(&index, _)| index)
            .collect();
        for index in touched {
            let start = index * BLOCK_BYTES;
            let (from, to) =
                (offset_bytes.max(start) - start, end.min(start + BLOCK_BYTES) - start);
            if to - from == BLOCK_BYTES {
                self.blocks.remove(&index);
            } else if let Some(block) = self.blocks.get_mut(&index) {
                Arc::make_mut(block)[from as usize..to as usize].fill(0);
            }
        }
    }

    /// Cuts the file, or extends it with zeros. Blocks that were allocated behind the end go, also
    /// if the length stays.
    pub fn truncate(&mut self, size_bytes: u64) {
        if size_bytes <= self.size_bytes {
            self.zero(size_bytes, u64::MAX - size_bytes);
        }
        self.size_bytes = size_bytes;
    }

    /// Extends the file to `size_bytes` if it is shorter.
    pub fn extend(&mut self, size_bytes: u64) {
        self.size_bytes = self.size_bytes.max(size_bytes);
    }

    /// The bytes of a range, less at the end of the file.
    pub fn read(&self, offset_bytes: u64, length_bytes: u64) -> Vec<u8> {
        let end = offset_bytes.saturating_add(length_bytes).min(self.size_bytes);
        let mut bytes = vec![0; end.saturating_sub(offset_bytes) as usize];
        if bytes.is_empty() {
            return bytes;
        }
        for (&index, block) in
            self.blocks.range(offset_bytes / BLOCK_BYTES..=(end - 1) / BLOCK_BYTES)
        {
            let start = index * BLOCK_BYTES;
            let (from, to) = (offset_bytes.max(start), end.min(start + BLOCK_BYTES));
            let target = (from - offset_bytes) as usize..(to - offset_bytes) as usize;
            bytes[target].copy_from_slice(&block[(from - start) as usize..(to - start) as usize]);
        }
        bytes
    }

    /// Indices of the blocks that differ between two contents.
    pub fn changed_blocks(&self, other: &Contents) -> Vec<u64> {
        let same = |index: &u64, block: &Block| {
            other.blocks.get(index).is_some_and(|there| Arc::ptr_eq(there, block))
        };
        let mut changed: Vec<u64> = self
            .blocks
            .iter()
            .filter(|(index, block)| !same(index, block))
            .map(|(&index, _)| index)
            .collect();
        changed.extend(other.blocks.keys().filter(|index| !self.blocks.contains_key(index)));
        changed.sort_unstable();
        changed.dedup();
        changed
    }
}

/// Names the write that a piece of test data came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Tag {
    /// The client that wrote.
    pub client: u8,
    /// The index of the operation among the client's.
    pub operation: u32,
}

const GRANULE_BYTES: u64 = 16;
const MARK: u32 = 0xCA12_4ED5;

/// `length_bytes` of test data for a write at `offset_bytes`: 16-byte granules, each with the tag
/// and its own offset.
pub fn pattern(tag: Tag, offset_bytes: u64, length_bytes: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length_bytes as usize + 2 * GRANULE_BYTES as usize);
    let first = offset_bytes / GRANULE_BYTES;
    let end = (offset_bytes + length_bytes).div_ceil(GRANULE_BYTES);
    for granule in first..end {
        bytes.extend_from_slice(&(MARK ^ u32::from(tag.client) << 8).to_le_bytes());
        bytes.extend_from_slice(&tag.operation.to_le_bytes());
        bytes.extend_from_slice(&(granule + 1).to_le_bytes());
    }
    bytes.drain(..(offset_bytes - first * GRANULE_BYTES) as usize);
    bytes.truncate(length_bytes as usize);
    bytes
}

/// A value of the extended attribute number `name`: `length_bytes` of test data.
///
/// Values of every second attribute differ in one granule only, which is anywhere in them. Code
/// that compares a part of a value takes one for the other.
pub fn xattr_value(name: u8, tag: Tag, length_bytes: u64) -> Vec<u8> {
    if name.is_multiple_of(2) || length_bytes < 2 * GRANULE_BYTES {
        return pattern(tag, 0, length_bytes);
    }
    let mut value = pattern(Tag { client: 0, operation: 0 }, 0, length_bytes);
    let at = (hash(tag) % (length_bytes - GRANULE_BYTES)) as usize;
    value[at..at + GRANULE_BYTES as usize].copy_from_slice(&pattern(tag, 0, GRANULE_BYTES));
    value
}

/// Says where bytes found at `offset_bytes` of a file come from.
pub fn describe(offset_bytes: u64, bytes: &[u8]) -> String {
    if bytes.iter().all(|&byte| byte == 0) {
        return format!("{} zeros", bytes.len());
    }
    let skip = (GRANULE_BYTES - offset_bytes % GRANULE_BYTES) % GRANULE_BYTES;
    let mut origins: Vec<(String, u64)> = Vec::new();
    for granule in
        bytes.get(skip as usize..).unwrap_or_default().chunks_exact(GRANULE_BYTES as usize)
    {
        let word =
            |at: usize| u32::from_le_bytes(granule[at..at + 4].try_into().expect("four bytes"));
        let position = u64::from(word(8)) | u64::from(word(12)) << 32;
        let client = (word(0) ^ MARK) >> 8;
        let origin = match () {
            () if granule.iter().all(|&byte| byte == 0) => "zeros".to_owned(),
            () if client < 256 && (word(0) ^ MARK) & 0xFF == 0 => {
                let origin_bytes = position.wrapping_sub(1).wrapping_mul(GRANULE_BYTES);
                let expected = offset_bytes
                    + skip
                    + origins.iter().map(|(_, count)| count * GRANULE_BYTES).sum::<u64>();
                let moved = if origin_bytes == expected {
                    String::new()
                } else {
                    format!(" (written at {origin_bytes})")
                };
                format!("client {client} operation {}{moved}", word(4))
            }
            () => format!("foreign bytes {granule:02x?}"),
        };
        match origins.last_mut() {
            Some((last, count)) if *last == origin => *count += 1,
            _ => origins.push((origin, 1)),
        }
    }
    let shown: Vec<String> = origins
        .iter()
        .take(4)
        .map(|(origin, count)| format!("{} bytes of {origin}", count * GRANULE_BYTES))
        .collect();
    format!(
        "{} bytes: {}{}",
        bytes.len(),
        shown.join(", "),
        if origins.len() > 4 { ", …" } else { "" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::random::Seeded;

    #[test]
    fn contents_equal_a_plain_array() {
        let mut random = Seeded::new(5);
        let (mut contents, mut plain) = (Contents::default(), Vec::<u8>::new());
        for operation in 0..400 {
            let (offset, length) = (random.below(40_000), random.below(12_000));
            match random.below(4) {
                0 => {
                    contents.truncate(offset);
                    plain.resize(offset as usize, 0);
                }
                1 => {
                    contents.zero(offset, length);
                    let end = plain.len().min((offset + length) as usize);
                    if (offset as usize) < end {
                        plain[offset as usize..end].fill(0);
                    }
                }
                _ => {
                    let bytes = pattern(Tag { client: 1, operation }, offset, length);
                    contents.write(offset, &bytes);
                    if !bytes.is_empty() {
                        plain.resize(plain.len().max((offset + length) as usize), 0);
                        plain[offset as usize..(offset + length) as usize].copy_from_slice(&bytes);
                    }
                }
            }
            assert_eq!(contents.size_bytes(), plain.len() as u64);
            assert!(contents.read(0, u64::MAX) == plain, "after operation {operation}");
        }
    }

    #[test]
    fn the_pattern_names_its_origin() {
        let bytes = pattern(Tag { client: 3, operation: 77 }, 1000, 5000);
        assert_eq!(describe(1000, &bytes), "5000 bytes: 4992 bytes of client 3 operation 77");
        assert!(describe(2008, &bytes).contains("written at"));
        assert_eq!(describe(0, &[0; 10]), "10 zeros");
        assert!(describe(0, &[9; 16]).contains("foreign"));
    }

    #[test]
    fn changed_blocks_are_found() {
        let mut before = Contents::default();
        before.write(0, &[1; 20_000]);
        let mut after = before.clone();
        after.write(5000, &[2]);
        after.zero(8192, 4096);
        after.write(40_960, &[3]);
        assert_eq!(before.changed_blocks(&after), [1, 2, 10]);
        assert_eq!(after.changed_blocks(&before), [1, 2, 10]);
    }
}
