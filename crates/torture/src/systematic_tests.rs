//! The steps of systematic workloads, and how sequences of them are counted.
use super::*;
use crate::model::Layout;
use std::collections::BTreeSet;

fn names(sequences: &Sequences, number: u64) -> Vec<&'static str> {
    sequences.steps(number).iter().map(|step| step.name).collect()
}

fn names_of(sequences: &Sequences) -> BTreeSet<Vec<&'static str>> {
    (0..sequences.count()).map(|number| names(sequences, number)).collect()
}

#[test]
fn every_sequence_has_a_number() {
    let all = names_of(&Sequences::all(2));
    assert_eq!(all.len(), STEPS.len().pow(2));
    assert!(all.contains(&vec!["unlink a", "fsync d"]));
    let three = Sequences::all(3);
    assert_eq!(names(&three, three.count() - 1), ["trim"; 3]);
}

#[test]
fn sequences_that_begin_with_a_step_are_a_part_of_all() {
    let all = names_of(&Sequences::all(2));
    for name in ["snapshot the root", "snapshot", "", "trim"] {
        let chosen = Sequences::all(2).beginning_with(name).expect("there is one");
        let named = STEPS.iter().any(|step| step.name == name);
        let begins = |first: &str| if named { first == name } else { first.contains(name) };
        let expected: BTreeSet<_> =
            all.iter().filter(|sequence| begins(sequence[0])).cloned().collect();
        assert_eq!(names_of(&chosen), expected, "{name}");
        assert_eq!(chosen.count(), expected.len() as u64, "{name}");
        assert_eq!(chosen.are_all(), name.is_empty(), "{name}");
    }
    let wrong = Sequences::all(1).beginning_with("snapsot").expect_err("there is none");
    assert!(wrong.contains("\"snapsot\"") && wrong.contains("snapshot the root\n"), "{wrong}");
}

#[test]
fn each_step_is_possible_on_the_tree_or_made_so_by_another() {
    let mut start = Model::new(Layout::Alone);
    for operation in setup() {
        assert!(start.apply(&operation).0.is_ok(), "{operation:?}");
    }
    let pairs = Sequences::all(2);
    let succeeds = |number| {
        let sequence = pairs.steps(number);
        let mut model = start.clone();
        operations(&sequence, &start, 7)
            .iter()
            .map(|operation| model.apply(operation).0)
            .all(|outcome| outcome.is_ok())
    };
    let last = |number: u64| number / STEPS.len() as u64;
    let possible: BTreeSet<u64> =
        (0..pairs.count()).filter(|number| succeeds(*number)).map(last).collect();
    let missing: Vec<_> = (0..).zip(STEPS).filter(|(at, _)| !possible.contains(at)).collect();
    let missing: Vec<_> = missing.into_iter().map(|(_, step)| step.name).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
