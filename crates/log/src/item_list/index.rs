//! Which log vector an item has: a hash table of numbers.
//!
//! Inserting a new item should touch as little memory as possible, because under the list's lock a
//! cache miss costs more than all the rest. So the table holds neither keys nor pointers, only 8
//! bytes for an item: the position of its vector, and 32 bits of its hash, which decide almost
//! always whether a look at the vector is worthwhile. Linear probing; at most half of the table is
//! filled; removal moves back what follows, so there are no tombstones.
//!
//! Invariant: between the slot where an entry belongs (`tag` modulo the length) and the slot where
//! it stands, no slot is empty.

/// Slots of the smallest table.
const SLOTS_MIN: usize = 64;

/// Position and tag; position `EMPTY` means that there is none.
#[derive(Clone, Copy, Debug)]
struct IndexSlot {
    position: u32,
    tag: u32,
}

const EMPTY: u32 = u32::MAX;
const EMPTY_SLOT: IndexSlot = IndexSlot { position: EMPTY, tag: 0 };

#[derive(Debug, Default)]
pub(crate) struct Index {
    /// A power of two, or 0.
    slots: Vec<IndexSlot>,
    filled: usize,
}

fn tag_of(hash: u64) -> u32 {
    hash as u32
}

impl Index {
    fn mask(&self) -> usize {
        self.slots.len() - 1
    }

    /// The position among those with this hash for which `is_it` returns true.
    pub(crate) fn find(&self, hash: u64, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        if self.slots.is_empty() {
            return None;
        }
        let (tag, mask) = (tag_of(hash), self.mask());
        let mut at = tag as usize & mask;
        loop {
            let slot = self.slots[at];
            if slot.position == EMPTY {
                return None;
            }
            if slot.tag == tag && is_it(slot.position) {
                return Some(slot.position);
            }
            at = (at + 1) & mask;
        }
    }

    /// Adds the position of an item that the index doesn't hold.
    pub(crate) fn insert(&mut self, hash: u64, position: u32) {
        debug_assert_ne!(position, EMPTY);
        if 2 * (self.filled + 1) > self.slots.len() {
            self.grow();
        }
        self.filled += 1;
        self.place(IndexSlot { position, tag: tag_of(hash) });
    }

    /// Takes out the position of an item.
    pub(crate) fn remove(&mut self, hash: u64, position: u32) {
        let Some(mut gap) = self.slot_of(hash, position) else { return };
        let mask = self.mask();
        self.filled -= 1;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let slot = self.slots[at];
            if slot.position == EMPTY {
                break;
            }
            // It may move into the gap if that isn't before the slot where it belongs.
            let distance = at.wrapping_sub(slot.tag as usize) & mask;
            if distance >= at.wrapping_sub(gap) & mask {
                self.slots[gap] = slot;
                gap = at;
            }
        }
        self.slots[gap] = EMPTY_SLOT;
    }

    /// The item at position `from` stands at `to` now.
    pub(crate) fn moved(&mut self, hash: u64, from: u32, to: u32) {
        if let Some(at) = self.slot_of(hash, from) {
            self.slots[at].position = to;
        }
    }

    /// Takes out everything, and keeps memory for `items` items.
    pub(crate) fn clear(&mut self, items: usize) {
        if self.slots.len() > (2 * items).next_power_of_two() {
            *self = Self::default();
        }
        if self.filled > 0 {
            self.slots.fill(EMPTY_SLOT);
            self.filled = 0;
        }
    }

    fn slot_of(&self, hash: u64, position: u32) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        let mask = self.mask();
        let mut at = tag_of(hash) as usize & mask;
        while self.slots[at].position != position {
            if self.slots[at].position == EMPTY {
                return None;
            }
            at = (at + 1) & mask;
        }
        Some(at)
    }

    fn place(&mut self, slot: IndexSlot) {
        let mask = self.mask();
        let mut at = slot.tag as usize & mask;
        while self.slots[at].position != EMPTY {
            at = (at + 1) & mask;
        }
        self.slots[at] = slot;
    }

    fn grow(&mut self) {
        let larger = vec![EMPTY_SLOT; (2 * self.slots.len()).max(SLOTS_MIN)];
        let old = std::mem::replace(&mut self.slots, larger);
        old.into_iter().filter(|slot| slot.position != EMPTY).for_each(|slot| self.place(slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// Few hashes, so that runs are long, wrap around, and hold items of the same hash.
        #[test]
        fn it_finds_what_a_map_finds(steps in prop::collection::vec((0_u64..40, 0_u8..10), 1..400), spread in 0_u32..8) {
            let hash_of = |item: u64| (item << spread).wrapping_sub(5) & 0xff;
            let (mut index, mut model) = (Index::default(), BTreeMap::<u64, u32>::new());
            for (round, (item, action)) in steps.into_iter().enumerate() {
                let position = round as u32;
                match (model.get(&item).copied(), action) {
                    (None, _) => { index.insert(hash_of(item), position); model.insert(item, position); }
                    (Some(old), 0..5) => { index.remove(hash_of(item), old); model.remove(&item); }
                    (Some(old), 5..9) => { index.moved(hash_of(item), old, position); model.insert(item, position); }
                    (Some(_), _) => { index.clear(1000); model.clear(); }
                }
                for item in 0..40 {
                    let expected = model.get(&item).copied();
                    prop_assert_eq!(index.find(hash_of(item), |position| Some(position) == expected), expected);
                }
            }
        }
    }

    #[test]
    fn clearing_gives_back_what_is_too_much() {
        let mut index = Index::default();
        (0..10_000).for_each(|at| index.insert(u64::from(at) * 77, at));
        index.clear(100);
        assert!(index.slots.is_empty());
        (0..100).for_each(|at| index.insert(u64::from(at) * 77, at));
        index.clear(100);
        assert_eq!((index.slots.len(), index.filled, index.find(77, |_| true)), (256, 0, None));
    }
}
