//! Takes operations away from a failing case as long as it still fails.
//!
//! Without an operation the others meet in another way, so a smaller case is tried with several
//! schedules. First whole clients go, then ever smaller parts of what is left (delta debugging:
//! Zeller, Hildebrandt, 2002).
use super::scene::{Case, Scene};
use super::{Failed, Options};
use cairn_environment::random::Seeded;

/// Schedules to try for each smaller case.
const SCHEDULES: u64 = 6;

/// One operation: its client, and its number in the script.
type Place = (usize, usize);

struct Shrinker<'a> {
    runs_left: u64,
    run: &'a dyn Fn(&Case) -> Result<(), String>,
    best: Case,
    error: String,
}

fn kept(places: &[Place]) -> Vec<Vec<usize>> {
    let clients = places.iter().map(|(client, _)| client + 1).max().unwrap_or(0);
    let mut kept = vec![Vec::new(); clients];
    for (client, index) in places {
        kept[*client].push(*index);
    }
    kept
}

impl Shrinker<'_> {
    /// Whether the run fails with these operations alone, with any schedule; if so, it is the best
    /// so far.
    fn fails(&mut self, places: &[Place]) -> bool {
        let mut random = Seeded::new(self.best.schedule);
        for attempt in 0..SCHEDULES {
            if self.runs_left == 0 {
                return false;
            }
            self.runs_left -= 1;
            let schedule = if attempt == 0 { self.best.schedule } else { random.next_u64() };
            let case = Case { schedule, kept: Some(kept(places)), ..self.best };
            if let Err(error) = (self.run)(&case) {
                self.best = case;
                self.error = error;
                return true;
            }
        }
        false
    }

    /// Takes parts away, half of all at first, single ones at last. `part_of` says which belong
    /// together.
    fn reduce(&mut self, mut places: Vec<Place>, part_of: impl Fn(&Place) -> Place) -> Vec<Place> {
        let mut parts = 2;
        loop {
            let mut groups: Vec<Place> = places.iter().map(&part_of).collect();
            groups.dedup();
            let size = groups.len().div_ceil(parts).max(1);
            let mut smaller = None;
            for gone in groups.chunks(size) {
                let left: Vec<Place> = places
                    .iter()
                    .copied()
                    .filter(|place| !gone.contains(&part_of(place)))
                    .collect();
                if left.len() < places.len() && self.fails(&left) {
                    smaller = Some(left);
                    break;
                }
            }
            match smaller {
                Some(left) => {
                    places = left;
                    parts = (parts - 1).max(2);
                }
                None if size == 1 || self.runs_left == 0 => return places,
                None => parts *= 2,
            }
        }
    }
}

fn listing(case: &Case) -> String {
    let scene = case.scene();
    let mut lines = vec![format!(
        "ending {:?}, commits every {:?}",
        scene.ending, scene.options.commit_interval
    )];
    for (client, script) in scene.scripts.iter().enumerate() {
        lines.extend(script.iter().map(|operation| format!("client {client}: {operation:?}")));
    }
    lines.join("\n")
}

/// The smallest case that can be found, within the runs that the options allow.
pub(super) fn shrink(
    found: Case,
    error: String,
    options: &Options,
    run: &dyn Fn(&Case) -> Result<(), String>,
) -> Failed {
    let all: Vec<Place> = match &found.kept {
        Some(kept) => kept
            .iter()
            .enumerate()
            .flat_map(|(client, indices)| indices.iter().map(move |index| (client, *index)))
            .collect(),
        None => {
            let scripts = Scene::of_seed(found.seed).scripts;
            scripts
                .iter()
                .enumerate()
                .flat_map(|(client, script)| (0..script.len()).map(move |index| (client, index)))
                .collect()
        }
    };
    let mut shrinker =
        Shrinker { runs_left: options.shrink_runs, run, best: found.clone(), error: error.clone() };
    let left = shrinker.reduce(all, |(client, _)| (*client, 0));
    shrinker.reduce(left, |place| *place);
    let Shrinker { best, error: shrunk_error, .. } = shrinker;
    Failed { found, error, operations: listing(&best), shrunk: best, shrunk_error }
}
