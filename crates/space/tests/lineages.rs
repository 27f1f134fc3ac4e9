//! A model of lineages, dead lists and deletions, as `docs/copy-on-write.md` describes them: all
//! histories of a few steps, and random long ones. The product has none of this yet.
//!
//! In every state no block that a living tree reaches is free, none is freed twice, lists and
//! boundaries say what trees contain, and what a crash would leave is whole. From every state
//! everything is worked off, and in most also deleted: then nothing is left that no tree reaches.
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

use search::{search, walk};

const DEPTH: usize = 4;
const WALKS: u64 = 3_000;
const WALK_STEPS: usize = 60;

fn seed() -> u64 {
    std::env::var("CAIRN_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

#[test]
fn all_short_histories_end_well() {
    let depth = std::env::var("CAIRN_DEPTH").ok().and_then(|d| d.parse().ok()).unwrap_or(DEPTH);
    let seen = search(None, depth).unwrap_or_else(|finding| panic!("{finding:?}"));
    println!("{seen:?}");
}

#[test]
fn long_histories_end_well() {
    for number in 0..WALKS {
        let seed = seed().wrapping_mul(WALKS) + number;
        walk(None, seed, WALK_STEPS).unwrap_or_else(|finding| panic!("seed {seed}: {finding:?}"));
    }
}

#[test]
fn the_search_finds_each_mistake() {
    for mistake in mistakes::ALL {
        let found = (1..=DEPTH + 1).find_map(|depth| search(Some(mistake), depth).err());
        match found {
            Some(f) => println!("{mistake:?}: {} steps: {}", f.steps.len(), f.what),
            None => {
                let walked = (0..20 * WALKS)
                    .find_map(|seed| walk(Some(mistake), seed, 14).err().map(|f| (seed, f)));
                println!("NOT FOUND {mistake:?} {walked:?}")
            }
        }
    }
}
