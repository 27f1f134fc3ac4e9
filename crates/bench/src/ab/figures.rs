//! Which figures of a report a comparison shows, and how they are found in it.
use crate::engine_figures;
use crate::report::Report;

/// A quantile of a latency, or its average.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantile {
    Average,
    P50,
    P90,
    P99,
    Max,
}

/// Where a figure comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Throughput,
    /// A figure with this name.
    Figure(&'static str),
    /// The figure in per cent.
    Percent,
    /// A latency of an operation, in µs.
    Latency(&'static str, Quantile),
    /// The longest of all operations, in ms.
    Longest,
    /// CPU time of this process, in µs.
    CpuPerOperation,
    SwitchesPerOperation,
    Fsyncs,
    Fallbacks,
    FsyncsPerFlush,
    LockWaits,
    TicketsWaited,
}

/// A figure that a comparison shows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub name: &'static str,
    pub unit: &'static str,
    pub source: Source,
    /// Whether a smaller one is the better one; `None` when neither is.
    pub less_is_better: Option<bool>,
    /// What was published about it; empty for nothing.
    pub published: &'static str,
}

impl Wanted {
    /// A figure of which more is better.
    pub(super) const fn more(name: &'static str, unit: &'static str, source: Source) -> Self {
        Self { name, unit, source, less_is_better: Some(false), published: "" }
    }

    /// A figure of which less is better.
    pub(super) const fn less(name: &'static str, unit: &'static str, source: Source) -> Self {
        Self { name, unit, source, less_is_better: Some(true), published: "" }
    }

    /// A figure that explains others.
    pub(super) const fn neutral(name: &'static str, unit: &'static str, source: Source) -> Self {
        Self { name, unit, source, less_is_better: None, published: "" }
    }

    pub(super) const fn published(self, published: &'static str) -> Self {
        Self { published, ..self }
    }

    /// The figure in a report.
    pub(super) fn of(&self, report: &Report) -> Option<f64> {
        let statistics = report.statistics.as_ref();
        let operations = report.completed.max(1) as f64;
        match self.source {
            Source::Throughput => Some(report.throughput.value),
            Source::Figure(name) => {
                report.figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
            }
            Source::Percent => {
                report.figures.iter().find(|figure| figure.unit == "%").map(|figure| figure.value)
            }
            Source::Latency(name, quantile) => {
                let operation =
                    report.operations.iter().find(|operation| operation.name == name)?;
                match quantile {
                    Quantile::Average => Some(operation.average_us),
                    Quantile::P50 => operation.p50_us,
                    Quantile::P90 => operation.p90_us,
                    Quantile::P99 => operation.p99_us,
                    Quantile::Max => Some(operation.max_us),
                }
            }
            Source::Longest => {
                report.operations.iter().map(|operation| operation.max_us / 1e3).reduce(f64::max)
            }
            Source::CpuPerOperation => Some(report.cpu_seconds * 1e6 / operations),
            Source::SwitchesPerOperation => Some(report.context_switches as f64 / operations),
            Source::Fsyncs => statistics.map(|all| engine_figures::fsyncs(all) as f64),
            Source::Fallbacks => statistics.map(|all| {
                engine_figures::fallbacks(all).iter().map(|(_, count)| *count as f64).sum()
            }),
            Source::FsyncsPerFlush => statistics.map(engine_figures::fsyncs_per_log_flush),
            Source::LockWaits => statistics.map(|all| engine_figures::lock_waits(all) as f64),
            Source::TicketsWaited => {
                statistics.map(|all| engine_figures::count(all, "tickets_waited") as f64)
            }
        }
    }
}

/// What every comparison reports about the process.
pub(super) const RESOURCES: [Wanted; 2] = [
    Wanted::less("CPU per op", "µs", Source::CpuPerOperation),
    Wanted::less("switches per op", "", Source::SwitchesPerOperation),
];
