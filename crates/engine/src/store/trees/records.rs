//! Changes of the tree of subvolumes, under its lock, and what is known of all of its items.
use super::relations::Relations;
use super::snapshot_names::Named;
use super::{HIDDEN_SLOT, Opened, Place, RecordedTree, Subvolume, Trees};
use crate::{Error, InodeId, Result};
use cairn_btree::{Change, Tree, TreeError};
use cairn_environment::Rank;
use cairn_environment::atomic::Ordering;
use cairn_environment::lock::{Mutex, MutexGuard};
use cairn_format::{
    COUNTER_WRITABLE_MAX, DeadListItem, Generation, InodeNumber, ItemKind, Key, Origin,
    SnapshotItem, SubvolumeItem, Superblock, TREE_DEAD, TREE_FILES, TREE_SUBVOLUMES, TreeId,
};
use std::collections::HashSet;

/// What a superblock says of subvolumes.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) has_subvolumes: bool,
    pub(crate) has_snapshots: bool,
    pub(crate) has_forks: bool,
    pub(crate) has_joining: bool,
    pub(crate) next_list: u64,
    pub(crate) next_tree: TreeId,
    pub(crate) default_subvolume: TreeId,
}

/// The numbers of subvolumes that were in use since the volume was opened.
pub(super) struct Numbers {
    used: Vec<u64>,
    /// All below are used.
    free_from: u32,
}

impl Numbers {
    fn new(used: impl Iterator<Item = u32>) -> Self {
        let words = (InodeId::SLOT_END as usize).div_ceil(64);
        let mut numbers = Self { used: vec![0; words], free_from: 1 };
        used.for_each(|number| numbers.take(number));
        numbers
    }

    fn take(&mut self, number: u32) {
        self.used[number as usize / 64] |= 1 << (number % 64);
    }

    /// The lowest number that is free, which is used from now on.
    fn take_free(&mut self) -> Option<u32> {
        let is_used = |number: u32| self.used[number as usize / 64] >> (number % 64) & 1 == 1;
        let number = (self.free_from..InodeId::SLOT_END).find(|number| !is_used(*number))?;
        self.free_from = number + 1;
        self.take(number);
        Some(number)
    }
}

/// The tree of subvolumes, locked. Its holder has joined, or changes nothing.
pub(crate) struct Records<'a> {
    trees: &'a Trees,
    _lock: MutexGuard<'a, ()>,
}

impl<'a> Records<'a> {
    pub(super) fn new(trees: &'a Trees, lock: MutexGuard<'a, ()>) -> Self {
        Self { trees, _lock: lock }
    }

    pub(in crate::store) fn tree(&self) -> Result<&'a Tree> {
        let records = self.trees.records.get();
        Ok(&records.ok_or_else(|| self.trees.damaged("there are no subvolumes".into()))?.tree)
    }

    /// The item of a subvolume that exists.
    pub(in crate::store) fn item(&self, id: TreeId) -> Result<SubvolumeItem> {
        self.trees.item(id)
    }

    /// The item of a subvolume, if there is one.
    pub(in crate::store) fn find(&self, id: TreeId) -> Result<Option<SubvolumeItem>> {
        self.trees.item_if_there(id)
    }

    /// Whether names of subvolumes stand in `id`.
    pub(in crate::store) fn any_named_in(&self, id: TreeId) -> Result<bool> {
        self.look(|relations| relations.directories(id).next().is_some())
    }

    /// The directories of `id` in which names of subvolumes stand.
    pub(in crate::store) fn directories_with_names(&self, id: TreeId) -> Result<Vec<InodeNumber>> {
        self.look(|relations| {
            let mut directories: Vec<_> = relations.directories(id).collect();
            directories.dedup();
            directories
        })
    }

    /// Whether entries in `id` may name subvolumes: such as stand in it, or, in a fork, in what it
    /// came from.
    pub(in crate::store) fn may_name(&self, id: TreeId) -> Result<bool> {
        let has_foreign = self.find(id)?.is_some_and(|item| item.names_others);
        Ok(has_foreign || self.any_named_in(id)?)
    }

    /// Whether there is a fork of this snapshot.
    pub(in crate::store) fn any_fork_of(&self, origin: Origin) -> Result<bool> {
        self.look(|relations| relations.any_fork_of(origin))
    }

    /// The fork of this snapshot, if there is exactly one.
    pub(in crate::store) fn only_fork_of(&self, origin: Origin) -> Result<Option<TreeId>> {
        self.look(|relations| relations.only_fork_of(origin))
    }

    /// The transactions that made those snapshots of `id` that have forks.
    pub(in crate::store) fn forked_snapshots(&self, id: TreeId) -> Result<HashSet<u64>> {
        self.look(|relations| relations.forked(id).map(|made| made.0).collect())
    }

    /// Whether two subvolumes have come from the same one that is no fork.
    pub(in crate::store) fn are_of_one_family(&self, ids: [TreeId; 2]) -> Result<bool> {
        self.look(|relations| relations.family(ids[0]) == relations.family(ids[1]))
    }

    /// Reads the items unless what they say together is known.
    pub(in crate::store) fn know_relations(&self) -> Result<()> {
        self.look(|_| ())
    }

    fn look<T>(&self, look: impl Fn(&Relations) -> T) -> Result<T> {
        // Not elsewhere: a tree that somebody has damaged on purpose may have an item twice.
        #[cfg(test)]
        if let Ok(read) = self.read_relations() {
            self.trees.relations.look(|known| known.expect_same(&read));
        }
        loop {
            if let Some(found) = self.trees.relations.look(&look) {
                return Ok(found);
            }
            self.trees.relations.note_all(self.read_relations()?);
        }
    }

    fn read_relations(&self) -> Result<Relations> {
        let mut relations = Relations::default();
        for item in self.trees.subvolume_items() {
            let (id, item) = item?;
            relations.add(id, &item);
        }
        Ok(relations)
    }

    /// The tree has the item `after` of a subvolume, or none, in the place of what it returned.
    fn note_item(
        &self,
        id: TreeId,
        returned: std::result::Result<Option<Vec<u8>>, TreeError>,
        after: Option<&SubvolumeItem>,
    ) -> Result<()> {
        let decode = |value: Option<Vec<u8>>| {
            Ok(value.map(|value| SubvolumeItem::decode(&value)).transpose()?)
        };
        let before = returned.map_err(Error::from).and_then(decode);
        let change = before.as_ref().map(|before| [before.as_ref(), after]);
        self.trees.relations.note_change(id, change.ok());
        before.map(drop)
    }

    /// A number that no subvolume has had since the volume was opened.
    pub(in crate::store) fn take_number(&self) -> Result<u32> {
        let is_known = self.trees.numbers.lock().is_some();
        if !is_known {
            // Those that were removed since then have no item any more.
            let mut used: Vec<u32> = self.trees.slots.lock().values().copied().collect();
            used.extend([0, HIDDEN_SLOT]);
            used.extend(self.trees.known_slots());
            for item in self.trees.subvolume_items() {
                let (id, item) = item?;
                used.push(item.number);
                for snapshot in self.trees.all_snapshot_items(id) {
                    used.push(snapshot?.1.number);
                }
            }
            *self.trees.numbers.lock() = Some(Numbers::new(used.into_iter()));
        }
        let mut numbers = self.trees.numbers.lock();
        numbers.as_mut().and_then(Numbers::take_free).ok_or(Error::TooManySubvolumes)
    }

    /// An id that no tree has had.
    pub(in crate::store) fn take_id(&self) -> Result<TreeId> {
        let next = self.trees.next_tree.load(Ordering::Acquire);
        if next >= COUNTER_WRITABLE_MAX {
            return Err(Error::NoSpace);
        }
        self.trees.next_tree.store(next + 1, Ordering::Release);
        Ok(TreeId(next))
    }

    /// Inserts or replaces the item of a subvolume. The first one makes the tree.
    pub(in crate::store) fn put(
        &self,
        change: &Change<'_>,
        superblock: &Superblock,
        id: TreeId,
        item: &SubvolumeItem,
    ) -> Result<()> {
        self.need_tree(change, superblock)?;
        let returned = self.tree()?.insert(change, Key::subvolume(id), &item.encode());
        self.note_item(id, returned, Some(item))
    }

    /// Makes the tree of subvolumes unless it is there.
    fn need_tree(&self, change: &Change<'_>, superblock: &Superblock) -> Result<()> {
        if self.trees.records.get().is_none() {
            let tree = self.make_tree(change, TREE_SUBVOLUMES)?;
            let first = SubvolumeItem::first(superblock);
            let returned = tree.insert(change, Key::subvolume(TREE_FILES), &first.encode());
            self.note_item(TREE_FILES, returned, Some(&first))?;
            self.trees.records.get_or_init(|| RecordedTree::new(tree, None));
        }
        Ok(())
    }

    /// At the cut: makes a snapshot of the subvolume in `slot`, which `item` describes but for the
    /// root, and a dead list. The first snapshot of all makes the tree of dead runs.
    pub(in crate::store) fn put_snapshot(
        &self,
        change: &Change<'_>,
        superblock: &Superblock,
        slot: u32,
        item: SnapshotItem,
    ) -> Result<()> {
        let trees = self.trees;
        self.need_tree(change, superblock)?;
        if trees.dead.get().is_none() {
            let tree = self.make_tree(change, TREE_DEAD)?;
            trees.dead.get_or_init(|| RecordedTree::new(tree, None));
        }
        let subvolume = trees.in_slot(slot).ok_or(Error::NotFound)?;
        let (id, made) = (subvolume.id, change.generation);
        let item = SnapshotItem { root: subvolume.tree().root(), ..item };
        let snapshot = Key::of_subvolume(id, ItemKind::Snapshot, made);
        let insert = || {
            self.tree()?.insert(change, snapshot, &item.encode())?;
            self.begin_list(change, id, made)
        };
        let list = if item.is_hidden {
            insert()?
        } else {
            let snapshot = Named { subvolume: id, made, name: &item.name };
            trees.snapshot_names.while_making(snapshot, insert)?
        };
        let boundary = subvolume.tree().boundary();
        boundary.set_list(list);
        boundary.set_newest(made);
        Ok(())
    }

    /// Begins a dead list of the subvolume `id`; its number.
    pub(in crate::store) fn begin_list(
        &self,
        change: &Change<'_>,
        id: TreeId,
        since: Generation,
    ) -> Result<u64> {
        let list = self.trees.next_list.fetch_add(1, Ordering::AcqRel);
        let key = Key::of_subvolume(id, ItemKind::DeadList, since);
        self.tree()?.insert(change, key, &DeadListItem { list }.encode())?;
        Ok(list)
    }

    /// Removes the item of a subvolume.
    pub(in crate::store) fn remove(&self, change: &Change<'_>, id: TreeId) -> Result<()> {
        let returned = self.tree()?.remove(change, &Key::subvolume(id));
        self.note_item(id, returned, None)?;
        self.trees.lines.note_ended(id);
        self.trees.snapshot_names.note_ended(id);
        self.trees.note_move();
        Ok(())
    }

    /// A snapshot loses its name: `delete` does that.
    pub(in crate::store) fn while_deleting<T>(
        &self,
        snapshot: Named<'_>,
        delete: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let deleted = self.trees.snapshot_names.while_deleting(snapshot, delete);
        self.trees.note_move();
        deleted
    }

    /// A new tree.
    pub(in crate::store) fn make_tree(&self, change: &Change<'_>, id: TreeId) -> Result<Tree> {
        let Trees { cache, space, .. } = self.trees;
        Ok(Tree::create(cache.clone(), space.clone(), id, change)?)
    }

    /// The new subvolume `id`, with the number `slot`, has this tree.
    pub(in crate::store) fn add_open(&self, id: TreeId, slot: u32, tree: Tree, place: Place) {
        let subvolume = self.trees.put_in_slot(id, slot);
        let (tree, place) = (RecordedTree::new(tree, None), Mutex::new(Rank::LEAF, place));
        subvolume.files.get_or_init(|| Opened { tree, place });
        self.trees.opened.lock().insert(slot);
        self.trees.note_move();
    }

    /// The cut will make the fork `id`, which is not to be seen until then.
    pub(in crate::store) fn note_forming(&self, id: TreeId) {
        self.trees.forming.lock().insert(id.0);
        self.trees.has_forks.store(true, Ordering::Release);
        self.trees.has_joining.store(true, Ordering::Release);
    }

    /// The fork `id` has its place in the line that begins with `first`, and may be seen.
    pub(in crate::store) fn note_continued(&self, id: TreeId, first: TreeId) {
        self.trees.lines.note_continued(id, first);
        self.trees.note_formed(id);
    }

    /// The tree of a subvolume is gone.
    pub(in crate::store) fn note_ended(&self, subvolume: &Subvolume) {
        self.trees.opened.lock().remove(&subvolume.slot);
        self.trees.ended.lock().push(subvolume.id);
    }

    /// A mount shows `id` if it is not told which.
    pub(in crate::store) fn set_default(&self, id: TreeId) {
        if self.trees.default_subvolume.swap(id.0, Ordering::AcqRel) != id.0 {
            self.trees.has_new_setting.store(true, Ordering::Release);
        }
    }
}
