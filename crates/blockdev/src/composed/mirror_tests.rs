//! A mirror of simulated devices: loss, return, damage and crashes of its members.

use super::making::make;
use super::members::{Access, Candidate, status};
use super::{ComposedError, ComposedKind, Concat, MemberState, Mirror};
use crate::composed::label::DATA_START_BYTES;
use crate::error::Operation;
use crate::simulated::{Fate, RequestInfo};
use crate::{BlockDevice, DeviceError, SimulatedDevice, forward_to_device, read_verified};
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

pub(super) const MEMBER_BYTES: u64 = 3 << 20;

pub(super) type Disk = Arc<SimulatedDevice>;

pub(super) fn disks(count: usize) -> Vec<Disk> {
    (0..count).map(|_| Arc::new(SimulatedDevice::new(MEMBER_BYTES))).collect()
}

pub(super) fn candidates(disks: &[Option<&Disk>]) -> Vec<Candidate> {
    let device = |disk: &Disk| -> Arc<dyn BlockDevice> { disk.clone() };
    (b'a'..)
        .zip(disks)
        .map(|(name, disk)| Candidate {
            name: char::from(name).to_string(),
            device: disk.map(device),
        })
        .collect()
}

pub(super) fn new_mirror(count: usize) -> Vec<Disk> {
    let disks = disks(count);
    let named: Vec<(String, Arc<dyn BlockDevice>)> =
        disks.iter().map(|disk| ("disk".to_owned(), disk.clone() as _)).collect();
    assert_eq!(make(ComposedKind::Mirror, &named).unwrap(), MEMBER_BYTES - DATA_START_BYTES);
    disks
}

pub(super) fn open(disks: &[Option<&Disk>], degraded: bool) -> Result<Mirror, ComposedError> {
    Mirror::open(candidates(disks), Access::ReadWrite, degraded)
}

fn fill(device: &dyn BlockDevice, block: u64, byte: u8) {
    device.write(block * 4096, &[&[byte; 4096]]).unwrap();
}

pub(super) fn byte(device: &dyn BlockDevice, block: u64) -> u8 {
    let mut bytes = vec![0; 4096];
    device.read(block * 4096, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a mixture");
    bytes[0]
}

fn state_of(disks: &[Option<&Disk>]) -> Vec<MemberState> {
    status(ComposedKind::Mirror, &candidates(disks))
        .unwrap()
        .iter()
        .map(|member| member.state)
        .collect()
}

#[test]
fn both_members_hold_what_was_written_and_a_flush_reaches_both() {
    let disks = new_mirror(2);
    let mirror = open(&[Some(&disks[0]), Some(&disks[1])], false).unwrap();
    fill(&mirror, 3, 7);
    mirror.flush().unwrap();
    for disk in &disks {
        assert!(disk.unflushed().is_empty());
    }
    assert_eq!(
        (0..2)
            .map(|copy| {
                let mut bytes = vec![0; 4096];
                mirror.read_copy(copy, 3 * 4096, &mut bytes).unwrap();
                bytes[9]
            })
            .collect::<Vec<_>>(),
        [7, 7]
    );
    assert_eq!(mirror.copies(), 2);
}

#[test]
fn the_slowest_member_decides_the_flush_time_and_they_flush_together() {
    let disks = new_mirror(2);
    disks[0].set_flush_time(Duration::from_millis(3));
    disks[1].set_flush_time(Duration::from_millis(9));
    let mirror = open(&[Some(&disks[0]), Some(&disks[1])], false).unwrap();
    for _ in 0..3 {
        mirror.flush().unwrap();
    }
    assert_eq!(mirror.flush_time(), disks[1].flush_time());
    assert!(mirror.flush_time() > disks[0].flush_time());
}

#[test]
fn a_member_that_fails_a_write_is_left_behind_and_never_read_again() {
    for failing in 0..2 {
        for operation in [Operation::Write, Operation::Flush] {
            let disks = new_mirror(2);
            let mirror = open(&[Some(&disks[0]), Some(&disks[1])], false).unwrap();
            fill(&mirror, 1, 1);
            mirror.flush().unwrap();
            disks[failing].fail_when(move |request: &RequestInfo| request.operation == operation);
            fill(&mirror, 1, 2);
            mirror.flush().unwrap();
            fill(&mirror, 2, 2);
            mirror.flush().unwrap();
            assert_eq!((byte(&mirror, 1), byte(&mirror, 2), mirror.copies()), (2, 2, 1));
            let health = mirror.health().unwrap();
            assert!(
                health.degraded && health.members[failing].state.contains("failed"),
                "{health:?}"
            );
            drop(mirror);
            disks[failing].clear_failures();
            let both = [Some(&disks[0]), Some(&disks[1])];
            assert_eq!(state_of(&both)[failing], MemberState::Stale);
            let error = open(&both, false).map(|_| ()).unwrap_err();
            assert!(matches!(error, ComposedError::Degraded { .. }), "{error}");
            assert_eq!(byte(&open(&both, true).unwrap(), 1), 2);
        }
    }
}

#[test]
fn an_error_of_all_members_is_returned_and_leaves_no_member_behind() {
    let disks = new_mirror(2);
    let both = [Some(&disks[0]), Some(&disks[1])];
    let mirror = open(&both, false).unwrap();
    for disk in &disks {
        disk.fail_next(Operation::Write, 1);
    }
    assert!(mirror.write(0, &[&[1; 4096]]).is_err());
    assert!(!mirror.health().unwrap().degraded);
    fill(&mirror, 0, 2);
    drop(mirror);
    let mirror = open(&both, false).unwrap();
    assert!(
        mirror.health().unwrap().copies_may_differ,
        "a failed write may have reached one of them"
    );
}

#[test]
fn going_on_without_a_member_is_asked_for_and_remembered() {
    let disks = new_mirror(2);
    let (both, first, second) =
        ([Some(&disks[0]), Some(&disks[1])], [Some(&disks[0]), None], [None, Some(&disks[1])]);
    fill(&open(&both, false).unwrap(), 5, 1);
    assert!(matches!(open(&first, false), Err(ComposedError::Degraded { .. })));
    fill(&open(&first, true).unwrap(), 5, 2);
    assert_eq!(state_of(&both), [MemberState::InSync, MemberState::Stale]);
    assert_eq!(byte(&open(&both, true).unwrap(), 5), 2);
    // The stale member alone opens; both together show that they diverged.
    fill(&open(&second, true).unwrap(), 5, 3);
    assert!(matches!(open(&both, true), Err(ComposedError::Diverged { .. })));
}

#[test]
fn an_old_copy_of_a_member_that_is_put_back_is_not_read() {
    let disks = new_mirror(2);
    fill(&open(&[Some(&disks[0]), Some(&disks[1])], false).unwrap(), 5, 1);
    let old = Arc::new(disks[0].snapshot());
    fill(&open(&[Some(&disks[0]), Some(&disks[1])], false).unwrap(), 5, 2);
    let put_back = [Some(&old), Some(&disks[1])];
    assert_eq!(state_of(&put_back), [MemberState::Stale, MemberState::InSync]);
    assert_eq!(byte(&open(&put_back, true).unwrap(), 5), 2);
}

#[test]
fn a_bad_copy_is_read_around_and_written_again() {
    for bad in 0..2 {
        let disks = new_mirror(2);
        let mirror = open(&[Some(&disks[0]), Some(&disks[1])], false).unwrap();
        fill(&mirror, 9, 4);
        mirror.flush().unwrap();
        disks[bad].corrupt(DATA_START_BYTES + 9 * 4096 + 100, 8, 0xff);
        let mut bytes = vec![0; 4096];
        let verify = |bytes: &[u8]| {
            if bytes.iter().all(|byte| *byte == 4) { Ok(()) } else { Err("damaged") }
        };
        assert_eq!(read_verified(&mirror, 9 * 4096, &mut bytes, verify).unwrap(), Ok(()));
        // Reads try member 0 first. If member 1 was damaged, they saw no damage and repaired
        // nothing.
        assert_eq!(mirror.health().unwrap().repaired_blocks, u64::from(bad == 0));
        mirror.repair(9 * 4096, &bytes).unwrap();
        assert_eq!(mirror.health().unwrap().repaired_blocks, 1);
        mirror.flush().unwrap();
        assert!(verify(&bytes).is_ok() && disks.iter().all(|disk| byte(&**disk, 256 + 9) == 4));
    }
}

#[test]
fn a_copy_that_cannot_be_read_is_read_around_and_written_again() {
    let disks = new_mirror(2);
    let mirror = open(&[Some(&disks[0]), Some(&disks[1])], false).unwrap();
    fill(&mirror, 9, 4);
    mirror.flush().unwrap();
    disks[0].fail_range(Operation::Read, DATA_START_BYTES + 9 * 4096..DATA_START_BYTES + 10 * 4096);
    assert_eq!(byte(&mirror, 9), 4);
    let health = mirror.health().unwrap();
    assert_eq!(
        (health.repaired_blocks, health.members[0].rewritten_blocks, health.degraded),
        (1, 1, false)
    );
}

#[test]
fn a_repair_never_brings_old_bytes_back() {
    let disks = new_mirror(2);
    let mirror = open(&[Some(&disks[0]), Some(&disks[1])], false).unwrap();
    fill(&mirror, 9, 5);
    mirror.repair(9 * 4096, &[4; 4096]).unwrap();
    assert_eq!((byte(&mirror, 9), mirror.health().unwrap().repaired_blocks), (5, 0));
}

#[test]
fn copies_that_differ_after_a_crash_are_made_the_same() {
    let mut random = Seeded::new(11);
    let mut differed = 0;
    for _ in 0..40 {
        let disks = new_mirror(2);
        let mirror = open(&[Some(&disks[0]), Some(&disks[1])], false).unwrap();
        (0..8).for_each(|block| fill(&mirror, block, 1));
        mirror.flush().unwrap();
        (0..4).for_each(|block| mirror.write(block * 4096, &[&[2; 4096]]).unwrap());
        let crashed: Vec<Disk> =
            disks.iter().map(|disk| Arc::new(disk.crash_state(&mut random))).collect();
        let mirror = open(&[Some(&crashed[0]), Some(&crashed[1])], false).unwrap();
        assert!(mirror.health().unwrap().copies_may_differ);
        mirror.resynchronise(&[0..4096, 4096..8 * 4096]).unwrap();
        let health = mirror.health().unwrap();
        assert!(!health.copies_may_differ);
        differed += health.resynchronised_blocks;
        let content = |disk: &Disk| {
            let mut bytes = vec![0; 8 * 4096];
            disk.read(DATA_START_BYTES, &mut bytes).unwrap();
            bytes
        };
        assert!(content(&crashed[0]) == content(&crashed[1]));
        (4..8).for_each(|block| assert_eq!(byte(&mirror, block), 1));
        drop(mirror);
        let mirror = open(&[Some(&crashed[0]), Some(&crashed[1])], false).unwrap();
        assert!(!mirror.health().unwrap().copies_may_differ, "it was closed");
    }
    assert!(differed > 0, "no crash made a difference");
}

/// What one member acknowledged while the other was missing is never lost, wherever the power
/// fails. Every state of both members, together with an old state of the missing one, opens to
/// the newer content or not at all.
#[test]
fn no_crash_while_a_member_is_left_behind_brings_it_back() {
    let mut random = Seeded::new(5);
    let disks = new_mirror(2);
    let mirror = open(&[Some(&disks[0]), Some(&disks[1])], false).unwrap();
    fill(&mirror, 0, 1);
    mirror.flush().unwrap();
    disks.iter().for_each(|disk| disk.start_recording());
    disks[0].fail_when(|request| request.operation == Operation::Write);
    fill(&mirror, 0, 2);
    mirror.flush().unwrap();
    let acknowledged = disks[1].history_len();
    fill(&mirror, 0, 3);
    mirror.flush().unwrap();
    let mut explorer = disks[1].explorer();
    loop {
        for _ in 0..8 {
            let (lost, survivor) =
                (Arc::new(disks[0].snapshot()), Arc::new(explorer.state(&mut random)));
            let mut found = vec![0; 4096];
            open(&[Some(&lost), Some(&survivor)], true).unwrap().read(0, &mut found).unwrap();
            // The write that was not flushed yet may be torn.
            let allowed: &[u8] =
                if explorer.position() >= acknowledged { &[2, 3] } else { &[1, 2] };
            assert!(
                found.iter().all(|byte| allowed.contains(byte)),
                "after {} events",
                explorer.position()
            );
        }
        if !explorer.advance() {
            break;
        }
    }
}

/// A process is killed at any request of an opening, the next one too, and then the power fails
/// and nothing unflushed is left: both members are in sync all the same.
#[test]
fn labels_that_a_killed_process_left_unflushed_leave_no_member_behind() {
    let open_and_stop = |disks: &[Disk], requests: i64| {
        let left = Arc::new(AtomicI64::new(requests));
        for disk in disks {
            let left = left.clone();
            disk.fail_when(move |request| {
                request.operation != Operation::Read && left.fetch_sub(1, Ordering::SeqCst) <= 0
            });
        }
        let _ = open(&[Some(&disks[0]), Some(&disks[1])], false);
        disks.iter().for_each(|disk| disk.clear_failures());
    };
    for (first, second) in (0..12).flat_map(|first| (0..12).map(move |second| (first, second))) {
        let disks = new_mirror(2);
        disks.iter().for_each(|disk| disk.start_recording());
        open_and_stop(&disks, first);
        open_and_stop(&disks, second);
        let left: Vec<Disk> = Vec::from_iter(disks.iter().map(|disk| {
            let mut explorer = disk.explorer();
            explorer.advance_to(disk.history_len());
            Arc::new(explorer.state_with(|unflushed| vec![Fate::Lost; unflushed.len()]))
        }));
        let opened = open(&[Some(&left[0]), Some(&left[1])], false);
        assert!(opened.is_ok(), "killed after {first}, then after {second} requests");
    }
}

#[test]
fn a_reader_writes_nothing() {
    let disks = new_mirror(2);
    let writes = disks[0].counters().writes;
    let mirror =
        Mirror::open(candidates(&[Some(&disks[0]), Some(&disks[1])]), Access::ReadOnly, false)
            .unwrap();
    assert!(mirror.write(0, &[&[1; 4096]]).is_err() && mirror.flush().is_err());
    mirror.repair(0, &[0; 4096]).unwrap();
    drop(mirror);
    assert_eq!(disks[0].counters().writes, writes);
}

#[test]
fn a_concatenation_goes_across_its_members() {
    let disks = disks(3);
    let named: Vec<(String, Arc<dyn BlockDevice>)> =
        disks.iter().map(|disk| ("disk".to_owned(), disk.clone() as _)).collect();
    assert_eq!(make(ComposedKind::Concat, &named).unwrap(), 6 << 20);
    // In another order than at creation.
    let order = [Some(&disks[2]), Some(&disks[0]), Some(&disks[1])];
    let concat = Concat::open(candidates(&order), Access::ReadWrite).unwrap();
    let bytes: Vec<u8> = (0..4 << 20).map(|at| (at / 4096 % 251) as u8).collect();
    let (front, back) = bytes.split_at(3 << 20);
    concat.write(1 << 20, &[front, back]).unwrap();
    concat.flush().unwrap();
    let mut read = vec![0; 4 << 20];
    concat.read(1 << 20, &mut read).unwrap();
    assert!(read == bytes);
    assert_eq!(
        (byte(&*disks[0], 256 + 256), byte(&*disks[1], 256), byte(&*disks[2], 256)),
        (0, bytes[1 << 20], bytes[3 << 20])
    );
    assert_eq!((concat.length_bytes(), concat.copies()), (6 << 20, 1));
    disks[1].fail_next(Operation::Write, 1);
    assert!(
        concat.write((2 << 20) - 4096, &[&[0; 8192]]).is_err(),
        "an error of one is an error of all"
    );
    disks[2].fail_next(Operation::Flush, 1);
    assert!(concat.flush().is_err());
    drop(concat);
    assert!(matches!(
        Concat::open(candidates(&[Some(&disks[2]), None, Some(&disks[1])]), Access::ReadOnly),
        Err(ComposedError::Incomplete { .. })
    ));
}

#[test]
fn three_members_lose_two() {
    let disks = new_mirror(3);
    let all = [Some(&disks[0]), Some(&disks[1]), Some(&disks[2])];
    let mirror = open(&all, false).unwrap();
    fill(&mirror, 0, 1);
    disks[0].fail_when(|request| request.operation == Operation::Write);
    fill(&mirror, 0, 2);
    disks[1].fail_when(|request| request.operation == Operation::Write);
    fill(&mirror, 0, 3);
    mirror.flush().unwrap();
    assert_eq!((byte(&mirror, 0), mirror.copies()), (3, 1));
    drop(mirror);
    disks.iter().for_each(|disk| disk.clear_failures());
    assert_eq!(state_of(&all), [MemberState::Stale, MemberState::Stale, MemberState::InSync]);
    assert_eq!(byte(&open(&all, true).unwrap(), 0), 3);
}

#[test]
fn a_closed_mirror_that_is_written_to_is_open_again() {
    let disks = new_mirror(2);
    let both = [Some(&disks[0]), Some(&disks[1])];
    let mirror = open(&both, false).unwrap();
    let may_differ = || {
        let now: Vec<Disk> = disks.iter().map(|disk| Arc::new(disk.snapshot())).collect();
        open(&[Some(&now[0]), Some(&now[1])], false).unwrap().health().unwrap().copies_may_differ
    };
    assert!(may_differ());
    mirror.close().unwrap();
    assert!(!may_differ());
    fill(&mirror, 1, 1);
    assert!(may_differ());
    mirror.close().unwrap();
    assert!(!may_differ());
}

/// A member whose flush fails for the thread "failing" and reports that late. The flush of
/// another thread, which comes in between, succeeds.
struct LateError {
    disk: Disk,
    failed: AtomicBool,
    other_done: AtomicBool,
}

fn wait_for(flag: &AtomicBool) {
    for _ in 0..200 {
        if flag.load(Ordering::SeqCst) {
            return;
        }
        clock::sleep(Duration::from_millis(1));
    }
}

impl BlockDevice for LateError {
    fn flush(&self) -> Result<(), DeviceError> {
        match std::thread::current().name() {
            Some("failing") if !self.failed.load(Ordering::SeqCst) => {
                self.disk.fail_next(Operation::Flush, 1);
                let result = self.disk.flush();
                self.failed.store(true, Ordering::SeqCst);
                wait_for(&self.other_done);
                result
            }
            Some("other") => {
                wait_for(&self.failed);
                self.disk.flush()
            }
            _ => self.disk.flush(),
        }
    }

    forward_to_device!(self => self.disk; read, write, discard, length_bytes, flush_time);
}

#[test]
fn a_flush_beside_one_that_fails_returns_after_the_labels_leave_the_member_behind() {
    let disks = new_mirror(2);
    let late = Arc::new(LateError {
        disk: disks[0].clone(),
        failed: AtomicBool::new(false),
        other_done: AtomicBool::new(false),
    });
    let members: [Arc<dyn BlockDevice>; 2] = [late.clone(), disks[1].clone()];
    let named = members
        .into_iter()
        .map(|device| Candidate { name: "disk".into(), device: Some(device) })
        .collect();
    let mirror = Arc::new(Mirror::open(named, Access::ReadWrite, false).unwrap());
    fill(&*mirror, 3, 7);
    let shared = mirror.clone();
    let failing = thread::spawn("failing", move || shared.flush());
    let (shared, members) = (mirror.clone(), disks.clone());
    let other = thread::spawn("other", move || {
        let flushed = shared.flush();
        let lost = |disk: &Disk| {
            Arc::new(disk.crash_state_with(|unflushed| vec![Fate::Lost; unflushed.len()]))
        };
        let states: Vec<Disk> = members.iter().map(lost).collect();
        late.other_done.store(true, Ordering::SeqCst);
        (flushed, states)
    });
    let (flushed, states) = other.join().unwrap();
    failing.join().unwrap().unwrap();
    flushed.unwrap();
    let after_crash = open(&[Some(&states[0]), Some(&states[1])], true).unwrap();
    assert_eq!(
        byte(&after_crash, 3),
        7,
        "the flush was acknowledged, and a member that lost what it covered is read"
    );
}
