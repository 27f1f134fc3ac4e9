//! Rebuilds the trees: the repair of damage that changes of single blocks can't repair.
//!
//! It gathers all readable items: those of the superblock's trees, on top of them the log as far as
//! a mount would replay it, and leaves that only a damaged node led to (`salvage`). It drops what
//! can't be kept and counts the rest anew (`gather`, `extents`, `amend`); inodes without a name
//! move to `lost+found`. What happens to subvolumes is in `subvolumes`, and to their snapshots,
//! which stay as they are, in `snapshots`, to forks in `forks`. Then all of it becomes durable at
//! once (`write`): a crash leaves the volume as it was before.
//!
//! It needs memory for all items of the volume.
mod amend;
mod copies;
mod extents;
mod forks;
mod found;
mod gather;
mod held_runs;
mod inherited;
mod kept_trees;
mod losses;
mod lost_parts;
mod salvage;
mod snapshots;
mod subvolumes;
mod versions;
mod write;

use crate::FsckError;
use crate::bitmaps::{Allocation, allocation};
use crate::block_set::BlockSet;
use crate::checker::Checker;
use crate::item_stream::{Item, Visitor, visit};
use crate::object::ObjectId;
use crate::report::{Finding, Losses};
use crate::snapshots::shown;
use cairn_format::{
    COUNTER_WRITABLE_MAX, GENERATION_OF_MKFS, GENERATION_WRITABLE_MAX, Generation, INODE_FIRST,
    INODE_NUMBER_END, Key, LogPosition, TREE_DEAD, TREE_FILES, TREE_SUBVOLUMES, TreeId,
};
use gather::GatheredTrees;
use salvage::{ItemsByTree, Salvaged};
use std::collections::{BTreeMap, BTreeSet};

/// The results of a repair.
#[derive(Default)]
pub(crate) struct RepairSummary {
    /// Where inodes without a name moved to, and which snapshots got another one, in words.
    pub(crate) notes: Vec<String>,
    /// Blocks that two claimed, and that now have a copy.
    pub(crate) copied: u64,
    /// Leaves that only a damaged node had led to.
    pub(crate) salvaged: u64,
    /// Blocks of salvaged items that may have been removed before.
    pub(crate) surplus_blocks: u64,
    /// Salvaged leaves that nothing shows to be the newest.
    pub(crate) unconfirmed_leaves: u64,
    /// The losses of the nodes at these blocks, in words.
    pub(crate) dropped_nodes: BTreeMap<u64, String>,
    /// Files whose damaged data was given up.
    pub(crate) given_up: BTreeSet<ObjectId>,
    /// Damaged snapshots that were dropped, in words.
    pub(crate) dropped_snapshots: BTreeSet<String>,
    /// Other losses.
    pub(crate) lost: Vec<Finding>,
    pub(crate) losses: Losses,
}

/// The results of a repair, or the reason why it is impossible.
pub(crate) enum RepairResult {
    Repaired(Box<RepairSummary>),
    Impossible(&'static str),
}

struct ItemCollector {
    items: BTreeMap<Key, Vec<u8>>,
}

impl Visitor for ItemCollector {
    fn item(&mut self, item: Item<'_>) -> Result<(), FsckError> {
        self.items.insert(item.key, item.value.to_vec());
        Ok(())
    }
    fn leaves_done(&mut self, _done: u64) {}
}

/// Rebuilds the volume from what `checker`, whose passes have run, could read. Leaves out the
/// damaged data of the inodes `given_up`, and the snapshots `to_drop`.
pub(crate) fn rebuild(
    checker: &Checker<'_>,
    given_up: &BTreeSet<ObjectId>,
    to_drop: &BTreeSet<(TreeId, Generation)>,
) -> Result<RepairResult, FsckError> {
    if let Some(obstacle) = obstacle(checker) {
        return Ok(RepairResult::Impossible(obstacle));
    }
    let allocation = allocation(checker);
    let (mut items, salvaged) = readable_items(checker, &allocation)?;
    let subvolume_items = items.remove(&TREE_SUBVOLUMES).unwrap_or_default();
    // The dead lists are made anew.
    items.remove(&TREE_DEAD);
    if items.values().all(BTreeMap::is_empty) {
        return Ok(RepairResult::Impossible("nothing of the file tree can be read"));
    }
    let mut trees = gathered(items);
    let readable = lost_parts::Readable::of(&trees, &checker.reader);
    let mut found = subvolumes::found(checker, &subvolume_items, &mut trees);
    let forks = forks::Forks::of(checker, &mut found, &trees);
    let (mut lost, mut losses) = losses::of(&trees, &checker.lost_nodes, &salvaged);
    let superblock_index = checker.superblocks.index_of_newest();
    let generation = next_generation(checker, superblock_index);
    let mut references = snapshots::References::of_snapshots(checker, &trees, &forks, to_drop);
    let dropped = references.take_dropped();
    losses.snapshots = checker.snapshots.undecodable + dropped.len() as u64;
    lost.extend(dropped);
    subvolumes::bring_back(&references.with_damaged_newest(), &mut found, &mut trees);
    let nodes = [&salvaged.nodes, &salvaged.found];
    let mut copier =
        copies::Copier::new(checker, &trees, &references, &allocation, nodes, generation);
    extents::sort_out(&mut trees, &checker.reader, &forks, &mut copier);
    extents::drop_damaged(&mut trees, &checker.reader, given_up);
    references.leave_foreign(&mut trees, checker, &forks, &mut copier);
    references.cut_conflicts(&mut trees, &checker.reader, &forks, &mut copier);
    let copied = copier.finish()?;
    let rules = amend::RepairRules {
        hash_seed: checker.superblock.hash_seed,
        generation,
        has_long_extents: checker.superblock.features.has_snapshots(),
        has_parents: checker.superblock.features.has_parents(),
    };
    let mut next_inode = checker.counters.next_inode.clamp(INODE_FIRST, INODE_NUMBER_END);
    let find_homes = |trees: &GatheredTrees| subvolumes::homes(&found, trees);
    let rescued = amend::amend(&mut trees, &rules, find_homes, &mut next_inode);
    lost.extend(readable.missing_in(&trees, &found, &forks, given_up, &mut losses));
    losses::add_paths(&trees, &mut lost);
    let mut notes = losses::moved(&trees, &rescued);
    // The extents of inodes that turned out to be no files are gone.
    references.leave_to_subvolumes(&mut trees, generation, &forks);
    let unchanged = kept_trees::unchanged(checker, &forks, &references, &trees)?;
    references.keep(&unchanged.inherited);
    references.leave_nodes(&unchanged.nodes);
    let mut kept = BlockSet::new(checker.reader.blocks_present());
    let inodes = trees.values().flat_map(|tree| tree.inodes.values());
    for extent in inodes.flat_map(|inode| inode.extents.values()) {
        kept.insert(extent.range());
    }
    for node in &unchanged.nodes {
        kept.insert(*node);
    }
    references.add_blocks(&mut kept);
    let log_tail = LogPosition {
        block: checker.superblock.log_tail.block,
        sequence: checker.superblock.log_tail.sequence.max(1),
    };
    let has_snapshots = |id| references.has_snapshots(id);
    let mut subvolumes = subvolumes::settled(checker, found, &mut trees, has_snapshots, generation);
    let Some(mut lists) = references.settle(checker, &mut subvolumes, generation) else {
        return Ok(RepairResult::Impossible("a dead list of a snapshot would become too long"));
    };
    notes.append(&mut lists.renamed);
    let commit = write::RepairCommit {
        generation,
        kept: unchanged.roots,
        has_forks: !forks.is_empty(),
        has_joining: subvolumes.iter().flatten().any(|(_, item)| item.is_joined),
        inodes: write::counted_inodes(&trees, &subvolumes),
        next_inode,
        next_tree: next_tree(checker, &trees),
        next_list: lists.next_list,
        default_subvolume: default_subvolume(checker, &subvolumes),
        log_tail,
        superblock_index,
    };
    let trees = write::trees(&trees, &subvolumes, lists, &commit.kept);
    if !write::commit(
        checker,
        &trees,
        [&kept, &salvaged.nodes],
        [&allocation.used, &salvaged.found],
        &commit,
    )? {
        return Ok(RepairResult::Impossible(
            "there is not enough free space for a second copy of the trees",
        ));
    }
    let dropped_nodes = dropped_nodes(checker, &salvaged);
    Ok(RepairResult::Repaired(Box::new(RepairSummary {
        notes,
        copied,
        salvaged: salvaged.leaves,
        surplus_blocks: salvaged.surplus_blocks,
        unconfirmed_leaves: salvaged.unconfirmed_leaves,
        dropped_nodes,
        given_up: given_up.clone(),
        dropped_snapshots: dropped_snapshots(checker, to_drop),
        lost,
        losses,
    })))
}

/// These snapshots, in words.
fn dropped_snapshots(
    checker: &Checker<'_>,
    to_drop: &BTreeSet<(TreeId, Generation)>,
) -> BTreeSet<String> {
    let of = |(id, made): &(TreeId, Generation)| {
        let item = checker.snapshots.of.get(id)?.snapshots.get(made)?;
        Some(shown(item, *made))
    };
    to_drop.iter().filter_map(of).collect()
}

/// The items of the trees of files, by inode.
fn gathered(items: ItemsByTree) -> GatheredTrees {
    let mut trees = GatheredTrees::new();
    for (id, items) in items {
        let tree = trees.entry(id).or_default();
        // Parts of an extended attribute follow it in key order.
        items.iter().for_each(|(key, value)| tree.add(*key, value, INODE_FIRST));
    }
    trees
}

/// All items that can be read after replay, those of leaves among them that only a damaged node led
/// to. Of the tree of subvolumes, only the latter.
fn readable_items(
    checker: &Checker<'_>,
    allocation: &Allocation,
) -> Result<(ItemsByTree, Salvaged), FsckError> {
    let mut trees = ItemsByTree::new();
    for tree in checker.trees.values() {
        let mut collector = ItemCollector { items: BTreeMap::new() };
        visit(&checker.reader, tree, &mut collector)?;
        trees.insert(tree.id, collector.items);
    }
    let salvaged = salvage::lost_leaves(checker, allocation, &mut trees);
    // What the log removed stays removed, also if it was salvaged.
    for tree in checker.trees.values() {
        let Some(items) = trees.get_mut(&tree.id) else { continue };
        for (key, change) in &tree.changes.items {
            if change.value.is_none() {
                items.remove(key);
            }
        }
    }
    Ok((trees, salvaged))
}

/// Why items that were found again may not be the newest, in words.
pub(crate) fn doubts(surplus_blocks: u64, unconfirmed_leaves: u64) -> Vec<String> {
    let doubts = [
        (surplus_blocks, "more blocks were found than were in use: removed files may be back"),
        (
            unconfirmed_leaves,
            "leaves were found that no bitmap and no other node shows in use: their items may be \
             older than the damaged ones",
        ),
    ];
    let there_are = doubts.into_iter().filter(|(count, _)| *count > 0);
    there_are.map(|(count, what)| format!("{count} {what}")).collect()
}

/// What is left of damaged trees.
pub(crate) struct Remains {
    /// Their items.
    pub(crate) trees: ItemsByTree,
    /// Whether they are all that there were.
    pub(crate) complete: bool,
    /// What may be wrong with them, in words.
    pub(crate) doubts: Vec<String>,
}

/// Gathers what a repair would work with.
pub(crate) fn remains(checker: &Checker<'_>) -> Result<Remains, FsckError> {
    let (mut trees, salvaged) = readable_items(checker, &allocation(checker))?;
    trees.retain(|id, _| checker.lost_nodes.iter().any(|lost| lost.concerns(*id)));
    let doubts = doubts(salvaged.surplus_blocks, salvaged.unconfirmed_leaves);
    Ok(Remains { trees, complete: salvaged.complete, doubts })
}

/// The losses of the unusable nodes whose items were not all found again.
fn dropped_nodes(checker: &Checker<'_>, salvaged: &Salvaged) -> BTreeMap<u64, String> {
    let mut dropped = BTreeMap::new();
    for lost in checker.lost_nodes.iter().filter(|_| !salvaged.complete) {
        let Some(block) = lost.block else { continue };
        let items = losses::items(lost.tree, lost.keys);
        let text = match salvaged.lost_leaves.contains_key(&block) {
            true if salvaged.older_versions.contains(&block) => {
                format!("an older version was used; newer changes are lost: {items}")
            }
            true => format!("dropped; lost with it: {items}"),
            false if lost.leaf().is_none() && salvaged.missing_blocks > 0 => {
                format!("dropped; not all nodes below it were found: {items}")
            }
            false => continue,
        };
        dropped.insert(block.0, text);
    }
    dropped
}

/// The most by which a repair raises counters; the repaired volume can be mounted.
const COUNTED_MAX: u64 = 2;

/// Why a repair refuses to rebuild the volume, as far as the passes show it: the volume stays as it
/// is then.
pub(crate) fn obstacle(checker: &Checker<'_>) -> Option<&'static str> {
    let superblock = &checker.superblock;
    let snapshots: usize = checker.snapshots.of.values().map(|of| of.snapshots.len()).sum();
    let lost = |tree| checker.lost_nodes.iter().any(|lost| lost.concerns(tree));
    let files_lost = checker.lost_nodes.iter().any(|lost| lost.tree.holds_files());
    let generation = superblock.generation.max(checker.counters.generation_max);
    let counters = [
        superblock.next_list.saturating_add(snapshots as u64),
        superblock.log_epoch,
        superblock.log_tail.sequence,
        superblock.next_tree.0,
        checker.trees.keys().chain(checker.subvolumes.keys()).map(|id| id.0).max().unwrap_or(0),
    ];
    if superblock.features.read_only_compatible != 0 {
        Some("the volume uses features that this program can only read")
    } else if checker.reader.blocks_present() < superblock.geometry.total_blocks {
        Some("the device is shorter than the volume")
    } else if counters.iter().any(|counter| *counter > COUNTER_WRITABLE_MAX - COUNTED_MAX)
        || generation.0 > GENERATION_WRITABLE_MAX - COUNTED_MAX
    {
        Some("a counter is at its end")
    } else if superblock.features.has_snapshots() && lost(TREE_SUBVOLUMES) {
        Some(
            "the tree that names the snapshots is damaged, and a repair would lose them; copy the \
             files out with `cairn fsck --extract`, and make a new volume",
        )
    } else if superblock.features.has_snapshots() && lost(TREE_DEAD) && files_lost {
        Some(
            "the dead lists of the snapshots are damaged together with files, so nothing shows \
             which nodes are only those of snapshots; copy the files out with `cairn fsck \
             --extract`, and make a new volume",
        )
    } else {
        None
    }
}

/// An id above those of all trees, also of those that are gone.
fn next_tree(checker: &Checker<'_>, trees: &GatheredTrees) -> TreeId {
    let known = trees.keys().chain(checker.trees.keys()).chain(checker.subvolumes.keys());
    let last = known.max().copied().unwrap_or(TREE_FILES);
    checker.superblock.next_tree.max(TreeId(last.0 + 1))
}

fn default_subvolume(checker: &Checker<'_>, subvolumes: &subvolumes::Subvolumes) -> TreeId {
    let default = checker.superblock.default_subvolume;
    let items = subvolumes.as_ref();
    let lives = items.and_then(|items| items.get(&default)).is_some_and(|item| !item.is_nameless());
    if lives { default } else { TREE_FILES }
}

/// A generation above all existing ones, with the parity of the slot that does not hold the current
/// superblock. Zeros may stand for a bitmap of the generation of mkfs: so it is above that, too.
fn next_generation(checker: &Checker<'_>, superblock_index: usize) -> Generation {
    let existing = checker.superblock.generation.max(checker.counters.generation_max);
    let next = existing.max(GENERATION_OF_MKFS).next();
    let wrong_slot = superblock_index < 2 && next.0 % 2 == superblock_index as u64;
    if wrong_slot { next.next() } else { next }
}
