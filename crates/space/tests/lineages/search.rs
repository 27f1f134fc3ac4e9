//! All histories of so many steps, breadth first; and long random ones. From every state
//! everything is worked off, and everything is deleted.
use crate::cut::Request;
use crate::invariants::{check, figures_are_right, living};
use crate::machine::{Machine, Step};
use crate::mistakes::Mistake;
use crate::names::canonical;
use crate::volume::{Outcome, Tree};
use std::collections::HashSet;
use std::hash::{Hash, Hasher};

/// The id of the first subvolume that a new volume gets: a head, its list and a new list have ids.
const FIRST_CLONE: u8 = 3;

/// Steps until everything is worked off, at most.
const END_MAX: usize = 200;

#[derive(Debug)]
pub struct Finding {
    pub steps: Vec<Step>,
    pub what: String,
}

/// What a search has seen.
#[derive(Debug, Default)]
pub struct Seen {
    pub states: usize,
    pub transitions: usize,
}

/// Where histories begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// A new volume.
    New,
    /// Two snapshots, with a change of the head before each and behind.
    Snapshots,
    /// A head, its fork, and a change of both.
    Fork,
    /// A lineage without a head: two snapshots, the second of which is the origin of a clone that
    /// has changed.
    Headless,
}

impl Start {
    fn machine(self, mistake: Option<Mistake>) -> Result<Machine, Finding> {
        let cut = |request| Step::Cut { request, same: false };
        let put = |head| Step::Put { head, file: 0 };
        let steps = match self {
            Start::New => vec![],
            Start::Snapshots => vec![
                cut(Request::Snapshot { head: 0 }),
                put(0),
                cut(Request::Snapshot { head: 0 }),
                put(0),
            ],
            Start::Fork => vec![cut(Request::Fork { head: 0 }), put(0), put(FIRST_CLONE)],
            Start::Headless => vec![
                cut(Request::Snapshot { head: 0 }),
                put(0),
                cut(Request::Fork { head: 0 }),
                put(FIRST_CLONE + 1),
                cut(Request::DeleteHead { head: 0 }),
            ],
        };
        let mut machine = Machine::new(mistake);
        for place in 0..steps.len() {
            let outcome = step(&mut machine, steps[place]);
            outcome.map_err(|what| Finding { steps: steps[..=place].to_vec(), what })?;
        }
        while let Some(next) = machine.background(false).first().copied() {
            let outcome = step(&mut machine, next);
            outcome.map_err(|what| Finding { steps: steps.clone(), what })?;
        }
        canonical(&mut machine);
        Ok(machine)
    }
}

/// Two hashes of a state: 128 bits, so that no two of some million states share them.
#[derive(Default)]
struct Fingerprint(u64, u64);

impl Hasher for Fingerprint {
    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        self.1 = (self.1.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(u64::from(byte));
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_isize(&mut self, number: isize) {
        self.write_u64(number as u64);
    }

    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

fn fingerprint(machine: &Machine) -> (u64, u64) {
    let mut hasher = Fingerprint::default();
    machine.hash(&mut hasher);
    (hasher.0, hasher.1)
}

fn step(machine: &mut Machine, step: Step) -> Outcome {
    machine.apply(step)?;
    check(machine)
}

/// Which deletion comes first when everything goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    Nothing,
    OldestFirst,
    NewestFirst,
    HeadsFirst,
}

pub const ORDERS: [Order; 4] =
    [Order::Nothing, Order::OldestFirst, Order::NewestFirst, Order::HeadsFirst];

fn next_deletion(machine: &Machine, order: Order) -> Option<Request> {
    let mut requests = machine.deletions();
    let deferred = |request: &Request| match *request {
        Request::DeleteSnapshot { subvolume, generation } => {
            machine.running.at(subvolume, generation).is_some_and(|snapshot| snapshot.deferred)
        }
        _ => false,
    };
    match order {
        Order::Nothing => requests
            .retain(|request| deferred(request) || matches!(request, Request::JoinLineages { .. })),
        Order::OldestFirst => {}
        Order::NewestFirst => requests.reverse(),
        Order::HeadsFirst => {
            requests.sort_by_key(|request| !matches!(request, Request::DeleteHead { .. }));
        }
    }
    requests.into_iter().find(|&request| machine.may_cut(request, false))
}

/// Works everything off, and deletes everything if an order is given: exactly what living trees
/// reach may be left.
fn ends_well(mut machine: Machine, order: Order) -> Outcome {
    for _ in 0..END_MAX {
        let next = machine.background(false).first().copied();
        let next =
            next.or_else(|| next_deletion(&machine, order).map(|request| machine.cut(request)));
        let Some(next) = next else { break };
        step(&mut machine, next)
            .map_err(|what| format!("{next:?} at the end, {order:?}: {what}"))?;
        if machine.running.generation > 200 || machine.running.next_block > 200 {
            canonical(&mut machine);
        }
    }
    step(&mut machine, Step::Cut { request: Request::Nothing, same: false })?;
    step(&mut machine, Step::Durable)?;
    let volume = &machine.running;
    let mut reached: Vec<u8> =
        living(volume).flat_map(Tree::references).map(|reference| reference.block).collect();
    reached.sort_unstable();
    reached.dedup();
    let mut left = volume.referenced.clone();
    left.sort_unstable();
    if left != reached || !volume.pinned.is_empty() {
        return Err(format!("{order:?}: {reached:?} can be reached, {left:?} are left"));
    }
    if order != Order::Nothing && !(left.is_empty() && volume.subvolumes.is_empty()) {
        return Err(format!("{order:?}: {left:?} and {:?} are left", volume.subvolumes));
    }
    Ok(())
}

struct Found {
    machine: Machine,
    /// Place of the state before it, and the step from there.
    history: u32,
}

/// All histories of up to `depth` steps behind those of a start.
pub fn search(mistake: Option<Mistake>, start: Start, depth: usize) -> Result<Seen, Finding> {
    let start = start.machine(mistake)?;
    let mut known = HashSet::from([fingerprint(&start)]);
    let mut steps: Vec<(u32, Step)> = vec![(0, Step::Crash)];
    let mut level = vec![Found { machine: start, history: 0 }];
    let mut seen = Seen { states: 1, transitions: 0 };
    for left in (0..depth).rev() {
        let mut next_level = Vec::new();
        for Found { machine, history } in level {
            for step_taken in machine.steps() {
                let mut next = machine.clone();
                let outcome = step(&mut next, step_taken);
                let outcome = outcome.and_then(|()| figures_are_right(&next.running));
                canonical(&mut next);
                seen.transitions += 1;
                let fingerprint = fingerprint(&next);
                if outcome.is_ok() && !known.insert(fingerprint) {
                    continue;
                }
                seen.states += 1;
                let order = ORDERS[(fingerprint.1 >> 62) as usize];
                let outcome = outcome.and_then(|()| ends_well(next.clone(), order));
                steps.push((history, step_taken));
                let history = u32::try_from(steps.len() - 1).expect("few states");
                if let Err(what) = outcome {
                    return Err(Finding { steps: path(&steps, history), what });
                }
                if left > 0 {
                    next_level.push(Found { machine: next, history });
                }
            }
        }
        level = next_level;
    }
    Ok(seen)
}

fn path(steps: &[(u32, Step)], mut place: u32) -> Vec<Step> {
    let mut path = Vec::new();
    while place != 0 {
        let (before, step) = steps[place as usize];
        path.push(step);
        place = before;
    }
    path.reverse();
    path
}

/// A random history; the same for the same seed.
pub fn walk(mistake: Option<Mistake>, seed: u64, length: usize) -> Result<(), Finding> {
    let mut random = seed;
    let mut machine = Machine::new(mistake);
    let mut taken = Vec::new();
    for _ in 0..length {
        let steps = machine.steps();
        random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let next = steps[((mixed >> 32) as usize) % steps.len()];
        let ends_head = matches!(next, Step::Cut { request: Request::DeleteHead { .. }, .. });
        if ends_head && mixed & 7 != 0 {
            continue; // Otherwise most histories end early, without a head.
        }
        taken.push(next);
        let outcome = step(&mut machine, next);
        if let Err(what) = outcome.and_then(|()| figures_are_right(&machine.running)) {
            return Err(Finding { steps: taken, what });
        }
        canonical(&mut machine);
    }
    for order in ORDERS {
        if let Err(what) = ends_well(machine.clone(), order) {
            return Err(Finding { steps: taken, what });
        }
    }
    Ok(())
}
