//! Makes slabs before they are needed.
//!
//! Why: making a slab takes milliseconds if the host of a virtual machine must find the memory, and
//! a request that needs memory would wait for it. So a thread of its own ([`SlabSupply::run`])
//! keeps a few slabs ready.
//!
//! States: *without a maker*, [`SlabSupply::take`] makes each slab itself. *With a maker*, it takes
//! a ready slab; if none is ready, it makes one and raises the number kept ready. *Stopped*, for
//! ever: as without a maker.
//!
//! Invariants: the maker makes a slab only while fewer are ready than wanted. None are wanted
//! before the first one was needed. If there is no memory, the maker waits until the next slab is
//! taken.
//!
//! Lock discipline: one mutex (rank `BUFFERS`), held briefly and not while a slab is made. Its
//! holder has no other lock of that rank.

use crate::slab::{PageKind, Slab};
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};

/// The most slabs kept ready: what a burst of small writes takes while the maker makes as many.
const READY_MAX: usize = 8;

#[derive(Default)]
struct SupplyState {
    ready: Vec<Slab>,
    wanted: usize,
    has_maker: bool,
    stopped: bool,
    no_memory: bool,
}

pub(crate) struct SlabSupply {
    state: Mutex<SupplyState>,
    changed: Condvar,
    ready_max: usize,
    pages: PageKind,
}

impl SlabSupply {
    /// A supply of slabs of `pages`. It keeps at most `slabs_max` ready, and at most [`READY_MAX`].
    pub(crate) fn new(slabs_max: usize, pages: PageKind) -> Self {
        let state = Mutex::new(Rank::BUFFERS, SupplyState::default());
        Self { state, changed: Condvar::new(), ready_max: slabs_max.min(READY_MAX), pages }
    }

    /// A slab; `None` when there is no memory.
    pub(crate) fn take(&self) -> Option<Slab> {
        let mut state = self.state.lock();
        if !state.has_maker {
            drop(state);
            return Slab::new(self.pages);
        }
        let slab = state.ready.pop();
        if slab.is_none() {
            state.wanted = (state.wanted * 2).clamp(1, self.ready_max);
        }
        state.no_memory = false;
        drop(state);
        self.changed.notify_all();
        slab.or_else(|| Slab::new(self.pages))
    }

    /// Keeps slabs ready until [`SlabSupply::stop`] is called. Only one thread may run it.
    pub(crate) fn run(&self) {
        let mut state = self.state.lock();
        state.has_maker = self.ready_max > 0;
        while !state.stopped {
            if state.no_memory || state.ready.len() >= state.wanted {
                self.changed.wait(&mut state);
                continue;
            }
            drop(state);
            let slab = Slab::ahead(self.pages);
            state = self.state.lock();
            state.no_memory = slab.is_none();
            state.ready.extend(slab);
        }
        state.has_maker = false;
        let _unused = std::mem::take(&mut state.ready);
        drop(state);
    }

    /// Ends [`SlabSupply::run`], even one that has not begun.
    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    #[cfg(test)]
    pub(crate) fn ready(&self) -> usize {
        self.state.lock().ready.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::{clock, thread};
    use std::sync::Arc;
    use std::time::Duration;

    fn until(condition: impl Fn() -> bool) {
        while !condition() {
            clock::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn slabs_are_made_ahead_once_some_were_needed_and_not_too_many() {
        [PageKind::Large, PageKind::Ordinary].into_iter().for_each(slabs_are_made_ahead);
    }

    fn slabs_are_made_ahead(pages: PageKind) {
        let supply = Arc::new(SlabSupply::new(3, pages));
        assert!(supply.take().is_some(), "without a maker");
        let own = Arc::clone(&supply);
        let maker = thread::spawn("maker", move || own.run());
        until(|| supply.state.lock().has_maker);
        assert_eq!(supply.ready(), 0, "nobody needed one");
        for wanted in 1..=3 {
            // Faster than the maker makes them.
            let mut taken = Vec::new();
            while supply.state.lock().wanted < wanted {
                taken.push(supply.take().expect("memory"));
            }
            until(|| supply.ready() == supply.state.lock().wanted);
        }
        (0..100).for_each(|_| drop(supply.take().expect("memory")));
        until(|| supply.ready() == 3);
        supply.stop();
        maker.join().expect("it ends");
        assert_eq!(supply.ready(), 0);
        assert!(supply.take().is_some(), "without a maker again");
        supply.run();
    }
}
