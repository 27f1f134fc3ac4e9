//! An allocator that counts what the calling thread allocates: a test shows with it that a path
//! allocates nothing.
//!
//! A test program installs it: `#[global_allocator] static ALLOCATOR: Counting = Counting;`. Memory
//! that becomes longer in place counts as well; memory that is freed does not.
#![allow(unsafe_code)]
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, which counts.
pub struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; counting touches a number of the
// thread and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above; `pointer` came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// How often the calling thread allocates in `work`; zero where [`Counting`] is not installed.
pub fn allocations_in(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;

    #[test]
    fn the_counter_counts() {
        assert_eq!(allocations_in(|| drop(std::hint::black_box(vec![1_u8; 100]))), 1);
        assert_eq!(allocations_in(|| _ = std::hint::black_box([1_u8; 100])), 0);
    }
}
