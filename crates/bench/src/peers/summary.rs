//! Medians over the rounds, and the ratio of each file system to the best of the kernel's.
use super::{PeersSettings, Sample, System};
use crate::ab::median;
use crate::machine::{Machine, utc_now};
use crate::table::{Table, number};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The name of the main figure of each load.
pub const THROUGHPUT: &str = "throughput";

fn throughput() -> String {
    THROUGHPUT.into()
}

/// One figure of one file system under one load. Resources are those of the whole machine, per operation.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct SummaryRow {
    pub workload: String,
    #[serde(default)]
    pub clients: usize,
    /// [`THROUGHPUT`] for the load's main figure.
    #[serde(default = "throughput")]
    pub figure: String,
    pub system: String,
    pub unit: String,
    #[serde(default)]
    pub less_is_better: bool,
    pub median: f64,
    pub min: f64,
    pub max: f64,
    /// To the best median of a file system that is not Cairn; `None` when there is none.
    pub ratio_to_best_peer: Option<f64>,
    pub cpu_us_per_operation: f64,
    pub context_switches_per_operation: f64,
}

/// A whole comparison.
#[derive(Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Summary {
    /// When it began, in UTC: `2026-01-31T12:00:00Z`.
    #[serde(default)]
    pub date: String,
    /// The exact command.
    #[serde(default)]
    pub command: Vec<String>,
    #[serde(default)]
    pub machine: Machine,
    /// Of the programs that made the file systems and the loads.
    #[serde(default)]
    pub tools: Vec<ToolVersion>,
    pub rounds: usize,
    pub clients: usize,
    pub seconds: f64,
    pub size_bytes: u64,
    pub direct_io: bool,
    pub kernel: String,
    pub cpus: usize,
    pub version: String,
    pub rows: Vec<SummaryRow>,
    pub samples: Vec<Sample>,
}

/// A program that took part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct ToolVersion {
    pub name: String,
    pub version: String,
}

fn row(workload: &str, system: System, samples: &[Sample]) -> Option<SummaryRow> {
    let own: Vec<&Sample> = samples.iter().filter(|sample| sample.workload == workload && sample.system == system.name()).collect();
    let values = || own.iter().map(|sample| sample.value);
    let per_operation = |of: fn(&Sample) -> f64| median(own.iter().map(|sample| of(sample) / sample.completed.max(1) as f64));
    Some(SummaryRow {
        workload: workload.into(),
        clients: own.first()?.clients,
        figure: throughput(),
        less_is_better: false,
        system: system.name().into(),
        unit: own.first()?.unit.clone(),
        median: median(values()),
        min: values().fold(f64::INFINITY, f64::min),
        max: values().fold(0.0, f64::max),
        ratio_to_best_peer: None,
        cpu_us_per_operation: per_operation(|sample| sample.machine_cpu_seconds * 1e6),
        context_switches_per_operation: per_operation(|sample| sample.machine_context_switches as f64),
    })
}

/// The rows of one load.
fn rows_of(workload: &str, systems: &[System], samples: &[Sample]) -> Vec<SummaryRow> {
    let mut rows: Vec<(System, SummaryRow)> =
        systems.iter().filter_map(|&system| Some((system, row(workload, system, samples)?))).collect();
    let best = rows.iter().filter(|(system, _)| !system.is_cairn()).map(|(_, row)| row.median).fold(0.0, f64::max);
    if best > 0.0 {
        rows.iter_mut().for_each(|(_, row)| row.ratio_to_best_peer = Some(row.median / best));
    }
    rows.into_iter().map(|(_, row)| row).collect()
}

impl Summary {
    /// Of all samples.
    pub(super) fn new(settings: &PeersSettings, samples: Vec<Sample>) -> Self {
        let workloads = settings.workloads.iter().map(super::PeerWorkload::name);
        let rows = workloads.flat_map(|workload| rows_of(&workload, &settings.systems, &samples)).collect();
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        Self {
            date: utc_now(),
            command: settings.command.clone(),
            machine: Machine::here(Some(&settings.folder)),
            tools: Vec::new(),
            rounds: settings.repeat,
            clients: settings.clients,
            seconds: settings.duration.as_secs_f64(),
            size_bytes: settings.size_bytes,
            direct_io: settings.direct_io,
            kernel,
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            version: env!("CARGO_PKG_VERSION").into(),
            rows,
            samples,
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            formatter,
            "medians of {} rounds, {} clients, {} s each, {} CPUs, Linux {}, images of {} MiB, {} direct I/O on loop devices",
            self.rounds,
            self.clients,
            self.seconds,
            self.cpus,
            self.kernel,
            self.size_bytes >> 20,
            if self.direct_io { "with" } else { "without" },
        )?;
        let mut shown = "";
        let mut table = None;
        for row in &self.rows {
            if row.workload != shown {
                finish(formatter, table.take())?;
                shown = &row.workload;
                let heading = format!("{} ({})", row.workload, row.unit);
                table = Some(Table::new([heading.as_str(), "median", "min", "max", "/ best peer", "CPU µs/op", "switches/op"]));
            }
            let ratio = row.ratio_to_best_peer.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
            let cells = [number(row.median), number(row.min), number(row.max), ratio];
            let resources = [row.cpu_us_per_operation, row.context_switches_per_operation].map(number);
            if let Some(table) = &mut table {
                table.row([row.system.clone()].into_iter().chain(cells).chain(resources));
            }
        }
        finish(formatter, table)
    }
}

fn finish(formatter: &mut fmt::Formatter<'_>, table: Option<Table>) -> fmt::Result {
    table.map_or(Ok(()), |table| write!(formatter, "\n{table}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(system: System, value: f64) -> Sample {
        Sample {
            round: 1,
            system: system.name().into(),
            workload: "fsync-write".into(),
            clients: 8,
            figures: Vec::new(),
            latencies: Vec::new(),
            statistics_before: None,
            statistics_after: None,
            value,
            unit: "fsyncs/s".into(),
            completed: 100,
            machine_cpu_seconds: 0.5,
            machine_context_switches: 300,
            server_cpu_seconds: 0.0,
            report: None,
        }
    }

    #[test]
    fn ratios_are_to_the_best_peer() {
        let systems = [System::Ext4, System::Xfs, System::CairnImage];
        let values = [(System::Ext4, [90.0, 100.0, 130.0]), (System::Xfs, [50.0, 40.0, 60.0]), (System::CairnImage, [200.0, 150.0, 300.0])];
        let samples: Vec<Sample> = values.iter().flat_map(|(system, values)| values.map(|value| sample(*system, value))).collect();
        let rows = rows_of("fsync-write", &systems, &samples);
        let figures: Vec<_> = rows.iter().map(|row| (row.median, row.min, row.max, row.ratio_to_best_peer)).collect();
        assert_eq!(figures, [(100.0, 90.0, 130.0, Some(1.0)), (50.0, 40.0, 60.0, Some(0.5)), (200.0, 150.0, 300.0, Some(2.0))]);
        assert_eq!((rows[0].cpu_us_per_operation, rows[0].context_switches_per_operation), (5000.0, 3.0));
        let alone = rows_of("fsync-write", &systems[2..], &samples);
        assert_eq!(alone[0].ratio_to_best_peer, None);
        assert!(rows_of("dbench", &systems, &samples).is_empty());
    }
}
