//! The parts of the page beside the comparison of file systems: single runs, mechanisms off and on,
//! and where results come from.
use super::html::{Html, fold, table};
use super::latency_chart::{self, Curve};
use super::ratio_chart::{self, Bar, Group};
use super::standing::{self, PERCENT};
use super::{names, stage_chart};
use crate::ab::{Comparison, Measured, Row};
use crate::disturbance::Disturbance;
use crate::machine::Machine;
use crate::report::{OperationSummary, Origin, Report};
use crate::table::{known_microseconds, number};

const CURVES_MAX: usize = 5;

pub fn pair(name: &str, value: String) -> Vec<String> {
    vec![name.into(), value]
}

/// The command, the machine and the versions behind figures, and the file that held them.
pub fn origin(
    html: &mut Html,
    (command, date, machine, disturbance): (&[String], &str, &Machine, Option<Disturbance>),
    more: Vec<Vec<String>>,
    source: &str,
) {
    let known = |name: &str, value: &str| (!value.is_empty()).then(|| pair(name, value.to_owned()));
    let mut rows: Vec<Vec<String>> = [known("date", date), known("processor", &machine.cpu_model)]
        .into_iter()
        .flatten()
        .collect();
    if machine.cpus > 0 {
        rows.push(pair("processors", machine.cpus.to_string()));
        rows.push(pair(
            "memory",
            format!("{} GiB", number(machine.memory_bytes as f64 / f64::from(1 << 30))),
        ));
    }
    rows.extend(
        [known("kernel", &machine.kernel), known("disk", &machine.device)].into_iter().flatten(),
    );
    rows.push(pair(
        "other programs meanwhile",
        disturbance.map_or_else(|| "not recorded".into(), disturbance_text),
    ));
    rows.extend(more);
    rows.push(pair("file", source.to_owned()));
    fold(html, "Command, machine and versions", |html| {
        if !command.is_empty() {
            html.element("pre", &[("tabindex", "0")], |html| {
                html.leaf("code", &[], &command.join(" "))
            });
        }
        table(html, &["", ""], &rows);
    });
}

fn disturbance_text(seen: Disturbance) -> String {
    let Disturbance { load_average, cpu_share, stolen_share } = seen;
    format!(
        "{:.1} % of the CPU time, other machines {:.1} %, load average {load_average:.1}",
        cpu_share * 100.0,
        stolen_share * 100.0
    )
}

/// The parts of a list that have the same key, in the order in which the keys appear.
pub fn grouped<'a, T, K: PartialEq>(
    items: &'a [T],
    key: impl Fn(&'a T) -> K,
) -> Vec<(K, Vec<&'a T>)> {
    let mut groups: Vec<(K, Vec<&'a T>)> = Vec::new();
    for item in items {
        let own = key(item);
        match groups.iter_mut().find(|(known, _)| *known == own) {
            Some((_, group)) => group.push(item),
            None => groups.push((own, vec![item])),
        }
    }
    groups
}

/// Mechanisms off and on: the outcome of each in a line, and all of it below when it is opened.
pub fn comparisons(html: &mut Html, comparisons: &[(&Comparison, &str)]) {
    if comparisons.is_empty() {
        return;
    }
    html.element("section", &[], |html| {
        html.leaf("h2", &[], "Each mechanism, on beside off");
        for (comparison, source) in comparisons {
            let title = format!("{}: {}", comparison.mechanism, comparison.title);
            standing::draw_counts(html, &title, standing::of_comparison(comparison));
            fold(
                html,
                &format!("{}: loads, ranges, what was published", comparison.mechanism),
                |html| {
                    mechanism(html, comparison, source);
                },
            );
        }
    });
}

fn mechanism(html: &mut Html, comparison: &Comparison, source: &str) {
    html.leaf("p", &[], &format!("Off: {}.", comparison.off));
    html.leaf("p", &[], &format!("Published: {}.", comparison.published));
    let note = format!(
        "Medians of {} rounds of {} s on each side, in turns. A bar shows how many times as good it is with the mechanism as without, the thin line \
         the range of all rounds with it; ~ stands where the ranges of both sides overlap.",
        comparison.rounds, comparison.seconds
    );
    html.leaf("p", &[("class", "note")], &note);
    for measured in &comparison.measurements {
        html.leaf("h3", &[], &measured.name);
        html.leaf("p", &[("class", "note")], &measured.target);
        ratio_chart::draw(html, &[measured_group(measured)]);
        let headings = [comparison.mechanism.as_str(), "off", "on", "change", "published"];
        table(html, &headings, &measured.rows.iter().map(comparison_cells).collect::<Vec<_>>());
    }
    let more = vec![pair("Cairn", comparison.version.clone())];
    origin(html, parts_of(&comparison.origin), more, source);
}

fn measured_group(measured: &Measured) -> Group {
    const PLACE: usize = 4;
    let bars = measured.rows.iter().filter(|row| row.unit != PERCENT).filter_map(|row| {
        let on = [row.on.median, row.on.min, row.on.max];
        let bar = Bar::new(
            row.figure.clone(),
            PLACE,
            on,
            row.off.median,
            row.less_is_better?,
            &row.unit,
        )?;
        Some(Bar { standing: standing::of_mechanism(row), ..bar })
    });
    Group { heading: String::new(), bars: bars.collect() }
}

/// The cells of a figure on both sides.
pub fn comparison_cells(row: &Row) -> Vec<String> {
    vec![
        row.label(),
        number(row.off.median),
        number(row.on.median),
        row.change(),
        row.published.clone(),
    ]
}

fn parts_of(origin: &Origin) -> (&[String], &str, &Machine, Option<Disturbance>) {
    (&origin.command, &origin.date, &origin.machine, origin.disturbance)
}

/// The name of a run's load, with its clients.
fn run_name(report: &Report) -> String {
    names::load(&format!("{}@{}", report.workload, report.clients))
}

/// Single runs: one line for each, and all of it when it is opened.
pub fn runs(html: &mut Html, runs: &[(&Report, &str)]) {
    if runs.is_empty() {
        return;
    }
    html.element("section", &[], |html| {
        html.leaf("h2", &[], "Single loads");
        for (target, runs) in grouped(runs, |(report, _)| &report.target) {
            html.leaf("h3", &[], target);
            html.element("table", &[("class", "main")], |html| {
                html.element("tbody", &[], |html| {
                    runs.iter().for_each(|(report, _)| run_row(html, report))
                });
            });
            for (report, source) in runs {
                fold(html, &run_name(report), |html| run(html, report, source));
            }
        }
    });
}

/// How long the operation takes that took most of the time.
fn run_row(html: &mut Html, report: &Report) {
    html.element("tr", &[("class", "first")], |html| {
        html.element("th", &[("scope", "row")], |html| html.leaf("b", &[], &run_name(report)));
        html.element("td", &[], |html| {
            html.leaf("span", &[], &number(report.throughput.value));
            html.leaf("small", &[], &report.throughput.unit);
        });
        let slowest = report.operations.iter().max_by(|a, b| {
            (a.average_us * a.count as f64).total_cmp(&(b.average_us * b.count as f64))
        });
        html.element("td", &[], |html| {
            let Some(operation) = slowest else { return };
            html.leaf("span", &[], &known_microseconds(operation.p99_us));
            html.leaf("small", &[], &format!("{}, 99 % are faster", operation.name));
        });
    });
}

/// A single run.
fn run(html: &mut Html, report: &Report, source: &str) {
    let per_operation = |value: f64| number(value / report.completed.max(1) as f64);
    let mut rows = vec![
        pair("threads", report.clients.to_string()),
        pair("time", format!("{} s", number(report.seconds))),
    ];
    let figures = [&report.throughput].into_iter().chain(&report.figures);
    rows.extend(
        figures
            .map(|figure| pair(&figure.name, format!("{} {}", number(figure.value), figure.unit))),
    );
    rows.push(pair(
        "CPU time of the process per operation",
        format!("{} µs", per_operation(report.cpu_seconds * 1e6)),
    ));
    rows.push(pair(
        "context switches of the process per operation",
        per_operation(report.context_switches as f64),
    ));
    table(html, &["figure", ""], &rows);
    let mut operations: Vec<&OperationSummary> = report.operations.iter().collect();
    operations.sort_by(|a, b| {
        (b.average_us * b.count as f64).total_cmp(&(a.average_us * a.count as f64))
    });
    let shown = operations.iter().take(CURVES_MAX).enumerate();
    let curves: Vec<Curve> = shown
        .filter_map(|(place, operation)| Curve::new(operation.name.clone(), place, &[operation]))
        .collect();
    latency_chart::draw(html, "Latencies of the operations that took most of the time", &curves);
    if let Some(statistics) = &report.statistics {
        stage_chart::draw(html, "Where the time of an fsync goes", statistics);
    }
    let unknown = Origin::default();
    let from = report.origin.as_ref().unwrap_or(&unknown);
    origin(html, parts_of(from), vec![pair("Cairn", report.version.clone())], source);
}
