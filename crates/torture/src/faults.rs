//! Every request of a recorded run fails in turn: the first read, the second, … the last, then writes, then flushes; once, or from
//! then on.
//!
//! Required: who asked is told, or nobody needs to be; what is read is right; and whatever was acknowledged, before the
//! failure or after it, is there after a power failure at the end. One operation that fails for any other reason than the
//! model's, and is no fsync, ends the run, since it may have been done or not.
//!
//! Each step of [`crate::systematic`] is such a run, followed by fsync and sync, and all of them one after the other are another.
use crate::found::Found;
use crate::operation::{Base, Operation, Target};
use crate::search::open;
use crate::sequence::{Attempt, Performer, Start};
use crate::systematic::{self, STEPS, Step};
use crate::verdict::judge_found;
use cairn_blockdev::simulated::Fate;
use cairn_blockdev::{Operation as Request, SimulatedDevice};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::random::Seeded;
use cairn_fsck::{CheckOptions, PassId, Severity, check};
use std::sync::Arc;

/// Which request fails.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Reads, writes or flushes.
    pub request: Request,
    /// All later ones of that kind fail as well.
    pub lasting: bool,
    /// How many of that kind succeed before.
    pub after: u64,
}

/// What came of the faults of one kind.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct FaultRow {
    /// `read`, `write` or `flush`.
    pub request: String,
    /// Whether all later requests failed, too.
    pub lasting: bool,
    /// Requests that failed, each in a run of its own.
    pub faults: u64,
    /// The volume could not be opened.
    pub refused: u64,
    /// At least one operation, or the end of the mount, returned an error.
    pub reported: u64,
    /// Nobody was told, and nothing was lost.
    pub absorbed: u64,
    /// Crash states judged afterwards.
    pub states: u64,
}

/// What was tested.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct FaultReport {
    /// Workloads of which every request failed.
    pub workloads: u64,
    /// By kind of fault.
    pub rows: Vec<FaultRow>,
    /// What was wrong.
    pub findings: Vec<String>,
}

/// How a run with a fault ended.
enum Ending {
    /// The run has no such request.
    NotReached,
    Refused,
    Reported,
    Absorbed,
}

/// All workloads: each step with what makes it durable, and all steps in one.
fn workloads() -> Vec<(String, Vec<Step>)> {
    let named = |name: &str| *STEPS.iter().find(|step| step.name == name).expect("the set has this step");
    let durable = [named("fsync a"), named("fsync d"), named("fdatasync a"), named("sync"), named("commit")];
    let alone = |step: &Step| (step.name.to_owned(), vec![*step, durable[0], durable[3]]);
    let mixed = (0..STEPS.len()).flat_map(|index| [Some(STEPS[index]), (index % 2 == 1).then(|| durable[index / 2 % durable.len()])]);
    let mut all: Vec<_> = STEPS.iter().map(alone).collect();
    all.push(("all steps".into(), mixed.flatten().collect()));
    all
}

/// Runs everything. `progress` is told the workloads done and to be done; `stop` ends it early.
///
/// # Errors
/// The volume to begin with can't be made. Findings are in the report.
pub fn run(seed: u64, stop: &AtomicBool, progress: &mut dyn FnMut(u64, u64)) -> Result<FaultReport, String> {
    let start = Start::new(&systematic::setup())?;
    let kinds = [Request::Read, Request::Write, Request::Flush].into_iter().flat_map(|request| [(request, false), (request, true)]);
    let row = |(request, lasting): (Request, bool)| FaultRow { request: request.to_string(), lasting, ..FaultRow::default() };
    let mut report = FaultReport { rows: kinds.clone().map(row).collect(), ..FaultReport::default() };
    let workloads = workloads();
    for (name, steps) in &workloads {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let operations = systematic::operations(steps, &start.model, systematic::setup().len());
        for ((request, lasting), row) in kinds.clone().zip(&mut report.rows) {
            for after in 0.. {
                let fault = Fault { request, lasting, after };
                match one(&start, &operations, fault, seed) {
                    Ok((Ending::NotReached, _)) => break,
                    Ok((ending, states)) => row.add(&ending, states),
                    Err(problem) => {
                        row.faults += 1;
                        report.findings.push(format!("{name}: {fault:?}: {problem}"));
                    }
                }
            }
        }
        report.workloads += 1;
        progress(report.workloads, workloads.len() as u64);
    }
    Ok(report)
}

impl FaultRow {
    fn add(&mut self, ending: &Ending, states: u64) {
        self.faults += 1;
        self.states += states;
        match ending {
            Ending::NotReached => {}
            Ending::Refused => self.refused += 1,
            Ending::Reported => self.reported += 1,
            Ending::Absorbed => self.absorbed += 1,
        }
    }
}

/// One run with one fault; how it ended, and how many states were judged afterwards.
fn one(start: &Start, operations: &[Operation], fault: Fault, seed: u64) -> Result<(Ending, u64), String> {
    let device = start.device();
    device.start_recording();
    let seen = Arc::new(AtomicU64::new(0));
    let counter = seen.clone();
    device.fail_when(move |request| {
        request.operation == fault.request && {
            let before = counter.fetch_add(1, Ordering::Relaxed);
            before == fault.after || fault.lasting && before > fault.after
        }
    });
    let (history, ending) = match open(&device, false) {
        Err(_) => (start.history(), Ending::Refused),
        Ok(volume) => {
            let (mut history, told) = match Performer::new(start, &volume, &device) {
                // Not even the root could be read.
                Err(_) => (start.history(), Told::Reported),
                Ok(mut performer) => {
                    let told = perform(&mut performer, operations)?;
                    (performer.into_history(), told)
                }
            };
            let closed = volume.close().is_ok();
            if closed && told != Told::Unknown {
                history.acknowledge_all(device.history_len());
            }
            (history, if closed && told == Told::Nothing { Ending::Absorbed } else { Ending::Reported })
        }
    };
    if seen.load(Ordering::Relaxed) <= fault.after {
        return Ok((Ending::NotReached, 0));
    }
    device.clear_failures();
    let mut history = history;
    history.may_be_unreadable = fault.request == Request::Write;
    let mut explorer = device.explorer();
    explorer.advance_to(explorer.history_len());
    let mut random = Seeded::new(seed ^ fault.after);
    let mut states =
        vec![Fate::Written, Fate::Lost].into_iter().map(|fate| explorer.state_with(|all| vec![fate; all.len()])).collect::<Vec<_>>();
    states.extend((0..3).map(|_| explorer.state(&mut random)));
    let count = states.len() as u64;
    for state in states {
        judge(Arc::new(state), &history, explorer.position())?;
    }
    Ok((ending, count))
}

/// Whether anybody was told of the fault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    Nothing,
    Reported,
    /// By an operation that may have been done or not.
    Unknown,
}

fn perform(performer: &mut Performer<'_>, operations: &[Operation]) -> Result<Told, String> {
    let mut told = Told::Nothing;
    for operation in operations {
        match performer.attempt(operation)? {
            Attempt::AsExpected => {}
            Attempt::Reported => told = Told::Reported,
            Attempt::Unknown => return Ok(Told::Unknown),
        }
    }
    for (path, node) in performer.model().paths() {
        let is_file = path.base == Base::Own && performer.model().node(node).is_some_and(|node| node.contents().is_some());
        let read = Operation::Read { target: Target::Path(path), offset_bytes: 0, length_bytes: 1 << 17 };
        if is_file && performer.attempt(&read)? == Attempt::Reported {
            told = Told::Reported;
        }
    }
    Ok(told)
}

/// Judges a state. Data that could not be written may be missing, which is an error for who reads it, and a finding of fsck.
fn judge(state: Arc<SimulatedDevice>, history: &crate::history::ClientHistory, position: usize) -> Result<(), String> {
    let report = check(&*state, &CheckOptions { data: true, repair: false }, &mut |_| {}).map_err(|error| format!("fsck: {error}"))?;
    let tolerated = |pass: PassId| history.may_be_unreadable && pass == PassId::Data;
    if let Some(finding) = report.findings.iter().find(|finding| finding.severity == Severity::Error && !tolerated(finding.pass)) {
        return Err(format!("fsck finds {finding:?}"));
    }
    let found = Found::read(&open(&state, true)?)?;
    judge_found(&found, std::slice::from_ref(history), position)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_of_each_kind_is_met() {
        let report = run(1, &AtomicBool::new(false), &mut |_, _| {}).unwrap_or_else(|error| panic!("{error}"));
        assert!(report.findings.is_empty(), "{}", report.findings.join("\n"));
        assert_eq!((report.workloads as usize, report.rows.len()), (STEPS.len() + 1, 6));
        for row in &report.rows {
            assert!(row.faults > 100 && row.reported > 0 && row.states > 0, "{row:?}");
            assert_eq!(row.faults, row.refused + row.reported + row.absorbed, "{row:?}");
        }
    }

    #[test]
    fn a_false_acknowledgement_is_noticed() {
        let start = Start::new(&systematic::setup()).expect("a new volume");
        let state = start.device();
        let mut history = start.history();
        let volume = open(&state, true).expect("it opens");
        let found = Found::read(&volume).expect("it is healthy");
        judge_found(&found, std::slice::from_ref(&history), 0).expect("nothing was done");
        let mut model = start.model.clone();
        let path = crate::operation::Path { base: Base::Own, names: vec![crate::operation::Name(0)] };
        let write = Operation::Write {
            target: Target::Path(path),
            offset_bytes: 0,
            length_bytes: 10,
            tag: crate::contents::Tag { client: 9, operation: 0 },
        };
        let (_, effects) = model.apply(&write);
        history.push(write, crate::history::Span { history_begin: 0, begin: 50, end: 51 }, &effects, &model);
        history.acknowledge_all(0);
        judge_found(&found, std::slice::from_ref(&history), 0).expect_err("the write isn't there");
    }
}
