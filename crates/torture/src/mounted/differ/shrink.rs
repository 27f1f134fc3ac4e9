//! Leaves out calls of a finding as long as it still shows: the same kind of call with the same
//! difference, up to numbers.
use super::call::Step;
use super::choose::Scene;
use super::client::{Difference, repeat};
use super::judge::{Pair, Rules};
use cairn_environment::{clock, thread};
use std::path::PathBuf;
use std::time::Duration;

const TIME_MAX: Duration = Duration::from_secs(30);

/// Repeats `found` in folders that `new_folders` makes, with fewer and fewer calls; the shortest
/// list that shows a difference. `None` if it does not show again.
pub fn shrink(
    found: &Difference,
    scene: Scene,
    rules: Rules,
    mut new_folders: impl FnMut() -> Option<Pair<PathBuf>>,
) -> Option<Difference> {
    let begin = clock::now_monotonic();
    let mut attempt = |steps: &[Step]| -> Option<Difference> {
        let (folders, steps) = (new_folders()?, steps.to_vec());
        let again = thread::spawn("client", move || repeat(&folders, scene, &steps, &rules));
        again.join().ok()?.filter(|again| again.is_like(found))
    };
    let mut shortest = attempt(&found.steps)?;
    let mut length = shortest.steps.len() / 2;
    while length > 0 {
        let mut from = 0;
        while from < shortest.steps.len() && begin.elapsed() < TIME_MAX {
            let end = (from + length).min(shortest.steps.len());
            let rest = [&shortest.steps[..from], &shortest.steps[end..]].concat();
            match attempt(&rest) {
                Some(shorter) => shortest = shorter,
                None => from += length,
            }
        }
        length /= 2;
    }
    Some(shortest)
}
