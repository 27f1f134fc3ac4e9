//! The durable and the unflushed content of a device, and how each event changes them.
//!
//! Invariants: `durable` holds everything that a successful flush covered, in the order of
//! completion, once for each thing that a device may return for discarded blocks. `unflushed` holds
//! every other write since, by order of issue. The live device and the replay of its history run
//! the same code, so both agree.

use super::SECTOR_BYTES;
use super::crash::Fate;
use super::image::{Block, Bytes, SparseImage};
use crate::device::BLOCK_BYTES;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

const SECTORS_PER_BLOCK: u64 = BLOCK_BYTES as u64 / SECTOR_BYTES;

/// What a device returns for blocks that were discarded and not written since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiscardContent {
    /// Zeros.
    Zeros,
    /// A pattern that was never written. The default: it exposes code that relies on the content.
    Garbage,
    /// The old content: the device ignores the hint.
    Kept,
}

impl DiscardContent {
    /// All of them.
    pub const ALL: [DiscardContent; 3] =
        [DiscardContent::Zeros, DiscardContent::Garbage, DiscardContent::Kept];
}

impl fmt::Display for DiscardContent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            DiscardContent::Zeros => "zeros",
            DiscardContent::Garbage => "garbage",
            DiscardContent::Kept => "what they held",
        })
    }
}

/// The number of a write, by order of issue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriteId(pub u64);

/// An unflushed write, as the test sees it to decide its fate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteInfo {
    /// Its number.
    pub id: WriteId,
    /// Its offset.
    pub offset_bytes: u64,
    /// Its length.
    pub length_bytes: u64,
    /// Whether it is a discard. Its new content is whatever the device returns for discarded
    /// blocks.
    pub is_discard: bool,
    /// Whether it failed, or the flush that should have covered it did: no later flush will cover
    /// it.
    pub is_abandoned: bool,
}

impl WriteInfo {
    /// Its length in sectors.
    pub fn sectors(&self) -> u64 {
        self.length_bytes / SECTOR_BYTES
    }
}

/// The new content of a range.
pub(super) enum WriteContent {
    Blocks(Vec<Arc<Block>>),
    Discarded { blocks: u64, garbage: Arc<Block> },
}

pub(super) struct WriteRecord {
    pub(super) id: WriteId,
    pub(super) offset_bytes: u64,
    pub(super) content: WriteContent,
}

impl WriteRecord {
    fn blocks(&self) -> u64 {
        match &self.content {
            WriteContent::Blocks(blocks) => blocks.len() as u64,
            WriteContent::Discarded { blocks, .. } => *blocks,
        }
    }

    pub(super) fn is_discard(&self) -> bool {
        matches!(self.content, WriteContent::Discarded { .. })
    }

    /// `None` is a block of zeros.
    fn block(&self, index: u64, discarded: DiscardContent) -> Option<&Arc<Block>> {
        match &self.content {
            WriteContent::Blocks(blocks) => blocks.get(index as usize),
            WriteContent::Discarded { garbage, .. } => {
                (discarded == DiscardContent::Garbage).then_some(garbage)
            }
        }
    }

    pub(super) fn length_bytes(&self) -> u64 {
        self.blocks() * BLOCK_BYTES as u64
    }

    /// The range in blocks of the device.
    fn range(&self) -> Range<u64> {
        let first = self.offset_bytes / BLOCK_BYTES as u64;
        first..first + self.blocks()
    }

    /// Stores the whole content.
    pub(super) fn apply(&self, image: &mut SparseImage, discarded: DiscardContent) {
        if self.is_discard() && discarded == DiscardContent::Kept {
            return;
        }
        for (index, target) in self.range().enumerate() {
            image.set_block(target, self.block(index as u64, discarded).cloned());
        }
    }

    /// Stores the sectors in `chosen`, by number within the write, except in blocks of
    /// `superseded`.
    fn apply_sectors(
        &self,
        image: &mut SparseImage,
        superseded: &[Range<u64>],
        discarded: DiscardContent,
        chosen: impl Fn(u64) -> bool,
    ) {
        if self.is_discard() && discarded == DiscardContent::Kept {
            return;
        }
        for (index, target) in (0..).zip(self.range()) {
            if superseded.iter().any(|range| range.contains(&target)) {
                continue;
            }
            let first = index * SECTORS_PER_BLOCK;
            let count =
                (first..first + SECTORS_PER_BLOCK).filter(|sector| chosen(*sector)).count() as u64;
            if count == SECTORS_PER_BLOCK {
                image.set_block(target, self.block(index, discarded).cloned());
            } else if count > 0 {
                let new = self.block(index, discarded);
                image.change_block(target, |block| mix(index, new, block, &chosen));
            }
        }
    }
}

/// Stores the chosen sectors of block `index` of a write; without a `new` one, zeros.
fn mix(index: u64, new: Option<&Arc<Block>>, target: &mut Bytes, chosen: impl Fn(u64) -> bool) {
    for sector in 0..SECTORS_PER_BLOCK {
        if chosen(index * SECTORS_PER_BLOCK + sector) {
            let bytes = (sector * SECTOR_BYTES) as usize..((sector + 1) * SECTOR_BYTES) as usize;
            match new {
                Some(block) => target[bytes.clone()].copy_from_slice(&block[bytes]),
                None => target[bytes].fill(0),
            }
        }
    }
}

/// One event of a device.
#[derive(Clone)]
pub(super) enum MediaEvent {
    /// A write or discard was issued.
    Issued(Arc<WriteRecord>),
    /// A write returned an error.
    Failed(WriteId),
    /// A flush succeeded; the writes it covers, by order of completion. Beside it were writes that
    /// had been issued when it began, and not answered: it does not cover them.
    Flushed { covered: Arc<[WriteId]>, is_beside_writes: bool },
    /// A flush returned an error; the writes that it should have covered.
    FlushFailed(Arc<[WriteId]>),
    /// Bytes of a range were damaged by an exclusive or with the pattern.
    Damaged { offset_bytes: u64, length_bytes: u64, pattern: u8 },
}

#[derive(Clone)]
struct Unflushed {
    record: Arc<WriteRecord>,
    abandoned: bool,
    /// Blocks in which something newer is durable. Only an abandoned write has any.
    superseded: Vec<Range<u64>>,
}

#[derive(Clone)]
pub(super) struct Media {
    /// In the order of [`DiscardContent::ALL`].
    durable: [SparseImage; 3],
    has_discards: bool,
    unflushed: BTreeMap<WriteId, Unflushed>,
}

impl Media {
    pub(super) fn new(durable: SparseImage) -> Media {
        let durable = [durable.clone(), durable.clone(), durable];
        Media { durable, has_discards: false, unflushed: BTreeMap::new() }
    }

    pub(super) fn durable(&self, discarded: DiscardContent) -> &SparseImage {
        &self.durable[discarded as usize]
    }

    /// Whether a discard was ever issued.
    pub(super) fn has_discards(&self) -> bool {
        self.has_discards
    }

    pub(super) fn is_unflushed(&self, id: WriteId) -> bool {
        self.unflushed.contains_key(&id)
    }

    pub(super) fn apply(&mut self, event: &MediaEvent) {
        match event {
            MediaEvent::Issued(record) => {
                self.has_discards |= record.is_discard();
                let unflushed = Unflushed {
                    record: Arc::clone(record),
                    abandoned: false,
                    superseded: Vec::new(),
                };
                self.unflushed.insert(record.id, unflushed);
            }
            MediaEvent::Failed(id) => self.abandon(*id),
            MediaEvent::Flushed { covered, .. } => covered.iter().for_each(|id| self.cover(*id)),
            MediaEvent::FlushFailed(covered) => covered.iter().for_each(|id| self.abandon(*id)),
            MediaEvent::Damaged { offset_bytes, length_bytes, pattern } => {
                for image in &mut self.durable {
                    damage(image, *offset_bytes, *length_bytes, *pattern);
                }
            }
        }
    }

    /// A flush that ended earlier may have covered the write already; then nothing is left to do.
    fn cover(&mut self, id: WriteId) {
        if self.unflushed.get(&id).is_none_or(|write| write.abandoned) {
            return;
        }
        if let Some(write) = self.unflushed.remove(&id) {
            for (image, discarded) in self.durable.iter_mut().zip(DiscardContent::ALL) {
                write.record.apply(image, discarded);
            }
            self.supersede(id, &write.record.range());
        }
    }

    fn abandon(&mut self, id: WriteId) {
        if let Some(write) = self.unflushed.get_mut(&id) {
            write.abandoned = true;
        }
    }

    /// A write that was abandoned before `id` was issued cannot reappear over it.
    fn supersede(&mut self, id: WriteId, range: &Range<u64>) {
        self.unflushed.retain(|older, write| {
            let target = write.record.range();
            if !write.abandoned
                || *older > id
                || target.start >= range.end
                || range.start >= target.end
            {
                return true;
            }
            write.superseded.push(range.clone());
            !target.clone().all(|block| write.superseded.iter().any(|range| range.contains(&block)))
        });
    }

    pub(super) fn writes(&self) -> Vec<WriteInfo> {
        let info = |write: &Unflushed| WriteInfo {
            id: write.record.id,
            offset_bytes: write.record.offset_bytes,
            length_bytes: write.record.length_bytes(),
            is_discard: write.record.is_discard(),
            is_abandoned: write.abandoned,
        };
        self.unflushed.values().map(info).collect()
    }

    /// The content that reads return if no error was reported: every write that was issued. The
    /// second part lists the writes that no flush has covered, by order of issue.
    pub(super) fn completed(&self, discarded: DiscardContent) -> (SparseImage, Vec<WriteId>) {
        let mut image = self.durable(discarded).clone();
        let good = self.unflushed.iter().filter(|(_, write)| !write.abandoned);
        let ids = good.map(|(id, write)| {
            write.record.apply(&mut image, discarded);
            *id
        });
        let ids = ids.collect();
        (image, ids)
    }

    /// The content after a power failure with these fates of the unflushed writes, one each, by
    /// order of issue, on a device that returns `discarded` for discarded blocks.
    pub(super) fn crash(&self, fates: &[Fate], discarded: DiscardContent) -> SparseImage {
        assert_eq!(fates.len(), self.unflushed.len(), "one fate for each unflushed write");
        let mut image = self.durable(discarded).clone();
        for (write, fate) in self.unflushed.values().zip(fates) {
            match fate {
                Fate::Lost => {}
                Fate::Written if write.superseded.is_empty() => {
                    write.record.apply(&mut image, discarded);
                }
                Fate::Written => {
                    write.record.apply_sectors(&mut image, &write.superseded, discarded, |_| true);
                }
                Fate::Torn(sectors) => {
                    write.record.apply_sectors(
                        &mut image,
                        &write.superseded,
                        discarded,
                        |sector| sectors.contains(sector),
                    );
                }
            }
        }
        image
    }
}

pub(super) fn damage(image: &mut SparseImage, offset_bytes: u64, length_bytes: u64, pattern: u8) {
    let block_bytes = BLOCK_BYTES as u64;
    let end = offset_bytes + length_bytes;
    let mut position = offset_bytes;
    while position < end {
        let block_end = (position / block_bytes + 1) * block_bytes;
        let part = (position % block_bytes) as usize
            ..((end.min(block_end) - 1) % block_bytes) as usize + 1;
        image.change_block(position / block_bytes, |block| {
            block[part].iter_mut().for_each(|byte| *byte ^= pattern)
        });
        position = block_end;
    }
}
