//! Doing what a merge says, in one operation that is alone ([`Store::alone`]).
//!
//! 1. All inodes concerned that exist are locked, in ascending order; of files that get data, or
//!    lose their last name, the extents as well, if nobody else has them.
//! 2. It is checked that what the merge was made for still holds: the origin is compared with the
//!    snapshot of it that was taken then, and what is in memory must be in the tree.
//! 3. What will be changed is looked at once, so that damage is found before the first change.
//! 4. Entries go, then come; then inodes get their content, and their items are written.
//!
//! [`Store::alone`]: crate::store::Store::alone
use super::changes::{SideChanges, Target, is_directory};
use super::merge::{Found, Merge, Subject};
use crate::file::inode::{Inode, InodeState, WriteGuard};
use crate::file::locking::ExtentsGuard;
use crate::file::orphans::orphan_key;
use crate::file::staged::Staged;
use crate::names::Names;
use crate::names::differences::gathered::Side;
use crate::names::directory::LINKS_MAX;
use crate::store::alone::OperationSize;
use crate::store::operation::Operation;
use crate::types::{Applied, ConflictKind, now};
use crate::{Error, InodeId, Result};
use cairn_environment::atomic::Ordering;
use cairn_format::{
    EntryTarget, Extent, FileBlock, FileType, InodeItem, InodeNumber, ItemKind, Key, OrphanKind,
    encode_orphan,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// What an inode gets of the fork.
pub(super) struct Content {
    /// It does not exist here.
    pub(super) is_new: bool,
    /// Its attributes there.
    pub(super) item: InodeItem,
    /// Values of the items, but for attributes and extents.
    pub(super) items: BTreeMap<Key, Option<Vec<u8>>>,
    pub(super) dropped: Vec<Range<FileBlock>>,
}

/// Everything that one application does.
pub(super) struct Application<'a> {
    /// The root directory of the fork.
    pub(super) from: InodeId,
    pub(super) target: InodeId,
    /// The target that the caller has named.
    pub(super) wanted: Option<InodeId>,
    /// The origin as it was when the merge was made.
    pub(super) seen: Side<'a>,
    pub(super) merge: &'a Merge,
    /// As of [`ApplyOptions`](crate::ApplyOptions).
    pub(super) own_attribute: Option<&'a [u8]>,
    pub(super) contents: BTreeMap<InodeNumber, Content>,
    pub(super) staged: Staged<'a>,
}

/// What came of it.
pub(super) enum Outcome {
    /// And these have no name any more.
    Done(Applied, Vec<InodeId>),
    /// These conflicts show only now.
    Refused(Vec<Found>),
}

/// Whether it can be done.
enum Check {
    Fine,
    /// What it was made for does not hold any more.
    Changed,
    /// As of [`Outcome`].
    Refused(Vec<Found>),
}

/// An inode that is locked, or that will exist.
enum State<'a> {
    Here(WriteGuard<'a>),
    New(Box<InodeState>),
}

impl State<'_> {
    fn get(&self) -> &InodeState {
        match self {
            State::Here(guard) => guard,
            State::New(state) => state,
        }
    }

    fn get_mut(&mut self) -> &mut InodeState {
        match self {
            State::Here(guard) => guard,
            State::New(state) => state,
        }
    }
}

type States<'a> = BTreeMap<InodeNumber, State<'a>>;

fn entry_target(target: Target) -> EntryTarget {
    EntryTarget::Inode(target.inode, target.file_type)
}

/// How many names of each inode come, less those that go.
fn link_changes(merge: &Merge) -> BTreeMap<InodeNumber, i64> {
    let mut changes = BTreeMap::new();
    for plan in merge.entries.values() {
        for (target, change) in [(plan.expected, -1), (plan.wanted, 1)] {
            if let Some(target) = target {
                *changes.entry(target.inode).or_default() += change;
            }
        }
    }
    changes
}

impl Application<'_> {
    /// The inodes concerned: directories, what entries name, what gets content.
    fn concerned(&self) -> BTreeSet<InodeNumber> {
        let mut all: BTreeSet<InodeNumber> = self.contents.keys().copied().collect();
        for ((directory, _), plan) in &self.merge.entries {
            all.insert(*directory);
            all.extend([plan.expected, plan.wanted].into_iter().flatten().map(|one| one.inode));
        }
        all
    }

    /// Whether it gets content or loses names. What is only moved, or gets more names, keeps what
    /// others write to it.
    fn is_touched(&self, number: InodeNumber, links: &BTreeMap<InodeNumber, i64>) -> bool {
        let loses_names = links.get(&number).is_some_and(|change| *change < 0);
        self.contents.contains_key(&number) || loses_names
    }

    fn is_new(&self, number: InodeNumber) -> bool {
        self.contents.get(&number).is_some_and(|content| content.is_new)
    }

    /// What it changes at most, where `data` says that of the extents.
    pub(super) fn size(&self, data: OperationSize) -> OperationSize {
        let contents = self.contents.values();
        let new = contents.clone().filter(|content| content.is_new).count();
        let items = contents.clone().map(|content| content.items.len()).sum::<usize>();
        let plans = self.merge.entries.values();
        let come = plans.clone().filter(|plan| plan.wanted.is_some()).count();
        let gone = plans.clone().filter(|plan| plan.expected.is_some()).count();
        OperationSize {
            items: data.items + (self.concerned().len() + items + come + 2 * gone) as u64,
            // What has no name any more is an orphan.
            growing: data.growing + (new + items + come + gone) as u64,
        }
    }
}

impl Names {
    /// Reads what is looked at while others wait, so that they don't wait for the device, too.
    pub(super) fn read_ahead(&self, application: &Application<'_>) -> Result<()> {
        let Application { target, merge, staged, .. } = application;
        for number in application.concerned() {
            let inode = target.sibling(number);
            self.store.trees.of(*target).get(&inode.key(ItemKind::Inode, 0))?;
            for (at, _) in staged.of(number) {
                self.files.extents_in(inode, *at..at.next(), 1)?;
            }
        }
        for (directory, name) in merge.entries.keys() {
            self.find_entry(target.sibling(*directory), name)?;
        }
        Ok(())
    }

    /// Does it, or nothing if the origin has changed in what matters. Nobody else has joined.
    pub(super) fn execute(
        &self,
        operation: &mut Operation<'_>,
        application: &Application<'_>,
    ) -> Result<Option<Outcome>> {
        let (concerned, links) = (application.concerned(), link_changes(application.merge));
        // A rollback puts another one into its place.
        if self.target_of_fork(application.from, application.wanted)? != application.target
            || !self.is_as_seen(application, &concerned, &links)?
        {
            return Ok(None);
        }
        let here = concerned.iter().filter(|number| !application.is_new(**number));
        let inodes: Vec<Arc<Inode>> =
            here.map(|number| self.files.inodes.get(application.target.sibling(*number))).collect();
        let _extents = match self.lock_all_extents(&inodes, application, &links) {
            Some(extents) => extents,
            None => return Ok(None),
        };
        let Some(mut states) = self.lock_all(&inodes, application, &links)? else {
            return Ok(None);
        };
        match self.check(application, &states, &links)? {
            Check::Fine => {}
            Check::Changed => return Ok(None),
            Check::Refused(found) => return Ok(Some(Outcome::Refused(found))),
        }
        let orphans = self.change(operation, application, &mut states, &links)?;
        for (number, state) in &states {
            let inode = application.target.sibling(*number);
            operation.put_inode(inode, &state.get().loggable())?;
        }
        operation.note_unlogged_change();
        let sequence = operation.log();
        for state in states.values_mut() {
            state.get_mut().logged(sequence);
        }
        drop(states);
        // Directories may have moved.
        self.store.trees.note_move();
        let target = application.target;
        let names = application.merge.entries.keys();
        let applied = Applied {
            target,
            names: names.map(|(at, name)| (target.sibling(*at), name.clone())).collect(),
            inodes: concerned.iter().map(|number| target.sibling(*number)).collect(),
        };
        Ok(Some(Outcome::Done(applied, orphans)))
    }

    /// Whether the origin is still as the merge was made for, in its tree.
    fn is_as_seen(
        &self,
        application: &Application<'_>,
        concerned: &BTreeSet<InodeNumber>,
        links: &BTreeMap<InodeNumber, i64>,
    ) -> Result<bool> {
        let Application { target, seen, merge, own_attribute, .. } = application;
        let now = Side { store: &self.store, tree: self.store.trees.of(*target), root: *target };
        let since = SideChanges::between(*seen, now, *own_attribute)?;
        let is_named = |of: Option<Target>| of.is_some_and(|of| concerned.contains(&of.inode));
        let same_names = since.entries.iter().all(|(key, change)| {
            !merge.entries.contains_key(key) && !is_named(change.before) && !is_named(change.after)
        });
        let moves_directories = merge
            .entries
            .values()
            .any(|plan| plan.wanted.is_some_and(|target| target.file_type == FileType::Directory));
        let same_inodes = since.inodes.iter().all(|(number, change)| {
            let has_moved = || match (&change.before, &change.after) {
                (Some(before), Some(after)) => before.parent != after.parent,
                _ => true,
            };
            let is_lost = concerned.contains(number) && change.is_gone();
            let is_mixed = application.is_touched(*number, links) && change.has_new_content();
            !(is_lost || is_mixed || moves_directories && change.is_directory() && has_moved())
        });
        Ok(same_names && same_inodes)
    }

    /// The extents of files that get data or lose names, unless somebody has them.
    fn lock_all_extents<'i>(
        &'i self,
        inodes: &'i [Arc<Inode>],
        application: &Application<'_>,
        links: &BTreeMap<InodeNumber, i64>,
    ) -> Option<Vec<ExtentsGuard<'i>>> {
        let is_wanted = |inode: &&Arc<Inode>| application.is_touched(inode.number.number(), links);
        inodes.iter().filter(is_wanted).map(|inode| self.files.try_lock_extents(inode)).collect()
    }

    /// Locks those that exist; nothing if one is gone, or has something that is not in the tree.
    fn lock_all<'i>(
        &self,
        inodes: &'i [Arc<Inode>],
        application: &Application<'_>,
        links: &BTreeMap<InodeNumber, i64>,
    ) -> Result<Option<States<'i>>> {
        let mut states = States::new();
        for inode in inodes {
            let number = inode.number.number();
            let state = match self.files.write_inode(inode) {
                Err(Error::NotFound) => return Ok(None),
                state => state?,
            };
            // What is only moved may have anything in memory.
            let is_touched = application.is_touched(number, links);
            let is_directory = state.file_type() == FileType::Directory;
            if state.item.links == 0 || is_touched && !is_directory && state.is_dirty() {
                return Ok(None);
            }
            states.insert(number, State::Here(state));
        }
        for (number, content) in &application.contents {
            if content.is_new {
                let is_directory = is_directory(&content.item);
                let item = InodeItem {
                    links: if is_directory { 2 } else { 0 },
                    size: if is_directory { 0 } else { content.item.size },
                    blocks: 0,
                    entries: 0,
                    ..content.item
                };
                states.insert(
                    *number,
                    State::New(Box::new(InodeState::new(item, self.store.log.last()))),
                );
            }
        }
        Ok(Some(states))
    }

    /// Step 3. What prevents it.
    fn check(
        &self,
        application: &Application<'_>,
        states: &States<'_>,
        links: &BTreeMap<InodeNumber, i64>,
    ) -> Result<Check> {
        let Application { target, merge, contents, .. } = application;
        let mut entries: BTreeMap<InodeNumber, i64> = BTreeMap::new();
        for ((directory, name), plan) in &merge.entries {
            let in_it = entries.entry(*directory).or_default();
            *in_it += i64::from(plan.wanted.is_some()) - i64::from(plan.expected.is_some());
            if application.is_new(*directory) {
                continue;
            }
            let (found, free) = self.find_entry(target.sibling(*directory), name)?;
            let stands = found.map(|found| found.target);
            if stands != plan.expected.map(entry_target) {
                return Ok(Check::Changed);
            }
            if stands.is_none() && free.is_none() {
                return Err(Error::HashCollisions);
            }
        }
        let mut refused = Vec::new();
        for (number, change) in links {
            let state = states[number].get();
            let left = if state.file_type() == FileType::Directory {
                let subdirectories = entries.get(number).copied().unwrap_or(0).max(0);
                if i64::from(state.item.links) + subdirectories > i64::from(LINKS_MAX) {
                    return Err(Error::TooManyLinks);
                }
                i64::from(!application.is_new(*number)) + change
            } else {
                i64::from(state.item.links) + change
            };
            if left > i64::from(LINKS_MAX) {
                return Err(Error::TooManyLinks);
            }
            if left < 0 {
                return Ok(Check::Changed);
            }
            if left == 0 {
                self.store.trees.of(*target).get(&orphan_key(target.sibling(*number)))?;
            }
            let in_it = state.item.entries as i64 + entries.get(number).copied().unwrap_or(0);
            if left == 0 && state.file_type() == FileType::Directory && in_it != 0 {
                // A subvolume, or what was made since.
                refused.push((Subject::Inode(*number), ConflictKind::RemovedInFork));
            }
        }
        for (number, content) in contents {
            let inode = target.sibling(*number);
            if content.is_new {
                let tree = self.store.trees.of(inode);
                if tree.get(&inode.key(ItemKind::Inode, 0))?.is_some() {
                    // It has no name any more, and is still open or being removed.
                    refused.push((Subject::Inode(*number), ConflictKind::RemovedInOrigin));
                }
                continue;
            }
            for key in content.items.keys() {
                self.store.trees.of(inode).get(key)?;
            }
            for (at, _) in application.staged.of(*number) {
                self.files.extents_in(inode, *at..at.next(), 1)?;
            }
            for blocks in &content.dropped {
                for (_, extent) in self.files.extents_in(inode, blocks.clone(), usize::MAX)? {
                    self.files.expect_referenced(&extent)?;
                }
            }
        }
        Ok(if refused.is_empty() { Check::Fine } else { Check::Refused(refused) })
    }

    /// Step 4, but for attributes. Returns the inodes that have no name any more.
    fn change(
        &self,
        operation: &mut Operation<'_>,
        application: &Application<'_>,
        states: &mut States<'_>,
        links: &BTreeMap<InodeNumber, i64>,
    ) -> Result<Vec<InodeId>> {
        let Application { target, merge, contents, .. } = application;
        let known = |number: &InodeNumber| target.sibling(*number);
        for ((directory, name), plan) in &merge.entries {
            let Some(gone) = plan.expected else { continue };
            let found = self.expect_entry(known(directory), name)?;
            operation.delete(known(directory).key(ItemKind::DirectoryEntry, found.slot))?;
            let state = states.get_mut(directory).ok_or(Error::Busy)?.get_mut();
            self.account_removed_entry(state, name, gone.file_type);
        }
        for ((directory, name), plan) in &merge.entries {
            let Some(come) = plan.wanted else { continue };
            self.add_entry(operation, known(directory), name, come)?;
            let state = states.get_mut(directory).ok_or(Error::Busy)?.get_mut();
            self.account_new_entry(state, name, come.file_type);
            let state = states.get_mut(&come.inode).ok_or(Error::Busy)?.get_mut();
            state.item.parent = self.parent_to_note(come.file_type, known(directory));
            let inode = self.files.inodes.get(known(&come.inode));
            inode.seen_in.store(known(directory).0, Ordering::Relaxed);
        }
        let mut orphans = Vec::new();
        for (number, change) in links {
            let is_new = application.is_new(*number);
            let state = states.get_mut(number).ok_or(Error::Busy)?.get_mut();
            if !is_new {
                state.item.changed = now();
            }
            let is_gone = if state.file_type() == FileType::Directory {
                i64::from(!is_new) + change == 0
            } else {
                let left = i64::from(state.item.links) + change;
                state.item.links = u32::try_from(left).unwrap_or(0);
                state.item.links == 0
            };
            if is_gone {
                state.item.links = 0;
                operation.put(orphan_key(known(number)), &encode_orphan(OrphanKind::Remove))?;
                orphans.push(known(number));
            }
        }
        for (number, content) in contents {
            let state = states.get_mut(number).ok_or(Error::Busy)?.get_mut();
            let staged = application.staged.take(*number, operation);
            self.fill(operation, known(number), state, content, staged)?;
        }
        Ok(orphans)
    }

    fn add_entry(
        &self,
        operation: &mut Operation<'_>,
        directory: InodeId,
        name: &[u8],
        target: Target,
    ) -> Result<()> {
        let (_, free) = self.find_entry(directory, name)?;
        let slot = free.ok_or(Error::HashCollisions)?;
        operation.put_entry(directory, slot, entry_target(target), name)
    }

    /// Gives an inode its content, but for its item.
    fn fill(
        &self,
        operation: &mut Operation<'_>,
        inode: InodeId,
        state: &mut InodeState,
        content: &Content,
        staged: impl Iterator<Item = (FileBlock, Extent)>,
    ) -> Result<()> {
        for (key, value) in &content.items {
            match value {
                Some(value) => operation.put(*key, value)?,
                None => operation.delete(*key)?,
            }
        }
        let item = &content.item;
        if is_directory(item) {
            let InodeItem { mode, uid, gid, flags, .. } = *item;
            state.item = InodeItem { mode, uid, gid, flags, ..state.item };
        } else {
            for blocks in &content.dropped {
                let gone = self.files.extents_in(inode, blocks.clone(), usize::MAX)?;
                self.files.drop_extents(operation, inode, state, blocks.clone(), &gone)?;
            }
            for (at, extent) in staged {
                self.files.insert_extent(operation, inode, state, at, extent)?;
            }
            let InodeItem { links, blocks, generation, parent, .. } = state.item;
            state.item = InodeItem { links, blocks, generation, parent, ..*item };
            state.disk_size = item.size;
        }
        if !content.is_new {
            state.item.changed = now();
        }
        Ok(())
    }
}
