//! What came before tickets: one flusher at a time, all other requests behind it. For measurements
//! only: without the feature `baselines`, `no_shared_flusher.rs` stands in its place, and tickets
//! are the only way.
//!
//! The reservations of btrfs before its ENOSPC rework (`reserve_metadata_bytes` in
//! `fs/btrfs/extent-tree.c` of Linux 4.7): a request that finds no space raises the `flush` flag
//! and reclaims *on its own thread*, stage after stage, each followed by another try. An ordinary
//! request that comes meanwhile waits, whether it would fit or not, on one queue; when the flusher
//! is done, with or without success, all are woken together and try again in whatever order they
//! run. The one that still finds no space is the next flusher. After the last stage: no space.
//!
//! Stages: some delayed data, then all of it, then a commit. Urgent requests skip the first two and
//! wait for no other, as `FLUSH_LIMIT` did; a commit doesn't flush at all. Preemptive reclaim
//! existed before tickets; it stays, on the threads of [`crate::reclaim`], with the threshold that
//! it had (`need_do_async_reclaim`).
//!
//! Invariant: the flag goes down, and all that wait are woken, on every way out of a flush.
//!
//! Lock discipline: flag and waiters are under the ledger's mutex; a stage runs with it released.
use crate::budget::{Budget, Request, Urgency};
use crate::space::{Ledger, Space, no_space};
use crate::{Reclaimer, Reservation, SpaceError};
use cairn_environment::clock::{Monotonic, now_monotonic};
use cairn_environment::lock::{Condvar, MutexGuard};
use cairn_environment::{Rank, assert_may_block};
use cairn_format::NODE_BLOCKS;
use std::ops::ControlFlow;
use std::sync::{Arc, Weak};

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "shared_flusher_tests.rs"]
mod shared_flusher_tests;

/// The flusher, if there is one in the place of tickets; part of the ledger.
#[derive(Default)]
pub(crate) struct SharedFlusher {
    chosen: Option<Flusher>,
}

/// The flag, and the requests that wait for it.
struct Flusher {
    /// What a flusher calls.
    reclaimer: Weak<dyn Reclaimer>,
    flush: bool,
    /// The one queue, with the ledger's mutex.
    changed: Arc<Condvar>,
}

impl SharedFlusher {
    /// Wakes all requests that wait for the flusher.
    pub(crate) fn wake_all(&self) {
        if let Some(flusher) = &self.chosen {
            flusher.changed.notify_all();
        }
    }

    /// Whether preemptive reclaim is due, as it was decided before tickets; `None` with tickets.
    pub(crate) fn lacks_room(&self, budget: &Budget, pinned_blocks: u64) -> Option<bool> {
        self.chosen.as_ref().map(|_| lacks_room(budget, pinned_blocks))
    }

    fn flushes(&self) -> bool {
        self.chosen.as_ref().is_some_and(|flusher| flusher.flush)
    }

    fn set_flush(&mut self, flush: bool) {
        if let Some(flusher) = &mut self.chosen {
            flusher.flush = flush;
        }
    }
}

/// What a flusher does, one after another.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    SomeDelayedData,
    AllDelayedData,
    Commit,
}

impl Stage {
    fn first(urgency: Urgency) -> Option<Stage> {
        match urgency {
            Urgency::Ordinary => Some(Stage::SomeDelayedData),
            Urgency::Name | Urgency::RemovalKept | Urgency::Writeback | Urgency::Removal => {
                Some(Stage::Commit)
            }
            Urgency::Commit => None,
        }
    }

    fn next(self) -> Option<Stage> {
        match self {
            Stage::SomeDelayedData => Some(Stage::AllDelayedData),
            Stage::AllDelayedData => Some(Stage::Commit),
            Stage::Commit => None,
        }
    }

    fn run(self, reclaimer: &dyn Reclaimer, request: Request) {
        match self {
            Stage::SomeDelayedData => {
                reclaimer.write_delayed_data(Some(request.blocks().saturating_mul(2)), &|| false)
            }
            Stage::AllDelayedData => reclaimer.write_delayed_data(None, &|| false),
            Stage::Commit => reclaimer.commit(),
        }
    }
}

/// Whether preemptive reclaim is due: less than 2 % of the volume is left, and not because the rest
/// is really used.
fn lacks_room(budget: &Budget, pinned_blocks: u64) -> bool {
    let threshold = budget.total_blocks / 100 * 98;
    let used = budget.total_blocks - budget.free_blocks - pinned_blocks;
    let promised =
        used + pinned_blocks + budget.reserved_blocks() + budget.global_nodes * NODE_BLOCKS;
    used < threshold && promised >= threshold
}

/// One request on its way; lowers the flag, if it raised it, however it ends.
struct Turn<'a> {
    space: &'a Arc<Space>,
    request: Request,
    urgency: Urgency,
    flushes: bool,
    /// Since when it waits for the flusher or is it.
    waits_since: Option<Monotonic>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(began) = self.waits_since else { return };
        let mut ledger = self.space.ledger.lock();
        if self.flushes {
            ledger.shared_flusher.set_flush(false);
            ledger.shared_flusher.wake_all();
        }
        ledger.tickets.count_waited(began);
    }
}

impl Turn<'_> {
    /// Grants if there is room; otherwise, if a stage is left to try, makes this thread the
    /// flusher.
    fn attempt(
        &mut self,
        mut ledger: MutexGuard<'_, Ledger>,
        stage: Option<Stage>,
    ) -> Result<Attempt, SpaceError> {
        if self.urgency == Urgency::Ordinary && !self.flushes {
            self.wait_for_flusher(&mut ledger);
        }
        if ledger.budget.shortage_blocks(self.request, self.urgency) == 0 {
            ledger.grant(self.request);
            ledger.preempt_if_worthwhile(self.space.pinned_hint());
            ledger.tickets.granted += u64::from(self.waits_since.is_some());
            return Ok(Attempt::Granted(Reservation::new(self.space, self.request)));
        }
        let running = ledger.reclaim.is_running();
        let reclaimer =
            ledger.shared_flusher.chosen.as_ref().and_then(|flusher| flusher.reclaimer.upgrade());
        let possible =
            stage.is_some() && running && ledger.budget.is_possible(self.request, self.urgency);
        let Some(reclaimer) = reclaimer.filter(|_| possible) else {
            ledger.tickets.failed += u64::from(self.waits_since.is_some());
            return Err(if self.waits_since.is_some() && !running {
                SpaceError::Stopped
            } else {
                no_space(self.request)
            });
        };
        assert_may_block(Some(Rank::SPACE_LEDGER));
        ledger.shared_flusher.set_flush(true);
        match stage {
            Some(Stage::Commit) => ledger.reclaim.commits += 1,
            _ => ledger.reclaim.writes += 1,
        }
        self.flushes = true;
        self.waits_since.get_or_insert_with(now_monotonic);
        Ok(Attempt::Flush(reclaimer))
    }

    /// Waits while another request flushes.
    fn wait_for_flusher(&mut self, ledger: &mut MutexGuard<'_, Ledger>) {
        while ledger.reclaim.is_running() && ledger.shared_flusher.flushes() {
            let Some(flusher) = &ledger.shared_flusher.chosen else { return };
            assert_may_block(Some(Rank::SPACE_LEDGER));
            let changed = Arc::clone(&flusher.changed);
            self.waits_since.get_or_insert_with(now_monotonic);
            changed.wait(ledger);
        }
    }
}

enum Attempt {
    Granted(Reservation),
    /// This thread is the flusher now.
    Flush(Arc<dyn Reclaimer>),
}

impl Space {
    /// As [`Space::start`], with one shared flusher instead of tickets.
    ///
    /// # Panics
    /// If it was started before.
    pub fn start_with_shared_flusher(self: &Arc<Self>, reclaimer: Weak<dyn Reclaimer>) {
        let flusher =
            Flusher { reclaimer: reclaimer.clone(), flush: false, changed: Arc::default() };
        self.ledger.lock().shared_flusher.chosen = Some(flusher);
        self.start(reclaimer);
    }

    /// Whether there is a shared flusher in the place of tickets.
    pub fn has_shared_flusher(&self) -> bool {
        self.ledger.lock().shared_flusher.chosen.is_some()
    }
}

/// Reserves as it was done before tickets, beginning with the ledger locked: what fits costs one
/// hold of it, as ever. Gives the ledger back when tickets are chosen.
pub(crate) fn reserve<'a>(
    space: &'a Arc<Space>,
    mut ledger: MutexGuard<'a, Ledger>,
    request: Request,
    urgency: Urgency,
) -> ControlFlow<Result<Reservation, SpaceError>, MutexGuard<'a, Ledger>> {
    if ledger.shared_flusher.chosen.is_none() {
        return ControlFlow::Continue(ledger);
    }
    let mut turn = Turn { space, request, urgency, flushes: false, waits_since: None };
    let mut stage = Stage::first(urgency);
    loop {
        let (reclaimer, now) = match (turn.attempt(ledger, stage), stage) {
            (Err(error), _) => return ControlFlow::Break(Err(error)),
            (Ok(Attempt::Granted(reservation)), _) => return ControlFlow::Break(Ok(reservation)),
            (Ok(Attempt::Flush(reclaimer)), Some(now)) => (reclaimer, now),
            (Ok(Attempt::Flush(_)), None) => return ControlFlow::Break(Err(no_space(request))),
        };
        now.run(&*reclaimer, request);
        stage = now.next();
        ledger = space.ledger.lock();
    }
}
