//! Memory for the values of a context's items: chunks, divided into places of fixed sizes.
//!
//! A value gets a place of the next larger size, without an allocation of its own; a newer value of
//! the same item that fits overwrites it. A place that is given back serves the next value of its
//! size, so creating and removing files for ever needs no more memory than the items that exist at
//! one moment. Emptying gives all places back and keeps the chunks.
//!
//! Chunks are allocated by the thread that inserts, after the list's lock was released
//! ([`Arena::wants_chunk`]), so that no allocator runs under it but for a batch that is longer than
//! a chunk.
//!
//! Invariants: a place belongs to one value or stands in one free list; places of one chunk don't
//! overlap.

/// Size of a chunk; the longest value fits.
pub(crate) const CHUNK_BYTES: usize = 1 << 16;
/// Chunks that an emptied arena keeps.
const CHUNKS_KEPT: usize = 64;
/// Sizes in steps of this up to `FINE_BYTES`,
const FINE_STEP_BYTES: usize = 16;
const FINE_BYTES: usize = 128;
const FINE_CLASSES: usize = FINE_BYTES / FINE_STEP_BYTES + 1;
/// and from there four between a power of two and the next.
const CLASSES: usize = FINE_CLASSES + 4 * (CHUNK_BYTES.ilog2() - FINE_BYTES.ilog2()) as usize;

/// Where a value stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ValuePlace {
    chunk: u32,
    start: u32,
    class: u8,
}

impl ValuePlace {
    fn capacity(self) -> usize {
        class_bytes(usize::from(self.class))
    }
}

#[derive(Debug)]
pub(crate) struct Arena {
    chunks: Vec<Box<[u8]>>,
    /// The chunk that is being divided, and from where on it is unused.
    current: usize,
    unused_from: usize,
    free: [Vec<ValuePlace>; CLASSES],
}

/// The smallest class whose places take `length` bytes. Class 0 takes none.
fn class_of(length: usize) -> usize {
    if length <= FINE_BYTES {
        return length.div_ceil(FINE_STEP_BYTES);
    }
    let last = length - 1;
    let power = last.ilog2();
    let quarter = (last >> (power - 2)) & 3;
    FINE_CLASSES + 4 * (power - FINE_BYTES.ilog2()) as usize + quarter
}

fn class_bytes(class: usize) -> usize {
    if class < FINE_CLASSES {
        return class * FINE_STEP_BYTES;
    }
    let (doublings, quarter) = ((class - FINE_CLASSES) / 4, (class - FINE_CLASSES) % 4);
    (FINE_BYTES << doublings) / 4 * (5 + quarter)
}

/// A chunk, to be allocated without a lock.
pub(crate) fn new_chunk() -> Box<[u8]> {
    vec![0; CHUNK_BYTES].into_boxed_slice()
}

impl Arena {
    pub(crate) fn new() -> Self {
        Self {
            chunks: Vec::new(),
            current: 0,
            unused_from: 0,
            free: [const { Vec::new() }; CLASSES],
        }
    }

    /// Puts `value` into a place of its own.
    pub(crate) fn store(&mut self, value: &[u8]) -> ValuePlace {
        let place = self.allocate(class_of(value.len()));
        self.write(place, value);
        place
    }

    /// Puts `value` in the place of an older one, if it fits, or else into another.
    pub(crate) fn replace(&mut self, place: ValuePlace, value: &[u8]) -> ValuePlace {
        if value.len() <= place.capacity() {
            self.write(place, value);
            return place;
        }
        self.release(place);
        self.store(value)
    }

    /// Gives a place back.
    pub(crate) fn release(&mut self, place: ValuePlace) {
        if place.class > 0 {
            self.free[usize::from(place.class)].push(place);
        }
    }

    /// The value of `length` bytes at `place`.
    pub(crate) fn value(&self, place: ValuePlace, length: usize) -> &[u8] {
        if length == 0 {
            return &[];
        }
        let start = place.start as usize;
        &self.chunks[place.chunk as usize][start..start + length]
    }

    /// Whether a chunk should be added before the next values come.
    pub(crate) fn wants_chunk(&self) -> bool {
        self.current + 1 >= self.chunks.len()
    }

    /// Adds a chunk of [`new_chunk`].
    pub(crate) fn add_chunk(&mut self, chunk: Box<[u8]>) {
        debug_assert_eq!(chunk.len(), CHUNK_BYTES);
        self.chunks.push(chunk);
    }

    /// Gives all places back.
    pub(crate) fn clear(&mut self) {
        self.chunks.truncate(CHUNKS_KEPT);
        self.free.iter_mut().for_each(Vec::clear);
        (self.current, self.unused_from) = (0, 0);
    }

    fn allocate(&mut self, class: usize) -> ValuePlace {
        if class == 0 {
            return ValuePlace::default();
        }
        if let Some(place) = self.free[class].pop() {
            return place;
        }
        let bytes = class_bytes(class);
        if self.unused_from + bytes > CHUNK_BYTES {
            self.current += 1;
            self.unused_from = 0;
        }
        if self.current == self.chunks.len() {
            self.chunks.push(new_chunk());
        }
        let place = ValuePlace {
            chunk: self.current as u32,
            start: self.unused_from as u32,
            class: class as u8,
        };
        self.unused_from += bytes;
        place
    }

    fn write(&mut self, place: ValuePlace, value: &[u8]) {
        if !value.is_empty() {
            let start = place.start as usize;
            self.chunks[place.chunk as usize][start..start + value.len()].copy_from_slice(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_length_gets_the_smallest_size_that_takes_it() {
        for length in 0..=CHUNK_BYTES {
            let class = class_of(length);
            assert!(class < CLASSES && class_bytes(class) >= length, "{length} in class {class}");
            assert!(class == 0 || class_bytes(class - 1) < length, "{length} in class {class}");
        }
        assert_eq!(class_bytes(CLASSES - 1), CHUNK_BYTES);
    }

    #[test]
    fn creating_and_removing_needs_no_more_memory_than_what_exists() {
        let mut arena = Arena::new();
        for round in 0..100_000_u32 {
            let places = [arena.store(&[round as u8; 128]), arena.store(&[1; 24])];
            places.into_iter().for_each(|place| arena.release(place));
        }
        assert_eq!(arena.chunks.len(), 1);
    }

    proptest! {
        #[test]
        fn values_never_overlap(steps in prop::collection::vec((0_usize..8, 0_usize..5000, any::<bool>()), 1..300)) {
            let mut arena = Arena::new();
            let mut stored: Vec<Option<(ValuePlace, Vec<u8>)>> = vec![None; 8];
            for (round, (at, length, removed)) in steps.into_iter().enumerate() {
                let value = vec![round as u8; length];
                stored[at] = match stored[at].take() {
                    Some((place, _)) if removed => { arena.release(place); None }
                    Some((place, _)) => Some((arena.replace(place, &value), value)),
                    None => Some((arena.store(&value), value)),
                };
                if arena.wants_chunk() {
                    arena.add_chunk(new_chunk());
                }
                for (place, value) in stored.iter().flatten() {
                    prop_assert_eq!(arena.value(*place, value.len()), &value[..]);
                }
            }
        }
    }
}
