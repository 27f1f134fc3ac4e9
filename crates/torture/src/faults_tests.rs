//! The faults of `cairn torture faults` reach everything, and its judge is not blind.
use super::*;
use crate::found::Found;
use crate::verdict::judge_found;
use cairn_blockdev::{DeviceError, forward_to_device};
use cairn_engine::AttributeChange;

#[test]
fn every_request_of_each_kind_is_met() {
    let report =
        run(1, &AtomicBool::new(false), &mut |_, _| {}).unwrap_or_else(|error| panic!("{error}"));
    assert!(report.findings.is_empty(), "{}", report.findings.join("\n"));
    eprintln!("{:?}", report.search);
    assert!(report.too_little.is_empty(), "it checked too little: {:?}", report.too_little);
    assert_eq!(
        (report.workloads as usize, report.operations.len()),
        (STEPS.len() + 1, STEPS.len() + 1)
    );
    for kind in kinds() {
        let rows = report.rows.iter().filter(|row| {
            let error = if kind.no_space { "ENOSPC" } else { "EIO" };
            (row.request.as_str(), row.error, row.span)
                == (&*kind.request.to_string(), error, kind.span)
        });
        let sum =
            |count: fn(&Outcomes) -> u64| rows.clone().map(|row| count(&row.outcomes)).sum::<u64>();
        assert!(
            sum(|row| row.faults) > 100
                && sum(|row| row.reported + row.stopped) > 0
                && sum(|row| row.states) > 0,
            "{kind:?}"
        );
        let structures: Vec<Structure> = rows.clone().map(|row| row.structure).collect();
        let expected = if kind.request == Request::Flush {
            &Structure::ALL[5..]
        } else {
            &Structure::ALL[..5]
        };
        assert_eq!(structures, expected, "{kind:?}");
    }
    let all = report
        .rows
        .iter()
        .map(|row| row.outcomes)
        .chain(report.operations.iter().map(|row| row.outcomes));
    for row in all {
        assert_eq!(row.faults, row.refused + row.reported + row.stopped + row.absorbed, "{row:?}");
    }
    let sum = |faults: u64, row: &Outcomes| faults + row.faults;
    let by_structure = report.rows.iter().map(|row| &row.outcomes).fold(0, sum);
    assert_eq!(by_structure, report.operations.iter().map(|row| &row.outcomes).fold(0, sum));
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
