//! Turns the gathered items into trees of files without contradictions. Whatever has a name or data
//! is kept if possible; inodes without a name move to `lost+found` of their subvolume.
//!
//! 1. Attributes: an inode without its item gets one; impossible fields become possible ones.
//! 2. Contents: extents (`extents`), extended attributes, targets of links.
//! 3. Names: each leads to an inode, is in a slot of its hash, and occurs once; a directory has
//!    one.
//! 4. Inodes that are not reachable from the root and are no orphans move to `lost+found`, and so
//!    do subvolumes without a name.
//! 5. Counts: links, entries, sizes, blocks, parents.
use super::gather::{Attribute, GatheredInode, GatheredItems, GatheredTrees, invented_item};
use super::subvolumes::SubvolumeHomes;
use crate::object::ObjectId;
use cairn_format::{
    DirectoryEntry, EntryTarget, ExtentKind, FileType, Generation, INODE_FIRST, INODE_NUMBER_END,
    INODE_ROOT, InodeItem, InodeNumber, OrphanKind, TREE_FILES, Timestamp, TreeId, XattrItem,
    blocks_for_bytes, hash_name, name_slot_range,
};
use std::collections::{BTreeMap, BTreeSet};

const NANOSECONDS_MAX: u32 = 999_999_999;
const LOST_AND_FOUND: &str = "lost+found";

/// Constants of the repaired volume.
pub(super) struct RepairRules {
    pub(super) hash_seed: [u8; 16],
    /// The repair's transaction.
    pub(super) generation: Generation,
    /// Whether extents may have been written after they were allocated.
    pub(super) has_long_extents: bool,
    /// Whether files may note a directory of theirs.
    pub(super) has_parents: bool,
}

/// Steps 1 to 5, after the extents are sorted out. Each subvolume may have a name only in its home.
/// Returns how many inodes and subvolumes moved to each `lost+found`.
pub(super) fn amend(
    trees: &mut GatheredTrees,
    rules: &RepairRules,
    find_homes: impl FnOnce(&GatheredTrees) -> SubvolumeHomes,
    next_inode: &mut u64,
) -> BTreeMap<ObjectId, u64> {
    for tree in trees.values_mut() {
        attributes(tree, rules);
        tree.inodes.iter_mut().for_each(|(_, inode)| contents(inode, rules));
        let last = tree.inodes.last_key_value().map_or(0, |(&last, _)| last);
        *next_inode = (*next_inode).max(last + 1);
    }
    let homes = find_homes(trees);
    let (mut rescued, mut named) = (BTreeMap::new(), BTreeSet::from([TREE_FILES]));
    let mut count = |subvolume, home: Option<u64>, moved: usize| {
        if let Some(inode) = home.map(InodeNumber) {
            *rescued.entry(ObjectId { subvolume, inode }).or_default() += moved as u64;
        }
    };
    for (&id, tree) in trees.iter_mut() {
        let may_stand = |subvolume: TreeId, directory: u64| {
            homes.get(&subvolume) == Some(&(id, directory)) && named.insert(subvolume)
        };
        names(tree, rules, may_stand);
        let lost = unreachable(tree);
        count(id, rescue(tree, &lost, rules, next_inode), lost.len());
    }
    let unnamed: Vec<TreeId> = trees.keys().filter(|id| !named.contains(id)).copied().collect();
    if let Some(first) = trees.get_mut(&TREE_FILES) {
        let home = rescue_subvolumes(first, &unnamed, rules, next_inode);
        count(TREE_FILES, home, unnamed.len());
    }
    for tree in trees.values_mut() {
        counts(tree);
        orphans(tree);
    }
    rescued
}

fn attributes(gathered: &mut GatheredItems, rules: &RepairRules) {
    gathered.inodes.entry(INODE_ROOT.0).or_default();
    for (&number, inode) in &mut gathered.inodes {
        if number == INODE_ROOT.0 && inode.file_type() != Some(FileType::Directory) {
            inode.item = Some(invented_item(FileType::Directory, 0o755, rules.generation));
        }
        let Some(file_type) = inode.file_type() else { continue };
        let mut item = inode.item.unwrap_or_else(|| {
            let end = inode.extents.last_key_value().map_or(0, |(block, extent)| {
                (block + extent.blocks) * cairn_format::BLOCK_SIZE as u64
            });
            let permissions = if file_type == FileType::Directory { 0o700 } else { 0o600 };
            InodeItem { size: end, ..invented_item(file_type, permissions, rules.generation) }
        });
        sanitise(&mut item, file_type, rules);
        inode.item = Some(item);
    }
    gathered.inodes.retain(|_, inode| inode.can_be_kept());
}

fn sanitise(item: &mut InodeItem, file_type: FileType, rules: &RepairRules) {
    item.generation = item.generation.clamp(Generation(1), rules.generation);
    for time in [&mut item.accessed, &mut item.modified, &mut item.changed, &mut item.created] {
        *time = Timestamp { nanoseconds: time.nanoseconds.min(NANOSECONDS_MAX), ..*time };
    }
    item.flags = 0;
    item.mode &= InodeItem::MODE_BITS;
    if !matches!(file_type, FileType::BlockDevice | FileType::CharacterDevice) {
        item.device = 0;
    }
    if file_type != FileType::Directory {
        item.entries = 0;
        if !rules.has_parents || item.parent >= INODE_NUMBER_END {
            item.parent = 0;
        }
    }
    if !matches!(file_type, FileType::Regular | FileType::Directory | FileType::Symlink) {
        item.size = 0;
    }
}

fn contents(inode: &mut GatheredInode, rules: &RepairRules) {
    let file_type = inode.file_type();
    if file_type != Some(FileType::Directory) {
        inode.entries.clear();
    }
    if file_type != Some(FileType::Regular) {
        inode.extents.clear();
    }
    match inode.whole_target().filter(|_| file_type == Some(FileType::Symlink)) {
        Some(target) => {
            let parts = target.chunks(cairn_format::SYMLINK_PART_BYTES).map(<[u8]>::to_vec);
            inode.target = (0..).zip(parts).collect();
        }
        None => inode.target.clear(),
    }
    inode.extents.values_mut().for_each(|extent| {
        extent.generation = extent.generation.clamp(Generation(1), rules.generation);
        extent.written = match extent.kind {
            ExtentKind::Data if rules.has_long_extents => {
                extent.written.clamp(extent.generation, rules.generation)
            }
            _ => extent.generation,
        };
    });
    xattrs(inode, rules);
}

/// Keeps each complete attribute, once, in a slot of its name's hash; in its own slot if that is
/// one of them.
fn xattrs(inode: &mut GatheredInode, rules: &RepairRules) {
    let mut known = BTreeSet::new();
    let slots_of =
        |attribute: &Attribute| name_slot_range(hash_name(&rules.hash_seed, &attribute.item.name));
    let mut misplaced = Vec::new();
    for (slot, mut attribute) in std::mem::take(&mut inode.xattrs) {
        let needed = XattrItem::parts(attribute.item.value_bytes as usize) as u64;
        attribute.parts.retain(|part, _| (1..=needed).contains(part));
        if !attribute.is_complete() {
            continue;
        }
        if !slots_of(&attribute).contains(&slot) {
            misplaced.push(attribute);
        } else if known.insert(attribute.item.name.clone()) {
            inode.xattrs.insert(slot, attribute);
        }
    }
    for attribute in misplaced {
        let slot = slots_of(&attribute).find(|slot| !inode.xattrs.contains_key(slot));
        if let Some(slot) = slot.filter(|_| known.insert(attribute.item.name.clone())) {
            inode.xattrs.insert(slot, attribute);
        }
    }
}

/// Step 3. `may_stand` says whether a subvolume may have its name in a directory, once.
fn names(
    gathered: &mut GatheredItems,
    rules: &RepairRules,
    mut may_stand: impl FnMut(TreeId, u64) -> bool,
) {
    let types: BTreeMap<u64, FileType> = gathered
        .inodes
        .iter()
        .filter_map(|(&number, inode)| Some((number, inode.file_type()?)))
        .collect();
    let parents: BTreeMap<u64, u64> = gathered
        .inodes
        .iter()
        .filter_map(|(&number, inode)| Some((number, inode.item?.parent)))
        .collect();
    // A directory keeps its name in the directory that its item names as parent, or else the first.
    let mut homes: BTreeMap<u64, u64> = BTreeMap::new();
    for (&directory, inode) in &gathered.inodes {
        for child in inode
            .entries
            .values()
            .filter_map(|entry| entry.target.inode().map(|child| child.0))
            .filter(|child| types.get(child) == Some(&FileType::Directory))
        {
            let believed = parents.get(&child) == Some(&directory);
            if believed || !homes.contains_key(&child) {
                homes.insert(child, directory);
            }
        }
    }
    let mut named = BTreeSet::new();
    for (&directory, inode) in &mut gathered.inodes {
        let entries = std::mem::take(&mut inode.entries);
        let mut known = BTreeSet::new();
        for mut entry in entries.into_values() {
            if entry.name == b"." || entry.name == b".." || known.contains(&entry.name) {
                continue;
            }
            let child = match entry.target {
                EntryTarget::Inode(child, _) => child,
                EntryTarget::Subvolume(subvolume) => {
                    if may_stand(subvolume, directory) {
                        known.insert(entry.name.clone());
                        insert_entry(inode, entry, rules);
                    }
                    continue;
                }
            };
            let Some(&file_type) = types.get(&child.0) else { continue };
            let is_directory = file_type == FileType::Directory;
            let at_home = homes.get(&child.0) == Some(&directory);
            if child == INODE_ROOT || (is_directory && (!at_home || !named.insert(child))) {
                continue;
            }
            entry.target = EntryTarget::Inode(child, file_type);
            known.insert(entry.name.clone());
            insert_entry(inode, entry, rules);
        }
    }
}

/// Puts a name into the first free slot of its hash. Returns whether there was one.
fn insert_entry(inode: &mut GatheredInode, entry: DirectoryEntry, rules: &RepairRules) -> bool {
    let slot = name_slot_range(hash_name(&rules.hash_seed, &entry.name))
        .find(|slot| !inode.entries.contains_key(slot));
    let Some(slot) = slot else { return false };
    inode.entries.insert(slot, entry);
    true
}

/// Step 4, first half: inodes that need a new name. A circle of directories is opened at its lowest
/// inode number.
fn unreachable(gathered: &mut GatheredItems) -> Vec<u64> {
    let mut names: BTreeMap<u64, u64> = BTreeMap::new();
    for inode in gathered.inodes.values() {
        let children = inode.entries.values().filter_map(|entry| entry.target.inode());
        children.for_each(|child| *names.entry(child.0).or_default() += 1);
    }
    let is_orphan = |number: &u64| gathered.orphans.get(number) == Some(&OrphanKind::Remove);
    let unnamed = gathered
        .inodes
        .keys()
        .filter(|number| **number != INODE_ROOT.0 && !names.contains_key(number));
    let mut lost: Vec<u64> = unnamed.filter(|number| !is_orphan(number)).copied().collect();
    let unnamed_orphans: Vec<u64> = gathered
        .inodes
        .keys()
        .filter(|number| !names.contains_key(number) && is_orphan(number))
        .copied()
        .collect();
    let mut reached = BTreeSet::new();
    for start in [INODE_ROOT.0].into_iter().chain(lost.iter().copied()).chain(unnamed_orphans) {
        reach(gathered, start, &mut reached);
    }
    let circles: Vec<u64> =
        gathered.inodes.keys().filter(|number| !reached.contains(number)).copied().collect();
    for number in circles {
        if reached.contains(&number) {
            continue;
        }
        let is_other = |entry: &DirectoryEntry| entry.target.inode() != Some(InodeNumber(number));
        for inode in gathered.inodes.values_mut() {
            inode.entries.retain(|_, entry| is_other(entry));
        }
        lost.push(number);
        reach(gathered, number, &mut reached);
    }
    lost
}

/// Adds everything reachable from `start`.
fn reach(gathered: &GatheredItems, start: u64, reached: &mut BTreeSet<u64>) {
    let mut todo = vec![start];
    while let Some(number) = todo.pop() {
        if reached.insert(number)
            && let Some(inode) = gathered.inodes.get(&number)
        {
            let children = inode.entries.values().filter_map(|entry| entry.target.inode());
            todo.extend(children.map(|child| child.0));
        }
    }
}

/// Step 4, second half. Returns the directory, if there is anything to move.
fn rescue(
    gathered: &mut GatheredItems,
    lost: &[u64],
    rules: &RepairRules,
    next_inode: &mut u64,
) -> Option<u64> {
    if lost.is_empty() {
        return None;
    }
    let home = lost_and_found(gathered, rules, next_inode);
    for &number in lost {
        let Some(file_type) = gathered.inodes.get(&number).and_then(GatheredInode::file_type)
        else {
            continue;
        };
        gathered.orphans.remove(&number);
        let target = EntryTarget::Inode(InodeNumber(number), file_type);
        name_in(gathered, home, target, &format!("#{number}"), rules);
        if let Some(item) = gathered.inodes.get_mut(&number).and_then(|inode| inode.item.as_mut())
            && rules.has_parents
        {
            item.parent = home;
        }
    }
    Some(home)
}

/// As [`rescue`], for subvolumes.
fn rescue_subvolumes(
    first: &mut GatheredItems,
    unnamed: &[TreeId],
    rules: &RepairRules,
    next_inode: &mut u64,
) -> Option<u64> {
    if unnamed.is_empty() {
        return None;
    }
    let home = lost_and_found(first, rules, next_inode);
    for &id in unnamed {
        name_in(first, home, EntryTarget::Subvolume(id), &format!("#subvolume-{id}"), rules);
    }
    Some(home)
}

/// Gives something this name in a directory, or a name like it.
fn name_in(
    gathered: &mut GatheredItems,
    directory: u64,
    target: EntryTarget,
    wanted: &str,
    rules: &RepairRules,
) {
    let Some(directory) = gathered.inodes.get_mut(&directory) else { return };
    let free =
        (0..).map(
            |attempt| {
                if attempt == 0 { wanted.to_owned() } else { format!("{wanted}.{attempt}") }
            },
        );
    for name in free.take(1000) {
        let taken = directory.entries.values().any(|entry| entry.name == name.as_bytes());
        let entry = DirectoryEntry { target, name: name.into_bytes() };
        if !taken && insert_entry(directory, entry, rules) {
            break;
        }
    }
}

/// The directory for inodes without a name. Made if it does not exist.
fn lost_and_found(gathered: &mut GatheredItems, rules: &RepairRules, next_inode: &mut u64) -> u64 {
    let mut name = LOST_AND_FOUND.to_owned();
    while let Some(root) = gathered.inodes.get(&INODE_ROOT.0) {
        match root.entries.values().find(|entry| entry.name == name.as_bytes()) {
            Some(DirectoryEntry {
                target: EntryTarget::Inode(home, FileType::Directory), ..
            }) => {
                return home.0;
            }
            Some(_) => name.push('+'),
            None => break,
        }
    }
    // If all numbers are taken, use one that no inode has.
    let number = match *next_inode {
        INODE_NUMBER_END.. => (INODE_FIRST..)
            .find(|number| !gathered.inodes.contains_key(number))
            .unwrap_or(INODE_FIRST),
        next => next,
    };
    *next_inode = (*next_inode).max(number + 1);
    let item = InodeItem {
        parent: INODE_ROOT.0,
        ..invented_item(FileType::Directory, 0o700, rules.generation)
    };
    gathered.inodes.insert(number, GatheredInode { item: Some(item), ..GatheredInode::default() });
    if let Some(root) = gathered.inodes.get_mut(&INODE_ROOT.0) {
        let entry = DirectoryEntry {
            target: EntryTarget::Inode(InodeNumber(number), FileType::Directory),
            name: name.into_bytes(),
        };
        // If 256 names with this hash are in one directory, the inode stays without a name, and the
        // check after the repair reports that.
        insert_entry(root, entry, rules);
    }
    number
}

/// Step 5.
fn counts(gathered: &mut GatheredItems) {
    let mut links: BTreeMap<u64, u32> = BTreeMap::new();
    let mut parents: BTreeMap<u64, u64> = BTreeMap::from([(INODE_ROOT.0, INODE_ROOT.0)]);
    for (&directory, inode) in &gathered.inodes {
        for child in inode.entries.values().filter_map(|entry| entry.target.inode()) {
            let count = links.entry(child.0).or_default();
            *count = count.saturating_add(1);
            parents.insert(child.0, directory);
        }
    }
    for (number, inode) in &mut gathered.inodes {
        let (blocks, entries) =
            (inode.extents.values().map(|extent| extent.blocks).sum(), inode.entries.len() as u64);
        let entry_types = inode.entries.values().map(|entry| entry.target.file_type());
        let subdirectories =
            entry_types.filter(|file_type| *file_type == FileType::Directory).count() as u32;
        let names_bytes = inode.entries.values().map(|entry| entry.name.len() as u64).sum();
        let target_bytes = inode.target.values().map(|part| part.len() as u64).sum();
        let file_type = inode.file_type();
        let Some(item) = &mut inode.item else { continue };
        let named = links.get(number).copied().unwrap_or(0);
        item.blocks = blocks;
        item.links = named;
        match file_type {
            Some(FileType::Directory) => {
                item.links =
                    if named > 0 || *number == INODE_ROOT.0 { 2 + subdirectories } else { 0 };
                (item.size, item.entries) = (names_bytes, entries);
                item.parent = parents.get(number).copied().unwrap_or(item.parent);
            }
            Some(FileType::Symlink) => item.size = target_bytes,
            _ => {}
        }
    }
}

/// Makes an orphan item for each inode without a name and each file with blocks beyond its end, and
/// no other.
fn orphans(gathered: &mut GatheredItems) {
    let before = std::mem::take(&mut gathered.orphans);
    for (&number, inode) in &gathered.inodes {
        let Some(item) = &inode.item else { continue };
        let data_end = inode.extents.iter().rfind(|(_, extent)| extent.kind == ExtentKind::Data);
        let behind_end = data_end
            .is_some_and(|(block, extent)| block + extent.blocks > blocks_for_bytes(item.size));
        let was_cut = before.get(&number) == Some(&OrphanKind::Truncate)
            && inode.file_type() == Some(FileType::Regular);
        if item.links == 0 {
            gathered.orphans.insert(number, OrphanKind::Remove);
        } else if behind_end || was_cut {
            gathered.orphans.insert(number, OrphanKind::Truncate);
        }
    }
}
