//! Applies what has changed in a fork to the subvolume that it came from, which may have changed,
//! too: a merge of two trees that have a third one in common, by inode.
//!
//! 1. Of both a temporary snapshot is made. Each is compared with the snapshot that the fork began
//!    as ([`changes`]), in proportion to what differs.
//! 2. What both have changed is a conflict, unless it is the same now, or one side wins
//!    ([`merge`]). With conflicts left nothing is done.
//! 3. The data that files get is copied into free blocks ([`staged`](crate::file::staged)). *A
//!    crash: they are free.*
//! 4. All is done by one operation that nobody else joins ([`execute`]), and a commit. *A crash
//!    before its superblock: nothing of it has happened. After it: all of it.* If the subvolume has
//!    changed since its snapshot in what matters, all begins again with a new one.
//!
//! Files keep their inode numbers, so a second application finds nothing to do. Subvolumes that are
//! nested in either are left out, and so is preallocated space.
//!
//! Lock discipline: none is held, but by the operation. The snapshots are noted as being read: if
//! somebody deletes one, this ends soon, and its nodes stay until then.
mod changes;
mod execute;
mod merge;
mod nested;

use super::Names;
use super::differences::gathered::{Entry, Side};
use super::differences::paths::{Paths, Wanted};
use crate::file::snapshots::LongRead;
use crate::file::staged::Staged;
use crate::store::alone::OperationSize;
use crate::store::forks::Origins;
use crate::store::operation::Operation;
use crate::types::{Applied, Apply, ApplyOptions, Conflict, ConflictKind, SeekTarget};
use crate::{Error, InodeId, Result};
use cairn_btree::Tree;
use cairn_format::{
    FileBlock, FileType, Generation, INODE_ROOT, InodeItem, InodeNumber, ItemKind, Key,
};
use changes::{DataChange, InodeChange, SideChanges, is_directory, is_own_attribute};
use execute::{Application, Content, Outcome};
use merge::{Found, Merge, Merging, Subject};
use std::collections::{BTreeMap, BTreeSet};

/// Times that all begins again because the origin has changed.
const TRIES: usize = 16;
/// Bytes of two files that are compared at a time.
const COMPARED_BYTES: usize = 1 << 20;

/// Three states that have one history.
#[derive(Clone, Copy)]
struct Sides<'a> {
    base: Side<'a>,
    fork: Side<'a>,
    origin: Side<'a>,
    /// When the fork began.
    began: Generation,
    /// As of [`ApplyOptions`].
    own: Option<&'a [u8]>,
}

impl Names {
    /// The root directories of the subvolume that a fork came from, and of what has its place: the
    /// last one first.
    pub(crate) fn origins_of_fork(&self, fork: InodeId) -> Result<Vec<InodeId>> {
        if !fork.is_subvolume_root() {
            return Err(Error::InvalidArgument("not the root directory of a subvolume"));
        }
        self.files.enter(fork)?;
        Ok(self.store.origins_of_fork(fork)?.map_or(Vec::new(), |origins| origins.roots))
    }

    /// Which of these gets the changes of a fork.
    fn target_of_fork(&self, fork: InodeId, wanted: Option<InodeId>) -> Result<InodeId> {
        let origins = self.origins_of_fork(fork)?;
        let is_it = |root: &InodeId| wanted.is_none_or(|wanted| wanted == *root);
        origins.into_iter().find(is_it).ok_or(Error::NotFound)
    }

    /// What this fork can be applied to. That it began as this snapshot stays so.
    fn begin_base_read(&self, fork: InodeId) -> Result<(Origins, LongRead<'_>)> {
        loop {
            let began = self.store.origins_of_fork(fork)?.ok_or(Error::NotFound)?;
            let reading = self.files.begin_base_read(&began.heirs);
            // Whoever would join them with what they came from sees that, unless it was before.
            let now = self.store.origins_of_fork(fork)?.ok_or(Error::NotFound)?;
            if now.snapshot == began.snapshot && now.heirs == began.heirs {
                return Ok((began, reading));
            }
        }
    }

    /// Applies the changes of the fork with this root directory.
    pub(crate) fn apply(&self, fork: InodeId, options: ApplyOptions<'_>) -> Result<Apply> {
        self.origins_of_fork(fork)?;
        self.target_of_fork(fork, options.target)?;
        self.store.check_writable()?;
        let (began, _reading) = self.begin_base_read(fork)?;
        let base = self.store.trees.tree_of_snapshot(began.snapshot)?;
        for _ in 0..TRIES {
            // Once those are gone, the fork counts as one of something else.
            let now = self.store.origins_of_fork(fork)?.ok_or(Error::NotFound)?;
            if now.snapshot != began.snapshot {
                return Err(Error::NotFound);
            }
            let target = self.target_of_fork(fork, options.target)?;
            let states = self.files.unchanging([fork, target])?;
            let (roots, way) = (states.roots(), [fork, target]);
            let applied = self.try_apply(&base, began.snapshot.generation, roots, way, options)?;
            if let Some(applied) = applied {
                return Ok(applied);
            }
        }
        Err(Error::Busy)
    }

    /// Applies `fork`, a state of `from`, to `target`, of which `seen` is a state. Nothing if that
    /// has changed in what matters.
    fn try_apply(
        &self,
        base: &Tree,
        began: Generation,
        [fork, seen]: [InodeId; 2],
        [from, target]: [InodeId; 2],
        options: ApplyOptions<'_>,
    ) -> Result<Option<Apply>> {
        let base = Side { store: &self.store, tree: base, root: target };
        let _reading = self.files.begin_long_read([fork, seen])?;
        let side = |root| Side { store: &self.store, tree: self.store.trees.of(root), root };
        let own = options.own_attribute;
        let sides = Sides { base, fork: side(fork), origin: side(seen), began, own };
        let theirs = SideChanges::between(base, sides.fork, own)?;
        let ours = SideChanges::between(base, sides.origin, own)?;
        let changes = theirs.inodes.clone();
        let is_same = |number, their: &InodeChange, our: &InodeChange| {
            self.is_same_now(sides, number, their, our)
        };
        let prevented = self.prevented(sides.origin, &theirs)?;
        let merging = Merging::new(theirs, &ours, prevented, &is_same)?;
        let parent = |number| {
            let item = sides.origin.inode_item(number).ok().flatten();
            item.filter(is_directory).map(|item| InodeNumber(item.parent))
        };
        let (merge, conflicts) = merging.merge(options.winner, &parent);
        if !conflicts.is_empty() {
            return Ok(Some(Apply::Conflicts(self.shown(sides, conflicts)?)));
        }
        if merge.entries.is_empty() && merge.inodes.is_empty() {
            let (names, inodes) = (Vec::new(), Vec::new());
            return Ok(Some(Apply::Done(Applied { target, names, inodes })));
        }
        let (contents, staged, data) = self.contents(sides, &merge, &changes)?;
        let application = Application {
            from,
            target,
            wanted: options.target,
            seen: sides.origin,
            merge: &merge,
            own_attribute: sides.own,
            contents,
            staged,
        };
        self.read_ahead(&application)?;
        let size = application.size(data);
        let work = |operation: &mut Operation<'_>| self.execute(operation, &application);
        Ok(match self.store.alone(target, sides.origin.tree, size, work)? {
            None => None,
            Some(Outcome::Done(applied, orphans)) => {
                orphans.into_iter().for_each(|inode| self.files.reap_if_unused(inode));
                Some(Apply::Done(applied))
            }
            Some(Outcome::Refused(found)) => Some(Apply::Conflicts(self.shown(sides, found)?)),
        })
    }

    /// What the inodes get that the merge names, with their data copied, and what that changes of
    /// extents.
    fn contents(
        &self,
        sides: Sides<'_>,
        merge: &Merge,
        changes: &BTreeMap<InodeNumber, InodeChange>,
    ) -> Result<(BTreeMap<InodeNumber, Content>, Staged<'_>, OperationSize)> {
        let (mut contents, mut copied) = (BTreeMap::new(), Vec::new());
        let mut size = OperationSize { items: 0, growing: 0 };
        for (number, is_whole) in &merge.inodes {
            let Some(item) = sides.fork.inode_item(*number)? else { continue };
            let here = sides.origin.inode_item(*number)?.filter(|item| item.links > 0);
            let is_new = here.is_none();
            let [fork, origin] = [sides.fork, sides.origin].map(|side| side.root.sibling(*number));
            let (items, mut data, mut extents) = match changes.get(number) {
                Some(change) if !is_new && !*is_whole => {
                    let data = DataChange::of(change, sides.began);
                    (change.items.clone(), data, change.old_extents.len())
                }
                _ => {
                    let all = FileBlock::FIRST..FileBlock::END;
                    let extents = self.files.extents_in(origin, all.clone(), usize::MAX)?.len();
                    let copied = self.files.extents_in(fork, all.clone(), usize::MAX)?;
                    let dropped = if is_new { Vec::new() } else { vec![all] };
                    (self.all_items(sides, *number)?, DataChange { dropped, copied }, extents)
                }
            };
            if is_directory(&item) {
                // Extents of a directory are damage: nothing would take their copies.
                data = DataChange::default();
            } else {
                let end = FileBlock::round_up(item.size);
                let behind = self.files.extents_in(origin, end..FileBlock::END, usize::MAX)?;
                extents += data.end_at(end, &behind);
            }
            let DataChange { dropped, copied: data } = data;
            // Of one extent that is cut in two, a part more stays.
            size.growing += dropped.len() as u64;
            size.items += (extents + 2 * dropped.len()) as u64;
            copied.push((fork, data));
            contents.insert(*number, Content { is_new, item, items, dropped });
        }
        let staged = self.files.stage(&copied)?;
        size.growing += staged.count() as u64;
        size.items += staged.count() as u64;
        Ok((contents, staged, size))
    }

    /// What makes the items of an inode those of the fork, but for attributes and extents.
    fn all_items(
        &self,
        sides: Sides<'_>,
        number: InodeNumber,
    ) -> Result<BTreeMap<Key, Option<Vec<u8>>>> {
        let mut items = BTreeMap::new();
        for (side, is_fork) in [(sides.origin, false), (sides.fork, true)] {
            for (key, value) in other_items(side, number, sides.own)? {
                items.insert(key, is_fork.then_some(value));
            }
        }
        Ok(items)
    }

    /// Whether an inode that both sides have changed is the same on both.
    fn is_same_now(
        &self,
        sides: Sides<'_>,
        number: InodeNumber,
        their: &InodeChange,
        our: &InodeChange,
    ) -> Result<bool> {
        let (Some(their), Some(our)) = (their.after, our.after) else { return Ok(false) };
        if changes::essence(&their) != changes::essence(&our) {
            return Ok(false);
        }
        let [fork, origin] = [sides.fork, sides.origin].map(|side| side.root.sibling(number));
        let items = |side| other_items(side, number, sides.own);
        if items(sides.fork)? != items(sides.origin)? {
            return Ok(false);
        }
        if FileType::from_mode(their.mode) != Some(FileType::Regular) {
            return Ok(true);
        }
        self.has_same_data([fork, origin], &their)
    }

    fn has_same_data(&self, files: [InodeId; 2], item: &InodeItem) -> Result<bool> {
        let mut buffers = [vec![0; COMPARED_BYTES], vec![0; COMPARED_BYTES]];
        let (mut at, mut next) = (0, [None; 2]);
        while at < item.size {
            for (file, next) in files.iter().zip(&mut next) {
                if next.is_none_or(|next| next < at) {
                    *next = Some(self.next_data(*file, at, item.size)?);
                }
            }
            at = next.into_iter().flatten().min().unwrap_or(at);
            let mut counts = [0; 2];
            for ((file, buffer), count) in files.iter().zip(&mut buffers).zip(&mut counts) {
                *count = self.files.read_into(*file, at, buffer)?;
            }
            let [count, other] = counts;
            if count == 0 || count != other || buffers[0][..count] != buffers[1][..count] {
                return Ok(false);
            }
            at += count as u64;
        }
        Ok(true)
    }

    /// Where a file has data at or after `at`; otherwise the last byte of `size`, so that a reader
    /// still meets a file that has become shorter.
    fn next_data(&self, file: InodeId, at: u64, size: u64) -> Result<u64> {
        match self.files.seek(file, at, SeekTarget::Data) {
            Err(Error::OutOfRange) => Ok(size - 1),
            found => Ok(found?.min(size - 1)),
        }
    }

    /// Conflicts with their paths, by path.
    fn shown(&self, sides: Sides<'_>, found: Vec<Found>) -> Result<Vec<Conflict>> {
        let none: &[Entry] = &[];
        let mut conflicts = Vec::new();
        for (subject, kind) in found {
            let mut place = None;
            for side in [sides.fork, sides.origin, sides.base] {
                place = match &subject {
                    Subject::Entry((directory, name)) => match side.inode_item(*directory)? {
                        Some(item) if item.links > 0 => {
                            let path = Paths::new(side, none).of_entry(*directory, name)?;
                            Some((path, *directory))
                        }
                        _ => None,
                    },
                    Subject::Inode(inode) => place_of(side, *inode)?,
                };
                if place.is_some() {
                    break;
                }
            }
            let (path, directory) = place.unwrap_or_else(|| (b"?".to_vec(), INODE_ROOT));
            let Sides { base, fork, origin, .. } = sides;
            let removed = match kind {
                ConflictKind::RemovedInOrigin => removed_above(directory, fork, [base, origin])?,
                ConflictKind::RemovedInFork => removed_above(directory, origin, [base, fork])?,
                _ => None,
            };
            conflicts.push(Conflict { path, kind, removed });
        }
        conflicts.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        conflicts.dedup();
        Ok(conflicts)
    }
}

/// The items of an inode, but for its attributes, entries and extents.
fn other_items(
    side: Side<'_>,
    number: InodeNumber,
    own: Option<&[u8]>,
) -> Result<Vec<(Key, Vec<u8>)>> {
    let mut items = Vec::new();
    for kind in [ItemKind::Xattr, ItemKind::XattrPart, ItemKind::Symlink] {
        for found in side.tree.range(Key::all(number, kind)) {
            let (key, value) = found?;
            if !is_own_attribute(&key, &value, own) {
                items.push((key, value));
            }
        }
    }
    Ok(items)
}

/// A path of an inode that this side has, and the directory in which that ends.
fn place_of(side: Side<'_>, inode: InodeNumber) -> Result<Option<(Vec<u8>, InodeNumber)>> {
    let Some(item) = side.inode_item(inode)?.filter(|item| item.links > 0) else {
        return Ok(None);
    };
    if inode == INODE_ROOT {
        return Ok(Some((b".".to_vec(), INODE_ROOT)));
    }
    let mut paths = Paths::new(side, &[]);
    if is_directory(&item) {
        let path = paths.of_directory(inode)?;
        let path = path.strip_suffix(b"/").unwrap_or(path).to_vec();
        return Ok(Some((path, InodeNumber(item.parent))));
    }
    let names = paths.names_of(BTreeMap::from([(inode, Wanted::new(1, &item))]), &mut Err)?;
    let Some((_, directory, name)) = names.into_iter().next() else { return Ok(None) };
    Ok(Some((paths.of_entry(directory, &name)?, directory)))
}

/// The path on `side` of the highest directory, from `directory` upwards, that `base` has and
/// `other` has not.
fn removed_above(
    directory: InodeNumber,
    side: Side<'_>,
    [base, other]: [Side<'_>; 2],
) -> Result<Option<Vec<u8>>> {
    let has = |side: Side<'_>, inode| -> Result<bool> {
        Ok(side.inode_item(inode)?.is_some_and(|item| item.links > 0))
    };
    let (mut at, mut seen, mut highest) = (directory, BTreeSet::new(), None);
    // Damage may lead in circles.
    while at != INODE_ROOT && seen.insert(at) {
        let Some(item) = side.inode_item(at)?.filter(is_directory) else { break };
        if has(base, at)? && !has(other, at)? {
            highest = Some(at);
        }
        at = InodeNumber(item.parent);
    }
    let Some(highest) = highest else { return Ok(None) };
    Ok(place_of(side, highest)?.map(|(path, _)| path))
}
