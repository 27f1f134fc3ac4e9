//! What a repair makes of the subvolumes.
//!
//! - A subvolume is kept if anything of its tree is left, or if it has snapshots. Without an item
//!   it gets one.
//! - One that has lost its name stays so. Its items were being removed, so the repair leaves them
//!   all out. If a fork needs a snapshot of it, it is headless then, or else dying. One that has
//!   snapshots with names, or whose newest snapshot is damaged, comes back, and gets a name.
//! - Its home is a directory with an entry that names it: that in its item, or else the first. One
//!   without a home, or in a circle of subvolumes, moves to `lost+found` of the first subvolume.
//! - A fork may still have names of subvolumes of its origin. These are left out.
//! - The items state the homes; that of the first subvolume is always the same.
use super::gather::GatheredTrees;
use crate::checker::Checker;
use cairn_format::{
    COUNTER_WRITABLE_MAX, EntryTarget, FileType, Generation, InodeNumber, Key, SubvolumeItem,
    TREE_FILES, TreeId,
};
use std::collections::{BTreeMap, BTreeSet};

/// The items of the subvolumes; `None` if the volume has no tree for them.
pub(super) type Subvolumes = Option<BTreeMap<TreeId, SubvolumeItem>>;

/// The tree and the directory in which each subvolume has its name.
pub(super) type SubvolumeHomes = BTreeMap<TreeId, (TreeId, u64)>;

/// The items that are left, those among them that were `salvaged`. Takes the trees that are not to
/// be kept out of `trees`.
pub(super) fn found(
    checker: &Checker<'_>,
    salvaged: &BTreeMap<Key, Vec<u8>>,
    trees: &mut GatheredTrees,
) -> BTreeMap<TreeId, SubvolumeItem> {
    let mut items = checker.subvolumes.clone();
    for (key, value) in salvaged {
        let id = TreeId(key.inode);
        if *key == Key::subvolume(id)
            && can_be_kept(id)
            && let Ok(item) = SubvolumeItem::decode(value)
        {
            items.entry(id).or_insert(item);
        }
    }
    for (id, item) in &mut items {
        if checker.snapshots.has_names_in(*id) {
            give_name_to(item);
        }
    }
    let is_dying = |id: &TreeId| items.get(id).is_some_and(|item| item.is_nameless());
    let with_snapshots: BTreeSet<TreeId> = checker
        .snapshots
        .of
        .iter()
        .filter(|(id, of)| items.contains_key(id) && !of.snapshots.is_empty())
        .map(|(id, _)| *id)
        .collect();
    for &id in &with_snapshots {
        trees.entry(id).or_default();
    }
    trees.retain(|id, tree| {
        let has_any = !tree.inodes.is_empty() || with_snapshots.contains(id);
        *id == TREE_FILES || (has_any && !is_dying(id) && can_be_kept(*id))
    });
    items
}

/// Of a subvolume without a name the newest snapshot would have to show which blocks are in use. If
/// that is `damaged`, the subvolume comes back, empty: dead lists can show it then.
pub(super) fn bring_back(
    damaged: &[TreeId],
    found: &mut BTreeMap<TreeId, SubvolumeItem>,
    trees: &mut GatheredTrees,
) {
    for id in damaged {
        if let Some(item) = found.get_mut(id).filter(|item| item.is_nameless()) {
            give_name_to(item);
            trees.entry(*id).or_default();
        }
    }
}

/// It will have a name.
fn give_name_to(item: &mut SubvolumeItem) {
    (item.is_dying, item.is_headless) = (false, false);
    (item.cursor, item.dying_root) = (Key::MIN, None);
}

/// Whether a volume with this subvolume can still be mounted for writing.
fn can_be_kept(id: TreeId) -> bool {
    id.holds_files() && id.0 < COUNTER_WRITABLE_MAX
}

/// The home of each subvolume that has one.
pub(super) fn homes(
    items: &BTreeMap<TreeId, SubvolumeItem>,
    trees: &GatheredTrees,
) -> SubvolumeHomes {
    let mut homes = SubvolumeHomes::new();
    for (&id, tree) in trees {
        let names_others = items.get(&id).is_some_and(|item| item.names_others);
        let directories =
            tree.inodes.iter().filter(|(_, inode)| inode.file_type() == Some(FileType::Directory));
        for (&directory, inode) in directories {
            for entry in inode.entries.values() {
                let EntryTarget::Subvolume(named) = entry.target else { continue };
                let stated = items.get(&named).map(|item| (item.parent, item.directory.0));
                let believed = stated == Some((id, directory));
                let possible = believed || !names_others && !homes.contains_key(&named);
                if trees.contains_key(&named) && possible {
                    homes.insert(named, (id, directory));
                }
            }
        }
    }
    open_circles(&mut homes);
    homes
}

/// Takes one subvolume of each circle its home, so that it becomes one of the first subvolume.
fn open_circles(homes: &mut SubvolumeHomes) {
    let mut settled = BTreeSet::from([TREE_FILES]);
    for id in homes.keys().copied().collect::<Vec<_>>() {
        let (mut at, mut path) = (id, BTreeSet::new());
        while !settled.contains(&at)
            && let Some((parent, _)) = homes.get(&at)
        {
            if !path.insert(at) {
                homes.remove(&at);
                break;
            }
            at = *parent;
        }
        settled.extend(path);
    }
}

/// The items of the repaired volume, once all names stand where they remain. Adds an empty tree
/// for each dying subvolume.
pub(super) fn settled(
    checker: &Checker<'_>,
    found: BTreeMap<TreeId, SubvolumeItem>,
    trees: &mut GatheredTrees,
    has_snapshots: impl Fn(TreeId) -> bool,
    generation: Generation,
) -> Subvolumes {
    let superblock = &checker.superblock;
    if !superblock.features.has_subvolumes() {
        return None;
    }
    let first = SubvolumeItem::first(superblock);
    let invented = |id| {
        let uuid = invented_uuid(superblock.volume.0, id);
        SubvolumeItem { generation, uuid, ..first }
    };
    let mut items = BTreeMap::from([(TREE_FILES, first)]);
    for (&parent, tree) in trees.iter() {
        for (&directory, inode) in &tree.inodes {
            for entry in inode.entries.values() {
                let EntryTarget::Subvolume(id) = entry.target else { continue };
                let item = found.get(&id).copied().unwrap_or_else(|| invented(id));
                let directory = InodeNumber(directory);
                let made = item.generation.clamp(Generation(1), generation);
                items.insert(id, SubvolumeItem { parent, directory, generation: made, ..item });
            }
        }
    }
    // If 256 names with its hash are in one directory, it has none, and the check reports that.
    for &id in trees.keys() {
        items.entry(id).or_insert_with(|| invented(id));
    }
    let nameless = |(id, item): &(TreeId, SubvolumeItem)| item.is_nameless() && *id != TREE_FILES;
    for (id, item) in found.into_iter().filter(nameless) {
        let is_headless = has_snapshots(id);
        let item = SubvolumeItem {
            generation: item.generation.clamp(Generation(1), generation),
            is_dying: !is_headless,
            is_headless,
            cursor: Key::MIN,
            dying_root: None,
            ..item
        };
        items.insert(id, item);
        if !is_headless {
            trees.insert(id, Default::default());
        }
    }
    items.values_mut().for_each(|item| item.names_others = false);
    number(&mut items);
    Some(items)
}

/// Gives those a number that have none of their own.
fn number(items: &mut BTreeMap<TreeId, SubvolumeItem>) {
    let (mut used, mut without) = (BTreeSet::new(), Vec::new());
    for (&id, item) in items.iter() {
        if !used.insert(item.number) {
            without.push(id);
        }
    }
    let free: Vec<u32> =
        (0..).filter(|number| !used.contains(number)).take(without.len()).collect();
    for (id, number) in without.into_iter().zip(free) {
        items.entry(id).and_modify(|item| item.number = number);
    }
}

/// An identity that no other subvolume of the volume has.
fn invented_uuid(mut uuid: [u8; 16], id: TreeId) -> [u8; 16] {
    for (byte, other) in uuid.iter_mut().zip(id.0.to_be_bytes().into_iter().rev()) {
        *byte ^= other;
    }
    uuid
}
