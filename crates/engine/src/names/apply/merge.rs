//! Which changes of a fork can be made where it came from, which can't, and who wins.
//!
//! Both sides' changes are those since the fork began. What only one of them did stands. An inode
//! is one thing: its content (data, attributes, xattrs) and the set of its names are each changed
//! by one side, or in the same way by both; otherwise there is a *conflict*. A directory's entries
//! are things of their own, by name.
//!
//! Changes that make sense together only are a *group*: those of the inodes that one entry named
//! before and names afterwards, and of a directory that came or went with what is in it. If the
//! origin wins a conflict, its group is left out. If the fork wins, what the origin did to that
//! inode or entry is undone, where that does not reach further.
use super::changes::{EntryChange, EntryKey, InodeChange, SideChanges, Target};
use crate::types::{ConflictKind, Winner};
use cairn_format::{FileType, INODE_ROOT, InodeNumber};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What a conflict is about.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Subject {
    Inode(InodeNumber),
    Entry(EntryKey),
}

/// A conflict, and what it is about.
pub(super) type Found = (Subject, ConflictKind);

/// What is to be done with an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct EntryPlan {
    /// What the origin has there.
    pub(super) expected: Option<Target>,
    /// What it gets.
    pub(super) wanted: Option<Target>,
}

/// What is to be done.
#[derive(Default)]
pub(super) struct Merge {
    pub(super) entries: BTreeMap<EntryKey, EntryPlan>,
    /// Inodes that get content of the fork's, and whether they get all of it, whatever they have.
    pub(super) inodes: BTreeMap<InodeNumber, bool>,
}

/// The entries that one side has changed, by what they name or named.
struct Names(HashMap<InodeNumber, Vec<EntryKey>>);

impl Names {
    fn new(entries: &BTreeMap<EntryKey, EntryChange>) -> Self {
        let mut names: HashMap<InodeNumber, Vec<EntryKey>> = HashMap::new();
        for (key, change) in entries {
            for target in [change.before, change.after].into_iter().flatten() {
                names.entry(target.inode).or_default().push(key.clone());
            }
        }
        Self(names)
    }

    fn of(&self, inode: InodeNumber) -> &[EntryKey] {
        self.0.get(&inode).map_or(&[], Vec::as_slice)
    }
}

/// The merging of two sides' changes.
pub(super) struct Merging<'a> {
    theirs: SideChanges,
    ours: &'a SideChanges,
    /// Of the origin's entries, those that both sides changed in the same way count for nothing.
    our_names: Names,
    their_names: Names,
    /// Directories in which the origin made entries.
    our_filled: BTreeSet<InodeNumber>,
    whole: BTreeSet<InodeNumber>,
    /// Conflicts with what is no part of the merge, which the fork can't win.
    prevented: BTreeSet<Found>,
}

impl<'a> Merging<'a> {
    /// Of the changes of the fork, `theirs`, and of the origin, `ours`. `is_same` says whether an
    /// inode that both have changed is the same in both now. `prevented` are conflicts with what is
    /// no part of the merge.
    pub(super) fn new<E>(
        mut theirs: SideChanges,
        ours: &'a SideChanges,
        prevented: BTreeSet<Found>,
        is_same: &dyn Fn(InodeNumber, &InodeChange, &InodeChange) -> Result<bool, E>,
    ) -> Result<Self, E> {
        let mut entries = ours.entries.clone();
        theirs.entries.retain(|key, change| {
            let is_done = ours.entries.get(key).is_some_and(|our| our.after == change.after);
            if is_done {
                entries.remove(key);
            }
            !is_done
        });
        let mut done = BTreeSet::new();
        for (number, change) in &theirs.inodes {
            let is_done = !change.has_new_content()
                || match ours.inodes.get(number) {
                    Some(our) if change.is_gone() || our.is_gone() => {
                        change.is_gone() && our.is_gone()
                    }
                    Some(our) if our.has_new_content() => is_same(*number, change, our)?,
                    _ => false,
                };
            if is_done {
                done.insert(*number);
            }
        }
        theirs.inodes.retain(|number, _| !done.contains(number));
        let made = entries.iter().filter(|(_, change)| change.after.is_some());
        let our_filled = made.map(|((directory, _), _)| *directory).collect();
        let (our_names, their_names) = (Names::new(&entries), Names::new(&theirs.entries));
        let whole = BTreeSet::new();
        Ok(Self { theirs, ours, our_names, their_names, our_filled, whole, prevented })
    }

    fn is_gone_here(&self, inode: InodeNumber) -> bool {
        self.ours.inodes.get(&inode).is_some_and(InodeChange::is_gone)
    }

    /// The conflicts, but for loops.
    fn conflicts(&self) -> BTreeSet<Found> {
        let is_wanted = |(subject, _): &&Found| match subject {
            Subject::Inode(inode) => self.theirs.inodes.contains_key(inode),
            Subject::Entry(key) => self.theirs.entries.contains_key(key),
        };
        let mut found: BTreeSet<Found> = self.prevented.iter().filter(is_wanted).cloned().collect();
        for (number, change) in &self.theirs.inodes {
            if let Some(kind) = self.conflict_of_inode(*number, change) {
                found.insert((Subject::Inode(*number), kind));
            }
        }
        for (key, change) in &self.theirs.entries {
            let lacks_directory = change.after.is_some() && self.is_gone_here(key.0);
            let kind = match self.ours.entries.get(key) {
                _ if lacks_directory => ConflictKind::RemovedInOrigin,
                None => continue,
                Some(our) if our.after.is_none() => ConflictKind::RemovedInOrigin,
                Some(_) if change.after.is_none() => ConflictKind::RemovedInFork,
                Some(_) => ConflictKind::BothNamed,
            };
            found.insert((Subject::Entry(key.clone()), kind));
        }
        for (number, names) in &self.their_names.0 {
            let is_named = |key: &EntryKey| {
                let after = self.theirs.entries.get(key).and_then(|change| change.after);
                after.is_some_and(|target| target.inode == *number)
            };
            if self.is_gone_here(*number) {
                if names.iter().any(is_named) {
                    found.insert((Subject::Inode(*number), ConflictKind::RemovedInOrigin));
                }
            } else if !self.our_names.of(*number).is_empty()
                && !self.theirs.inodes.get(number).is_some_and(InodeChange::is_gone)
            {
                found.insert((Subject::Inode(*number), ConflictKind::BothMoved));
            }
        }
        found
    }

    fn conflict_of_inode(&self, number: InodeNumber, change: &InodeChange) -> Option<ConflictKind> {
        let our = self.ours.inodes.get(&number);
        if change.is_gone() {
            let is_used = our.is_some_and(|our| !our.is_gone() && our.has_new_content())
                || !self.our_names.of(number).is_empty()
                || change.is_directory() && self.our_filled.contains(&number);
            return is_used.then_some(ConflictKind::RemovedInFork);
        }
        match our {
            Some(our) if our.is_gone() => Some(ConflictKind::RemovedInOrigin),
            Some(our) if change.is_new() || our.has_new_content() => {
                Some(ConflictKind::BothChanged)
            }
            _ => None,
        }
    }

    /// What is to be done, and the conflicts that nobody has decided.
    pub(super) fn merge(
        mut self,
        winner: Winner,
        parent: &dyn Fn(InodeNumber) -> Option<InodeNumber>,
    ) -> (Merge, Vec<Found>) {
        let conflicts = self.conflicts();
        let mut left: Vec<Found> = match winner {
            Winner::Neither => conflicts.into_iter().collect(),
            Winner::Origin => {
                self.leave_out(&conflicts);
                self.conflicts().into_iter().collect()
            }
            Winner::Fork => {
                let undecided = |found: &Found| !self.undo_ours(found);
                conflicts.into_iter().filter(undecided).collect()
            }
        };
        let ours = self.ours;
        let is_gone = |inode| ours.inodes.get(&inode).is_some_and(InodeChange::is_gone);
        let merge = self.plan();
        left.extend(loops(&merge, parent, &is_gone));
        (merge, left)
    }

    fn plan(self) -> Merge {
        let mut merge = Merge::default();
        for (key, change) in self.theirs.entries {
            let expected = self.ours.entries.get(&key).map_or(change.before, |our| our.after);
            if expected != change.after {
                merge.entries.insert(key, EntryPlan { expected, wanted: change.after });
            }
        }
        let changed = self.theirs.inodes.iter().filter(|(_, change)| !change.is_gone());
        merge.inodes.extend(changed.map(|(number, _)| (*number, false)));
        merge.inodes.extend(self.whole.iter().map(|number| (*number, true)));
        merge
    }

    /// Leaves out the groups that have conflicts.
    fn leave_out(&mut self, conflicts: &BTreeSet<Found>) {
        let comes_or_goes = |directory: &InodeNumber| {
            let change = self.theirs.inodes.get(directory);
            change.is_some_and(|change| change.is_new() || change.is_gone())
        };
        let members = |key: &EntryKey, change: &EntryChange| -> Vec<InodeNumber> {
            let named = [change.before, change.after].into_iter().flatten();
            named.map(|target| target.inode).chain(Some(key.0).filter(comes_or_goes)).collect()
        };
        let mut by_inode: HashMap<InodeNumber, Vec<&EntryKey>> = HashMap::new();
        for (key, change) in &self.theirs.entries {
            for inode in members(key, change) {
                by_inode.entry(inode).or_default().push(key);
            }
        }
        let (mut entries, mut inodes) = (BTreeSet::new(), BTreeSet::new());
        let mut next: Vec<InodeNumber> = Vec::new();
        let follow = |key: &EntryKey, next: &mut Vec<InodeNumber>| {
            if let Some(change) = self.theirs.entries.get(key) {
                next.extend(members(key, change));
            }
        };
        for (subject, _) in conflicts {
            match subject {
                Subject::Inode(inode) => next.push(*inode),
                Subject::Entry(key) => {
                    entries.insert(key.clone());
                    follow(key, &mut next);
                }
            }
        }
        while let Some(inode) = next.pop() {
            if inodes.insert(inode) {
                for key in by_inode.get(&inode).map_or(&[][..], Vec::as_slice) {
                    if entries.insert((*key).clone()) {
                        follow(key, &mut next);
                    }
                }
            }
        }
        self.theirs.entries.retain(|key, _| !entries.contains(key));
        self.theirs.inodes.retain(|inode, _| !inodes.contains(inode));
        self.their_names = Names::new(&self.theirs.entries);
    }

    /// Has the fork win a conflict. Returns whether that is possible.
    fn undo_ours(&mut self, found: &Found) -> bool {
        let (subject, kind) = found;
        match (subject, kind) {
            _ if self.prevented.contains(found) => false,
            (Subject::Entry(key), _) => {
                // What stands there now loses this name; a directory would be lost with it.
                let here = self.ours.entries.get(key).and_then(|our| our.after);
                let is_directory = here.is_some_and(|here| here.file_type == FileType::Directory);
                !self.is_gone_here(key.0)
                    && !is_directory
                    && here.is_none_or(|here| self.undo_names(here.inode))
            }
            (Subject::Inode(inode), ConflictKind::BothChanged) => {
                self.whole.insert(*inode);
                self.undo_names(*inode)
            }
            (Subject::Inode(inode), ConflictKind::RemovedInFork) => {
                let is_directory =
                    self.theirs.inodes.get(inode).is_some_and(InodeChange::is_directory);
                !is_directory && self.undo_names(*inode)
            }
            (Subject::Inode(inode), _) => self.undo_names(*inode),
        }
    }

    /// The origin's changes of the names of `inode` don't count, nor do those of the inodes that
    /// had or got these names. What the origin has removed is made again for that.
    fn undo_names(&mut self, inode: InodeNumber) -> bool {
        let (mut undone, mut seen, mut next) = (Vec::new(), BTreeSet::new(), vec![inode]);
        while let Some(inode) = next.pop() {
            if !seen.insert(inode) {
                continue;
            }
            let our = self.ours.inodes.get(&inode);
            let (is_directory, is_new, is_gone) = our.map_or((false, false, false), |our| {
                (our.is_directory(), our.is_new(), our.is_gone())
            });
            // Nothing brings back what was in it, and nothing may be lost that is in it.
            if is_directory && (is_new || is_gone) {
                return false;
            }
            if is_gone && !self.theirs.inodes.get(&inode).is_some_and(InodeChange::is_gone) {
                self.whole.insert(inode);
            }
            for key in self.our_names.of(inode) {
                let Some(our) = self.ours.entries.get(key) else { continue };
                if self.theirs.entries.contains_key(key) {
                    continue;
                }
                if self.is_gone_here(key.0) {
                    return false;
                }
                next.extend([our.before, our.after].into_iter().flatten().map(|one| one.inode));
                undone.push((key.clone(), EntryChange { before: our.before, after: our.before }));
            }
        }
        self.theirs.entries.extend(undone);
        true
    }
}

/// Directories that would stand below themselves. `parent` says where a directory stands in the
/// origin, `is_gone` whether the origin has removed it: what would stand below that is a conflict
/// of another kind.
fn loops(
    merge: &Merge,
    parent: &dyn Fn(InodeNumber) -> Option<InodeNumber>,
    is_gone: &dyn Fn(InodeNumber) -> bool,
) -> Vec<Found> {
    let mut moved = BTreeMap::new();
    for ((directory, _), plan) in &merge.entries {
        if let Some(target) = plan.wanted.filter(|one| one.file_type == FileType::Directory) {
            moved.insert(target.inode, *directory);
        }
    }
    // Those that are known to lead to the root directory.
    let mut sound = BTreeSet::from([INODE_ROOT]);
    let mut found = Vec::new();
    for inode in moved.keys() {
        let (mut at, mut way) = (*inode, BTreeSet::new());
        while !sound.contains(&at) && way.insert(at) {
            match moved.get(&at).copied().or_else(|| parent(at)) {
                Some(above) => at = above,
                None => break,
            }
        }
        if sound.contains(&at) {
            sound.extend(way);
        } else if !is_gone(at) {
            found.push((Subject::Inode(*inode), ConflictKind::Loop));
        }
    }
    found
}
