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
//! What continues is read when it is first asked for, and noted from then on.
//!
//! Lock: a leaf, held for moments. What is read without it counts only if nothing changed
//! meanwhile.
use super::Trees;
use crate::Result;
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_format::TreeId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The subvolumes that continue others, each with the first one of its line.
type Firsts = BTreeMap<TreeId, TreeId>;

#[derive(Default)]
struct State {
    /// Once they were read.
    firsts: Option<Arc<Firsts>>,
    /// How often they have changed.
    changes: u64,
}

/// The lines of a volume.
pub(super) struct Lines(Mutex<State>);

impl Lines {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Rank::LEAF, State::default()))
    }

    fn change(&self, change: impl FnOnce(&mut Firsts)) {
        let mut state = self.0.lock();
        state.changes += 1;
        if let Some(firsts) = &mut state.firsts {
            change(Arc::make_mut(firsts));
        }
    }

    /// The fork `id` stands in the place of one whose line begins with `first`.
    pub(super) fn note_continued(&self, id: TreeId, first: TreeId) {
        self.change(|firsts| _ = firsts.insert(id, first));
    }

    /// What continues is read anew.
    fn forget(&self) {
        let mut state = self.0.lock();
        state.changes += 1;
        state.firsts = None;
    }

    /// The item of the subvolume `id` is gone.
    pub(super) fn note_ended(&self, id: TreeId) {
        self.change(|firsts| _ = firsts.remove(&id));
    }
}

impl Trees {
    /// A fork was joined: others may be the first ones of their lines.
    pub(in crate::store) fn forget_lines(&self) {
        self.lines.forget();
    }

    fn firsts(&self) -> Result<Arc<Firsts>> {
        loop {
            let changes = {
                let state = self.lines.0.lock();
                if let Some(firsts) = &state.firsts {
                    return Ok(Arc::clone(firsts));
                }
                state.changes
            };
            let mut firsts = Firsts::new();
            if self.may_have_forks() {
                // Origins have lower ids.
                for item in self.subvolume_items() {
                    let (id, item) = item?;
                    if let Some(origin) = item.origin.filter(|_| item.continues) {
                        let first = firsts.get(&origin.subvolume).copied();
                        firsts.insert(id, first.unwrap_or(origin.subvolume));
                    }
                }
            }
            let mut state = self.lines.0.lock();
            if state.changes == changes {
                state.firsts.get_or_insert(Arc::new(firsts));
            }
        }
    }

    /// The first subvolume of the line of `id`.
    pub(in crate::store) fn first_of_line(&self, id: TreeId) -> Result<TreeId> {
        Ok(self.firsts()?.get(&id).copied().unwrap_or(id))
    }

    /// All subvolumes of the line of `id`, by ascending id.
    pub(in crate::store) fn line_of(&self, id: TreeId) -> Result<Vec<TreeId>> {
        let firsts = self.firsts()?;
        let first = firsts.get(&id).copied().unwrap_or(id);
        let others = firsts.iter().filter(|(_, of)| **of == first).map(|(other, _)| *other);
        Ok(std::iter::once(first).chain(others).collect())
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
