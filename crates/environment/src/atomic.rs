//! Atomic types: the standard library's, or, with the feature `shuttle`, ones at which the scheduler may switch threads.

#[cfg(feature = "shuttle")]
pub use shuttle::sync::atomic::*;
#[cfg(not(feature = "shuttle"))]
pub use std::sync::atomic::*;
