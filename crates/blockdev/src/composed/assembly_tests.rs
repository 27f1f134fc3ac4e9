//! Which members may be used, label by label.

use super::assembly::{Assembly, LabelledName, MemberState, assemble};
use super::error::ComposedError;
use super::label::{ComposedKind, FillProgress, Identity, Label};

fn member(index: usize) -> Identity {
    Identity([index as u8 + 1; 16])
}

/// The label of member `index` of `count`, at `events`, listing the members in `in_sync`.
fn label(index: usize, count: usize, events: u64, in_sync: u32) -> Label {
    Label {
        kind: ComposedKind::Mirror,
        progress: FillProgress::Complete,
        index,
        pool: Identity([9; 16]),
        member: member(index),
        events,
        sequence: events,
        open: false,
        in_sync,
        member_bytes: 1 << 20,
        composed_bytes: 1 << 20,
        rebuilt_bytes: 0,
        raise: Identity([0; 16]),
        members: (0..count).map(member).collect(),
    }
}

fn found(labels: Vec<Option<Label>>) -> Vec<LabelledName> {
    (b'a'..)
        .zip(labels)
        .map(|(name, label)| LabelledName { name: char::from(name).to_string(), label })
        .collect()
}

#[track_caller]
fn assembly(labels: Vec<Option<Label>>) -> Assembly {
    assemble(ComposedKind::Mirror, &found(labels)).unwrap()
}

#[track_caller]
fn refusal(labels: Vec<Option<Label>>) -> ComposedError {
    assemble(ComposedKind::Mirror, &found(labels)).unwrap_err()
}

use MemberState::{InSync, Missing, Rebuilding, Replaced, Stale};

#[test]
fn all_in_sync_in_any_order() {
    let assembly = assembly(vec![Some(label(1, 2, 5, 3)), Some(label(0, 2, 5, 3))]);
    assert_eq!((assembly.index_of, assembly.states), (vec![1, 0], vec![InSync, InSync]));
}

#[test]
fn a_crash_in_a_raise_leaves_all_members_in_sync_and_an_old_copy_does_not() {
    assert_eq!(
        assembly(vec![Some(label(0, 2, 6, 3)), Some(label(1, 2, 5, 3))]).states,
        [InSync, InSync]
    );
    assert_eq!(
        assembly(vec![Some(label(0, 2, 7, 3)), Some(label(1, 2, 5, 3))]).states,
        [InSync, Stale]
    );
}

#[test]
fn a_member_left_behind_is_stale_whatever_its_counter() {
    assert_eq!(
        assembly(vec![Some(label(0, 2, 7, 1)), Some(label(1, 2, 6, 3))]).states,
        [InSync, Stale]
    );
    // Three members, lost one after the other.
    let labels = vec![Some(label(0, 3, 9, 1)), Some(label(1, 3, 7, 3)), Some(label(2, 3, 5, 7))];
    assert_eq!(assembly(labels).states, [InSync, Stale, Stale]);
}

#[test]
fn members_that_went_on_separately_are_refused() {
    for (first, second) in [(7, 7), (7, 9), (9, 7), (7, 8)] {
        let error = refusal(vec![Some(label(0, 2, first, 1)), Some(label(1, 2, second, 2))]);
        assert!(matches!(error, ComposedError::Diverged { .. }), "{error}");
    }
}

#[test]
fn a_missing_member_gets_the_place_that_is_left() {
    let assembly = assembly(vec![None, Some(label(0, 2, 5, 3))]);
    assert_eq!((assembly.index_of, assembly.states), (vec![1, 0], vec![Missing, InSync]));
    assert!(matches!(refusal(vec![None, None]), ComposedError::NoMember { .. }));
}

#[test]
fn a_rebuilding_member_is_never_used_nor_believed() {
    let rebuilding = Label { progress: FillProgress::Rebuilding, ..label(1, 2, 50, 2) };
    let assembly = assembly(vec![Some(label(0, 2, 5, 1)), Some(rebuilding.clone())]);
    assert_eq!((assembly.states, assembly.authority.events), (vec![InSync, Rebuilding], 5));
    assert!(matches!(refusal(vec![None, Some(rebuilding)]), ComposedError::NoneComplete { .. }));
}

#[test]
fn a_replaced_member_does_not_come_back() {
    let mut current = label(0, 2, 7, 3);
    current.members[1] = Identity([77; 16]);
    assert_eq!(assembly(vec![Some(current), Some(label(1, 2, 5, 3))]).states, [InSync, Replaced]);
}

/// Label `label` after the members with these indexes were replaced.
fn with_replaced(mut label: Label, replaced: &[usize]) -> Label {
    for &index in replaced {
        label.members[index] = Identity([77 + index as u8; 16]);
    }
    label.member = label.members[label.index];
    label
}

/// What the labels of A and of N hold after N took the place of B, while C was away at counter 5.
fn replaced_without_c(in_sync: u32) -> [Label; 2] {
    [0, 1].map(|index| with_replaced(label(index, 3, 9, in_sync), &[1]))
}

#[test]
fn a_member_that_was_away_while_another_one_was_replaced_is_stale() {
    let [a, n] = replaced_without_c(0b011).map(Some);
    let c = || Some(label(2, 3, 5, 0b111));
    assert_eq!(assembly(vec![a, n.clone(), c()]).states, [InSync, InSync, Stale]);
    assert_eq!(assembly(vec![None, n.clone(), c()]).states, [Missing, InSync, Stale]);
    // A crash in a raise gave it one more than the others.
    let c = Some(label(2, 3, 6, 0b111));
    assert_eq!(assembly(vec![None, n.clone(), c]).states, [Missing, InSync, Stale]);
    // The member that was replaced, without the one that knows both.
    let b = Some(label(1, 3, 7, 0b011));
    assert_eq!(assembly(vec![n, b, None]).states, [InSync, Replaced, Missing]);
}

#[test]
fn a_member_that_was_away_is_stale_also_after_the_new_one_went_on_alone() {
    let [a, mut n] = replaced_without_c(0b011);
    (n.events, n.in_sync) = (11, 0b010);
    let c = label(2, 3, 5, 0b111);
    assert_eq!(assembly(vec![Some(a), Some(n), Some(c)]).states, [Stale, InSync, Stale]);
}

#[test]
fn a_replacement_does_not_hide_that_a_member_went_on_alone() {
    for events in [7, 9, 11] {
        let c = || Some(label(2, 3, events, 0b100));
        let [a, n] = replaced_without_c(0b011).map(Some);
        let old_a = || Some(label(0, 3, 5, 0b111));
        for labels in [
            vec![a.clone(), n.clone(), c()],
            vec![None, n.clone(), c()],
            vec![a, None, c()],
            vec![old_a(), n, c()],
        ] {
            let error = refusal(labels);
            assert!(matches!(error, ComposedError::Diverged { .. }), "{events}: {error}");
        }
    }
    // B went on alone, too, and then it was replaced by N without being there.
    let n = Some(with_replaced(label(1, 2, 9, 3), &[1]));
    let error = refusal(vec![n, Some(label(1, 2, 7, 2))]);
    assert!(matches!(error, ComposedError::Diverged { .. }), "{error}");
}

#[test]
fn an_old_copy_does_not_hide_that_members_went_on_separately() {
    let old = |index| Some(label(index, 3, 5, 0b111));
    for (first, second) in [(7, 7), (7, 9), (9, 7)] {
        for (with_first, with_second) in
            [(0b001, 0b010), (0b101, 0b010), (0b001, 0b110), (0b101, 0b110)]
        {
            let labels = vec![
                Some(label(0, 3, first, with_first)),
                Some(label(1, 3, second, with_second)),
                old(2),
            ];
            let error = refusal(labels.clone());
            assert!(matches!(error, ComposedError::Diverged { .. }), "{labels:?}: {error}");
        }
    }
    // C went on with an old copy of A for longer than A and the new member did.
    let [a, n] = replaced_without_c(0b011).map(Some);
    let c = || Some(label(2, 3, 11, 0b101));
    for labels in [
        vec![a.clone(), n.clone(), c()],
        vec![None, n.clone(), c()],
        vec![a, None, c()],
        vec![Some(label(0, 3, 11, 0b101)), n, c()],
    ] {
        let error = refusal(labels);
        assert!(matches!(error, ComposedError::Diverged { .. }), "{error}");
    }
}

/// A and B crash while they leave C behind, whose counter was one ahead after an earlier crash.
#[test]
fn a_member_left_behind_in_a_raise_that_crashed_does_not_come_back() {
    let labels =
        vec![Some(label(0, 3, 6, 0b011)), Some(label(1, 3, 5, 0b111)), Some(label(2, 3, 6, 0b111))];
    assert_eq!(assembly(labels).states, [InSync, InSync, Stale]);
}

#[test]
fn foreign_members_copies_and_wrong_counts_are_distinguished() {
    let good = || Some(label(0, 2, 5, 3));
    let foreign = Label { pool: Identity([8; 16]), ..label(1, 2, 5, 3) };
    assert!(matches!(refusal(vec![good(), Some(foreign)]), ComposedError::Foreign { .. }));
    assert!(matches!(refusal(vec![good(), good()]), ComposedError::Same { .. }));
    assert!(matches!(
        refusal(vec![good(), None, None]),
        ComposedError::MembersNamed { wanted: 2, named: 3, .. }
    ));
    let concat = Label { kind: ComposedKind::Concat, ..label(0, 2, 5, 3) };
    assert!(matches!(refusal(vec![Some(concat), None]), ComposedError::Kind { .. }));
}
