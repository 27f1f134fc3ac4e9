//! Which births the items of dead lists have: a cleanup reads only those that have its own.
//!
//! After many deletions of the newest snapshot there are many lists, and each further one has to
//! look for its births in all of them.
//!
//! Invariant: an item of a list that is known here has no births but those that are noted. Items
//! only lose runs, but for those that a cut adds: then it forgets the list, also if that is being
//! read. Between the two a cleaner may miss what is added, and none of that is due: a deletion's
//! cleanup waits for the cut behind it.
//!
//! Lock discipline: one lock, at the end of the order.
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_format::{Generation, Key};
use rustc_hash::FxHashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Most items that are known, of 40 bytes each.
const ITEMS_MAX: usize = 1 << 16;

/// An item of a dead list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ItemBirths {
    pub(crate) key: Key,
    pub(crate) births: RangeInclusive<Generation>,
}

impl ItemBirths {
    /// Whether it may have one of these births.
    pub(crate) fn meets(&self, births: &RangeInclusive<Generation>) -> bool {
        self.births.start() <= births.end() && births.start() <= self.births.end()
    }
}

/// A list is being read.
pub(crate) struct Reading {
    list: u64,
    number: u64,
}

enum Known {
    Reading(u64),
    Items(Arc<[ItemBirths]>),
}

#[derive(Default)]
struct State {
    lists: FxHashMap<u64, Known>,
    items: usize,
    readings: u64,
}

pub(crate) struct ListBirths(Mutex<State>);

impl ListBirths {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Rank::LEAF, State::default()))
    }

    /// The items of a list, if they are known.
    pub(crate) fn of(&self, list: u64) -> Option<Arc<[ItemBirths]>> {
        match self.0.lock().lists.get(&list) {
            Some(Known::Items(items)) => Some(Arc::clone(items)),
            _ => None,
        }
    }

    /// A list is going to be read.
    pub(crate) fn begin(&self, list: u64) -> Reading {
        let mut state = self.0.lock();
        state.forget(list);
        state.readings += 1;
        let number = state.readings;
        state.lists.insert(list, Known::Reading(number));
        Reading { list, number }
    }

    /// All of a list was read. Nothing is kept if a cut came between.
    pub(crate) fn end(&self, Reading { list, number }: Reading, items: Vec<ItemBirths>) {
        let mut state = self.0.lock();
        if !matches!(state.lists.get(&list), Some(Known::Reading(read)) if *read == number) {
            return;
        }
        if state.items + items.len() > ITEMS_MAX {
            *state = State { readings: state.readings, ..State::default() };
        }
        if items.len() <= ITEMS_MAX {
            state.items += items.len();
            state.lists.insert(list, Known::Items(items.into()));
        }
    }

    /// A cut adds items to a list: `add` does.
    pub(crate) fn while_adding<T>(&self, list: u64, add: impl FnOnce() -> T) -> T {
        let added = add();
        // Who has read it before that may have missed some.
        self.forget(list);
        added
    }

    /// A list is gone.
    pub(crate) fn forget(&self, list: u64) {
        self.0.lock().forget(list);
    }
}

impl State {
    fn forget(&mut self, list: u64) {
        if let Some(Known::Items(items)) = self.lists.remove(&list) {
            self.items -= items.len();
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn item(list: u64, births: RangeInclusive<u64>) -> ItemBirths {
        let births = Generation(*births.start())..=Generation(*births.end());
        ItemBirths { key: Key::dead_runs(list, Generation(1), 0), births }
    }

    #[test]
    fn what_a_cut_adds_is_never_missing() {
        let known = ListBirths::new();
        let reading = known.begin(7);
        assert_eq!(known.of(7), None);
        known.end(reading, vec![item(7, 3..=5)]);
        assert_eq!(known.of(7).as_deref(), Some(&[item(7, 3..=5)][..]));
        known.while_adding(7, || {});
        assert_eq!(known.of(7), None);
        // While it is read, and while it is read twice.
        let reading = known.begin(7);
        known.while_adding(7, || {});
        let next = known.begin(7);
        known.end(reading, vec![item(7, 1..=1)]);
        assert_eq!(known.of(7), None);
        known.end(next, vec![item(7, 2..=2)]);
        assert_eq!(known.of(7).as_deref(), Some(&[item(7, 2..=2)][..]));
    }

    #[test]
    fn not_too_much_is_kept() {
        let known = ListBirths::new();
        let fill = |list, count| known.end(known.begin(list), vec![item(list, 1..=1); count]);
        fill(1, ITEMS_MAX / 2);
        fill(2, ITEMS_MAX / 2);
        assert!(known.of(1).is_some() && known.of(2).is_some());
        fill(3, 1);
        assert!(known.of(1).is_none() && known.of(2).is_none() && known.of(3).is_some());
        fill(4, ITEMS_MAX + 1);
        assert!(known.of(4).is_none());
        fill(1, ITEMS_MAX);
        assert!(known.of(1).is_some());
    }

    #[test]
    fn births_that_touch_meet() {
        let meets = |births: RangeInclusive<u64>| {
            item(1, 5..=9).meets(&(Generation(*births.start())..=Generation(*births.end())))
        };
        let met = [1..=4, 1..=5, 6..=7, 9..=20, 10..=20, 1..=20].map(meets);
        assert_eq!(met, [false, true, true, true, false, true]);
    }
}
