//! Lines: which subvolumes have stood in one place, one after the other.
//!
//! A rollback puts a fork into the place of a subvolume. The fork *continues* it, and says so in
//! its item. Subvolumes that continue the same first one are a *line*, by ascending id. Each shows
//! its own snapshots and those of the ones before it, so these stay with the place; it may be
//! rolled back to any of them. A name of a snapshot is used once in a line.
//!
//! A fork that continues comes from a snapshot of its own line. So its origin leads to the first of
//! the line. The first one is there as long as the line has any other: its snapshot is the origin
//! of the next one, unless that is joined with it (`joining.rs`) and becomes the first.
//!
//! What continues is read when it is first asked for, and noted from then on. A line is known by
//! the id of a subvolume that was its first one at some time, so it stays the same when that is
//! joined with the next one. What is asked of a subvolume costs what its own line has.
//!
//! Lock: a leaf, held for moments. What is read without it counts only if nothing changed
//! meanwhile.
use super::Trees;
use crate::Result;
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_format::TreeId;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// The lines with more than one subvolume.
#[derive(Default)]
struct Known {
    /// The line of each subvolume that continues another one, or did. Of others it has their id.
    lines: FxHashMap<TreeId, TreeId>,
    /// Each line with its subvolumes.
    members: BTreeSet<(TreeId, TreeId)>,
}

impl Known {
    fn line(&self, id: TreeId) -> TreeId {
        self.lines.get(&id).copied().unwrap_or(id)
    }

    /// `id` is in the line of `other`.
    fn add(&mut self, id: TreeId, other: TreeId) {
        let line = self.line(other);
        self.lines.insert(id, line);
        self.members.extend([(line, other), (line, id)]);
    }

    fn remove(&mut self, id: TreeId) {
        let line = self.lines.remove(&id).unwrap_or(id);
        self.members.remove(&(line, id));
    }

    /// The subvolumes of the line of `id`, by ascending id; none if that is alone.
    fn members(&self, id: TreeId) -> impl DoubleEndedIterator<Item = TreeId> {
        let line = self.line(id);
        let members = self.members.range((line, TreeId(0))..=(line, TreeId(u64::MAX)));
        members.map(|(_, member)| *member)
    }
}

#[derive(Default)]
struct State {
    /// Once they were read.
    known: Option<Known>,
    /// How often they have changed.
    changes: u64,
}

/// The lines of a volume.
pub(super) struct Lines(Mutex<State>);

impl Lines {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Rank::LEAF, State::default()))
    }

    fn change(&self, change: impl FnOnce(&mut Known)) {
        let mut state = self.0.lock();
        state.changes += 1;
        if let Some(known) = &mut state.known {
            change(known);
        }
    }

    /// The fork `id` stands in the place of one in the line of `other`.
    pub(super) fn note_continued(&self, id: TreeId, other: TreeId) {
        self.change(|known| known.add(id, other));
    }

    /// The item of the subvolume `id` is gone.
    pub(super) fn note_ended(&self, id: TreeId) {
        self.change(|known| known.remove(id));
    }
}

impl Trees {
    /// The last fork of the subvolume `id` was joined with it. If it continues that, it has its
    /// place in the line: the first one, or behind the same one as that.
    pub(in crate::store) fn note_joined(&self, id: TreeId) {
        // Who reads the items between the two changes of a join finds the fork's old origin.
        self.lines.note_ended(id);
    }

    fn look_at_lines<T>(&self, look: impl Fn(&Known) -> T) -> Result<T> {
        loop {
            let changes = {
                let state = self.lines.0.lock();
                if let Some(known) = &state.known {
                    return Ok(look(known));
                }
                state.changes
            };
            let mut known = Known::default();
            if self.may_have_forks() {
                // Origins have lower ids.
                for item in self.subvolume_items() {
                    let (id, item) = item?;
                    if let Some(origin) = item.origin.filter(|_| item.continues) {
                        known.add(id, origin.subvolume);
                    }
                }
            }
            let mut state = self.lines.0.lock();
            if state.changes == changes {
                state.known.get_or_insert(known);
            }
        }
    }

    /// The first subvolume of the line of `id`.
    pub(in crate::store) fn first_of_line(&self, id: TreeId) -> Result<TreeId> {
        self.look_at_lines(|known| known.members(id).next().unwrap_or(id))
    }

    /// All subvolumes of the line of `id`, by ascending id.
    pub(in crate::store) fn line_of(&self, id: TreeId) -> Result<Vec<TreeId>> {
        let line: Vec<_> = self.look_at_lines(|known| known.members(id).collect())?;
        Ok(if line.is_empty() { vec![id] } else { line })
    }

    /// The subvolume `id` and those that it continues, by descending id: it shows the snapshots of
    /// all of them.
    pub(in crate::store) fn continued_by(&self, id: TreeId) -> Result<Vec<TreeId>> {
        let mut line = self.line_of(id)?;
        line.retain(|other| *other <= id);
        line.reverse();
        Ok(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::random::Seeded;
    use std::collections::BTreeMap;

    /// The origin of each subvolume, and whether it continues that.
    type Items = BTreeMap<TreeId, (Option<TreeId>, bool)>;

    fn read(items: &Items) -> Known {
        let mut known = Known::default();
        for (id, (origin, continues)) in items {
            if let Some(origin) = origin.filter(|_| *continues) {
                known.add(*id, origin);
            }
        }
        known
    }

    fn forks_of(items: &Items, id: TreeId) -> Vec<TreeId> {
        let is_fork = |(_, (origin, _)): &(&TreeId, &(Option<TreeId>, bool))| *origin == Some(id);
        items.iter().filter(is_fork).map(|(fork, _)| *fork).collect()
    }

    #[test]
    fn what_is_noted_is_what_the_items_say() {
        let seed = std::env::var("CAIRN_SEED").map_or(1, |seed| seed.parse().unwrap());
        let (mut random, mut items, mut known) =
            (Seeded::new(seed), Items::new(), Known::default());
        let mut longest = 0;
        for step in 0..4000 {
            let any = random.below(items.len().max(1) as u64) as usize;
            let any = items.keys().nth(any).copied();
            match (random.below(8), any) {
                (0, _) | (_, None) => _ = items.insert(TreeId(1000 + step), (None, false)),
                (1..=4, Some(origin)) => {
                    let (id, continues) = (TreeId(1000 + step), random.chance(2, 3));
                    items.insert(id, (Some(origin), continues));
                    if continues {
                        known.add(id, origin);
                    }
                }
                (_, Some(of)) => match forks_of(&items, of)[..] {
                    [] => {
                        items.remove(&of);
                        known.remove(of);
                    }
                    // It is joined.
                    [fork] => {
                        let (origin, of_continues) = items.remove(&of).unwrap();
                        let continues = items[&fork].1 && (of_continues || origin.is_none());
                        items.insert(fork, (origin, continues));
                        known.remove(of);
                    }
                    _ => {}
                },
            }
            let expected = read(&items);
            for id in items.keys() {
                let [noted, said] =
                    [&known, &expected].map(|known| known.members(*id).collect::<Vec<_>>());
                longest = longest.max(said.len());
                let alone = vec![*id];
                let [noted, said] =
                    [noted, said].map(|line| if line.is_empty() { alone.clone() } else { line });
                assert_eq!(noted, said, "seed {seed}, step {step}: {id}");
            }
        }
        assert!(longest > 2);
        let gone = known.lines.keys().find(|id| !items.contains_key(id));
        assert_eq!(gone, None);
    }
}
