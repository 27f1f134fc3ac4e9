//! Values that threads change at the same time, each in cache lines of its own.
use std::ops::Deref;

/// A value in cache lines of its own; 128 bytes, because processors fetch lines in pairs. So the
/// threads that insert, wait and write do not slow each other down.
#[repr(align(128))]
pub(crate) struct CacheAligned<T>(pub(crate) T);

impl<T> Deref for CacheAligned<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
