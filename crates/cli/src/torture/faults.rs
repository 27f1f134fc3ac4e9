//! `cairn torture faults`: arguments, progress, and the table of outcomes. [`cairn_torture::faults`] does it.
use super::told::{Told, grouped};
use crate::progress::ProgressBar;
use cairn_torture::faults::{self, FaultReport, Outcomes};
use clap::Parser;
use std::fmt;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

/// Every read, write and flush of many short runs fails in turn, once or from then on, with EIO or ENOSPC.
///
/// Each operation of `systematic` is such a run, and all of them one after the other. Errors must be reported to whom they
/// concern, and whatever was acknowledged must be there after a power failure at the end. Two tables tell the outcome: by kind
/// of request and structure, and by operation.
#[derive(Parser)]
pub struct Faults {
    /// Chooses which unflushed writes survive the power failure [default: a random one, which is printed].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl Faults {
    /// Runs the command.
    pub fn run(&self, stop: &AtomicBool) -> anyhow::Result<ExitCode> {
        let seed = self.seed.unwrap_or_else(cairn_environment::random::u64);
        let bar = ProgressBar::items("workloads", 0);
        let mut begun = false;
        let mut show = |done, total| {
            if !std::mem::replace(&mut begun, true) {
                bar.restart("workloads", total);
            }
            bar.set(done);
        };
        let report = faults::run(seed, stop, &mut show).map_err(anyhow::Error::msg)?;
        drop(bar);
        Told { command: "faults".into(), seed, passed: report.findings.is_empty(), report }.tell(self.json)
    }
}

/// The columns of both tables, behind the first one.
const COLUMNS: [&str; 7] = ["fault points", "mount refused", "reported", "reported, stopped", "absorbed", "wrong", "crash states"];

fn row(formatter: &mut fmt::Formatter<'_>, name: &str, outcomes: &Outcomes) -> fmt::Result {
    let Outcomes { faults, refused, reported, stopped, absorbed, wrong, states } = *outcomes;
    write!(formatter, "  {name:<36}")?;
    for (column, count) in COLUMNS.iter().zip([faults, refused, reported, stopped, absorbed, wrong, states]) {
        write!(formatter, "{:>width$}", grouped(count), width = column.len() + 3)?;
    }
    writeln!(formatter)
}

fn heading(formatter: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
    write!(formatter, "\n  {name:<36}")?;
    COLUMNS.iter().try_for_each(|column| write!(formatter, "   {column}"))?;
    writeln!(formatter)
}

impl fmt::Display for Told<FaultReport> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FaultReport { workloads, rows, operations, findings } = &self.report;
        let points: u64 = rows.iter().map(|row| row.outcomes.faults).sum();
        writeln!(formatter, "cairn torture faults: {workloads} workloads, {} fault points", grouped(points))?;
        heading(formatter, "fails")?;
        for fault in rows {
            let lasting = if fault.lasting { "from then on" } else { "once" };
            let name = format!("{:<6} {:<11} {:<7} {lasting}", fault.request, fault.structure.name(), fault.error);
            row(formatter, &name, &fault.outcomes)?;
        }
        heading(formatter, "during")?;
        operations.iter().try_for_each(|operation| row(formatter, &operation.operation, &operation.outcomes))?;
        for finding in findings {
            writeln!(formatter, "\nFOUND: {finding}\n  repeat: cairn torture faults --seed {}", self.seed)?;
        }
        if self.passed {
            writeln!(formatter, "\nEvery error was reported or harmless; nothing acknowledged was lost. (seed {})", self.seed)?;
        }
        Ok(())
    }
}
