//! Memory in large pages, cut into pieces of one size.
//!
//! Why: the kernel hands a device one segment for each page that is not followed by its physical
//! neighbour. Measured on a virtual disk, a direct write of 2 MiB from large pages took 0.72 ms and
//! 62 µs of CPU, from ordinary ones 1.27 ms and 196 µs; 32 pieces of 64 KiB scattered over large
//! pages are nearly as good as one.
//!
//! States of a piece: free (its bit is set) → in use, by [`Slabs::take`] → free, by
//! [`Slabs::give_back`].
//!
//! Invariants: a piece in use has one owner, and so has its memory; a slab stays mapped while a
//! piece of it is in use; pieces are taken from the oldest slab first, so that later ones become
//! free.
//!
//! A slab of large pages gets its memory when it is made. Otherwise the first write to it would
//! wait for the kernel, which zeroes a large page; on a virtual machine whose host must find the
//! memory too, that takes milliseconds. So the thread declares that it [will
//! block](thread::will_block), as before the device. Otherwise, a thread that yields its CPU to its
//! callers would seem to be kept from running by other threads. A slab of ordinary pages gets each
//! page at its first write. If made [ahead](Slab::ahead), it gets them before that, in steps;
//! between two steps other threads get the CPU.
//!
//! Lock discipline: none. The owner of [`Slabs`] locks them, but not while it makes a [`Slab`].

use cairn_environment::thread;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// The size of a large page of this processor.
pub(crate) const SLAB_BYTES: usize = 2 << 20;
const PIECES_MAX: usize = SLAB_BYTES / crate::BLOCK_BYTES;
/// Ordinary pages are made in steps of this: some 100 µs if the host must find the memory too.
const STEP_BYTES: usize = 64 << 10;

/// The kind of pages of a slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PageKind {
    /// For memory that a device reads and writes.
    Large,
    /// For memory that is only copied from and to.
    Ordinary,
}

/// A mapping of [`SLAB_BYTES`], aligned to its size.
pub(crate) struct Slab {
    start: NonNull<u8>,
}

// SAFETY: the memory belongs to no thread; the pieces regulate the access to its parts.
unsafe impl Send for Slab {}
// SAFETY: as above; the slab itself gives access to nothing.
unsafe impl Sync for Slab {}

impl Slab {
    /// A slab of zeros; `None` if there is no memory. Takes long with large pages.
    pub(crate) fn new(pages: PageKind) -> Option<Self> {
        match pages {
            PageKind::Large => Self::ahead(pages),
            PageKind::Ordinary => Self::map(pages),
        }
    }

    /// As [`Slab::new`], with all its pages present. Takes long.
    pub(crate) fn ahead(pages: PageKind) -> Option<Self> {
        thread::will_block();
        let slab = Self::map(pages)?;
        let step_bytes = match pages {
            PageKind::Large => SLAB_BYTES,
            PageKind::Ordinary => STEP_BYTES,
        };
        for offset_bytes in (0..SLAB_BYTES).step_by(step_bytes) {
            let start = slab.start.as_ptr().wrapping_add(offset_bytes).cast();
            // An older kernel provides the memory at the first write.
            // SAFETY: the range lies in the slab's mapping, and the advice changes no content.
            let _ = unsafe { rustix::mm::madvise(start, step_bytes, Advice::LinuxPopulateWrite) };
        }
        Some(slab)
    }

    fn map(pages: PageKind) -> Option<Self> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let mapped = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), 2 * SLAB_BYTES, protection, flags)
        }
        .ok()?;
        let before_bytes = mapped.addr().next_multiple_of(SLAB_BYTES) - mapped.addr();
        let start = mapped.wrapping_byte_add(before_bytes);
        let end = start.wrapping_byte_add(SLAB_BYTES);
        let advice = match pages {
            PageKind::Large => Advice::LinuxHugepage,
            PageKind::Ordinary => Advice::LinuxNoHugepage,
        };
        // SAFETY: the mapping was made above with twice the length, so both parts lie in it, and
        // nothing refers to them.
        unsafe {
            if before_bytes > 0 {
                let _ = rustix::mm::munmap(mapped, before_bytes);
            }
            let _ = rustix::mm::munmap(end, SLAB_BYTES - before_bytes);
            // Where there are no large pages, ordinary ones will do.
            let _ = rustix::mm::madvise(start, SLAB_BYTES, advice);
        }
        NonNull::new(start.cast()).map(|start| Self { start })
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: the mapping is this slab's, and every piece keeps its slab, so nothing refers to
        // the memory.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), SLAB_BYTES) };
    }
}

/// Memory with one owner, which [returns](Slabs::give_back) it.
pub(crate) struct SlabPiece {
    slab: Arc<Slab>,
    slot: usize,
    index: usize,
    length_bytes: usize,
}

impl SlabPiece {
    fn start(&self) -> *mut u8 {
        self.slab.start.as_ptr().wrapping_add(self.index * self.length_bytes)
    }
}

impl Deref for SlabPiece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the piece lies in its slab, which is mapped and was zeroed by the kernel; a piece
        // has one owner at a time, so a thread that changes its bytes has it exclusively.
        unsafe { std::slice::from_raw_parts(self.start(), self.length_bytes) }
    }
}

impl DerefMut for SlabPiece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and the piece is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.length_bytes) }
    }
}

struct SlabSlot {
    slab: Arc<Slab>,
    /// A bit for each piece.
    free: [u64; PIECES_MAX / 64],
    free_pieces: usize,
}

/// Slabs that are cut into pieces of one size.
pub(crate) struct Slabs {
    piece_bytes: usize,
    slots: Vec<Option<SlabSlot>>,
    /// No slot before this one has a free piece.
    first_free: usize,
}

impl Slabs {
    /// No slabs. `piece_bytes` divides [`SLAB_BYTES`] into at most 512 pieces.
    pub(crate) fn new(piece_bytes: usize) -> Self {
        assert!(
            SLAB_BYTES.is_multiple_of(piece_bytes) && SLAB_BYTES / piece_bytes <= PIECES_MAX,
            "pieces of {piece_bytes} bytes"
        );
        Self { piece_bytes, slots: Vec::new(), first_free: 0 }
    }

    fn pieces_per_slab(&self) -> usize {
        SLAB_BYTES / self.piece_bytes
    }

    /// A piece of an existing slab, with any content.
    pub(crate) fn take(&mut self) -> Option<SlabPiece> {
        let piece_bytes = self.piece_bytes;
        while let Some(slot) = self.slots.get_mut(self.first_free) {
            if let Some(slot) = slot.as_mut().filter(|slot| slot.free_pieces > 0)
                && let Some(word) = slot.free.iter().position(|word| *word != 0)
            {
                let bit = slot.free[word].trailing_zeros();
                slot.free[word] &= !(1 << bit);
                slot.free_pieces -= 1;
                let index = word * 64 + bit as usize;
                return Some(SlabPiece {
                    slab: Arc::clone(&slot.slab),
                    slot: self.first_free,
                    index,
                    length_bytes: piece_bytes,
                });
            }
            self.first_free += 1;
        }
        None
    }

    /// Adds a slab.
    pub(crate) fn add(&mut self, slab: Slab) {
        let pieces = self.pieces_per_slab();
        let mut free = [0; PIECES_MAX / 64];
        for piece in 0..pieces {
            free[piece / 64] |= 1 << (piece % 64);
        }
        let new = Some(SlabSlot { slab: Arc::new(slab), free, free_pieces: pieces });
        let slot = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        match self.slots.get_mut(slot) {
            Some(empty) => *empty = new,
            None => self.slots.push(new),
        }
        self.first_free = self.first_free.min(slot);
    }

    /// Takes a piece back. If `shrink` is set and the piece's slab and another one are unused then,
    /// returns the slab for the caller to drop. (One unused slab stays: otherwise a caller that
    /// takes and returns the same few pieces would make a new slab each time.)
    pub(crate) fn give_back(
        &mut self,
        piece: SlabPiece,
        shrink: bool,
    ) -> Option<impl Sized + use<>> {
        let pieces = self.pieces_per_slab();
        let place = &mut self.slots[piece.slot];
        let slot = place
            .as_mut()
            .filter(|slot| Arc::ptr_eq(&slot.slab, &piece.slab))
            .expect("a piece returns to where it came from");
        slot.free[piece.index / 64] |= 1 << (piece.index % 64);
        slot.free_pieces += 1;
        self.first_free = self.first_free.min(piece.slot);
        if !shrink || slot.free_pieces < pieces {
            return None;
        }
        let unused = self.slots.iter().flatten().filter(|slot| slot.free_pieces == pieces).count();
        if unused > 1 { self.slots[piece.slot].take() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// This thread's page faults that the kernel could serve from memory.
    fn page_faults() -> u64 {
        let status =
            std::fs::read_to_string("/proc/thread-self/stat").expect("a thread knows itself");
        let (_, fields) = status.rsplit_once(") ").expect("a name stands in parentheses");
        fields.split(' ').nth(7).and_then(|faults| faults.parse().ok()).expect("a number")
    }

    fn add(slabs: &mut Slabs) {
        slabs.add(Slab::new(PageKind::Large).expect("there is memory"));
    }

    #[test]
    fn making_a_slab_declares_the_wait_and_provides_its_memory() {
        thread_local!(static WAITS: Cell<u32> = const { Cell::new(0) });
        thread::on_block(Some(|| WAITS.set(WAITS.get() + 1)));
        let mut slabs = Slabs::new(SLAB_BYTES);
        add(&mut slabs);
        let mut piece = slabs.take().expect("the first one");
        thread::on_block(None);
        assert_eq!(WAITS.get(), 1);
        let before = page_faults();
        piece.iter_mut().step_by(crate::BLOCK_BYTES).for_each(|byte| *byte = 1);
        let faults = page_faults() - before;
        assert!(faults < 8, "{faults} page faults");
    }

    #[test]
    fn pieces_do_not_overlap_and_are_used_again() {
        let mut slabs = Slabs::new(64 << 10);
        assert!(slabs.take().is_none());
        add(&mut slabs);
        add(&mut slabs);
        let mut pieces: Vec<SlabPiece> = std::iter::from_fn(|| slabs.take()).collect();
        assert_eq!(pieces.len(), 64);
        for (fill, piece) in (0..).zip(&mut pieces) {
            assert!(
                piece.iter().all(|byte| *byte == 0)
                    && piece.as_ptr().addr().is_multiple_of(64 << 10)
            );
            piece.fill(fill + 1);
        }
        assert!((0..).zip(&pieces).all(|(fill, piece)| piece.iter().all(|byte| *byte == fill + 1)));
        let address = pieces[40].as_ptr();
        drop(slabs.give_back(pieces.swap_remove(40), false));
        assert_eq!(slabs.take().expect("it is free").as_ptr(), address);
    }

    #[test]
    fn the_oldest_slab_is_filled_first_and_an_unused_one_can_go() {
        let mut slabs = Slabs::new(1 << 20);
        add(&mut slabs);
        add(&mut slabs);
        let pieces: Vec<SlabPiece> = std::iter::from_fn(|| slabs.take()).collect();
        let slots: Vec<usize> = pieces.iter().map(|piece| piece.slot).collect();
        assert_eq!(slots, [0, 0, 1, 1]);
        let mut pieces = pieces.into_iter();
        let (first, second, third, kept) = (
            pieces.next().expect("1"),
            pieces.next().expect("2"),
            pieces.next().expect("3"),
            pieces.next().expect("4"),
        );
        assert!(slabs.give_back(first, true).is_none());
        assert!(slabs.give_back(second, true).is_none(), "the only one that is unused stays");
        assert!(slabs.give_back(third, true).is_none(), "it is used");
        let (first, second) = (slabs.take().expect("unused"), slabs.take().expect("unused"));
        assert_eq!((first.slot, second.slot), (0, 0));
        assert!(slabs.give_back(first, true).is_none() && slabs.give_back(second, false).is_none());
        assert!(slabs.give_back(kept, true).is_some(), "the second that is unused goes");
        assert!(slabs.slots[1].is_none() && slabs.slots[0].is_some());
        add(&mut slabs);
        assert_eq!(slabs.slots.len(), 2);
        let kept = slabs.take().expect("unused");
        drop(slabs);
        assert!(kept.iter().all(|byte| *byte == 0), "it stays mapped");
    }
}
