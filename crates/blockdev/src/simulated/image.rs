//! The content of a device as a sparse table of shared blocks. A copy costs one pointer per MiB; a
//! change copies one block and one part of the table.

use super::digest;
use crate::device::BLOCK_BYTES;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

pub(super) type Bytes = [u8; BLOCK_BYTES];

/// A stored block, and the digest of its bytes once it was asked for: states of a walk share most
/// of their blocks.
#[derive(Clone)]
pub(super) struct Block {
    bytes: Bytes,
    digest: OnceLock<u64>,
}

impl Block {
    pub(super) fn new(bytes: Bytes) -> Block {
        Block { bytes, digest: OnceLock::new() }
    }

    pub(super) fn digest(&self) -> u64 {
        *self.digest.get_or_init(|| digest::of_bytes(&self.bytes))
    }

    fn change(&mut self, change: impl FnOnce(&mut Bytes)) {
        self.digest.take();
        change(&mut self.bytes);
    }
}

impl Deref for Block {
    type Target = Bytes;

    fn deref(&self) -> &Bytes {
        &self.bytes
    }
}

const CHUNK_BLOCKS: usize = 256;

/// A block that was never written is `None` and reads as zeros.
#[derive(Clone)]
struct Chunk {
    blocks: [Option<Arc<Block>>; CHUNK_BLOCKS],
}

#[derive(Clone)]
pub(super) struct SparseImage {
    chunks: Vec<Option<Arc<Chunk>>>,
    length_bytes: u64,
}

impl SparseImage {
    pub(super) fn new(length_bytes: u64) -> SparseImage {
        let chunks = length_bytes.div_ceil((CHUNK_BLOCKS * BLOCK_BYTES) as u64) as usize;
        SparseImage { chunks: vec![None; chunks], length_bytes }
    }

    pub(super) fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    pub(super) fn block(&self, index: u64) -> Option<&Arc<Block>> {
        let index = index as usize;
        self.chunks[index / CHUNK_BLOCKS].as_ref()?.blocks[index % CHUNK_BLOCKS].as_ref()
    }

    pub(super) fn set_block(&mut self, index: u64, block: Option<Arc<Block>>) {
        let index = index as usize;
        let chunk = &mut self.chunks[index / CHUNK_BLOCKS];
        if chunk.is_none() && block.is_none() {
            return;
        }
        let chunk =
            chunk.get_or_insert_with(|| Arc::new(Chunk { blocks: [const { None }; CHUNK_BLOCKS] }));
        Arc::make_mut(chunk).blocks[index % CHUNK_BLOCKS] = block;
    }

    /// Changes a block in place, after copying it if it is shared.
    pub(super) fn change_block(&mut self, index: u64, change: impl FnOnce(&mut Bytes)) {
        let mut block = self.block(index).cloned().unwrap_or_else(zeros);
        Arc::make_mut(&mut block).change(change);
        self.set_block(index, Some(block));
    }

    pub(super) fn read(&self, offset_bytes: u64, buffer: &mut [u8]) {
        let first = offset_bytes / BLOCK_BYTES as u64;
        for (index, part) in (first..).zip(buffer.chunks_exact_mut(BLOCK_BYTES)) {
            match self.block(index) {
                Some(block) => part.copy_from_slice(&block[..]),
                None => part.fill(0),
            }
        }
    }

    /// The blocks that this image does not share with `base`, by ascending index. Some of them may
    /// hold equal bytes.
    pub(super) fn changed_since<'a>(
        &'a self,
        base: &'a SparseImage,
    ) -> impl Iterator<Item = (u64, Option<&'a Arc<Block>>)> {
        let same_chunk =
            |(ours, theirs): (&Option<Arc<Chunk>>, &Option<Arc<Chunk>>)| match (ours, theirs) {
                (Some(ours), Some(theirs)) => Arc::ptr_eq(ours, theirs),
                (None, None) => true,
                _ => false,
            };
        let chunks = (0..self.chunks.len())
            .filter(move |&index| !same_chunk((&self.chunks[index], &base.chunks[index])));
        chunks
            .flat_map(move |chunk| {
                (0..CHUNK_BLOCKS as u64).map(move |block| (chunk * CHUNK_BLOCKS) as u64 + block)
            })
            .filter_map(move |index| {
                let (ours, theirs) = (self.block(index), base.block(index));
                let same = match (ours, theirs) {
                    (Some(ours), Some(theirs)) => Arc::ptr_eq(ours, theirs),
                    (None, None) => true,
                    _ => false,
                };
                (!same).then_some((index, ours))
            })
    }

    /// Every block that was written, by ascending index.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (u64, &Arc<Block>)> {
        self.chunks
            .iter()
            .enumerate()
            .filter_map(|(index, chunk)| Some((index, chunk.as_ref()?)))
            .flat_map(|(index, chunk)| {
                let first = (index * CHUNK_BLOCKS) as u64;
                (first..)
                    .zip(&chunk.blocks)
                    .filter_map(|(index, block)| Some((index, block.as_ref()?)))
            })
    }
}

pub(super) fn zeros() -> Arc<Block> {
    Arc::new(Block::new([0; BLOCK_BYTES]))
}
