//! Runs of blocks that snapshots have.
use cairn_format::{BlockRange, DeadRun, Generation, TreeId};
use std::collections::BTreeMap;

/// Blocks that snapshots of a subvolume have.
#[derive(Clone, Copy)]
pub(super) struct HeldRun {
    pub(super) end: u64,
    pub(super) birth: Generation,
    pub(super) is_node: bool,
    pub(super) subvolume: TreeId,
    /// The newest snapshot that has them.
    pub(super) last: Generation,
}

/// By first block; they don't overlap.
pub(super) type HeldRuns = BTreeMap<u64, HeldRun>;

/// Those that have one of the blocks, with their first blocks.
pub(super) fn overlapping(
    runs: &HeldRuns,
    start: u64,
    end: u64,
) -> impl Iterator<Item = (u64, HeldRun)> {
    let before = runs.range(..start).next_back().filter(move |(_, run)| run.end > start);
    before.into_iter().chain(runs.range(start..end)).map(|(start, run)| (*start, *run))
}

/// Adds what of a run is not there. Where it is there with another birth, the older one counts.
pub(super) fn add(runs: &mut HeldRuns, subvolume: TreeId, last: Generation, run: &DeadRun) {
    let (start, end) = (run.range.start.0, run.range.end().0);
    let known: Vec<(u64, HeldRun)> = overlapping(runs, start, end).collect();
    let whole = known.is_empty();
    let new =
        |end| HeldRun { end, birth: run.birth, is_node: run.is_node && whole, subvolume, last };
    let mut at = start;
    for (first, other) in known {
        if at < first {
            runs.insert(at, new(first));
        }
        at = other.end;
        if other.subvolume == subvolume && other.birth > run.birth {
            runs.insert(first, HeldRun { birth: run.birth, ..other });
        }
    }
    if at < end {
        runs.insert(at, new(end));
    }
}

/// Takes these blocks out. Returns the runs that had some.
pub(super) fn take(runs: &mut HeldRuns, range: BlockRange) -> Vec<HeldRun> {
    let (start, end) = (range.start.0, range.end().0);
    let known: Vec<(u64, HeldRun)> = overlapping(runs, start, end).collect();
    for &(first, run) in &known {
        runs.remove(&first);
        if first < start {
            runs.insert(first, HeldRun { end: start, is_node: false, ..run });
        }
        if run.end > end {
            runs.insert(end, HeldRun { is_node: false, ..run });
        }
    }
    known.into_iter().map(|(_, run)| run).collect()
}
