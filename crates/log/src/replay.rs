//! Finding out after a crash which checkpoints count.
//!
//! 1. Walk the chain from the superblock's `log_tail`: each checkpoint must be whole (checksum, volume, address), of the
//!    superblock's epoch, the next in sequence, and of no older generation than the one before it. The first that is not
//!    ends the chain: it was being written when the power failed, or never was.
//! 2. The newest `flushed_sequence` in the chain says up to where a flush was seen to end; the superblock says the same for
//!    checkpoints of its generation and older ones. The others may be whole although their data is not: the blocks of
//!    every extent marked `NEW_DATA` are read and compared with the checksums in its item. The first checkpoint whose
//!    data fails ends the chain.
//! 3. The caller applies, in order, those of a generation above the superblock's.
//!
//! Nothing that was acknowledged is lost: it was acknowledged after a flush that began when its checkpoint, all before it,
//! and their data were completely written, so all of these verify. A device error is never taken for the end of the
//! chain, because what stands behind it may have been acknowledged.
//!
//! On a device with copies, what is not valid in one is looked for in the others. What is valid anywhere was written, so the
//! chain found in this way is one that a crash of a single device could have left.
//!
//! Reading needs no locks. One checkpoint is in memory at a time; the caller's pass reads them again.
use crate::error::ReplayError;
use cairn_blockdev::{AlignedBuffer, BlockDevice, read_verified};
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, Checkpoint, CheckpointEntry, CheckpointHeader, EntryFlags, Extent, ExtentKind, FormatError,
    Generation, Geometry, HEADER_BYTES, ItemKind, LogPosition, Structure, Superblock, VolumeId, checksum,
};

/// One checkpoint of the chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplayedCheckpoint {
    /// Block within the ring at which it starts.
    pub ring_block: u64,
    /// Its length.
    pub blocks: u64,
    /// Its fields.
    pub header: CheckpointHeader,
}

/// What is to be replayed.
pub struct Replay<'d> {
    ring: RingReader<'d>,
    superblock_generation: Generation,
    /// The accepted checkpoints, also those that the superblock covers.
    pub chain: Vec<ReplayedCheckpoint>,
    /// Where the log goes on.
    pub end: LogPosition,
    /// The newest generation among superblock and chain.
    pub last_generation: Generation,
    /// The next inode number to give out.
    pub next_inode: u64,
    /// Why the chain ends where it ends; for messages.
    pub stopped: String,
    /// A checkpoint behind the end proves that what is missing there had been flushed: the log is damaged, and what was
    /// acknowledged is lost. Says so in words.
    pub lost: Option<String>,
}

/// Reads checkpoints from the ring of one volume.
#[derive(Clone, Copy)]
struct RingReader<'d> {
    device: &'d dyn BlockDevice,
    /// Which copy to read; none: as the device chooses.
    copy: Option<usize>,
    volume: VolumeId,
    geometry: Geometry,
}

/// Blocks read at once in search of checkpoints.
const SEARCH_BLOCKS: u64 = 32;

/// A step of the walk: the next checkpoint, or why there is none.
type Step<T> = Result<Result<T, String>, ReplayError>;

impl RingReader<'_> {
    /// Reads `blocks` blocks of the ring, around its end if need be.
    fn read_blocks(&self, ring_block: u64, blocks: u64) -> Result<Vec<u8>, ReplayError> {
        let ring = self.geometry.log();
        let mut bytes = vec![0; blocks as usize * BLOCK_SIZE];
        let before_end = blocks.min(ring.blocks - ring_block);
        let (here, wrapped) = bytes.split_at_mut(before_end as usize * BLOCK_SIZE);
        self.read(ring.start.offset_bytes() + ring_block * BLOCK_SIZE as u64, here)?;
        if !wrapped.is_empty() {
            self.read(ring.start.offset_bytes(), wrapped)?;
        }
        Ok(bytes)
    }

    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), ReplayError> {
        match self.copy {
            Some(copy) => self.device.read_copy(copy, offset_bytes, buffer)?,
            None => self.device.read(offset_bytes, buffer)?,
        }
        Ok(())
    }

    /// What `attempt` finds, in another copy of the ring if it finds nothing in the first. What is valid anywhere was
    /// written; which reader found it is returned too.
    fn in_any_copy<T, E>(&self, attempt: impl Fn(&Self) -> Result<Result<T, E>, ReplayError>) -> Result<Result<(T, Self), E>, ReplayError> {
        let first = attempt(self);
        let copies = self.device.copies();
        if !matches!(first, Ok(Ok(_))) && copies > 1 {
            for other in (0..copies).map(|copy| Self { copy: Some(copy), ..*self }) {
                if let Ok(Ok(found)) = attempt(&other) {
                    return Ok(Ok((found, other)));
                }
            }
        }
        Ok(first?.map(|found| (found, *self)))
    }

    /// Makes all copies of some blocks what this reader's copy holds.
    fn repair_from_here(&self, ring_block: u64, blocks: u64) -> Result<(), ReplayError> {
        let ring = self.geometry.log();
        let bytes = self.read_blocks(ring_block, blocks)?;
        let before_end = blocks.min(ring.blocks - ring_block);
        let (here, wrapped) = bytes.split_at(before_end as usize * BLOCK_SIZE);
        self.device.repair(ring.start.offset_bytes() + ring_block * BLOCK_SIZE as u64, here)?;
        if !wrapped.is_empty() {
            self.device.repair(ring.start.offset_bytes(), wrapped)?;
        }
        Ok(())
    }

    fn read_checkpoint(&self, ring_block: u64, blocks: u64) -> Result<Result<Checkpoint, FormatError>, ReplayError> {
        let bytes = self.read_blocks(ring_block, blocks)?;
        Ok(Checkpoint::decode(bytes, self.volume, ring_block))
    }

    /// Blocks of the checkpoint of this mount that `block` may begin; a look at the few fields that tell most others apart.
    fn announced(&self, block: &[u8], ring_block: u64, epoch: u64) -> Option<u64> {
        let epoch_at = HEADER_BYTES + 8;
        let ours = block[16..32] == self.volume.0
            && block[32..40] == ring_block.to_le_bytes()
            && block[epoch_at..epoch_at + 8] == epoch.to_le_bytes();
        Checkpoint::blocks_announced(block).filter(|_| ours)
    }

    /// The checkpoint at `at`, of at most `blocks_max` blocks, if it continues the chain.
    fn next(&self, at: LogPosition, blocks_max: u64, epoch: u64, generation_min: Generation) -> Step<(ReplayedCheckpoint, Checkpoint)> {
        match self.in_any_copy(|reader| reader.next_here(at, blocks_max, epoch, generation_min))? {
            Ok((next, reader)) => {
                if reader.copy.is_some() {
                    reader.repair_from_here(next.0.ring_block, next.0.blocks)?;
                }
                Ok(Ok(next))
            }
            Err(stop) => Ok(Err(stop)),
        }
    }

    fn next_here(
        &self,
        at: LogPosition,
        blocks_max: u64,
        epoch: u64,
        generation_min: Generation,
    ) -> Step<(ReplayedCheckpoint, Checkpoint)> {
        let place = format!("ring block {}", at.block);
        if blocks_max == 0 {
            return Ok(Err("the chain fills the ring".to_owned()));
        }
        let Some(blocks) = Checkpoint::blocks_announced(&self.read_blocks(at.block, 1)?) else {
            return Ok(Err(format!("{place} does not start a checkpoint")));
        };
        if blocks > blocks_max {
            return Ok(Err(format!("{place} announces {blocks} blocks, more than the {blocks_max} that are left of the ring")));
        }
        let checkpoint = match self.read_checkpoint(at.block, blocks)? {
            Ok(checkpoint) => checkpoint,
            Err(problem) => return Ok(Err(format!("{place}: {problem}"))),
        };
        let header = checkpoint.header;
        let stop = if header.log_epoch != epoch {
            format!("is of epoch {}, not {epoch}", header.log_epoch)
        } else if header.sequence != at.sequence {
            format!("has sequence {}, not {}", header.sequence, at.sequence)
        } else if header.generation < generation_min {
            format!("is of generation {}, older than {generation_min}", header.generation)
        } else {
            return Ok(Ok((ReplayedCheckpoint { ring_block: at.block, blocks, header }, checkpoint)));
        };
        Ok(Err(format!("the checkpoint at {place} {stop}")))
    }
}

/// Finds the checkpoints that follow `superblock` in the log of the volume on `device`. Writes nothing, unless the
/// device has copies: those of what counts are made good where they are not.
///
/// # Errors
/// The device fails, or a checkpoint of the chain holds an impossible extent.
pub fn replay<'d>(device: &'d dyn BlockDevice, superblock: &Superblock) -> Result<Replay<'d>, ReplayError> {
    let ring = RingReader { device, copy: None, volume: superblock.volume, geometry: superblock.geometry };
    let mut replay = Replay {
        ring,
        superblock_generation: superblock.generation,
        chain: Vec::new(),
        end: superblock.log_tail,
        last_generation: superblock.generation,
        next_inode: superblock.next_inode,
        stopped: String::new(),
        lost: None,
    };
    // 0 stands for "no checkpoint".
    replay.end.sequence = replay.end.sequence.max(1);
    replay.walk(superblock.log_epoch)?;
    if !superblock.clean {
        replay.search_behind_end(superblock.log_epoch)?;
    }
    replay.verify_data()?;
    for checkpoint in &replay.chain {
        replay.last_generation = replay.last_generation.max(checkpoint.header.generation);
        replay.next_inode = replay.next_inode.max(checkpoint.header.next_inode);
    }
    Ok(replay)
}

impl<'d> Replay<'d> {
    /// Step 1. Looks at the extents, too, so that an impossible one is found before anything is changed.
    fn walk(&mut self, epoch: u64) -> Result<(), ReplayError> {
        let log_blocks = self.ring.geometry.log_blocks;
        let (mut walked, mut generation) = (0, Generation(0));
        loop {
            let (found, checkpoint) = match self.ring.next(self.end, log_blocks - walked, epoch, generation)? {
                Ok(next) => next,
                Err(stopped) => {
                    self.stopped = stopped;
                    return Ok(());
                }
            };
            if self.applies(&found) {
                for entry in checkpoint.entries() {
                    self.extent_of(&found, &entry)?;
                }
            }
            walked += found.blocks;
            generation = found.header.generation;
            self.end = LogPosition { block: (found.ring_block + found.blocks) % log_blocks, sequence: found.header.sequence + 1 };
            self.chain.push(found);
        }
    }

    /// Looks for a valid checkpoint behind the chain's end which says that the missing one had been flushed. A crash leaves
    /// none, since the missing one was not.
    fn search_behind_end(&mut self, epoch: u64) -> Result<(), ReplayError> {
        let log_blocks = self.ring.geometry.log_blocks;
        let mut left = log_blocks - self.chain.iter().map(|checkpoint| checkpoint.blocks).sum::<u64>();
        let mut block = self.end.block;
        while left > 0 {
            let blocks = left.min(SEARCH_BLOCKS).min(log_blocks - block);
            let bytes = self.ring.read_blocks(block, blocks)?;
            for (bytes, index) in bytes.chunks_exact(BLOCK_SIZE).zip(0..) {
                let Some(announced) = self.ring.announced(bytes, block + index, epoch).filter(|&announced| announced <= left - index)
                else {
                    continue;
                };
                if let Ok(checkpoint) = self.ring.read_checkpoint(block + index, announced)?
                    && checkpoint.header.sequence > self.end.sequence
                    && (self.end.sequence..checkpoint.header.sequence).contains(&checkpoint.header.flushed_sequence)
                {
                    let (missing, proof) = (self.end.sequence, checkpoint.header.sequence);
                    self.lost =
                        Some(format!("checkpoint {missing} was flushed, as checkpoint {proof} says, but is lost: {}", self.stopped));
                    return Ok(());
                }
            }
            left -= blocks;
            block = (block + blocks) % log_blocks;
        }
        Ok(())
    }

    /// Step 2.
    fn verify_data(&mut self) -> Result<(), ReplayError> {
        let headers = self.chain.iter().map(|checkpoint| checkpoint.header);
        // What a checkpoint says of itself or of later ones is no proof.
        let proofs = headers.filter(|header| header.flushed_sequence < header.sequence);
        let flushed = proofs.map(|header| header.flushed_sequence).max().unwrap_or(0);
        let mut buffer = AlignedBuffer::default();
        for index in 0..self.chain.len() {
            let found = self.chain[index];
            if found.header.sequence <= flushed || !self.applies(&found) {
                continue;
            }
            if let Some(problem) = self.missing_data(&found, &mut buffer)? {
                self.stopped = format!("data of the checkpoint at ring block {}: {problem}", found.ring_block);
                self.end = LogPosition { block: found.ring_block, sequence: found.header.sequence };
                self.chain.truncate(index);
                return Ok(());
            }
        }
        Ok(())
    }

    /// What is wrong with the data of a checkpoint, if anything.
    fn missing_data(&self, found: &ReplayedCheckpoint, buffer: &mut AlignedBuffer) -> Result<Option<String>, ReplayError> {
        let checkpoint = self.read_again(found)?;
        for entry in checkpoint.entries().filter(|entry| entry.flags.contains(EntryFlags::NEW_DATA)) {
            let Some(extent) = self.extent_of(found, &entry)? else { continue };
            if extent.kind != ExtentKind::Data {
                continue;
            }
            let length_bytes = extent.blocks as usize * BLOCK_SIZE;
            if buffer.len() < length_bytes {
                *buffer = AlignedBuffer::zeroed(length_bytes);
            }
            let data = &mut buffer[..length_bytes];
            if let Some(block) = self.read_data(&extent, data)? {
                return Ok(Some(format!("block {block} of item {:?} was not written", entry.key)));
            }
            // No flush may have covered it: each copy must have it before anything relies on that.
            self.ring.device.repair(extent.start.offset_bytes(), data)?;
        }
        Ok(None)
    }

    /// Reads an extent; returns its first block that no copy holds as its checksum says.
    fn read_data(&self, extent: &Extent, data: &mut [u8]) -> Result<Option<u64>, ReplayError> {
        let device = self.ring.device;
        device.read(extent.start.offset_bytes(), data)?;
        for (block, (bytes, &sum)) in (extent.start.0..).zip(data.chunks_exact_mut(BLOCK_SIZE).zip(&extent.checksums)) {
            let verify = |bytes: &[u8]| if checksum(bytes) == sum { Ok(()) } else { Err(()) };
            if verify(bytes).is_err() && read_verified(device, BlockNumber(block).offset_bytes(), bytes, verify)?.is_err() {
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    /// The extent that an entry puts in place, if it does.
    fn extent_of(&self, found: &ReplayedCheckpoint, entry: &CheckpointEntry<'_>) -> Result<Option<Extent>, ReplayError> {
        if entry.flags.contains(EntryFlags::DELETE) || entry.key.kind != ItemKind::Extent as u8 {
            return Ok(None);
        }
        let block = BlockNumber(found.ring_block);
        let damaged = |problem: String| FormatError::new(Structure::Checkpoint, block, problem);
        let extent = Extent::decode(entry.value).map_err(|error| damaged(format!("item {:?}: {}", entry.key, error.problem)))?;
        if !self.ring.geometry.contains(extent.range()) {
            let BlockRange { start, blocks } = extent.range();
            return Err(damaged(format!("item {:?}: {blocks} blocks at {start} are outside the volume's data", entry.key)).into());
        }
        Ok(Some(extent))
    }

    fn applies(&self, checkpoint: &ReplayedCheckpoint) -> bool {
        checkpoint.header.generation > self.superblock_generation
    }

    fn read_again(&self, found: &ReplayedCheckpoint) -> Result<Checkpoint, ReplayError> {
        let read = self.ring.in_any_copy(|reader| reader.read_checkpoint(found.ring_block, found.blocks))?;
        Ok(read.map(|(checkpoint, _)| checkpoint)?)
    }

    /// The checkpoints to apply, in order; each is read when its turn comes. After an error, nothing more may be applied.
    pub fn checkpoints(&self) -> impl Iterator<Item = Result<Checkpoint, ReplayError>> + '_ {
        self.chain.iter().filter(|found| self.applies(found)).map(|found| self.read_again(found))
    }
}
