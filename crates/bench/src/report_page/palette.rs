//! One colour, one mark and one kind of line for each system, the same in every chart of every
//! page.
//!
//! The colours differ in lightness as well as in hue, and no chart distinguishes systems by colour
//! alone.
use super::html::Html;

/// The systems that have a place of their own; others get the places behind these, in the order in
/// which they appear.
const KNOWN: [&str; 5] = ["ext4", "xfs", "btrfs", "cairn-loop", "cairn-image"];
const PLACES: usize = 8;
/// What has no place of its own begins here.
const OTHERS: usize = 5;

/// The places of systems, by name.
#[derive(Default)]
pub struct Palette {
    others: Vec<String>,
}

impl Palette {
    /// The place of a system. A name such as `ext4, buffered` has that of its first word.
    pub fn place(&mut self, system: &str) -> usize {
        let first = system.split([' ', ',', '(', '/']).next().unwrap_or(system);
        if let Some(place) = KNOWN.iter().position(|known| *known == first) {
            return place;
        }
        let index = self.others.iter().position(|other| other == system).unwrap_or_else(|| {
            self.others.push(system.to_owned());
            self.others.len() - 1
        });
        OTHERS + index % (PLACES - OTHERS)
    }
}

/// The class that colours what belongs to a place.
pub fn class(place: usize) -> String {
    format!("c{}", place % PLACES)
}

/// The outline of a place's mark, around 0,0.
fn outline(place: usize) -> &'static str {
    match place % PLACES {
        0 => "M-4-4h8v8h-8z",
        1 => "M0-5L5 4H-5z",
        2 => "M0-5.5L5.5 0L0 5.5L-5.5 0z",
        3 => "M0 5L5-4H-5z",
        4 => "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
        5 => "M-5-1.5h10v3h-10z",
        6 => "M-1.5-5h3v10h-3z",
        _ => "M-4-4L0-1L4-4L1 0L4 4L0 1L-4 4L-1 0z",
    }
}

/// A place's mark in a drawing, at a share of the width and a height in pixels.
pub fn mark(html: &mut Html, place: usize, x_percent: f64, y: f64) {
    let (x, y) = (format!("{x_percent:.2}%"), format!("{y:.1}"));
    html.element(
        "svg",
        &[("x", &x), ("y", &y), ("width", "1"), ("height", "1"), ("overflow", "visible")],
        |html| {
            html.void(
                "path",
                &[("class", &format!("mark {}", class(place))), ("d", outline(place))],
            );
        },
    );
}

/// Names beside their marks.
pub fn legend(html: &mut Html, entries: &[(usize, String)]) {
    html.element("p", &[("class", "legend")], |html| {
        for (place, name) in entries {
            html.element("span", &[], |html| {
                html.element(
                    "svg",
                    &[("width", "14"), ("height", "14"), ("aria-hidden", "true")],
                    |html| mark(html, *place, 50.0, 7.0),
                );
                html.text(name);
            });
            html.text(" ");
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_has_one_place() {
        let mut palette = Palette::default();
        let places = ["zfs", "ext4", "cairn-image", "ext4, buffered", "zfs", "bcachefs"]
            .map(|system| palette.place(system));
        assert_eq!(places, [5, 0, 4, 0, 5, 6]);
    }
}
