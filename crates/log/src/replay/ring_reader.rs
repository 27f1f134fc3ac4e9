//! Reading checkpoints from the ring during recovery.
//!
//! The ring is read in order, so the reader keeps a window of it: however many small checkpoints
//! the ring holds, a pass over it costs one read of the device per [`WINDOW_BLOCKS`]. A window that
//! can't be read is no error by itself: it may reach past the blocks that were asked for, and these
//! are then read alone.
use crate::error::ReplayError;
use cairn_blockdev::{AlignedBuffer, BlockDevice};
use cairn_format::{
    BLOCK_SIZE, Checkpoint, CheckpointHeader, FormatError, Generation, Geometry, HEADER_BYTES,
    LogPosition, Superblock, VolumeId,
};
use std::cell::RefCell;
use std::rc::Rc;

/// Blocks of the ring read at once: 1 MiB.
pub(crate) const WINDOW_BLOCKS: u64 = 256;

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

/// A step along the chain: the next checkpoint, or why there is none.
pub(crate) type ChainStep<T> = Result<Result<T, String>, ReplayError>;

/// A part of the ring in memory.
#[derive(Default)]
struct Window {
    ring_block: u64,
    bytes: AlignedBuffer,
}

impl Window {
    /// The blocks, if all of them are in the window.
    fn get(&self, ring_block: u64, length_bytes: usize) -> Option<&[u8]> {
        let start = usize::try_from(ring_block.checked_sub(self.ring_block)?)
            .ok()?
            .checked_mul(BLOCK_SIZE)?;
        self.bytes.get(start..start.checked_add(length_bytes)?)
    }
}

/// Reads checkpoints from the ring of one volume.
#[derive(Clone)]
pub(crate) struct RingReader<'d> {
    pub(crate) device: &'d dyn BlockDevice,
    /// Which copy to read; none: as the device chooses.
    pub(crate) copy: Option<usize>,
    volume: VolumeId,
    pub(crate) geometry: Geometry,
    /// What was read as the device chooses.
    window: Rc<RefCell<Window>>,
}

impl<'d> RingReader<'d> {
    pub(crate) fn new(device: &'d dyn BlockDevice, superblock: &Superblock) -> Self {
        Self {
            device,
            copy: None,
            volume: superblock.volume,
            geometry: superblock.geometry,
            window: Rc::default(),
        }
    }

    /// Reads `blocks` blocks of the ring, around its end if need be.
    pub(crate) fn read_blocks(&self, ring_block: u64, blocks: u64) -> Result<Vec<u8>, ReplayError> {
        let mut bytes = vec![0; blocks as usize * BLOCK_SIZE];
        let before_end = blocks.min(self.geometry.log_blocks - ring_block);
        let (here, wrapped) = bytes.split_at_mut(before_end as usize * BLOCK_SIZE);
        self.read(ring_block, here)?;
        if !wrapped.is_empty() {
            self.read(0, wrapped)?;
        }
        Ok(bytes)
    }

    /// Reads blocks that don't reach around the ring's end.
    fn read(&self, ring_block: u64, buffer: &mut [u8]) -> Result<(), ReplayError> {
        let ring = self.geometry.log();
        let offset_of = |block: u64| ring.start.offset_bytes() + block * BLOCK_SIZE as u64;
        if let Some(copy) = self.copy {
            return Ok(self.device.read_copy(copy, offset_of(ring_block), buffer)?);
        }
        let mut window = self.window.borrow_mut();
        let window_bytes = WINDOW_BLOCKS.min(ring.blocks - ring_block) as usize * BLOCK_SIZE;
        if window.get(ring_block, buffer.len()).is_none() && buffer.len() <= window_bytes {
            let mut bytes = std::mem::take(&mut *window).bytes;
            if bytes.len() != window_bytes {
                bytes = AlignedBuffer::zeroed(window_bytes);
            }
            *window = match self.device.read(offset_of(ring_block), &mut bytes) {
                Ok(()) => Window { ring_block, bytes },
                Err(_) => Window::default(),
            };
        }
        match window.get(ring_block, buffer.len()) {
            Some(bytes) => buffer.copy_from_slice(bytes),
            None => self.device.read(offset_of(ring_block), buffer)?,
        }
        Ok(())
    }

    /// What `attempt` finds, in another copy of the ring if it finds nothing in the first. What is
    /// valid anywhere was written; which reader found it is returned too.
    pub(crate) fn in_any_copy<T, E>(
        &self,
        attempt: impl Fn(&Self) -> Result<Result<T, E>, ReplayError>,
    ) -> Result<Result<(T, Self), E>, ReplayError> {
        let first = attempt(self);
        let copies = self.device.copies();
        if !matches!(first, Ok(Ok(_))) && copies > 1 {
            for other in (0..copies).map(|copy| Self { copy: Some(copy), ..self.clone() }) {
                if let Ok(Ok(found)) = attempt(&other) {
                    return Ok(Ok((found, other)));
                }
            }
        }
        Ok(first?.map(|found| (found, self.clone())))
    }

    /// Makes all copies of some blocks what this reader's copy holds.
    pub(crate) fn repair_from_here(&self, ring_block: u64, blocks: u64) -> Result<(), ReplayError> {
        let ring = self.geometry.log();
        let bytes = self.read_blocks(ring_block, blocks)?;
        let before_end = blocks.min(ring.blocks - ring_block);
        let (here, wrapped) = bytes.split_at(before_end as usize * BLOCK_SIZE);
        *self.window.borrow_mut() = Window::default();
        self.device.repair(ring.start.offset_bytes() + ring_block * BLOCK_SIZE as u64, here)?;
        if !wrapped.is_empty() {
            self.device.repair(ring.start.offset_bytes(), wrapped)?;
        }
        Ok(())
    }

    pub(crate) fn read_checkpoint(
        &self,
        ring_block: u64,
        blocks: u64,
    ) -> Result<Result<Checkpoint, FormatError>, ReplayError> {
        let bytes = self.read_blocks(ring_block, blocks)?;
        Ok(Checkpoint::decode(bytes, self.volume, ring_block))
    }

    /// Blocks of the checkpoint of this mount, above `sequence`, that `block` may begin; a look at
    /// the few fields that rule out most others, also those of earlier rounds through the ring.
    pub(crate) fn announced(
        &self,
        block: &[u8],
        ring_block: u64,
        epoch: u64,
        sequence: u64,
    ) -> Option<u64> {
        let (sequence_at, epoch_at) = (HEADER_BYTES, HEADER_BYTES + 8);
        let found = block[sequence_at..epoch_at].try_into().map_or(0, u64::from_le_bytes);
        let ours = found > sequence
            && block[16..32] == self.volume.0
            && block[32..40] == ring_block.to_le_bytes()
            && block[epoch_at..epoch_at + 8] == epoch.to_le_bytes();
        Checkpoint::blocks_announced(block).filter(|_| ours)
    }

    /// The checkpoint at `at`, of at most `blocks_max` blocks, if it continues the chain.
    pub(crate) fn next(
        &self,
        at: LogPosition,
        blocks_max: u64,
        epoch: u64,
        generation_min: Generation,
    ) -> ChainStep<(ReplayedCheckpoint, Checkpoint)> {
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
    ) -> ChainStep<(ReplayedCheckpoint, Checkpoint)> {
        let place = format!("ring block {}", at.block);
        if blocks_max == 0 {
            return Ok(Err("the chain fills the ring".to_owned()));
        }
        let Some(blocks) = Checkpoint::blocks_announced(&self.read_blocks(at.block, 1)?) else {
            return Ok(Err(format!("{place} does not start a checkpoint")));
        };
        if blocks > blocks_max {
            return Ok(Err(format!(
                "{place} announces {blocks} blocks, more than the {blocks_max} that are left of the ring"
            )));
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
            return Ok(Ok((
                ReplayedCheckpoint { ring_block: at.block, blocks, header },
                checkpoint,
            )));
        };
        Ok(Err(format!("the checkpoint at {place} {stop}")))
    }
}
