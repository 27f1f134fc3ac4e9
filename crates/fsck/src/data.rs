//! Pass `Data`: reads all data in device order, and compares it with the checksums in the extents.
//!
//! Extents come in file order. The pass collects as many as fit into a fixed amount of memory,
//! sorts them by block, and reads neighbours together. What only snapshots have comes last. Blocks
//! that several of them have, or forks and their origins, are read once.
//!
//! On a volume on which several may have a block, a first round only finds out which blocks are
//! bad. If there are any, a second one goes through all trees and snapshots, and reports each
//! extent with such a block. Memory: some words for each bad block.
use crate::FsckError;
use crate::block_set::BlockSet;
use crate::checker::Checker;
use crate::file_tree::FileTree;
use crate::forks::Lineage;
use crate::item_stream::{Item, Visitor, visit, visit_leaves};
use crate::object::ObjectId;
use crate::reader::{NODES_PER_READ, Reader, read_data};
use crate::report::{Finding, PassId, Severity, Structure};
use crate::snapshots;
use crate::trees::{ExpectedNode, children, contradiction};
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, Extent, ExtentKind, Generation, InodeNumber, ItemKind,
    Key, NODE_BLOCKS, Node, SnapshotItem, TREE_FILES, TreeId, checksum,
};
use std::collections::{BTreeSet, HashSet};

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
    /// The first and the last snapshot that have it, if it is in snapshots.
    snapshots: Option<(Generation, Generation)>,
}

/// What the pass does with bad blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Round {
    /// Notes which ones there are.
    Finding,
    /// Reports each file that has one.
    Reporting,
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
    round: Round,
    /// Those that the first round found.
    bad: BTreeSet<u64>,
    /// Nodes without bad blocks below them, so that each is read once.
    good: HashSet<u64>,
}

/// Runs the pass.
pub(crate) fn check(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    let trees = checker.take_trees();
    let reader = checker.reader;
    let has_snapshots = checker.superblock.features.has_snapshots();
    let verified = has_snapshots.then(|| BlockSet::new(reader.blocks_present()));
    let mut pass = DataPass {
        checker,
        tree: TREE_FILES,
        lineage: Lineage::default(),
        pieces: Vec::new(),
        checksums: Vec::new(),
        verified,
        round: if has_snapshots { Round::Finding } else { Round::Reporting },
        bad: BTreeSet::new(),
        good: HashSet::new(),
    };
    let visit_trees = |pass: &mut DataPass<'_, '_>| {
        trees.values().try_for_each(|tree| {
            (pass.tree, pass.lineage) = (tree.id, tree.lineage);
            match tree.lacks_leaves() && pass.is_second_round() {
                false => visit(&reader, tree, pass),
                true => {
                    let leaves = pass.leaves_with_bad(tree);
                    visit_leaves(&reader, &leaves, &tree.changes, pass)
                }
            }
        })
    };
    let mut visited = visit_trees(&mut pass).and_then(|()| pass.visit_snapshots());
    pass.verify_batch();
    if visited.is_ok() && !pass.bad.is_empty() {
        pass.round = Round::Reporting;
        visited = visit_trees(&mut pass);
        pass.add_bad_of_snapshots();
        pass.verify_batch();
    }
    checker.trees = trees;
    visited
}

impl Visitor for DataPass<'_, '_> {
    fn item(&mut self, item: Item<'_>) -> Result<(), FsckError> {
        if item.key.kind != ItemKind::Extent as u8 {
            return Ok(());
        }
        if let Some(extent) = self.readable(item.value) {
            if self.is_second_round() {
                if self.has_bad(&extent) {
                    self.add(item.key, &extent, None);
                }
                return Ok(());
            }
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

    fn is_second_round(&self) -> bool {
        self.round == Round::Reporting && !self.bad.is_empty()
    }

    fn has_bad(&self, extent: &Extent) -> bool {
        self.bad.range(extent.range().range()).next().is_some()
    }

    fn add(&mut self, key: Key, extent: &Extent, snapshots: Option<(Generation, Generation)>) {
        self.pieces.push(ExtentToVerify {
            start: extent.start.0,
            blocks: extent.blocks,
            object: ObjectId { subvolume: self.tree, inode: InodeNumber(key.inode) },
            file_block: key.offset,
            checksums_at: self.checksums.len(),
            snapshots,
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
                        self.add_rest(key, &extent, Some((leaf.generation, leaf.generation)));
                    }
                }
            }
        }
        self.checker.snapshots.leaves = leaves;
        Ok(())
    }

    /// Adds those parts of an extent that have not been verified.
    fn add_rest(&mut self, key: Key, extent: &Extent, snapshot: Option<(Generation, Generation)>) {
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

    /// The leaves with bad blocks of a tree that was not read as a whole.
    fn leaves_with_bad(&mut self, tree: &FileTree) -> Vec<BlockNumber> {
        let (mut leaves, reader) = (Vec::new(), self.checker.reader);
        let Some(root) = self.checker.snapshots.root_of(tree.id) else { return leaves };
        let root = ExpectedNode::root(tree.id, root, self.checker.superblock.generation);
        let mut good = std::mem::take(&mut self.good);
        let roots = [root.with(tree.lineage)];
        visit_new_leaves(&reader, &roots, Generation(0), &mut good, &mut |leaf| {
            let has_bad = self.leaf_has_bad(leaf);
            leaves.extend(has_bad.then_some(leaf.address()));
            has_bad
        });
        self.good = good;
        leaves
    }

    fn leaf_has_bad(&self, leaf: &Node) -> bool {
        let mut extents = leaf.items().filter(|(key, _)| key.kind == ItemKind::Extent as u8);
        extents.any(|(_, value)| self.readable(value).is_some_and(|extent| self.has_bad(&extent)))
    }

    /// Adds the extents of snapshots that have bad blocks. A node that is not younger than the
    /// snapshot before is in that one, too.
    fn add_bad_of_snapshots(&mut self) {
        let reader = self.checker.reader;
        let of_all = self.checker.snapshots.of.iter();
        let of_all: Vec<(TreeId, Vec<(Generation, ExpectedNode)>)> = of_all
            .map(|(&id, of)| {
                let lineage = self.checker.lineage_of(id);
                let root = |(&at, item): (&Generation, &SnapshotItem)| {
                    (at, ExpectedNode::root(id, item.root, at).with(lineage))
                };
                (id, of.snapshots.iter().map(root).collect())
            })
            .collect();
        for (id, roots) in &of_all {
            self.tree = *id;
            let (mut before, mut good) = (Generation(0), std::mem::take(&mut self.good));
            for (at, (generation, root)) in roots.iter().enumerate() {
                visit_new_leaves(&reader, &[*root], before, &mut good, &mut |leaf| {
                    let mut last = None;
                    for (key, value) in leaf.items() {
                        let is_extent = key.kind == ItemKind::Extent as u8;
                        let Some(extent) = self.readable(value).filter(|_| is_extent) else {
                            continue;
                        };
                        if self.has_bad(&extent) {
                            let has_leaf = |(_, root): &(_, ExpectedNode)| {
                                has_leaf(&reader, *root, key, leaf.address())
                            };
                            // Those that have it follow each other.
                            let later = || roots[at + 1..].partition_point(has_leaf);
                            let last = *last.get_or_insert_with(|| roots[at + later()].0);
                            self.add(key, &extent, Some((*generation, last)));
                        }
                    }
                    last.is_some()
                });
                before = *generation;
            }
            self.good = good;
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
                let problem = format!("{blocks} blocks cannot be read: {error}");
                self.found(&pieces[0], 0..blocks, problem);
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
        if !self.is_second_round() {
            self.checker.report.statistics.data_blocks_verified += piece.blocks;
        }
        if !wrong.is_empty() {
            let problem =
                format!("{} of {} blocks don't match their checksums", wrong.len(), piece.blocks);
            self.found(piece, wrong, problem);
        }
    }

    /// Some blocks of a piece are bad.
    fn found(
        &mut self,
        piece: &ExtentToVerify,
        indices: impl IntoIterator<Item = u64>,
        problem: String,
    ) {
        let mut indices = indices.into_iter();
        if self.round == Round::Finding {
            self.bad.extend(indices.map(|index| piece.start + index));
            return;
        }
        let index = indices.next().unwrap_or(0);
        let problem = format!("file block {}: {problem}", piece.file_block + index);
        let new = |problem| {
            let finding = Finding::new(PassId::Data, Severity::Error, Structure::Data, problem);
            finding.at(piece.start + index)
        };
        let Some((first, last)) = piece.snapshots else {
            self.checker.found(new(problem).of(piece.object));
            return;
        };
        let ObjectId { subvolume, inode } = piece.object;
        let all = &mut self.checker.snapshots;
        let of = all.of.get(&subvolume);
        let snapshots = of.iter().flat_map(|of| of.snapshots.range(first..=last));
        all.spoilt.extend(snapshots.clone().map(|(made, _)| (subvolume, *made)));
        let mut names = snapshots.map(|(made, item)| snapshots::shown(item, *made));
        let mut shown = names.next().unwrap_or_default();
        if let Some(last) = names.next_back() {
            shown = format!("{shown} to {last}");
        }
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

/// Calls `visit` with each leaf that was born after `before`, unless it is below a node among
/// `good`. Adds the nodes below which `visit` has found nothing bad to these. Returns whether there
/// is none but those. Damaged nodes have been reported.
pub(crate) fn visit_new_leaves(
    reader: &Reader<'_>,
    expected: &[ExpectedNode],
    before: Generation,
    good: &mut HashSet<u64>,
    visit: &mut dyn FnMut(&Node) -> bool,
) -> bool {
    let mut all_good = true;
    for chunk in expected.chunks(NODES_PER_READ) {
        let is_wanted = |expected: &&ExpectedNode| {
            let is_good = good.contains(&expected.pointer.block.0);
            all_good &= is_good || expected.pointer.generation > before;
            !is_good && expected.pointer.generation > before && may_be_read(reader, expected)
        };
        let wanted: Vec<&ExpectedNode> = chunk.iter().filter(is_wanted).collect();
        let addresses: Vec<BlockNumber> =
            wanted.iter().map(|expected| expected.pointer.block).collect();
        for (expected, node) in wanted.into_iter().zip(reader.nodes(&addresses)) {
            let is_good = match node {
                Ok(node) if contradiction(expected, &node).is_some() => false,
                Ok(node) if node.level() == 0 => !visit(&node),
                Ok(node) => {
                    let below = children(expected, &node);
                    visit_new_leaves(reader, &below, before, good, visit)
                }
                Err(_) => false,
            };
            // What a removal has given up may be in others.
            if is_good && !expected.lineage.may_have_given_up(expected.lower) {
                good.insert(expected.pointer.block.0);
            }
            all_good &= is_good;
        }
    }
    all_good
}

/// Whether the tree below `expected` has this leaf, in which this key is.
fn has_leaf(reader: &Reader<'_>, mut expected: ExpectedNode, key: Key, leaf: BlockNumber) -> bool {
    while expected.pointer.level > 0 && may_be_read(reader, &expected) {
        let node = reader.node(expected.pointer.block).ok();
        let node = node.filter(|node| contradiction(&expected, node).is_none());
        let below = node.map(|node| children(&expected, &node)).unwrap_or_default();
        match below.into_iter().rfind(|child| child.lower <= key) {
            Some(child) => expected = child,
            None => return false,
        }
    }
    expected.pointer.block == leaf
}

fn may_be_read(reader: &Reader<'_>, expected: &ExpectedNode) -> bool {
    let block = expected.pointer.block;
    block.0.is_multiple_of(NODE_BLOCKS) && reader.contains(BlockRange::node(block))
}
