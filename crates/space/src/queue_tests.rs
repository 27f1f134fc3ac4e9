//! The queue of requests against a naive model: random requests of every urgency come, give space
//! back and are called off. After each step exactly those have their space that the order of the
//! queue says, and all others wait.
//!
//! The model takes from the product only how much an urgency may use (`Budget`, which
//! `model_tests.rs` checks). Reclaim stands still, so no ticket fails.
use crate::budget::Budget;
use crate::ticket_tests::{Gate, data, fill, started, until, volume};
use crate::{Caller, Request, Reservation, Space, SpaceError, Urgency, on_behalf_of};
use cairn_environment::random::Seeded;
use cairn_environment::thread::{self, JoinHandle};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

const RUNS: u64 = 30;
const STEPS: u64 = 60;
const CALLERS: usize = 64;

/// Whether the caller with this number is gone.
static GONE: [AtomicBool; CALLERS] = [const { AtomicBool::new(false) }; CALLERS];

fn is_gone(thread: u32) -> bool {
    GONE[thread as usize].load(SeqCst)
}

/// By the order in which they are served.
fn rank(urgency: Urgency) -> u64 {
    match urgency {
        Urgency::Commit | Urgency::Removal => 0,
        Urgency::Writeback => 1,
        Urgency::Name | Urgency::RemovalKept => 2,
        Urgency::Ordinary => 3,
    }
}

struct Waiter {
    number: usize,
    request: Request,
    urgency: Urgency,
    thread: JoinHandle<Result<Reservation, SpaceError>>,
}

struct Model {
    space: Arc<Space>,
    budget: Budget,
    /// By the order of their arrival.
    waiting: Vec<Waiter>,
    held: Vec<Reservation>,
    granted: u64,
    called_off: u64,
    /// Newcomers that would have fitted, and had to wait.
    kept_back: u64,
}

impl Model {
    fn fits(&self, request: Request, urgency: Urgency) -> bool {
        self.budget.shortage_blocks(request, urgency) == 0
    }

    /// The place in `waiting` of the one that is served next.
    fn first(&self) -> Option<usize> {
        (0..self.waiting.len()).min_by_key(|&place| (rank(self.waiting[place].urgency), place))
    }

    /// Whether a newcomer gets its space at once.
    fn serves_at_once(&mut self, request: Request, urgency: Urgency) -> bool {
        let is_behind = urgency != Urgency::Commit
            && self.waiting.iter().any(|waiter| rank(waiter.urgency) <= rank(urgency));
        let fits = self.fits(request, urgency);
        self.kept_back += u64::from(fits && is_behind);
        fits && !is_behind
    }

    /// Serves those that are next as long as they fit, and expects just that of the product.
    fn settle(&mut self, what: &str) {
        let mut served = Vec::new();
        while let Some(place) = self.first() {
            let Waiter { request, urgency, .. } = self.waiting[place];
            if !self.fits(request, urgency) {
                break;
            }
            self.budget.grant(request);
            self.granted += 1;
            served.push(self.waiting.remove(place));
        }
        let report = self.space.report();
        assert_eq!(
            (report.tickets_waiting, report.tickets_granted, report.tickets_failed),
            (self.waiting.len() as u64, self.granted, 0),
            "{what}: waiting, granted, failed"
        );
        for waiter in served {
            let reservation = waiter.thread.join().unwrap();
            let reservation = reservation.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(reservation.data_blocks(), waiter.request.data_blocks, "{what}");
            self.held.push(reservation);
        }
        assert!(self.waiting.iter().all(|waiter| !waiter.thread.is_finished()), "{what}");
        let reserved = self.held.iter().map(|held| (held.data_blocks(), held.nodes()));
        let reserved = reserved.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        assert_eq!((report.reserved_data, report.reserved_nodes), reserved, "{what}");
    }

    /// A request of one who does not wait.
    fn try_one(&mut self, request: Request, urgency: Urgency, what: &str) {
        let expected = self.serves_at_once(request, urgency);
        let reserved = self.space.try_reserve(request, urgency);
        assert_eq!(reserved.is_ok(), expected, "{what}: at once");
        if let Ok(reservation) = reserved {
            self.budget.grant(request);
            self.held.push(reservation);
        }
    }

    /// A request of one who waits for it if it has to. Names are ordinary requests first.
    fn wait_for_one(&mut self, number: usize, request: Request, urgency: Urgency, what: &str) {
        let mut queued_as = urgency;
        let at_once = if urgency == Urgency::Name {
            self.serves_at_once(request, Urgency::Ordinary) || {
                let shortage = self.budget.shortage_blocks(request, Urgency::Ordinary);
                let is_hopeless = shortage > self.budget.delayed_blocks();
                if !is_hopeless {
                    queued_as = Urgency::Ordinary;
                }
                is_hopeless && self.serves_at_once(request, urgency)
            }
        } else {
            self.serves_at_once(request, urgency)
        };
        let before = self.space.report().tickets_waiting;
        let (space, caller) = (Arc::clone(&self.space), number as u32);
        let caller = Caller { request: number as u64 + 1, thread: caller, is_gone };
        let thread = thread::spawn("waiter", move || {
            on_behalf_of(caller, || space.reserve(request, urgency))
        });
        until(|| thread.is_finished() || self.space.report().tickets_waiting > before);
        let waits = self.space.report().tickets_waiting > before;
        if waits {
            assert!(!at_once, "{what}: it waits");
            self.waiting.push(Waiter { number, request, urgency: queued_as, thread });
            return;
        }
        match thread.join().unwrap() {
            Ok(reservation) => {
                assert!(at_once, "{what}: it overtook those that wait, or had no room");
                self.budget.grant(request);
                self.held.push(reservation);
            }
            Err(error) => {
                let may_wait =
                    urgency != Urgency::Commit && self.budget.is_possible(request, queued_as);
                assert!(!at_once && !may_wait, "{what}: {error}");
            }
        }
    }

    fn give_back(&mut self, random: &mut Seeded) {
        if self.held.is_empty() {
            return;
        }
        let held = &self.held[random.below(self.held.len() as u64) as usize];
        let blocks = random.below(held.data_blocks() + 1);
        let nodes = random.below(held.nodes() + 1);
        held.give_back(blocks, nodes);
        self.budget.give_back(blocks, nodes);
    }

    /// Only ordinary requests can be called off.
    fn call_off(&mut self, random: &mut Seeded, what: &str) {
        if self.waiting.is_empty() {
            return;
        }
        let place = random.below(self.waiting.len() as u64) as usize;
        let Waiter { number, urgency, .. } = self.waiting[place];
        GONE[number].store(true, SeqCst);
        let called_off = self.space.call_off(number as u64 + 1);
        GONE[number].store(false, SeqCst);
        assert_eq!(called_off, urgency == Urgency::Ordinary, "{what}: called off");
        if called_off {
            let ended = self.waiting.remove(place).thread.join().unwrap();
            assert!(matches!(ended, Err(SpaceError::CalledOff)), "{what}: {ended:?}");
            self.called_off += 1;
        }
    }
}

/// Small ones mostly, as they come beside a large one that waits.
fn random_request(random: &mut Seeded, room_blocks: u64) -> (Request, Urgency) {
    let most = [4, 40, room_blocks / 4, room_blocks][random.below(4) as usize];
    let request = Request { nodes: random.below(3), ..data(1 + random.below(most.max(1))) };
    let urgency = match random.below(10) {
        0 => Urgency::Removal,
        1 | 2 => Urgency::Writeback,
        3 | 4 => Urgency::Name,
        5 if random.chance(1, 2) => Urgency::Commit,
        _ => Urgency::Ordinary,
    };
    (request, urgency)
}

fn run(seed: u64) -> (u64, u64, u64) {
    let mut random = Seeded::new(seed);
    let space = volume(16 << 20);
    let gate = Gate::closed();
    started(&space, &gate);
    let room_blocks = space.report().available_blocks;
    let held = vec![fill(&space, random.below(200))];
    let budget = space.ledger.lock().budget;
    let mut model =
        Model { space, budget, waiting: Vec::new(), held, granted: 0, called_off: 0, kept_back: 0 };
    for step in 0..STEPS {
        let (request, urgency) = random_request(&mut random, room_blocks);
        let what = format!("seed {seed}, step {step}, {request:?}, {urgency:?}");
        match random.below(8) {
            0 | 1 => model.try_one(request, urgency, &what),
            // The numbers of those that wait differ.
            2..=4 => model.wait_for_one(step as usize, request, urgency, &what),
            5 | 6 => model.give_back(&mut random),
            _ => model.call_off(&mut random, &what),
        }
        model.settle(&what);
    }
    // What is left is served as soon as everything is given back.
    while let Some(reservation) = model.held.pop() {
        model.budget.give_back(reservation.data_blocks(), reservation.nodes());
        drop(reservation);
        model.settle(&format!("seed {seed}, at the end"));
    }
    assert!(model.waiting.is_empty(), "seed {seed}: a request waits for ever");
    gate.set_open(true);
    model.space.stop();
    (model.granted, model.called_off, model.kept_back)
}

#[test]
fn the_queue_is_served_as_promised() {
    let seed = std::env::var("CAIRN_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut all = (0, 0, 0);
    for seed in (0..RUNS).map(|run| run.wrapping_add(RUNS.wrapping_mul(seed))) {
        let (granted, called_off, kept_back) = run(seed);
        all = (all.0 + granted, all.1 + called_off, all.2 + kept_back);
    }
    eprintln!("granted, called off, kept back although they would fit: {all:?}");
    assert!(all.0 > 100 && all.1 > 20 && all.2 > 100, "{all:?}");
}
