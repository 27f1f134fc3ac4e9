//! Crash states of random work; see [`cairn_torture::crash`].
//!
//! `CAIRN_CRASH_STATES` says how many (1,000 by default), `CAIRN_SEED` which.
use cairn_torture::crash::{CrashOptions, run};
use cairn_torture::medium::Medium;
use cairn_torture::{number_from_environment, seed_from_environment};

#[test]
fn every_crash_state_recovers_to_a_prefix() {
    let options = CrashOptions {
        seed: seed_from_environment(),
        medium: Medium::Simulated,
        states: number_from_environment("CAIRN_CRASH_STATES").unwrap_or(1000),
        only_run: number_from_environment("CAIRN_CRASH_RUN"),
        // Clients wait for each other, and for a device that is late.
        threads: 4,
        duration: None,
        keep_in: Some(std::env::temp_dir()),
    };
    match run(&options) {
        Ok(report) => {
            eprintln!("{report:?}");
            if options.only_run.is_none() {
                let lacking = report.too_little();
                assert!(lacking.is_empty(), "the run checked too little: {}", lacking.join("; "));
            }
            assert!(report.states > 0 && report.operations > 0);
            if options.only_run.is_none() && options.states >= 500 {
                assert!(report.replayed > 0, "no state had anything to replay");
                assert!(report.during_recovery > 0 && report.after_use > 0);
            }
            if options.only_run.is_none() && options.states >= 5000 {
                assert!(report.wrapped > 0, "the log never wrapped around");
                assert!(report.fallbacks > 0, "no fsync fell back to a commit");
            }
        }
        Err(error) => panic!("{error}\n(CAIRN_SEED and CAIRN_CRASH_RUN repeat it)"),
    }
}
