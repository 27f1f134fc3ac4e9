//! Atomic types: the standard library's, or, with the feature `shuttle`, ones at which the
//! scheduler may switch threads.

#[cfg(feature = "shuttle")]
pub use shuttle::sync::atomic::*;
#[cfg(not(feature = "shuttle"))]
pub use std::sync::atomic::*;

/// Replaces a number by what `change` makes of it, and returns the old one; `None` when `change`
/// refuses it. Relaxed: no other memory depends on it. (The standard library gave its method for
/// this a new name, which shuttle does not have.)
pub fn try_update(number: &AtomicU64, change: impl FnMut(u64) -> Option<u64>) -> Option<u64> {
    #[cfg(feature = "shuttle")]
    let old = number.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
    #[cfg(not(feature = "shuttle"))]
    let old = number.try_update(Ordering::Relaxed, Ordering::Relaxed, change);
    old.ok()
}
