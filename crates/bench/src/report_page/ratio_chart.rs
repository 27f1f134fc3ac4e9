//! How many times as good something is as something else: a bar from 1 to the ratio, with the range
//! of all rounds across it.
//!
//! The scale is logarithmic, so that twice and half are equally far from 1, and all bars of a chart
//! share it. To the right is always better: the ratio of a figure of which less is better is turned
//! over.
use super::html::Html;
use super::palette;
use super::scale::LogScale;
use super::standing::Standing;
use crate::table::number;

const BAR_HEIGHT: f64 = 26.0;
const TICKS_MAX: usize = 5;
const BASE: f64 = 2.0;

/// A bar.
#[derive(Clone, Debug)]
pub struct Bar {
    pub label: String,
    /// Its colour.
    pub place: usize,
    /// To what it is compared with, and the range of the rounds; the smaller number first.
    pub ratio: f64,
    pub range: (f64, f64),
    /// The figure itself.
    pub value: String,
    /// Whether it is better or worse; `None` for what the others are compared with.
    pub standing: Option<Standing>,
}

impl Bar {
    /// A bar for a figure with the range of its rounds, beside the figure that is 1.
    pub fn new(
        label: String,
        place: usize,
        figure: [f64; 3],
        one: f64,
        less_is_better: bool,
        unit: &str,
    ) -> Option<Self> {
        let [median, min, max] = figure;
        if !(one > 0.0 && median > 0.0) {
            return None;
        }
        let ratio = |value: f64| if less_is_better { one / value } else { value / one };
        // A round without any would be infinitely bad, or good: the bar ends where the scale does.
        let ratio_or = |value: f64| if value > 0.0 { ratio(value) } else { ratio(median) };
        let ends = (ratio_or(min), ratio_or(max));
        let range = (ends.0.min(ends.1), ends.0.max(ends.1));
        let value = format!("{} {unit}", number(median)).trim_end().to_owned();
        Some(Self { label, place, ratio: ratio(median), range, value, standing: None })
    }
}

/// Bars below a heading.
pub struct Group {
    pub heading: String,
    pub bars: Vec<Bar>,
}

fn tick_text(ratio: f64) -> String {
    if ratio < 1.0 { format!("1/{:.0}", 1.0 / ratio) } else { format!("{ratio:.0}") }
}

/// How a ratio is written.
pub fn ratio_text(ratio: f64) -> String {
    if ratio >= 10.0 { format!("{ratio:.1}×") } else { format!("{ratio:.2}×") }
}

/// Draws the groups below each other, with one scale.
pub fn draw(html: &mut Html, groups: &[Group]) {
    let values = groups
        .iter()
        .flat_map(|group| &group.bars)
        .flat_map(|bar| [bar.ratio, bar.range.0, bar.range.1]);
    let Some(scale) = LogScale::over(values.chain([1.0 / BASE, BASE]), BASE, 2) else { return };
    html.element("div", &[("class", "ratios"), ("role", "group")], |html| {
        for group in groups.iter().filter(|group| !group.bars.is_empty()) {
            if !group.heading.is_empty() {
                html.leaf("h4", &[], &group.heading);
            }
            group.bars.iter().for_each(|bar| draw_bar(html, bar, &scale));
            draw_axis(html, &scale);
        }
    });
}

fn percent(value: f64) -> String {
    format!("{value:.2}%")
}

fn line(html: &mut Html, class: &str, from: (f64, f64), to: (f64, f64)) {
    let (x1, x2, y1, y2) =
        (percent(from.0), percent(to.0), format!("{:.1}", from.1), format!("{:.1}", to.1));
    html.void("line", &[("class", class), ("x1", &x1), ("x2", &x2), ("y1", &y1), ("y2", &y2)]);
}

fn draw_bar(html: &mut Html, bar: &Bar, scale: &LogScale) {
    let middle = BAR_HEIGHT / 2.0;
    let (one, end) = (scale.percent(1.0), scale.percent(bar.ratio));
    let (low, high) = (scale.percent(bar.range.0), scale.percent(bar.range.1));
    html.element("div", &[("class", "bar")], |html| {
        html.leaf("span", &[("class", "name")], &bar.label);
        let told = format!(
            "{}: {}, {} to {}",
            bar.label,
            ratio_text(bar.ratio),
            ratio_text(bar.range.0),
            ratio_text(bar.range.1)
        );
        let height = format!("{BAR_HEIGHT:.0}");
        html.element(
            "svg",
            &[("width", "100%"), ("height", &height), ("role", "img"), ("aria-label", &told)],
            |html| {
                scale
                    .ticks(BASE, TICKS_MAX)
                    .into_iter()
                    .map(|tick| scale.percent(tick))
                    .for_each(|x| line(html, "grid", (x, 0.0), (x, BAR_HEIGHT)));
                let (x, width) = (percent(one.min(end)), percent((end - one).abs()));
                let class = bar.standing.map_or("other", Standing::class);
                html.void(
                    "rect",
                    &[("class", class), ("x", &x), ("y", "6"), ("width", &width), ("height", "14")],
                );
                line(html, "one", (one, 0.0), (one, BAR_HEIGHT));
                line(html, "whisker", (low, middle), (high, middle));
                [low, high]
                    .into_iter()
                    .for_each(|x| line(html, "whisker", (x, middle - 4.0), (x, middle + 4.0)));
                palette::mark(html, bar.place, end, middle);
            },
        );
        html.element("span", &[("class", "value")], |html| {
            let sign =
                bar.standing.map_or_else(String::new, |standing| format!("{} ", standing.sign()));
            html.leaf("b", &[], &format!("{sign}{}", ratio_text(bar.ratio)));
            html.text(" ");
            html.leaf("small", &[], &bar.value);
        });
    });
}

fn draw_axis(html: &mut Html, scale: &LogScale) {
    html.element("div", &[("class", "bar axis"), ("aria-hidden", "true")], |html| {
        html.leaf("span", &[("class", "name")], "");
        html.element(
            "svg",
            &[("width", "100%"), ("height", "18"), ("overflow", "visible")],
            |html| {
                for tick in scale.ticks(BASE, TICKS_MAX) {
                    html.leaf(
                        "text",
                        &[
                            ("x", &percent(scale.percent(tick))),
                            ("y", "13"),
                            ("text-anchor", "middle"),
                        ],
                        &tick_text(tick),
                    );
                }
            },
        );
        html.leaf("span", &[("class", "value")], "better →");
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn to_the_right_is_better() {
        let more = Bar::new("a".into(), 0, [50.0, 40.0, 80.0], 100.0, false, "1/s").unwrap();
        assert_eq!((more.ratio, more.range, more.value.as_str()), (0.5, (0.4, 0.8), "50.0 1/s"));
        let less = Bar::new("a".into(), 0, [50.0, 40.0, 80.0], 100.0, true, "").unwrap();
        assert_eq!((less.ratio, less.range, less.value.as_str()), (2.0, (1.25, 2.5), "50.0"));
        assert!(Bar::new("a".into(), 0, [1.0, 1.0, 1.0], 0.0, false, "").is_none());
        let stuck = Bar::new("a".into(), 0, [10.0, 0.0, 20.0], 10.0, false, "").unwrap();
        assert_eq!(stuck.range, (1.0, 2.0));
        assert_eq!([0.25, 1.0, 8.0].map(tick_text), ["1/4", "1", "8"]);
    }
}
