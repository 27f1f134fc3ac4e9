//! Runs of dirty pages that get consecutive device blocks, and how their data is cut to these.
use super::pages::Segment;
use cairn_blockdev::{SetWrite, SharedBlocks};
use cairn_format::{BLOCK_SIZE, BlockNumber, BlockRange, Extent, FileBlock, Generation, checksum};
use cairn_log::{DataTicket, DataWrite};
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Longest write: a group that comes meanwhile waits for it in the device's queue, and its flush
/// for what it left there.
const WRITE_BYTES_MAX: usize = 1 << 20;

/// A run of file blocks and the device blocks that they get.
pub(super) struct Piece {
    pub(super) file_block: FileBlock,
    pub(super) range: BlockRange,
    /// The blocks belong to the file already, as unwritten ones.
    pub(super) in_place: bool,
    pub(super) checksums: Vec<u32>,
}

impl Piece {
    /// Its file blocks.
    pub(super) fn file_blocks(&self) -> Range<FileBlock> {
        self.file_block..self.file_block + self.range.blocks
    }
}

/// Blocks of the device and what they are to hold.
pub(super) type Part = (BlockRange, SharedBlocks);

/// Takes the blocks of `pieces` from the beginning of `segments`, and their checksums.
pub(super) fn parts_of(segments: &[Segment], pieces: &mut [Piece]) -> Vec<Part> {
    let mut parts = Vec::with_capacity(pieces.len().max(segments.len()));
    let mut segments = segments.iter();
    let mut rest: Option<SharedBlocks> = None;
    for piece in pieces {
        let mut range = piece.range;
        while range.blocks > 0 {
            let data = rest
                .take()
                .or_else(|| segments.next().map(|segment| segment.data.clone()))
                .expect("pieces are made of segments");
            let count = data.blocks().min(range.blocks as usize);
            let part = data.slice(0..count);
            rest = (count < data.blocks()).then(|| data.slice(count..data.blocks()));
            piece.checksums.extend(part.chunks_exact(BLOCK_SIZE).map(checksum));
            parts.push((BlockRange::new(range.start, count as u64), part));
            range = BlockRange::new(
                BlockNumber(range.start.0 + count as u64),
                range.blocks - count as u64,
            );
        }
    }
    parts
}

/// Takes `blocks` blocks off the beginning.
pub(super) fn drop_front(segments: &mut Vec<Segment>, mut blocks: u64) {
    let mut gone = 0;
    for segment in segments.iter_mut() {
        let length = segment.end() - segment.block;
        if length > blocks {
            segment.data = segment.data.slice(blocks as usize..segment.data.blocks());
            segment.block += blocks;
            break;
        }
        blocks -= length;
        gone += 1;
    }
    segments.drain(..gone);
}

/// Neighbours on the device go in one write, as far as that is not too long.
pub(super) fn writes_of<D: Deref<Target = [u8]>>(parts: &[(BlockRange, D)]) -> Vec<SetWrite<'_>> {
    let mut writes = Vec::new();
    for run in parts.chunk_by(|(before, _), (after, _)| before.end() == after.start) {
        let mut rest = run;
        while let Some((first, _)) = rest.first() {
            let mut bytes = 0;
            let fits = |(_, data): &&(BlockRange, D)| {
                bytes += data.len();
                bytes <= WRITE_BYTES_MAX
            };
            let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            let buffers = now.iter().map(|(_, data)| &data[..]).collect();
            writes.push(SetWrite { offset_bytes: first.start.offset_bytes(), buffers });
            rest = later;
        }
    }
    writes
}

/// What the log is to write, with the ticket that has the outcome.
pub(super) fn data_writes(
    parts: Vec<Part>,
    generation: Generation,
) -> (Arc<DataTicket>, Vec<DataWrite>) {
    let ticket = DataTicket::new(parts.len());
    let write = |(range, data)| DataWrite { range, data, generation, ticket: Arc::clone(&ticket) };
    let writes = parts.into_iter().map(write).collect();
    (ticket, writes)
}

/// The items of `existing` that share file blocks with `piece`.
pub(super) fn overlapping<'a>(
    existing: &'a [(FileBlock, Extent)],
    piece: &Piece,
) -> impl Iterator<Item = &'a (FileBlock, Extent)> {
    let blocks = piece.file_blocks();
    existing
        .iter()
        .filter(move |(start, extent)| *start < blocks.end && *start + extent.blocks > blocks.start)
}
