//! What a run gives: figures, latencies by operation, resources. Printed as text, or as JSON that can be read back.
use crate::table::{Table, microseconds, number};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A number with its unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// What it tells.
    pub name: String,
    /// How much.
    pub value: f64,
    /// Of what.
    pub unit: String,
}

impl Figure {
    /// A figure.
    pub fn new(name: impl Into<String>, value: f64, unit: impl Into<String>) -> Self {
        Self { name: name.into(), value, unit: unit.into() }
    }
}

/// The latencies of one operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct OperationSummary {
    pub name: String,
    pub count: u64,
    pub average_us: f64,
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
    pub max_us: f64,
}

/// The outcome of a load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Which load.
    pub workload: String,
    /// Against what.
    pub target: String,
    /// Version of the program.
    pub version: String,
    /// Threads.
    pub clients: u64,
    /// Measured time.
    pub seconds: f64,
    /// Operations that the throughput counts.
    pub completed: u64,
    /// The main figure.
    pub throughput: Figure,
    /// Other figures.
    pub figures: Vec<Figure>,
    /// Latencies.
    pub operations: Vec<OperationSummary>,
    /// CPU time of this process, in seconds.
    pub cpu_seconds: f64,
    /// The part of it in kernel mode.
    pub system_cpu_seconds: f64,
    /// Context switches of this process.
    pub context_switches: u64,
    /// Busy CPU time of the whole machine meanwhile, in seconds.
    pub machine_cpu_seconds: f64,
    /// The engine's counters, of the whole time in which the volume was open.
    pub statistics: Option<serde_json::Value>,
}

impl Report {
    fn operations_table(&self) -> Table {
        let mut table = Table::new(["operation", "count", "average", "p50", "p90", "p99", "p99.9", "max"]);
        for operation in &self.operations {
            let times = [operation.average_us, operation.p50_us, operation.p90_us, operation.p99_us, operation.p999_us, operation.max_us];
            table.row([operation.name.clone(), operation.count.to_string()].into_iter().chain(times.map(microseconds)));
        }
        table
    }

    fn per_operation(&self, value: f64) -> f64 {
        value / self.completed.max(1) as f64
    }

    /// Fsyncs, flushes and commits of the engine, in one line.
    fn engine_line(&self) -> Option<String> {
        let statistics = self.statistics.as_ref()?;
        let count = |name: &str| statistics.get(name).and_then(serde_json::Value::as_u64).unwrap_or(0);
        let fsyncs = count("fsyncs_grouped") + count("fsyncs_committed") + count("fsyncs_immediate");
        let flushes = count("log_flushes");
        Some(format!(
            "engine: {fsyncs} fsyncs, {flushes} log flushes ({} fsyncs each), {} checkpoints, {} commits, {} fallbacks to a commit",
            number(fsyncs as f64 / flushes.max(1) as f64),
            count("checkpoints"),
            count("commits"),
            count("fallbacks_ring_full") + count("fallbacks_context_too_large"),
        ))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{} on {}, {} clients, {:.1} s", self.workload, self.target, self.clients, self.seconds)?;
        writeln!(formatter)?;
        if !self.operations.is_empty() {
            writeln!(formatter, "{}", self.operations_table())?;
        }
        for figure in [&self.throughput].into_iter().chain(&self.figures) {
            writeln!(formatter, "{}: {} {}", figure.name, number(figure.value), figure.unit)?;
        }
        writeln!(
            formatter,
            "CPU {} s ({} s in the kernel), {} µs and {} context switches per operation; whole machine {} s",
            number(self.cpu_seconds),
            number(self.system_cpu_seconds),
            number(self.per_operation(self.cpu_seconds * 1e6)),
            number(self.per_operation(self.context_switches as f64)),
            number(self.machine_cpu_seconds),
        )?;
        match self.engine_line() {
            Some(line) => writeln!(formatter, "{line}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_can_be_read_back_and_shows_its_figures() {
        let report = Report {
            workload: "fsync-write".into(),
            target: "/mnt".into(),
            version: "1".into(),
            clients: 2,
            seconds: 1.5,
            completed: 10,
            throughput: Figure::new("throughput", 6.5, "fsyncs/s"),
            figures: vec![Figure::new("data", 4.0, "MB/s")],
            operations: vec![OperationSummary {
                name: "fsync".into(),
                count: 10,
                average_us: 1500.0,
                p50_us: 1000.0,
                p90_us: 2000.0,
                p99_us: 3000.0,
                p999_us: 3500.0,
                max_us: 4000.0,
            }],
            cpu_seconds: 0.5,
            system_cpu_seconds: 0.25,
            context_switches: 20,
            machine_cpu_seconds: 1.0,
            statistics: Some(serde_json::json!({"fsyncs_grouped": 10, "log_flushes": 5})),
        };
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report);
        let shown = report.to_string();
        for part in ["fsync-write", "fsyncs/s", "1.50 ms", "4.00 ms", "(2.00 fsyncs each)", "2.00 context switches per operation"] {
            assert!(shown.contains(part), "\"{part}\" is not in: {shown}");
        }
    }
}
