//! A model of lineages, dead lists and deletions, as `docs/copy-on-write.md` describes them: all
//! histories of a few steps, and random long ones.
//!
//! In every state no block that a living tree reaches is free, none is freed twice, lists and
//! boundaries say what trees contain, and what a crash would leave is whole. From every state
//! everything is worked off, and in most also deleted: then nothing is left that no tree reaches.
//! `CAIRN_SEED` chooses other long histories, `CAIRN_HISTORIES` how many there are.
#[path = "lineages/cleaner.rs"]
mod cleaner;
#[path = "lineages/cut.rs"]
mod cut;
#[path = "lineages/invariants.rs"]
mod invariants;
#[path = "lineages/machine.rs"]
mod machine;
#[path = "lineages/mistakes.rs"]
mod mistakes;
#[path = "lineages/names.rs"]
mod names;
#[path = "lineages/search.rs"]
mod search;
#[path = "lineages/volume.rs"]
mod volume;

use mistakes::ALL;
use search::{Start, search, walk};

/// Starts, and the number of further steps of which all histories are tried.
const SEARCHES: [(Start, usize); 4] =
    [(Start::New, 6), (Start::Snapshots, 4), (Start::Fork, 4), (Start::Headless, 3)];
const LONGEST: usize = 6;
const WALKS: u64 = 3_000;
const WALK_STEPS: usize = 60;

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

#[test]
fn all_short_histories_end_well() {
    for (start, depth) in SEARCHES {
        let seen = search(None, start, depth);
        let seen = seen.unwrap_or_else(|finding| panic!("{start:?}: {finding:?}"));
        println!("{start:?}: {seen:?}");
    }
}

#[test]
fn long_histories_end_well() {
    let (first, walks) = (number("CAIRN_SEED", 1), number("CAIRN_HISTORIES", WALKS));
    for place in 0..walks {
        let seed = first.wrapping_mul(walks).wrapping_add(place);
        walk(None, seed, WALK_STEPS).unwrap_or_else(|finding| panic!("{seed}: {finding:?}"));
    }
}

#[test]
fn the_search_finds_each_mistake() {
    let mut missed = Vec::new();
    for &mistake in ALL {
        let found = (1..=LONGEST).find_map(|depth| {
            let searches = SEARCHES.into_iter().filter(|(_, longest)| depth <= *longest);
            searches.into_iter().find_map(|(start, _)| search(Some(mistake), start, depth).err())
        });
        match found {
            Some(finding) => {
                println!("{mistake:?}: {} steps: {}", finding.steps.len(), finding.what)
            }
            None => missed.push(mistake),
        }
    }
    assert!(missed.is_empty(), "the search misses {missed:?}");
}
