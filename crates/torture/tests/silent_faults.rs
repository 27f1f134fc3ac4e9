//! A device that lies once, about any of the requests of a run: see `cairn_torture::silent`.
//! `CAIRN_SHARE=3` tries one request in three.
use cairn_torture::seed_from_environment;
use cairn_torture::share::Share;
use cairn_torture::silent::{Kind, Outcomes, run};
use cairn_torture::watchdog::Watchdog;
use std::time::Duration;

#[test]
fn every_request_is_lied_about() {
    let _watchdog = Watchdog::new("a device that lies".into(), Duration::from_secs(600));
    let seed = seed_from_environment();
    let report = run(seed, Share::from_environment(seed)).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{:16} {:12} lies states unharmed older fsck told refused", "lie", "of");
    for ((kind, structure), row) in &report.rows {
        eprintln!(
            "{:16} {structure:12} {:4} {:6} {:8} {:5} {:4} {:4} {:7}",
            format!("{kind:?}"),
            row.lies,
            row.states,
            row.unharmed,
            row.older,
            row.found_by_fsck,
            row.error_told,
            row.refused
        );
    }
    assert!(report.findings.is_empty(), "{}", report.findings.join("\n"));
    let structures = ["bitmap", "data", "log", "node", "superblock"];
    for kind in [Kind::LostWrite, Kind::WriteBehind, Kind::WriteElsewhere] {
        assert!(
            structures.iter().all(|structure| report.rows.contains_key(&(kind, structure))),
            "{kind:?}"
        );
    }
    // What the newest superblock refers to is missed.
    assert!(
        ["bitmap", "node"]
            .iter()
            .all(|structure| report.rows[&(Kind::LostWrite, *structure)].older == 0)
    );
    let sum = |count: fn(&Outcomes) -> u64| report.rows.values().map(count).sum::<u64>();
    assert!(
        sum(|row| row.unharmed) > 0 && sum(|row| row.error_told) > 0 && sum(|row| row.refused) > 0
    );
    assert!(report.rows[&(Kind::LostFlush, "-")].older > 0, "crashes behind a lost flush");
}
