//! What the FUSE transport alone can do, and how much of it is left with a volume behind it.
//!
//! A file system in memory (`memory_file_system`) is served over the transport that a
//! volume is served over, by a process of its own, and both have the same loads, in turns. What the
//! one in memory gives is the limit: no volume over the same transport can give more. The
//! measurements are those of [`crate::peers`].
use crate::ab::Spread;
use crate::peers::{
    self, Mounting, PeerWorkload, PeersSettings, Summary, SummaryRow, System, Transport,
};
use crate::table::{Table, number};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// The round trip alone and with eight callers, names and small files, an office, durable files and
/// blocks whose FSYNC is answered at once.
const LOADS: [&str; 7] = [
    "round-trip@1",
    "round-trip@8",
    "untar",
    "dbench@8",
    "fs_mark@8",
    "fsync-write@1",
    "fsync-write@8",
];
/// Where Debian's package has dbench's load file.
const DBENCH_LOADFILE: &str = "/usr/share/dbench/client.txt";

/// The loads that are measured without a choice; dbench only where its load file is.
pub fn default_loads(loadfile: Option<&Path>) -> Vec<PeerWorkload> {
    let has_loadfile = loadfile.unwrap_or(Path::new(DBENCH_LOADFILE)).exists();
    let loads = LOADS.iter().filter(|name| has_loadfile || !name.starts_with("dbench"));
    loads.map(|name| name.parse().expect("the names are known")).collect()
}

/// The transports that mounts have here: a measurement alone does not switch one on.
pub fn available() -> Vec<Transport> {
    let ring = peers::ring_is_switched_on().then_some(Transport::Ring);
    [Transport::Device].into_iter().chain(ring).collect()
}

/// In memory and on an image, for each transport.
pub fn systems(transports: &[Transport], writeback: bool) -> Vec<System> {
    let of = |&transport: &Transport| {
        let mounting = Mounting { transport, writeback };
        [System::Memory(mounting), System::CairnImage(mounting)]
    };
    transports.iter().flat_map(of).collect()
}

/// A figure of a load over one transport: the limit, and the volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct LimitRow {
    pub workload: String,
    pub clients: usize,
    /// [`peers::THROUGHPUT`] for the load's main figure.
    pub figure: String,
    pub unit: String,
    pub less_is_better: bool,
    /// `dev` or `uring`.
    pub transport: String,
    /// In memory.
    pub limit: Spread,
    /// On the image.
    pub volume: Spread,
    /// How much of the limit the volume reaches: 1 is all of it, also where less is better.
    pub share_of_limit: f64,
}

/// What was measured: the limits, and the comparison that they come from.
#[derive(Debug, Serialize, Deserialize)]
pub struct Limits {
    /// One for each figure and transport.
    pub limits: Vec<LimitRow>,
    /// All rows and samples, as [`peers::run`] has them.
    #[serde(flatten)]
    pub summary: Summary,
}

fn spread(row: &SummaryRow) -> Spread {
    Spread { median: row.median, min: row.min, max: row.max }
}

fn limit_row(memory: &SummaryRow, volume: &SummaryRow) -> LimitRow {
    let ratio = if memory.less_is_better {
        memory.median / volume.median
    } else {
        volume.median / memory.median
    };
    let way = memory.system.trim_start_matches("cairn-memory").trim_start_matches('-');
    LimitRow {
        workload: memory.workload.clone(),
        clients: memory.clients,
        figure: memory.figure.clone(),
        unit: memory.unit.clone(),
        less_is_better: memory.less_is_better,
        transport: way.trim_end_matches("-writeback").to_owned(),
        limit: spread(memory),
        volume: spread(volume),
        share_of_limit: if ratio.is_finite() { ratio } else { 0.0 },
    }
}

impl Limits {
    fn of(summary: Summary) -> Self {
        let pairs = summary.groups().flat_map(|group| {
            group.iter().filter_map(|memory| {
                let way = memory.system.strip_prefix("cairn-memory")?;
                let volume =
                    group.iter().find(|row| row.system.strip_prefix("cairn-image") == Some(way))?;
                Some(limit_row(memory, volume))
            })
        });
        Self { limits: pairs.collect(), summary }
    }
}

/// Measures the limits, and reports the progress on standard error.
///
/// # Errors
/// As those of [`peers::run`].
pub fn run(settings: &PeersSettings) -> anyhow::Result<Limits> {
    Ok(Limits::of(peers::run(settings)?))
}

impl fmt::Display for Limits {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { rounds, seconds, cpus, kernel, .. } = &self.summary;
        writeln!(
            formatter,
            "medians of {rounds} rounds, {seconds} s each, {cpus} CPUs, Linux {kernel}"
        )?;
        writeln!(
            formatter,
            "limit: a file system in memory over the same transport; share: how much of it a volume on an image reaches"
        )?;
        if let Some(disturbance) = self.summary.disturbance {
            writeln!(formatter, "{}", disturbance.line())?;
        }
        self.summary.left_out.iter().try_for_each(|why| writeln!(formatter, "{why}"))?;
        let headings = [
            "load",
            "transport",
            "limit",
            "min",
            "max",
            "volume",
            "min",
            "max",
            "share of the limit",
        ];
        let mut table = Table::new(headings);
        for row in self
            .limits
            .iter()
            .filter(|row| row.figure == peers::THROUGHPUT || row.figure.ends_with("p50"))
        {
            let figure = if row.figure == peers::THROUGHPUT {
                row.workload.clone()
            } else {
                format!("  {}", row.figure)
            };
            let hint = if row.less_is_better { ", less is better" } else { "" };
            let spreads = [row.limit, row.volume]
                .into_iter()
                .flat_map(|spread| [spread.median, spread.min, spread.max].map(number));
            let share = format!("{:.0} %", row.share_of_limit * 100.0);
            table.row(
                [format!("{figure} ({}{hint})", row.unit), row.transport.clone()]
                    .into_iter()
                    .chain(spreads)
                    .chain([share]),
            );
        }
        write!(formatter, "\n{table}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::LoadSeconds;

    fn row(system: &str, workload: &str, median: f64, less_is_better: bool) -> SummaryRow {
        SummaryRow {
            workload: workload.into(),
            clients: 1,
            figure: peers::THROUGHPUT.into(),
            system: system.into(),
            unit: if less_is_better { "s" } else { "round trips/s" }.into(),
            less_is_better,
            median,
            min: median * 0.5,
            max: median * 2.0,
            times_as_good: None,
            ratio_to_best_peer: None,
            cpu_us_per_operation: 1.0,
            context_switches_per_operation: 1.0,
            seconds: LoadSeconds::default(),
        }
    }

    fn summary(rows: Vec<SummaryRow>) -> Summary {
        let value = serde_json::json!({"rounds": 1, "clients": 8, "seconds": 1.0, "size_bytes": 1, "direct_io": true, "kernel": "6.18", "cpus": 2,
            "version": "0.1.0", "rows": rows, "samples": []});
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn shares_are_of_the_same_load_and_transport() {
        let rows = vec![
            row("cairn-memory-dev", "round-trip@1", 1000.0, false),
            row("cairn-image-dev", "round-trip@1", 800.0, false),
            row("cairn-memory-uring", "round-trip@1", 2000.0, false),
            row("cairn-image-uring", "round-trip@1", 500.0, false),
            row("cairn-memory-dev", "untar", 1.0, true),
            row("cairn-image-dev", "untar", 4.0, true),
            row("cairn-memory-uring-writeback", "untar", 1.0, true),
        ];
        let limits = Limits::of(summary(rows));
        let shares: Vec<_> = limits
            .limits
            .iter()
            .map(|row| (row.workload.as_str(), row.transport.as_str(), row.share_of_limit))
            .collect();
        assert_eq!(
            shares,
            [("round-trip@1", "dev", 0.8), ("round-trip@1", "uring", 0.25), ("untar", "dev", 0.25)]
        );
        let text = limits.to_string();
        assert!(text.contains("80 %") && text.contains("untar (s, less is better)"), "{text}");
        let json = serde_json::to_string(&limits).unwrap();
        let read: Limits = serde_json::from_str(&json).unwrap();
        assert_eq!((read.limits, read.summary.rows.len()), (limits.limits, 7));
        assert!(serde_json::from_str::<Summary>(&json).is_ok(), "a page can be made of it");
    }

    #[test]
    fn each_transport_has_a_limit_and_a_volume() {
        let names: Vec<String> = systems(&[Transport::Device, Transport::Ring], true)
            .into_iter()
            .map(System::name)
            .collect();
        assert_eq!(
            names,
            [
                "cairn-memory-dev-writeback",
                "cairn-image-dev-writeback",
                "cairn-memory-uring-writeback",
                "cairn-image-uring-writeback"
            ]
        );
        let loads = |loadfile| {
            default_loads(Some(Path::new(loadfile)))
                .iter()
                .map(PeerWorkload::name)
                .collect::<Vec<_>>()
        };
        assert_eq!(loads("/"), LOADS);
        assert!(!loads("/no such file").contains(&"dbench@8".to_owned()));
    }
}
