//! A set of blocks: one bit for each block of the volume.
use cairn_format::BlockRange;

/// A set of blocks. Ranges must lie within the size that it was made for.
#[derive(Clone, Default)]
pub(crate) struct BlockSet {
    words: Vec<u64>,
}

impl BlockSet {
    pub(crate) fn new(blocks: u64) -> Self {
        Self { words: vec![0; blocks.div_ceil(64) as usize] }
    }

    /// Adds `range`. Returns the first block that was in the set already.
    pub(crate) fn insert(&mut self, range: BlockRange) -> Option<u64> {
        let mut known = None;
        for block in range.range() {
            let (word, bit) = (&mut self.words[(block / 64) as usize], 1 << (block % 64));
            if *word & bit != 0 {
                known = known.or(Some(block));
            }
            *word |= bit;
        }
        known
    }

    pub(crate) fn contains(&self, block: u64) -> bool {
        self.words.get((block / 64) as usize).is_some_and(|word| word & (1 << (block % 64)) != 0)
    }

    pub(crate) fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}
