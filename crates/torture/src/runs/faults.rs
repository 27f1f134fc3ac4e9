//! `cairn torture faults`: faults of the device, with the tables of outcomes.
use crate::faults::{self, FaultReport, Outcomes};
use crate::run_report::{self, RunReport, interrupted_after, line};
use crate::search::SearchReport;
use cairn_harness::Interrupt;
use cairn_harness::console::grouped;
use cairn_harness::progress::ProgressBar;
use std::fmt;

/// Runs all workloads, or `sample` of them. `seed` chooses these, and which unflushed writes
/// survive the power failure.
///
/// # Errors
/// When the test itself fails.
pub fn run(
    seed: u64,
    sample: Option<u64>,
    interrupt: &Interrupt,
) -> anyhow::Result<RunReport<FaultReport>> {
    let bar = ProgressBar::items("workloads", 0).in_lines();
    bar.tell(&format!("seed {seed}"));
    let mut begun = false;
    let mut show = |done, total| {
        if !std::mem::replace(&mut begun, true) {
            bar.restart("workloads", total);
        }
        bar.set(done);
    };
    let report =
        faults::run(seed, sample, &interrupt.flag(), &mut show).map_err(anyhow::Error::msg)?;
    drop(bar);
    let passed = report.findings.is_empty() && report.too_little.is_empty();
    let interrupted = interrupt.is_set();
    let command = sample.map_or("faults".into(), |sample| format!("faults --sample {sample}"));
    Ok(RunReport { command, seed, passed, interrupted, report })
}

/// Width of the first column.
const NAME_COLUMNS: usize = 39;
/// The columns of both tables, behind the first one.
const COLUMNS: [&str; 7] = [
    "fault points",
    "mount refused",
    "reported",
    "reported, stopped",
    "absorbed",
    "wrong",
    "crash states",
];

fn row(formatter: &mut fmt::Formatter<'_>, name: &str, outcomes: &Outcomes) -> fmt::Result {
    let Outcomes { faults, refused, reported, stopped, absorbed, wrong, states } = *outcomes;
    write!(formatter, "  {name:<NAME_COLUMNS$}")?;
    for (column, count) in
        COLUMNS.iter().zip([faults, refused, reported, stopped, absorbed, wrong, states])
    {
        write!(formatter, "{:>width$}", grouped(count), width = column.len() + 3)?;
    }
    writeln!(formatter)
}

fn heading(formatter: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
    write!(formatter, "\n  {name:<NAME_COLUMNS$}")?;
    COLUMNS.iter().try_for_each(|column| write!(formatter, "   {column}"))?;
    writeln!(formatter)
}

impl fmt::Display for RunReport<FaultReport> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FaultReport { workloads, workloads_total, rows, operations, .. } = &self.report;
        let FaultReport { too_little, findings, .. } = &self.report;
        let points: u64 = rows.iter().map(|row| row.outcomes.faults).sum();
        let interrupted =
            interrupted_after(self.interrupted, *workloads, Some(*workloads_total), "workloads");
        writeln!(
            formatter,
            "cairn torture {}{interrupted}: {workloads} workloads, {} fault points",
            self.command,
            grouped(points)
        )?;
        heading(formatter, "fails")?;
        for fault in rows {
            let name = format!(
                "{:<6} {:<11} {:<7} {}",
                fault.request,
                fault.structure.name(),
                fault.error,
                fault.span.name()
            );
            row(formatter, &name, &fault.outcomes)?;
        }
        heading(formatter, "during")?;
        operations
            .iter()
            .try_for_each(|operation| row(formatter, &operation.operation, &operation.outcomes))?;
        writeln!(formatter)?;
        let SearchReport { points, states, compared, recovered, during_recovery, checked, .. } =
            &self.report.search;
        line(formatter, "power failures", *points, "between two requests, behind a fault")?;
        line(formatter, "crash states", *states, "of these, by what survived")?;
        line(formatter, "read twice", *compared, "by the engine and by fsck's reader")?;
        line(formatter, "recovered", *recovered, "for writing, and closed")?;
        line(formatter, "crashed again", *during_recovery, "in that recovery")?;
        run_report::checked(formatter, checked, "behind the faults of each run")?;
        for finding in findings {
            writeln!(
                formatter,
                "\nFOUND: {finding}\n  repeat: cairn torture {} --seed {}",
                self.command, self.seed
            )?;
        }
        if !too_little.is_empty() {
            run_report::too_little(formatter, too_little, self.seed)?;
        }
        if *points == 0 {
            writeln!(formatter, "\nNothing was tested. (seed {})", self.seed)?;
        } else if self.passed {
            writeln!(
                formatter,
                "\nEvery error was reported or harmless; nothing acknowledged was lost. (seed {})",
                self.seed
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::{FaultRow, OperationRow, Span, Structure};

    fn told(workloads: u64, interrupted: bool) -> String {
        let outcomes = Outcomes { faults: workloads, ..Outcomes::default() };
        let row = |span| FaultRow {
            request: "write".into(),
            structure: Structure::Superblock,
            error: "ENOSPC",
            span,
            outcomes,
        };
        let operations =
            vec![OperationRow { operation: "write behind a hole in d/b".into(), outcomes }];
        let report = FaultReport {
            workloads,
            workloads_total: 35,
            rows: vec![row(Span::Once), row(Span::FromThenOn)],
            operations,
            search: SearchReport::default(),
            too_little: Vec::new(),
            findings: Vec::new(),
        };
        RunReport { command: "faults".into(), seed: 3, passed: true, interrupted, report }
            .to_string()
    }

    #[test]
    fn an_interrupted_run_says_how_far_it_got() {
        let text = told(12, true);
        assert!(
            text.starts_with("cairn torture faults, interrupted after 12 of 35 workloads: "),
            "{text}"
        );
        assert!(!told(35, false).contains("interrupted"));
        let text = told(0, true);
        assert!(
            text.contains("Nothing was tested.") && !text.contains("reported or harmless"),
            "{text}"
        );
    }

    #[test]
    fn columns_stand_below_each_other() {
        let text = told(12, false);
        let rows: Vec<&str> =
            text.lines().filter(|line| line.starts_with("  ") && line.contains("  12  ")).collect();
        assert_eq!(rows.len(), 3, "{text}");
        assert!(rows.iter().all(|row| row.find("12") == rows[0].find("12")), "{text}");
    }
}
