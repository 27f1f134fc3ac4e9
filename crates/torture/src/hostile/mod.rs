//! Hostile images: volumes whose checksums hold but whose content no program of ours wrote.
//!
//! [`program`] turns any sequence of bytes into a changed volume, [`exercise`](mod@exercise) uses it in every way and says which
//! rule does not hold, [`fuzz`](fn@fuzz) looks for such sequences. The folder `fuzz/` at the root has the same
//! ([`try_input`]) for libFuzzer, which is guided by coverage.
pub mod exercise;
mod fuzz;
pub mod images;
mod input;
pub mod overlay;
pub mod program;
mod walk;

pub use fuzz::{AllocationMeter, Finding, FuzzOptions, FuzzProgress, FuzzReport, fuzz};

use images::BaseImage;

/// Makes the volume that the input means, and does everything with it.
///
/// # Errors
/// The rule that does not hold. Panics of this thread are not caught.
pub fn try_input(bases: &[BaseImage], bytes: &[u8]) -> Result<exercise::Seen, String> {
    exercise::exercise(program::run(bases, bytes))
}
