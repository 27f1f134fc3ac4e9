//! How latencies are distributed: a line over p50, p90, p99, p99.9 and the maximum for each system
//! or operation.
use super::html::{Html, table};
use super::palette;
use super::scale::LogScale;
use crate::ab::median;
use crate::report::OperationSummary;
use crate::table::known_microseconds;

const HEIGHT: f64 = 190.0;
const PADDING: f64 = 10.0;
const BASE: f64 = 10.0;
const TICKS_MAX: usize = 6;
const POINTS: [&str; 5] = ["p50", "p90", "p99", "p99.9", "max"];

/// A line.
#[derive(Clone, Debug)]
pub struct Curve {
    pub label: String,
    pub place: usize,
    pub count: u64,
    pub average_us: Option<f64>,
    /// For each of the points, where it is known.
    pub latencies_us: [Option<f64>; POINTS.len()],
}

impl Curve {
    /// The medians over the rounds, each of which has one summary.
    pub fn new(label: String, place: usize, rounds: &[&OperationSummary]) -> Option<Self> {
        // Older results have a zero for an unknown value.
        let middle = |of: fn(&OperationSummary) -> Option<f64>| {
            let known: Vec<f64> =
                rounds.iter().filter_map(|round| of(round)).filter(|value| *value > 0.0).collect();
            (!known.is_empty()).then(|| median(known))
        };
        let latencies_us = [
            middle(|round| round.p50_us),
            middle(|round| round.p90_us),
            middle(|round| round.p99_us),
            middle(|round| round.p999_us),
            middle(|round| Some(round.max_us)),
        ];
        let count = rounds.iter().map(|round| round.count).sum();
        let known = latencies_us.iter().any(Option::is_some);
        known.then(|| Self {
            label,
            place,
            count,
            average_us: middle(|round| Some(round.average_us)),
            latencies_us,
        })
    }

    fn points(&self) -> impl Iterator<Item = (usize, f64)> {
        self.latencies_us
            .into_iter()
            .enumerate()
            .filter_map(|(point, latency_us)| Some((point, latency_us?)))
    }
}

/// Draws the curves and their numbers.
pub fn draw(html: &mut Html, title: &str, curves: &[Curve]) {
    let Some(scale) =
        LogScale::over(curves.iter().flat_map(|curve| curve.latencies_us).flatten(), BASE, 1)
    else {
        return;
    };
    let y = |latency_us: f64| {
        PADDING + (HEIGHT - 2.0 * PADDING) * (1.0 - scale.percent(latency_us) / 100.0)
    };
    let ticks = scale.ticks(BASE, TICKS_MAX);
    html.leaf("h4", &[], title);
    let legend: Vec<(usize, String)> =
        curves.iter().map(|curve| (curve.place, curve.label.clone())).collect();
    palette::legend(html, &legend);
    let height = format!("{HEIGHT:.0}");
    html.element(
        "div",
        &[
            ("class", "plot"),
            ("role", "img"),
            ("aria-label", &format!("{title}: the numbers are in the table")),
        ],
        |html| {
            html.element(
                "svg",
                &[("class", "scale"), ("width", "100%"), ("height", &height)],
                |html| {
                    for tick in &ticks {
                        let at = format!("{:.1}", y(*tick) + 4.0);
                        html.leaf(
                            "text",
                            &[("x", "100%"), ("dx", "-6"), ("y", &at), ("text-anchor", "end")],
                            &tick_text(*tick),
                        );
                    }
                },
            );
            html.element(
                "svg",
                &[("width", "100%"), ("height", &height), ("overflow", "visible")],
                |html| {
                    for tick in &ticks {
                        let at = format!("{:.1}", y(*tick));
                        html.void(
                            "line",
                            &[
                                ("class", "grid"),
                                ("x1", "0%"),
                                ("x2", "100%"),
                                ("y1", &at),
                                ("y2", &at),
                            ],
                        );
                    }
                    curves.iter().for_each(|curve| draw_curve(html, curve, y));
                },
            );
            html.leaf("span", &[], "");
            draw_axis(html);
        },
    );
    numbers(html, curves);
}

fn x_percent(point: usize) -> f64 {
    6.0 + 88.0 * point as f64 / (POINTS.len() - 1) as f64
}

fn tick_text(latency_us: f64) -> String {
    match latency_us {
        value if value >= 1e6 => format!("{:.0} s", value / 1e6),
        value if value >= 1e3 => format!("{:.0} ms", value / 1e3),
        value if value >= 1.0 => format!("{value:.0} µs"),
        value => format!("{value} µs"),
    }
}

fn draw_curve(html: &mut Html, curve: &Curve, y: impl Fn(f64) -> f64) {
    let points: Vec<(f64, f64)> =
        curve.points().map(|(point, latency_us)| (x_percent(point), y(latency_us))).collect();
    for ends in points.windows(2) {
        let [from, to] = [ends[0], ends[1]].map(|(x, y)| (format!("{x:.2}%"), format!("{y:.1}")));
        let class = format!("curve {}", palette::class(curve.place));
        html.void(
            "line",
            &[("class", &class), ("x1", &from.0), ("y1", &from.1), ("x2", &to.0), ("y2", &to.1)],
        );
    }
    points.iter().for_each(|(x, y)| palette::mark(html, curve.place, *x, *y));
}

fn draw_axis(html: &mut Html) {
    html.element("svg", &[("width", "100%"), ("height", "18"), ("overflow", "visible")], |html| {
        for (index, point) in POINTS.iter().enumerate() {
            html.leaf(
                "text",
                &[
                    ("x", &format!("{:.2}%", x_percent(index))),
                    ("y", "13"),
                    ("text-anchor", "middle"),
                ],
                point,
            );
        }
    });
}

fn numbers(html: &mut Html, curves: &[Curve]) {
    let rows: Vec<Vec<String>> = curves
        .iter()
        .map(|curve| {
            let latencies =
                [curve.average_us].into_iter().chain(curve.latencies_us).map(known_microseconds);
            [curve.label.clone(), curve.count.to_string()].into_iter().chain(latencies).collect()
        })
        .collect();
    html.element("details", &[], |html| {
        html.leaf("summary", &[], "Numbers");
        table(html, &["", "count", "average", "p50", "p90", "p99", "p99.9", "max"], &rows);
    });
}
