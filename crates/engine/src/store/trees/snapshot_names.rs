//! The names of a subvolume's snapshots: one of them is found without reading the others.
//!
//! Of a subvolume, either all of its snapshots with names are known or none. They are read when the
//! first name is looked for, and noted from then on. What is known is the hash of a name and the
//! transaction that made the snapshot. Names with equal hashes, and whether the snapshot may be
//! seen, are told apart by its item.
//!
//! Invariant: of a subvolume that is known, each snapshot with a name in the tree of subvolumes is
//! noted, but for changes that are under way.
//!
//! Lock: a leaf, held for moments. What is read without it is noted only if nothing changed
//! meanwhile. Changes are noted when the tree has them, with its lock held.
use super::Trees;
use crate::Result;
use cairn_environment::Rank;
use cairn_environment::atomic::Ordering;
use cairn_environment::lock::Mutex;
use cairn_format::{Generation, ItemKind, Key, SnapshotItem, TreeId, hash_name};
use std::collections::BTreeSet;

/// Most snapshots and subvolumes that are known, of about 40 bytes each.
const KNOWN_MAX: usize = 1 << 16;

/// A snapshot with a name.
#[derive(Clone, Copy)]
pub(crate) struct Named<'n> {
    pub(crate) subvolume: TreeId,
    pub(crate) made: Generation,
    pub(crate) name: &'n [u8],
}

/// The names of a subvolume are being read.
pub(crate) struct Reading {
    changes: u64,
}

#[derive(Default)]
struct State {
    subvolumes: BTreeSet<TreeId>,
    /// With the hash of the name.
    snapshots: BTreeSet<(TreeId, u64, Generation)>,
    /// How often snapshots have changed.
    changes: u64,
    /// The newest one that was made since the volume was opened.
    last_made: Generation,
}

pub(crate) struct SnapshotNames {
    seed: [u8; 16],
    state: Mutex<State>,
}

impl SnapshotNames {
    /// Hashes depend on `seed`.
    pub(crate) fn new(seed: [u8; 16]) -> Self {
        Self { seed, state: Mutex::new(Rank::LEAF, State::default()) }
    }

    /// The snapshots of a subvolume that may have this name, by age, if they are known.
    pub(crate) fn of(&self, subvolume: TreeId, name: &[u8]) -> Option<Vec<Generation>> {
        let hash = hash_name(&self.seed, name);
        let state = self.state.lock();
        let place = |made| (subvolume, hash, Generation(made));
        let found = state.snapshots.range(place(0)..=place(u64::MAX)).map(|(.., made)| *made);
        state.subvolumes.contains(&subvolume).then(|| found.collect())
    }

    /// The names of a subvolume are going to be read.
    pub(crate) fn begin(&self) -> Reading {
        Reading { changes: self.state.lock().changes }
    }

    /// All names of a subvolume were read. Nothing is noted if snapshots changed meanwhile.
    pub(crate) fn end(
        &self,
        reading: &Reading,
        subvolume: TreeId,
        names: &[(Generation, Vec<u8>)],
    ) {
        let place =
            |(made, name): &(Generation, Vec<u8>)| (subvolume, hash_name(&self.seed, name), *made);
        let places: Vec<_> = names.iter().map(place).collect();
        let mut state = self.state.lock();
        if state.changes == reading.changes && places.len() < KNOWN_MAX {
            state.make_room(places.len() + 1);
            state.subvolumes.insert(subvolume);
            state.snapshots.extend(places);
        }
    }

    /// A snapshot with a name enters the tree: `make` does that.
    pub(crate) fn while_making<T>(
        &self,
        snapshot: Named<'_>,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let made = make();
        // A thread that has read the names before that may have missed it.
        self.note(snapshot, made.is_ok(), |state, place| {
            state.last_made = state.last_made.max(snapshot.made);
            if state.subvolumes.contains(&snapshot.subvolume) {
                state.make_room(1);
            }
            if state.subvolumes.contains(&snapshot.subvolume) {
                state.snapshots.insert(place);
            }
        });
        made
    }

    /// A snapshot loses its name in the tree: `delete` does that.
    pub(crate) fn while_deleting<T>(
        &self,
        snapshot: Named<'_>,
        delete: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let deleted = delete();
        self.note(snapshot, deleted.is_ok(), |state, place| _ = state.snapshots.remove(&place));
        deleted
    }

    /// A change was made, or failed halfway.
    fn note(
        &self,
        snapshot: Named<'_>,
        is_done: bool,
        change: impl FnOnce(&mut State, (TreeId, u64, Generation)),
    ) {
        let place = (snapshot.subvolume, hash_name(&self.seed, snapshot.name), snapshot.made);
        let mut state = self.state.lock();
        state.changes += 1;
        if is_done { change(&mut state, place) } else { state.forget_all() }
    }

    /// The subvolume is gone; it has no snapshots any more.
    pub(crate) fn note_ended(&self, subvolume: TreeId) {
        self.state.lock().subvolumes.remove(&subvolume);
    }

    /// Whether this transaction made a snapshot with a name.
    pub(crate) fn was_made_in(&self, generation: Generation) -> bool {
        self.state.lock().last_made == generation
    }
}

impl State {
    fn forget_all(&mut self) {
        self.subvolumes.clear();
        self.snapshots.clear();
    }

    fn make_room(&mut self, more: usize) {
        if self.subvolumes.len() + self.snapshots.len() + more > KNOWN_MAX {
            self.forget_all();
        }
    }
}

impl Trees {
    /// The snapshot of `id` with this name, if a durable superblock has it.
    pub(in crate::store) fn snapshot_named(
        &self,
        id: TreeId,
        name: &[u8],
    ) -> Result<Option<(Generation, SnapshotItem)>> {
        self.find_named(id, name, Generation(self.durable.load(Ordering::Acquire)))
    }

    /// Whether a snapshot of `id` has this name, also one that no durable superblock has.
    pub(in crate::store) fn is_name_of_snapshot(&self, id: TreeId, name: &[u8]) -> Result<bool> {
        Ok(self.find_named(id, name, Generation(u64::MAX))?.is_some())
    }

    /// The snapshot of `id` with this name that `newest` or an earlier transaction made.
    fn find_named(
        &self,
        id: TreeId,
        name: &[u8],
        newest: Generation,
    ) -> Result<Option<(Generation, SnapshotItem)>> {
        let Some(records) = self.records.get() else { return Ok(None) };
        let found = match self.snapshot_names.of(id, name) {
            Some(found) => found,
            None => self.read_names(id, name)?,
        };
        for made in found.into_iter().filter(|made| *made <= newest) {
            let key = Key::of_subvolume(id, ItemKind::Snapshot, made);
            let Some(value) = records.tree.get(&key)? else { continue };
            let item = SnapshotItem::decode(&value)?;
            if !item.is_hidden && item.name == name {
                return Ok(Some((made, item)));
            }
        }
        Ok(None)
    }

    /// Reads the names of all snapshots of `id`; returns those of them with this name.
    fn read_names(&self, id: TreeId, name: &[u8]) -> Result<Vec<Generation>> {
        let (reading, mut names) = (self.snapshot_names.begin(), Vec::new());
        for item in self.all_snapshot_items(id) {
            let (made, item) = item?;
            if !item.is_hidden {
                names.push((made, item.name));
            }
        }
        self.snapshot_names.end(&reading, id, &names);
        names.retain(|(_, of)| of == name);
        Ok(names.into_iter().map(|(made, _)| made).collect())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::Error;

    const ID: TreeId = TreeId(300);

    fn named(made: u64, name: &[u8]) -> Named<'_> {
        Named { subvolume: ID, made: Generation(made), name }
    }

    fn of(names: &SnapshotNames, name: &[u8]) -> Option<Vec<u64>> {
        let found = names.of(ID, name)?;
        Some(found.into_iter().map(|made| made.0).collect())
    }

    fn read(names: &SnapshotNames, found: &[(u64, &[u8])]) {
        let found: Vec<_> =
            found.iter().map(|(made, name)| (Generation(*made), name.to_vec())).collect();
        names.end(&names.begin(), ID, &found);
    }

    #[test]
    fn changes_are_noted_once_all_names_were_read() {
        let names = SnapshotNames::new([1; 16]);
        names.while_making(named(5, b"a"), || Ok(())).unwrap();
        assert_eq!(of(&names, b"a"), None);
        read(&names, &[(5, b"a")]);
        assert_eq!((of(&names, b"a"), of(&names, b"b")), (Some(vec![5]), Some(vec![])));
        names.while_making(named(7, b"b"), || Ok(())).unwrap();
        assert!(names.was_made_in(Generation(7)) && !names.was_made_in(Generation(5)));
        names.while_deleting(named(5, b"a"), || Ok(())).unwrap();
        assert_eq!((of(&names, b"a"), of(&names, b"b")), (Some(vec![]), Some(vec![7])));
        // Another subvolume is another matter.
        assert_eq!(names.of(TreeId(301), b"b"), None);
        names.while_deleting(named(7, b"b"), || Ok(())).unwrap();
        names.note_ended(ID);
        assert_eq!(of(&names, b"b"), None);
        let state = names.state.lock();
        assert!(state.snapshots.is_empty() && state.subvolumes.is_empty());
    }

    #[test]
    fn what_changes_while_names_are_read_is_never_missing() {
        let names = SnapshotNames::new([1; 16]);
        let reading = names.begin();
        names.while_making(named(5, b"a"), || Ok(())).unwrap();
        names.end(&reading, ID, &[]);
        assert_eq!(of(&names, b"a"), None);
        // Nor what an error has left half done.
        read(&names, &[(5, b"a")]);
        let failed = names.while_deleting::<()>(named(5, b"a"), || Err(Error::NoSpace));
        assert!(failed.is_err());
        assert_eq!(of(&names, b"a"), None);
    }

    #[test]
    fn not_too_much_is_kept() {
        let names = SnapshotNames::new([1; 16]);
        let many = |id: u64, count: usize| {
            let found: Vec<_> = (0..count as u64).map(|made| (Generation(made), vec![])).collect();
            names.end(&names.begin(), TreeId(id), &found);
        };
        let is_known = |id: u64| names.of(TreeId(id), b"x").is_some();
        many(1, KNOWN_MAX / 2 - 1);
        many(2, KNOWN_MAX / 2 - 1);
        assert!(is_known(1) && is_known(2));
        many(3, 1);
        assert!(!is_known(1) && !is_known(2) && is_known(3));
        many(4, KNOWN_MAX);
        assert!(!is_known(4) && is_known(3));
        many(5, KNOWN_MAX - 1);
        assert!(is_known(5));
        let one = Named { subvolume: TreeId(5), made: Generation(1 << 40), name: b"x" };
        names.while_making(one, || Ok(())).unwrap();
        assert!(!is_known(5));
    }
}
