//! Every write, flush and discard of a run fails in turn, once, twice, at its place for ever, with
//! some of the next few, or all of them from then on, with EIO or with ENOSPC. Whatever it was: it
//! is reported, nothing wrong is read, nothing is acknowledged that is not durable, and the volume
//! stops where it must.
//!
//! Several files are written and fsynced at the same time, so that their data travels with groups;
//! writes of a set complete in an order of their own. Which request is the n-th differs a little
//! from run to run; all of them have their turn.
//!
//! A device reports a failure to one of its callers. So once more with a thread that commits all
//! the time, on a device that takes as long as it likes, before it has done something and after:
//! between the failure and the moment at which its caller learns of it, other threads write, flush
//! and acknowledge. And once more on two members, of which one fails.
//!
//! In half of the runs a client repeats an fsync that failed, until it succeeds or the volume has
//! stopped. What such a one acknowledges must be there like any other.
use cairn_blockdev::simulated::RequestInfo;
use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_engine::{Error, FlushPolicy, Volume, VolumeOptions};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::random::Seeded;
use cairn_torture::composition::Composition;
use cairn_torture::faults::Span;
use cairn_torture::files::create;
use cairn_torture::several_clients::{Company, expect_healed, expect_quiet, expect_stopped};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Earlier moments at which the power fails, of each run; and of one in which a second try fails,
/// too, so that the log loses data.
const POINTS: [u64; 2] = [1, 6];
/// With a copier, one request in half of this fails; others in each run.
const COPIER_STEP: u64 = 15;

#[derive(Clone, Copy, Debug)]
struct Fault {
    /// Requests before it.
    after: u64,
    /// Which of those that follow fail, too.
    span: Span,
    no_space: bool,
    /// Only requests of this member fail, and count.
    member: Option<usize>,
}

/// What has failed.
#[derive(Default)]
struct Happened {
    any: AtomicBool,
    /// Something else than a discard, which is only a hint: if all that follows fails as well, a
    /// caller must get the error.
    matters: AtomicBool,
}

/// Has the requests in `range_bytes` fail; says whether one did.
fn plan(device: &SimulatedDevice, fault: Fault, range_bytes: Range<u64>) -> Arc<Happened> {
    let happened = Arc::new(Happened::default());
    let (flags, mut seen, mut first) = (Arc::clone(&happened), 0, None);
    let predicate = move |request: &RequestInfo| {
        if request.operation == Operation::Read || !range_bytes.contains(&request.offset_bytes) {
            return false;
        }
        seen += 1;
        let fails = seen > fault.after && {
            let first = first.get_or_insert(*request);
            fault.span.includes(first, request, seen - fault.after - 1)
        };
        flags.any.fetch_or(fails, Ordering::SeqCst);
        flags.matters.fetch_or(fails && request.operation != Operation::Discard, Ordering::SeqCst);
        fails
    };
    if fault.no_space {
        device.fail_for_lack_of_space_when(predicate)
    } else {
        device.fail_when(predicate)
    }
    happened
}

/// The failure of a volume that was closed.
const CLOSED: &str = "the volume is closed";

struct Seen {
    happened: bool,
    stopped: bool,
    reported: bool,
}

fn one_run(
    fault: Fault,
    company: Company,
    prepared: &SimulatedDevice,
    random: &mut Seeded,
) -> Result<Seen, String> {
    let stage = company.set_up(prepared, random)?;
    let device = &stage.device;
    let flush = if random.chance(1, 2) { FlushPolicy::Overlap } else { FlushPolicy::Auto };
    let options =
        VolumeOptions { background: false, discard: true, flush, ..VolumeOptions::default() };
    let volume = Volume::open(stage.used, options).map_err(|error| error.to_string())?;
    device.set_delay(
        Operation::Flush,
        Duration::from_micros(if company.clients > 1 { 200 } else { 0 }),
    );
    let whole = 0..u64::MAX;
    let ranges = company.composition.ranges(device.length_bytes());
    let happened = plan(device, fault, fault.member.map_or(whole, |member| ranges[member].clone()));
    let mut outcome = company.work(&volume, device)?;
    let mut reported = outcome.has_reported();
    let any_happened = happened.any.load(Ordering::SeqCst);
    if reported && !any_happened {
        return Err(format!(
            "an error without a fault: {:?}",
            outcome.files.iter().flat_map(|file| &file.errors).next()
        ));
    }
    if happened.matters.load(Ordering::SeqCst) && fault.span == Span::FromThenOn && !reported {
        // A commit may have made durable what a group failed to write: then nobody needed that
        // group. The next change needs the device.
        let changed = create(&volume, b"one more", b"").and_then(|_| volume.commit());
        if changed.is_ok() {
            return Err("requests fail, and nobody is told".into());
        }
        reported = true;
    }
    let seen =
        Seen { happened: any_happened, stopped: volume.statistics().failure.is_some(), reported };
    let loses_data = matches!(fault.span, Span::Twice | Span::SamePlace);
    company.judge_work(&volume, device, &outcome, POINTS[usize::from(loses_data)], random)?;
    device.clear_failures();
    if seen.stopped {
        expect_stopped(&volume, &outcome.files)?;
        company.judge(device, &outcome, random)?;
    } else {
        let healed =
            expect_healed(&volume, &mut outcome.files, device).and_then(|()| expect_quiet(&volume));
        company.judge(device, &outcome, random)?;
        let failed = || volume.statistics().failure.is_some_and(|failure| failure != CLOSED);
        let failed_before = failed();
        let closed = volume.close();
        // The thread that wrote the log may learn of it last, when a commit has made everything
        // durable, and even during the close.
        let learned_late = happened.any.load(Ordering::SeqCst)
            && (failed_before || failed() || matches!(closed, Err(Error::Aborted(_))));
        if !learned_late {
            healed.and(closed.map_err(|error| format!("closing: {error}")))?;
        }
    }
    company.judge(device, &outcome, random)?;
    Ok(seen)
}

fn every_fault(company: Company, member: Option<usize>) {
    let mut random = Seeded::new(cairn_torture::seed_from_environment());
    let prepared = company.prepare().unwrap_or_else(|error| panic!("{company:?}: {error}"));
    let mut table = Vec::new();
    let kinds = [
        (Span::Once, false),
        (Span::Twice, false),
        (Span::SamePlace, false),
        (Span::Scattered, false),
        (Span::FromThenOn, false),
        (Span::Once, true),
        (Span::FromThenOn, true),
    ];
    let kinds = kinds.into_iter().filter(|(span, _)| {
        // Of sets only.
        company.fragmented || *span != Span::Scattered
    });
    for (span, no_space) in kinds {
        let (mut points, mut stopped, mut reported) = (0, 0, 0);
        let mut after = 0;
        loop {
            let fault = Fault { after, span, no_space, member };
            let company = Company { repeat: random.chance(1, 2), ..company };
            let seen = one_run(fault, company, &prepared, &mut random)
                .unwrap_or_else(|error| panic!("{fault:?}, {company:?}: {error}"));
            if !seen.happened {
                break;
            }
            points += 1;
            stopped += u64::from(seen.stopped);
            reported += u64::from(seen.reported);
            // Of a member, about every second one; others in each run. A copier makes many more.
            after += match () {
                () if company.copier => 1 + random.below(COPIER_STEP),
                () if member.is_some() => 1 + random.below(3),
                () => 1,
            };
        }
        let least = if member.is_some() { 7 } else { 15 };
        assert!(
            points > least && stopped > 0 && reported >= stopped,
            "{points} requests, {stopped} stopped the volume, {reported} reported"
        );
        table.push(format!(
            "{} {}: {points} requests, {stopped} stopped the volume, {} were reported to their fsync, {} healed by trying again",
            if no_space { "ENOSPC" } else { "EIO" },
            span.name(),
            reported - stopped,
            points - reported
        ));
    }
    eprintln!("{company:?}:\n{}", table.join("\n"));
}

const SINGLE: Company = Company {
    clients: 1,
    committer: false,
    copier: false,
    repeat: false,
    fragmented: false,
    composition: Composition::Single,
};

#[test]
fn every_request_of_one_client_fails_in_turn() {
    every_fault(SINGLE, None);
}

#[test]
fn every_request_of_several_clients_fails_in_turn() {
    every_fault(Company { clients: 5, ..SINGLE }, None);
}

/// What a file writes back is a set of several writes, and each of a set, or several, fail.
#[test]
fn every_request_on_a_fragmented_volume_fails_in_turn() {
    every_fault(Company { fragmented: true, ..SINGLE }, None);
}

#[test]
fn every_request_of_several_clients_on_a_fragmented_volume_fails_in_turn() {
    every_fault(Company { clients: 3, fragmented: true, ..SINGLE }, None);
}

#[test]
fn every_request_of_clients_and_a_committer_fails_in_turn() {
    every_fault(Company { clients: 4, committer: true, ..SINGLE }, None);
}

/// Snapshots, forks and rollbacks are made and removed meanwhile.
#[test]
fn requests_of_clients_and_a_copier_fail_in_turn() {
    every_fault(Company { clients: 2, copier: true, ..SINGLE }, None);
}

#[test]
fn every_second_request_of_the_first_member_fails_in_turn() {
    let composition = Composition::Concat;
    every_fault(Company { clients: 4, committer: true, composition, ..SINGLE }, Some(0));
}

#[test]
fn every_second_request_of_the_second_member_fails_in_turn() {
    let composition = Composition::Concat;
    every_fault(Company { clients: 4, committer: true, composition, ..SINGLE }, Some(1));
}
