//! What a run gives: figures, latencies by operation, resources. Printed as text, or as JSON that
//! can be read back.
use crate::disturbance::Disturbance;
use crate::engine_figures;
use crate::machine::{Machine, utc_now};
use crate::table::{Table, known_microseconds, number};
use crate::workloads::Workload;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// A number with its unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// What it measures.
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

/// The latencies of one operation. Some tools report no quantiles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct OperationSummary {
    pub name: String,
    pub count: u64,
    pub average_us: f64,
    pub p50_us: Option<f64>,
    pub p90_us: Option<f64>,
    pub p99_us: Option<f64>,
    pub p999_us: Option<f64>,
    pub max_us: f64,
}

impl OperationSummary {
    /// Name, count, average, quantiles and maximum, for a table.
    pub(crate) fn cells(&self) -> Vec<String> {
        let times = [
            Some(self.average_us),
            self.p50_us,
            self.p90_us,
            self.p99_us,
            self.p999_us,
            Some(self.max_us),
        ];
        [self.name.clone(), self.count.to_string()]
            .into_iter()
            .chain(times.map(known_microseconds))
            .collect()
    }
}

/// When, where and how a result came about.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// When it began, in UTC: `2026-01-31T12:00:00Z`.
    pub date: String,
    /// The exact command.
    pub command: Vec<String>,
    /// On what.
    pub machine: Machine,
    /// What else the machine did meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disturbance: Option<Disturbance>,
}

impl Origin {
    /// Now, here; `folder` is what a device lies in, where there is one.
    pub fn here(command: Vec<String>, folder: Option<&Path>) -> Self {
        Self { date: utc_now(), command, machine: Machine::here(folder), disturbance: None }
    }

    /// What to say of a machine that did other things as well.
    pub(crate) fn warning(&self) -> Option<String> {
        self.disturbance.and_then(|disturbance| disturbance.warning())
    }
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
    /// Context switches of the whole machine meanwhile.
    #[serde(default)]
    pub machine_context_switches: u64,
    /// The engine's counters: of the load, with what it prepares.
    pub statistics: Option<serde_json::Value>,
    /// Where it came from; `None` for a part of something that says so itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

impl Report {
    fn operations_table(&self) -> Table {
        if self.workload == Workload::Dbench.name() {
            return self.dbench_table();
        }
        let mut table =
            Table::new(["operation", "count", "average", "p50", "p90", "p99", "p99.9", "max"]);
        for operation in &self.operations {
            table.row(operation.cells());
        }
        table
    }

    /// As dbench prints it, and the percentiles.
    fn dbench_table(&self) -> Table {
        let mut table = Table::new([
            "operation",
            "count",
            "average",
            "maximum latency",
            "p50",
            "p90",
            "p99",
            "p99.9",
        ]);
        for operation in &self.operations {
            let mut cells = operation.cells();
            // The maximum goes behind the average.
            cells[3..].rotate_right(1);
            table.row(cells);
        }
        table
    }

    fn per_operation(&self, value: f64) -> f64 {
        value / self.completed.max(1) as f64
    }

    /// What the engine's counters say: the stages of an fsync where they were recorded, and figures
    /// in one line.
    fn engine_text(&self) -> Option<String> {
        let statistics = self.statistics.as_ref()?;
        let figures = engine_figures::derived(statistics);
        let shown = figures
            .iter()
            .map(|figure| format!("{} {}", number(figure.value), figure.name))
            .collect::<Vec<_>>()
            .join(", ");
        let stages = engine_figures::stages(statistics);
        let table = if stages.is_empty() {
            String::new()
        } else {
            format!("\n{}", engine_figures::stage_table(&stages))
        };
        Some(format!("engine: {shown}\n{table}"))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            formatter,
            "{} on {}, {} clients, {:.1} s",
            self.workload, self.target, self.clients, self.seconds
        )?;
        if let Some(warning) = self.origin.as_ref().and_then(Origin::warning) {
            writeln!(formatter, "{warning}")?;
        }
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
        formatter.write_str(&self.engine_text().unwrap_or_default())
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
                p50_us: Some(1000.0),
                p90_us: Some(2000.0),
                p99_us: None,
                p999_us: Some(3500.0),
                max_us: 4000.0,
            }],
            cpu_seconds: 0.5,
            system_cpu_seconds: 0.25,
            context_switches: 20,
            machine_cpu_seconds: 1.0,
            machine_context_switches: 40,
            statistics: Some(serde_json::json!({
                "fsyncs_grouped": 10,
                "log_flushes": 5,
                "fsync_stages": [{"stage": "wake-up", "count": 10, "mean_us": 1.0, "p50_us": 1.0, "p99_us": 2.0, "max_us": 3.0}],
            })),
            origin: None,
        };
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report);
        assert!(json.contains(r#""p99_us":null"#), "what is not known is no number: {json}");
        let shown = report.to_string();
        for part in [
            "fsync-write",
            "fsyncs/s",
            "1.50 ms",
            "4.00 ms",
            "2.00 fsyncs per log flush",
            "wake-up",
            "2.00 context switches per operation",
        ] {
            assert!(shown.contains(part), "\"{part}\" is not in: {shown}");
        }
        let shown = Report { workload: "dbench".into(), ..report }.to_string();
        let heading = shown.lines().find(|line| line.starts_with("operation")).unwrap();
        assert_eq!(
            heading.split("  ").filter(|part| !part.is_empty()).map(str::trim).collect::<Vec<_>>(),
            ["operation", "count", "average", "maximum latency", "p50", "p90", "p99", "p99.9"]
        );
        let row = shown.lines().find(|line| line.starts_with("fsync  ")).unwrap();
        assert_eq!(
            row.split("  ").filter(|part| !part.is_empty()).map(str::trim).collect::<Vec<_>>(),
            ["fsync", "10", "1.50 ms", "4.00 ms", "1.00 ms", "2.00 ms", "-", "3.50 ms"]
        );
    }
}
