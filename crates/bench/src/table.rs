//! Text tables: the first column to the left, numbers to the right.
use std::fmt;

/// Rows of cells under headings.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new<S: Into<String>>(headings: impl IntoIterator<Item = S>) -> Self {
        Self { rows: vec![headings.into_iter().map(Into::into).collect()] }
    }

    /// Adds a row.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }
}

impl Table {
    fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        (0..columns).map(width).collect()
    }

    /// As a table where `columns` are enough for it; otherwise each row as a paragraph of its own,
    /// in which every cell names its column.
    fn within(&self, columns: usize) -> String {
        let widths = self.widths();
        let whole = widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1);
        if whole > columns { self.paragraphs(columns) } else { self.lines(&widths, whole) }
    }

    fn lines(&self, widths: &[usize], whole: usize) -> String {
        let mut lines = Vec::new();
        for (index, row) in self.rows.iter().enumerate() {
            let cells = row.iter().zip(widths).enumerate();
            let shown: Vec<String> = cells
                .map(|(column, (cell, &width))| {
                    if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                })
                .collect();
            lines.push(shown.join("  ").trim_end().to_owned());
            if index == 0 {
                lines.push("-".repeat(whole));
            }
        }
        lines.iter().map(|line| format!("{line}\n")).collect()
    }

    fn paragraphs(&self, columns: usize) -> String {
        let Some((headings, rows)) = self.rows.split_first() else { return String::new() };
        let mut text = format!("{}\n", headings.first().map_or("", String::as_str));
        for row in rows {
            text.push_str(&format!("{}\n", row.first().map_or("", String::as_str)));
            let mut line = String::new();
            for (heading, cell) in headings.iter().zip(row).skip(1) {
                let part = format!("{heading} {cell}");
                if !line.is_empty() && line.chars().count() + part.chars().count() + 4 > columns {
                    text.push_str(&format!("{line},\n"));
                    line.clear();
                }
                line.push_str(if line.is_empty() { "  " } else { ", " });
                line.push_str(&part);
            }
            text.push_str(&format!("{line}\n"));
        }
        text
    }
}

/// How many columns the terminal has that standard output is; no end of them where it is none.
fn columns_of_output() -> usize {
    let stdout = rustix::stdio::stdout();
    let size = if rustix::termios::isatty(stdout) {
        rustix::termios::tcgetwinsize(stdout).ok()
    } else {
        None
    };
    size.map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0).unwrap_or(usize::MAX)
}

impl fmt::Display for Table {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.within(columns_of_output()))
    }
}

/// A table in Markdown whose first column is to the left and whose others are to the right.
pub fn markdown_table(headings: &[String], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| {
        format!(
            "| {} |\n",
            cells.iter().map(|cell| cell.replace('|', "\\|")).collect::<Vec<_>>().join(" | ")
        )
    };
    let rule = format!("|---|{}\n", "---:|".repeat(headings.len().saturating_sub(1)));
    [line(headings), rule].into_iter().chain(rows.iter().map(|row| line(row))).collect()
}

/// A number with about three significant digits, without an exponent.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        0.0 => "0".into(),
        size if size >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// A time with its unit.
pub fn microseconds(value_us: f64) -> String {
    match value_us {
        value if value >= 1e6 => format!("{} s", number(value / 1e6)),
        value if value >= 1e3 => format!("{} ms", number(value / 1e3)),
        value => format!("{} µs", number(value)),
    }
}

/// A time with its unit, or what stands for an unknown one.
pub fn known_microseconds(value_us: Option<f64>) -> String {
    value_us.map_or_else(|| "-".into(), microseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(["name", "count"]);
        table.row(["a", "1"]);
        table.row(["longer", "12345"]);
        assert_eq!(
            table.to_string(),
            "name    count\n-------------\na           1\nlonger  12345\n"
        );
    }

    #[test]
    fn what_is_too_wide_becomes_paragraphs() {
        let mut table = Table::new(["operation", "count", "average", "p50", "p99"]);
        table.row(["fsync", "1234", "150 µs", "120 µs", "900 µs"]);
        let paragraphs =
            "operation\nfsync\n  count 1234, average 150 µs,\n  p50 120 µs, p99 900 µs\n";
        assert_eq!(table.within(30), paragraphs);
        assert!(table.within(80).starts_with("operation  count  average"));
    }

    #[test]
    fn a_bar_in_a_cell_ends_no_cell() {
        let table = markdown_table(
            &["a|b".to_owned(), "c".to_owned()],
            &[vec!["1".to_owned(), "2".to_owned()]],
        );
        assert_eq!(table, "| a\\|b | c |\n|---|---:|\n| 1 | 2 |\n");
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!(
            [0.0, 0.01234, 0.5, 12.34, 1234.5].map(number),
            ["0", "0.0123", "0.50", "12.3", "1234"]
        );
        assert_eq!([12.0, 1500.0, 2_500_000.0].map(microseconds), ["12.0 µs", "1.50 ms", "2.50 s"]);
    }
}
