//! Threads make, link, move, exchange, remove and look up the same few names: some order of all
//! calls explains what each was told and what is there in the end, and fsck finds nothing.
//!
//! `CAIRN_SHARED_ROUNDS` (default 150) sets the number of rounds on each of the volumes.
use cairn_engine::VolumeOptions;
use cairn_environment::random::Seeded;
use cairn_torture::shared_names::{Count, rounds};
use cairn_torture::watchdog::Watchdog;
use cairn_torture::{number_from_environment, seed_from_environment};
use std::time::Duration;

const VOLUMES: u64 = 16;

#[test]
fn an_order_explains_what_clients_of_the_same_names_are_told() {
    let mut random = Seeded::new(seed_from_environment());
    let on_each = number_from_environment("CAIRN_SHARED_ROUNDS").unwrap_or(150);
    let _watchdog = Watchdog::new("shared names".into(), Duration::from_secs(240 + on_each));
    let mut sum = Count::default();
    for volume in 0..VOLUMES {
        let options = VolumeOptions {
            background: random.chance(1, 2),
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
