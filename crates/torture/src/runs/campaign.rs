//! `cairn torture systematic` and `ace`: a campaign of many workloads, with its report in words.
use crate::campaign::{self, CampaignFinding, CampaignOptions, CampaignReport, Source};
use crate::run_report::{self, RunReport, checked, interrupted_after, line};
use anyhow::ensure;
use cairn_harness::Interrupt;
use cairn_harness::console::grouped;
use cairn_harness::progress::ProgressBar;
use serde::Serialize;
use std::fmt;

/// Runs the workloads of `source`. `command` is what the user would write to run them again,
/// without what chooses some of them.
///
/// # Errors
/// When the test itself fails, or had no time for any workload.
pub fn run(
    source: Source,
    command: String,
    options: &CampaignOptions,
    interrupt: &Interrupt,
) -> anyhow::Result<RunReport<CampaignFindings>> {
    let seed = options.seed;
    let bar = ProgressBar::items("workloads", 0).in_lines();
    bar.tell(&format!("seed {seed}"));
    let mut total_before = 0;
    let mut show = |done, total, _states| {
        if total_before != total {
            bar.restart("workloads", total);
            total_before = total;
        }
        bar.set(done);
    };
    let report =
        campaign::run(source, options, &interrupt.flag(), &mut show).map_err(anyhow::Error::msg)?;
    drop(bar);
    let interrupted = interrupt.is_set();
    ensure!(
        interrupted || report.workloads > 0,
        "nothing was tested: --seconds leaves no time for it"
    );
    Ok(run_report(command, seed, interrupted, report))
}

/// What a campaign found out.
#[derive(Serialize)]
pub struct CampaignFindings {
    #[serde(flatten)]
    report: CampaignReport,
    /// The command that repeats each finding.
    repeat: Vec<String>,
}

fn run_report(
    command: String,
    seed: u64,
    interrupted: bool,
    report: CampaignReport,
) -> RunReport<CampaignFindings> {
    let repeated = |finding: &CampaignFinding| {
        format!("cairn torture {command} --only {} --seed {seed}", finding.workload)
    };
    let repeat = report.findings.iter().map(repeated).collect();
    RunReport {
        command,
        seed,
        passed: report.findings.is_empty() && report.too_little.is_empty(),
        interrupted,
        report: CampaignFindings { report, repeat },
    }
}

impl fmt::Display for RunReport<CampaignFindings> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CampaignFindings { report, repeat } = &self.report;
        let CampaignReport { search, workloads, workloads_chosen, workloads_total, .. } = report;
        let (seconds, threads) = (report.seconds, report.threads);
        let speed = report.states_per_second_and_thread();
        let interrupted =
            interrupted_after(self.interrupted, *workloads, Some(*workloads_chosen), "workloads");
        writeln!(formatter, "cairn torture {}{interrupted}", self.command)?;
        line(formatter, "workloads", *workloads, &format!("of {}", grouped(*workloads_total)))?;
        line(formatter, "points of failure", search.points, "between every two device operations")?;
        line(
            formatter,
            "crash states",
            search.states,
            "each with another set of surviving writes",
        )?;
        line(formatter, "with a log to replay", search.replayed, "")?;
        line(
            formatter,
            "recovered for writing",
            search.recovered,
            "and closed, checked, judged again",
        )?;
        line(formatter, "read twice", search.compared, "by the engine and by fsck, and compared")?;
        line(formatter, "failures in recovery", search.during_recovery, "")?;
        checked(formatter, &search.checked, "checked by fsck, replayed, every byte read")?;
        writeln!(
            formatter,
            "  {seconds:.1} s on {threads} threads: {speed:.0} crash states a second and thread"
        )?;
        for (finding, repeat) in report.findings.iter().zip(repeat) {
            writeln!(
                formatter,
                "\nFOUND in workload {}: {}\n  {}",
                finding.workload, finding.operations, finding.problem
            )?;
            writeln!(formatter, "  repeat: {repeat}")?;
        }
        match report.findings.len() {
            0 if *workloads == 0 => writeln!(formatter, "Nothing was tested. (seed {})", self.seed),
            0 if !self.passed => run_report::too_little(formatter, &report.too_little, self.seed),
            0 => writeln!(
                formatter,
                "Every state is one that the operations permit; nothing acknowledged was lost. \
                 (seed {})",
                self.seed
            ),
            count => writeln!(
                formatter,
                "\n{count} findings; the run ends after {}.",
                campaign::FINDINGS_MAX
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_says_how_to_repeat_it() {
        let finding = CampaignFinding {
            workload: 7,
            operations: "unlink a; fsync d".into(),
            problem: "it is there".into(),
        };
        let report = CampaignReport {
            workloads: 8,
            workloads_total: 34,
            findings: vec![finding],
            threads: 1,
            ..CampaignReport::default()
        };
        let told = run_report("systematic --length 1".into(), 5, false, report).to_string();
        assert!(told.contains("FOUND in workload 7: unlink a; fsync d\n  it is there"), "{told}");
        assert!(
            told.contains("repeat: cairn torture systematic --length 1 --only 7 --seed 5"),
            "{told}"
        );
        assert!(!told.contains("Every state"), "{told}");
    }

    #[test]
    fn a_run_that_checked_too_little_fails() {
        let too_little = vec!["sizes: 3, at least 40".to_owned()];
        let report =
            CampaignReport { workloads: 8, threads: 1, too_little, ..CampaignReport::default() };
        let told = run_report("systematic --length 1".into(), 5, false, report);
        assert!(!told.passed);
        let told = told.to_string();
        assert!(
            told.ends_with("The run checked too little (seed 5):\n  sizes: 3, at least 40\n"),
            "{told}"
        );
        assert!(!told.contains("Every state"), "{told}");
    }
}
