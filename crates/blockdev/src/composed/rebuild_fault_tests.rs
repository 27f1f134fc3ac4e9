//! Every read, write and flush of a rebuild fails in turn, on the source or on the new member, once
//! or from then on. Then the power fails on both at every point behind it.

use super::mirror_tests::{Disk, MEMBER_BYTES, candidates};
use super::rebuild_tests::{expect_content, filled};
use super::{Access, Candidate, ComposedError, ComposedKind, MemberState, Mirror, Rebuild};
use crate::composed::members::status;
use crate::error::{DeviceError, Operation};
use crate::simulated::{Fate, random_fates};
use crate::{BlockDevice, SimulatedDevice, forward_to_device};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use std::collections::BTreeSet;
use std::sync::Arc;

/// How long the records of source and new member are, before and after each request of either.
struct Moments {
    disks: [Disk; 2],
    list: Mutex<Vec<[usize; 2]>>,
}

impl Moments {
    fn note(&self) {
        let now = self.disks.each_ref().map(|disk| disk.history_len());
        let mut list = self.list.lock();
        if list.last() != Some(&now) {
            list.push(now);
        }
    }
}

/// One of the two disks.
struct Noted {
    disk: usize,
    moments: Arc<Moments>,
}

impl Noted {
    fn around<R>(&self, request: impl FnOnce(&Disk) -> R) -> R {
        self.moments.note();
        let result = request(&self.moments.disks[self.disk]);
        self.moments.note();
        result
    }
}

impl BlockDevice for Noted {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.around(|disk| disk.read(offset_bytes, buffer))
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.around(|disk| disk.write(offset_bytes, buffers))
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.around(|disk| disk.flush())
    }

    forward_to_device!(self => self.moments.disks[self.disk]; discard, length_bytes, flush_time);
}

/// Fills `new` from `source`; how many blocks could not be read.
fn fill(source: Arc<dyn BlockDevice>, new: Arc<dyn BlockDevice>) -> Result<u64, ComposedError> {
    let candidate = |name: &str, device| Candidate { name: name.to_owned(), device };
    let sources = vec![candidate("a", Some(source)), candidate("b", None)];
    let mut rebuild = Rebuild::start(sources, 1, candidate("new", Some(new)), false)?;
    rebuild.copy(&mut |_| {})?;
    let unreadable = rebuild.unreadable_blocks();
    rebuild.finish().map(|()| unreadable)
}

fn read(disks: &[Option<&Disk>]) -> Mirror {
    Mirror::open(candidates(disks), Access::ReadOnly, true).expect("it opens")
}

/// The new member is known as incomplete, or is right; the source is as good as before; and the
/// next rebuild ends well. Blocks that could not be read are missing on the new member only.
fn judge([source, new]: [Disk; 2], has_succeeded: bool, unreadable: u64) -> MemberState {
    expect_content(&read(&[Some(&source), None]));
    let members = status(ComposedKind::Mirror, &candidates(&[Some(&source), Some(&new)]));
    let state = members.expect("labels")[1].state;
    let is_whole = state == MemberState::InSync && unreadable == 0;
    assert!(state == MemberState::InSync || !has_succeeded, "{state:?}");
    if is_whole {
        expect_content(&read(&[None, Some(&new)]));
    }
    match fill(source.clone(), new.clone()) {
        Err(ComposedError::InSync { .. }) => assert_eq!(state, MemberState::InSync),
        filled => assert_eq!(filled.expect("both are healthy"), 0),
    }
    // The next rebuild goes on where this one ended. What that one could not read is found by its
    // checksum, see `Rebuild::view`.
    let copy = if unreadable == 0 { [None, Some(&new)] } else { [Some(&source), None] };
    expect_content(&read(&copy));
    state
}

#[test]
fn an_error_in_a_rebuild_leaves_a_member_that_is_known_as_incomplete() {
    let begin = filled(2).swap_remove(0);
    let (mut random, mut seen) = (Seeded::new(3), BTreeSet::new());
    let (mut faults, mut incomplete, mut complete) = (0, 0, 0);
    let kinds = [Operation::Read, Operation::Write, Operation::Flush];
    let all = kinds.into_iter().flat_map(|kind| {
        [0, 1].into_iter().flat_map(move |disk| [(kind, disk, false), (kind, disk, true)])
    });
    for (operation, failing, lasting) in all {
        for number in 1.. {
            let disks = [Arc::new(begin.snapshot()), Arc::new(SimulatedDevice::new(MEMBER_BYTES))];
            disks.iter().for_each(|disk| disk.start_recording());
            let mut count = 0;
            disks[failing].fail_when(move |request| {
                count += u64::from(request.operation == operation);
                let fails = if lasting { count >= number } else { count == number };
                request.operation == operation && fails
            });
            let list = Mutex::new(Rank::LEAF, Vec::new());
            let moments = Arc::new(Moments { disks, list });
            let noted = |disk| Arc::new(Noted { disk, moments: moments.clone() });
            let result = fill(noted(0), noted(1));
            moments.note();
            let Some(failed_at) = moments.disks[failing].first_failure() else { break };
            faults += 1;
            let unreadable = *result.as_ref().unwrap_or(&0);
            let mut explorers = moments.disks.each_ref().map(|disk| disk.explorer());
            let moments = moments.list.lock().clone();
            for at in moments.iter().filter(|at| at[failing] >= failed_at) {
                (0..2).for_each(|disk: usize| explorers[disk].advance_to(at[disk]));
                let has_succeeded = result.is_ok() && Some(at) == moments.last();
                let unflushed = explorers.each_ref().map(|explorer| explorer.unflushed());
                let (lost, written) = (Fate::Lost, Fate::Written);
                let both = |fates: [&Fate; 2]| {
                    [0, 1].map(|disk: usize| vec![fates[disk].clone(); unflushed[disk].len()])
                };
                let ends =
                    [[&lost, &lost], [&written, &written], [&lost, &written], [&written, &lost]];
                let mut sets: Vec<_> = ends.into_iter().map(both).collect();
                sets.extend((0..2).map(|_| {
                    unflushed.each_ref().map(|unflushed| random_fates(unflushed, &mut random))
                }));
                for fates in sets {
                    let states = [0, 1].map(|disk: usize| {
                        Arc::new(explorers[disk].state_with(|_| fates[disk].clone()))
                    });
                    let image =
                        [0, 1].map(|disk: usize| explorers[disk].fingerprint(&states[disk]));
                    if seen.insert((image, has_succeeded, unreadable)) {
                        match judge(states, has_succeeded, unreadable) {
                            MemberState::InSync => complete += 1,
                            _ => incomplete += 1,
                        }
                    }
                }
            }
        }
    }
    eprintln!("{faults} faults, {incomplete} incomplete members, {complete} complete ones");
    assert!(faults > 20 && incomplete > 0 && complete > 0);
}
