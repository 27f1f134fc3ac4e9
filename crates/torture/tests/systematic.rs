//! Crash-state searches of systematic workloads: this project's own, and those of another team's
//! generator.
//!
//! Every sequence of one step and every workload with one core operation is always searched in
//! full. `CAIRN_SYSTEMATIC` says how many sequences of two and of three steps and workloads with
//! two core operations (40 of each by default), `CAIRN_SEED` which.
use cairn_environment::atomic::AtomicBool;
use cairn_torture::ace::AceFile;
use cairn_torture::campaign::{CampaignOptions, CampaignReport, Source, run};
use cairn_torture::systematic::{STEPS, Sequences};
use cairn_torture::{number_from_environment, seed_from_environment};
use std::sync::Arc;

fn campaign(source: Source, options: &CampaignOptions) -> CampaignReport {
    let report = run(source, options, &Arc::new(AtomicBool::new(false)), &mut |_, _, _| {})
        .unwrap_or_else(|error| panic!("{error}"));
    eprintln!(
        "{:.0} states/s and thread: {:?}",
        report.states_per_second_and_thread(),
        report.search
    );
    let shown: Vec<String> = report
        .findings
        .iter()
        .map(|f| format!("{}: {}\n  {}", f.workload, f.operations, f.problem))
        .collect();
    assert!(shown.is_empty(), "seed {}:\n{}", options.seed, shown.join("\n"));
    assert_eq!(report.workloads, report.workloads_chosen);
    assert!(
        report.too_little.is_empty(),
        "seed {}: the run checked too little: {}",
        options.seed,
        report.too_little.join("; ")
    );
    report
}

fn systematic(length: u32) -> Source {
    Source::Systematic(Sequences::all(length))
}

fn sampled(seed: u64) -> CampaignOptions {
    CampaignOptions {
        sample: Some(number_from_environment("CAIRN_SYSTEMATIC").unwrap_or(40)),
        ..CampaignOptions::new(seed)
    }
}

#[test]
fn sequences_of_one_step() {
    let report = campaign(systematic(1), &CampaignOptions::new(seed_from_environment()));
    assert_eq!(report.workloads, STEPS.len() as u64);
    // Each image that was read, a second reader read too.
    let search = &report.search;
    assert_eq!(search.compared, search.checked.images + search.during_recovery);
    assert!(
        report.search.replayed > 0
            && report.search.recovered > 0
            && report.search.during_recovery > 0
    );
    assert!(report.search.checked.images < report.search.states, "no image was left twice");
    assert!(report.search.checked.promises.subvolumes > 0, "no subvolume was promised");
    assert!(report.search.checked.promises.forks > 0, "no fork was promised");
}

#[test]
fn sequences_of_two_steps() {
    campaign(systematic(2), &sampled(seed_from_environment()));
}

#[test]
fn sequences_of_three_steps() {
    campaign(systematic(3), &sampled(seed_from_environment()));
}

#[test]
fn sequences_that_begin_with_a_snapshot() {
    let sequences = Sequences::all(2).beginning_with("snapshot the root").expect("there is one");
    let search = campaign(Source::Systematic(sequences), &sampled(seed_from_environment())).search;
    assert!(search.checked.snapshot_images > 0, "no image had a promised snapshot: {search:?}");
}

#[test]
fn boundaries_alone() {
    let mut options = CampaignOptions::new(seed_from_environment());
    options.search.boundaries_only = true;
    let search = campaign(systematic(1), &options).search;
    assert!((search.points + 1..=2 * search.points).contains(&search.states), "{search:?}");
    assert!(search.replayed > 0 && search.recovered > 0);
}

fn ace_file(name: &str) -> Source {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("data").join(name);
    Source::Ace(AceFile::read(&path).unwrap_or_else(|error| panic!("{error}")))
}

#[test]
fn workloads_with_one_core_operation() {
    let report =
        campaign(ace_file("seq1.jlang.xz"), &CampaignOptions::new(seed_from_environment()));
    assert_eq!(report.workloads, 435);
}

#[test]
fn workloads_with_two_core_operations() {
    let report = campaign(ace_file("seq2.jlang.xz"), &sampled(seed_from_environment()));
    assert_eq!(report.workloads_total, 466_382);
}
