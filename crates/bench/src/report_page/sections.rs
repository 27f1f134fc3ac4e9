//! The sections of the page: a comparison of file systems, a mechanism off and on, a single run.
use super::html::{Html, table};
use super::latency_chart::{self, Curve};
use super::palette::Palette;
use super::ratio_chart::{self, Bar, Group};
use super::stage_chart;
use crate::ab::{Comparison, Measured, Row};
use crate::engine_figures;
use crate::machine::Machine;
use crate::peers::{Sample, Summary, SummaryRow};
use crate::report::{OperationSummary, Report};
use crate::table::number;
use serde_json::Value;

/// Operations that make something durable, whose latency is what counts.
const DURABLE: [&str; 3] = ["fsync", "Flush", "sync"];
const CURVES_MAX: usize = 5;
/// A part of a whole has no ratio that tells anything: its bar would say that 2 % are twice as bad as 1 %.
const PERCENT: &str = "%";

fn pair(name: &str, value: String) -> Vec<String> {
    vec![name.into(), value]
}

/// The command, the machine and the versions behind figures.
fn origin(html: &mut Html, command: &[String], date: &str, machine: &Machine, more: Vec<Vec<String>>) {
    if !command.is_empty() {
        html.element("pre", &[("tabindex", "0")], |html| html.leaf("code", &[], &command.join(" ")));
    }
    let known = |name: &str, value: &str| (!value.is_empty()).then(|| pair(name, value.to_owned()));
    let mut rows: Vec<Vec<String>> = [known("date", date), known("processor", &machine.cpu_model)].into_iter().flatten().collect();
    if machine.cpus > 0 {
        rows.push(pair("processors", machine.cpus.to_string()));
        rows.push(pair("memory", format!("{} GiB", number(machine.memory_bytes as f64 / f64::from(1 << 30)))));
    }
    rows.extend([known("kernel", &machine.kernel), known("disk", &machine.device)].into_iter().flatten());
    rows.extend(more);
    html.element("details", &[], |html| {
        html.leaf("summary", &[], "Machine and versions");
        table(html, &["", ""], &rows);
    });
}

/// The parts of a list that have the same key, in the order in which the keys appear.
fn grouped<'a, T, K: PartialEq>(items: &'a [T], key: impl Fn(&'a T) -> K) -> Vec<(K, Vec<&'a T>)> {
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

/// File systems beside each other.
pub fn peers(html: &mut Html, palette: &mut Palette, summary: &Summary) {
    html.leaf("h2", &[], "File systems beside each other");
    let note = format!(
        "Medians of {} rounds of {} s in turns, {} threads unless the load's name says otherwise, images of {} MiB, {} direct I/O on loop \
         devices. A bar shows how many times as good a file system is as the best of the kernel's on a device of the same kind, the thin line the range of all rounds.",
        summary.rounds,
        summary.seconds,
        summary.clients,
        summary.size_bytes >> 20,
        summary.direct_io_text(),
    );
    html.leaf("p", &[], &note);
    let shown: Vec<&SummaryRow> = summary.rows.iter().filter(|row| row.unit != PERCENT).collect();
    let groups: Vec<Group> =
        grouped(&shown, |row| (&row.workload, &row.figure)).iter().map(|(_, rows)| peer_group(palette, rows)).collect();
    html.leaf("h3", &[], "Ratio to the best kernel file system");
    ratio_chart::draw(html, &groups);
    peer_numbers(html, summary);
    html.leaf("h3", &[], "Latencies");
    for (workload, samples) in grouped(&summary.samples, |sample| &sample.workload) {
        peer_latencies(html, palette, workload, &samples);
    }
    html.leaf("h3", &[], "Where the time of an fsync goes");
    for ((workload, system), samples) in grouped(&summary.samples, |sample| (&sample.workload, &sample.system)) {
        // Of all rounds the last one: counters of several mounts don't add up.
        if let Some(statistics) = samples.iter().rev().find_map(|sample| counted(sample)) {
            stage_chart::draw(html, &format!("{workload}, {system}, last round"), &statistics);
        }
    }
    let mut more = vec![pair("Cairn", summary.version.clone())];
    more.extend(summary.tools.iter().map(|tool| pair(&tool.name, tool.version.clone())));
    origin(html, &summary.command, &summary.date, &summary.machine, more);
}

/// What the server counted during a load: as the load says, otherwise from before a tool until after it.
fn counted(sample: &Sample) -> Option<Value> {
    let told = sample.report.as_ref().and_then(|report| report.statistics.clone());
    told.or_else(|| Some(engine_figures::between(sample.statistics_before.as_ref()?, sample.statistics_after.clone()?)))
}

fn peer_group(palette: &mut Palette, rows: &[&&SummaryRow]) -> Group {
    // Without a peer the first system is what the others are compared with.
    let first = rows.first().map_or(0.0, |row| row.median);
    let bars = rows.iter().filter_map(|row| {
        let figure = [row.median, row.min, row.max];
        let one = row.ratio_to_best_peer.filter(|ratio| *ratio > 0.0).map_or(first, |ratio| row.median / ratio);
        Bar::new(row.system.clone(), palette.place(&row.system), figure, one, row.less_is_better, "")
    });
    Group { heading: rows.first().map_or_else(String::new, |row| row.label()), bars: bars.collect() }
}

fn peer_numbers(html: &mut Html, summary: &Summary) {
    let rows: Vec<Vec<String>> = summary
        .rows
        .iter()
        .map(|row| {
            let ratio = row.times_as_good().filter(|_| row.unit != PERCENT).map_or_else(|| "-".into(), ratio_chart::ratio_text);
            let figures = [row.median, row.min, row.max].map(number);
            let resources = [row.cpu_us_per_operation, row.context_switches_per_operation].map(number);
            [row.label(), row.system.clone()].into_iter().chain(figures).chain([ratio]).chain(resources).collect()
        })
        .collect();
    html.element("details", &[], |html| {
        html.leaf("summary", &[], "Numbers, with CPU time and context switches of the whole machine");
        let note = "\"As good\" is how many times as good as the best peer's median, also where less is better. CPU time and switches are those of the \
                    measured time; of a tool, of the whole program.";
        html.leaf("p", &[("class", "note")], note);
        table(html, &["load", "system", "median", "min", "max", "as good", "CPU µs/op", "switches/op"], &rows);
    });
}

fn latencies(sample: &Sample) -> &[OperationSummary] {
    match &sample.report {
        Some(report) if sample.latencies.is_empty() => &report.operations,
        _ => &sample.latencies,
    }
}

/// The operation whose latency is shown: one that makes durable, otherwise the one that takes most of the time.
fn main_operation(all: &[OperationSummary]) -> Option<&str> {
    let durable = DURABLE.iter().find_map(|name| all.iter().find(|operation| operation.name == *name));
    let time = |operation: &OperationSummary| operation.average_us * operation.count as f64;
    let chosen = durable.or_else(|| all.iter().max_by(|a, b| time(a).total_cmp(&time(b))));
    chosen.map(|operation| operation.name.as_str())
}

fn peer_latencies(html: &mut Html, palette: &mut Palette, workload: &str, samples: &[&Sample]) {
    let Some(operation) = samples.iter().find_map(|sample| main_operation(latencies(sample))) else { return };
    let mut curves = Vec::new();
    for (system, rounds) in grouped(samples, |sample| &sample.system) {
        let of_operation = rounds.iter().flat_map(|sample| latencies(sample)).filter(|summary| summary.name == operation);
        curves.extend(Curve::new(system.clone(), palette.place(system), &of_operation.collect::<Vec<_>>()));
    }
    latency_chart::draw(html, &format!("{workload}: {operation}"), &curves);
}

/// A mechanism off and on.
pub fn comparison(html: &mut Html, comparison: &Comparison) {
    html.leaf("h2", &[], &format!("{}: {}, off and on", comparison.mechanism, comparison.title));
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
    origin(html, &comparison.origin.command, &comparison.origin.date, &comparison.origin.machine, more);
}

fn measured_group(measured: &Measured) -> Group {
    const PLACE: usize = 4;
    let bars = measured.rows.iter().filter(|row| row.unit != PERCENT).filter_map(|row| {
        let on = [row.on.median, row.on.min, row.on.max];
        Bar::new(row.figure.clone(), PLACE, on, row.off.median, row.less_is_better?, &row.unit)
    });
    Group { heading: String::new(), bars: bars.collect() }
}

/// The cells of a figure on both sides.
pub fn comparison_cells(row: &Row) -> Vec<String> {
    vec![row.label(), number(row.off.median), number(row.on.median), row.change(), row.published.clone()]
}

/// A single run.
pub fn run(html: &mut Html, report: &Report) {
    html.leaf("h2", &[], &format!("{} on {}, clients: {}", report.workload, report.target, report.clients));
    let per_operation = |value: f64| number(value / report.completed.max(1) as f64);
    let mut rows = vec![pair("threads", report.clients.to_string()), pair("time", format!("{} s", number(report.seconds)))];
    let figures = [&report.throughput].into_iter().chain(&report.figures);
    rows.extend(figures.map(|figure| pair(&figure.name, format!("{} {}", number(figure.value), figure.unit))));
    rows.push(pair("CPU time of the process per operation", format!("{} µs", per_operation(report.cpu_seconds * 1e6))));
    rows.push(pair("context switches of the process per operation", per_operation(report.context_switches as f64)));
    table(html, &["figure", ""], &rows);
    let mut operations: Vec<&OperationSummary> = report.operations.iter().collect();
    operations.sort_by(|a, b| (b.average_us * b.count as f64).total_cmp(&(a.average_us * a.count as f64)));
    let shown = operations.iter().take(CURVES_MAX).enumerate();
    let curves: Vec<Curve> = shown.filter_map(|(place, operation)| Curve::new(operation.name.clone(), place, &[operation])).collect();
    latency_chart::draw(html, "Latencies of the operations that took most of the time", &curves);
    if let Some(statistics) = &report.statistics {
        stage_chart::draw(html, "Where the time of an fsync goes", statistics);
    }
    let unknown = Default::default();
    let from = report.origin.as_ref().unwrap_or(&unknown);
    origin(html, &from.command, &from.date, &from.machine, vec![pair("Cairn", report.version.clone())]);
}
