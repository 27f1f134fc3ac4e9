//! Reads the files of a volume: attributes, names, extended attributes, targets, data. Each
//! subvolume has a tree of its own (`readable_tree`).
//!
//! The state is the one after replay: the superblock's trees with the log's items on top. If nodes
//! are damaged, leaves that only a damaged node led to count too, as for a repair. Nothing is
//! written, and nothing of the engine is used.
//!
//! Every item is decoded when it is asked for. What can't be decoded, or contradicts another item,
//! comes back as a problem in words, never as data.
use crate::checker::Checker;
use crate::object::ObjectId;
use crate::readable_tree::{Leaves, ReadableTree};
use crate::reader::{Reader, read_data};
use crate::repair::{Remains, remains};
use crate::report::{Finding, PassId, Progress, Severity, Structure};
use crate::subvolumes::is_left_over;
use crate::{CheckOptions, FsckError, log, snapshots, superblocks, trees};
use cairn_blockdev::BlockDevice;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, DirectoryEntry, EntryTarget, Extent, ExtentKind,
    INODE_NUMBER_END, INODE_ORPHANS, InodeItem, InodeNumber, ItemKind, Key, OrphanKind,
    SYMLINK_PART_BYTES, SubvolumeItem, TREE_FILES, TREE_SUBVOLUMES, TreeId, XATTR_INLINE_BYTES_MAX,
    XattrItem, checksum, decode_orphan,
};
use std::collections::BTreeMap;

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
    leaves: Leaves<'a>,
    /// Number of transactions, volume and so on.
    pub(crate) summary: VolumeSummary,
    findings: Vec<Finding>,
    trees: BTreeMap<TreeId, ReadableTree>,
    subvolumes: BTreeMap<TreeId, SubvolumeItem>,
    /// Whether this is a snapshot, in which no other subvolume is.
    is_snapshot: bool,
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

impl VolumeSummary {
    fn of(checker: &Checker<'_>) -> Self {
        Self {
            volume: checker.report.volume.clone(),
            label: checker.report.label.clone(),
            generation: checker.report.generation,
            checkpoints: checker.report.statistics.checkpoints,
            used_bytes: checker.superblock.used_blocks.saturating_mul(BLOCK_SIZE as u64),
        }
    }
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
        let mut checker = Self::checked(device, progress)?;
        let mut left = BTreeMap::new();
        let mut is_complete = true;
        if !checker.lost_nodes.is_empty() {
            let Remains { trees, complete, doubts } = remains(&checker)?;
            (left, is_complete) = (trees, complete);
            for doubt in doubts {
                let (pass, structure) = (PassId::Trees, Structure::Node);
                checker.found(Finding::new(pass, Severity::Error, structure, doubt));
            }
        }
        let summary = VolumeSummary::of(&checker);
        let mut subvolumes = std::mem::take(&mut checker.subvolumes);
        for (key, value) in left.remove(&TREE_SUBVOLUMES).unwrap_or_default() {
            subvolumes.extend(SubvolumeItem::decode(&value).map(|item| (TreeId(key.inode), item)));
        }
        let mut trees: BTreeMap<TreeId, ReadableTree> = checker
            .take_trees()
            .into_iter()
            .map(|(id, tree)| (id, ReadableTree::whole(tree)))
            .collect();
        for (id, items) in left {
            let lost = checker.lost_nodes.iter().filter(|lost| !is_complete && lost.concerns(id));
            let gaps = lost.map(|lost| lost.keys).collect();
            trees.insert(id, ReadableTree::damaged(items, gaps));
        }
        let Reader { volume, geometry, .. } = checker.reader;
        let reader = Reader { device, volume, geometry };
        let findings = std::mem::take(&mut checker.report.findings);
        Ok(Self {
            leaves: Leaves::new(reader),
            summary,
            findings: findings.into_iter().filter(|f| f.severity == Severity::Error).collect(),
            trees,
            subvolumes,
            is_snapshot: false,
        })
    }

    /// Opens the snapshot `name` that a subvolume shows in place of the volume. That may be one of
    /// a subvolume that it continues. Its objects are named as those of the first subvolume; no
    /// subvolume is in it.
    ///
    /// # Errors
    /// As [`TreeReader::open`], and if there is no such snapshot.
    pub fn open_snapshot(
        device: &'a dyn BlockDevice,
        subvolume: TreeId,
        name: &[u8],
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, FsckError> {
        let checker = Self::checked(device, progress)?;
        let (tree, findings) = snapshots::readable(&checker, subvolume, name)?;
        let Reader { volume, geometry, .. } = checker.reader;
        Ok(Self {
            leaves: Leaves::new(Reader { device, volume, geometry }),
            summary: VolumeSummary::of(&checker),
            findings,
            trees: BTreeMap::from([(TREE_FILES, tree)]),
            subvolumes: BTreeMap::new(),
            is_snapshot: true,
        })
    }

    fn checked<'p>(
        device: &'p dyn BlockDevice,
        progress: &'p mut dyn FnMut(Progress),
    ) -> Result<Checker<'p>, FsckError> {
        let superblocks = superblocks::read(device)?;
        let options = CheckOptions { data: false, repair: false };
        let mut checker = Checker::new(device, options, superblocks, progress);
        checker.whole_max = crate::checker::WholeMax::FORKS;
        superblocks::check(&mut checker)?;
        log::check(&mut checker)?;
        trees::check(&mut checker)?;
        Ok(checker)
    }

    /// The errors in superblocks, log and trees; of a snapshot: in its tree.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The subvolumes with files, except those that are being removed.
    pub fn subvolumes(&self) -> impl Iterator<Item = TreeId> {
        let is_gone = |id: &TreeId| self.subvolumes.get(id).is_some_and(|item| item.is_nameless());
        self.trees.keys().copied().filter(move |id| !is_gone(id))
    }

    /// The attributes of an object; `None` if it does not exist, or is lost.
    ///
    /// # Errors
    /// They can't be decoded; the problem in words.
    pub fn attributes(&self, object: ObjectId) -> Result<Option<InodeItem>, String> {
        let value = self.item(object, ItemKind::Inode, 0);
        value.map(|value| InodeItem::decode(&value).map_err(|error| error.problem)).transpose()
    }

    /// The first name of `directory` in the slots from `from` on: its slot, and the entry or what
    /// is wrong with it. A name that is no name of a file (empty, `.`, `..`, or with `/` or NUL) is
    /// a problem.
    pub fn next_entry(
        &self,
        directory: ObjectId,
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

    /// The extended attributes of an object.
    pub fn xattrs(&self, object: ObjectId) -> Xattrs {
        let mut found = Xattrs::default();
        let mut from = Some(0);
        while let Some((key, value)) =
            from.and_then(|from| self.next_of(object, ItemKind::Xattr, from))
        {
            from = key.offset.checked_add(1);
            match self.xattr(object, key.offset, &value) {
                Ok((name, _)) if found.whole.iter().any(|(known, _)| *known == name) => {
                    let name = String::from_utf8_lossy(&name).into_owned();
                    found.problems.push(format!("extended attribute {name:?} is there twice"));
                }
                Ok(whole) => found.whole.push(whole),
                Err(problem) => found.problems.push(problem),
            }
        }
        let all = Key::all(object.inode, ItemKind::Xattr);
        let tree = self.trees.get(&object.subvolume);
        if tree.is_some_and(|tree| tree.may_have_lost(*all.start(), *all.end())) {
            found.problems.push("extended attributes may be missing".into());
        }
        found
    }

    fn xattr(
        &self,
        object: ObjectId,
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
                .and_then(|offset| self.item(object, ItemKind::XattrPart, offset))
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
    pub fn target(&self, object: ObjectId, size_bytes: u64) -> Result<Vec<u8>, String> {
        let mut target = Vec::new();
        let mut part = 0;
        while let Some(bytes) = self.item(object, ItemKind::Symlink, part)
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
        object: ObjectId,
        attributes: &InodeItem,
        take: &mut dyn FnMut(Piece<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut out = FileOutput { size_bytes: attributes.size, done: 0, damaged: None, take };
        let (mut blocks, mut end) = (0_u64, 0);
        let mut next = self.next_of(object, ItemKind::Extent, 0);
        while let Some((key, value)) = next {
            let first = key.offset;
            next =
                first.checked_add(1).and_then(|from| self.next_of(object, ItemKind::Extent, from));
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
        if !self.leaves.reader.contains(extent.range()) {
            return out.damaged(at, blocks, "its blocks lie outside the volume");
        }
        let part = extent.slice(skip, blocks);
        if let Ok(data) = read_data(self.leaves.reader.device, part.range(), &part.checksums) {
            return out.verified(at, &data, &part.checksums);
        }
        for (index, sum) in (0..).zip(&part.checksums) {
            let block = BlockRange::new(BlockNumber(part.start.0 + index), 1);
            match read_data(self.leaves.reader.device, block, std::slice::from_ref(sum)) {
                Ok(data) => out.verified(at + index, &data, std::slice::from_ref(sum))?,
                Err(error) => out.damaged(at + index, 1, &format!("cannot be read: {error}"))?,
            }
        }
        Ok(())
    }

    /// Whether the object waits for its removal.
    pub(crate) fn is_to_be_removed(&self, object: ObjectId) -> bool {
        let orphans = object.sibling(INODE_ORPHANS);
        let orphan = self.item(orphans, ItemKind::Orphan, object.inode.0);
        orphan.is_some_and(|value| decode_orphan(&value) == Ok(OrphanKind::Remove))
    }

    /// Whether an entry leads out of what is read: to a subvolume, from a snapshot; or to one of
    /// its origin, from a fork.
    pub(crate) fn leads_out(&self, directory: ObjectId, entry: &DirectoryEntry) -> bool {
        match entry.target {
            EntryTarget::Subvolume(named) => {
                self.is_snapshot || is_left_over(&self.subvolumes, directory, named)
            }
            EntryTarget::Inode(..) => false,
        }
    }

    /// Whether nodes of a tree are lost.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.trees.values().any(ReadableTree::is_damaged)
    }

    /// The first object of a damaged tree with this inode number or a higher one, and whether it
    /// has attributes.
    pub(crate) fn next_of_damaged(&self, from: ObjectId) -> Option<(ObjectId, bool)> {
        let tree = self.trees.get(&from.subvolume).filter(|tree| tree.is_damaged())?;
        let (key, _) = tree.next_item(
            &self.leaves,
            Key { inode: from.inode.0, kind: 0, offset: 0 },
            Key { inode: INODE_NUMBER_END, ..Key::MAX },
        )?;
        let found = from.sibling(InodeNumber(key.inode));
        Some((found, key.kind == ItemKind::Inode as u8))
    }

    /// The first item of `kind` of `object` with an offset from `from` on.
    fn next_of(&self, object: ObjectId, kind: ItemKind, from: u64) -> Option<(Key, Vec<u8>)> {
        let key = |offset| Key::new(object.inode, kind, offset);
        let tree = self.trees.get(&object.subvolume)?;
        tree.next_item(&self.leaves, key(from), key(u64::MAX))
    }

    fn item(&self, object: ObjectId, kind: ItemKind, offset: u64) -> Option<Vec<u8>> {
        let key = Key::new(object.inode, kind, offset);
        let tree = self.trees.get(&object.subvolume)?;
        tree.next_item(&self.leaves, key, key).map(|(_, value)| value)
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
