//! The bits of one block group, worked on by 64-bit words: ranges, runs and clusters.
//!
//! Positions are offsets within the group. A group starts at a multiple of 64 blocks, so a cluster
//! never spans two words.
use cairn_format::{BITMAP_BYTES, Geometry, NODE_BLOCKS};
use std::ops::Range;

/// Words of one group.
const WORDS: usize = (Geometry::GROUP_BLOCKS / 64) as usize;
/// The lowest bit of each cluster of a word.
const CLUSTER_STARTS: u64 = 0x1111_1111_1111_1111;
const _: () = assert!(NODE_BLOCKS == 4 && WORDS * 8 == BITMAP_BYTES);

/// Which free blocks a search may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Any free block.
    Any,
    /// Free blocks of clusters that are partly used: taking them costs no cluster.
    Broken,
    /// Free clusters, whole.
    Clusters,
}

/// One bit per block of a group.
#[derive(Clone)]
pub(crate) struct Bits(Box<[u64; WORDS]>);

impl Bits {
    /// All clear.
    pub(crate) fn new() -> Self {
        Self(Box::new([0; WORDS]))
    }

    /// From the form on the device.
    pub(crate) fn from_bytes(bytes: &[u8; BITMAP_BYTES]) -> Self {
        let mut bits = Self::new();
        for (word, chunk) in bits.0.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        bits
    }

    /// The form on the device.
    pub(crate) fn to_bytes(&self) -> Box<[u8; BITMAP_BYTES]> {
        let mut bytes = Box::new([0; BITMAP_BYTES]);
        for (word, chunk) in self.0.iter().zip(bytes.as_chunks_mut().0) {
            *chunk = word.to_le_bytes();
        }
        bytes
    }

    /// Sets the bits of `range`.
    pub(crate) fn set(&mut self, range: Range<u32>) {
        for (index, mask) in words(range) {
            self.0[index] |= mask;
        }
    }

    /// Clears the bits of `range`.
    pub(crate) fn clear(&mut self, range: Range<u32>) {
        for (index, mask) in words(range) {
            self.0[index] &= !mask;
        }
    }

    /// Whether every bit of `range` is set.
    pub(crate) fn all_set(&self, range: Range<u32>) -> bool {
        words(range).all(|(index, mask)| self.0[index] & mask == mask)
    }

    /// Whether every bit of `range` is clear.
    pub(crate) fn none_set(&self, range: Range<u32>) -> bool {
        words(range).all(|(index, mask)| self.0[index] & mask == 0)
    }

    /// How many bits of `range` are set.
    pub(crate) fn count(&self, range: Range<u32>) -> u64 {
        words(range).map(|(index, mask)| u64::from((self.0[index] & mask).count_ones())).sum()
    }

    /// How many clusters are clear as a whole in the words that `range` touches.
    pub(crate) fn clear_clusters(&self, range: Range<u32>) -> u64 {
        words(range).map(|(index, _)| u64::from(cluster_starts(!self.0[index]).count_ones())).sum()
    }

    /// The clear bits of word `index` that are of `kind`, without those of `avoided`.
    fn candidates(&self, index: usize, kind: Kind, avoided: &Range<u32>) -> u64 {
        let clear = !self.0[index];
        let allowed = clear & !word_mask(index, avoided);
        match kind {
            Kind::Any => allowed,
            Kind::Broken => allowed & !(cluster_starts(clear) * 0xf),
            Kind::Clusters => cluster_starts(allowed) * 0xf,
        }
    }

    /// The first run of `wanted` (at least 1) clear bits of `kind` in `within`, none of them in
    /// `avoided`; if there is none, the longest run. Runs longer than `wanted` are cut.
    pub(crate) fn find_run(
        &self,
        within: Range<u32>,
        wanted: u32,
        kind: Kind,
        avoided: &Range<u32>,
    ) -> Option<Range<u32>> {
        let (mut run, mut longest) = (0..0, 0..0);
        for (index, mask) in words(within) {
            let candidates = self.candidates(index, kind, avoided) & mask;
            let mut position = 0;
            while position < u64::BITS {
                let rest = candidates >> position;
                let clear = rest.trailing_zeros().min(u64::BITS - position);
                let length = (rest >> (clear % u64::BITS)).trailing_ones();
                let start = index as u32 * u64::BITS + position + clear;
                if clear > 0 || run.end != start {
                    longest = longer(longest, run);
                    run = start..start;
                }
                run.end += length;
                if run.end - run.start >= wanted {
                    return Some(run.start..run.start + wanted);
                }
                position += clear + length;
            }
        }
        Some(longer(longest, run)).filter(|run| !run.is_empty())
    }

    /// The first run of clear bits in `within`.
    pub(crate) fn first_run(&self, within: Range<u32>) -> Option<Range<u32>> {
        let clear = |(index, mask): (usize, u64)| (index as u32, !self.0[index] & mask);
        let (index, bits) = words(within.clone()).map(clear).find(|(_, bits)| *bits != 0)?;
        let start = index * u64::BITS + bits.trailing_zeros();
        Some(start..start + self.run_at(start, within.end - start, Kind::Any, &(0..0)))
    }

    /// Length of the run of clear bits of `kind` that begins at `start`, up to `wanted`, none of
    /// them in `avoided`.
    pub(crate) fn run_at(&self, start: u32, wanted: u32, kind: Kind, avoided: &Range<u32>) -> u32 {
        let end = (start + wanted).min(Geometry::GROUP_BLOCKS as u32);
        let mut length = 0;
        for (index, mask) in words(start..end) {
            let stopped = !self.candidates(index, kind, avoided) & mask;
            if stopped != 0 {
                return index as u32 * u64::BITS + stopped.trailing_zeros() - start;
            }
            length += mask.count_ones();
        }
        length
    }
}

/// The first of the two unless the second is longer.
fn longer(first: Range<u32>, second: Range<u32>) -> Range<u32> {
    if second.len() > first.len() { second } else { first }
}

/// The lowest bit of every cluster that is set as a whole.
fn cluster_starts(word: u64) -> u64 {
    let pairs = word & (word >> 1);
    pairs & (pairs >> 2) & CLUSTER_STARTS
}

/// The bits of `range` that stand in word `index`.
fn word_mask(index: usize, range: &Range<u32>) -> u64 {
    let base = index as u32 * u64::BITS;
    let low = range.start.max(base) - base;
    let high = range.end.min(base + u64::BITS).saturating_sub(base);
    if low >= high { 0 } else { (u64::MAX >> (u64::BITS - (high - low))) << low }
}

/// The words that `range` touches, each with the mask of its bits in `range`.
fn words(range: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    let end = if range.is_empty() { range.start } else { range.end };
    let first = (range.start / u64::BITS) as usize;
    let last = end.div_ceil(u64::BITS) as usize;
    (first..last).map(move |index| (index, word_mask(index, &range)))
}
