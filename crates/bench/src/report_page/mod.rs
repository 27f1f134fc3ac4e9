//! One page from results: charts, tables, and what they were measured on.
//!
//! The page is one file without scripts; it asks no network for anything, follows the reader's
//! choice of light or dark, and is as wide as a phone where the reader has one. Drawings take the
//! width they get: what lies across is given in per cent, so that texts keep their size.
//!
//! It begins with the verdict, and then with what a reader wants first: Cairn beside the others.
//! Everything else is folded up.
//!
//! Layers, imports pointing down: `sections` puts the parts together; `verdict` and `peers` compare
//! file systems; `ratio_chart`, `latency_chart` and `stage_chart` draw; `standing` says what is
//! better, `names` in which words, `palette` and `scale` with which colours and where; `html`
//! writes.
mod html;
mod latency_chart;
mod markdown;
mod names;
mod palette;
mod peers;
mod ratio_chart;
mod results;
mod scale;
mod sections;
mod stage_chart;
mod standing;
mod verdict;

pub use markdown::markdown;
pub use results::{Content, Results};

use crate::machine::utc_now;
use html::Html;
use palette::Palette;

const STYLE: &str = include_str!("style.css");

/// The page of all results.
pub fn page(results: &[Results]) -> String {
    let mut html = Html::default();
    html.element("html", &[("lang", "en")], |html| {
        html.element("head", &[], |html| {
            html.void("meta", &[("charset", "utf-8")]);
            html.void(
                "meta",
                &[("name", "viewport"), ("content", "width=device-width, initial-scale=1")],
            );
            html.void("meta", &[("name", "color-scheme"), ("content", "light dark")]);
            html.leaf("title", &[], "Cairn: measurements");
            html.style(STYLE);
        });
        html.element("body", &[], |html| html.element("main", &[], |html| body(html, results)));
    });
    html.finish()
}

fn body(html: &mut Html, results: &[Results]) {
    html.leaf("h1", &[], "Cairn: measurements");
    verdict::draw(html, results);
    let mut palette = Palette::default();
    let peers = results.iter().filter_map(|result| match &result.content {
        Content::Peers(summary) => Some((&**summary, result.source.as_str())),
        _ => None,
    });
    let mut peers: Vec<_> = peers.collect();
    // The widest comparison is the main one.
    peers.sort_by_key(|(summary, _)| std::cmp::Reverse(summary.rows.len()));
    for (summary, source) in peers {
        html.element("section", &[], |html| peers::draw(html, &mut palette, summary, source));
    }
    let runs = results.iter().filter_map(|result| match &result.content {
        Content::Run(report) => Some((&**report, result.source.as_str())),
        _ => None,
    });
    sections::runs(html, &runs.collect::<Vec<_>>());
    let comparisons = results.iter().filter_map(|result| match &result.content {
        Content::Comparison(comparison) => Some((&**comparison, result.source.as_str())),
        _ => None,
    });
    sections::comparisons(html, &comparisons.collect::<Vec<_>>());
    let made = format!(
        "Made {} from {} results with Cairn {}.",
        utc_now(),
        results.len(),
        env!("CARGO_PKG_VERSION")
    );
    html.leaf("p", &[("class", "note")], &made);
}

#[cfg(test)]
mod page_tests;
