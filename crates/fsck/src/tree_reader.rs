//! Reads the files of a volume: attributes, names, extended attributes, targets, data.
//!
//! The state is the one after replay: the superblock's trees with the log's items on top. If nodes
//! are damaged, leaves that only a damaged node led to count too, as for a repair. Nothing is
//! written, and nothing of the engine is used.
//!
//! Every item is decoded when it is asked for. What can't be decoded, or contradicts another item,
//! comes back as a problem in words, never as data.
use crate::checker::Checker;
use crate::overlay::Overlay;
use crate::reader::{Reader, read_data};
use crate::repair::{Remains, remains};
use crate::report::{Finding, PassId, Progress, Severity, Structure};
use crate::{CheckOptions, FsckError, log, superblocks, trees};
use cairn_blockdev::BlockDevice;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, DirectoryEntry, Extent, ExtentKind, INODE_ORPHANS,
    InodeItem, InodeNumber, ItemKind, Key, Node, OrphanKind, SYMLINK_PART_BYTES,
    XATTR_INLINE_BYTES_MAX, XattrItem, checksum, decode_orphan,
};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Leaves kept in memory: 2 MiB.
const LEAVES_KEPT: usize = 128;

/// A leaf and its number.
type KeptLeaf = (usize, Rc<Node>);

/// The extended attributes of an inode.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Xattrs {
    /// Name and value of each that is whole, by the slots of their names.
    pub whole: Vec<(Vec<u8>, Vec<u8>)>,
    /// What is wrong with others.
    pub problems: Vec<String>,
}

/// A part of a file, see [`TreeReader::read_file`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Piece<'p> {
    /// Bytes that match their checksums.
    Data {
        /// Where they stand in the file.
        offset_bytes: u64,
        /// The bytes.
        bytes: &'p [u8],
    },
    /// A range of data that cannot be read, or of which nobody knows which data it held.
    Damaged {
        /// Where it begins in the file.
        offset_bytes: u64,
        /// Its length.
        length_bytes: u64,
        /// What is wrong.
        problem: String,
    },
    /// Data is missing, and nothing says where in the file it stood.
    Missing {
        /// What is wrong.
        problem: String,
    },
}

/// Reads the files of one volume.
pub struct TreeReader<'a> {
    reader: Reader<'a>,
    /// Number of transactions, volume and so on.
    pub(crate) summary: VolumeSummary,
    findings: Vec<Finding>,
    /// Leaves of the file tree, each with a key that none of its keys is below; in key order.
    leaves: Vec<(Key, BlockNumber)>,
    overlay: Overlay,
    /// Instead of leaves and log: what is left of a damaged tree.
    remains: Option<BTreeMap<Key, Vec<u8>>>,
    /// Keys of the file tree that were lost.
    gaps: Vec<(Key, Option<Key>)>,
    /// Leaves in memory, each in the place that its number gives.
    kept: RefCell<Vec<Option<KeptLeaf>>>,
}

/// What identifies the volume and the state that is read.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct VolumeSummary {
    pub(crate) volume: String,
    pub(crate) label: String,
    pub(crate) generation: u64,
    pub(crate) checkpoints: u64,
    pub(crate) used_bytes: u64,
}

impl<'a> TreeReader<'a> {
    /// Opens the volume on `device`: reads superblocks, log, and all nodes of the trees. Calls
    /// `progress` now and then. It needs memory for the log's items; for all items if nodes are
    /// lost.
    ///
    /// # Errors
    /// If there is no volume, or it changes meanwhile. Damage is not an error but among the
    /// [`TreeReader::findings`].
    pub fn open(
        device: &'a dyn BlockDevice,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, FsckError> {
        let superblocks = superblocks::read(device)?;
        let options = CheckOptions { data: false, repair: false };
        let mut checker = Checker::new(device, options, superblocks, progress);
        superblocks::check(&mut checker)?;
        log::check(&mut checker)?;
        trees::check(&mut checker)?;
        let mut gaps = Vec::new();
        let remains = if checker.lost_nodes.is_empty() {
            None
        } else {
            let Remains { items, complete, doubts } = remains(&checker)?;
            if !complete {
                gaps.extend(checker.lost_nodes.iter().map(|lost| lost.keys));
            }
            for doubt in doubts {
                let (pass, structure) = (PassId::Trees, Structure::Node);
                checker.found(Finding::new(pass, Severity::Error, structure, doubt));
            }
            Some(items)
        };
        let summary = VolumeSummary {
            volume: checker.report.volume.clone(),
            label: checker.report.label.clone(),
            generation: checker.report.generation,
            checkpoints: checker.report.statistics.checkpoints,
            used_bytes: checker.superblock.used_blocks.saturating_mul(BLOCK_SIZE as u64),
        };
        let leaf_bounds = std::mem::take(&mut checker.leaf_bounds);
        let leaves = leaf_bounds.into_iter().zip(std::mem::take(&mut checker.leaves)).collect();
        let overlay = checker.take_overlay();
        let Reader { volume, geometry, .. } = checker.reader;
        let reader = Reader { device, volume, geometry };
        let findings = std::mem::take(&mut checker.report.findings);
        Ok(Self {
            reader,
            summary,
            findings: findings.into_iter().filter(|f| f.severity == Severity::Error).collect(),
            leaves,
            overlay,
            remains,
            gaps,
            kept: RefCell::new(vec![None; LEAVES_KEPT]),
        })
    }

    /// The errors in superblocks, log and trees.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The attributes of an inode; `None` if it does not exist, or is lost.
    ///
    /// # Errors
    /// They can't be decoded; the problem in words.
    pub fn attributes(&self, inode: InodeNumber) -> Result<Option<InodeItem>, String> {
        let value = self.item(Key::new(inode, ItemKind::Inode, 0));
        value.map(|value| InodeItem::decode(&value).map_err(|error| error.problem)).transpose()
    }

    /// The first name of `directory` in the slots from `from` on: its slot, and the entry or what
    /// is wrong with it. A name that is no name of a file (empty, `.`, `..`, or with `/` or NUL) is
    /// a problem.
    pub fn next_entry(
        &self,
        directory: InodeNumber,
        from: u64,
    ) -> Option<(u64, Result<DirectoryEntry, String>)> {
        let (key, value) = self.next_of(directory, ItemKind::DirectoryEntry, from)?;
        let entry = match DirectoryEntry::decode(&value) {
            Ok(entry) if entry.name == b"." || entry.name == b".." => {
                Err(format!("an entry named {:?}", String::from_utf8_lossy(&entry.name)))
            }
            Ok(entry) => Ok(entry),
            Err(error) => Err(error.problem),
        };
        Some((key.offset, entry))
    }

    /// The extended attributes of an inode.
    pub fn xattrs(&self, inode: InodeNumber) -> Xattrs {
        let mut found = Xattrs::default();
        let mut from = Some(0);
        while let Some((key, value)) =
            from.and_then(|from| self.next_of(inode, ItemKind::Xattr, from))
        {
            from = key.offset.checked_add(1);
            match self.xattr(inode, key.offset, &value) {
                Ok((name, _)) if found.whole.iter().any(|(known, _)| *known == name) => {
                    let name = String::from_utf8_lossy(&name).into_owned();
                    found.problems.push(format!("extended attribute {name:?} is there twice"));
                }
                Ok(whole) => found.whole.push(whole),
                Err(problem) => found.problems.push(problem),
            }
        }
        let all = Key::all(inode, ItemKind::Xattr);
        if self.may_have_lost(*all.start(), *all.end()) {
            found.problems.push("extended attributes may be missing".into());
        }
        found
    }

    fn xattr(
        &self,
        inode: InodeNumber,
        slot: u64,
        value: &[u8],
    ) -> Result<(Vec<u8>, Vec<u8>), String> {
        let item = XattrItem::decode(value).map_err(|error| error.problem)?;
        let (mut whole, value_bytes) = (item.inline, item.value_bytes as usize);
        let damaged = |part: usize| {
            let name = String::from_utf8_lossy(&item.name);
            format!("part {part} of extended attribute {name:?} is lost or has a wrong length")
        };
        for part in 1..=XattrItem::parts(value_bytes) {
            let offset = slot.checked_mul(256).and_then(|first| first.checked_add(part as u64));
            let bytes = offset
                .and_then(|offset| self.item(Key::new(inode, ItemKind::XattrPart, offset)))
                .filter(|bytes| {
                    bytes.len() == (value_bytes - whole.len()).min(XATTR_INLINE_BYTES_MAX)
                })
                .ok_or_else(|| damaged(part))?;
            whole.extend(bytes);
        }
        Ok((item.name, whole))
    }

    /// The target of a symbolic link whose attributes say that it has `size_bytes`.
    ///
    /// # Errors
    /// A part is missing, or it is no possible target; the problem in words.
    pub fn target(&self, inode: InodeNumber, size_bytes: u64) -> Result<Vec<u8>, String> {
        let mut target = Vec::new();
        let mut part = 0;
        while let Some(bytes) = self.item(Key::new(inode, ItemKind::Symlink, part))
            && target.len() == part as usize * SYMLINK_PART_BYTES
        {
            target.extend(bytes);
            part += 1;
        }
        if target.is_empty() || target.contains(&0) || target.len() as u64 != size_bytes {
            let found = target.len();
            return Err(format!("its target of {size_bytes} bytes is damaged: {found} were found"));
        }
        Ok(target)
    }

    /// Reads a regular file with these attributes, from its first byte to its last, and gives its
    /// pieces to `take` in ascending order. What no piece names is a hole, or was allocated and
    /// never written. The data is compared with its checksums. Where two extents claim the same
    /// part of the file, nothing of either is returned.
    ///
    /// # Errors
    /// The first error of `take`.
    pub fn read_file<E>(
        &self,
        inode: InodeNumber,
        attributes: &InodeItem,
        take: &mut dyn FnMut(Piece<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut out = FileOutput { size_bytes: attributes.size, done: 0, damaged: None, take };
        let (mut blocks, mut end) = (0_u64, 0);
        let mut next = self.next_of(inode, ItemKind::Extent, 0);
        while let Some((key, value)) = next {
            let first = key.offset;
            next =
                first.checked_add(1).and_then(|from| self.next_of(inode, ItemKind::Extent, from));
            let extent = match Extent::decode(&value) {
                Ok(extent) => extent,
                Err(error) => {
                    out.damaged(first, 1, &error.problem)?;
                    continue;
                }
            };
            blocks = blocks.saturating_add(extent.blocks);
            let extent_end = first.saturating_add(extent.blocks);
            let limit = next.as_ref().map_or(u64::MAX, |(key, _)| key.offset);
            let (alone, alone_end) = (first.max(end).min(extent_end), extent_end.min(limit));
            let shared = "another extent claims this part of the file too";
            out.damaged(first, alone - first, shared)?;
            if alone < alone_end {
                self.read_extent(&extent, alone - first, alone_end - alone, first, &mut out)?;
            }
            let rest = alone_end.max(alone);
            out.damaged(rest, extent_end - rest, shared)?;
            end = end.max(extent_end);
        }
        out.flush()?;
        if blocks != attributes.blocks {
            let problem = format!("{} blocks are its own, {blocks} were found", attributes.blocks);
            return (out.take)(Piece::Missing { problem });
        }
        Ok(())
    }

    /// Reads `blocks` blocks of an extent that begins at file block `file_block`, `skip` blocks
    /// behind its beginning.
    fn read_extent<E>(
        &self,
        extent: &Extent,
        skip: u64,
        blocks: u64,
        file_block: u64,
        out: &mut FileOutput<'_, E>,
    ) -> Result<(), E> {
        if extent.kind == ExtentKind::Unwritten {
            return Ok(());
        }
        let at = file_block.saturating_add(skip);
        // What lies behind the end of the file was never readable.
        let readable = out.size_bytes.div_ceil(BLOCK_SIZE as u64).saturating_sub(at);
        let blocks = blocks.min(readable);
        if blocks == 0 {
            return Ok(());
        }
        if !self.reader.contains(extent.range()) {
            return out.damaged(at, blocks, "its blocks lie outside the volume");
        }
        let part = extent.slice(skip, blocks);
        if let Ok(data) = read_data(self.reader.device, part.range(), &part.checksums) {
            return out.verified(at, &data, &part.checksums);
        }
        for (index, sum) in (0..).zip(&part.checksums) {
            let block = BlockRange::new(BlockNumber(part.start.0 + index), 1);
            match read_data(self.reader.device, block, std::slice::from_ref(sum)) {
                Ok(data) => out.verified(at + index, &data, std::slice::from_ref(sum))?,
                Err(error) => out.damaged(at + index, 1, &format!("cannot be read: {error}"))?,
            }
        }
        Ok(())
    }

    /// Whether the inode waits for its removal.
    pub(crate) fn is_to_be_removed(&self, inode: u64) -> bool {
        let orphan = self.item(Key::new(INODE_ORPHANS, ItemKind::Orphan, inode));
        orphan.is_some_and(|value| decode_orphan(&value) == Ok(OrphanKind::Remove))
    }

    /// Whether items of these keys may be lost.
    pub(crate) fn may_have_lost(&self, first: Key, last: Key) -> bool {
        let touches = |(lower, upper): &(Key, Option<Key>)| {
            *lower <= last && upper.is_none_or(|upper| first < upper)
        };
        self.gaps.iter().any(touches)
    }

    /// Whether nodes of the tree are lost.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.remains.is_some()
    }

    /// The first item of `kind` of `inode` with an offset from `from` on.
    fn next_of(&self, inode: InodeNumber, kind: ItemKind, from: u64) -> Option<(Key, Vec<u8>)> {
        self.next_item(Key::new(inode, kind, from), Key::new(inode, kind, u64::MAX))
    }

    fn item(&self, key: Key) -> Option<Vec<u8>> {
        self.next_item(key, key).map(|(_, value)| value)
    }

    /// The first item between the keys, both included; none if `from` is above `last`.
    pub(crate) fn next_item(&self, mut from: Key, last: Key) -> Option<(Key, Vec<u8>)> {
        if from > last {
            return None;
        }
        let owned = |(key, value): (&Key, &Vec<u8>)| (*key, value.clone());
        if let Some(items) = &self.remains {
            return items.range(from..=last).next().map(owned);
        }
        let mut in_leaves = self.next_in_leaves(from, last);
        for (key, change) in self.overlay.changes.range(from..=last) {
            if in_leaves.as_ref().is_some_and(|(found, _)| found < key) {
                break;
            }
            if let Some(value) = &change.value {
                return Some((*key, value.clone()));
            }
            if in_leaves.as_ref().is_some_and(|(found, _)| found == key) {
                from = key.successor().filter(|next| *next <= last)?;
                in_leaves = self.next_in_leaves(from, last);
            }
        }
        in_leaves
    }

    fn next_in_leaves(&self, from: Key, last: Key) -> Option<(Key, Vec<u8>)> {
        let first = self.leaves.partition_point(|(bound, _)| *bound <= from).saturating_sub(1);
        for index in first..self.leaves.len() {
            if self.leaves[index].0 > last {
                return None;
            }
            let Some(node) = self.leaf(index) else { continue };
            let (Ok(at) | Err(at)) = node.search(&from);
            if at < node.count() {
                let key = node.key(at);
                return (key <= last).then(|| (key, node.value(at).to_vec()));
            }
        }
        None
    }

    /// A leaf that could be read before. If the device fails now, its items are missing; the counts
    /// of the inodes show that.
    fn leaf(&self, index: usize) -> Option<Rc<Node>> {
        let place = index % LEAVES_KEPT;
        if let Some((kept, node)) = &self.kept.borrow()[place]
            && *kept == index
        {
            return Some(node.clone());
        }
        let node = Rc::new(self.reader.node(self.leaves[index].1).ok()?);
        self.kept.borrow_mut()[place] = Some((index, node.clone()));
        Some(node)
    }
}

/// Passes pieces on, within the file's size, neighbours that are damaged as one.
struct FileOutput<'t, E> {
    size_bytes: u64,
    /// The block behind the last one that a piece names.
    done: u64,
    /// First block, block behind the last, and problem.
    damaged: Option<(u64, u64, String)>,
    take: &'t mut dyn FnMut(Piece<'_>) -> Result<(), E>,
}

impl<E> FileOutput<'_, E> {
    /// `data` is that of the file's blocks from `at` on.
    fn verified(&mut self, at: u64, data: &[u8], checksums: &[u32]) -> Result<(), E> {
        let good: Vec<bool> = data
            .chunks_exact(BLOCK_SIZE)
            .zip(checksums)
            .map(|(bytes, sum)| checksum(bytes) == *sum)
            .collect();
        let mut index = 0;
        for run in good.chunk_by(|one, other| one == other) {
            let (first, bytes) = (at + index as u64, &data[index * BLOCK_SIZE..]);
            if run[0] {
                self.data(first, &bytes[..run.len() * BLOCK_SIZE])?;
            } else {
                self.damaged(first, run.len() as u64, "does not match its checksum")?;
            }
            index += run.len();
        }
        Ok(())
    }

    fn data(&mut self, at: u64, bytes: &[u8]) -> Result<(), E> {
        self.flush()?;
        let offset_bytes = at * BLOCK_SIZE as u64;
        let length = (self.size_bytes - offset_bytes).min(bytes.len() as u64) as usize;
        self.done = at + (bytes.len() / BLOCK_SIZE) as u64;
        (self.take)(Piece::Data { offset_bytes, bytes: &bytes[..length] })
    }

    fn damaged(&mut self, at: u64, blocks: u64, problem: &str) -> Result<(), E> {
        let end = at.saturating_add(blocks).min(self.size_bytes.div_ceil(BLOCK_SIZE as u64));
        let at = at.max(self.done);
        if at >= end {
            return Ok(());
        }
        self.done = end;
        match &mut self.damaged {
            Some((_, last, known)) if *last == at && known == problem => *last = end,
            _ => {
                self.flush()?;
                self.damaged = Some((at, end, problem.to_owned()));
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), E> {
        let Some((first, end, problem)) = self.damaged.take() else { return Ok(()) };
        let offset_bytes = first * BLOCK_SIZE as u64;
        let length_bytes = (end * BLOCK_SIZE as u64).min(self.size_bytes) - offset_bytes;
        (self.take)(Piece::Damaged { offset_bytes, length_bytes, problem })
    }
}
