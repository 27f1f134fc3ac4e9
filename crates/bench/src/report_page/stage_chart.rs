//! Where the time of an fsync goes: the mean of each stage in a bar, and the numbers below. Means
//! add up to the whole, quantiles don't, so these are in the table only.
use super::html::{Html, table};
use crate::engine_figures::{self, STAGE_TOTAL, Stage};
use crate::table::{microseconds, number};
use serde_json::Value;

const STAGE_PLACES: usize = 6;
/// A part of the bar that is narrower has no text in it.
const TEXT_PERCENT_MIN: f64 = 9.0;

/// Draws what the counters say: stages where they were recorded, and what follows from the
/// counters.
pub fn draw(html: &mut Html, title: &str, statistics: &Value) {
    let stages = engine_figures::stages(statistics);
    html.leaf("h4", &[], title);
    if stages.is_empty() {
        html.leaf("p", &[("class", "note")], "The stages of an fsync were not recorded.");
    } else {
        draw_stages(html, &stages);
    }
    let rows: Vec<Vec<String>> = engine_figures::derived(statistics)
        .into_iter()
        .map(|figure| {
            vec![
                figure.name,
                format!("{} {}", number(figure.value), figure.unit).trim_end().to_owned(),
            ]
        })
        .collect();
    html.element("details", &[], |html| {
        html.leaf("summary", &[], "Numbers");
        if !stages.is_empty() {
            table(
                html,
                &["stage of an fsync", "count", "mean", "p50", "p99", "max"],
                &stages.iter().map(cells).collect::<Vec<_>>(),
            );
        }
        table(html, &["engine", ""], &rows);
    });
}

fn cells(stage: &Stage) -> Vec<String> {
    let times = [stage.mean_us, stage.p50_us, stage.p99_us, stage.max_us].map(microseconds);
    [stage.stage.clone(), stage.count.to_string()].into_iter().chain(times).collect()
}

/// The parts of a whole fsync: each stage's mean, weighted by how many went through it, and what no
/// stage explains.
fn shares(stages: &[Stage]) -> Vec<(String, f64)> {
    let total = stages.iter().find(|stage| stage.stage == STAGE_TOTAL);
    let parts = stages.iter().filter(|stage| stage.stage != STAGE_TOTAL);
    let fsyncs = total
        .map_or_else(
            || parts.clone().map(|stage| stage.count).max().unwrap_or(0),
            |stage| stage.count,
        )
        .max(1) as f64;
    let mut shares: Vec<(String, f64)> = parts
        .map(|stage| (stage.stage.clone(), stage.mean_us * stage.count as f64 / fsyncs))
        .collect();
    let explained: f64 = shares.iter().map(|(_, mean_us)| mean_us).sum();
    if let Some(rest) = total.map(|stage| stage.mean_us - explained).filter(|rest| *rest > 0.0) {
        shares.push(("other".into(), rest));
    }
    shares.retain(|(_, mean_us)| *mean_us > 0.0);
    shares
}

fn class(index: usize, name: &str) -> String {
    if name == "other" { "rest".into() } else { format!("g{}", index % STAGE_PLACES) }
}

fn draw_stages(html: &mut Html, stages: &[Stage]) {
    let shares = shares(stages);
    let whole_us: f64 = shares.iter().map(|(_, mean_us)| mean_us).sum();
    if whole_us <= 0.0 {
        return;
    }
    let percent = |mean_us: f64| mean_us / whole_us * 100.0;
    let told: Vec<String> =
        shares.iter().map(|(name, mean_us)| format!("{name} {:.0} %", percent(*mean_us))).collect();
    html.element(
        "svg",
        &[
            ("class", "stages"),
            ("width", "100%"),
            ("height", "30"),
            ("role", "img"),
            ("aria-label", &told.join(", ")),
        ],
        |html| {
            let mut start = 0.0;
            for (index, (name, mean_us)) in shares.iter().enumerate() {
                let share = percent(*mean_us);
                let (x, width) = (format!("{start:.2}%"), format!("{share:.2}%"));
                html.void(
                    "rect",
                    &[
                        ("class", &class(index, name)),
                        ("x", &x),
                        ("y", "2"),
                        ("width", &width),
                        ("height", "26"),
                    ],
                );
                if share >= TEXT_PERCENT_MIN {
                    let middle = format!("{:.2}%", start + share / 2.0);
                    let text = format!("t{}", class(index, name));
                    html.leaf(
                        "text",
                        &[("class", &text), ("x", &middle), ("y", "20"), ("text-anchor", "middle")],
                        &format!("{share:.0} %"),
                    );
                }
                start += share;
            }
        },
    );
    html.element("p", &[("class", "legend")], |html| {
        for (index, (name, mean_us)) in shares.iter().enumerate() {
            html.element("span", &[], |html| {
                html.element(
                    "svg",
                    &[("width", "14"), ("height", "14"), ("aria-hidden", "true")],
                    |html| {
                        html.void(
                            "rect",
                            &[
                                ("class", &class(index, name)),
                                ("x", "1"),
                                ("y", "1"),
                                ("width", "12"),
                                ("height", "12"),
                            ],
                        );
                    },
                );
                html.text(&format!("{name} {}", microseconds(*mean_us)));
            });
            html.text(" ");
        }
        html.text(&format!("of {} on average", microseconds(whole_us)));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(name: &str, count: u64, mean_us: f64) -> Stage {
        Stage {
            stage: name.into(),
            count,
            mean_us,
            p50_us: mean_us,
            p99_us: mean_us,
            max_us: mean_us,
            buckets: Vec::new(),
        }
    }

    #[test]
    fn shares_add_up_to_the_whole() {
        let stages = [
            stage("data write", 50, 20.0),
            stage("flush", 100, 60.0),
            stage(STAGE_TOTAL, 100, 80.0),
        ];
        assert_eq!(
            shares(&stages),
            [("data write".into(), 10.0), ("flush".into(), 60.0), ("other".into(), 10.0)]
        );
        assert_eq!(shares(&stages[..2]), [("data write".into(), 10.0), ("flush".into(), 60.0)]);
        assert_eq!(shares(&[]), []);
    }
}
