//! All histories of so many steps, breadth first; and long random ones. From every state
//! everything is worked off, and everything is deleted.
use crate::cut::Request;
use crate::invariants::{check, living};
use crate::machine::{Machine, Step};
use crate::mistakes::Mistake;
use crate::names::canonical;
use crate::volume::{Outcome, Tree};
use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

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

/// Two hashes of a state: 128 bits, so that no two of some million states share them.
fn fingerprint(machine: &Machine) -> (u64, u64) {
    let mut first = DefaultHasher::new();
    machine.hash(&mut first);
    let mut second = DefaultHasher::new();
    (machine, 1u8).hash(&mut second);
    (first.finish(), second.finish())
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
        Order::Nothing => requests.retain(deferred),
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

/// All histories of up to `depth` steps.
pub fn search(mistake: Option<Mistake>, depth: usize) -> Result<Seen, Finding> {
    let mut start = Machine::new(mistake);
    canonical(&mut start);
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
                canonical(&mut next);
                seen.transitions += 1;
                let fingerprint = fingerprint(&next);
                if outcome.is_ok() && !known.insert(fingerprint) {
                    continue;
                }
                seen.states += 1;
                let order = ORDERS[(fingerprint.0 % 4) as usize];
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
        taken.push(next);
        if let Err(what) = step(&mut machine, next) {
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
