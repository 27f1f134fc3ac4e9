//! A power failure at every point behind a fault.
//!
//! A failed request ends nothing: the engine goes on, or stops, and until then other requests
//! follow. The power fails between every two of them, from the failed one to the last.
//!
//! Writes without a future are those that failed themselves, or that a failed flush should have
//! covered: no later flush covers them ([`WriteInfo::is_abandoned`]). The device may have dropped
//! them and kept everything later, as Linux does with pages that it marks clean; it may have kept
//! them and lost everything later; and what a failed write left may be torn. So at each point the
//! states are these: nothing unflushed survived; everything did; everything but the writes without
//! a future; only those; everything, with one of those torn; and a random set.
use crate::oracle::Oracle;
use crate::search::{Finding, Search, SearchOptions, SearchReport};
use crate::sequence::Recording;
use crate::survivors::describe;
use cairn_blockdev::SimulatedDevice;
use cairn_blockdev::simulated::{Fate, SectorSet, WriteInfo, random_fates};
use cairn_environment::random::Seeded;
use std::sync::Arc;

/// One image in this many is recovered for writing as well.
const RECOVER_ONE_OF: u64 = 32;

/// Judges a power failure at every point of a recording after its first `failed_at` events.
///
/// # Errors
/// The first state that is not permitted.
pub(crate) fn search_behind(
    recording: &Recording,
    failed_at: usize,
    seed: u64,
) -> Result<SearchReport, Finding> {
    let options = SearchOptions { recover_one_of: RECOVER_ONE_OF, ..SearchOptions::default() };
    let oracle = Oracle::new(std::slice::from_ref(&recording.history));
    let mut search = Search::new(oracle, &options, seed);
    let mut explorer = recording.device.explorer();
    explorer.advance_to(failed_at);
    let mut random = Seeded::new(seed);
    loop {
        let unflushed = explorer.unflushed();
        search.states(&explorer, &unflushed, &sets(&unflushed, &mut random))?;
        if !explorer.advance() {
            return Ok(search.report());
        }
    }
}

/// Calls `visit` with every state to be tried that a power failure may leave at every point of what
/// `device` has recorded after its first `failed_at` events: with the number of events before it, a
/// fingerprint, and the state. Returns how many there are.
///
/// # Errors
/// The first of `visit`, with what survived.
pub fn every_state_behind(
    device: &SimulatedDevice,
    failed_at: usize,
    seed: u64,
    visit: &mut dyn FnMut(usize, u64, Arc<SimulatedDevice>) -> Result<(), String>,
) -> Result<u64, String> {
    let mut explorer = device.explorer();
    explorer.advance_to(failed_at);
    let (mut random, mut states) = (Seeded::new(seed), 0);
    loop {
        let (position, unflushed) = (explorer.position(), explorer.unflushed());
        for fates in sets(&unflushed, &mut random) {
            let state = explorer.state_with(|_| fates.clone());
            states += 1;
            visit(position, explorer.fingerprint(&state), Arc::new(state)).map_err(|error| {
                format!("after {position} events;{}\n{error}", describe(&unflushed, &fates))
            })?;
        }
        if !explorer.advance() {
            return Ok(states);
        }
    }
}

/// The fates of the unflushed writes in each state to be tried, none twice in a row.
fn sets(unflushed: &[WriteInfo], random: &mut Seeded) -> Vec<Vec<Fate>> {
    let of = |survives: &dyn Fn(&WriteInfo) -> bool| -> Vec<Fate> {
        let fate = |write| if survives(write) { Fate::Written } else { Fate::Lost };
        unflushed.iter().map(fate).collect()
    };
    let mut sets = vec![of(&|_| false)];
    if unflushed.is_empty() {
        return sets;
    }
    sets.push(of(&|_| true));
    let abandoned: Vec<usize> =
        (0..unflushed.len()).filter(|index| unflushed[*index].is_abandoned).collect();
    if !abandoned.is_empty() && abandoned.len() < unflushed.len() {
        sets.push(of(&|write| !write.is_abandoned));
        sets.push(of(&|write| write.is_abandoned));
    }
    if !abandoned.is_empty() {
        let index = abandoned[random.below(abandoned.len() as u64) as usize];
        let mut torn = of(&|_| true);
        torn[index] = Fate::Torn(some_sectors(unflushed[index].sectors(), random));
        sets.push(torn);
    }
    sets.push(random_fates(unflushed, random));
    sets
}

/// The front, the back, or any of the sectors of a write.
fn some_sectors(sectors: u64, random: &mut Seeded) -> SectorSet {
    let cut = 1 + random.below(sectors.max(2) - 1);
    match random.below(3) {
        0 => (0..cut).collect(),
        1 => (cut..sectors).collect(),
        _ => (0..sectors).filter(|_| random.chance(1, 2)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_blockdev::{BlockDevice, Operation};

    #[test]
    fn dropped_and_later_writes_part_company() {
        let device = SimulatedDevice::new(1 << 20);
        let write = |block: u64| device.write(block << 12, &[&[1; 4096]]);
        write(0).expect("it is healthy");
        device.fail_next(Operation::Flush, 1);
        device.flush().expect_err("it was told to fail");
        write(1).expect("it is healthy");
        let unflushed = device.unflushed();
        let sets = sets(&unflushed, &mut Seeded::new(1));
        let (lost, written) = (Fate::Lost, Fate::Written);
        for wanted in [[&lost, &lost], [&written, &written], [&lost, &written], [&written, &lost]] {
            assert!(sets.iter().any(|set| set.iter().eq(wanted)), "{wanted:?} of {sets:?}");
        }
        assert!(
            sets.iter().any(|set| matches!(set[..], [Fate::Torn(_), Fate::Written])),
            "{sets:?}"
        );
        // The later one has a future: after a flush only the dropped one is in doubt.
        device.flush().expect("it fails once");
        let unflushed = device.unflushed();
        assert_eq!(unflushed.len(), 1);
        assert!(unflushed[0].is_abandoned);
    }
}
