//! Making subvolumes, moving their names, removing them: what changes the tree of subvolumes.
//!
//! The log does not know that tree. So an operation that changes it beside items of files needs a
//! commit: its items are not replayed without the superblock that has the tree's (the log calls
//! this [`Batch::need_commit`](cairn_log::Batch::need_commit)).
//!
//! A subvolume is removed in three steps, with a commit after the first:
//! 1. Its name goes, its item says *dying*, and no operation may join for it any more. *A crash
//!    before the superblock: nothing has happened. After it: the next mount goes on.*
//! 2. Its items go, some at a time. They are not logged: what a crash undoes, the next mount does
//!    again.
//! 3. Its tree, its item and its root item go.
//!
//! Of one that has snapshots or is a fork, steps 2 and 3 are those of `lineage_end.rs`.
//!
//! The commit after step 1 waits for operations that joined before, so from step 2 on nobody else
//! changes the tree.
use super::Store;
use super::lineage_end::Ending;
use super::operation::{BATCH_ITEMS, Effort, Operation};
use super::trees::{Place, Records, Subvolume};
use crate::types::now_ns;
use crate::{Error, InodeId, Result};
use cairn_btree::Tree;
use cairn_environment::random;
use cairn_format::{
    Extent, FormatError, InodeItem, ItemKind, Key, Structure, SubvolumeItem, TreeId,
};
use std::collections::HashSet;

/// What the tree of subvolumes says of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SubvolumeInfo {
    /// Its id.
    pub id: u64,
    /// Identity, random.
    pub uuid: [u8; 16],
    /// The subvolume in which its name stands; its own for the first one.
    pub parent: u64,
    /// Transaction that made it; 0 for the first one.
    pub generation: u64,
    /// When it was made, in nanoseconds since 1970.
    pub created_ns: u64,
    /// Whether a mount shows it if it is not told which.
    pub is_default: bool,
    /// Its directory has no name any more, and its content is being removed.
    pub is_dying: bool,
    /// It began as a fork.
    pub is_fork: bool,
    /// It is a fork of this subvolume's snapshot that this transaction made. Once nothing but it is
    /// left of that, it is one of what that was a fork of, or has no origin any more.
    pub origin: Option<(u64, u64)>,
    /// It is a fork, and names of its origin's subvolumes stand in it, which were to be removed
    /// before it was shown. They are hidden, but sizes and link counts of directories have them.
    pub hides_names: bool,
    /// It is a fork that a [rollback](crate::Volume::rollback) has put into the place of an earlier
    /// subvolume, and shows the snapshots of that, too.
    pub continues: bool,
}

impl Store {
    /// As [`Store::begin`]; the operation may also make one subvolume, or change the item of one.
    pub(crate) fn begin_for_subvolume(
        &self,
        inode: InodeId,
        items: u64,
        effort: Effort,
    ) -> Result<Operation<'_>> {
        // The tree of subvolumes may have to be made, too, with two items.
        let nodes = || 2 + Tree::worst_case_nodes(2, self.trees.records_height());
        self.begin_with(inode, items, 0, effort, nodes)
    }

    /// Shows the subvolume `id` at the root of later mounts.
    pub(crate) fn set_default_subvolume(&self, id: u64) -> Result<()> {
        self.check_writable()?;
        {
            // Joined, so that the cut comes before it or after it.
            let _operation = self.begin_for_subvolume(InodeId::ROOT, 0, Effort::Name)?;
            let records = self.trees.lock_records();
            let item = records.find(TreeId(id))?.ok_or(Error::NotFound)?;
            if item.is_nameless() {
                return Err(Error::NotFound);
            }
            records.set_default(TreeId(id));
        }
        self.commit()
    }

    /// The root directories of the subvolumes that have lost their names before the volume was
    /// opened, and of which something is to be removed, or cannot be read.
    pub(crate) fn dying_subvolumes(&self) -> Vec<InodeId> {
        // A cut that asks for them does not have to read them. After damage it tries again.
        let _ = self.trees.lock_records().know_relations();
        let records = self.trees.readable_records(&self.superblock);
        let (origins, mut dying) = (origins_of(&records), Vec::new());
        for (id, item) in records.into_iter().filter(|(_, item)| item.is_nameless()) {
            let ended = self.trees.slot_for_work(id).and_then(|slot| {
                let root = InodeId::root_of(slot);
                self.trees.subvolume(root)?.end();
                Ok(root)
            });
            match ended {
                Ok(root) if self.is_being_removed(id, &item, &origins).unwrap_or(true) => {
                    dying.push(root);
                }
                Ok(_) => {}
                Err(error) => tracing::warn!("subvolume {id} is not removed for now: {error}"),
            }
        }
        dying
    }

    /// Whether something is being removed, or is to be, of a subvolume without a name, or it is to
    /// be joined with its last fork. `origins` are those of all subvolumes.
    fn is_being_removed(
        &self,
        id: TreeId,
        item: &SubvolumeItem,
        origins: &HashSet<(u64, u64)>,
    ) -> Result<bool> {
        if item.is_dying {
            return Ok(true);
        }
        // Of one that another thread has just removed there is no snapshot.
        let newest = self.trees.newest_snapshot(id)?;
        let is_needed = newest.is_some_and(|(made, _)| origins.contains(&(id.0, made.0)));
        Ok(!is_needed || self.can_be_joined(&self.trees.lock_records(), id)?)
    }

    /// Steps 2 and 3 for the subvolume with the root directory `root`, unless the volume is being
    /// closed: then the next mount goes on. Others may be due then ([`Store::end_lineage`]).
    ///
    /// # Errors
    /// [`Error::NoSpace`]: it is to be tried again after a commit.
    pub(crate) fn remove_subvolume(&self, root: InodeId, ending: &Ending<'_>) -> Result<()> {
        let subvolume = self.trees.subvolume(root)?;
        let item = self.trees.lock_records().find(subvolume.id)?;
        let Some(item) = item.filter(SubvolumeItem::is_nameless) else { return Ok(()) };
        if !item.is_headless {
            self.trees.open_slot(root.slot(), |_| Ok(()))?;
        }
        if self.shares_blocks(subvolume.id, &item)? {
            return self.end_lineage(subvolume, ending);
        }
        let mut batch = BATCH_ITEMS;
        loop {
            let begun = self.begin_with(root, batch as u64, 0, Effort::Removal, || 0);
            let mut operation = match begun {
                Err(Error::NoSpace) if batch > 1 => {
                    batch = (batch / 4).max(1);
                    continue;
                }
                begun => begun?,
            };
            if operation.remove_items(batch)? {
                break;
            }
            if (ending.is_interrupted)() {
                return Ok(());
            }
        }
        self.begin_for_subvolume(root, 0, Effort::Removal)?.end_subvolume(subvolume)?;
        Ok(())
    }

    /// As [`Store::begin_for_subvolume`]; the operation may also change up to `items` inodes and
    /// entries of the subvolume of `other`.
    pub(crate) fn begin_for_move(
        &self,
        inode: InodeId,
        other: InodeId,
        items: u64,
        effort: Effort,
    ) -> Result<Operation<'_>> {
        let other = self.trees.subvolume(other)?;
        let nodes = || {
            2 + Tree::worst_case_nodes(2, self.trees.records_height())
                + other.tree().worst_case_joined(items)
        };
        let mut operation = self.begin_with(inode, items, 0, effort, nodes)?;
        operation.add_subvolume(other);
        Ok(operation)
    }

    /// What the volume says of each subvolume, by ascending id. One of which only snapshots are
    /// left is among them while something of these is being removed.
    pub(crate) fn subvolumes(&self) -> Result<Vec<SubvolumeInfo>> {
        let default = self.trees.default_subvolume();
        let records = self.trees.all_records(&self.superblock)?;
        let (origins, mut subvolumes) = (origins_of(&records), Vec::new());
        for (id, item) in records {
            let is_dying = item.is_nameless() && self.is_being_removed(id, &item, &origins)?;
            if self.trees.is_forming(id) || item.is_headless && !is_dying {
                continue;
            }
            subvolumes.push(SubvolumeInfo {
                id: id.0,
                uuid: item.uuid,
                parent: item.parent.0,
                generation: item.generation.0,
                created_ns: item.created_ns,
                is_default: id == default,
                is_dying,
                is_fork: item.is_fork(),
                origin: item.origin.map(|origin| (origin.subvolume.0, origin.generation.0)),
                hides_names: item.names_others,
                continues: item.continues,
            });
        }
        Ok(subvolumes)
    }
}

/// Subvolumes and generations of the snapshots that forks came from.
fn origins_of(records: &[(TreeId, SubvolumeItem)]) -> HashSet<(u64, u64)> {
    let origins = records.iter().filter_map(|(_, item)| item.origin);
    origins.map(|origin| (origin.subvolume.0, origin.generation.0)).collect()
}

impl Operation<'_> {
    /// Makes a subvolume with a name in `directory` and the root directory `root`; returns the id
    /// of that. The directory is locked.
    pub(crate) fn make_subvolume(
        &mut self,
        directory: InodeId,
        root: &InodeItem,
    ) -> Result<(TreeId, InodeId)> {
        let store = self.store();
        let records = store.trees.lock_records();
        store.trees.subvolume(directory)?.check_alive()?;
        let number = records.take_number()?;
        let id = records.take_id()?;
        let place = Place { subvolume: self.tree().id(), directory: directory.number() };
        let item = SubvolumeItem {
            parent: place.subvolume,
            directory: place.directory,
            generation: self.generation(),
            created_ns: now_ns(),
            is_dying: false,
            is_headless: false,
            uuid: random::bytes16(),
            number,
            origin: None,
            names_others: false,
            continues: false,
            notes_inherited: false,
            is_joined: false,
            cursor: Key::MIN,
            dying_root: None,
        };
        self.note_unlogged_change();
        let change = self.change();
        records.put(&change, &store.superblock, id, &item)?;
        let tree = records.make_tree(&change, id)?;
        let inode = InodeId::root_of(number);
        let key = inode.key(ItemKind::Inode, 0);
        tree.insert(&change, key, &root.encode())?;
        store.inode_count.note_new(&tree, &key);
        records.add_open(id, number, tree, place);
        Ok((id, inode))
    }

    /// The name of a subvolume stands in `directory` now.
    pub(crate) fn place_subvolume(&mut self, root: InodeId, directory: InodeId) -> Result<()> {
        let store = self.store();
        let subvolume = store.trees.subvolume(root)?;
        let parent = store.trees.subvolume(directory)?;
        let records = store.trees.lock_records();
        parent.check_alive()?;
        let item = records.item(subvolume.id)?;
        let place = Place { subvolume: parent.id, directory: directory.number() };
        let moved = SubvolumeItem { parent: place.subvolume, directory: place.directory, ..item };
        if moved != item {
            self.note_unlogged_change();
            records.put(&self.change(), &store.superblock, subvolume.id, &moved)?;
            subvolume.set_place(place);
            store.trees.note_move();
        }
        Ok(())
    }

    /// Step 1 for the subvolume with the root directory `root`.
    ///
    /// # Errors
    /// [`Error::NotEmpty`] if names of other subvolumes stand in it, [`Error::Busy`] if it is the
    /// default one, shown at the root, or has snapshots with names or cleanups; nothing is changed
    /// then.
    pub(crate) fn begin_removal(&mut self, root: InodeId) -> Result<()> {
        let store = self.store();
        let subvolume = store.trees.subvolume(root)?;
        let records = store.trees.lock_records();
        subvolume.check_alive()?;
        if subvolume.slot == 0 || subvolume.id == store.trees.default_subvolume() {
            return Err(Error::Busy);
        }
        let item = records.item(subvolume.id)?;
        if store.keeps_its_name(subvolume)? {
            return Err(Error::Busy);
        }
        if store.cut_work.wants_name_in(subvolume.id) || records.any_named_in(subvolume.id)? {
            return Err(Error::NotEmpty);
        }
        self.note_unlogged_change();
        store.cut_work.note_deletion(self.generation());
        let item = SubvolumeItem { is_dying: true, ..item };
        records.put(&self.change(), &store.superblock, subvolume.id, &item)?;
        subvolume.end();
        store.trees.note_move();
        Ok(())
    }

    /// Step 2: removes up to `batch` items; whether none is left.
    pub(crate) fn remove_items(&mut self, batch: usize) -> Result<bool> {
        let items: Vec<(Key, Vec<u8>)> = self
            .tree()
            .range(Key::MIN..=Key::MAX)
            .take(batch)
            .collect::<std::result::Result<_, _>>()?;
        let finished = items.len() < batch;
        // Damage is found before anything is changed.
        let mut gone = Vec::with_capacity(items.len());
        for (key, value) in items {
            let extent = if key.kind == ItemKind::Extent as u8 {
                let extent = Extent::decode(&value)?;
                if !self.store().space.is_referenced(extent.range()) {
                    let problem = format!("an extent at {} that is not in use", extent.start);
                    let error = FormatError::new(Structure::Item, extent.start, problem);
                    return Err(error.of_item(&key, extent.start).into());
                }
                Some(extent)
            } else {
                None
            };
            gone.push((key, extent));
        }
        // An item goes with its blocks. So where a node can't be read, those before it are gone,
        // and the rest is as it was.
        for (key, extent) in gone {
            self.delete_unlogged(&key)?;
            if let Some(extent) = extent {
                self.free(&extent)?;
            }
            self.leave_unlogged();
        }
        Ok(finished)
    }

    /// Step 3; the tree has no items.
    pub(crate) fn end_subvolume(&mut self, subvolume: &Subvolume) -> Result<()> {
        let store = self.store();
        let records: Records<'_> = store.trees.lock_records();
        self.note_unlogged_change();
        let change = self.change();
        self.tree().end(&change)?;
        records.remove(&change, subvolume.id)?;
        records.note_ended(subvolume);
        self.leave_unlogged();
        Ok(())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "subvolumes_tests.rs"]
mod tests;
