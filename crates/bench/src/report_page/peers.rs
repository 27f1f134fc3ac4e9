//! File systems beside each other: one line for each figure, and the rest folded up.
use super::html::{Html, fold, table};
use super::latency_chart::{self, Curve};
use super::palette::Palette;
use super::ratio_chart::{self, Bar, Group};
use super::sections::{grouped, origin, pair};
use super::standing::{self, PERCENT};
use super::{names, stage_chart};
use crate::engine_figures;
use crate::peers::{LoadSeconds, Sample, Summary, SummaryRow};
use crate::report::OperationSummary;
use crate::table::number;
use serde_json::Value;

/// Operations that make something durable: their latency is what counts.
const DURABLE: [&str; 3] = ["fsync", "Flush", "sync"];

/// Draws a comparison.
pub fn draw(html: &mut Html, palette: &mut Palette, summary: &Summary, source: &str) {
    html.leaf("h2", &[], "Cairn beside the kernel's file systems");
    let note = format!(
        "Medians of {} rounds of {} s in turns; loop devices {} direct I/O. ×: how many times as good as the best of the others; above 1 Cairn is \
         better, also where less is better. ▲ better, ▼ worse, ≈ no clear difference: within 10 %, or each median lies in the other's range.",
        summary.rounds,
        summary.seconds,
        summary.direct_io_text(),
    );
    html.leaf("p", &[("class", "note")], &note);
    summary.left_out.iter().for_each(|why| html.leaf("p", &[("class", "note")], why));
    main_table(html, summary);
    fold(html, "Every figure and file system, with the range of the rounds", |html| {
        charts(html, palette, summary)
    });
    fold(html, "Numbers, with CPU time and context switches", |html| numbers(html, summary));
    fold(html, "How latencies are distributed", |html| {
        for (workload, samples) in grouped(&summary.samples, |sample| &sample.workload) {
            latencies_of(html, palette, workload, &samples);
        }
    });
    fold(html, "Where the time of an fsync goes", |html| {
        for ((workload, system), samples) in
            grouped(&summary.samples, |sample| (&sample.workload, &sample.system))
        {
            // Only the last round: counters of several mounts do not add up.
            if let Some(statistics) = samples.iter().rev().find_map(|sample| counted(sample)) {
                stage_chart::draw(
                    html,
                    &format!("{}; {}, last round", names::load(workload), names::system(system)),
                    &statistics,
                );
            }
        }
    });
    let mut more = vec![
        pair("Cairn", summary.version.clone()),
        pair("image size", format!("{} MiB", summary.size_bytes >> 20)),
    ];
    more.extend(summary.tools.iter().map(|tool| pair(&tool.name, tool.version.clone())));
    origin(
        html,
        (&summary.command, &summary.date, &summary.machine, summary.disturbance),
        more,
        source,
    );
}

/// The label of a row: of a main figure the load, of another one only itself, since it stands
/// below.
fn main_label(html: &mut Html, row: &SummaryRow) {
    if row.is_main() {
        html.leaf("b", &[], &names::load(&row.workload));
        html.text(" ");
        html.leaf(
            "small",
            &[],
            &format!("{}{}", row.unit, if row.less_is_better { ", less is better" } else { "" }),
        );
    } else {
        html.leaf("small", &[], &format!("{}, {}", names::figure(&row.figure), row.unit));
    }
}

fn main_table(html: &mut Html, summary: &Summary) {
    let mut cairns: Vec<&str> = Vec::new();
    for row in summary.rows.iter().filter(|row| standing::is_cairn(&row.system)) {
        if !cairns.contains(&row.system.as_str()) {
            cairns.push(&row.system);
        }
    }
    html.element("table", &[("class", "main")], |html| {
        html.element("thead", &[], |html| {
            html.element("tr", &[], |html| {
                html.leaf("th", &[("scope", "col")], "");
                cairns.iter().for_each(|system| {
                    html.leaf("th", &[("scope", "col")], &names::system(system))
                });
                html.leaf("th", &[("scope", "col")], "best other");
            });
        });
        html.element("tbody", &[], |html| {
            for group in summary.groups().filter(|group| standing::is_main(&group[0])) {
                let group: Vec<&SummaryRow> = group.iter().collect();
                main_row(html, &group, &cairns);
            }
        });
    });
}

fn main_row(html: &mut Html, group: &[&SummaryRow], cairns: &[&str]) {
    let first = group[0];
    html.element("tr", &[("class", if first.is_main() { "first" } else { "more" })], |html| {
        html.element("th", &[("scope", "row")], |html| main_label(html, first));
        for system in cairns {
            match group.iter().find(|row| row.system == *system) {
                Some(row) => own_cell(html, row, group),
                None => html.leaf("td", &[], "-"),
            }
        }
        // An image counts as a device with direct I/O, and so does what is asked for first.
        let best = group
            .iter()
            .find(|row| standing::is_cairn(&row.system))
            .and_then(|row| standing::best_other(row, group));
        html.element("td", &[], |html| {
            html.leaf("span", &[], &best.map_or_else(|| "-".into(), |best| number(best.median)));
            html.leaf("small", &[], best.map_or("", |best| best.system.as_str()));
        });
    });
}

fn own_cell(html: &mut Html, row: &SummaryRow, group: &[&SummaryRow]) {
    html.element("td", &[], |html| {
        if let (Some(standing), Some(ratio)) = (standing::of_row(row, group), row.times_as_good()) {
            let shown = format!("{} {}", standing.sign(), ratio_chart::ratio_text(ratio));
            html.leaf(
                "b",
                &[("class", &format!("chip {}", standing.class())), ("title", standing.word())],
                &shown,
            );
        }
        html.leaf("small", &[], &number(row.median));
    });
}

fn charts(html: &mut Html, palette: &mut Palette, summary: &Summary) {
    let shown: Vec<&SummaryRow> = summary.rows.iter().filter(|row| row.unit != PERCENT).collect();
    let groups: Vec<Group> = grouped(&shown, |row| (&row.workload, &row.figure))
        .iter()
        .map(|(_, rows)| peer_group(palette, rows))
        .collect();
    ratio_chart::draw(html, &groups);
}

/// What the server counted during a load: as the load says, otherwise from before a tool until
/// after it.
fn counted(sample: &Sample) -> Option<Value> {
    let told = sample.report.as_ref().and_then(|report| report.statistics.clone());
    told.or_else(|| {
        Some(engine_figures::between(
            sample.statistics_before.as_ref()?,
            sample.statistics_after.clone()?,
        ))
    })
}

/// The whole name of a figure, in plain words.
fn label(row: &SummaryRow) -> String {
    let figure =
        if row.is_main() { String::new() } else { format!(": {}", names::figure(&row.figure)) };
    let hint = if row.less_is_better { " (less is better)" } else { "" };
    format!("{}{figure}, {}{hint}", names::load(&row.workload), row.unit)
}

fn peer_group(palette: &mut Palette, rows: &[&&SummaryRow]) -> Group {
    // Without a peer, the first system is the base of the comparison.
    let first = rows.first().map_or(0.0, |row| row.median);
    let all: Vec<&SummaryRow> = rows.iter().map(|row| **row).collect();
    let bars = rows.iter().filter_map(|row| {
        let figure = [row.median, row.min, row.max];
        let one = match row.times_as_good() {
            Some(ratio) if row.less_is_better => row.median * ratio,
            Some(ratio) => row.median / ratio,
            None => first,
        };
        let bar = Bar::new(
            names::system(&row.system),
            palette.place(&row.system),
            figure,
            one,
            row.less_is_better,
            "",
        )?;
        Some(Bar { standing: standing::of_row(row, &all), ..bar })
    });
    Group { heading: rows.first().map_or_else(String::new, |row| label(row)), bars: bars.collect() }
}

fn numbers(html: &mut Html, summary: &Summary) {
    let rows: Vec<Vec<String>> = summary
        .rows
        .iter()
        .map(|row| {
            let ratio = row
                .times_as_good()
                .filter(|_| row.unit != PERCENT)
                .map_or_else(|| "-".into(), ratio_chart::ratio_text);
            let figures = [row.median, row.min, row.max].map(number);
            let resources =
                [row.cpu_us_per_operation, row.context_switches_per_operation].map(number);
            let seconds = row.seconds.cells();
            [label(row), names::system(&row.system)]
                .into_iter()
                .chain(figures)
                .chain([ratio])
                .chain(resources)
                .chain(seconds)
                .collect()
        })
        .collect();
    let note = "CPU time and switches per operation are those of the whole machine in the measured time; of a tool, of the whole program. The \
        columns in seconds are those of the whole program.";
    html.leaf("p", &[("class", "note")], note);
    let headings =
        ["load", "system", "median", "min", "max", "times as good", "CPU µs/op", "switches/op"];
    table(html, &headings.into_iter().chain(LoadSeconds::HEADINGS).collect::<Vec<_>>(), &rows);
}

fn latencies(sample: &Sample) -> &[OperationSummary] {
    match &sample.report {
        Some(report) if sample.latencies.is_empty() => &report.operations,
        _ => &sample.latencies,
    }
}

/// The operation whose latency is shown: one that makes durable, otherwise the one that takes most
/// of the time.
fn main_operation(all: &[OperationSummary]) -> Option<&str> {
    let durable =
        DURABLE.iter().find_map(|name| all.iter().find(|operation| operation.name == *name));
    let time = |operation: &OperationSummary| operation.average_us * operation.count as f64;
    let chosen = durable.or_else(|| all.iter().max_by(|a, b| time(a).total_cmp(&time(b))));
    chosen.map(|operation| operation.name.as_str())
}

fn latencies_of(html: &mut Html, palette: &mut Palette, workload: &str, samples: &[&Sample]) {
    let Some(operation) = samples.iter().find_map(|sample| main_operation(latencies(sample)))
    else {
        return;
    };
    let mut curves = Vec::new();
    for (system, rounds) in grouped(samples, |sample| &sample.system) {
        let of_operation = rounds
            .iter()
            .flat_map(|sample| latencies(sample))
            .filter(|summary| summary.name == operation);
        curves.extend(Curve::new(
            names::system(system),
            palette.place(system),
            &of_operation.collect::<Vec<_>>(),
        ));
    }
    latency_chart::draw(html, &format!("{}: {operation}", names::load(workload)), &curves);
}
