//! Filling a new member: it is complete or marked incomplete, after a crash at any point.

use super::members::status;
use super::mirror_tests::{Disk, MEMBER_BYTES, byte, candidates, new_mirror, open};
use super::{Access, Candidate, ComposedError, ComposedKind, MemberState, Mirror, Rebuild};
use crate::composed::label::DATA_START_BYTES;
use crate::error::Operation;
use crate::simulated::{Fate, WriteInfo, random_fates};
use crate::{BlockDevice, SimulatedDevice};
use cairn_environment::random::Seeded;
use std::collections::BTreeSet;
use std::sync::Arc;

fn target(disk: &Disk) -> Candidate {
    Candidate { name: "new".to_owned(), device: Some(disk.clone()) }
}

/// The content of a block. No two pieces that a rebuild copies are the same.
fn content(block: u64) -> u8 {
    (block % 251) as u8
}

pub(super) fn filled(count: usize) -> Vec<Disk> {
    let disks = new_mirror(count);
    let all: Vec<Option<&Disk>> = disks.iter().map(Some).collect();
    let mirror = open(&all, false).unwrap();
    for block in 0..mirror.length_bytes() / 4096 {
        mirror.write(block * 4096, &[&[content(block); 4096]]).unwrap();
    }
    mirror.flush().unwrap();
    drop(mirror);
    disks
}

pub(super) fn expect_content(device: &dyn BlockDevice) {
    for block in 0..device.length_bytes() / 4096 {
        assert_eq!(byte(device, block), content(block), "block {block}");
    }
}

#[track_caller]
fn rebuild(disks: &[Option<&Disk>], position: usize, new: &Disk) {
    let mut rebuild = Rebuild::start(candidates(disks), position, target(new), false).unwrap();
    rebuild.copy(&mut |_| {}).unwrap();
    assert_eq!(rebuild.unreadable_blocks(), 0);
    rebuild.finish().unwrap();
}

#[test]
fn a_lost_member_is_replaced_and_the_new_one_holds_everything() {
    let disks = filled(2);
    let new: Disk = Arc::new(SimulatedDevice::new(MEMBER_BYTES + 4096));
    rebuild(&[None, Some(&disks[1])], 0, &new);
    expect_content(&open(&[Some(&new), Some(&disks[1])], false).unwrap());
    expect_content(&open(&[Some(&new), None], true).unwrap());
}

#[test]
fn a_member_that_still_works_is_replaced_and_does_not_come_back() {
    let disks = filled(2);
    let new: Disk = Arc::new(SimulatedDevice::new(MEMBER_BYTES));
    rebuild(&[Some(&disks[0]), Some(&disks[1])], 0, &new);
    expect_content(&open(&[Some(&new), Some(&disks[1])], false).unwrap());
    let states: Vec<_> =
        status(ComposedKind::Mirror, &candidates(&[Some(&disks[0]), Some(&disks[1])]))
            .unwrap()
            .iter()
            .map(|m| m.state)
            .collect();
    assert_eq!(states, [MemberState::Replaced, MemberState::InSync]);
}

#[test]
fn a_stale_member_is_filled_in_place() {
    let disks = filled(2);
    open(&[Some(&disks[0]), None], true).unwrap().write(0, &[&[99; 4096]]).unwrap();
    rebuild(&[Some(&disks[0]), None], 1, &disks[1]);
    let mirror = open(&[None, Some(&disks[1])], true).unwrap();
    assert_eq!((byte(&mirror, 0), byte(&mirror, 1)), (99, 1));
}

#[test]
fn a_member_that_was_away_while_another_one_was_replaced_is_left_behind_and_filled_in_place() {
    let disks = filled(3);
    let new: Disk = Arc::new(SimulatedDevice::new(MEMBER_BYTES));
    rebuild(&[Some(&disks[0]), None, None], 1, &new);
    open(&[Some(&disks[0]), Some(&new), None], true).unwrap().write(0, &[&[99; 4096]]).unwrap();
    for a in [Some(&disks[0]), None] {
        let members = candidates(&[a, Some(&new), Some(&disks[2])]);
        let mirror = Mirror::open(members, Access::ReadOnly, true).unwrap();
        assert_eq!((byte(&mirror, 0), mirror.copies()), (99, 1 + usize::from(a.is_some())));
    }
    rebuild(&[None, Some(&new), None], 2, &disks[2]);
    assert_eq!(byte(&open(&[None, None, Some(&disks[2])], true).unwrap(), 0), 99);
}

/// Reads of the member still return what its flush has lost; a rebuild must not take that for a
/// copy.
#[test]
fn a_member_that_lost_a_flush_is_filled_with_what_it_lost() {
    let disks = filled(2);
    let mirror = open(&[Some(&disks[0]), Some(&disks[1])], false).unwrap();
    mirror.write(0, &[&[99; 4096]]).unwrap();
    disks[1].fail_next(Operation::Flush, 1);
    mirror.flush().unwrap();
    drop(mirror);
    rebuild(&[Some(&disks[0]), None], 1, &disks[1]);
    let state: Disk =
        Arc::new(disks[1].crash_state_with(|unflushed| vec![Fate::Lost; unflushed.len()]));
    let mirror = open(&[None, Some(&state)], true).unwrap();
    assert_eq!((byte(&mirror, 0), byte(&mirror, 1)), (99, 1));
}

#[test]
fn what_would_lose_something_or_is_useless_is_refused() {
    let disks = filled(2);
    let start = |disks: &[Option<&Disk>], position, new: &Disk, force| {
        Rebuild::start(candidates(disks), position, target(new), force).map(|_| ()).unwrap_err()
    };
    assert!(matches!(
        start(&[Some(&disks[0]), None], 1, &disks[1], false),
        ComposedError::InSync { .. }
    ));
    open(&[None, Some(&disks[1])], true).unwrap().write(0, &[&[99; 4096]]).unwrap();
    assert!(matches!(
        start(&[Some(&disks[0]), None], 1, &disks[1], false),
        ComposedError::WouldLose { .. }
    ));
    let small: Disk = Arc::new(SimulatedDevice::new(MEMBER_BYTES - 4096));
    assert!(matches!(
        start(&[Some(&disks[0]), None], 1, &small, false),
        ComposedError::TooSmall { .. }
    ));
    assert!(matches!(start(&[None, None], 1, &small, false), ComposedError::NoMember { .. }));
    // The user chose the member whose content stays.
    let mut rebuild =
        Rebuild::start(candidates(&[Some(&disks[0]), None]), 1, target(&disks[1]), true).unwrap();
    rebuild.copy(&mut |_| {}).unwrap();
    rebuild.finish().unwrap();
    expect_content(&open(&[None, Some(&disks[1])], true).unwrap());
}

#[test]
fn an_interrupted_rebuild_goes_on_unless_the_mirror_was_written_to() {
    let disks = filled(2);
    let new: Disk = Arc::new(SimulatedDevice::new(MEMBER_BYTES));
    let sources = [Some(&disks[0]), None];
    let begin = || Rebuild::start(candidates(&sources), 1, target(&new), false).unwrap();
    begin().copy(&mut |_| {}).unwrap();
    assert_eq!(begin().done_bytes(), MEMBER_BYTES - DATA_START_BYTES);
    drop(open(&sources, true).unwrap());
    assert_eq!(begin().done_bytes(), 0);
}

#[test]
fn a_source_that_cannot_be_read_is_read_around_and_unreadable_blocks_are_counted() {
    let disks = filled(2);
    let new: Disk = Arc::new(SimulatedDevice::new(MEMBER_BYTES));
    let bad = DATA_START_BYTES + 8 * 4096..DATA_START_BYTES + 10 * 4096;
    disks[0].fail_range(Operation::Read, bad.clone());
    let both = [Some(&disks[0]), Some(&disks[1])];
    let mut rebuild = Rebuild::start(candidates(&both), 1, target(&new), false).unwrap();
    rebuild.copy(&mut |_| {}).unwrap();
    assert_eq!(rebuild.unreadable_blocks(), 0);
    drop(rebuild);
    let other: Disk = Arc::new(SimulatedDevice::new(MEMBER_BYTES));
    let mut rebuild =
        Rebuild::start(candidates(&[Some(&disks[0]), None]), 1, target(&other), false).unwrap();
    rebuild.copy(&mut |_| {}).unwrap();
    assert_eq!(rebuild.unreadable_blocks(), 2);
}

/// Up to this many unflushed writes of all devices, the test tries every set of survivors.
const ALL_SETS_UP_TO: usize = 10;
/// States with random fates, torn writes among them, at each point.
const RANDOM_STATES: usize = 100;

/// Calls `visit` with fates for the unflushed writes of both devices.
fn fates_of_both(
    unflushed: [Vec<WriteInfo>; 2],
    random: &mut Seeded,
    visit: &mut dyn FnMut([Vec<Fate>; 2]),
) {
    let (first, count) = (unflushed[0].len(), unflushed[0].len() + unflushed[1].len());
    if count <= ALL_SETS_UP_TO {
        for set in 0..1_u32 << count {
            let fates: Vec<Fate> = (0..count)
                .map(|write| if set >> write & 1 == 1 { Fate::Written } else { Fate::Lost })
                .collect();
            visit([fates[..first].to_vec(), fates[first..].to_vec()]);
        }
    }
    for _ in 0..if count == 0 { 0 } else { RANDOM_STATES } {
        visit([0, 1].map(|device: usize| random_fates(&unflushed[device], random)));
    }
}

/// The power fails on all devices at every point of a rebuild. Afterwards the new member is either
/// incomplete, and the old ones work, or complete and right.
#[test]
fn a_crash_inside_a_rebuild_leaves_a_member_that_is_known_as_incomplete() {
    let mut random = Seeded::new(3);
    let disks = filled(2);
    let new: Disk = Arc::new(SimulatedDevice::new(MEMBER_BYTES));
    let source = disks[0].clone();
    // One thread: when the target is at one point of its record, the source is at the matching
    // point of its own.
    for disk in [&source, &new] {
        disk.start_recording();
    }
    let mut work =
        Rebuild::start(candidates(&[Some(&source), None]), 1, target(&new), false).unwrap();
    work.copy(&mut |_| {}).unwrap();
    let (source_copied, new_copied) = (source.history_len(), new.history_len());
    assert_eq!(source_copied, 0, "a source is not written to before the end");
    work.finish().unwrap();
    let read =
        |disks: &[Option<&Disk>]| Mirror::open(candidates(disks), Access::ReadOnly, true).unwrap();
    let (mut incomplete, mut complete) = (0, 0);
    // First the target alone advances, then (in `finish`) it flushes, the source advances, and
    // then the target again.
    let mut points: Vec<(usize, usize)> = (0..=new_copied + 1).map(|at| (0, at)).collect();
    points.extend((0..=source.history_len()).map(|at| (at, new_copied + 1)));
    points.extend((new_copied + 1..=new.history_len()).map(|at| (source.history_len(), at)));
    let mut explorers = [source.explorer(), new.explorer()];
    let mut seen = BTreeSet::new();
    for (source_at, new_at) in points {
        explorers[0].advance_to(source_at);
        explorers[1].advance_to(new_at);
        let unflushed = [0, 1].map(|disk: usize| explorers[disk].unflushed());
        fates_of_both(unflushed, &mut random, &mut |fates| {
            let [source, new] = [0, 1]
                .map(|disk: usize| Arc::new(explorers[disk].state_with(|_| fates[disk].clone())));
            if !seen.insert((explorers[0].fingerprint(&source), explorers[1].fingerprint(&new))) {
                return;
            }
            match status(ComposedKind::Mirror, &candidates(&[Some(&source), Some(&new)])).unwrap()
                [1]
            .state
            {
                MemberState::InSync => {
                    complete += 1;
                    expect_content(&read(&[None, Some(&new)]));
                }
                _ => {
                    incomplete += 1;
                    expect_content(&read(&[Some(&source), Some(&new)]));
                }
            }
            // Once more, to the end.
            match Rebuild::start(candidates(&[Some(&source), None]), 1, target(&new), false) {
                Err(ComposedError::InSync { .. }) => {}
                started => {
                    let mut rebuild = started.unwrap();
                    rebuild.copy(&mut |_| {}).unwrap();
                    rebuild.finish().unwrap();
                    expect_content(&read(&[None, Some(&new)]));
                }
            }
        });
    }
    eprintln!("{incomplete} states with an incomplete member, {complete} with a complete one");
    assert!(incomplete > 0 && complete > 0);
}
