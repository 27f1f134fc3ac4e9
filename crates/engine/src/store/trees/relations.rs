//! What others have to do with a subvolume: which have names in it, and which are forks of its
//! snapshots.
//!
//! The items say that of each subvolume for itself: where its name stands, and what its origin is.
//! Here it is by the other one, so that nothing but what is asked for is looked at: the cut asks
//! for each snapshot and fork that it makes.
//!
//! States: *unknown*, at first and after a change of the tree that failed; *known*, once all items
//! were read, which a mount does before others use the volume.
//!
//! Invariants, of what is known:
//! - each item of a subvolume that has its name in another one is in `names`, and nothing else is:
//!   the first one has no name, and forks that a cut is still to make have no item;
//! - each item with an origin is in `forks`, also without a name, and nothing else is;
//! - each subvolume with an item is in `families`, a fork in that of its origin. That stays so when
//!   it is joined with its origin, and gets another one or none. So nobody walks along origins.
//!
//! Lock: a leaf, held for moments. Both states and changes need the lock of the tree of subvolumes,
//! so items and what is known of them change as one. Unit tests compare them.
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_format::{Generation, InodeNumber, Origin, SubvolumeItem, TreeId};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

#[derive(Default, Debug)]
pub(super) struct Relations {
    /// The subvolume and the directory with a name, and whose that is.
    names: BTreeSet<(TreeId, InodeNumber, TreeId)>,
    /// The snapshot that is an origin, and its fork.
    forks: BTreeSet<(TreeId, Generation, TreeId)>,
    /// The family of each subvolume, by the id of one that all in it have come from.
    families: FxHashMap<TreeId, TreeId>,
}

const IDS: RangeInclusive<TreeId> = TreeId(0)..=TreeId(u64::MAX);

fn name_of(id: TreeId, item: &SubvolumeItem) -> Option<(TreeId, InodeNumber, TreeId)> {
    let has_name = !item.is_nameless() && item.parent != id;
    has_name.then_some((item.parent, item.directory, id))
}

fn fork_of(id: TreeId, item: &SubvolumeItem) -> Option<(TreeId, Generation, TreeId)> {
    item.origin.map(|origin| (origin.subvolume, origin.generation, id))
}

impl Relations {
    /// The item of a subvolume is there; those of lower ids came before.
    pub(super) fn add(&mut self, id: TreeId, item: &SubvolumeItem) {
        if !self.families.contains_key(&id) {
            let family = item.origin.map_or(id, |origin| self.family(origin.subvolume));
            self.families.insert(id, family);
        }
        self.names.extend(name_of(id, item));
        self.forks.extend(fork_of(id, item));
    }

    /// It is gone, or another one.
    fn remove(&mut self, id: TreeId, item: &SubvolumeItem) {
        name_of(id, item).map(|name| self.names.remove(&name));
        fork_of(id, item).map(|fork| self.forks.remove(&fork));
    }

    /// Subvolumes have the same family if and only if they have come from the same one that is no
    /// fork.
    pub(super) fn family(&self, of: TreeId) -> TreeId {
        self.families.get(&of).copied().unwrap_or(of)
    }

    /// The directories of a subvolume in which names of others stand, by ascending number; one
    /// comes as often as it has names.
    pub(super) fn directories(&self, of: TreeId) -> impl Iterator<Item = InodeNumber> {
        let first = (of, InodeNumber(0), *IDS.start());
        let last = (of, InodeNumber(u64::MAX), *IDS.end());
        self.names.range(first..=last).map(|(_, directory, _)| *directory)
    }

    /// The transactions that made the snapshots of a subvolume that have forks, by ascending
    /// number; one comes as often as its snapshot has forks.
    pub(super) fn forked(&self, of: TreeId) -> impl Iterator<Item = Generation> {
        let first = (of, Generation(0), *IDS.start());
        let last = (of, Generation(u64::MAX), *IDS.end());
        self.forks.range(first..=last).map(|(_, made, _)| *made)
    }

    /// Whether there is a fork of this snapshot.
    pub(super) fn any_fork_of(&self, origin: Origin) -> bool {
        self.forks_of(origin).next().is_some()
    }

    /// The fork of this snapshot, if there is exactly one.
    pub(super) fn only_fork_of(&self, origin: Origin) -> Option<TreeId> {
        let mut forks = self.forks_of(origin);
        forks.next().filter(|_| forks.next().is_none())
    }

    fn forks_of(&self, origin: Origin) -> impl Iterator<Item = TreeId> {
        let place = |id| (origin.subvolume, origin.generation, id);
        self.forks.range(place(*IDS.start())..=place(*IDS.end())).map(|(_, _, fork)| *fork)
    }
}

/// The relations of a volume's subvolumes, once they are known.
pub(super) struct KnownRelations(Mutex<Option<Relations>>);

impl KnownRelations {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Rank::LEAF, None))
    }

    /// What `look` returns of them, if they are known.
    pub(super) fn look<T>(&self, look: impl FnOnce(&Relations) -> T) -> Option<T> {
        self.0.lock().as_ref().map(look)
    }

    /// All items were read.
    pub(super) fn note_all(&self, relations: Relations) {
        *self.0.lock() = Some(relations);
    }

    /// The tree has another item of a subvolume than before, or none: from the first to the second.
    /// Without a `change` it failed, and the tree may have either.
    pub(super) fn note_change(&self, id: TreeId, change: Option<[Option<&SubvolumeItem>; 2]>) {
        let mut known = self.0.lock();
        let Some([before, after]) = change else {
            *known = None;
            return;
        };
        if let Some(relations) = &mut *known {
            before.into_iter().for_each(|item| relations.remove(id, item));
            after.into_iter().for_each(|item| relations.add(id, item));
            if after.is_none() {
                relations.families.remove(&id);
            }
        }
    }
}

#[cfg(test)]
impl Relations {
    /// Both say the same. Which id a family has is nobody's business.
    pub(super) fn expect_same(&self, other: &Self) {
        assert_eq!((&self.names, &self.forks), (&other.names, &other.forks));
        let members = |relations: &Self| {
            let mut members = std::collections::BTreeMap::<_, BTreeSet<_>>::new();
            for (id, family) in &relations.families {
                members.entry(*family).or_default().insert(*id);
            }
            members.into_values().collect::<BTreeSet<_>>()
        };
        assert_eq!(members(self), members(other));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::random::Seeded;
    use cairn_format::Key;
    use std::collections::BTreeMap;

    /// With ids up to this one.
    const FEW: u64 = 6;

    fn any_item(random: &mut Seeded) -> SubvolumeItem {
        let mut below = |end| random.below(end);
        let origin = (below(2) == 0)
            .then(|| Origin { subvolume: TreeId(below(FEW)), generation: Generation(below(3)) });
        SubvolumeItem {
            parent: TreeId(below(FEW)),
            directory: InodeNumber(below(3)),
            generation: Generation(0),
            created_ns: 0,
            is_dying: below(4) == 0,
            is_headless: below(4) == 0,
            uuid: [0; 16],
            number: 0,
            origin,
            names_others: false,
            continues: false,
            notes_inherited: false,
            is_joined: false,
            cursor: Key::MIN,
            dying_root: None,
        }
    }

    /// Looks at all items for each answer.
    fn expect_same(items: &BTreeMap<TreeId, SubvolumeItem>, known: &Relations, what: &str) {
        for of in (0..FEW).map(TreeId) {
            let others = items.iter().filter(|(id, item)| {
                **id != of && item.parent == of && !item.is_dying && !item.is_headless
            });
            let mut directories: Vec<_> = others.map(|(_, item)| item.directory).collect();
            directories.sort_unstable();
            assert!(known.directories(of).eq(directories), "{what}: {of:?} in {items:?}");
            let origins = items.values().filter_map(|item| item.origin);
            let mut forked: Vec<_> = origins
                .filter(|origin| origin.subvolume == of)
                .map(|origin| origin.generation)
                .collect();
            forked.sort_unstable();
            for generation in (0..3).map(Generation) {
                let origin = Origin { subvolume: of, generation };
                let is_forked = forked.contains(&generation);
                assert_eq!(known.any_fork_of(origin), is_forked, "{what}: {origin:?} in {items:?}");
            }
            assert!(known.forked(of).eq(forked), "{what}: {of:?} in {items:?}");
        }
    }

    #[test]
    fn what_is_known_is_what_the_items_say() {
        let seed = std::env::var("CAIRN_SEED").map_or(1, |seed| seed.parse().unwrap());
        let (mut random, relations) = (Seeded::new(seed), KnownRelations::new());
        relations.note_all(Relations::default());
        let mut items = BTreeMap::new();
        for step in 0..2000 {
            let id = TreeId(random.below(FEW));
            let after = (random.below(3) > 0).then(|| any_item(&mut random));
            let before = match &after {
                Some(item) => items.insert(id, *item),
                None => items.remove(&id),
            };
            relations.note_change(id, Some([before.as_ref(), after.as_ref()]));
            let what = format!("seed {seed}, step {step}");
            assert!(relations.look(|known| expect_same(&items, known, &what)).is_some());
        }
        assert!(!items.is_empty());
    }

    #[test]
    fn a_family_stays_together_when_forks_are_joined() {
        let (mut random, relations) = (Seeded::new(1), KnownRelations::new());
        relations.note_all(Relations::default());
        let item = |origin| SubvolumeItem { origin, ..any_item(&mut Seeded::new(1)) };
        let of = |id| Some(Origin { subvolume: TreeId(id), generation: Generation(id) });
        let mut items = BTreeMap::from([(TreeId(0), item(None)), (TreeId(1), item(None))]);
        items.iter().for_each(|(id, item)| relations.note_change(*id, Some([None, Some(item)])));
        for id in 2..300 {
            let (id, origin) = (TreeId(id), random.below(id));
            let origin = items.keys().rev().nth(origin as usize % items.len()).unwrap().0;
            let fork = item(of(origin));
            relations.note_change(id, Some([None, Some(&fork)]));
            items.insert(id, fork);
            // One with a single fork is joined with that.
            let forks = |id: &TreeId| {
                let is_fork = |(_, item): &(&TreeId, &SubvolumeItem)| {
                    item.origin.is_some_and(|origin| origin.subvolume == *id)
                };
                items.iter().filter(is_fork).map(|(id, _)| *id).collect::<Vec<_>>()
            };
            let found = items.keys().find_map(|id| {
                Some(*id).zip(match forks(id)[..] {
                    [fork] => Some(fork),
                    _ => None,
                })
            });
            if let Some((gone, fork)) = found.filter(|_| random.chance(1, 2)) {
                let before = items.remove(&gone).unwrap();
                relations.note_change(gone, Some([Some(&before), None]));
                let joined = item(before.origin);
                let was = items.insert(fork, joined).unwrap();
                relations.note_change(fork, Some([Some(&was), Some(&joined)]));
            }
            let mut read = Relations::default();
            items.iter().for_each(|(id, item)| read.add(*id, item));
            relations.look(|known| known.expect_same(&read)).unwrap();
        }
        assert!(items.contains_key(&TreeId(299)) && items.len() < 250, "{}", items.len());
    }

    #[test]
    fn after_a_change_that_failed_nothing_is_known() {
        let (mut random, relations) = (Seeded::new(1), KnownRelations::new());
        let item = any_item(&mut random);
        // What changes before all is read does not count as all.
        relations.note_change(TreeId(300), Some([None, Some(&item)]));
        assert!(relations.look(|_| ()).is_none());
        relations.note_all(Relations::default());
        assert!(relations.look(|_| ()).is_some());
        relations.note_change(TreeId(300), None);
        assert!(relations.look(|_| ()).is_none());
    }
}
