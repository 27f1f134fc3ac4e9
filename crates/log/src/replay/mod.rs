//! Finding out after a crash which checkpoints count.
//!
//! 1. Walk the chain from the superblock's `log_tail`: each checkpoint must be whole (checksum,
//!    volume, address), of the superblock's epoch, the next in sequence, and of no older generation
//!    than the one before it. The first that is not ends the chain: it was being written when the
//!    power failed, or never was. One that relies on a newer superblock than the one found ends it,
//!    too: that superblock was durable and is lost, and items that only its trees had are in no
//!    checkpoint.
//! 2. The newest `flushed_sequence` in the chain says up to where a flush was seen to end; the
//!    superblock says the same for checkpoints of its generation and older ones. The others may be
//!    whole although their data is not: the blocks of every extent marked `NEW_DATA` are read and
//!    compared with the checksums in its item. The first checkpoint whose data fails ends the
//!    chain.
//! 3. The caller applies, in order, those of a generation above the superblock's.
//!
//! Nothing that was acknowledged is lost: it was acknowledged after a flush that began when its
//! checkpoint, all before it, and their data were completely written, so all of these verify. A
//! device error is never taken for the end of the chain, because what stands behind it may have
//! been acknowledged.
//!
//! On a device with copies, what is not valid in one is looked for in the others. What is valid
//! anywhere was written, so the chain found in this way is one that a crash of a single device
//! could have left.
//!
//! Reading needs no locks. One checkpoint is in memory at a time; the caller's pass reads them
//! again.
//!
//! What it costs: with a ring of R bytes and N bytes of data to verify, at most four passes over
//! the ring in reads of 1 MiB (walk and search, which is one pass together, verification, and two
//! by the caller), and N bytes in reads that follow the places on the device (`verify`). The number
//! of checkpoints and extents adds no reads.
pub(crate) mod ring_reader;
pub(crate) mod verify;

pub use ring_reader::ReplayedCheckpoint;

use crate::error::ReplayError;
use cairn_blockdev::BlockDevice;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, Checkpoint, CheckpointEntry, CheckpointHeader, EntryFlags,
    Extent, ExtentKind, FormatError, Generation, ItemKind, LogPosition, Structure, Superblock,
};
use ring_reader::{RingReader, WINDOW_BLOCKS};
use verify::{BATCH_BLOCKS, NewData, verify};

/// What a replay does, in this order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplayPhase {
    /// Following the chain of checkpoints; counted in blocks of the ring.
    Walk,
    /// Looking behind the chain's end for a proof that something was lost; counted in blocks of the
    /// ring.
    Search,
    /// Reading the data that no flush is known to have covered; counted in checkpoints.
    Verify,
}

/// Called with how far a replay has got: phase, what is done and of how much.
pub type ReplayObserver<'a> = dyn FnMut(ReplayPhase, u64, u64) + 'a;

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
    /// A checkpoint proves that what is missing at the end, or a superblock, had been flushed: what
    /// was acknowledged is lost. Says so in words.
    pub lost: Option<String>,
}

/// Finds the checkpoints that follow `superblock` in the log of the volume on `device`. Writes
/// nothing, unless the device has copies: those of what counts are made good where they are not.
///
/// # Errors
/// The device fails, or a checkpoint of the chain holds an impossible extent.
pub fn replay<'d>(
    device: &'d dyn BlockDevice,
    superblock: &Superblock,
    observe: &mut ReplayObserver<'_>,
) -> Result<Replay<'d>, ReplayError> {
    let mut replay = Replay {
        ring: RingReader::new(device, superblock),
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
    replay.walk(superblock.log_epoch, observe)?;
    if !superblock.clean && replay.lost.is_none() {
        replay.search_behind_end(superblock.log_epoch, observe)?;
    }
    replay.verify_data(observe)?;
    for checkpoint in &replay.chain {
        replay.last_generation = replay.last_generation.max(checkpoint.header.generation);
        replay.next_inode = replay.next_inode.max(checkpoint.header.next_inode);
    }
    Ok(replay)
}

impl<'d> Replay<'d> {
    /// Step 1. Looks at the extents, too, so that an impossible one is found before anything is
    /// changed.
    fn walk(&mut self, epoch: u64, observe: &mut ReplayObserver<'_>) -> Result<(), ReplayError> {
        let log_blocks = self.ring.geometry.log_blocks;
        let (mut walked, mut generation) = (0, Generation(0));
        loop {
            observe(ReplayPhase::Walk, walked, log_blocks);
            let (found, checkpoint) =
                match self.ring.next(self.end, log_blocks - walked, epoch, generation)? {
                    Ok(next) => next,
                    Err(stopped) => {
                        self.stopped = stopped;
                        return Ok(());
                    }
                };
            if self.relies_on_lost(&found.header) {
                self.stopped = "a superblock is missing".into();
                return Ok(());
            }
            if self.applies(&found) {
                for entry in checkpoint.entries() {
                    self.extent_of(&found, &entry)?;
                }
            }
            walked += found.blocks;
            generation = found.header.generation;
            self.end = LogPosition {
                block: (found.ring_block + found.blocks) % log_blocks,
                sequence: found.header.sequence + 1,
            };
            self.chain.push(found);
        }
    }

    /// Whether the superblock found is older than one that was durable when this checkpoint was
    /// written. Remembers it.
    fn relies_on_lost(&mut self, header: &CheckpointHeader) -> bool {
        let is_lost = header.superblock > self.superblock_generation;
        if is_lost {
            self.lost = Some(format!(
                "the superblock of generation {} was flushed, as checkpoint {} says, but is lost: the newest one is of generation {}",
                header.superblock, header.sequence, self.superblock_generation
            ));
        }
        is_lost
    }

    /// Looks for a valid checkpoint behind the chain's end which says that the missing one, or a
    /// newer superblock, had been flushed. A crash leaves none, since it was not.
    fn search_behind_end(
        &mut self,
        epoch: u64,
        observe: &mut ReplayObserver<'_>,
    ) -> Result<(), ReplayError> {
        let log_blocks = self.ring.geometry.log_blocks;
        let mut left =
            log_blocks - self.chain.iter().map(|checkpoint| checkpoint.blocks).sum::<u64>();
        let mut block = self.end.block;
        while left > 0 {
            observe(ReplayPhase::Search, log_blocks - left, log_blocks);
            let blocks = left.min(WINDOW_BLOCKS).min(log_blocks - block);
            let bytes = self.ring.read_blocks(block, blocks)?;
            for (bytes, index) in bytes.chunks_exact(BLOCK_SIZE).zip(0..) {
                let announced = self.ring.announced(bytes, block + index, epoch, self.end.sequence);
                let Some(announced) = announced.filter(|&announced| announced <= left - index)
                else {
                    continue;
                };
                let Ok(checkpoint) = self.ring.read_checkpoint(block + index, announced)? else {
                    continue;
                };
                if self.relies_on_lost(&checkpoint.header) {
                    return Ok(());
                }
                if checkpoint.header.sequence > self.end.sequence
                    && (self.end.sequence..checkpoint.header.sequence)
                        .contains(&checkpoint.header.flushed_sequence)
                {
                    let (missing, proof) = (self.end.sequence, checkpoint.header.sequence);
                    self.lost = Some(format!(
                        "checkpoint {missing} was flushed, as checkpoint {proof} says, but is lost: {}",
                        self.stopped
                    ));
                    return Ok(());
                }
            }
            left -= blocks;
            block = (block + blocks) % log_blocks;
        }
        Ok(())
    }

    /// Step 2.
    fn verify_data(&mut self, observe: &mut ReplayObserver<'_>) -> Result<(), ReplayError> {
        let headers = self.chain.iter().map(|checkpoint| checkpoint.header);
        // What a checkpoint says of itself or of later ones is no proof.
        let proofs = headers.filter(|header| header.flushed_sequence < header.sequence);
        let flushed = proofs.map(|header| header.flushed_sequence).max().unwrap_or(0);
        let mut batch = Vec::new();
        let mut gathered_blocks = 0;
        for index in 0..self.chain.len() {
            observe(ReplayPhase::Verify, index as u64, self.chain.len() as u64);
            let found = self.chain[index];
            if found.header.sequence > flushed && self.applies(&found) {
                gathered_blocks += self.gather_new_data(index, &mut batch)?;
            }
            if (gathered_blocks >= BATCH_BLOCKS || index + 1 == self.chain.len())
                && self.end_at_missing(std::mem::take(&mut batch))?
            {
                return Ok(());
            }
            if batch.is_empty() {
                gathered_blocks = 0;
            }
        }
        Ok(())
    }

    /// Verifies a batch; whether the chain ends in it.
    fn end_at_missing(&mut self, batch: Vec<NewData>) -> Result<bool, ReplayError> {
        let Some(missing) = verify(self.ring.device, batch)? else { return Ok(false) };
        let (found, problem) = (self.chain[missing.checkpoint], missing.cause?);
        self.stopped =
            format!("data of the checkpoint at ring block {}: {problem}", found.ring_block);
        self.end = LogPosition { block: found.ring_block, sequence: found.header.sequence };
        self.chain.truncate(missing.checkpoint);
        Ok(true)
    }

    /// Adds what has to be verified for a checkpoint; returns how many blocks that is.
    fn gather_new_data(&self, index: usize, batch: &mut Vec<NewData>) -> Result<u64, ReplayError> {
        let found = &self.chain[index];
        let checkpoint = self.read_again(found)?;
        let mut blocks = 0;
        for entry in checkpoint.entries().filter(|entry| entry.flags.contains(EntryFlags::NEW_DATA))
        {
            if let Some(extent) =
                self.extent_of(found, &entry)?.filter(|extent| extent.kind == ExtentKind::Data)
            {
                blocks += extent.blocks;
                batch.push(NewData { checkpoint: index, key: entry.key, extent });
            }
        }
        Ok(blocks)
    }

    /// The extent that an entry puts in place, if it does.
    fn extent_of(
        &self,
        found: &ReplayedCheckpoint,
        entry: &CheckpointEntry<'_>,
    ) -> Result<Option<Extent>, ReplayError> {
        if entry.flags.contains(EntryFlags::DELETE) || entry.key.kind != ItemKind::Extent as u8 {
            return Ok(None);
        }
        let block = BlockNumber(found.ring_block);
        let damaged = |problem: String| FormatError::new(Structure::Checkpoint, block, problem);
        let extent = Extent::decode(entry.value)
            .map_err(|error| damaged(format!("item {:?}: {}", entry.key, error.problem)))?;
        if !self.ring.geometry.contains(extent.range()) {
            let BlockRange { start, blocks } = extent.range();
            return Err(damaged(format!(
                "item {:?}: {blocks} blocks at {start} are outside the volume's data",
                entry.key
            ))
            .into());
        }
        Ok(Some(extent))
    }

    fn applies(&self, checkpoint: &ReplayedCheckpoint) -> bool {
        checkpoint.header.generation > self.superblock_generation
    }

    /// Reads a checkpoint of the chain once more. Copies may differ: another one may hold a valid
    /// checkpoint of an earlier round through the ring there.
    fn read_again(&self, found: &ReplayedCheckpoint) -> Result<Checkpoint, ReplayError> {
        let another = || {
            let block = BlockNumber(found.ring_block);
            FormatError::new(Structure::Checkpoint, block, "it is not the one that was found")
        };
        let read = self.ring.in_any_copy(|reader| {
            let read = reader.read_checkpoint(found.ring_block, found.blocks)?;
            Ok(read.and_then(|checkpoint| {
                if checkpoint.header == found.header { Ok(checkpoint) } else { Err(another()) }
            }))
        })?;
        Ok(read.map(|(checkpoint, _)| checkpoint)?)
    }

    /// The checkpoints to apply, in order; each is read when its turn comes. After an error,
    /// nothing more may be applied.
    pub fn checkpoints(&self) -> impl Iterator<Item = Result<Checkpoint, ReplayError>> + '_ {
        self.to_apply().map(|found| self.read_again(found))
    }

    /// What is known of the checkpoints to apply, in order.
    pub fn to_apply(&self) -> impl Iterator<Item = &ReplayedCheckpoint> {
        self.chain.iter().filter(|found| self.applies(found))
    }
}
