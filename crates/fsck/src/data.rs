//! Pass `Data`: reads all data in device order, and compares it with the checksums in the extents.
//!
//! Extents come in file order. The pass collects as many as fit into a fixed amount of memory,
//! sorts them by block, and reads neighbours together. What only snapshots have comes last. Blocks
//! that several of them have, or forks and their origins, are read once.
use crate::FsckError;
use crate::block_set::BlockSet;
use crate::checker::Checker;
use crate::forks::Lineage;
use crate::item_stream::{Item, Visitor, visit};
use crate::object::ObjectId;
use crate::reader::{NODES_PER_READ, read_data};
use crate::report::{Finding, PassId, Severity, Structure};
use crate::snapshots;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, Extent, ExtentKind, Generation, InodeNumber, ItemKind,
    Key, TREE_FILES, TreeId, checksum,
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
    /// The snapshot, if the object is in one.
    snapshot: Option<Generation>,
}

struct DataPass<'c, 'a> {
    checker: &'c mut Checker<'a>,
    /// The tree that is being visited.
    tree: TreeId,
    lineage: Lineage,
    pieces: Vec<ExtentToVerify>,
    checksums: Vec<u32>,
    /// Blocks verified so far, if snapshots may have the same ones.
    verified: Option<BlockSet>,
}

/// Runs the pass.
pub(crate) fn check(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    let trees = checker.take_trees();
    let reader = checker.reader;
    let has_snapshots = checker.superblock.features.has_snapshots();
    let verified = has_snapshots.then(|| BlockSet::new(reader.blocks_present()));
    let (pieces, checksums, lineage) = (Vec::new(), Vec::new(), Lineage::default());
    let mut pass = DataPass { checker, tree: TREE_FILES, lineage, pieces, checksums, verified };
    let visited = trees.values().try_for_each(|tree| {
        (pass.tree, pass.lineage) = (tree.id, tree.lineage);
        visit(&reader, tree, &mut pass)
    });
    let visited = visited.and_then(|()| pass.visit_snapshots());
    pass.verify_batch();
    checker.trees = trees;
    visited
}

impl Visitor for DataPass<'_, '_> {
    fn item(&mut self, item: Item<'_>) -> Result<(), FsckError> {
        if item.key.kind != ItemKind::Extent as u8 {
            return Ok(());
        }
        if let Some(extent) = self.readable(item.value) {
            if self.lineage.is_of_origin(extent.generation) {
                self.add_rest(item.key, &extent, None);
                return Ok(());
            }
            if let Some(verified) = &mut self.verified {
                verified.insert(extent.range());
            }
            self.add(item.key, &extent, None);
        }
        Ok(())
    }

    fn leaves_done(&mut self, _done: u64) {}
}

impl DataPass<'_, '_> {
    /// The extent, if it has data that can be read. An earlier pass has reported extents that can't
    /// be decoded or lie outside.
    fn readable(&self, value: &[u8]) -> Option<Extent> {
        let extent = Extent::decode(value).ok()?;
        let has_data = extent.kind == ExtentKind::Data;
        (has_data && self.checker.reader.contains(extent.range())).then_some(extent)
    }

    fn add(&mut self, key: Key, extent: &Extent, snapshot: Option<Generation>) {
        self.pieces.push(ExtentToVerify {
            start: extent.start.0,
            blocks: extent.blocks,
            object: ObjectId { subvolume: self.tree, inode: InodeNumber(key.inode) },
            file_block: key.offset,
            checksums_at: self.checksums.len(),
            snapshot,
        });
        self.checksums.extend_from_slice(&extent.checksums);
        if self.checksums.len() >= CHECKSUMS_MAX {
            self.verify_batch();
        }
    }

    /// Adds the extents of snapshots, as far as their blocks have not been verified.
    fn visit_snapshots(&mut self) -> Result<(), FsckError> {
        let leaves = std::mem::take(&mut self.checker.snapshots.leaves);
        for chunk in leaves.chunks(NODES_PER_READ) {
            let blocks: Vec<BlockNumber> = chunk.iter().map(|leaf| leaf.block).collect();
            for (leaf, node) in chunk.iter().zip(self.checker.reader.nodes(&blocks)) {
                let node = node.map_err(|_| FsckError::Changed { block: leaf.block.0 })?;
                self.tree = leaf.subvolume;
                let extents = node.items().filter(|(key, _)| key.kind == ItemKind::Extent as u8);
                for (key, value) in extents {
                    if let Some(extent) = self.readable(value) {
                        self.add_rest(key, &extent, Some(leaf.generation));
                    }
                }
            }
        }
        self.checker.snapshots.leaves = leaves;
        Ok(())
    }

    /// Adds those parts of an extent that have not been verified.
    fn add_rest(&mut self, key: Key, extent: &Extent, snapshot: Option<Generation>) {
        let Some(verified) = &mut self.verified else { return };
        let is_new: Vec<bool> =
            extent.range().range().map(|block| !verified.contains(block)).collect();
        verified.insert(extent.range());
        let mut at = 0;
        for run in is_new.chunk_by(|one, other| one == other) {
            let blocks = run.len() as u64;
            if run[0] {
                let part = extent.slice(at, blocks);
                let key = Key { offset: key.offset + at, ..key };
                self.add(key, &part, snapshot);
            }
            at += blocks;
        }
    }

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
        let new = |problem| {
            let finding = Finding::new(PassId::Data, Severity::Error, Structure::Data, problem);
            finding.at(piece.start + index)
        };
        let Some(generation) = piece.snapshot else {
            self.checker.found(new(problem).of(piece.object));
            return;
        };
        let ObjectId { subvolume, inode } = piece.object;
        let of = self.checker.snapshots.of.get(&subvolume);
        let snapshot = of.and_then(|of| of.snapshots.get(&generation));
        let shown = snapshot.map_or_else(String::new, |item| snapshots::shown(item, generation));
        let finding = new(format!("{shown}, inode {inode}, {problem}"));
        self.checker.found(finding.in_subvolume(subvolume));
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
