//! Every read, write and flush of mkfs and of a repair fails in turn, once or from then on. Then
//! the power fails at every point behind it.
//!
//! What can't be read at all counts as damaged for a repair of trees: there, reads fail once only.
use super::*;
use cairn_blockdev::Operation;
use cairn_torture::behind::every_state_behind;
use std::collections::BTreeSet;

/// What was tried.
#[derive(Debug, Default)]
struct Tally {
    faults: u64,
    /// Of these, those in spite of which the step succeeded.
    absorbed: u64,
    states: u64,
    /// Different states, told apart also by whether the step had succeeded.
    images: u64,
}

/// Which reads fail.
#[derive(Clone, Copy)]
enum Reads {
    /// Each, once or from then on.
    All,
    /// One in so many, once.
    OnceOneOf(usize),
}

/// Performs `step` on a copy of `begin` with each fault, and has `judge` look at what a power
/// failure leaves behind the fault, and at whether the step had succeeded by then.
fn fail_each(
    begin: &SimulatedDevice,
    reads: Reads,
    step: &dyn Fn(&SimulatedDevice) -> Result<(), String>,
    judge: &mut dyn FnMut(bool, Arc<SimulatedDevice>) -> Result<(), String>,
) -> Tally {
    let (mut tally, mut seen) = (Tally::default(), BTreeSet::new());
    let kinds = [Operation::Read, Operation::Write, Operation::Flush];
    for (operation, lasting) in kinds.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let one_of = match (operation, lasting, reads) {
            (Operation::Read, true, Reads::OnceOneOf(_)) => continue,
            (Operation::Read, _, Reads::OnceOneOf(one_of)) => one_of,
            _ => 1,
        };
        for failing in (1..).step_by(one_of) {
            let device = begin.snapshot();
            device.start_recording();
            let mut count = 0;
            device.fail_when(move |request| {
                count += u64::from(request.operation == operation);
                let fails = if lasting { count >= failing } else { count == failing };
                request.operation == operation && fails
            });
            let result = step(&device);
            let Some(failed_at) = device.first_failure() else { break };
            device.clear_failures();
            tally.faults += 1;
            tally.absorbed += u64::from(result.is_ok());
            let end = device.history_len();
            tally.states +=
                every_state_behind(&device, failed_at, failing, &mut |position, image, state| {
                    let has_succeeded = result.is_ok() && position == end;
                    if !seen.insert((image, has_succeeded)) {
                        return Ok(());
                    }
                    tally.images += 1;
                    judge(has_succeeded, state)
                })
                .unwrap_or_else(|error| {
                    panic!("{operation} {failing} fails, lasting: {lasting}; {result:?}\n{error}")
                });
        }
    }
    eprintln!("{tally:?}");
    tally
}

/// Repairs; any error that is left is one.
fn repair_all(device: &SimulatedDevice) -> Result<(), String> {
    match repair(device)? {
        0 | 1 => Ok(()),
        code => Err(format!("the repair ends with {code}")),
    }
}

/// A new volume if mkfs said so; otherwise none, the old one, or the new one.
#[test]
fn an_error_in_mkfs_leaves_no_volume_or_a_whole_one() {
    let device = used();
    let old = holds(&device).expect("it is healthy");
    let new = {
        let device = Arc::new(device.snapshot());
        format(&*device, LOG_BYTES).expect("a new volume");
        holds(&device).expect("it is healthy")
    };
    let (mut none, mut olds, mut news) = (0, 0, 0);
    let step = |device: &SimulatedDevice| format(device, LOG_BYTES);
    let tally = fail_each(&device, Reads::All, &step, &mut |has_succeeded, state| {
        match holds(&state) {
            Err(Error::NotAVolume(_)) if !has_succeeded => none += 1,
            Err(error) => return Err(format!("neither a volume nor none: {error}")),
            Ok(found) => {
                repair_all(&state)?;
                expect_clean(&*state)?;
                match () {
                    () if found == new => news += 1,
                    () if found == old && !has_succeeded => olds += 1,
                    () => return Err(format!("neither the old nor the new volume: {found}")),
                }
            }
        }
        Ok(())
    });
    eprintln!("{none} times no volume, {olds} times the old one, {news} times the new one");
    assert!(tally.faults > 20 && none > 0 && olds > 0, "{tally:?}");
}

/// Whatever a failed repair leaves, the next one mends, and no file is worse.
#[test]
fn an_error_in_a_repair_is_repaired_by_the_next() {
    let device = used();
    let before = holds(&device).expect("it is healthy");
    let geometry = Geometry { total_blocks: VOLUME_BYTES / 4096, log_blocks: LOG_BYTES / 4096 };
    for block in [
        geometry.bitmap_block(0, 0),
        geometry.bitmap_block(0, 1),
        Geometry::SUPERBLOCKS[0],
        geometry.superblock_copy(),
    ] {
        device.corrupt(block.offset_bytes() + 100, 40, 0x5A);
    }
    let tally =
        fail_each(&device.snapshot(), Reads::All, &repair_all, &mut |has_succeeded, state| {
            if has_succeeded {
                expect_clean(&*state)?;
            }
            repair_all(&state)?;
            expect_clean(&*state)?;
            let found = holds(&state).map_err(|error| error.to_string())?;
            if found == before { Ok(()) } else { Err(format!("the files differ: {found}")) }
        });
    assert!(tally.faults > 50 && tally.images >= 5, "{tally:?}");
}

/// The same of a repair that makes the trees anew.
#[test]
fn an_error_in_a_rebuild_of_the_trees_loses_nothing() {
    let busy = busy();
    let damaged = damage_items(&busy);
    let files = readable(&busy, damaged.snapshot());
    let tally =
        fail_each(&damaged, Reads::OnceOneOf(3), &repair_all, &mut |has_succeeded, state| {
            if has_succeeded {
                return expect_repaired(&busy, &state, &files);
            }
            repair_all(&state)?;
            expect_repaired(&busy, &state, &files)
        });
    assert!(tally.faults > 30 && tally.images > 20, "{tally:?}");
}
