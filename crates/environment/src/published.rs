//! Values that are replaced as a whole and read without a lock.
//!
//! Purpose: what many threads read and few replace. A reader writes nothing that other readers
//! write: no lock word, no reference count (`arc-swap` gives each thread slots of its own for what
//! it is reading). A value lives on as long as anybody reads it. The price is paid by who replaces,
//! or drops a place: they look through the slots of all threads. So this is for what is few and
//! rarely changes.
//!
//! Lock discipline: takes no lock. Under the model checker every access is a point at which the
//! scheduler may switch.
use arc_swap::{ArcSwapOption, Guard};
use std::ops::Deref;
use std::sync::Arc;

/// A point at which the model checker's scheduler may switch threads.
#[derive(Default)]
struct Point {
    #[cfg(feature = "shuttle")]
    touched: crate::atomic::AtomicU32,
}

impl Point {
    #[inline(always)]
    fn touch(&self) {
        #[cfg(feature = "shuttle")]
        self.touched.fetch_add(1, crate::atomic::Ordering::SeqCst);
    }
}

/// A place for a value that threads share, or for none.
///
/// ```
/// use cairn_environment::published::Published;
/// use std::sync::Arc;
/// let place = Published::empty();
/// let value = Arc::new(7);
/// place.store(Some(Arc::clone(&value)));
/// let seen = place.load();
/// place.store(None);
/// assert_eq!(seen.as_deref(), Some(&7));
/// assert!(!place.holds(&value));
/// ```
pub struct Published<T> {
    point: Point,
    value: ArcSwapOption<T>,
}

/// What was published at one moment; it lives as long as this.
pub struct Seen<T>(Guard<Option<Arc<T>>>);

impl<T> Deref for Seen<T> {
    type Target = Option<Arc<T>>;

    #[inline]
    fn deref(&self) -> &Option<Arc<T>> {
        &self.0
    }
}

impl<T> Published<T> {
    /// A place without a value.
    pub fn empty() -> Published<T> {
        Published { point: Point::default(), value: ArcSwapOption::const_empty() }
    }

    /// The value at this moment.
    #[inline]
    pub fn load(&self) -> Seen<T> {
        self.point.touch();
        Seen(self.value.load())
    }

    /// Whether the value is this very one, not one like it.
    #[inline]
    pub fn holds(&self, value: &Arc<T>) -> bool {
        self.load().as_ref().is_some_and(|held| Arc::ptr_eq(held, value))
    }

    /// Replaces the value.
    pub fn store(&self, value: Option<Arc<T>>) {
        self.point.touch();
        self.value.store(value);
    }

    /// Replaces the value and returns the old one.
    pub fn swap(&self, value: Option<Arc<T>>) -> Option<Arc<T>> {
        self.point.touch();
        self.value.swap(value)
    }
}
