//! Writes a repaired volume as a transaction of its own: the old state stays current until the new
//! superblock is durable.
//!
//! 1. Write new trees into clusters that nothing refers to, neither before nor after the repair,
//!    and that hold no salvaged node. *Crash: the old superblock, and all that the next repair
//!    needs; if room was short, it may know less of what was removed.*
//! 2. Write the bitmaps into the slots not in use; flush. *Crash: the old superblock, whose bitmaps
//!    are untouched.*
//! 3. Write the superblock into the slot that does not hold the current one; flush. It has a new
//!    log epoch, so nothing of the log is replayed on top of it. *Crash, torn: the old superblock.*
//! 4. Write the superblock's copy, then the other slot, each flushed.
use super::gather::{GatheredItems, GatheredTrees};
use super::snapshots::NewLists;
use super::subvolumes::Subvolumes;
use crate::FsckError;
use crate::bitmaps::{expected_bits, slot_in_use};
use crate::block_set::BlockSet;
use crate::checker::Checker;
use crate::reader::{Reader, write_block};
use cairn_format::{
    Bitmap, BlockNumber, BlockRange, ChildPointer, Features, Generation, Geometry, INODE_ORPHANS,
    InodeNumber, ItemKind, Key, LogPosition, NODE_BLOCKS, Node, NodePointer, RootItem,
    SubvolumeItem, Superblock, TREE_DEAD, TREE_ROOTS, TREE_SUBVOLUMES, TreeId,
    bitmap_generations_checksum, encode_orphan,
};
use std::collections::BTreeMap;

/// The items of a new tree of files, in key order.
pub(super) fn file_items(gathered: &GatheredItems) -> Vec<(Key, Vec<u8>)> {
    let mut items = Vec::new();
    for (&number, inode) in &gathered.inodes {
        let key = |kind, offset| Key::new(InodeNumber(number), kind, offset);
        items.extend(inode.item.map(|item| (key(ItemKind::Inode, 0), item.encode().to_vec())));
        items.extend(
            inode
                .entries
                .iter()
                .map(|(&slot, entry)| (key(ItemKind::DirectoryEntry, slot), entry.encode())),
        );
        items.extend(
            inode
                .xattrs
                .iter()
                .map(|(&slot, xattr)| (key(ItemKind::Xattr, slot), xattr.item.encode())),
        );
        for (slot, xattr) in &inode.xattrs {
            items.extend(
                xattr.parts.iter().map(|(part, bytes)| {
                    (key(ItemKind::XattrPart, slot * 256 + part), bytes.clone())
                }),
            );
        }
        items.extend(
            inode.target.iter().map(|(&part, bytes)| (key(ItemKind::Symlink, part), bytes.clone())),
        );
        items.extend(
            inode
                .extents
                .iter()
                .map(|(&block, extent)| (key(ItemKind::Extent, block), extent.encode())),
        );
    }
    let orphan_key = |number| Key::new(INODE_ORPHANS, ItemKind::Orphan, number);
    items.extend(
        gathered
            .orphans
            .iter()
            .map(|(&number, &orphan)| (orphan_key(number), encode_orphan(orphan).to_vec())),
    );
    items.sort_by_key(|(key, _)| *key);
    items
}

/// A new tree: its items in key order.
pub(super) type NewTree = (TreeId, Vec<(Key, Vec<u8>)>);

/// Inodes that the superblock counts: not those of subvolumes that began as forks.
pub(super) fn counted_inodes(trees: &GatheredTrees, subvolumes: &Subvolumes) -> u64 {
    let items = subvolumes.as_ref();
    let is_fork = |id| items.and_then(|items| items.get(id)).is_some_and(SubvolumeItem::is_fork);
    let counted = trees.iter().filter(|(id, _)| !is_fork(*id));
    counted.map(|(_, tree)| tree.inodes.len() as u64).sum()
}

/// The new trees besides the root tree, by their ids: those of files that are not `kept`, that of
/// the subvolumes if there are such, and that of dead runs if there may be snapshots.
pub(super) fn trees(
    files: &GatheredTrees,
    subvolumes: &Subvolumes,
    snapshots: NewLists,
    kept: &BTreeMap<TreeId, NodePointer>,
) -> Vec<NewTree> {
    let item =
        |(id, item): (&TreeId, &SubvolumeItem)| (Key::subvolume(*id), item.encode().to_vec());
    let subvolumes = subvolumes.as_ref().map(|items| {
        let mut items: Vec<_> = items.iter().map(item).chain(snapshots.items).collect();
        items.sort_by_key(|(key, _)| *key);
        (TREE_SUBVOLUMES, items)
    });
    let dead = snapshots.dead.map(|items| (TREE_DEAD, items));
    let files = files.iter().filter(|(id, _)| !kept.contains_key(id));
    let files = files.map(|(id, tree)| (*id, file_items(tree)));
    dead.into_iter().chain(subvolumes).chain(files).collect()
}

/// Writes nodes into free clusters.
struct NodeWriter<'a> {
    reader: Reader<'a>,
    generation: Generation,
    /// Clusters to use, the last one first.
    free: Vec<BlockNumber>,
    used: Vec<BlockNumber>,
}

impl NodeWriter<'_> {
    /// A tree with these items; `None` if there is no room.
    fn tree(
        &mut self,
        tree: TreeId,
        items: &[(Key, Vec<u8>)],
    ) -> Result<Option<NodePointer>, FsckError> {
        let mut level = 0;
        let Some(mut pointers) = self.level(tree, level, items)? else { return Ok(None) };
        while pointers.len() > 1 {
            level += 1;
            let items: Vec<_> =
                pointers.iter().map(|(key, child)| (*key, child.encode().to_vec())).collect();
            let Some(above) = self.level(tree, level, &items)? else { return Ok(None) };
            pointers = above;
        }
        Ok(pointers.first().map(|(_, root)| NodePointer {
            block: root.block,
            generation: root.generation,
            level,
        }))
    }

    fn level(
        &mut self,
        tree: TreeId,
        level: u8,
        items: &[(Key, Vec<u8>)],
    ) -> Result<Option<Vec<(Key, ChildPointer)>>, FsckError> {
        let mut written = Vec::new();
        let mut rest = items;
        loop {
            let Some(address) = self.free.pop() else { return Ok(None) };
            self.used.push(address);
            let mut node = Node::new(self.reader.volume, tree, level, address, self.generation);
            let first = rest.first().map_or(Key::MIN, |(key, _)| *key);
            while let Some((key, value)) = rest.first() {
                if node.insert(node.count(), *key, value).is_err() {
                    break;
                }
                rest = &rest[1..];
            }
            write_block(self.reader.device, address, &node.seal()[..])?;
            written.push((first, ChildPointer { block: address, generation: self.generation }));
            if rest.is_empty() {
                return Ok(Some(written));
            }
        }
    }
}

/// Clusters with no block in one of `used`: what the volume refers to, what will be kept, and the
/// salvaged nodes, which the next repair needs if this one is interrupted. Clusters that the
/// bitmaps mark free come last and are used first. Those with `found` nodes, which the next repair
/// would use to decide, come first.
fn free_clusters(
    checker: &Checker<'_>,
    used: [&BlockSet; 3],
    [allocated, found]: [&BlockSet; 2],
) -> Vec<BlockNumber> {
    let allocatable = checker.superblock.geometry.allocatable().range();
    let last = allocatable.end.min(checker.reader.blocks_present());
    let clusters = (allocatable.start..last)
        .step_by(NODE_BLOCKS as usize)
        .filter(|start| start + NODE_BLOCKS <= last);
    let unused = |start: &u64| {
        (*start..start + NODE_BLOCKS).all(|block| used.iter().all(|set| !set.contains(block)))
    };
    let has_any =
        |start: u64, set: &BlockSet| (start..start + NODE_BLOCKS).any(|block| set.contains(block));
    let mut clusters: Vec<u64> = clusters.filter(unused).collect();
    clusters.sort_by_key(|&start| {
        std::cmp::Reverse((has_any(start, found), has_any(start, allocated), start))
    });
    clusters.into_iter().map(BlockNumber).collect()
}

/// What the repair commits besides the items.
pub(super) struct RepairCommit {
    pub(super) generation: Generation,
    /// Trees that stay where they are.
    pub(super) kept: BTreeMap<TreeId, NodePointer>,
    pub(super) has_forks: bool,
    pub(super) has_joining: bool,
    /// Inodes that the superblock counts.
    pub(super) inodes: u64,
    pub(super) next_inode: u64,
    pub(super) next_tree: TreeId,
    pub(super) next_list: u64,
    pub(super) default_subvolume: TreeId,
    pub(super) log_tail: LogPosition,
    /// Which of the three superblocks is current.
    pub(super) superblock_index: usize,
}

/// Steps 1 to 4. `extents` are the blocks of the trees' extents, `sources` the salvaged nodes,
/// `allocated` the content of the bitmaps, `found` all nodes on the volume. Returns whether there
/// was room.
pub(super) fn commit(
    checker: &Checker<'_>,
    trees: &[NewTree],
    [extents, sources]: [&BlockSet; 2],
    [allocated, found]: [&BlockSet; 2],
    commit: &RepairCommit,
) -> Result<bool, FsckError> {
    let (device, geometry) = (checker.reader.device, checker.superblock.geometry);
    let free = free_clusters(checker, [&checker.referenced, extents, sources], [allocated, found]);
    let mut writer = NodeWriter {
        reader: checker.reader,
        generation: commit.generation,
        free,
        used: Vec::new(),
    };
    let mut roots = commit.kept.clone();
    for (id, items) in trees {
        let Some(root) = writer.tree(*id, items)? else { return Ok(false) };
        roots.insert(*id, root);
    }
    let item = |(id, root)| (Key::root(id), RootItem { root }.encode().to_vec());
    let root_items: Vec<_> = roots.into_iter().map(item).collect();
    let Some(root) = writer.tree(TREE_ROOTS, &root_items)? else { return Ok(false) };
    let mut referenced = extents.clone();
    for &node in &writer.used {
        referenced.insert(BlockRange::node(node));
    }
    for group in 0..geometry.groups() {
        let address = geometry.bitmap_block(group, 1 - slot_in_use(checker, group));
        let bitmap = Bitmap {
            group,
            generation: commit.generation,
            bits: expected_bits(&referenced, &geometry, group),
        };
        write_block(device, address, &bitmap.encode(checker.reader.volume, address))?;
    }
    device.flush()?;
    let mut features = checker.superblock.features;
    if commit.has_forks {
        features.incompatible |= Features::FORKS;
    }
    if commit.has_joining {
        features.incompatible |= Features::JOINING;
    }
    let superblock = Superblock {
        generation: commit.generation,
        features,
        root,
        next_inode: commit.next_inode,
        log_epoch: checker.superblock.log_epoch + 1,
        log_tail: commit.log_tail,
        used_blocks: referenced.count(),
        inodes: commit.inodes,
        next_tree: commit.next_tree,
        next_list: commit.next_list,
        default_subvolume: commit.default_subvolume,
        bitmaps_checksum: bitmap_generations_checksum(
            (0..geometry.groups()).map(|_| commit.generation),
        ),
        clean: true,
        ..checker.superblock.clone()
    };
    let slots = Geometry::SUPERBLOCKS;
    let slot = slots[(commit.generation.0 % 2) as usize];
    debug_assert!(
        commit.superblock_index > 1 || slots[commit.superblock_index] != slot,
        "the current superblock stays"
    );
    for address in
        [slot, geometry.superblock_copy(), slots[((commit.generation.0 + 1) % 2) as usize]]
    {
        write_block(device, address, &superblock.encode(address))?;
        device.flush()?;
    }
    Ok(true)
}
