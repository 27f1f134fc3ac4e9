//! Results as Markdown tables, for a README.
use super::results::{Content, Results};
use super::sections::comparison_cells;
use crate::ab::Comparison;
use crate::peers::{Summary, SummaryRow, THROUGHPUT};
use crate::report::Report;
use crate::table::{microseconds, number};

/// A table whose first column is to the left and whose others are to the right.
fn table(headings: &[String], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.iter().map(|cell| cell.replace('|', "\\|")).collect::<Vec<_>>().join(" | "));
    let rule = format!("|---|{}\n", "---:|".repeat(headings.len().saturating_sub(1)));
    [line(headings), rule].into_iter().chain(rows.iter().map(|row| line(row))).collect()
}

/// One row for each figure of each load, one column for each system, and each Cairn's ratio to the best of the others.
pub fn peers_table(summary: &Summary) -> String {
    let mut systems: Vec<&str> = Vec::new();
    let mut figures: Vec<(&str, &str)> = Vec::new();
    for row in &summary.rows {
        if !systems.contains(&row.system.as_str()) {
            systems.push(&row.system);
        }
        if !figures.contains(&(row.workload.as_str(), row.figure.as_str())) {
            figures.push((&row.workload, &row.figure));
        }
    }
    let cairns = || systems.iter().filter(|system| system.starts_with("cairn"));
    let mut headings = vec!["workload".to_owned()];
    headings.extend(systems.iter().map(|system| (*system).to_owned()));
    headings.extend(cairns().map(|system| format!("{system} / best other")));
    let row_of = |(workload, figure): &(&str, &str)| {
        let rows: Vec<&SummaryRow> = summary.rows.iter().filter(|row| row.workload == *workload && row.figure == *figure).collect();
        let of = |system: &str| rows.iter().find(|row| row.system == system);
        let shown = |cell: Option<String>| cell.unwrap_or_else(|| "-".into());
        let mut cells = vec![rows.first().map_or_else(String::new, |row| figure_text(row))];
        cells.extend(systems.iter().map(|system| shown(of(system).map(|row| number(row.median)))));
        cells.extend(cairns().map(|system| shown(of(system).and_then(|row| Some(format!("{:.2}", row.ratio_to_best_peer?))))));
        cells
    };
    table(&headings, &figures.iter().map(row_of).collect::<Vec<_>>())
}

fn figure_text(row: &SummaryRow) -> String {
    let name = if row.figure == THROUGHPUT { String::new() } else { format!(", {}", row.figure) };
    let less = if row.less_is_better { " (less is better)" } else { "" };
    format!("{}{name}, {}{less}", row.workload, row.unit)
}

/// The figures of a mechanism off and on, one table for all loads.
pub fn comparison_table(comparison: &Comparison) -> String {
    let headings = [comparison.mechanism.as_str(), "off", "on", "change", "published"].map(str::to_owned);
    let rows = comparison.measurements.iter().flat_map(|measured| {
        measured.rows.iter().map(|row| {
            let mut cells = comparison_cells(row);
            cells[0] = format!("{}: {}", measured.name, cells[0]);
            cells
        })
    });
    table(&headings, &rows.collect::<Vec<_>>())
}

fn run_table(report: &Report) -> String {
    let headings = ["operation", "count", "average", "p50", "p90", "p99", "p99.9", "max"].map(str::to_owned);
    let rows = report.operations.iter().map(|operation| {
        let times = [operation.average_us, operation.p50_us, operation.p90_us, operation.p99_us, operation.p999_us, operation.max_us];
        [operation.name.clone(), operation.count.to_string()].into_iter().chain(times.map(microseconds)).collect()
    });
    table(&headings, &rows.collect::<Vec<Vec<String>>>())
}

/// All results, each with what it was measured on in a line before its table.
pub fn markdown(results: &[Results]) -> String {
    let shown = |result: &Results| match &result.content {
        Content::Peers(summary) => {
            let machine = &summary.machine;
            let command = summary.command.join(" ");
            format!(
                "`{command}`: medians of {} interleaved rounds of {} s; {}, {} CPUs, {}, images on {}; {}.\n\n{}",
                summary.rounds,
                summary.seconds,
                machine.cpu_model,
                machine.cpus,
                machine.kernel,
                machine.device,
                summary.date,
                peers_table(summary)
            )
        }
        Content::Comparison(comparison) => {
            let (origin, title) = (&comparison.origin, &comparison.title);
            let command = origin.command.join(" ");
            format!(
                "`{command}`: {title}, medians of {} interleaved rounds of {} s; {}, {} CPUs, {}; {}. ~: the ranges overlap.\n\n{}",
                comparison.rounds,
                comparison.seconds,
                origin.machine.cpu_model,
                origin.machine.cpus,
                origin.machine.kernel,
                origin.date,
                comparison_table(comparison)
            )
        }
        Content::Run(report) => {
            let throughput = &report.throughput;
            format!(
                "{} on {}, {} threads: {} {}.\n\n{}",
                report.workload,
                report.target,
                report.clients,
                number(throughput.value),
                throughput.unit,
                run_table(report)
            )
        }
    };
    results.iter().map(shown).collect::<Vec<_>>().join("\n")
}
