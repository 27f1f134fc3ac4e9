//! Threads make, change, move and remove the same few subvolumes, snapshots and forks: nothing
//! fails but what must be refused, no snapshot changes, and fsck finds nothing.
//!
//! `CAIRN_SHARED_ROUNDS` (default 60) sets the number of rounds on each of the volumes.
use cairn_engine::VolumeOptions;
use cairn_environment::random::Seeded;
use cairn_torture::shared_names::Count;
use cairn_torture::shared_subvolumes::rounds;
use cairn_torture::watchdog::Watchdog;
use cairn_torture::{number_from_environment, seed_from_environment};
use std::time::Duration;

const VOLUMES: u64 = 16;

#[test]
fn clients_of_the_same_subvolumes_are_refused_or_served() {
    let mut random = Seeded::new(seed_from_environment());
    let on_each = number_from_environment("CAIRN_SHARED_ROUNDS").unwrap_or(60);
    let _watchdog = Watchdog::new("shared subvolumes".into(), Duration::from_secs(240 + on_each));
    let mut sum = Count::default();
    for volume in 0..VOLUMES {
        let options = VolumeOptions {
            commit_interval: Duration::from_millis(1 + random.below(5)),
            ..VolumeOptions::default()
        };
        let count = rounds(on_each, options, &mut random)
            .unwrap_or_else(|problem| panic!("volume {volume}: {problem}"));
        sum.done += count.done;
        sum.refused += count.refused;
    }
    println!("{} calls did what they were to do, {} were refused", sum.done, sum.refused);
    assert!(sum.done > on_each * VOLUMES && sum.refused > on_each * VOLUMES, "{sum:?}");
}
