//! The simulation itself: repeatable, finds what is wrong, and says it briefly.
use super::run::{run, run_on};
use super::shrink::shrink;
use super::{Case, Options, Scene, simulate};
use cairn_blockdev::{BlockDevice, DeviceError, SimulatedDevice, forward_to_device};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

#[test]
fn a_case_prints_as_it_is_read() {
    let case =
        Case { seed: 7, schedule: 12, kept: Some(vec![vec![], vec![0, 1, 2, 5], vec![], vec![9]]) };
    assert_eq!(case.to_string(), "7/12/1:0-2,5;3:9");
    assert_eq!(case.to_string().parse(), Ok(case));
    assert_eq!(Case::of_seed(99).to_string(), "99");
    assert_eq!("99".parse(), Ok(Case::of_seed(99)));
    for wrong in ["", "x", "1/", "1/2/3", "1/2/3:x", "1/2/3:4/5", "1/2/999:1"] {
        assert!(wrong.parse::<Case>().is_err(), "{wrong}");
    }
}

#[test]
fn a_seed_repeats_a_run_exactly() {
    for seed in 0..4 {
        let (first, second) = (run(&Case::of_seed(seed), 2), run(&Case::of_seed(seed), 2));
        assert_eq!(first.result, Ok(()));
        let key = |outcome: &super::Outcome| {
            (outcome.steps, outcome.simulated, outcome.fingerprint, outcome.operations)
        };
        assert_eq!(key(&first), key(&second), "seed {seed}");
    }
}

#[test]
fn runs_of_many_seeds_are_right() {
    let seconds = crate::number_from_environment("CAIRN_SIMULATION_SECONDS").unwrap_or(20);
    let seed = crate::number_from_environment("CAIRN_SEED")
        .unwrap_or_else(|| RandomState::new().build_hasher().finish());
    eprintln!("CAIRN_SEED={seed}");
    let options = Options { seed, seconds, ..Options::default() };
    match simulate(&options, &|_| {}) {
        Ok(report) => eprintln!("{report}"),
        Err(failed) => panic!("{failed}"),
    }
}

#[test]
fn some_devices_need_seconds_now_and_then_and_others_never_do() {
    let (mut with, mut without) = (0, 0);
    for seed in 0..24 {
        let outcome = run(&Case::of_seed(seed), 0);
        assert_eq!(outcome.result, Ok(()), "seed {seed}");
        match Scene::of_seed(seed).spike_ms_max {
            0 => without += outcome.spikes,
            _ => with += outcome.spikes,
        }
    }
    assert!(with > 0 && without == 0, "{with} and {without} requests took seconds");
}

/// A device that says that it has flushed, and hasn't.
struct Forgetful(Arc<SimulatedDevice>);

impl BlockDevice for Forgetful {
    fn flush(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    forward_to_device!(self => self.0; read, write, discard, length_bytes, flush_time);
}

#[test]
fn a_device_that_forgets_to_flush_is_found_and_the_case_is_small() {
    let forgetful = |case: &Case| {
        run_on(case, 6, |device| Arc::new(Forgetful(device)) as Arc<dyn BlockDevice>).result
    };
    let (case, error) = (0..20)
        .map(Case::of_seed)
        .find_map(|case| forgetful(&case).err().map(|error| (case, error)))
        .expect("what was acknowledged must be missing in some state");
    let options = Options { shrink_runs: 150, ..Options::default() };
    let failed = shrink(case, error, &options, &forgetful);
    let operations = |case: &Case| case.scene().scripts.iter().map(Vec::len).sum::<usize>();
    assert!(operations(&failed.shrunk) * 5 <= operations(&failed.found), "{failed}");
    assert_eq!(
        forgetful(&failed.shrunk),
        Err(failed.shrunk_error.clone()),
        "it repeats as it was printed"
    );
    let printed = failed.shrunk.to_string().parse::<Case>().expect("it prints as it is read");
    assert_eq!(forgetful(&printed), Err(failed.shrunk_error), "also from what was printed");
}
