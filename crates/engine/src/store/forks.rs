//! Forks: writable subvolumes that begin as a snapshot of another one.
//!
//! - **Creation** is requested by an operation that puts the fork's name into a directory, and is
//!   done by the cut of the same transaction ([`Store::make_requested_forks`]): the fork's tree
//!   begins with the root of a snapshot, its *origin*. Of a live subvolume that is its newest
//!   snapshot if nothing has changed since, or else a *hidden* one, which the same cut makes: it
//!   has no name, and goes with the last fork of it. Until the superblock is durable nobody sees
//!   the fork. *A crash before that: neither name nor fork, since an operation whose items wait for
//!   a superblock is not replayed without it. After it: both.*
//! - **An early fork** is seen as soon as all data of its transaction is on the device: before that
//!   its tree may lead to blocks whose content only pages of the source have. The nodes are in
//!   memory. *A crash before the superblock: neither fork nor anything done in it*, since all of
//!   that was logged after the fork's name, and the log keeps the order. For the same reason an
//!   fsync in the fork waits for that superblock: inodes that are loaded there count as changed by
//!   all that is logged already.
//! - **References** that a fork has inherited, those born up to its origin, are its origin's. The
//!   fork writes nothing in place there. When it gives one up, that is noted in its dead lists, the
//!   first of which begins with the origin; it counts for nothing there.
//! - **Joining.** The last fork of a subvolume of which nothing else is left takes over what it has
//!   inherited ([`Operation::join`]).
//! - **Removal** gives back what the fork has made, and reads nothing else (`lineage_end.rs`). The
//!   end of the last fork of a hidden snapshot deletes that, too.
//! - **Names of subvolumes** in the origin stand in the fork, too, where they are of no account.
//!   They are removed before the fork is shown. *A crash before that is done: they stay hidden, and
//!   the next mount that comes to the fork removes them.*
use super::Store;
use super::cut_work::{Formed, Source, WantedFork};
use super::operation::{Effort, Operation};
use super::trees::Place;
use crate::types::now_ns;
use crate::{Error, InodeId, Result};
use cairn_btree::{Change, Tree};
use cairn_environment::random;
use cairn_format::{
    DirectoryEntry, EntryTarget, Generation, InodeNumber, ItemKind, Key, Origin, RootItem,
    SnapshotItem, SubvolumeItem, TreeId,
};
use cairn_space::{Request, Reservation, Urgency};
use std::cell::Cell;
use std::sync::{Arc, OnceLock};

/// A fork that is wanted.
pub(crate) struct Forming {
    id: TreeId,
    /// Its root directory.
    pub(crate) root: InodeId,
    /// The transaction whose cut makes it.
    generation: Generation,
    is_early: bool,
    done: Arc<OnceLock<Result<Formed>>>,
}

/// An entry of a fork that names a subvolume of its origin.
pub(crate) struct ForeignEntry {
    pub(crate) directory: InodeId,
    pub(crate) key: Key,
    pub(crate) name: Vec<u8>,
}

/// What a fork can be applied to.
pub(crate) struct Origins {
    /// Both have come from this snapshot.
    pub(crate) snapshot: Origin,
    /// The root directories of subvolumes, one of which may be joined with what it came from.
    pub(crate) heirs: Vec<InodeId>,
    /// The root directories of the subvolume that the snapshot was made of, and of those that
    /// rollbacks have put into its place, as far as they are there: the last one first.
    pub(crate) roots: Vec<InodeId>,
}

impl Store {
    /// Nodes that making a fork takes, if the tree of subvolumes grows by so many levels until the
    /// cut: of a live subvolume for a snapshot and the fork's item, and for the first trees; of a
    /// snapshot for the item.
    fn nodes_for_fork(&self, is_live: bool, levels: u8) -> u64 {
        let height = self.trees.records_height() + levels;
        if is_live {
            2 + Tree::worst_case_nodes(6, height)
        } else {
            Tree::worst_case_nodes(2, height)
        }
    }

    /// Begins an operation that changes at most `items` items in the tree of `directory`, and wants
    /// a fork of the subvolume or snapshot with the root directory `source`; with the space for
    /// that. It waits for all of this at once: what a caller holds while it waits for more may be
    /// what others wait for.
    pub(crate) fn begin_fork(
        &self,
        source: InodeId,
        directory: InodeId,
        items: u64,
        effort: Effort,
    ) -> Result<(Operation<'_>, Reservation)> {
        let is_live = self.trees.subvolume(source)?.snapshot.is_none();
        let asked = Cell::new(0);
        let more = || {
            asked.set(self.nodes_for_fork(is_live, 3));
            asked.get()
        };
        let mut operation = self.begin_with(directory, items, 0, effort, more)?;
        let reservation = operation.split(asked.get());
        Ok((operation, reservation))
    }

    /// At the cut, when the snapshots are made: makes the forks that are wanted. Whether one of
    /// them is early.
    pub(super) fn make_requested_forks(&self, generation: Generation) -> Result<bool> {
        let wanted = std::mem::take(&mut *self.cut_work.forks.lock());
        let has_early = wanted.iter().any(|fork| fork.is_early);
        let named = wanted.iter().filter(|fork| !fork.item.is_dying);
        let places: Vec<Place> = named.map(WantedFork::place).collect();
        for fork in wanted {
            let (origin, names_none) = self.origin_of(&fork, generation, &places)?;
            let directories = match fork.source {
                Source::Head(_, id) => self.directories_with_names(id, &places)?,
                Source::Snapshot(_) if names_none => Some(Vec::new()),
                Source::Snapshot(_) => None,
            };
            let key = Key::of_subvolume(origin.subvolume, ItemKind::Snapshot, origin.generation);
            let records = self.trees.lock_records();
            let value = records.tree()?.get(&key)?;
            let missing = || self.trees.damaged(format!("the fork {} has no origin", fork.id));
            let root = SnapshotItem::decode(&value.ok_or_else(missing)?)?.root;
            let item =
                SubvolumeItem { origin: Some(origin), names_others: !names_none, ..fork.item };
            let change = Change { generation, reservation: &fork.reservation };
            records.put(&change, &self.superblock, fork.id, &item)?;
            records.begin_list(&change, fork.id, origin.generation)?;
            let roots = &self.trees.roots;
            let request = Request { data_blocks: 0, nodes: roots.worst_case(1) };
            let reservation = self.space.reserve(request, Urgency::Commit)?;
            let change = Change { generation, reservation: &reservation };
            roots.insert(&change, Key::root(fork.id), &RootItem { root }.encode())?;
            let _first = fork.done.set(Ok(Formed { directories }));
        }
        Ok(has_early)
    }

    /// The snapshot that a fork is made of, which may have to be made, and whether nothing in it
    /// names a subvolume. At `wanted` stand the names of all forks that the cut makes.
    fn origin_of(
        &self,
        fork: &WantedFork,
        generation: Generation,
        wanted: &[Place],
    ) -> Result<(Origin, bool)> {
        let (slot, id) = match fork.source {
            Source::Head(slot, id) => (slot, id),
            Source::Snapshot(origin) => {
                let records = self.trees.lock_records();
                let key =
                    Key::of_subvolume(origin.subvolume, ItemKind::Snapshot, origin.generation);
                let value = records.tree()?.get(&key)?.unwrap_or_default();
                return Ok((origin, SnapshotItem::decode(&value)?.names_none));
            }
        };
        let head = self.trees.of(InodeId::root_of(slot));
        let records = self.trees.lock_records();
        if let Some((made, item)) = self.trees.newest_snapshot(id)?
            && item.root == head.root()
        {
            return Ok((Origin { subvolume: id, generation: made }, item.names_none));
        }
        let is_named_in = wanted.iter().any(|place| place.subvolume == id);
        let names_none = !is_named_in && !records.may_name(id)?;
        let item = SnapshotItem {
            root: Default::default(),
            created_ns: now_ns(),
            is_held: false,
            is_hidden: true,
            names_none,
            // Nobody will see it.
            number: 0,
            uuid: random::bytes16(),
            name: Vec::new(),
        };
        let change = Change { generation, reservation: &fork.reservation };
        records.put_snapshot(&change, &self.superblock, slot, item)?;
        Ok((Origin { subvolume: id, generation }, names_none))
    }

    /// The directories of `id` in which names of subvolumes stand, and those of the forks that the
    /// cut makes: all of these names are in the origin. `None` stands for all directories: of a
    /// fork that has such names itself it is not known where.
    fn directories_with_names(
        &self,
        id: TreeId,
        wanted: &[Place],
    ) -> Result<Option<Vec<InodeNumber>>> {
        let records = self.trees.lock_records();
        if records.find(id)?.is_some_and(|item| item.names_others) {
            return Ok(None);
        }
        let mut directories = records.directories_with_names(id)?;
        let here = wanted.iter().filter(|place| place.subvolume == id);
        directories.extend(here.map(|place| place.directory));
        directories.sort_unstable();
        directories.dedup();
        Ok(Some(directories))
    }

    /// Whether the subvolumes of these inodes have come from the same one that is no fork. Such
    /// share nodes, and an inode number in both is of one file.
    pub(crate) fn are_of_one_family(&self, inodes: [InodeId; 2]) -> Result<bool> {
        let [one, other] = inodes;
        let ids = [self.trees.subvolume(one)?.id, self.trees.subvolume(other)?.id];
        Ok(ids[0] == ids[1] || self.trees.lock_records().are_of_one_family(ids)?)
    }

    /// What the fork with the root directory `fork` can be applied to. If that is gone, it counts
    /// as a fork of what that was a fork of.
    pub(crate) fn origins_of_fork(&self, fork: InodeId) -> Result<Option<Origins>> {
        let of = self.trees.subvolume(fork)?;
        if of.snapshot.is_some() {
            return Err(Error::InvalidArgument("a snapshot"));
        }
        of.check_alive()?;
        let records = self.trees.lock_records();
        let mut first = self.trees.first_of_line(of.id)?;
        let item = records.find(first)?.ok_or(Error::Stale)?;
        if !item.is_fork() || item.continues {
            return Err(Error::InvalidArgument("the subvolume is not a fork"));
        }
        let mut heirs = Vec::new();
        while let Some(origin) = records.item(first)?.origin {
            for id in self.trees.line_of(first)? {
                heirs.push(InodeId::root_of(self.trees.slot_for_work(id)?));
            }
            let mut roots = Vec::new();
            for id in self.trees.line_of(origin.subvolume)?.into_iter().rev() {
                let is_there = records.find(id)?.is_some_and(|item| !item.is_nameless());
                if is_there && !self.trees.is_forming(id) {
                    roots.push(InodeId::root_of(self.trees.slot_of(id)?));
                }
            }
            if !roots.is_empty() {
                return Ok(Some(Origins { snapshot: origin, heirs, roots }));
            }
            first = self.trees.first_of_line(origin.subvolume)?;
        }
        Ok(None)
    }

    /// Returns when a fork is durable, or else can be read if it is early, and is known. Nobody
    /// sees it yet.
    pub(crate) fn wait_for_fork(&self, forming: &Forming) -> Result<Formed> {
        let formed = loop {
            if forming.is_early && self.options.background {
                self.signal.request();
                self.transactions.wait_readable(forming.generation)?;
            } else {
                self.commit()?;
                self.transactions.wait_super_committed(forming.generation)?;
            }
            if let Some(formed) = forming.done.get() {
                break formed.clone()?;
            }
        };
        // Its item need not be read for that.
        self.trees.put_in_slot(forming.id, forming.root.slot());
        Ok(formed)
    }

    /// A fork may be seen from now on.
    pub(crate) fn show_fork(&self, forming: &Forming) {
        self.trees.note_formed(forming.id);
    }

    /// The entries of the fork with the root directory `root` that name other subvolumes, in these
    /// directories or in any.
    pub(crate) fn foreign_entries(
        &self,
        root: InodeId,
        directories: Option<&[InodeNumber]>,
    ) -> Result<Vec<ForeignEntry>> {
        let tree = self.trees.of(root);
        let ranges = match directories {
            None => vec![Key::MIN..=Key::MAX],
            Some(directories) => directories
                .iter()
                .map(|directory| Key::all(*directory, ItemKind::DirectoryEntry))
                .collect(),
        };
        let mut found = Vec::new();
        for keys in ranges {
            let mut damage = None;
            tree.scan(keys, |key, value| {
                if key.kind == ItemKind::DirectoryEntry as u8 {
                    match DirectoryEntry::decode(value) {
                        Ok(entry) => {
                            if let EntryTarget::Subvolume(id) = entry.target {
                                found.push((key, id, entry.name.clone()));
                            }
                        }
                        Err(error) => damage = Some(error),
                    }
                }
                damage.is_none()
            })?;
            if let Some(error) = damage {
                return Err(error.into());
            }
        }
        let records = self.trees.lock_records();
        let mut entries = Vec::new();
        for (key, id, name) in found {
            let is_here = records.find(id)?.is_some_and(|item| {
                item.parent == tree.id() && item.directory.0 == key.inode && !item.is_nameless()
            });
            let directory = InodeId::of_number(root.slot(), key.inode);
            if let Some(directory) = directory.filter(|_| !is_here) {
                entries.push(ForeignEntry { directory, key, name });
            }
        }
        Ok(entries)
    }

    /// Nothing in the fork with the root directory `root` names other subvolumes any more.
    pub(crate) fn note_own_names(&self, root: InodeId) -> Result<()> {
        let mut operation = self.begin_for_subvolume(root, 0, Effort::Cleanup)?;
        let subvolume = self.trees.subvolume(root)?;
        let records = self.trees.lock_records();
        subvolume.check_alive()?;
        let item = SubvolumeItem { names_others: false, ..records.item(subvolume.id)? };
        operation.note_unlogged_change();
        records.put(&operation.change(), &self.superblock, subvolume.id, &item)?;
        subvolume.set_names_others(false);
        drop(records);
        operation.log();
        Ok(())
    }
}

impl Operation<'_> {
    /// Has the cut make a fork of the subvolume or snapshot with the root directory `source`. If it
    /// `has_name`, that stands in `directory`, which is locked; otherwise it is to get one there
    /// ([rollback](super::rollback)).
    pub(crate) fn want_fork(
        &mut self,
        source: InodeId,
        directory: InodeId,
        has_name: bool,
        is_early: bool,
        reservation: Reservation,
    ) -> Result<(TreeId, Forming)> {
        let store = self.store();
        let records = store.trees.lock_records();
        let (of, parent) = (store.trees.subvolume(source)?, store.trees.subvolume(directory)?);
        // The forks of one transaction let the tree grow by a level at most.
        if reservation.nodes() < store.nodes_for_fork(of.snapshot.is_none(), 2) {
            return Err(Error::NoSpace);
        }
        of.check_alive()?;
        parent.check_alive()?;
        let source = match of.snapshot {
            None => Source::Head(of.slot, of.id),
            Some(generation) => {
                // It may just be deleted.
                store.trees.snapshot_item(of.id, generation)?;
                Source::Snapshot(Origin { subvolume: of.id, generation })
            }
        };
        let (number, id) = (records.take_number()?, records.take_id()?);
        let place = Place { subvolume: parent.id, directory: directory.number() };
        let item = SubvolumeItem {
            parent: place.subvolume,
            directory: place.directory,
            generation: self.generation(),
            created_ns: now_ns(),
            is_dying: !has_name,
            is_headless: false,
            uuid: random::bytes16(),
            number,
            origin: None,
            names_others: false,
            continues: false,
            notes_inherited: true,
            is_joined: false,
            cursor: Key::MIN,
            dying_root: None,
        };
        self.note_unlogged_change();
        let done = Arc::new(OnceLock::new());
        records.note_forming(id);
        store.cut_work.forks.lock().push(WantedFork {
            source,
            id,
            item,
            reservation,
            is_early,
            done: Arc::clone(&done),
        });
        let (root, generation) = (InodeId::root_of(number), self.generation());
        Ok((id, Forming { id, root, generation, is_early, done }))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "begin_fork_tests.rs"]
mod tests;
