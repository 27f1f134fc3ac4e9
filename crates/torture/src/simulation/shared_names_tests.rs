//! Clients of the same few names, in simulations.
use crate::shared_names::rounds;
use cairn_engine::VolumeOptions;
use cairn_environment::random::Seeded;
use cairn_environment::simulation::{self, Settings, schedules};
use std::time::Duration;

const ROUNDS: u64 = 12;
const STEPS_MAX: usize = 5_000_000;

#[test]
fn an_order_explains_what_clients_of_the_same_names_are_told() {
    let first = crate::number_from_environment("CAIRN_SEED").unwrap_or(1);
    for seed in first..first + schedules(60) as u64 {
        let quiet_max = Duration::from_secs(3600);
        let settings = Settings { seed, steps_max: STEPS_MAX, quiet_max };
        let options = VolumeOptions {
            background: false,
            node_cache_bytes: 8 << 20,
            data_cache_bytes: 0,
            ..VolumeOptions::default()
        };
        let result =
            simulation::run(&settings, move || rounds(ROUNDS, options, &mut Seeded::new(seed)));
        match result.outcome {
            Ok(Ok(count)) => assert!(count.done > 0 && count.refused > 0, "{count:?}"),
            Ok(Err(problem)) | Err(problem) => panic!("CAIRN_SEED={seed}: {problem}"),
        }
    }
}
