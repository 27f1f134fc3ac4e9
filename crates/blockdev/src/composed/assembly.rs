//! Decides from the labels which members may be read.
//!
//! The *authority* is the complete member with the highest event counter. Its label lists the
//! members that were in sync when the label was written. Before the device leaves a member behind,
//! it raises the counter on all others, durably, and drops the member from their lists. So a stale
//! member is never taken for a current one, whatever was written to it, and after a crash at any
//! point.
//!
//! Each raise takes two steps of one. Each step is durable on all members before the next begins,
//! and nothing is written to the composed device in between. So a difference of one means a crash
//! in the middle of a raise, and the member is current. A greater difference means that an old copy
//! of a member was put back.
//!
//! **Members that went on separately** are refused; the user must choose between them. A complete
//! member is *behind* another one if all that it holds is part of the other one's history. The two
//! labels show that by three facts:
//!
//! - Both list some member, which took part in what each of them holds.
//! - The other one lists no member that this one left behind: such a member never comes back under
//!   the same identity.
//! - The other one's counter is not lower. If a member was replaced in between, so that one of the
//!   two doesn't know the other, it is higher.
//!
//! What is behind a member that is behind a third one is behind the third one too. Of any two
//! members one must be behind the other, and never have both left each other behind.

use super::error::ComposedError;
use super::label::{ComposedKind, FillProgress, Label};
use std::cmp::Reverse;

/// Why a member is or isn't used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// It holds all that it should.
    InSync,
    /// The device was not found, or is no member.
    Missing,
    /// The other members were written to without it.
    Stale,
    /// Another member took its place.
    Replaced,
    /// Its rebuild is not finished.
    Rebuilding,
    /// It returned an error while in use.
    Failed,
}

impl MemberState {
    /// The state in words.
    pub fn text(self) -> &'static str {
        match self {
            MemberState::InSync => "in sync",
            MemberState::Missing => "missing",
            MemberState::Stale => "stale: the other members were written without it",
            MemberState::Replaced => "replaced by another member",
            MemberState::Rebuilding => "incomplete: its rebuild was not finished",
            MemberState::Failed => "failed while in use",
        }
    }
}

/// One name and the label that was read there.
#[derive(Clone, Debug)]
pub(super) struct LabelledName {
    pub(super) name: String,
    /// `None` when the device is not there or has no label.
    pub(super) label: Option<Label>,
}

/// The index of each name, and the state of each member.
#[derive(Debug)]
pub(super) struct Assembly {
    /// The authority's label; its `index` is the member that carries it.
    pub(super) authority: Label,
    /// For each name, in the order given: its index among the members.
    pub(super) index_of: Vec<usize>,
    /// For each name, in the order given.
    pub(super) states: Vec<MemberState>,
}

/// The largest difference of event counters that a crash can leave.
const EVENTS_GAP_MAX: u64 = 1;

/// Puts the labels together.
pub(super) fn assemble(
    kind: ComposedKind,
    found: &[LabelledName],
) -> Result<Assembly, ComposedError> {
    let labelled: Vec<(&str, &Label)> = found
        .iter()
        .filter_map(|found| Some((found.name.as_str(), found.label.as_ref()?)))
        .collect();
    let names = || found.iter().map(|found| found.name.as_str()).collect::<Vec<_>>().join(", ");
    let Some(&(first_name, first)) = labelled.first() else {
        return Err(ComposedError::NoMember { members: names() });
    };
    for &(name, label) in &labelled {
        if label.kind != kind {
            return Err(ComposedError::Kind {
                member: name.to_owned(),
                found: label.kind,
                wanted: kind,
            });
        }
        if label.pool != first.pool {
            let (first_pool, second_pool) = (first.pool.to_string(), label.pool.to_string());
            return Err(ComposedError::Foreign {
                first: first_name.to_owned(),
                second: name.to_owned(),
                first_pool,
                second_pool,
            });
        }
        if label.members.len() != found.len() {
            return Err(ComposedError::MembersNamed {
                kind,
                wanted: label.members.len(),
                named: found.len(),
            });
        }
    }
    check_pairs(kind, &labelled)?;
    let complete = labelled.iter().filter(|(_, label)| label.progress == FillProgress::Complete);
    // With the same counter, one may list a member that the other has just left behind: a crash in
    // a raise leaves that, and either would do. The member that was left behind must not come back.
    let authority = complete
        .map(|(_, label)| *label)
        .max_by_key(|label| (label.events, Reverse(label.in_sync.count_ones()), label.sequence))
        .cloned();
    let Some(authority) = authority else {
        return Err(ComposedError::NoneComplete { members: names() });
    };
    let states: Vec<_> =
        found.iter().map(|found| state_of(&authority, found.label.as_ref())).collect();
    Ok(Assembly { index_of: indexes(found, &states), authority, states })
}

fn check_pairs(kind: ComposedKind, labelled: &[(&str, &Label)]) -> Result<(), ComposedError> {
    for (at, &(first_name, first)) in labelled.iter().enumerate() {
        let same = labelled[at + 1..].iter().find(|(_, second)| first.member == second.member);
        if let Some(&(second_name, _)) = same {
            let (first, second) = (first_name.to_owned(), second_name.to_owned());
            return Err(ComposedError::Same { first, second });
        }
    }
    let labels: Vec<&Label> = labelled.iter().map(|(_, label)| *label).collect();
    match separate_pair(&labels).filter(|_| kind == ComposedKind::Mirror) {
        Some([first, second]) => Err(ComposedError::Diverged {
            first: labelled[first].0.to_owned(),
            second: labelled[second].0.to_owned(),
        }),
        None => Ok(()),
    }
}

/// Two complete members of a mirror that went on separately, if there are any.
pub(super) fn separate_pair(labels: &[&Label]) -> Option<[usize; 2]> {
    let complete: Vec<usize> = (0..labels.len())
        .filter(|&member| labels[member].progress == FillProgress::Complete)
        .collect();
    let mut behind: Vec<Vec<bool>> = labels
        .iter()
        .map(|one| labels.iter().map(|other| is_behind(one, other)).collect())
        .collect();
    for &by in &complete {
        for &one in &complete {
            for &other in &complete {
                behind[one][other] |= behind[one][by] && behind[by][other];
            }
        }
    }
    let pairs = complete
        .iter()
        .enumerate()
        .flat_map(|(at, &first)| complete[at + 1..].iter().map(move |&second| [first, second]));
    pairs.into_iter().find(|&[first, second]| {
        let left_each_other =
            labels[first].left_behind(labels[second]) && labels[second].left_behind(labels[first]);
        left_each_other || !(behind[first][second] || behind[second][first])
    })
}

/// Whether the labels alone show that all that `one` holds is part of the history of `other`.
fn is_behind(one: &Label, other: &Label) -> bool {
    let members = || one.members.iter().enumerate();
    let listed_again = members()
        .any(|(index, member)| !one.lists_as(index, member) && other.lists_as(index, member));
    let both_list_one = members()
        .any(|(index, member)| one.lists_as(index, member) && other.lists_as(index, member));
    let lower = if one.knows(other) && other.knows(one) {
        one.events <= other.events + EVENTS_GAP_MAX
    } else {
        one.events < other.events
    };
    !listed_again && both_list_one && lower
}

fn state_of(authority: &Label, label: Option<&Label>) -> MemberState {
    let Some(label) = label else { return MemberState::Missing };
    if label.progress == FillProgress::Rebuilding {
        return MemberState::Rebuilding;
    }
    if authority.members.get(label.index) != Some(&label.member) {
        return MemberState::Replaced;
    }
    if !authority.lists(label) || authority.events - label.events > EVENTS_GAP_MAX {
        return MemberState::Stale;
    }
    MemberState::InSync
}

/// Each member gets the index of its label, in any order of the names. A name without a label, or
/// with a label whose index is taken, gets a free index.
fn indexes(found: &[LabelledName], states: &[MemberState]) -> Vec<usize> {
    let mut index_of = vec![usize::MAX; found.len()];
    let mut taken = vec![false; found.len()];
    let rank = |name: usize| match (states[name], &found[name].label) {
        (MemberState::InSync, _) => 0,
        (MemberState::Replaced, _) => 2,
        (_, Some(_)) => 1,
        (_, None) => 3,
    };
    let mut order: Vec<usize> = (0..found.len()).collect();
    order.sort_by_key(|&name| rank(name));
    for name in order {
        let wanted =
            found[name].label.as_ref().map(|label| label.index).filter(|&index| !taken[index]);
        let own = (!taken[name]).then_some(name);
        let index = wanted.or(own).or_else(|| taken.iter().position(|taken| !taken));
        if let Some(index) = index {
            taken[index] = true;
            index_of[name] = index;
        }
    }
    index_of
}
