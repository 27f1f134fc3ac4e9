//! What came before tickets: one flusher at a time, everybody else behind it. For measurements
//! only.
//!
//! The reservations of btrfs before its ENOSPC rework (`reserve_metadata_bytes` in
//! `fs/btrfs/extent-tree.c` of Linux 4.7): whoever finds no space raises the `flush` flag and
//! reclaims *on its own thread*, stage after stage, each followed by another try. An ordinary
//! request that comes meanwhile waits, whether it would fit or not, on one queue; when the flusher
//! is done, with or without success, all are woken together and try again in whatever order they
//! run. Who still finds no space is the next flusher. After the last stage: no space.
//!
//! Stages: some delayed data, then all of it, then a commit. Urgent requests skip the first two and
//! wait for nobody, as `FLUSH_LIMIT` did; a commit doesn't flush at all. Preemptive reclaim existed
//! before tickets; it stays, on the threads of [`crate::reclaim`], with the threshold that it had
//! (`need_do_async_reclaim`).
//!
//! Invariant: the flag goes down, and everybody is woken, on every way out of a flush.
//!
//! Lock discipline: flag and waiters are under the ledger's mutex; a stage runs with it released.
use crate::budget::{Budget, Request, Urgency};
use crate::space::{Ledger, Space, no_space, timed_out};
use crate::{Reclaimer, Reservation, SpaceError};
use cairn_environment::clock::{Monotonic, now_monotonic};
use cairn_environment::lock::{Condvar, MutexGuard};
use cairn_environment::{Rank, assert_may_block};
use cairn_format::NODE_BLOCKS;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The flag, and who waits for it; part of the ledger.
pub(crate) struct SharedFlusher {
    /// What a flusher calls.
    reclaimer: Weak<dyn Reclaimer>,
    flush: bool,
    /// The one queue, with the ledger's mutex.
    changed: Arc<Condvar>,
}

impl SharedFlusher {
    /// Wakes all who wait for the flusher.
    pub(crate) fn wake_all(&self) {
        self.changed.notify_all();
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
            Urgency::Normal => Some(Stage::SomeDelayedData),
            Urgency::Name | Urgency::Priority | Urgency::Removal => Some(Stage::Commit),
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
pub(crate) fn lacks_room(budget: &Budget, pinned_blocks: u64) -> bool {
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
    deadline: Option<Monotonic>,
    flushes: bool,
    /// Since when it waits for the flusher or is it.
    waits_since: Option<Monotonic>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(began) = self.waits_since else { return };
        let mut ledger = self.space.ledger.lock();
        if self.flushes
            && let Some(flusher) = &mut ledger.shared_flusher
        {
            flusher.flush = false;
            flusher.wake_all();
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
        if self.urgency == Urgency::Normal && !self.flushes {
            self.wait_for_flusher(&mut ledger)?;
        }
        if ledger.budget.shortage_blocks(self.request, self.urgency) == 0 {
            ledger.grant(self.request);
            ledger.preempt_if_worthwhile(self.space.pinned_hint());
            ledger.tickets.granted += u64::from(self.waits_since.is_some());
            return Ok(Attempt::Granted(Reservation::new(self.space, self.request)));
        }
        let running = ledger.reclaim.is_running();
        let reclaimer =
            ledger.shared_flusher.as_ref().and_then(|flusher| flusher.reclaimer.upgrade());
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
        if self.deadline.is_some_and(|deadline| deadline <= now_monotonic()) {
            return Err(timed_out(self.request));
        }
        assert_may_block(Some(Rank::SPACE_LEDGER));
        if let Some(flusher) = &mut ledger.shared_flusher {
            flusher.flush = true;
        }
        match stage {
            Some(Stage::Commit) => ledger.reclaim.commits += 1,
            _ => ledger.reclaim.writes += 1,
        }
        self.flushes = true;
        self.waits_since.get_or_insert_with(now_monotonic);
        Ok(Attempt::Flush(reclaimer))
    }

    /// Waits while somebody else flushes.
    fn wait_for_flusher(&mut self, ledger: &mut MutexGuard<'_, Ledger>) -> Result<(), SpaceError> {
        while ledger.reclaim.is_running()
            && let Some(flusher) = ledger.shared_flusher.as_ref().filter(|flusher| flusher.flush)
        {
            assert_may_block(Some(Rank::SPACE_LEDGER));
            let changed = Arc::clone(&flusher.changed);
            self.waits_since.get_or_insert_with(now_monotonic);
            match self.deadline.map(|deadline| deadline - now_monotonic()) {
                None => changed.wait(ledger),
                Some(Duration::ZERO) => return Err(timed_out(self.request)),
                Some(rest) => drop(changed.wait_for(ledger, rest)),
            }
        }
        Ok(())
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
            SharedFlusher { reclaimer: reclaimer.clone(), flush: false, changed: Arc::default() };
        self.ledger.lock().shared_flusher = Some(flusher);
        self.start(reclaimer);
    }

    /// Whether there is a shared flusher in the place of tickets.
    pub fn has_shared_flusher(&self) -> bool {
        self.ledger.lock().shared_flusher.is_some()
    }

    /// Reserves as it was done before tickets, beginning with the ledger locked: what fits costs
    /// one hold of it, as ever.
    pub(crate) fn reserve_by_flushing<'a>(
        self: &'a Arc<Self>,
        mut ledger: MutexGuard<'a, Ledger>,
        request: Request,
        urgency: Urgency,
        deadline: Option<Monotonic>,
    ) -> Result<Reservation, SpaceError> {
        let mut turn =
            Turn { space: self, request, urgency, deadline, flushes: false, waits_since: None };
        let mut stage = Stage::first(urgency);
        loop {
            let (reclaimer, now) = match (turn.attempt(ledger, stage)?, stage) {
                (Attempt::Granted(reservation), _) => return Ok(reservation),
                (Attempt::Flush(reclaimer), Some(now)) => (reclaimer, now),
                (Attempt::Flush(_), None) => return Err(no_space(request)),
            };
            now.run(&*reclaimer, request);
            stage = now.next();
            ledger = self.ledger.lock();
        }
    }
}
