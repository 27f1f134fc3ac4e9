//! One page from results: charts, tables, and what they were measured on.
//!
//! The page is one file without scripts; it asks no network for anything, follows the reader's choice of light or dark, and is as
//! wide as a phone where the reader has one. Drawings take the width they get: what lies across is given in per cent, so that
//! texts keep their size.
//!
//! Layers, imports pointing down: `sections` puts charts and tables together; `ratio_chart`, `latency_chart` and `stage_chart`
//! draw; `palette` and `scale` say with which colours and where; `html` writes.
mod html;
mod latency_chart;
mod markdown;
mod palette;
mod ratio_chart;
mod results;
mod scale;
mod sections;
mod stage_chart;

pub use markdown::{comparison_table, markdown};
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
            html.void("meta", &[("name", "viewport"), ("content", "width=device-width, initial-scale=1")]);
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
    html.leaf(
        "p",
        &[("class", "note")],
        &format!("Made {} from {} results with Cairn {}.", utc_now(), results.len(), env!("CARGO_PKG_VERSION")),
    );
    let id = |index: usize| format!("r{}", index + 1);
    if results.len() > 1 {
        html.element("nav", &[], |html| {
            html.element("ul", &[], |html| {
                for (index, result) in results.iter().enumerate() {
                    let link = format!("#{}", id(index));
                    html.element("li", &[], |html| html.leaf("a", &[("href", &link)], &result.title()));
                }
            });
        });
    }
    let mut palette = Palette::default();
    for (index, result) in results.iter().enumerate() {
        html.element("section", &[("id", &id(index))], |html| {
            match &result.content {
                Content::Peers(summary) => sections::peers(html, &mut palette, summary),
                Content::Comparison(comparison) => sections::comparison(html, comparison),
                Content::Run(report) => sections::run(html, report),
            }
            html.leaf("p", &[("class", "source")], &format!("From {}", result.source));
        });
    }
}

#[cfg(test)]
mod page_tests;
