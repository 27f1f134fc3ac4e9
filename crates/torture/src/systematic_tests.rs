//! The steps of systematic workloads, and how sequences of them are counted.
use super::*;
use crate::model::Layout;
use std::collections::BTreeSet;

#[test]
fn every_sequence_has_a_number() {
    let names =
        |length, number| steps(length, number).iter().map(|step| step.name).collect::<Vec<_>>();
    let all: BTreeSet<_> = (0..count(2)).map(|number| names(2, number)).collect();
    assert_eq!(all.len() as u64, count(2));
    assert!(all.contains(&vec!["unlink a", "fsync d"]));
    assert_eq!(names(3, count(3) - 1), ["trim"; 3]);
}

#[test]
fn each_step_is_possible_on_the_tree_or_made_so_by_another() {
    let mut start = Model::new(Layout::Alone);
    for operation in setup() {
        assert!(start.apply(&operation).0.is_ok(), "{operation:?}");
    }
    let succeeds = |number| {
        let sequence = steps(2, number);
        let mut model = start.clone();
        operations(&sequence, &start, 7)
            .iter()
            .map(|operation| model.apply(operation).0)
            .all(|outcome| outcome.is_ok())
    };
    let last = |number: u64| number / STEPS.len() as u64;
    let possible: BTreeSet<u64> =
        (0..count(2)).filter(|number| succeeds(*number)).map(last).collect();
    let missing: Vec<_> = (0..).zip(STEPS).filter(|(at, _)| !possible.contains(at)).collect();
    let missing: Vec<_> = missing.into_iter().map(|(_, step)| step.name).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
