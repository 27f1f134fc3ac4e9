//! Better, worse or no clear difference: in a sign, a colour and a word, so that none of them is
//! needed.
use super::html::Html;
use super::names;
use crate::ab::{Comparison, Row};
use crate::peers::{Summary, SummaryRow};

/// What is closer to 1 than this is even.
const EVEN: f64 = 1.1;
/// A part of a whole has no meaningful ratio: 2 % would be twice as bad as 1 %.
pub const PERCENT: &str = "%";

/// How a figure stands beside that with which it is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Better,
    Even,
    Worse,
}

impl Standing {
    pub const ALL: [Standing; 3] = [Standing::Better, Standing::Even, Standing::Worse];

    /// Of a ratio above 1 for what is better.
    pub fn of(times_as_good: f64, may_be_chance: bool) -> Self {
        match times_as_good {
            _ if may_be_chance => Standing::Even,
            ratio if ratio >= EVEN => Standing::Better,
            ratio if ratio <= 1.0 / EVEN => Standing::Worse,
            _ => Standing::Even,
        }
    }

    pub fn sign(self) -> &'static str {
        match self {
            Standing::Better => "▲",
            Standing::Even => "≈",
            Standing::Worse => "▼",
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            Standing::Better => "better",
            Standing::Even => "no clear difference",
            Standing::Worse => "worse",
        }
    }

    /// The class that colours it.
    pub fn class(self) -> &'static str {
        match self {
            Standing::Better => "win",
            Standing::Even => "even",
            Standing::Worse => "loss",
        }
    }
}

/// Whether a file system is Cairn's.
pub fn is_cairn(system: &str) -> bool {
    system.starts_with("cairn")
}

fn is_buffered(system: &str) -> bool {
    system.ends_with("-buffered")
}

/// The best of the others on a device of the same kind, among the rows of one figure.
pub fn best_other<'a>(row: &SummaryRow, group: &[&'a SummaryRow]) -> Option<&'a SummaryRow> {
    let others = group.iter().copied().filter(|other| {
        !is_cairn(&other.system) && is_buffered(&other.system) == is_buffered(&row.system)
    });
    let order = |a: &&SummaryRow, b: &&SummaryRow| a.median.total_cmp(&b.median);
    if row.less_is_better { others.min_by(order) } else { others.max_by(order) }
}

/// Whether a figure belongs to the main comparison: the load's own, and how long the slow ones
/// take.
pub fn is_main(row: &SummaryRow) -> bool {
    row.unit != PERCENT
        && (row.is_main() || row.figure.contains("p99") || row.figure.contains("latency"))
}

/// How a row of Cairn's stands beside the best of the others.
pub fn of_row(row: &SummaryRow, group: &[&SummaryRow]) -> Option<Standing> {
    let times_as_good =
        row.times_as_good().filter(|_| is_cairn(&row.system) && row.unit != PERCENT)?;
    let lies_in =
        |one: &SummaryRow, other: &SummaryRow| (other.min..=other.max).contains(&one.median);
    let may_be_chance =
        best_other(row, group).is_some_and(|best| lies_in(row, best) && lies_in(best, row));
    Some(Standing::of(times_as_good, may_be_chance))
}

/// How a figure with the mechanism stands beside the one without; `None` where neither is better.
pub fn of_mechanism(row: &Row) -> Option<Standing> {
    let (off, on) = (row.off.median, row.on.median);
    if row.unit == PERCENT {
        let better = row.less_is_better? == (on < off);
        let standing = if better { Standing::Better } else { Standing::Worse };
        return Some(if row.is_distinct() { standing } else { Standing::Even });
    }
    let ratio = if row.less_is_better? { off / on } else { on / off };
    Some(if ratio.is_nan() { Standing::Even } else { Standing::of(ratio, !row.is_distinct()) })
}

/// How many figures stand how.
pub fn counts(standings: impl IntoIterator<Item = Standing>) -> [usize; 3] {
    let mut counts = [0; 3];
    for standing in standings {
        counts[standing as usize] += 1;
    }
    counts
}

/// The counts in a bar, and in words.
pub fn draw_counts(html: &mut Html, title: &str, counts: [usize; 3]) {
    let all: usize = counts.iter().sum();
    let parts = || Standing::ALL.into_iter().zip(counts);
    html.element("div", &[("class", "verdict")], |html| {
        html.leaf("b", &[], title);
        html.element("div", &[("class", "tally"), ("aria-hidden", "true")], |html| {
            for (standing, count) in parts().filter(|(_, count)| *count > 0) {
                let style = format!("flex:{count}");
                html.leaf(
                    "span",
                    &[("class", standing.class()), ("style", &style)],
                    &format!("{} {count}", standing.sign()),
                );
            }
        });
        let words: Vec<String> =
            parts().map(|(standing, count)| format!("{} {count}", standing.word())).collect();
        html.leaf("small", &[], &format!("{} of {all} figures", words.join(", ")));
    });
}

/// A figure of Cairn's, and how it stands.
pub struct Standings<'a> {
    pub row: &'a SummaryRow,
    pub standing: Standing,
}

/// Cairn's figures of the main comparison.
pub fn all<'a>(summaries: impl IntoIterator<Item = &'a Summary>) -> Vec<Standings<'a>> {
    let mut found = Vec::new();
    for summary in summaries {
        for group in summary.groups() {
            let group: Vec<&SummaryRow> = group.iter().collect();
            found.extend(
                group
                    .iter()
                    .filter(|row| is_main(row))
                    .filter_map(|row| Some(Standings { row, standing: of_row(row, &group)? })),
            );
        }
    }
    found
}

/// The figures in which Cairn is furthest ahead and furthest behind, in words.
pub fn extremes(standings: &[Standings<'_>]) -> Vec<String> {
    let with = |wanted: Standing| {
        standings.iter().filter(move |found| found.standing == wanted).map(|found| found.row)
    };
    let ratio = |row: &&SummaryRow| row.times_as_good().unwrap_or(1.0);
    let told = |what: &str, row: &SummaryRow| {
        let figure = if row.is_main() { row.unit.clone() } else { names::figure(&row.figure) };
        let times = super::ratio_chart::ratio_text(ratio(&row));
        format!(
            "{what}: {times} in \"{}\" ({figure}, {})",
            names::load(&row.workload),
            names::system(&row.system)
        )
    };
    let ahead = with(Standing::Better).max_by(|a, b| ratio(a).total_cmp(&ratio(b)));
    let behind = with(Standing::Worse).min_by(|a, b| ratio(a).total_cmp(&ratio(b)));
    [ahead.map(|row| told("Furthest ahead", row)), behind.map(|row| told("Furthest behind", row))]
        .into_iter()
        .flatten()
        .collect()
}

/// The figures of a mechanism that stand how.
pub fn of_comparison(comparison: &Comparison) -> [usize; 3] {
    counts(
        comparison.measurements.iter().flat_map(|measured| &measured.rows).filter_map(of_mechanism),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_chance_is_even() {
        assert_eq!(
            [2.0, 1.1, 1.05, 0.95, 0.9, 0.1].map(|ratio| Standing::of(ratio, false).class()),
            ["win", "win", "even", "even", "loss", "loss"]
        );
        assert_eq!(Standing::of(2.0, true), Standing::Even);
        assert_eq!(counts([Standing::Better, Standing::Worse, Standing::Better]), [2, 0, 1]);
    }
}
