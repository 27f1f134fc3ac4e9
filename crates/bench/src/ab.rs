//! One mechanism on and off, in turns, beside what was published about it.
//!
//! "Off" is only measured where the engine really can do without the mechanism: today that is the coordination of flushes
//! (M3), whose policy [`FlushPolicy::Each`] gives every fsync a flush of its own. For the others there is no honest "off"
//! side yet, and asking for one is an error.
use crate::report::Report;
use crate::spec::{DeviceSpec, TargetSpec};
use crate::table::{Table, number};
use crate::workloads::{Settings, Workload};
use anyhow::{bail, ensure};
use cairn_engine::FlushPolicy;
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// A mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Mechanism {
    EarlyWakeUp,
    TreeLocks,
    FlushCoordination,
    Tickets,
    CommittedItemList,
}

impl Mechanism {
    /// Its number.
    pub fn name(self) -> &'static str {
        match self {
            Mechanism::EarlyWakeUp => "M1",
            Mechanism::TreeLocks => "M2",
            Mechanism::FlushCoordination => "M3",
            Mechanism::Tickets => "M4",
            Mechanism::CommittedItemList => "M5",
        }
    }
}

impl FromStr for Mechanism {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        use Mechanism::*;
        let all = [EarlyWakeUp, TreeLocks, FlushCoordination, Tickets, CommittedItemList];
        let known = all.into_iter().find(|mechanism| mechanism.name().eq_ignore_ascii_case(text));
        known.ok_or_else(|| format!("unknown mechanism \"{text}\"; there are M1 to M5"))
    }
}

const PUBLISHED_M3: &str = "published (ext4): flushes cost about 80 % of fsync-happy, then 25-30 %, then 5-14 %";

/// Medians of both sides.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Which mechanism.
    pub mechanism: String,
    /// What was measured.
    pub workload: String,
    /// On what.
    pub target: String,
    /// What was published.
    pub published: String,
    /// Every run, off and on in turns.
    pub off: Vec<Report>,
    /// See `off`.
    pub on: Vec<Report>,
}

/// The middle of some numbers, or the mean of the two in the middle; zero of none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        length if length % 2 == 1 => sorted[length / 2],
        length => (sorted[length / 2 - 1] + sorted[length / 2]) / 2.0,
    }
}

/// Measures a mechanism.
///
/// # Errors
/// When the engine can't do without the mechanism, or a run fails.
pub fn run(mechanism: Mechanism, device: &DeviceSpec, settings: &Settings, repeat: usize) -> anyhow::Result<Comparison> {
    if mechanism != Mechanism::FlushCoordination {
        bail!("{}: the engine without this mechanism is not built yet; M3 can be measured", mechanism.name());
    }
    ensure!(repeat > 0, "at least one round is needed");
    let target = TargetSpec::Engine(device.clone());
    let (mut off, mut on) = (Vec::new(), Vec::new());
    for round in 0..repeat {
        let mut sides = [(FlushPolicy::Each, &mut off), (FlushPolicy::Auto, &mut on)];
        // Neither side always comes first.
        sides.rotate_left(round % 2);
        for (policy, reports) in sides {
            reports.push(Workload::FsyncHappy.run(&target, &Settings { policy, ..settings.clone() })?);
        }
    }
    Ok(Comparison {
        mechanism: mechanism.name().into(),
        workload: Workload::FsyncHappy.name().into(),
        target: target.name(),
        published: PUBLISHED_M3.into(),
        off,
        on,
    })
}

fn loss_percent(report: &Report) -> f64 {
    report.figures.iter().find(|figure| figure.unit == "%").map_or(0.0, |figure| figure.value)
}

fn fsync_us(report: &Report, of: impl Fn(&crate::OperationSummary) -> f64) -> f64 {
    report.operations.iter().find(|operation| operation.name == "fsync").map_or(0.0, of)
}

impl fmt::Display for Comparison {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{} on {}, medians of {} rounds", self.workload, self.target, self.on.len())?;
        writeln!(formatter)?;
        let mut table = Table::new([self.mechanism.as_str(), "off", "on", "change"]);
        let mut row = |name: &str, of: &dyn Fn(&Report) -> f64| {
            let (off, on) = (median(self.off.iter().map(of)), median(self.on.iter().map(of)));
            let change = if off == 0.0 { "-".into() } else { format!("{:+.1} %", (on / off - 1.0) * 100.0) };
            table.row([name.to_owned(), number(off), number(on), change]);
        };
        row("reads and writes per second", &|report| report.throughput.value);
        row("loss to flushes, %", &loss_percent);
        row("fsync p50, µs", &|report| fsync_us(report, |operation| operation.p50_us));
        row("fsync p99, µs", &|report| fsync_us(report, |operation| operation.p99_us));
        row("fsync max, µs", &|report| fsync_us(report, |operation| operation.max_us));
        writeln!(formatter, "{table}")?;
        writeln!(formatter, "{}", self.published)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn medians() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median([]), 0.0);
    }

    #[test]
    fn what_cannot_be_turned_off_is_refused() {
        let device = DeviceSpec::Memory { size_bytes: 64 << 20 };
        for name in ["M1", "m2", "M4", "M5"] {
            let error = run(name.parse().unwrap(), &device, &Settings::default(), 1).unwrap_err().to_string();
            assert!(error.contains("not built yet"), "{error}");
        }
        assert!("M6".parse::<Mechanism>().unwrap_err().contains("M1 to M5"));
    }

    #[test]
    fn both_sides_of_the_flush_coordination_are_measured() {
        let device = DeviceSpec::Simulated { size_bytes: 64 << 20, flush_time: Duration::from_millis(1) };
        let settings = Settings { clients: 2, duration: Duration::from_millis(50), ..Settings::default() };
        let comparison = run(Mechanism::FlushCoordination, &device, &settings, 2).unwrap();
        assert_eq!((comparison.off.len(), comparison.on.len()), (2, 2));
        let flushes = |report: &Report| report.statistics.as_ref().and_then(|all| all["fsyncs_grouped"].as_u64());
        assert!(comparison.on.iter().all(|report| flushes(report).is_some_and(|count| count > 0)));
        assert!(comparison.to_string().contains("loss to flushes"));
    }
}
