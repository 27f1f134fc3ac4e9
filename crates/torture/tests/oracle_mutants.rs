//! The instruments are not blind: of each deliberate fault of an oracle ([`Sabotage`]) a run fails,
//! by a floor of what it must check, or by a wrong state that was planted and accepted.
//!
//! Each row of the tables says by which. The same runs without sabotage pass. `CAIRN_SHARE=3` tries
//! one fault in three.
use cairn_environment::atomic::AtomicBool;
use cairn_torture::campaign::{CampaignOptions, CampaignReport, Source, run};
use cairn_torture::crash::{CrashFinding, CrashOptions, CrashReport, run_sabotaged};
use cairn_torture::medium::Medium;
use cairn_torture::sabotage::Sabotage;
use cairn_torture::seed_from_environment;
use cairn_torture::share::Share;
use cairn_torture::systematic::Sequences;
use std::sync::Arc;

/// What fails in a run with a sabotaged oracle.
#[derive(Clone, Copy, Debug)]
enum Killer {
    /// A number below its floor, called so.
    Floor(&'static str),
    /// A planted state, called so, that the judge accepts.
    Planted(&'static str),
}
use Killer::{Floor, Planted};

/// Sabotaged searches of all sequences of one operation.
const SEARCHES: &[(Sabotage, Killer)] = &[
    (Sabotage::NeverAcknowledges, Floor("names")),
    (Sabotage::NeverAcknowledges, Floor("modes and owners")),
    (Sabotage::NeverAcknowledges, Floor("link counts")),
    (Sabotage::NeverAcknowledges, Floor("extended attributes")),
    (Sabotage::NeverAcknowledges, Floor("blocks of data")),
    (Sabotage::NeverAcknowledges, Floor("sizes")),
    (Sabotage::NeverAcknowledges, Floor("times")),
    (Sabotage::NeverAcknowledges, Floor("allocated blocks")),
    (Sabotage::NeverAcknowledges, Floor("subvolumes")),
    (Sabotage::NeverAcknowledges, Floor("snapshots")),
    (Sabotage::NeverAcknowledges, Floor("forks")),
    (Sabotage::NeverAcknowledges, Floor("applied blocks")),
    (Sabotage::NeverAcknowledges, Floor("images with promised snapshots")),
    (Sabotage::AcknowledgesTheEndOnly, Floor("times")),
    (Sabotage::ClientsNeverSync, Floor("times")),
    (Sabotage::NothingTorn, Floor("states with torn writes")),
    (Sabotage::NothingReordered, Floor("states with reordered writes")),
    (Sabotage::NothingLost, Floor("different images")),
    (Sabotage::NoCrashInRecovery, Floor("power failures in a recovery")),
    (Sabotage::ForgetsNames, Planted("older names")),
    (Sabotage::ForgetsAttributes, Planted("older modes and owners")),
    (Sabotage::ForgetsLinks, Planted("older link counts")),
    (Sabotage::ForgetsXattrs, Planted("older extended attributes")),
    (Sabotage::ForgetsSubvolumes, Planted("older subvolumes")),
    (Sabotage::ForgetsForks, Planted("older forks")),
    (Sabotage::ForksFollowTheirSource, Planted("other data of its source in a fork")),
    (Sabotage::AppliedMayBeOlder, Planted("older blocks of data")),
    (Sabotage::AppliesByHalf, Planted("half of an application")),
    (Sabotage::ForgetsSnapshots, Planted("older snapshots")),
    (Sabotage::SnapshotsByName, Planted("bytes from nowhere in a snapshot")),
    (Sabotage::SnapshotsMayBeOlder, Planted("older data in a snapshot")),
    (Sabotage::SnapshotsMayBeNewer, Planted("newer data in a snapshot")),
    (Sabotage::ForgetsData, Planted("older blocks of data")),
    (Sabotage::ForgetsSizes, Planted("older sizes")),
    (Sabotage::ForgetsTimes, Planted("older times")),
    (Sabotage::ForgetsAllocation, Planted("older allocated blocks")),
    (Sabotage::AcceptsAnythingOlder, Planted("a state before the last acknowledgement")),
    (Sabotage::AcceptsAnyContents, Planted("bytes from nowhere")),
    (Sabotage::AcceptsUnreadable, Planted("a file that can't be read")),
    (Sabotage::NothingAfterTheFirstSync, Planted("older")),
    (Sabotage::IgnoresFsck, Planted("a damaged root of the trees")),
    (Sabotage::ErrorsAreFine, Planted("bytes from nowhere")),
    (Sabotage::AcceptsRepairs, Planted("a repair that loses a name")),
    (Sabotage::NothingRepaired, Floor("repaired images")),
    (Sabotage::NothingExtracted, Floor("extracted images")),
];

/// Those rows whose faults are tried.
fn shared(rows: &[(Sabotage, Killer)]) -> impl Iterator<Item = (Sabotage, Killer)> {
    let share = Share::from_environment(seed_from_environment());
    let (mut number, mut last) = (0, None);
    rows.iter().copied().filter(move |(sabotage, _)| {
        number += u64::from(last.replace(*sabotage).is_some_and(|last| last != *sabotage));
        share.has(number)
    })
}

fn search(sabotage: Sabotage) -> CampaignReport {
    let mut options = CampaignOptions { sabotage, ..CampaignOptions::new(seed_from_environment()) };
    options.findings_max = usize::MAX;
    let stop = Arc::new(AtomicBool::new(false));
    let report = run(Source::Systematic(Sequences::all(1)), &options, &stop, &mut |_, _, _| {})
        .unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{sabotage:?}: {:?}", report.search);
    report
}

/// What is wrong if a sabotaged run did not die as it should.
fn survives(
    sabotage: Sabotage,
    killer: Killer,
    lacking: &[String],
    findings: &[String],
) -> Option<String> {
    const BLIND: &str = "the judge is blind: it accepts ";
    let is_killed = match killer {
        // It finds nothing: without a floor nothing would show.
        Floor(name) => {
            findings.is_empty() && lacking.iter().any(|line| line.starts_with(&format!("{name}: ")))
        }
        Planted(name) => findings.iter().any(|text| text.contains(&format!("{BLIND}{name}"))),
    };
    let found: Vec<&str> =
        findings.iter().map(|text| text.split(BLIND).last().unwrap_or_default()).collect();
    (!is_killed).then(|| {
        format!(
            "{sabotage:?} does not die by {killer:?}; below floors: {lacking:?}; found: {found:?}"
        )
    })
}

#[test]
fn sabotaged_searches_fail() {
    let mut last: Option<(Sabotage, Vec<String>, Vec<String>)> = None;
    let mut survivors = Vec::new();
    for (sabotage, killer) in shared(SEARCHES) {
        if last.as_ref().is_none_or(|(of, ..)| *of != sabotage) {
            let report = search(sabotage);
            let findings = report.findings.into_iter().map(|finding| finding.problem);
            last = Some((sabotage, report.too_little, findings.collect()));
        }
        let (_, lacking, findings) = last.as_ref().expect("it was just made");
        survivors.extend(survives(sabotage, killer, lacking, findings));
    }
    assert!(survivors.is_empty(), "{}", survivors.join("\n"));
}

#[test]
fn a_search_without_sabotage_passes() {
    let report = search(Sabotage::None);
    assert!(report.findings.is_empty(), "{}", report.findings[0].problem);
    assert!(report.too_little.is_empty(), "{:?}", report.too_little);
}

/// Sabotaged random runs.
const RANDOM_RUNS: &[(Sabotage, Killer)] = &[
    (Sabotage::AcknowledgesTheEndOnly, Floor("acknowledgements")),
    (Sabotage::ClientsNeverSync, Floor("acknowledgements")),
    (Sabotage::NothingTorn, Floor("states with torn writes")),
    (Sabotage::NothingReordered, Floor("states with reordered writes")),
    (Sabotage::NoCrashInRecovery, Floor("power failures in a recovery")),
    (Sabotage::FirstClientOnly, Planted("")),
    (Sabotage::IgnoresTheOrder, Planted("names older than those of other clients")),
    // A run ends with the first state that is accepted: older blocks, or older data in a snapshot.
    (Sabotage::ForgetsData, Planted("older")),
    (Sabotage::SnapshotsByName, Planted("bytes from nowhere in a snapshot")),
    (Sabotage::AcceptsAnythingOlder, Planted("")),
    (Sabotage::IgnoresFsck, Planted("a damaged root of the trees")),
    (Sabotage::AcceptsRepairs, Planted("a repair that loses a name")),
    (Sabotage::NothingRepaired, Floor("repaired images")),
    (Sabotage::NothingExtracted, Floor("extracted images")),
];

fn random_runs(sabotage: Sabotage) -> (CrashReport, Option<CrashFinding>) {
    let options = CrashOptions {
        seed: seed_from_environment(),
        medium: Medium::Simulated,
        states: 1000,
        only_run: None,
        threads: 4,
        duration: None,
        keep_in: None,
    };
    let stop = Arc::new(AtomicBool::new(false));
    let (report, outcome) = run_sabotaged(&options, sabotage, &stop, &mut |_| {});
    eprintln!("{sabotage:?}: {report:?}");
    (report, outcome.err())
}

#[test]
fn sabotaged_random_runs_fail() {
    let mut survivors = Vec::new();
    for (sabotage, killer) in shared(RANDOM_RUNS) {
        let (report, finding) = random_runs(sabotage);
        let findings: Vec<String> = finding.into_iter().map(|finding| finding.problem).collect();
        survivors.extend(survives(sabotage, killer, &report.too_little(), &findings));
        if sabotage == Sabotage::FirstClientOnly {
            assert!(!findings[0].contains("of client 0"), "{}", findings[0]);
        }
    }
    assert!(survivors.is_empty(), "{}", survivors.join("\n"));
}
