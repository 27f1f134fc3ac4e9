//! On whose behalf a thread works, so that a wait for space ends when its caller no longer wants
//! the outcome.
//!
//! A server sets the caller for the time of a request; a ticket that the thread waits for then
//! carries it. A server that learns that a caller may be gone calls
//! [`Space::call_off`](crate::Space::call_off). No moment is missed: the waiting thread asks
//! whether its caller is gone after its ticket has entered the queue, so a caller that goes later
//! is found by its ticket.
use std::cell::Cell;

/// The caller that asked for what a thread does.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// Number of the request, unique among those in work.
    pub request: u64,
    /// What `is_gone` wants to know of the caller, such as its thread id.
    pub thread: u32,
    /// Whether the caller will never look at the outcome. Called with no lock held.
    pub is_gone: fn(u32) -> bool,
}

impl Caller {
    pub(crate) fn is_gone(self) -> bool {
        (self.is_gone)(self.thread)
    }
}

thread_local! {
    static CALLER: Cell<Option<Caller>> = const { Cell::new(None) };
}

/// Sets the caller back, also when the work panics.
struct Before(Option<Caller>);

impl Drop for Before {
    fn drop(&mut self) {
        CALLER.set(self.0);
    }
}

/// Does `work` on behalf of `caller`.
///
/// ```
/// use cairn_space::{Caller, on_behalf_of};
/// let caller = Caller { request: 7, thread: 0, is_gone: |_| false };
/// assert_eq!(on_behalf_of(caller, || 5), 5);
/// ```
pub fn on_behalf_of<T>(caller: Caller, work: impl FnOnce() -> T) -> T {
    let _before = Before(CALLER.replace(Some(caller)));
    work()
}

/// Whose request this thread works for.
pub(crate) fn current() -> Option<Caller> {
    // Under the model checker all threads share this place; models name their callers themselves.
    CALLER.get()
}
