//! What the results say, in a few lines at the top of the page; before it, what makes them
//! doubtful.
use super::html::Html;
use super::names;
use super::results::{Content, Results};
use super::standing::{self, Standings};
use crate::disturbance::Disturbance;
use crate::peers::Summary;

/// The others of a comparison, as a list in words.
fn others(summaries: &[&Summary]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for row in summaries.iter().flat_map(|summary| &summary.rows) {
        let name = row.system.strip_suffix("-buffered").unwrap_or(&row.system);
        if !standing::is_cairn(name) && !names.contains(&name) {
            names.push(name);
        }
    }
    match names.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, before)) => format!("{} and {last}", before.join(", ")),
        None => String::new(),
    }
}

fn disturbance_of(result: &Results) -> Option<Disturbance> {
    match &result.content {
        Content::Peers(summary) => summary.disturbance,
        Content::Comparison(comparison) => comparison.origin.disturbance,
        Content::Run(report) => report.origin.as_ref().and_then(|origin| origin.disturbance),
    }
}

/// Warns of the busiest of the results.
fn draw_warning(html: &mut Html, results: &[Results]) {
    let busy: Vec<(&Results, Disturbance)> = results
        .iter()
        .filter_map(|result| Some((result, disturbance_of(result).filter(Disturbance::is_busy)?)))
        .collect();
    let Some((_, worst)) = busy.iter().max_by(|a, b| a.1.cpu_share.total_cmp(&b.1.cpu_share))
    else {
        return;
    };
    html.element("p", &[("class", "busy"), ("role", "alert")], |html| {
        html.leaf("b", &[], "These figures are doubtful. ");
        html.text(&worst.warning().unwrap_or_default());
        if results.len() > 1 {
            let names: Vec<&str> = busy.iter().map(|(result, _)| result.source.as_str()).collect();
            html.text(&format!(
                " This holds for {} of {} results: {}.",
                busy.len(),
                results.len(),
                names.join(", ")
            ));
        }
    });
}

/// Draws the verdict.
pub fn draw(html: &mut Html, results: &[Results]) {
    draw_warning(html, results);
    let summaries: Vec<&Summary> = results
        .iter()
        .filter_map(|result| match &result.content {
            Content::Peers(summary) => Some(&**summary),
            _ => None,
        })
        .collect();
    let standings = standing::all(summaries.iter().copied());
    if standings.is_empty() {
        return;
    }
    html.element("section", &[], |html| {
        html.leaf("h2", &[], &format!("Cairn beside the best of {}", others(&summaries)));
        let mut systems: Vec<&str> = Vec::new();
        for found in &standings {
            if !systems.contains(&found.row.system.as_str()) {
                systems.push(&found.row.system);
            }
        }
        for system in systems {
            let own = standings
                .iter()
                .filter(|found| found.row.system == system)
                .map(|found| found.standing);
            standing::draw_counts(html, &names::system(system), standing::counts(own));
        }
        draw_extremes(html, &standings);
    });
}

fn draw_extremes(html: &mut Html, standings: &[Standings<'_>]) {
    for line in standing::extremes(standings) {
        html.leaf("p", &[], &line);
    }
}
