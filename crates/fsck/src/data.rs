//! Pass `Data`: reads all data in device order, and compares it with the checksums in the extents.
//!
//! Extents come in file order. The pass collects as many as fit into a fixed amount of memory,
//! sorts them by block, and reads neighbours together.
use crate::FsckError;
use crate::checker::Checker;
use crate::item_stream::{Item, Visitor, visit};
use crate::object::ObjectId;
use crate::reader::read_data;
use crate::report::{Finding, PassId, Severity, Structure};
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, Extent, ExtentKind, InodeNumber, ItemKind, TREE_FILES,
    TreeId, checksum,
};

/// Checksums held at once: those of 16 GiB of data, 16 MiB of memory.
const CHECKSUMS_MAX: usize = 4 << 20;
/// Longest read: 4 MiB.
const READ_BLOCKS_MAX: u64 = 1024;

/// An extent to verify. Its checksums are in the batch.
struct ExtentToVerify {
    start: u64,
    blocks: u64,
    object: ObjectId,
    file_block: u64,
    checksums_at: usize,
}

struct DataPass<'c, 'a> {
    checker: &'c mut Checker<'a>,
    /// The tree that is being visited.
    tree: TreeId,
    pieces: Vec<ExtentToVerify>,
    checksums: Vec<u32>,
}

/// Runs the pass.
pub(crate) fn check(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    let trees = checker.take_trees();
    let reader = checker.reader;
    let mut pass =
        DataPass { checker, tree: TREE_FILES, pieces: Vec::new(), checksums: Vec::new() };
    let visited = trees.values().try_for_each(|tree| {
        pass.tree = tree.id;
        visit(&reader, tree, &mut pass)
    });
    pass.verify_batch();
    checker.trees = trees;
    visited
}

impl Visitor for DataPass<'_, '_> {
    fn item(&mut self, item: Item<'_>) -> Result<(), FsckError> {
        if item.key.kind != ItemKind::Extent as u8 {
            return Ok(());
        }
        // An earlier pass has reported extents that can't be decoded or lie outside.
        let Ok(extent) = Extent::decode(item.value) else { return Ok(()) };
        if extent.kind != ExtentKind::Data || !self.checker.reader.contains(extent.range()) {
            return Ok(());
        }
        self.pieces.push(ExtentToVerify {
            start: extent.start.0,
            blocks: extent.blocks,
            object: ObjectId { subvolume: self.tree, inode: InodeNumber(item.key.inode) },
            file_block: item.key.offset,
            checksums_at: self.checksums.len(),
        });
        self.checksums.extend_from_slice(&extent.checksums);
        if self.checksums.len() >= CHECKSUMS_MAX {
            self.verify_batch();
        }
        Ok(())
    }

    fn leaves_done(&mut self, _done: u64) {}
}

impl DataPass<'_, '_> {
    fn verify_batch(&mut self) {
        let mut pieces = std::mem::take(&mut self.pieces);
        pieces.sort_unstable_by_key(|piece| piece.start);
        let mut rest = &pieces[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at(neighbours(rest));
            self.verify_neighbours(now);
            rest = later;
        }
        self.checksums.clear();
    }

    fn verify_neighbours(&mut self, pieces: &[ExtentToVerify]) {
        let start = pieces[0].start;
        let blocks = pieces.iter().map(|piece| piece.blocks).sum();
        let checksums: Vec<u32> = pieces
            .iter()
            .flat_map(|piece| &self.checksums[piece.checksums_at..][..piece.blocks as usize])
            .copied()
            .collect();
        match read_data(
            self.checker.reader.device,
            BlockRange::new(BlockNumber(start), blocks),
            &checksums,
        ) {
            Ok(data) => {
                for piece in pieces {
                    let at = (piece.start - start) as usize * BLOCK_SIZE;
                    self.verify(piece, &data[at..at + piece.blocks as usize * BLOCK_SIZE]);
                }
            }
            Err(error) if pieces.len() == 1 => {
                self.found(
                    &pieces[0],
                    0,
                    format!("{} blocks cannot be read: {error}", pieces[0].blocks),
                );
            }
            Err(_) => pieces.chunks(1).for_each(|piece| self.verify_neighbours(piece)),
        }
        let statistics = &self.checker.report.statistics;
        let (done, total) = (statistics.data_blocks_verified, statistics.data_blocks);
        self.checker.progress(PassId::Data, done, total);
    }

    fn verify(&mut self, piece: &ExtentToVerify, data: &[u8]) {
        let stored = &self.checksums[piece.checksums_at..][..piece.blocks as usize];
        let wrong: Vec<u64> = (0..)
            .zip(data.chunks_exact(BLOCK_SIZE).map(checksum).zip(stored))
            .filter(|(_, (sum, stored))| sum != *stored)
            .map(|(index, _)| index)
            .collect();
        self.checker.report.statistics.data_blocks_verified += piece.blocks;
        if let Some(&first) = wrong.first() {
            let problem =
                format!("{} of {} blocks don't match their checksums", wrong.len(), piece.blocks);
            self.found(piece, first, problem);
        }
    }

    fn found(&mut self, piece: &ExtentToVerify, index: u64, problem: String) {
        let problem = format!("file block {}: {problem}", piece.file_block + index);
        let finding = Finding::new(PassId::Data, Severity::Error, Structure::Data, problem);
        self.checker.found(finding.at(piece.start + index).of(piece.object));
    }
}

/// The number of first pieces that follow each other on the device and fit into one read.
fn neighbours(pieces: &[ExtentToVerify]) -> usize {
    let start = pieces[0].start;
    let mut end = start;
    let mut count = 0;
    for piece in pieces {
        if piece.start != end || piece.start + piece.blocks - start > READ_BLOCKS_MAX {
            break;
        }
        end += piece.blocks;
        count += 1;
    }
    count.max(1)
}
