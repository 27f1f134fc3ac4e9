//! Medians over the rounds, and the ratio of each file system to the best of the kernel's; for a
//! figure of which less is better the best one is the least.
use super::{Candidate, DirectIo, PeersSettings, Sample, versions};
use crate::ab::median;
use crate::disturbance::Disturbance;
use crate::machine::Machine;
use crate::table::{Table, markdown_table, number};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The name of the main figure of each load.
pub const THROUGHPUT: &str = "throughput";

fn throughput() -> String {
    THROUGHPUT.into()
}

/// One figure of one file system under one load. Resources are those of the whole machine, per
/// operation.
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
    /// How many times as good as the best median of a file system that is not Cairn: above 1 is
    /// better, also of a figure of which less is better. `None` when there is no other.
    #[serde(default)]
    pub times_as_good: Option<f64>,
    /// In older results, instead: the median divided by the best one, whatever is better.
    #[serde(default, skip_serializing)]
    pub ratio_to_best_peer: Option<f64>,
    pub cpu_us_per_operation: f64,
    pub context_switches_per_operation: f64,
    /// Medians, of the whole program, also with what it prepared: how long it ran, and the CPU time
    /// of Cairn's server, of the callers, and of the kernel beside both.
    #[serde(default)]
    pub seconds: LoadSeconds,
}

/// How long a load ran, and the CPU time that it took, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct LoadSeconds {
    pub wall: f64,
    pub server_cpu: f64,
    pub caller_cpu: f64,
    pub kernel_cpu: f64,
}

impl LoadSeconds {
    /// What the columns are called.
    pub(crate) const HEADINGS: [&str; 4] = ["wall s", "CPU s: server", "callers", "kernel"];

    fn of(samples: &[&Sample]) -> Self {
        let of = |value: fn(&Sample) -> f64| median(samples.iter().map(|sample| value(sample)));
        Self {
            wall: of(|sample| sample.wall_seconds),
            server_cpu: of(|sample| sample.server_cpu_seconds),
            caller_cpu: of(|sample| sample.caller_cpu_seconds),
            kernel_cpu: of(|sample| sample.kernel_cpu_seconds),
        }
    }

    pub(crate) fn cells(&self) -> [String; 4] {
        [self.wall, self.server_cpu, self.caller_cpu, self.kernel_cpu]
            .map(|seconds| format!("{seconds:.2}"))
    }
}

impl SummaryRow {
    /// The load, the figure unless it is the main one, and its unit.
    pub fn label(&self) -> String {
        let name =
            if self.figure == THROUGHPUT { String::new() } else { format!(", {}", self.figure) };
        let hint = if self.less_is_better { " (less is better)" } else { "" };
        format!("{}{name}, {}{hint}", self.workload, self.unit)
    }

    /// Whether it is the load's main figure.
    pub fn is_main(&self) -> bool {
        self.figure == THROUGHPUT
    }

    /// How many times as good as the best peer it is, whether more or less is better.
    pub fn times_as_good(&self) -> Option<f64> {
        let of_older = || {
            self.ratio_to_best_peer
                .filter(|ratio| *ratio > 0.0)
                .map(|ratio| if self.less_is_better { 1.0 / ratio } else { ratio })
        };
        self.times_as_good.or_else(of_older)
    }
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
    /// Whether loop devices bypass the host's page cache.
    pub direct_io: bool,
    /// Whether there is another row for each that doesn't.
    #[serde(default)]
    pub buffered_too: bool,
    pub kernel: String,
    pub cpus: usize,
    pub version: String,
    /// What else the machine did meanwhile.
    #[serde(default)]
    pub disturbance: Option<Disturbance>,
    /// Loads that could not run here, and why.
    #[serde(default)]
    pub left_out: Vec<String>,
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

/// A figure of a load: its name, its unit, and whether less of it is better.
#[derive(Clone, PartialEq)]
struct Kind {
    name: String,
    unit: String,
    less_is_better: bool,
}

impl Kind {
    /// The figures that the samples of a load have, the main one first.
    fn all_in(samples: &[&Sample]) -> Vec<Kind> {
        let mut kinds: Vec<Kind> = Vec::new();
        if let Some(first) = samples.first() {
            kinds.push(Kind {
                name: throughput(),
                unit: first.unit.clone(),
                less_is_better: first.less_is_better,
            });
        }
        for figure in samples.iter().flat_map(|sample| &sample.figures) {
            if !kinds.iter().any(|kind| kind.name == figure.name) {
                kinds.push(Kind {
                    name: figure.name.clone(),
                    unit: figure.unit.clone(),
                    less_is_better: figure.less_is_better,
                });
            }
        }
        kinds
    }

    fn of(&self, sample: &Sample) -> Option<f64> {
        if self.name == THROUGHPUT {
            return Some(sample.value);
        }
        sample.figures.iter().find(|figure| figure.name == self.name).map(|figure| figure.value)
    }
}

fn row(kind: &Kind, candidate: &Candidate, samples: &[&Sample]) -> Option<SummaryRow> {
    let own: Vec<&Sample> =
        samples.iter().copied().filter(|sample| sample.system == candidate.label).collect();
    let values: Vec<f64> = own.iter().filter_map(|sample| kind.of(sample)).collect();
    let per_operation = |of: fn(&Sample) -> f64| {
        median(own.iter().map(|sample| of(sample) / sample.completed.max(1) as f64))
    };
    let first = own.first().filter(|_| !values.is_empty())?;
    Some(SummaryRow {
        workload: first.workload.clone(),
        clients: first.clients,
        figure: kind.name.clone(),
        less_is_better: kind.less_is_better,
        system: candidate.label.clone(),
        unit: kind.unit.clone(),
        median: median(values.iter().copied()),
        min: values.iter().copied().fold(f64::INFINITY, f64::min),
        max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        times_as_good: None,
        ratio_to_best_peer: None,
        cpu_us_per_operation: per_operation(|sample| sample.machine_cpu_seconds * 1e6),
        context_switches_per_operation: per_operation(|sample| {
            sample.machine_context_switches as f64
        }),
        seconds: LoadSeconds::of(&own),
    })
}

/// The rows of one figure. An image counts as a device with direct I/O.
fn rows_of(kind: &Kind, candidates: &[Candidate], samples: &[&Sample]) -> Vec<SummaryRow> {
    let mut rows: Vec<(&Candidate, SummaryRow)> = candidates
        .iter()
        .filter_map(|candidate| Some((candidate, row(kind, candidate, samples)?)))
        .collect();
    let best = |direct_io: bool| {
        let peers = rows.iter().filter(|(candidate, _)| {
            !candidate.system.is_cairn() && candidate.direct_io == direct_io
        });
        let medians = peers.map(|(_, row)| row.median);
        if kind.less_is_better {
            medians.fold(f64::INFINITY, f64::min)
        } else {
            medians.fold(0.0, f64::max)
        }
    };
    let bests = [best(false), best(true)];
    for (candidate, row) in &mut rows {
        let best = bests[usize::from(candidate.direct_io)];
        let comparable = best > 0.0 && best.is_finite() && row.median > 0.0;
        row.times_as_good = comparable
            .then(|| if kind.less_is_better { best / row.median } else { row.median / best });
    }
    rows.into_iter().map(|(_, row)| row).collect()
}

fn all_rows(workloads: &[String], candidates: &[Candidate], samples: &[Sample]) -> Vec<SummaryRow> {
    let mut rows = Vec::new();
    for workload in workloads {
        let samples: Vec<&Sample> =
            samples.iter().filter(|sample| sample.workload == *workload).collect();
        rows.extend(
            Kind::all_in(&samples).iter().flat_map(|kind| rows_of(kind, candidates, &samples)),
        );
    }
    rows
}

impl Summary {
    /// Of all samples.
    pub(super) fn new(settings: &PeersSettings, date: String, samples: Vec<Sample>) -> Self {
        let workloads: Vec<String> =
            settings.workloads.iter().map(super::PeerWorkload::name).collect();
        let of_systems = settings.systems.iter().flat_map(|system| system.commands());
        let of_workloads =
            settings.workloads.iter().flat_map(|workload| workload.commands().iter().copied());
        let programs: Vec<&str> =
            of_systems.chain(of_workloads).map(|(program, _)| program).collect();
        let machine = Machine::here(Some(&settings.folder));
        Self {
            date,
            command: settings.command.clone(),
            tools: versions::of(&programs),
            rounds: settings.repeat,
            clients: settings.clients,
            seconds: settings.duration.as_secs_f64(),
            size_bytes: settings.size_bytes,
            direct_io: settings.direct_io != DirectIo::No,
            buffered_too: settings.direct_io == DirectIo::Both,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            cpus: machine.cpus,
            machine,
            version: env!("CARGO_PKG_VERSION").into(),
            disturbance: None,
            left_out: Vec::new(),
            rows: all_rows(&workloads, &settings.candidates(), &samples),
            samples,
        }
    }

    /// The rows of the same figure of the same load together, in order.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &[SummaryRow]> {
        self.rows
            .chunk_by(|one, other| one.workload == other.workload && one.figure == other.figure)
    }

    /// How loop devices were attached, before the words "direct I/O".
    pub(crate) fn direct_io_text(&self) -> &'static str {
        match (self.direct_io, self.buffered_too) {
            (_, true) => "with and without",
            (true, false) => "with",
            (false, false) => "without",
        }
    }

    /// One row for each figure and one column for each file system, as a table in Markdown. The
    /// last columns are Cairn's ratios to the best of the others: above 1 Cairn is better, also
    /// where less is better.
    pub fn markdown(&self) -> String {
        let mut systems: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !systems.contains(&row.system.as_str()) {
                systems.push(&row.system);
            }
        }
        let has_peers = systems.iter().any(|system| !system.starts_with("cairn"));
        let cairns: Vec<&str> = systems
            .iter()
            .copied()
            .filter(|system| system.starts_with("cairn") && has_peers)
            .collect();
        let mut headings = vec!["workload".to_owned()];
        headings.extend(systems.iter().map(|system| (*system).to_owned()));
        headings.extend(
            cairns.iter().map(|system| format!("{system}, times as good as the best other")),
        );
        let cells_of = |group: &[SummaryRow]| {
            let of = |system: &str| group.iter().find(|row| row.system == system);
            let shown = |cell: Option<String>| cell.unwrap_or_else(|| "-".into());
            let mut cells = vec![group[0].label()];
            cells.extend(
                systems.iter().map(|system| shown(of(system).map(|row| number(row.median)))),
            );
            cells.extend(cairns.iter().map(|system| {
                shown(of(system).and_then(|row| Some(format!("{:.2}", row.times_as_good()?))))
            }));
            cells
        };
        markdown_table(&headings, &self.groups().map(cells_of).collect::<Vec<_>>())
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
            self.direct_io_text(),
        )?;
        writeln!(
            formatter,
            "× as good: how many times as good as the best other; above 1 is better, also of latencies"
        )?;
        if let Some(disturbance) = self.disturbance {
            writeln!(formatter, "{}", disturbance.line())?;
        }
        for why in &self.left_out {
            writeln!(formatter, "{why}")?;
        }
        for group in self.groups() {
            let first = &group[0];
            let is_main = first.is_main();
            let name = match (is_main, first.clients) {
                (true, 1) => format!("{}, 1 client", first.workload),
                (true, clients) => format!("{}, {clients} clients", first.workload),
                (false, _) => format!("  {}", first.figure),
            };
            let heading = format!(
                "{name} ({}{})",
                first.unit,
                if first.less_is_better { ", less is better" } else { "" }
            );
            let of_load = ["CPU µs/op", "switches/op"]
                .into_iter()
                .chain(LoadSeconds::HEADINGS)
                .filter(|_| is_main);
            let headings = [heading.as_str(), "median", "min", "max", "× as good"];
            let mut table = Table::new(headings.into_iter().chain(of_load));
            for row in group {
                let ratio =
                    row.times_as_good().map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
                let cells = [number(row.median), number(row.min), number(row.max), ratio];
                let resources =
                    [row.cpu_us_per_operation, row.context_switches_per_operation].map(number);
                let resources =
                    resources.into_iter().chain(row.seconds.cells()).filter(|_| is_main);
                table.row([row.system.clone()].into_iter().chain(cells).chain(resources));
            }
            write!(formatter, "\n{table}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Mounting, PeerFigure, System, Transport};
    use super::*;

    const PLAIN: Mounting = Mounting { transport: Transport::Default, writeback: false };
    const CAIRN_IMAGE: System = System::CairnImage(PLAIN);
    const CAIRN_LOOP: System = System::CairnLoop(PLAIN);

    fn sample(system: System, value: f64) -> Sample {
        Sample {
            round: 1,
            system: system.name(),
            workload: "fsync-write".into(),
            clients: 8,
            figures: vec![PeerFigure {
                name: "fsync p99".into(),
                value: value / 10.0,
                unit: "ms".into(),
                less_is_better: true,
            }],
            latencies: Vec::new(),
            statistics_before: None,
            statistics_after: None,
            value,
            unit: "fsyncs/s".into(),
            less_is_better: false,
            completed: 100,
            wall_seconds: 4.0,
            machine_cpu_seconds: 0.5,
            machine_context_switches: 300,
            server_cpu_seconds: 0.25,
            caller_cpu_seconds: 1.5,
            kernel_cpu_seconds: 0.125,
            report: None,
        }
    }

    #[test]
    fn ratios_are_to_the_best_peer() {
        let candidates = Candidate::all(&[System::Ext4, System::Xfs, CAIRN_IMAGE], DirectIo::Yes);
        let values = [
            (System::Ext4, [90.0, 100.0, 130.0]),
            (System::Xfs, [50.0, 40.0, 60.0]),
            (CAIRN_IMAGE, [200.0, 150.0, 300.0]),
        ];
        let samples: Vec<Sample> = values
            .iter()
            .flat_map(|(system, values)| values.map(|value| sample(*system, value)))
            .collect();
        let workloads = ["fsync-write".to_owned(), "dbench".to_owned()];
        let rows = all_rows(&workloads, &candidates, &samples);
        let figures: Vec<_> =
            rows.iter().map(|row| (row.median, row.min, row.max, row.times_as_good())).collect();
        let throughputs = [
            (100.0, 90.0, 130.0, Some(1.0)),
            (50.0, 40.0, 60.0, Some(0.5)),
            (200.0, 150.0, 300.0, Some(2.0)),
        ];
        let latencies = [
            (10.0, 9.0, 13.0, Some(0.5)),
            (5.0, 4.0, 6.0, Some(1.0)),
            (20.0, 15.0, 30.0, Some(0.25)),
        ];
        assert_eq!(figures, [throughputs, latencies].concat());
        assert_eq!(
            (rows[0].cpu_us_per_operation, rows[0].context_switches_per_operation),
            (5000.0, 3.0)
        );
        assert_eq!((rows[3].figure.as_str(), rows[3].less_is_better), ("fsync p99", true));
        let alone = all_rows(&workloads, &candidates[2..], &samples);
        assert_eq!(alone[0].times_as_good(), None);
    }

    #[test]
    fn of_seconds_the_least_is_the_best() {
        let candidates = Candidate::all(&[System::Ext4, System::Xfs, CAIRN_IMAGE], DirectIo::Yes);
        let values = [
            (System::Ext4, [3.0, 2.0, 4.0]),
            (System::Xfs, [8.0, 6.0, 7.0]),
            (CAIRN_IMAGE, [1.5, 1.0, 9.0]),
        ];
        let timed = |system, value| Sample {
            unit: "s".into(),
            less_is_better: true,
            figures: Vec::new(),
            ..sample(system, value)
        };
        let samples: Vec<Sample> = values
            .iter()
            .flat_map(|(system, values)| values.map(|value| timed(*system, value)))
            .collect();
        let rows = all_rows(&["fsync-write".into()], &candidates, &samples);
        let ratios: Vec<_> =
            rows.iter().map(|row| (row.median, row.less_is_better, row.times_as_good())).collect();
        assert_eq!(
            ratios,
            [(3.0, true, Some(1.0)), (7.0, true, Some(3.0 / 7.0)), (1.5, true, Some(2.0))]
        );
        assert_eq!(
            rows[0].seconds,
            LoadSeconds { wall: 4.0, server_cpu: 0.25, caller_cpu: 1.5, kernel_cpu: 0.125 }
        );
        assert!(rows[0].label().contains("s (less is better)"), "{}", rows[0].label());
        let settings = PeersSettings {
            systems: vec![System::Ext4, CAIRN_IMAGE],
            workloads: vec!["fsync-write".parse().unwrap()],
            ..PeersSettings::for_tests()
        };
        let left_out = vec!["git is left out: git (package git) is not installed".to_owned()];
        let summary = Summary { left_out, ..Summary::new(&settings, String::new(), samples) };
        let text = summary.to_string();
        assert!(
            text.contains("(s, less is better)")
                && text.contains("CPU s: server")
                && text.contains("git is left out"),
            "{text}"
        );
    }

    #[test]
    fn devices_are_compared_with_their_like() {
        let candidates = Candidate::all(&[System::Ext4, CAIRN_LOOP], DirectIo::Both);
        let value_of = |label: &str| {
            ["ext4", "cairn-loop", "ext4-buffered", "cairn-loop-buffered"]
                .iter()
                .position(|name| *name == label)
        };
        let samples: Vec<Sample> = candidates
            .iter()
            .map(|candidate| Sample {
                system: candidate.label.clone(),
                ..sample(candidate.system, (value_of(&candidate.label).unwrap() + 1) as f64)
            })
            .collect();
        let rows = all_rows(&["fsync-write".into()], &candidates, &samples);
        let ratios: Vec<Option<f64>> = rows.iter().take(4).map(SummaryRow::times_as_good).collect();
        assert_eq!(ratios, [Some(1.0), Some(2.0), Some(1.0), Some(4.0 / 3.0)]);
    }

    #[test]
    fn a_summary_is_shown_and_read_back() {
        let workloads = vec!["fsync-write".parse().unwrap()];
        let settings = PeersSettings {
            systems: vec![System::Ext4, CAIRN_IMAGE],
            workloads,
            ..PeersSettings::for_tests()
        };
        let samples = vec![sample(System::Ext4, 200.0), sample(CAIRN_IMAGE, 300.0)];
        let summary = Summary::new(&settings, "2026-01-31T12:00:00Z".into(), samples);
        let markdown = summary.markdown();
        assert!(
            markdown.contains("| workload | ext4 | cairn-image | cairn-image, times as good as the best other |\n|---|---:|---:|---:|\n"),
            "{markdown}"
        );
        assert!(markdown.contains("| fsync-write, fsyncs/s | 200 | 300 | 1.50 |\n"), "{markdown}");
        assert!(
            markdown.contains("fsync p99, ms (less is better) | 20.0 | 30.0 | 0.67 |"),
            "{markdown}"
        );
        let text = summary.to_string();
        assert!(text.contains("switches/op") && text.contains("less is better"), "{text}");
        assert!(
            text.contains("above 1 is better, also of latencies") && !text.contains("busy"),
            "{text}"
        );
        let busy = Summary {
            disturbance: Some(Disturbance {
                load_average: 15.0,
                cpu_share: 0.5,
                stolen_share: 0.0,
            }),
            ..summary
        };
        assert!(busy.to_string().contains("The machine was busy"), "{busy}");
        let summary = busy;
        let read: Summary =
            serde_json::from_str(&serde_json::to_string(&summary).unwrap()).unwrap();
        assert_eq!(read.markdown(), markdown);
    }
}
