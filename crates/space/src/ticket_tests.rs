//! Tickets and reclaim: who is served, in which order, and who fails.
use crate::reclaim::ReturnWait;
use crate::{Caller, Reclaimer, Request, Reservation, Space, SpaceError, SpaceReport, Urgency};
use cairn_environment::Rank;
use cairn_environment::clock::{now_monotonic, sleep};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::random::Seeded;
use cairn_environment::thread::{self, JoinHandle};
use cairn_format::{BlockRange, Generation, Geometry};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

type Outcome = Result<Reservation, SpaceError>;

pub(crate) fn volume(bytes: u64) -> Arc<Space> {
    let geometry = Geometry::for_size(bytes, Some(1 << 20)).unwrap();
    Space::new(geometry, Space::fresh_bitmaps(&geometry))
}

pub(crate) fn data(data_blocks: u64) -> Request {
    Request { data_blocks, nodes: 0 }
}

/// A reclaimer whose stages wait at a gate and then do what the test says.
pub(crate) struct Gate {
    open: Mutex<(bool, u64)>,
    opened: Condvar,
    writes: AtomicU64,
    commits: AtomicU64,
    on_write: Box<dyn Fn(u64) + Send + Sync>,
    on_commit: Box<dyn Fn() + Send + Sync>,
}

impl Gate {
    pub(crate) fn new(
        on_write: impl Fn(u64) + Send + Sync + 'static,
        on_commit: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Gate> {
        Arc::new(Gate {
            open: Mutex::new(Rank::LEAF, (true, 0)),
            opened: Condvar::new(),
            writes: AtomicU64::new(0),
            commits: AtomicU64::new(0),
            on_write: Box::new(on_write),
            on_commit: Box::new(on_commit),
        })
    }

    pub(crate) fn idle() -> Arc<Gate> {
        Gate::new(|_| {}, || {})
    }

    pub(crate) fn closed() -> Arc<Gate> {
        let gate = Gate::idle();
        gate.open.lock().0 = false;
        gate
    }

    pub(crate) fn set_open(&self, open: bool) {
        self.open.lock().0 = open;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let mut open = self.open.lock();
        while !open.0 {
            self.opened.wait(&mut open);
        }
        open.1 += 1;
    }

    pub(crate) fn calls(&self) -> (u64, u64) {
        (self.writes.load(SeqCst), self.commits.load(SeqCst))
    }
}

impl Reclaimer for Gate {
    fn write_delayed_data(&self, blocks: Option<u64>, enough: &dyn Fn() -> bool) {
        self.writes.fetch_add(1, SeqCst);
        self.pass();
        if !enough() {
            (self.on_write)(blocks.unwrap_or(u64::MAX));
        }
    }

    fn commit(&self) {
        self.commits.fetch_add(1, SeqCst);
        self.pass();
        (self.on_commit)();
    }
}

pub(crate) fn started(space: &Arc<Space>, gate: &Arc<Gate>) {
    let weak = Arc::downgrade(gate);
    space.start(weak);
}

/// Holds all that an ordinary request could get but `left` blocks.
pub(crate) fn fill(space: &Arc<Space>, left: u64) -> Reservation {
    space.try_reserve(data(space.report().available_blocks - left), Urgency::Ordinary).unwrap()
}

/// A request on a thread of its own; returns when its ticket is in the queue.
pub(crate) fn waiting(
    space: &Arc<Space>,
    request: Request,
    urgency: Urgency,
) -> JoinHandle<Outcome> {
    let before = space.report().tickets_waiting;
    let other = Arc::clone(space);
    let handle = thread::spawn("waiter", move || other.reserve(request, urgency));
    until(|| space.report().tickets_waiting > before);
    handle
}

pub(crate) fn until(condition: impl Fn() -> bool) {
    let begin = now_monotonic();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(20), "waited in vain");
        thread::yield_now();
    }
}

#[test]
fn before_the_start_nobody_waits() {
    let space = volume(16 << 20);
    let held = fill(&space, 10);
    assert_eq!(
        space.reserve(data(11), Urgency::Ordinary).unwrap_err(),
        SpaceError::NoSpace { data_blocks: 11, nodes: 0 }
    );
    assert!(space.reserve(data(10), Urgency::Ordinary).is_ok());
    drop(held);
    assert!(space.reserve(data(11), Urgency::Ordinary).is_ok());
}

#[test]
fn first_come_first_served_and_nobody_barges() {
    let space = volume(16 << 20);
    let gate = Gate::closed();
    started(&space, &gate);
    let held = fill(&space, 50);
    let first = waiting(&space, data(100), Urgency::Ordinary);
    let second = waiting(&space, data(20), Urgency::Ordinary);
    // 50 blocks are free, and yet neither a ticket behind the first nor a newcomer gets them.
    assert!(space.try_reserve(data(1), Urgency::Ordinary).is_err(), "barged");
    assert_eq!(space.report().tickets_waiting, 2);
    held.give_back(40, 0);
    assert_eq!(space.report().tickets_waiting, 2, "90 blocks are not 100");
    held.give_back(20, 0);
    let first = first.join().unwrap().unwrap();
    assert_eq!(space.report().tickets_waiting, 1, "10 blocks are not 20");
    drop(first);
    assert_eq!(second.join().unwrap().unwrap().data_blocks(), 20);
    let report = space.report();
    assert_eq!((report.tickets_granted, report.tickets_failed, report.tickets_waiting), (2, 0, 0));
    assert!(report.ticket_wait_max > Duration::ZERO);
    gate.set_open(true);
    space.stop();
}

#[test]
fn urgent_tickets_come_first() {
    let space = volume(16 << 20);
    let gate = Gate::closed();
    started(&space, &gate);
    let global_blocks = space.report().global_reserve_nodes * 4;
    let held = fill(&space, 0);
    let normal = waiting(&space, data(10), Urgency::Ordinary);
    let priority = waiting(&space, data(global_blocks / 2 + 10), Urgency::Writeback);
    let removal = waiting(&space, data(global_blocks * 3 / 4 + 10), Urgency::Removal);
    assert!(space.try_reserve(data(1), Urgency::Removal).is_err(), "barged");
    drop(space.try_reserve(data(1), Urgency::Commit).expect("a commit overtakes everybody"));
    held.give_back(10, 0);
    let removal = removal.join().unwrap().unwrap();
    assert_eq!(space.report().tickets_waiting, 2);
    drop(removal);
    let priority = priority.join().unwrap().unwrap();
    assert_eq!(space.report().tickets_waiting, 1);
    drop(priority);
    drop(normal.join().unwrap().unwrap());
    gate.set_open(true);
    space.stop();
}

#[test]
fn a_failed_first_ticket_lets_small_ones_through() {
    let space = volume(16 << 20);
    let gate = Gate::closed();
    started(&space, &gate);
    let _held = fill(&space, 50);
    let large = waiting(&space, data(100), Urgency::Ordinary);
    let larger = waiting(&space, data(200), Urgency::Ordinary);
    let small = waiting(&space, data(30), Urgency::Ordinary);
    let medium = waiting(&space, data(40), Urgency::Ordinary);
    gate.set_open(true);
    assert_eq!(
        large.join().unwrap().unwrap_err(),
        SpaceError::NoSpace { data_blocks: 100, nodes: 0 }
    );
    assert!(larger.join().unwrap().is_err());
    let small = small.join().unwrap().expect("fits behind the failed ones");
    // The medium one waits for itself: more cycles, then it fails.
    assert!(medium.join().unwrap().is_err());
    assert_eq!(small.data_blocks(), 30);
    let (writes, commits) = gate.calls();
    assert!(
        (2..20).contains(&writes) && (2..20).contains(&commits),
        "{writes} writes, {commits} commits"
    );
    let report = space.report();
    assert_eq!((report.tickets_granted, report.tickets_failed), (1, 3));
    space.stop();
}

#[test]
fn nobody_fails_for_what_others_hold_for_a_moment() {
    let space = volume(16 << 20);
    let held = Arc::new(Mutex::new(Rank::LEAF, Some(fill(&space, 0))));
    space.ledger.lock().reclaim.return_wait = ReturnWait(Duration::from_secs(3600));
    let (taken, cycles) = (Arc::clone(&held), Arc::new(AtomicU64::new(0)));
    // Both stages return at once and bring nothing; the holder is slower than any number of them.
    let gate = Gate::new(
        |_| {},
        move || {
            if cycles.fetch_add(1, SeqCst) == 0 {
                let taken = Arc::clone(&taken);
                drop(thread::spawn("holder", move || {
                    sleep(Duration::from_millis(20));
                    let held = taken.lock().take();
                    drop(held);
                }));
            }
        },
    );
    started(&space, &gate);
    let granted = space.reserve(data(100), Urgency::Ordinary).expect("the holder gives it back");
    assert_eq!((granted.data_blocks(), space.report().tickets_failed), (100, 0));
    assert!(gate.calls().1 <= 2, "{:?} calls: it was no use to try again and again", gate.calls());
    space.stop();
}

/// A full volume with 100 pinned blocks, which the sixth commit unpins, as if removals took what
/// the first five bring.
fn full_with_pinned_blocks() -> (Arc<Space>, Reservation, Arc<Gate>) {
    let space = volume(16 << 20);
    let freeing = Generation(1);
    let held = fill(&space, 0);
    let pinned = space.allocate_data(&held, 100, None).unwrap();
    assert_eq!(pinned.blocks, 100);
    space.reference(pinned);
    space.free(pinned, freeing).unwrap();
    space.ledger.lock().reclaim.return_wait = ReturnWait(Duration::ZERO);
    let (other, commits) = (Arc::downgrade(&space), AtomicU64::new(0));
    let on_commit = move || {
        if commits.fetch_add(1, SeqCst) == 5 {
            other.upgrade().unwrap().unpin(freeing);
        }
    };
    (space, held, Gate::new(|_| {}, on_commit))
}

#[test]
fn nobody_fails_while_a_commit_would_unpin_what_it_lacks() {
    let (space, _held, gate) = full_with_pinned_blocks();
    started(&space, &gate);
    let granted = space.reserve(data(100), Urgency::Ordinary).expect("all that it lacks is pinned");
    assert_eq!((granted.data_blocks(), gate.calls().1), (100, 6));
    let refused = space.reserve(data(1), Urgency::Ordinary);
    assert!(
        refused.is_err() && gate.calls().1 <= 8,
        "{:?} calls: nothing is pinned any more",
        gate.calls()
    );
    space.stop();
}

#[test]
fn nobody_fails_with_a_large_request_before_it() {
    let (space, _held, gate) = full_with_pinned_blocks();
    gate.set_open(false);
    started(&space, &gate);
    let large = waiting(&space, data(1000), Urgency::Ordinary);
    let small = waiting(&space, data(50), Urgency::Ordinary);
    gate.set_open(true);
    assert!(large.join().unwrap().is_err(), "it lacks more than is pinned");
    assert_eq!(small.join().unwrap().expect("all that it lacks is pinned").data_blocks(), 50);
    assert_eq!(gate.calls().1, 6);
    space.stop();
}

/// Writes ten blocks at a time, as long as it isn't enough.
struct Pieces {
    held: Mutex<Vec<Reservation>>,
}

impl Reclaimer for Pieces {
    fn write_delayed_data(&self, _: Option<u64>, enough: &dyn Fn() -> bool) {
        while !enough() {
            let Some(piece) = self.held.lock().pop() else { return };
            drop(piece);
        }
    }

    fn commit(&self) {}
}

#[test]
fn a_stage_ends_when_it_has_what_was_asked_for() {
    let space = volume(16 << 20);
    let all = fill(&space, 0);
    let pieces = (0..20).map(|_| all.split(10, 0)).collect();
    let reclaimer = Arc::new(Pieces { held: Mutex::new(Rank::LEAF, pieces) });
    let weak = Arc::downgrade(&reclaimer);
    space.start(weak);
    // As if preemptive reclaim, which wants more than was asked for, had just run.
    let granted_blocks = space.ledger.lock().reclaim.granted_blocks;
    space.ledger.lock().reclaim.preempted_at = granted_blocks;
    let reservation = space.reserve(data(25), Urgency::Ordinary).unwrap();
    space.stop();
    assert_eq!((reclaimer.held.lock().len(), reservation.data_blocks()), (17, 25));
}

#[test]
fn a_request_larger_than_the_volume_fails_at_once() {
    let space = volume(16 << 20);
    let gate = Gate::idle();
    started(&space, &gate);
    for request in [
        data(u64::MAX),
        Request { data_blocks: 0, nodes: u64::MAX },
        data(space.report().total_blocks),
    ] {
        assert!(matches!(
            space.reserve(request, Urgency::Ordinary),
            Err(SpaceError::NoSpace { .. })
        ));
    }
    assert_eq!(gate.calls(), (0, 0));
    space.stop();
}

#[test]
fn reclaim_stops_when_the_tickets_are_satisfied() {
    let space = volume(16 << 20);
    let delayed = Arc::new(Mutex::new(Rank::LEAF, None));
    let (to_write, asked) = (Arc::clone(&delayed), Arc::new(AtomicU64::new(0)));
    let asked_blocks = Arc::clone(&asked);
    let gate = Gate::new(
        move |blocks| {
            asked_blocks.store(blocks, SeqCst);
            let held = to_write.lock().take();
            drop(held);
        },
        || {},
    );
    started(&space, &gate);
    *delayed.lock() = Some(fill(&space, 0));
    drop(space.reserve(data(77), Urgency::Ordinary).unwrap());
    until(|| space.report().tickets_waiting == 0);
    sleep(Duration::from_millis(20));
    assert_eq!((gate.calls(), asked.load(SeqCst)), ((1, 0), 77), "one stage was enough");
    space.stop();
}

#[test]
fn a_commit_unpins_for_the_waiter() {
    let space = volume(16 << 20);
    let held = fill(&space, 0);
    while held.data_blocks() > 0 {
        let range = space.allocate_data(&held, held.data_blocks(), None).unwrap();
        space.reference(range);
        space.free(range, Generation(2)).unwrap();
    }
    let (committer, generation) = (Arc::downgrade(&space), AtomicU64::new(2));
    let gate = Gate::new(
        |_| {},
        move || committer.upgrade().unwrap().unpin(Generation(generation.fetch_add(1, SeqCst))),
    );
    started(&space, &gate);
    for urgency in [Urgency::Ordinary, Urgency::Writeback] {
        drop(space.reserve(data(space.report().total_blocks / 2), urgency).unwrap());
    }
    assert_eq!(space.report().pinned, 0);
    space.stop();
}

#[test]
fn writing_delayed_data_may_itself_wait_for_a_commit() {
    let space = volume(16 << 20);
    let delayed = Arc::new(Mutex::new(Rank::LEAF, None));
    let pinned = Arc::new(AtomicBool::new(false));
    let (writer, to_write, writer_pinned) =
        (Arc::downgrade(&space), Arc::clone(&delayed), Arc::clone(&pinned));
    let committer = Arc::downgrade(&space);
    let gate = Gate::new(
        move |_| {
            let space = writer.upgrade().unwrap();
            let global_blocks = space.report().global_reserve_nodes * 4;
            // Needs more than its half of the global reserve: only the commit can give it.
            let held = to_write.lock().take();
            if let Some(held) = held {
                let range = space.allocate_data(&held, 200, None).unwrap();
                space.reference(range);
                space.free(range, Generation(2)).unwrap();
                writer_pinned.store(true, SeqCst);
                let extra =
                    space.reserve(data(global_blocks / 2 + 100), Urgency::Writeback).unwrap();
                drop((held, extra));
            }
        },
        move || {
            if pinned.swap(false, SeqCst) {
                committer.upgrade().unwrap().unpin(Generation(2));
            }
        },
    );
    started(&space, &gate);
    *delayed.lock() = Some(fill(&space, 0));
    drop(space.reserve(data(300), Urgency::Ordinary).unwrap());
    space.stop();
}

#[test]
fn stopping_wakes_all_who_wait() {
    let space = volume(16 << 20);
    let gate = Gate::closed();
    started(&space, &gate);
    let held = fill(&space, 0);
    let urgencies = [Urgency::Ordinary, Urgency::Writeback, Urgency::Removal, Urgency::Ordinary];
    let waiters: Vec<_> =
        urgencies.iter().map(|&urgency| waiting(&space, data(2000), urgency)).collect();
    let opener = Arc::clone(&gate);
    let late = thread::spawn("late", move || {
        sleep(Duration::from_millis(50));
        opener.set_open(true);
    });
    space.stop();
    for waiter in waiters {
        assert_eq!(waiter.join().unwrap().unwrap_err(), SpaceError::Stopped);
    }
    late.join().unwrap();
    assert!(matches!(
        space.reserve(data(2000), Urgency::Ordinary),
        Err(SpaceError::NoSpace { .. })
    ));
    drop(held);
    let _fits = space
        .reserve(data(2000), Urgency::Ordinary)
        .expect("what fits is granted after the stop, too");
    space.stop();
}

/// An engine that stops the space when it is dropped, on whatever thread that happens.
struct Owner {
    space: Arc<Space>,
    /// Called, may go on, stopped.
    steps: Arc<[AtomicBool; 3]>,
}

impl Reclaimer for Owner {
    fn write_delayed_data(&self, _: Option<u64>, _: &dyn Fn() -> bool) {
        self.steps[0].store(true, SeqCst);
        until(|| self.steps[1].load(SeqCst));
    }
    fn commit(&self) {
        self.write_delayed_data(Some(0), &|| false);
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.space.stop();
        self.steps[2].store(true, SeqCst);
    }
}

#[test]
fn the_last_reference_may_die_on_a_reclaim_thread() {
    for urgency in [Urgency::Ordinary, Urgency::Removal] {
        let space = volume(16 << 20);
        let steps = Arc::new([false; 3].map(AtomicBool::new));
        let owner = Arc::new(Owner { space: Arc::clone(&space), steps: Arc::clone(&steps) });
        let weak = Arc::downgrade(&owner);
        space.start(weak);
        let _held = fill(&space, 0);
        let waiter = waiting(&space, data(1000), urgency);
        until(|| steps[0].load(SeqCst));
        drop(owner);
        steps[1].store(true, SeqCst);
        // Stopped, unless fruitless cycles were quicker.
        assert!(waiter.join().unwrap().is_err());
        until(|| steps[2].load(SeqCst));
    }
}

#[test]
fn preemptive_reclaim_neither_spins_nor_runs_without_need() {
    let space = volume(64 << 20);
    let gate = Gate::idle();
    started(&space, &gate);
    let available = space.report().available_blocks;
    // Half-empty, however busy: never.
    let half = space.reserve(data(available / 2), Urgency::Ordinary).unwrap();
    for _ in 0..20_000 {
        drop(space.reserve(Request { data_blocks: 8, nodes: 2 }, Urgency::Ordinary).unwrap());
    }
    sleep(Duration::from_millis(20));
    assert_eq!(gate.calls(), (0, 0));
    // Nearly all reserved: it begins before anybody must wait.
    let rest = space.reserve(data(available * 9 / 20), Urgency::Ordinary).unwrap();
    until(|| gate.calls().0 == 1);
    assert_eq!(space.report().tickets_granted, 0);
    // It gained nothing, and goes on only at the pace of the grants.
    let runs_max = 2000 * 8 / (space.report().total_blocks / 64) + 2;
    for _ in 0..2000 {
        drop(space.reserve(data(8), Urgency::Ordinary).unwrap());
    }
    sleep(Duration::from_millis(20));
    assert!(
        space.report().preemptive_runs <= runs_max,
        "{:?}, at most {runs_max} runs",
        space.report()
    );
    // Full of data: nothing can be gained, so it doesn't even try.
    for held in [half, rest] {
        while held.data_blocks() > 0 {
            space.reference(space.allocate_data(&held, held.data_blocks(), None).unwrap());
        }
    }
    let _last =
        space.reserve(data(space.report().available_blocks - 20), Urgency::Ordinary).map(|held| {
            while held.data_blocks() > 0 {
                space.reference(space.allocate_data(&held, held.data_blocks(), None).unwrap());
            }
        });
    let few = space.reserve(data(space.report().available_blocks - 8), Urgency::Ordinary);
    sleep(Duration::from_millis(20));
    let before = gate.calls();
    for _ in 0..20_000 {
        drop(space.reserve(data(8), Urgency::Ordinary).unwrap());
    }
    sleep(Duration::from_millis(20));
    assert_eq!(gate.calls(), before, "a full volume is left alone");
    drop(few);
    space.stop();
}

/// One thread of the stress test: reserves, allocates, references, frees; all on one volume.
fn stress(space: &Arc<Space>, generation: &AtomicU64, cut: &Mutex<()>, seed: u64) -> (u64, u64) {
    let mut random = Seeded::new(seed);
    let (mut granted, mut refused) = (0, 0);
    let mut owned: Vec<BlockRange> = Vec::new();
    for round in 0..400 {
        let urgency = [Urgency::Ordinary, Urgency::Ordinary, Urgency::Writeback, Urgency::Removal]
            [random.below(4) as usize];
        let request = Request { data_blocks: random.below(200), nodes: random.below(6) };
        // Some callers are gone before they have waited.
        let number = seed * 1000 + round;
        let gone = Caller { request: number, thread: 0, is_gone: |_| true };
        let caller = random.chance(1, 10).then_some(gone);
        let Ok(held) = space.reserve_for(caller, request, urgency) else {
            refused += 1;
            let _guard = cut.lock();
            for range in owned.drain(..) {
                space.free(range, Generation(generation.load(SeqCst))).unwrap();
            }
            continue;
        };
        granted += 1;
        while held.data_blocks() > 0 {
            let range = space.allocate_data(&held, 1 + random.below(64), None).unwrap();
            if random.chance(1, 4) {
                space.cancel(range);
                break;
            }
            space.reference(range);
            owned.push(range);
        }
        while held.nodes() > 0 && random.chance(3, 4) {
            owned.push(BlockRange::node(space.allocate_node(&held).unwrap()));
        }
        if owned.len() > 30 {
            let _guard = cut.lock();
            for range in owned.drain(..20) {
                space.free(range, Generation(generation.load(SeqCst))).unwrap();
            }
        }
    }
    let _guard = cut.lock();
    for range in owned {
        space.free(range, Generation(generation.load(SeqCst))).unwrap();
    }
    (granted, refused)
}

#[test]
fn sixteen_threads_leave_nothing_behind() {
    let report = stress_with(started);
    assert!(report.tickets_granted > 0, "nobody ever had to wait: {report:?}");
}

/// Sixteen threads at once on a volume that `start` starts; then it stops and must be as new.
pub(crate) fn stress_with(start: fn(&Arc<Space>, &Arc<Gate>)) -> SpaceReport {
    let space = volume(16 << 20);
    let generation = Arc::new(AtomicU64::new(2));
    // Stands for "no operation is joined at the cut".
    let cut = Arc::new(Mutex::new(Rank::TRANSACTION, ()));
    let (committer, running, at_cut) =
        (Arc::downgrade(&space), Arc::clone(&generation), Arc::clone(&cut));
    // Where anybody may commit, commits themselves need an order.
    let commits = Mutex::new(Rank::EXTENTS, ());
    let gate = Gate::new(
        |_| {},
        move || {
            let space = committer.upgrade().unwrap();
            let _one_at_a_time = commits.lock();
            let guard = at_cut.lock();
            let generation = Generation(running.fetch_add(1, SeqCst));
            space.snapshot(generation);
            drop(guard);
            space.unpin(generation);
        },
    );
    start(&space, &gate);
    let threads: Vec<_> = (0..16)
        .map(|seed| {
            let (space, generation, cut) =
                (Arc::clone(&space), Arc::clone(&generation), Arc::clone(&cut));
            thread::spawn("stress", move || stress(&space, &generation, &cut, seed))
        })
        .collect();
    let (granted, refused) = threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
    space.stop();
    space.unpin(Generation(generation.load(SeqCst)));
    let report = space.report();
    assert_eq!(granted + refused, 16 * 400);
    assert_eq!(
        (report.used, report.pinned, report.reserved_data, report.reserved_nodes),
        (0, 0, 0, 0),
        "{report:?}"
    );
    assert_eq!(report.tickets_waiting, 0);
    let fresh = volume(16 << 20).report();
    assert_eq!(
        (report.free_clusters, report.available_blocks),
        (fresh.free_clusters, fresh.available_blocks)
    );
    report
}
