//! The result of a comparison: medians of both sides, their change, and every run.
use super::figures::Wanted;
use crate::report::{Origin, Report};
use crate::table::{Table, number};
use serde::{Deserialize, Serialize};
use std::fmt;

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

/// The runs of one side in three numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    fn of(values: &[f64]) -> Option<Self> {
        let min = values.iter().copied().reduce(f64::min)?;
        Some(Self {
            median: median(values.iter().copied()),
            min,
            max: values.iter().copied().fold(min, f64::max),
        })
    }
}

/// One figure on both sides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What it measures.
    pub figure: String,
    /// Of what.
    pub unit: String,
    /// Whether a smaller one is the better one; `None` when neither is.
    pub less_is_better: Option<bool>,
    /// Without the mechanism.
    pub off: Spread,
    /// With it.
    pub on: Spread,
    /// What was published about it; empty for nothing.
    pub published: String,
}

impl Row {
    /// `None` when a report of either side lacks the figure.
    pub(super) fn of(wanted: &Wanted, off: &[Report], on: &[Report]) -> Option<Self> {
        let spread = |reports: &[Report]| {
            Spread::of(
                &reports.iter().map(|report| wanted.of(report)).collect::<Option<Vec<f64>>>()?,
            )
        };
        Some(Self {
            figure: wanted.name.into(),
            unit: wanted.unit.into(),
            less_is_better: wanted.less_is_better,
            off: spread(off)?,
            on: spread(on)?,
            published: wanted.published.into(),
        })
    }

    /// How the mechanism changes the median, in words: in per cent, or in points where the figure
    /// is one in per cent. Where the ranges of both sides overlap, a ~ follows.
    pub fn change(&self) -> String {
        let (off, on) = (self.off.median, self.on.median);
        let change = match () {
            () if self.unit == "%" => format!("{:+.1} points", on - off),
            () if off == on => "0 %".into(),
            () if off == 0.0 => "-".into(),
            () if on / off >= 10.0 => format!("{} times", number(on / off)),
            () => format!("{:+.1} %", (on / off - 1.0) * 100.0),
        };
        if self.is_distinct() { change } else { format!("{change} ~") }
    }

    /// Whether the sides' ranges have nothing in common.
    pub fn is_distinct(&self) -> bool {
        self.off.max < self.on.min || self.on.max < self.off.min
    }

    /// The figure's name with its unit.
    pub fn label(&self) -> String {
        if self.unit.is_empty() {
            self.figure.clone()
        } else {
            format!("{}, {}", self.figure, self.unit)
        }
    }
}

/// One load on both sides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// What is measured.
    pub name: String,
    /// Which load.
    pub load: String,
    /// On what.
    pub target: String,
    /// Threads.
    pub clients: usize,
    /// The figures.
    pub rows: Vec<Row>,
    /// Every run without the mechanism.
    pub off: Vec<Report>,
    /// Every run with it.
    pub on: Vec<Report>,
}

/// All that was measured of a mechanism.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Which mechanism: M1 to M5.
    pub mechanism: String,
    /// What it is.
    pub title: String,
    /// What happens without it.
    pub off: String,
    /// What was published.
    pub published: String,
    /// Version of the program.
    pub version: String,
    /// Runs on each side.
    pub rounds: usize,
    /// Time of a run.
    pub seconds: f64,
    /// When, where and how.
    pub origin: Origin,
    /// The loads.
    pub measurements: Vec<Measured>,
}

impl Measured {
    fn table(&self, mechanism: &str) -> Table {
        let mut table = Table::new([mechanism, "off", "on", "change", "published"]);
        for row in &self.rows {
            let sides = [number(row.off.median), number(row.on.median), row.change()];
            table.row([row.label()].into_iter().chain(sides).chain([row.published.clone()]));
        }
        table
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mechanism, title, off, rounds, seconds, .. } = self;
        writeln!(formatter, "{mechanism}, {title}; off: {off}")?;
        writeln!(
            formatter,
            "medians of {rounds} rounds of {seconds} s on each side, in turns; ~: the ranges of both sides overlap"
        )?;
        let machine = &self.origin.machine;
        writeln!(
            formatter,
            "{}, {} CPUs, {}, {}",
            machine.cpu_model, machine.cpus, machine.kernel, self.origin.date
        )?;
        if let Some(warning) = self.origin.warning() {
            writeln!(formatter, "{warning}")?;
        }
        for measured in &self.measurements {
            writeln!(
                formatter,
                "\n{} ({})\n{}",
                measured.name,
                measured.target,
                measured.table(mechanism)
            )?;
        }
        writeln!(formatter, "published: {}", self.published)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(unit: &str, off: f64, on: f64) -> Row {
        let spread = |value: f64| Spread { median: value, min: value * 0.9, max: value * 1.1 };
        let (figure, published) = ("rate".into(), String::new());
        Row {
            figure,
            unit: unit.into(),
            less_is_better: Some(false),
            off: spread(off),
            on: spread(on),
            published,
        }
    }

    #[test]
    fn medians_and_spreads() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median([]), 0.0);
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn changes_are_told_in_fitting_words() {
        assert_eq!(row("1/s", 100.0, 110.0).change(), "+10.0 % ~");
        assert_eq!(row("1/s", 100.0, 150.0).change(), "+50.0 %");
        assert_eq!(row("%", 80.0, 14.0).change(), "-66.0 points");
        assert_eq!(row("1/s", 0.0, 3.0).change(), "-");
        assert_eq!(row("1/s", 0.0, 0.0).change(), "0 % ~");
        assert_eq!(row("1/s", 1.0, 25.0).change(), "25.0 times");
        assert!(row("1/s", 100.0, 200.0).is_distinct() && !row("1/s", 100.0, 110.0).is_distinct());
        assert_eq!(
            (row("1/s", 1.0, 1.0).label(), row("", 1.0, 1.0).label()),
            ("rate, 1/s".into(), "rate".into())
        );
    }
}
