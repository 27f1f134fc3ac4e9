//! Getting space back, on two threads of its own.
//!
//! Purpose: while tickets wait, ask the engine for space in stages: *write delayed data* (which
//! turns worst-case reservations into exact use), then *commit* (which unpins). Each stage ends
//! early in effect: a ticket that is satisfied leaves the queue, and a stage begins only for those
//! that still wait.
//!
//! Two threads, because writing delayed data itself reserves space with priority and may have to
//! wait for a commit:
//! - `space-reclaim` serves ordinary tickets, and reclaims preemptively; its second stage asks the
//!   other thread to commit;
//! - `space-commit` calls the commit, for tickets that may wait for nothing else and for the other
//!   thread.
//!
//! Preemptive reclaim does the same before anybody waits, when little room is left that isn't
//! promised and enough could come back: once a queue has formed it feeds on itself, since a
//! ticket is granted what the one before gave back, and each hand-over costs a switch of threads.
//!
//! Failing: a *cycle* is one pass through the stages. When [`FRUITLESS_CYCLES_MAX`] cycles in a row
//! brought the first ticket no closer, though others that hold reservations were given a moment to
//! return them, it fails; ten times as many may be in vain while what it lacks is pinned. Then
//! those behind it that fit are granted, those that the next commit would help become first, and
//! the others fail as well. A ticket that didn't see the whole of the last cycle doesn't fail in
//! it.
//!
//! Lock discipline: the state is part of the ledger; the reclaimer is called, and its last
//! reference dropped, with no lock held.
use crate::Space;
use crate::budget::Urgency;
use crate::space::Ledger;
use crate::tickets::{Ticket, TicketDecision};
use cairn_environment::clock::now_monotonic;
use cairn_environment::lock::{Condvar, MutexGuard};
use cairn_environment::thread::{self, JoinHandle};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// What reclaim asks of the engine. The functions are called from threads of this crate, with no
/// lock held.
pub trait Reclaimer: Send + Sync {
    /// Writes delayed data, so that its reservations shrink to what was really needed: at most
    /// about `blocks` blocks of it, and only until it is `enough`, which is asked between one file
    /// and the next with no lock held. May reserve with [`Urgency::Writeback`] and wait. Without
    /// `blocks` a ticket may fail after it: then all of it, and it waits for data that other
    /// threads write just now, since that shrinks their reservations as well.
    fn write_delayed_data(&self, blocks: Option<u64>, enough: &dyn Fn() -> bool);

    /// Commits the running transaction; returns when the blocks that it freed are unpinned, or at
    /// once when the volume can't commit any more. May reserve with [`Urgency::Commit`] only.
    fn commit(&self);
}

/// Cycles without progress after which the first ticket fails.
const FRUITLESS_CYCLES_MAX: u32 = 2;
/// ... and while the next commit would unpin all that it lacks: removals may have taken what the
/// last one brought. A limit all the same, since blocks that are pinned here and there make no room
/// for nodes.
const FRUITLESS_CYCLES_MAX_PINNED: u32 = 20;
/// While tickets are granted at least this often, out of what others give back, nothing needs to be
/// reclaimed.
const GRANT_PAUSE: Duration = Duration::from_micros(500);
/// How long a cycle that brought nothing waits, at most, for reservations that others hold: most of
/// them last for moments.
pub(crate) struct ReturnWait(pub(crate) Duration);

impl Default for ReturnWait {
    fn default() -> Self {
        Self(Duration::from_millis(50))
    }
}

/// Preemptive reclaim begins when less than this share of what is left is neither reserved nor
/// pinned.
const PREEMPTIVE_SHARE_LEFT: u64 = 10;
/// ... or less than this many blocks, 8 MiB: the worst cases of some dozen operations that run at
/// once.
const PREEMPTIVE_ROOM_BLOCKS: u64 = 2048;
/// ... but no more than this share of the volume.
const PREEMPTIVE_SHARE_VOLUME: u64 = 16;
/// Preemptive reclaim needs this share of the volume to be gained, and to have been granted since
/// its last run.
const PREEMPTIVE_SHARE_GAINED: u64 = 64;

/// So many times as long it waits for files whose removal has begun.
const REMOVAL_PATIENCE: u32 = 10;

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    #[default]
    NotStarted,
    Running,
    Stopped,
}

/// One of the two threads.
struct Worker {
    handle: JoinHandle<()>,
    role: Role,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Reclaim,
    Commit,
}

/// State of reclaim, part of the ledger.
#[derive(Default)]
pub(crate) struct Reclaim {
    phase: Phase,
    workers: Vec<Worker>,
    /// Threads that drop a reference to the reclaimer now, which may be its last: [`stop`] may run
    /// on them.
    releasing: Vec<Role>,
    wake: Arc<Wake>,
    /// Commits asked for, begun and ended so far.
    commits_wanted: u64,
    commits_begun: u64,
    commits_ended: u64,
    /// Times that delayed data was written.
    pub(crate) writes: u64,
    /// Commits that were asked of the reclaimer.
    pub(crate) commits: u64,
    preempt: bool,
    /// Blocks granted so far, and when preemptive reclaim ran last.
    pub(crate) granted_blocks: u64,
    pub(crate) preempted_at: u64,
    /// Preemptive runs so far.
    pub(crate) preemptive_runs: u64,
    pub(crate) return_wait: ReturnWait,
}

/// The condition variables of the two threads, all with the ledger's mutex.
#[derive(Default)]
struct Wake {
    /// No reservation is held any more, and yet tickets wait.
    returned: Condvar,
    reclaim: Condvar,
    commit: Condvar,
    commit_ended: Condvar,
}

impl Reclaim {
    /// Whether requests may wait.
    pub(crate) fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Wakes the thread that serves tickets of `urgency`.
    pub(crate) fn kick(&self, urgency: Urgency) {
        if urgency == Urgency::Ordinary {
            self.wake.reclaim.notify_one()
        } else {
            self.wake.commit.notify_one()
        }
    }
}

/// Judges whether cycles bring the first ticket closer to what it needs.
#[derive(Default)]
struct Progress {
    /// Sequence of the ticket that is first.
    first: Option<u64>,
    shortage_blocks: u64,
    /// Cycles in vain while it lacked more than was pinned, and while all that it lacked was.
    fruitless: u32,
    fruitless_pinned: u32,
}

impl Progress {
    fn cycle_begins(&mut self, ledger: &Ledger, first: Option<&Arc<Ticket>>) {
        let sequence = first.map(|ticket| ticket.sequence);
        if self.first != sequence {
            let shortage_blocks = first
                .map_or(0, |ticket| ledger.budget.shortage_blocks(ticket.request, ticket.urgency));
            *self = Progress { first: sequence, shortage_blocks, ..Progress::default() };
        }
    }

    /// Whether the first ticket is the one that was first before, and no closer to what it needs.
    fn is_stuck(&self, ledger: &Ledger, first: Option<&Arc<Ticket>>) -> bool {
        first.is_some_and(|ticket| {
            let shortage_blocks = ledger.budget.shortage_blocks(ticket.request, ticket.urgency);
            Some(ticket.sequence) == self.first
                && shortage_blocks >= self.shortage_blocks
                && shortage_blocks > 0
        })
    }

    /// Whether the first ticket should give up, when so many blocks are pinned.
    fn cycle_ends(
        &mut self,
        ledger: &Ledger,
        first: Option<&Arc<Ticket>>,
        pinned_blocks: u64,
    ) -> bool {
        let Some(ticket) = first.filter(|ticket| Some(ticket.sequence) == self.first) else {
            return false;
        };
        let shortage_blocks = ledger.budget.shortage_blocks(ticket.request, ticket.urgency);
        if shortage_blocks < self.shortage_blocks {
            *self = Progress { first: self.first, shortage_blocks, ..Progress::default() };
        } else if shortage_blocks > pinned_blocks {
            self.fruitless += 1;
        } else if shortage_blocks > 0 {
            self.fruitless_pinned += 1;
        }
        self.fruitless >= FRUITLESS_CYCLES_MAX
            || self.fruitless_pinned >= FRUITLESS_CYCLES_MAX_PINNED
    }
}

impl Ledger {
    /// Asks for preemptive reclaim when little room is left and enough could come back.
    ///
    /// Costs a few comparisons on a volume with room. On a full volume nothing worthwhile can be
    /// gained, and after a run that gained nothing the next one waits for as many grants as would
    /// be worthwhile: it can't spin.
    pub(crate) fn preempt_if_worthwhile(&mut self, pinned_blocks: u64) {
        let recent = self.reclaim.granted_blocks - self.reclaim.preempted_at;
        let due = self.reclaim.is_running()
            && !self.reclaim.preempt
            && recent >= self.worthwhile_blocks();
        if due && self.lacks_room(pinned_blocks, 1) {
            self.reclaim.preempt = true;
            self.reclaim.kick(Urgency::Ordinary);
        }
    }

    fn worthwhile_blocks(&self) -> u64 {
        self.budget.total_blocks / PREEMPTIVE_SHARE_GAINED
    }

    /// Whether less than `times` the room that should be there is left for ordinary requests, and
    /// reclaim could gain some.
    fn lacks_room(&self, pinned_blocks: u64, times: u64) -> bool {
        if let Some(lacks) = self.shared_flusher.lacks_room(&self.budget, pinned_blocks) {
            return lacks;
        }
        let budget = &self.budget;
        let room = budget.room_blocks();
        let gain = budget.delayed_blocks() + pinned_blocks;
        let least = PREEMPTIVE_ROOM_BLOCKS.min(budget.total_blocks / PREEMPTIVE_SHARE_VOLUME);
        let wanted = least.max((room + gain) / PREEMPTIVE_SHARE_LEFT);
        room < wanted * times && gain >= self.worthwhile_blocks()
    }

    /// A reservation gave something back. Reclaim need not know while others hold some: waking it
    /// for each would cost more than what it is woken for.
    pub(crate) fn note_return(&self) {
        if self.budget.reserved_blocks() == 0 && self.tickets.first().is_some() {
            self.reclaim.wake.returned.notify_all();
        }
    }

    /// Fails tickets from the first one on, those that came before `sequence`, until one behind
    /// them is granted. When the first lacks more than is pinned, so that a commit would not help
    /// it, those that one would help stay: they get cycles of their own.
    fn fail_from_first(
        &mut self,
        sequence: u64,
        pinned_blocks: u64,
        first: impl Fn(&Ledger) -> Option<Arc<Ticket>>,
    ) {
        let granted = self.tickets.granted;
        let is_hopeful = |ledger: &Ledger, ticket: &Ticket| {
            ledger.budget.shortage_blocks(ticket.request, ticket.urgency) <= pinned_blocks
        };
        let spares_hopeful = first(self).is_some_and(|ticket| !is_hopeful(self, &ticket));
        while let Some(ticket) = first(self).filter(|ticket| ticket.sequence < sequence) {
            if spares_hopeful && is_hopeful(self, &ticket) {
                break;
            }
            self.tickets.finish(&ticket, TicketDecision::Failed);
            self.satisfy();
            if self.tickets.granted > granted {
                break;
            }
        }
    }

    /// Ends waiting for good.
    pub(crate) fn shut_down(&mut self) {
        self.reclaim.phase = Phase::Stopped;
        while let Some(ticket) = self.tickets.first().cloned() {
            self.tickets.finish(&ticket, TicketDecision::Stopped);
        }
        let wake = &self.reclaim.wake;
        wake.reclaim.notify_all();
        wake.commit.notify_all();
        wake.commit_ended.notify_all();
        wake.returned.notify_all();
        self.shared_flusher.wake_all();
    }
}

/// Starts both threads.
pub(crate) fn start(space: &Arc<Space>, reclaimer: Weak<dyn Reclaimer>) {
    let mut ledger = space.ledger.lock();
    assert!(ledger.reclaim.phase == Phase::NotStarted, "reclaim is started twice");
    ledger.reclaim.phase = Phase::Running;
    for (name, role) in [("space-reclaim", Role::Reclaim), ("space-commit", Role::Commit)] {
        let worker = Thread { space: Arc::clone(space), reclaimer: reclaimer.clone(), role };
        let handle = thread::spawn(name, move || worker.run());
        ledger.reclaim.workers.push(Worker { handle, role });
    }
}

/// Ends both threads, except one that runs this very function because it dropped the last reference
/// to the reclaimer.
pub(crate) fn stop(space: &Space) {
    let mut ledger = space.ledger.lock();
    ledger.shut_down();
    let workers = std::mem::take(&mut ledger.reclaim.workers);
    let releasing = ledger.reclaim.releasing.clone();
    drop(ledger);
    for worker in workers.into_iter().filter(|worker| !releasing.contains(&worker.role)) {
        // A thread that panicked has shut down on its way out; there is nothing more to do about it
        // here.
        drop(worker.handle.join());
    }
}

struct Thread {
    space: Arc<Space>,
    reclaimer: Weak<dyn Reclaimer>,
    role: Role,
}

impl Drop for Thread {
    /// However the thread ends: no ticket waits for it any longer.
    fn drop(&mut self) {
        self.space.ledger.lock().shut_down();
    }
}

type Guard<'a> = MutexGuard<'a, Ledger>;

impl Thread {
    fn run(&self) {
        let mut ledger = self.space.ledger.lock();
        let mut progress = Progress::default();
        while ledger.reclaim.is_running() {
            ledger = match self.role {
                Role::Reclaim => self.reclaim_once(ledger, &mut progress),
                Role::Commit => self.commit_once(ledger, &mut progress),
            };
        }
    }

    /// Serves ordinary tickets with one cycle, or reclaims preemptively, or sleeps.
    fn reclaim_once<'a>(&'a self, mut ledger: Guard<'a>, progress: &mut Progress) -> Guard<'a> {
        let first = |ledger: &Ledger| ledger.tickets.first_normal().cloned();
        if first(&ledger).is_some() {
            if self.is_served(&mut ledger) {
                return ledger;
            }
            progress.cycle_begins(&ledger, first(&ledger).as_ref());
            let sequence = ledger.tickets.next_sequence;
            // The cycle that may be the last one asks for everything.
            let blocks = match progress {
                Progress { fruitless: 0, fruitless_pinned: 0, .. } => {
                    Some(ledger.tickets.normal_blocks())
                }
                // A commit should help.
                Progress { fruitless: 0, .. } => Some(u64::MAX),
                _ => None,
            };
            let may_help = |ledger: &Ledger, ticket: &Ticket| {
                let coming_blocks = ledger.budget.reserved_blocks()
                    + self.space.pinned_hint()
                    + self.space.returning_hint();
                ledger.budget.shortage_blocks(ticket.request, ticket.urgency) <= coming_blocks
            };
            ledger = self.write_delayed_data(ledger, blocks, &|ledger| {
                !first(ledger).is_some_and(|ticket| may_help(ledger, &ticket))
            });
            self.request_commit(&mut ledger, |ledger| first(ledger).is_some());
            self.await_returns(&mut ledger, progress, first);
            // While urgent tickets wait the ordinary ones could not be served, whatever came back.
            let judged = ledger.tickets.first_urgent().is_none();
            let pinned_blocks = self.space.pinned_hint();
            if judged && progress.cycle_ends(&ledger, first(&ledger).as_ref(), pinned_blocks) {
                ledger.fail_from_first(sequence, pinned_blocks, first);
            }
            ledger.preempt_if_worthwhile(self.space.pinned_hint());
            ledger
        } else if ledger.reclaim.preempt {
            self.preempt(ledger)
        } else {
            let wake = Arc::clone(&ledger.reclaim.wake);
            wake.reclaim.wait(&mut ledger);
            ledger
        }
    }

    /// One preemptive run: delayed data, then a commit if that is still worthwhile.
    fn preempt<'a>(&'a self, mut ledger: Guard<'a>) -> Guard<'a> {
        let space = &self.space;
        ledger.reclaim.preempt = false;
        if !ledger.lacks_room(space.pinned_hint(), 1) {
            return ledger;
        }
        ledger.reclaim.preempted_at = ledger.reclaim.granted_blocks;
        ledger.reclaim.preemptive_runs += 1;
        // Twice the room that is missed when a run begins, or the next one would begin at once.
        let lacks_room = |ledger: &Ledger| ledger.lacks_room(space.pinned_hint(), 2);
        if ledger.budget.data_reserved > 0 {
            ledger = self.write_delayed_data(ledger, Some(u64::MAX), &|ledger| !lacks_room(ledger));
        }
        self.request_commit(&mut ledger, |ledger| {
            space.pinned_hint() >= ledger.worthwhile_blocks() && lacks_room(ledger)
        });
        ledger
    }

    /// Has the other thread begin a commit, and waits for its end, while `needed`.
    fn request_commit(&self, ledger: &mut Guard<'_>, needed: impl Fn(&Ledger) -> bool) {
        let target = ledger.reclaim.commits_begun + 1;
        let wake = Arc::clone(&ledger.reclaim.wake);
        while ledger.reclaim.is_running() && ledger.reclaim.commits_ended < target && needed(ledger)
        {
            if ledger.reclaim.commits_wanted < target {
                ledger.reclaim.commits_wanted = target;
                wake.commit.notify_one();
            }
            wake.commit_ended.wait(ledger);
        }
    }

    /// Commits once for urgent tickets or for the other thread, or sleeps.
    fn commit_once<'a>(&'a self, mut ledger: Guard<'a>, progress: &mut Progress) -> Guard<'a> {
        let first = |ledger: &Ledger| ledger.tickets.first_urgent().cloned();
        let wake = Arc::clone(&ledger.reclaim.wake);
        if first(&ledger).is_none() && ledger.reclaim.commits_wanted <= ledger.reclaim.commits_begun
        {
            wake.commit.wait(&mut ledger);
            return ledger;
        }
        if ledger.reclaim.commits_wanted <= ledger.reclaim.commits_begun
            && self.is_served(&mut ledger)
        {
            return ledger;
        }
        progress.cycle_begins(&ledger, first(&ledger).as_ref());
        let sequence = ledger.tickets.next_sequence;
        ledger.reclaim.commits_begun += 1;
        ledger.reclaim.commits += 1;
        ledger = self.call(ledger, |reclaimer| reclaimer.commit());
        ledger.reclaim.commits_ended += 1;
        wake.commit_ended.notify_all();
        self.await_returns(&mut ledger, progress, first);
        let pinned_blocks = self.space.pinned_hint();
        if progress.cycle_ends(&ledger, first(&ledger).as_ref(), pinned_blocks) {
            ledger.fail_from_first(sequence, pinned_blocks, first);
        }
        ledger
    }

    fn write_delayed_data<'a>(
        &'a self,
        mut ledger: Guard<'a>,
        blocks: Option<u64>,
        enough: &dyn Fn(&Ledger) -> bool,
    ) -> Guard<'a> {
        ledger.reclaim.writes += 1;
        self.call(ledger, |reclaimer| {
            reclaimer.write_delayed_data(blocks, &|| enough(&self.space.ledger.lock()))
        })
    }

    /// Before the first ticket is judged: a cycle may take less time than others hold what they
    /// reserved. Waits, for a bounded time, while it is no closer to what it needs and another
    /// request holds something, or a file is about to be removed.
    fn await_returns(
        &self,
        ledger: &mut Guard<'_>,
        progress: &Progress,
        first: impl Fn(&Ledger) -> Option<Arc<Ticket>>,
    ) {
        let begun = now_monotonic();
        let wake = Arc::clone(&ledger.reclaim.wake);
        while ledger.reclaim.is_running()
            && progress.is_stuck(ledger, first(ledger).as_ref())
            && self.is_something_held(ledger)
            && (self.role == Role::Reclaim
                || ledger.reclaim.commits_wanted <= ledger.reclaim.commits_begun)
        {
            // A removal may begin meanwhile, or turn out to lack space itself.
            let patience = if self.space.returning_hint() > 0 { REMOVAL_PATIENCE } else { 1 };
            let rest = begun + ledger.reclaim.return_wait.0 * patience - now_monotonic();
            if rest.is_zero() {
                break;
            }
            wake.returned.wait_for(ledger, rest.min(GRANT_PAUSE));
        }
    }

    /// Whether anything is held that will be given back without being asked for.
    fn is_something_held(&self, ledger: &Ledger) -> bool {
        ledger.budget.reserved_blocks() > 0 || self.space.returning_hint() > 0
    }

    /// The first stage, which costs least: operations that end give back most of what they
    /// reserved. Whether a ticket was granted in a moment; then the others may wait for the next
    /// moment, too.
    fn is_served(&self, ledger: &mut Guard<'_>) -> bool {
        let granted = ledger.tickets.granted;
        let wake = Arc::clone(&ledger.reclaim.wake);
        if self.is_something_held(ledger) {
            wake.returned.wait_for(ledger, GRANT_PAUSE);
        }
        ledger.tickets.granted > granted
    }

    /// Calls the reclaimer with the ledger unlocked. Without a reclaimer waiting makes no sense any
    /// more.
    fn call<'a>(
        &'a self,
        mut ledger: Guard<'a>,
        function: impl FnOnce(&dyn Reclaimer),
    ) -> Guard<'a> {
        let Some(reclaimer) = self.reclaimer.upgrade() else {
            ledger.shut_down();
            return ledger;
        };
        drop(ledger);
        function(&*reclaimer);
        self.space.ledger.lock().reclaim.releasing.push(self.role);
        drop(reclaimer);
        let mut ledger = self.space.ledger.lock();
        ledger.reclaim.releasing.retain(|&role| role != self.role);
        ledger
    }
}
