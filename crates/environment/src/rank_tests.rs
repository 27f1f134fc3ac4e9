//! The constants agree with each other and with `docs/locks.md`.

use crate::Rank;

const PAGE: &str = include_str!("../../../docs/locks.md");
const SOURCE: &str = include_str!("rank.rs");

struct Row {
    order: u16,
    constant: String,
    name: String,
    nested: bool,
}

fn rows() -> Vec<Row> {
    let parse = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [order, constant, name, protects, notes] = cells[..] else { return None };
        assert!(!protects.is_empty(), "what does {name} protect?");
        let constant = constant.trim_matches('`').to_owned();
        Some(Row {
            order: order.parse().ok()?,
            constant,
            name: name.to_owned(),
            nested: notes.starts_with("nested: "),
        })
    };
    PAGE.lines().filter(|line| line.starts_with('|')).filter_map(parse).collect()
}

#[test]
fn ranks_ascend() {
    assert!(Rank::ALL.windows(2).all(|pair| pair[0].order() < pair[1].order()));
}

#[test]
fn the_page_lists_exactly_the_ranks() {
    let rows = rows();
    assert_eq!(rows.len(), Rank::ALL.len());
    for (row, rank) in rows.iter().zip(Rank::ALL) {
        assert_eq!(
            (row.order, row.name.as_str(), row.nested),
            (rank.order(), rank.name(), rank.nested()),
            "docs/locks.md"
        );
        let constructor = if rank.nested() { "nested_rank" } else { "single" };
        let definition = format!(
            "pub const {}: Rank = Rank::{constructor}({}, \"{}\");",
            row.constant, row.order, row.name
        );
        assert!(SOURCE.contains(&definition), "not in rank.rs: {definition}");
    }
}

#[test]
fn every_rank_is_in_the_list_of_all() {
    assert_eq!(SOURCE.matches(": Rank = Rank::").count(), Rank::ALL.len());
}
