//! Results as Markdown tables, for a README.
use super::results::{Content, Results};
use super::sections::comparison_cells;
use crate::ab::Comparison;
use crate::report::{OperationSummary, Report};
use crate::table::{markdown_table, number};

/// The figures of a mechanism off and on, one table for all loads.
fn comparison_table(comparison: &Comparison) -> String {
    let headings =
        [comparison.mechanism.as_str(), "off", "on", "change", "published"].map(str::to_owned);
    let rows = comparison.measurements.iter().flat_map(|measured| {
        measured.rows.iter().map(|row| {
            let mut cells = comparison_cells(row);
            cells[0] = format!("{}: {}", measured.name, cells[0]);
            cells
        })
    });
    markdown_table(&headings, &rows.collect::<Vec<_>>())
}

fn run_table(report: &Report) -> String {
    let headings =
        ["operation", "count", "average", "p50", "p90", "p99", "p99.9", "max"].map(str::to_owned);
    markdown_table(
        &headings,
        &report.operations.iter().map(OperationSummary::cells).collect::<Vec<_>>(),
    )
}

/// What to say first of results from a busy machine.
fn warning(warning: Option<String>) -> String {
    warning.map_or_else(String::new, |warning| format!("**{warning}**\n\n"))
}

/// All results, each with what it was measured on in a line before its table.
pub fn markdown(results: &[Results]) -> String {
    let shown = |result: &Results| match &result.content {
        Content::Peers(summary) => {
            let machine = &summary.machine;
            let command = summary.command.join(" ");
            format!(
                "`{command}`: medians of {} interleaved rounds of {} s; {}, {} CPUs, {}, images on {}; {}.\n\n{}{}",
                summary.rounds,
                summary.seconds,
                machine.cpu_model,
                machine.cpus,
                machine.kernel,
                machine.device,
                summary.date,
                warning(summary.disturbance.and_then(|disturbance| disturbance.warning())),
                summary.markdown()
            )
        }
        Content::Comparison(comparison) => {
            let (origin, title) = (&comparison.origin, &comparison.title);
            let command = origin.command.join(" ");
            format!(
                "`{command}`: {title}, medians of {} interleaved rounds of {} s; {}, {} CPUs, {}; {}. ~: the ranges overlap.\n\n{}{}",
                comparison.rounds,
                comparison.seconds,
                origin.machine.cpu_model,
                origin.machine.cpus,
                origin.machine.kernel,
                origin.date,
                warning(origin.warning()),
                comparison_table(comparison)
            )
        }
        Content::Run(report) => {
            let throughput = &report.throughput;
            format!(
                "{} on {}, {} threads: {} {}.\n\n{}{}",
                report.workload,
                report.target,
                report.clients,
                number(throughput.value),
                throughput.unit,
                warning(report.origin.as_ref().and_then(crate::report::Origin::warning)),
                run_table(report)
            )
        }
    };
    results.iter().map(shown).collect::<Vec<_>>().join("\n")
}
