//! The faults of `cairn torture faults` reach everything, and its judge is not blind.
use super::*;
use crate::found::Found;
use crate::verdict::judge_found;
use cairn_blockdev::{DeviceError, forward_to_device};
use cairn_engine::AttributeChange;

/// A sample of the workloads: the whole run is one of `scripts/torture`.
#[test]
fn each_fault_of_a_sample_has_an_outcome() {
    let mut progress = Vec::new();
    let report =
        run(1, Some(2), &AtomicBool::new(false), &mut |done, of| progress.push((done, of)))
            .unwrap_or_else(|error| panic!("{error}"));
    assert!(report.findings.is_empty(), "{}", report.findings.join("\n"));
    assert_eq!((report.workloads, report.operations.len()), (2, 2));
    assert_eq!(progress, [(1, 2), (2, 2)]);
    for request in ["read", "write", "flush"] {
        let mut rows = report.rows.iter().filter(|row| row.request == request);
        assert!(rows.any(|row| row.outcomes.states > 0), "no {request} failed: {:?}", report.rows);
    }
    let all = report
        .rows
        .iter()
        .map(|row| row.outcomes)
        .chain(report.operations.iter().map(|row| row.outcomes));
    for row in all {
        assert!(row.faults > 0);
        assert_eq!(row.faults, row.refused + row.reported + row.stopped + row.absorbed, "{row:?}");
    }
    let sum = |faults: u64, row: &Outcomes| faults + row.faults;
    let by_structure = report.rows.iter().map(|row| &row.outcomes).fold(0, sum);
    assert_eq!(by_structure, report.operations.iter().map(|row| &row.outcomes).fold(0, sum));
}

/// A whole run that met too few faults of a kind, or none of a structure, or saw no error, says so.
#[test]
fn a_kind_of_fault_that_is_not_met_is_noticed() {
    let kinds = kinds();
    let mut rows = all_rows(&kinds);
    for row in &mut rows {
        let is_possible = (row.request == "flush") == (row.structure == Structure::Device);
        let (faults, reported, states) = if is_possible { (101, 1, 1) } else { (0, 0, 0) };
        row.outcomes = Outcomes { faults, reported, states, ..Outcomes::default() };
    }
    assert_eq!(missed(&rows, &kinds), [""; 0]);
    let last = rows.last_mut().expect("there are rows");
    (last.outcomes.faults, last.outcomes.reported, last.outcomes.states) = (0, 0, 0);
    assert_eq!(
        missed(&rows, &kinds),
        [
            "flush ENOSPC from then on: 0 faults, at least 101",
            "flush ENOSPC from then on: 0 reported, at least 1",
            "flush ENOSPC from then on: 0 crash states, at least 1",
            "flush ENOSPC from then on: 0 -, at least 1",
        ]
    );
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
    history.push(
        write,
        crate::history::Span { history_begin: 0, begin: 50, end: 51 },
        &effects,
        &model,
    );
    history.acknowledge_all(0);
    judge_found(&found, std::slice::from_ref(&history), 0).expect_err("the write isn't there");
}

/// A file that is longer than before, without the data that made it longer.
#[test]
fn a_size_ahead_of_its_data_is_noticed() {
    let start = Start::new(&systematic::setup()).expect("a new volume");
    let state = start.device();
    let volume = open(&state, false).expect("it opens");
    let name = crate::operation::Name(0);
    let inode = volume.lookup(volume.root(), &name.bytes(0)).expect("it was made").inode;
    let longer = AttributeChange { size: Some(15_000), ..AttributeChange::default() };
    volume.set_attributes(inode, &longer).expect("it is healthy");
    let found = Found::read(&volume).expect("it is healthy");
    let (mut history, mut model) = (start.history(), start.model.clone());
    history.times.clear();
    let target = Target::Path(crate::operation::Path { base: Base::Own, names: vec![name] });
    let append = Operation::Write {
        target: target.clone(),
        offset_bytes: 6000,
        length_bytes: 9000,
        tag: crate::contents::Tag { client: 0, operation: 0 },
    };
    let mut push = |operation: Operation| {
        let (_, effects) = model.apply(&operation);
        let span = crate::history::Span { history_begin: 0, begin: 50, end: 51 };
        history.push(operation, span, &effects, &model);
        judge_found(&found, std::slice::from_ref(&history), 1)
    };
    let error = push(append).expect_err("the data is not there");
    assert!(error.contains("block 2 holds"), "{error}");
    // What sets the length needs no data.
    let set = Operation::Truncate { target, size_bytes: 15_001 };
    push(set).expect("a length that was set");
}

/// A device whose driver repeats a flush that failed: the second one succeeds, without the writes
/// that the first one should have covered.
struct RepeatsFlushes(Arc<SimulatedDevice>);

impl BlockDevice for RepeatsFlushes {
    fn flush(&self) -> Result<(), DeviceError> {
        self.0.flush().or_else(|_| self.0.flush())
    }
    forward_to_device!(self => self.0; read, write, write_set, discard, length_bytes, flush_time);
}

/// The end of the mount writes all trees, so what was lost is there again.
#[test]
fn a_repeated_flush_is_found_before_the_end() {
    let start = Start::new(&systematic::setup()).expect("a new volume");
    let named = |name: &str| *STEPS.iter().find(|step| step.name == name).expect("a step");
    let steps = ["set the mode of a", "fsync a", "sync"].map(named);
    let operations = systematic::operations(&steps, &start.model, systematic::setup().len());
    let kind = FaultKind { request: Request::Flush, no_space: false, span: Span::Once };
    let (mut behind, mut at_the_end) = (Vec::new(), Vec::new());
    for after in 0.. {
        let device = start.device();
        device.start_recording();
        let failed = plan(&device, Fault { kind, after });
        let seen = Arc::new(RepeatsFlushes(device.clone()));
        let ran = run_with_fault(&start, &operations, &device, seen);
        let (history, _) = ran.unwrap_or_else(|error| panic!("{error}"));
        let (Some(_), Some(failed_at)) = (failed.get(), device.first_failure()) else { break };
        let end = device.history_len();
        let recording = Recording { device, history };
        behind.push(search_behind(&recording, failed_at, after).is_err());
        at_the_end.push(search_behind(&recording, end, after).is_err());
    }
    eprintln!("behind the flush {behind:?}, at the end {at_the_end:?}");
    assert!(
        behind.iter().zip(&at_the_end).any(|(behind, at_the_end)| *behind && !at_the_end),
        "behind the flush {behind:?}, at the end {at_the_end:?}"
    );
}
