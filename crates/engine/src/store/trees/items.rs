//! What the tree of subvolumes says: items of subvolumes and of snapshots, read.
use super::{Place, Trees};
use crate::{Error, Result};
use cairn_btree::Tree;
use cairn_environment::atomic::Ordering;
use cairn_format::{
    CleanupItem, DeadListItem, DeadRun, Generation, INODE_ROOT, Inheritance, ItemKind, Key,
    SnapshotItem, SubvolumeItem, Superblock, TREE_FILES, TreeId,
};
use cairn_space::Boundary;
use std::ops::{Range, RangeInclusive};

impl Trees {
    /// Grows with each change of where subvolumes and their snapshots are, when others can see it.
    pub(crate) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Acquire)
    }

    /// Another thread sees such a change from now on.
    pub(crate) fn note_move(&self) {
        self.moves.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether no subvolume has this id, or one that was removed.
    pub(in crate::store) fn lacks(&self, id: TreeId) -> Result<bool> {
        let Some(records) = self.records.get() else { return Ok(id != TREE_FILES) };
        let Some(value) = records.tree.get(&Key::subvolume(id))? else { return Ok(true) };
        Ok(SubvolumeItem::decode(&value)?.is_nameless())
    }

    /// The items of subvolumes, by ascending id.
    pub(super) fn subvolume_items(&self) -> impl Iterator<Item = Result<(TreeId, SubvolumeItem)>> {
        let tree = self.records.get().map(|records| &records.tree);
        let from =
            move |id: u64| tree.map(|tree| tree.range(Key::subvolume(TreeId(id))..=Key::MAX));
        let mut items = from(0);
        std::iter::from_fn(move || {
            loop {
                let (key, value) = match items.as_mut()?.next()? {
                    Ok(item) => item,
                    Err(error) => return Some(Err(error.into())),
                };
                if key.kind == ItemKind::Subvolume as u8 {
                    let item = SubvolumeItem::decode(&value).map_err(Error::from);
                    return Some(item.map(|item| (TreeId(key.inode), item)));
                }
                // Of others there may be thousands.
                items = key.inode.checked_add(1).and_then(from);
            }
        })
    }

    /// The items of all snapshots of `id`, the oldest first; a durable superblock may lack the
    /// last.
    pub(in crate::store) fn all_snapshot_items(
        &self,
        id: TreeId,
    ) -> impl Iterator<Item = Result<(Generation, SnapshotItem)>> {
        self.items_of(id, ItemKind::Snapshot).map(|item| {
            let (generation, value) = item?;
            Ok((generation, SnapshotItem::decode(&value)?))
        })
    }

    /// Values of the items of one kind of `id`, with their generations, in their order.
    fn items_of(
        &self,
        id: TreeId,
        kind: ItemKind,
    ) -> impl Iterator<Item = Result<(Generation, Vec<u8>)>> {
        self.items_with(Some(Key::all_of_subvolume(id, kind)))
    }

    /// Values of the items with these keys, with their generations, in their order.
    fn items_with(
        &self,
        keys: Option<RangeInclusive<Key>>,
    ) -> impl Iterator<Item = Result<(Generation, Vec<u8>)>> {
        let records = self.records.get().zip(keys).into_iter();
        records.flat_map(|(records, keys)| records.tree.range(keys)).map(|item| {
            let (key, value) = item?;
            Ok((Generation(key.offset), value))
        })
    }

    /// The dead lists of `id`, by the transactions that began them.
    pub(in crate::store) fn dead_lists(
        &self,
        id: TreeId,
    ) -> impl Iterator<Item = Result<(Generation, u64)>> {
        self.dead_lists_begun_in(id, Generation(0)..Generation(u64::MAX))
    }

    /// The dead lists of `id` that transactions in `interval` began, by these. Others are not read.
    pub(in crate::store) fn dead_lists_begun_in(
        &self,
        id: TreeId,
        interval: Range<Generation>,
    ) -> impl Iterator<Item = Result<(Generation, u64)>> {
        let key = |since| Key::of_subvolume(id, ItemKind::DeadList, since);
        let keys = (interval.start < interval.end)
            .then(|| key(interval.start)..=key(Generation(interval.end.0 - 1)));
        self.items_with(keys).map(|item| {
            let (since, value) = item?;
            Ok((since, DeadListItem::decode(&value)?.list))
        })
    }

    /// Of a subvolume without a name, the first beginning of a dead list that is *discarded*: what
    /// is in it counts as its newest snapshot's, or its origin's.
    pub(in crate::store) fn discarded_since(&self, id: TreeId) -> Result<Option<Generation>> {
        if !self.lacks(id)? {
            return Ok(None);
        }
        Ok(Some(self.newest_snapshot(id)?.map_or(Generation(0), |(made, _)| made)))
    }

    /// The newest snapshot of `id`.
    pub(in crate::store) fn newest_snapshot(
        &self,
        id: TreeId,
    ) -> Result<Option<(Generation, SnapshotItem)>> {
        let Some(records) = self.records.get() else { return Ok(None) };
        let newest = records.tree.last(Key::all_of_subvolume(id, ItemKind::Snapshot))?;
        let decode = |(key, value): (Key, Vec<u8>)| {
            Ok((Generation(key.offset), SnapshotItem::decode(&value)?))
        };
        newest.map(decode).transpose()
    }

    /// Whether a snapshot of `id` was made by this transaction.
    pub(in crate::store) fn has_snapshot(&self, id: TreeId, made: Generation) -> Result<bool> {
        let Some(records) = self.records.get() else { return Ok(false) };
        let key = Key::of_subvolume(id, ItemKind::Snapshot, made);
        Ok(records.tree.get(&key)?.is_some())
    }

    /// The generation of the snapshot of `id` before the one that `made` made, or 0, and that of
    /// the one behind it. A durable superblock may lack that.
    pub(in crate::store) fn snapshots_beside(
        &self,
        id: TreeId,
        made: Generation,
    ) -> Result<(Generation, Option<Generation>)> {
        let Some(records) = self.records.get() else { return Ok((Generation(0), None)) };
        let key = |made| Key::of_subvolume(id, ItemKind::Snapshot, made);
        let of = |key: Key| Generation(key.offset);
        let before =
            records.tree.last(key(Generation(0))..=key(Generation(made.0.saturating_sub(1))))?;
        let mut from_it = records.tree.range(key(made)..=key(Generation(u64::MAX)));
        let is_behind = |key: &Key| of(*key) > made;
        let behind = from_it.find(|item| item.as_ref().map_or(true, |(key, _)| is_behind(key)));
        let behind = behind.transpose()?;
        let before = before.map_or(Generation(0), |(key, _)| of(key));
        Ok((before, behind.map(|(key, _)| of(key))))
    }

    /// The cleanups of `id`, each with the newest birth that it is for.
    pub(in crate::store) fn cleanups(
        &self,
        id: TreeId,
    ) -> impl Iterator<Item = Result<(Generation, CleanupItem)>> {
        self.items_of(id, ItemKind::Cleanup).map(|item| {
            let (newest, value) = item?;
            Ok((newest, CleanupItem::decode(&value)?))
        })
    }

    /// The subvolumes with items of this kind.
    pub(in crate::store) fn with_items(&self, kind: ItemKind) -> Result<Vec<TreeId>> {
        let mut found = Vec::new();
        if self.dead.get().is_none() {
            return Ok(found);
        }
        for item in self.subvolume_items() {
            let (id, _) = item?;
            if self.items_of(id, kind).next().transpose()?.is_some() {
                found.push(id);
            }
        }
        Ok(found)
    }

    /// The first dead runs of a list from the item `from` on, and their item's key.
    pub(in crate::store) fn runs_from(&self, from: Key) -> Result<Option<(Key, Vec<DeadRun>)>> {
        let Some(dead) = self.dead.get() else { return Ok(None) };
        let last = Key { offset: u64::MAX, ..from };
        let Some(item) = dead.tree.range(from..=last).next() else { return Ok(None) };
        let (key, value) = item?;
        let runs = DeadRun::decode_all(&value)?;
        if let Some(run) = runs.iter().find(|run| !self.geometry.contains(run.range)) {
            let problem = format!("a dead run at {} lies outside the volume", run.range.start);
            return Err(self.damaged(problem));
        }
        Ok(Some((key, runs)))
    }

    /// All dead runs of a list, by item.
    pub(in crate::store) fn runs_of(
        &self,
        list: u64,
    ) -> impl Iterator<Item = Result<(Key, Vec<DeadRun>)>> {
        let mut from = Some(Key::dead_runs(list, Generation(0), 0));
        std::iter::from_fn(move || {
            let found = self.runs_from(from?).transpose()?;
            from = found.as_ref().ok().and_then(|(key, _)| key.successor());
            from = from.filter(|next| next.inode == list);
            Some(found)
        })
    }

    /// The tree of dead runs, from the first snapshot on.
    pub(in crate::store) fn dead_runs(&self) -> Option<&Tree> {
        self.dead.get().map(|dead| &dead.tree)
    }

    pub(in crate::store) fn damaged_dead_runs(&self) -> Error {
        self.damaged("there is no tree of dead runs".into())
    }

    /// The transactions that made the snapshots of `id` that a durable superblock has, hidden ones
    /// too, and of each whether it is hidden.
    pub(in crate::store) fn durable_snapshots(
        &self,
        id: TreeId,
    ) -> impl Iterator<Item = Result<(Generation, bool)>> {
        let durable = self.durable.load(Ordering::Acquire);
        self.all_snapshot_items(id)
            .filter(move |item| item.as_ref().map_or(true, |(made, _)| made.0 <= durable))
            .map(|item| item.map(|(made, item)| (made, item.is_hidden)))
    }

    /// The items of the snapshots of `id` with names that a durable superblock has, the oldest
    /// first.
    pub(in crate::store) fn snapshot_items(
        &self,
        id: TreeId,
    ) -> impl Iterator<Item = Result<(Generation, SnapshotItem)>> {
        let durable = self.durable.load(Ordering::Acquire);
        self.all_snapshot_items(id).filter(move |item| {
            let is_seen = |(generation, item): &(Generation, SnapshotItem)| {
                generation.0 <= durable && !item.is_hidden
            };
            item.as_ref().map_or(true, is_seen)
        })
    }

    /// What the tree of subvolumes says of `id`.
    pub(in crate::store) fn item(&self, id: TreeId) -> Result<SubvolumeItem> {
        let missing = || self.damaged(format!("the subvolume {id} has no item"));
        self.item_if_there(id)?.ok_or_else(missing)
    }

    /// As [`Trees::item`], of a subvolume that another thread may have ended.
    pub(super) fn item_if_there(&self, id: TreeId) -> Result<Option<SubvolumeItem>> {
        let records = self.records.get();
        let value = records.map(|records| records.tree.get(&Key::subvolume(id))).transpose()?;
        Ok(value.flatten().map(|value| SubvolumeItem::decode(&value)).transpose()?)
    }

    /// The item of a snapshot with a name that a durable superblock has.
    pub(in crate::store) fn snapshot_item(
        &self,
        id: TreeId,
        generation: Generation,
    ) -> Result<SnapshotItem> {
        let records = self.records.get().ok_or(Error::Stale)?;
        let value = records.tree.get(&Key::of_subvolume(id, ItemKind::Snapshot, generation))?;
        let is_durable = generation.0 <= self.durable.load(Ordering::Acquire);
        let value = value.filter(|_| is_durable).ok_or(Error::Stale)?;
        let item = SnapshotItem::decode(&value)?;
        if item.is_hidden { Err(Error::Stale) } else { Ok(item) }
    }

    /// What the snapshots of a subvolume and its origin have of it, as its items say.
    pub(super) fn recorded_boundary(&self, id: TreeId) -> Result<Boundary> {
        let Some(records) = self.records.get() else { return Ok(Boundary::default()) };
        let item = self.item(id)?;
        let inheritance = item.inheritance();
        let newest = records.tree.last(Key::all_of_subvolume(id, ItemKind::Snapshot))?;
        let newest = newest.map_or(Generation(0), |(key, _)| Generation(key.offset));
        if newest.0 == 0 && !inheritance.is_noted {
            return Ok(Boundary::default().inheriting(inheritance));
        }
        let list = records.tree.last(Key::all_of_subvolume(id, ItemKind::DeadList))?;
        let list = match list.filter(|(list, _)| list.offset >= newest.0) {
            Some((_, list)) => DeadListItem::decode(&list)?.list,
            // Nothing enters a list any more.
            None if item.is_dying => 0,
            None => {
                let problem = format!("the newest snapshot of subvolume {id} has no dead list");
                return Err(self.damaged(problem));
            }
        };
        Ok(Boundary::new(newest, list).inheriting(inheritance))
    }

    /// What a subvolume has of others.
    pub(in crate::store) fn recorded_inheritance(&self, id: TreeId) -> Result<Inheritance> {
        if self.records.get().is_none() {
            return Ok(Inheritance::default());
        }
        Ok(self.item(id)?.inheritance())
    }

    pub(super) fn recorded_names_others(&self, id: TreeId) -> Result<bool> {
        Ok(self.records.get().is_some() && self.item(id)?.names_others)
    }

    pub(super) fn recorded_place(&self, id: TreeId) -> Result<Place> {
        if self.records.get().is_none() {
            return Ok(Place { subvolume: TREE_FILES, directory: INODE_ROOT });
        }
        let item = self.item(id)?;
        Ok(Place { subvolume: item.parent, directory: item.directory })
    }

    /// Where the names of subvolumes stand.
    pub(crate) fn places(&self) -> Result<Vec<Place>> {
        let mut places = Vec::new();
        for item in self.subvolume_items() {
            let (id, item) = item?;
            if !item.is_nameless() && id != TREE_FILES {
                places.push(Place { subvolume: item.parent, directory: item.directory });
            }
        }
        Ok(places)
    }

    /// The items of all subvolumes, by ascending id.
    pub(crate) fn all_records(
        &self,
        superblock: &Superblock,
    ) -> Result<Vec<(TreeId, SubvolumeItem)>> {
        if self.records.get().is_none() {
            return Ok(vec![(TREE_FILES, SubvolumeItem::first(superblock))]);
        }
        self.subvolume_items().collect()
    }

    /// As [`Self::all_records`], of the subvolumes that can be read. The others are reported.
    pub(in crate::store) fn readable_records(
        &self,
        superblock: &Superblock,
    ) -> Vec<(TreeId, SubvolumeItem)> {
        if self.records.get().is_none() {
            return vec![(TREE_FILES, SubvolumeItem::first(superblock))];
        }
        let report = |error: &Error| {
            tracing::warn!("what is left of removed subvolumes stays for now: {error}");
        };
        self.subvolume_items().filter_map(|item| item.inspect_err(report).ok()).collect()
    }
}
