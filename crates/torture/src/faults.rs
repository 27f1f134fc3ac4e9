//! Every request of a recorded run fails in turn: the first read, the second, … the last, then
//! writes, then flushes; once, twice in succession, whenever it is for that place, or from then on
//! ([`Span`]); with EIO, and writes and flushes also with ENOSPC, as of a sparse image whose file
//! system is full.
//!
//! Required: the caller gets the error, unless no caller needs it; what is read is right; and
//! whatever was acknowledged, before the failure or after it, is there after a power failure at any
//! point behind the failed request (`behind.rs`). One operation that fails for any other reason
//! than the model's, and is no fsync, ends the run, since it may have been done or not.
//!
//! Each step of [`crate::systematic`] is such a run, followed by fsync and sync, and all of them
//! one after the other are another. A run of all workloads also requires that it met enough of
//! every kind of fault; a sample of them does not, and tries a part of the faults of the longest.
use crate::behind::search_behind;
use crate::campaign;
use crate::floors::Floors;
use crate::history::ClientHistory;
use crate::operation::{Base, Operation, Target};
use crate::search::{SearchReport, open};
use crate::sequence::{Attempt, Performer, Recording, Start, quiet_options};
use crate::snapshot::hash;
use crate::systematic::{self, STEPS, Step};
use cairn_blockdev::simulated;
use cairn_blockdev::{BlockDevice, Operation as Request, SimulatedDevice};
use cairn_engine::Volume;
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::lock::Mutex;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, Geometry, NODE_BLOCKS, NODE_SIZE, Node, Superblock,
};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// One in so many faults of the workload of all steps is tried by a sample: it has as many
/// crash states as a hundred others.
const PART_OF_LONG: usize = 8;

/// Which requests fail, beginning with the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Span {
    /// The first only.
    Once,
    /// The first and the next: a second try fails as well.
    Twice,
    /// The first and all for the same place: a block that is worn out.
    SamePlace,
    /// The first and some of the next few, by their place: of one set any of the writes.
    Scattered,
    /// The first and all others.
    FromThenOn,
}

impl Span {
    /// How it is called in a table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Once => "once",
            Self::Twice => "twice",
            Self::SamePlace => "same place",
            Self::Scattered => "scattered",
            Self::FromThenOn => "from then on",
        }
    }

    /// Whether a request fails that comes so many after the first, zero for that itself.
    #[must_use]
    pub fn includes(
        self,
        first: &simulated::RequestInfo,
        request: &simulated::RequestInfo,
        later: u64,
    ) -> bool {
        later == 0
            || match self {
                Self::Once => false,
                Self::Twice => later == 1,
                Self::SamePlace => overlap(first, request),
                Self::Scattered => {
                    later < SCATTERED_MAX && hash(request.offset_bytes).is_multiple_of(2)
                }
                Self::FromThenOn => true,
            }
    }

    /// Those that make sense for a kind of request: all flushes have the same place.
    fn of(request: Request) -> &'static [Self] {
        match request {
            Request::Flush => &[Self::Once, Self::Twice, Self::FromThenOn],
            _ => &[Self::Once, Self::Twice, Self::SamePlace, Self::FromThenOn],
        }
    }
}

/// A kind of fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultKind {
    /// Reads, writes or flushes.
    pub request: Request,
    /// The error is ENOSPC, not EIO.
    pub no_space: bool,
    /// Which of them fail.
    pub span: Span,
}

/// Which request fails.
#[derive(Clone, Copy, Debug)]
struct Fault {
    kind: FaultKind,
    /// How many of that kind succeed before.
    after: u64,
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FaultKind { request, no_space, span } = self.kind;
        let error = if no_space { "ENOSPC" } else { "EIO" };
        let others = match span {
            Span::Once => "",
            Span::Twice => " and the next",
            Span::SamePlace => " and all later ones for its place",
            Span::Scattered => " and some of the next few",
            Span::FromThenOn => " and all after it",
        };
        write!(formatter, "{error} for {request} {}{others}", self.after + 1)
    }
}

/// What a request reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Structure {
    Superblock,
    Bitmap,
    Log,
    Node,
    Data,
    /// All of the device: a flush.
    Device,
}

impl Structure {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Superblock, Self::Bitmap, Self::Log, Self::Node, Self::Data, Self::Device];

    /// Its name in a table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Superblock => "superblock",
            Self::Bitmap => "bitmap",
            Self::Log => "log",
            Self::Node => "node",
            Self::Data => "data",
            Self::Device => "-",
        }
    }
}

/// What came of the faults of one kind at one structure.
#[derive(Clone, Debug, serde::Serialize)]
pub struct FaultRow {
    /// `read`, `write` or `flush`.
    pub request: String,
    /// What the request was for.
    pub structure: Structure,
    /// `EIO` or `ENOSPC`.
    pub error: &'static str,
    /// Which requests failed.
    pub span: Span,
    /// How they ended.
    #[serde(flatten)]
    pub outcomes: Outcomes,
}

/// What came of the faults during one workload.
#[derive(Clone, Debug, serde::Serialize)]
pub struct OperationRow {
    /// The operation, before which there is nothing, and after which an fsync and a sync.
    pub operation: String,
    /// How they ended.
    #[serde(flatten)]
    pub outcomes: Outcomes,
}

/// How runs with a fault ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Outcomes {
    /// Requests that failed, each in a run of its own.
    pub faults: u64,
    /// The volume could not be opened.
    pub refused: u64,
    /// At least one operation, or the end of the mount, returned an error; the volume went on.
    pub reported: u64,
    /// The same, and the volume stopped: nothing could be changed any more.
    pub stopped: u64,
    /// No caller got an error, and nothing was lost.
    pub absorbed: u64,
    /// A rule did not hold.
    pub wrong: u64,
    /// Crash states judged afterwards.
    pub states: u64,
}

/// What was tested.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct FaultReport {
    /// Workloads of which every request failed.
    pub workloads: u64,
    /// Workloads to be run: all, or those of the sample.
    pub workloads_total: u64,
    /// By kind of fault and structure, those that were met.
    pub rows: Vec<FaultRow>,
    /// By operation.
    pub operations: Vec<OperationRow>,
    /// Power failures behind the faults, and what their judge could have noticed.
    pub search: SearchReport,
    /// What is below the floors of a complete run.
    pub too_little: Vec<String>,
    /// What was wrong.
    pub findings: Vec<String>,
}

/// Requests among which those stand that fail with [`Span::Scattered`].
const SCATTERED_MAX: u64 = 6;
/// Points at which the power must fail behind each fault, on the average: more than at its end.
const POINTS_PER_RUN: u64 = 2;
/// Faults of each kind in a run of all workloads.
const FAULTS_OF_A_KIND_MIN: u64 = 101;

/// How a run with a fault ended.
enum Ending {
    Refused,
    Reported,
    Stopped,
    Absorbed,
}

/// All workloads: each step with what makes it durable, and all steps in one.
fn workloads() -> Vec<(String, Vec<Step>)> {
    let named =
        |name: &str| *STEPS.iter().find(|step| step.name == name).expect("the set has this step");
    let durable =
        [named("fsync a"), named("fsync d"), named("fdatasync a"), named("sync"), named("commit")];
    let alone = |step: &Step| (step.name.to_owned(), vec![*step, durable[0], durable[3]]);
    let mixed = (0..STEPS.len()).flat_map(|index| {
        [Some(STEPS[index]), (index % 2 == 1).then(|| durable[index / 2 % durable.len()])]
    });
    let mut all: Vec<_> = STEPS.iter().map(alone).collect();
    all.push(("all steps".into(), mixed.flatten().collect()));
    all
}

/// All kinds of fault. No read fails for lack of space.
fn kinds() -> Vec<FaultKind> {
    let errors = [
        (Request::Read, false),
        (Request::Write, false),
        (Request::Flush, false),
        (Request::Write, true),
        (Request::Flush, true),
    ];
    let spans = |(request, no_space)| {
        Span::of(request).iter().map(move |span| FaultKind { request, no_space, span: *span })
    };
    errors.into_iter().flat_map(spans).collect()
}

/// A row for each kind of fault and each structure.
fn all_rows(kinds: &[FaultKind]) -> Vec<FaultRow> {
    let row = |kind: FaultKind, structure| FaultRow {
        request: kind.request.to_string(),
        structure,
        error: if kind.no_space { "ENOSPC" } else { "EIO" },
        span: kind.span,
        outcomes: Outcomes::default(),
    };
    kinds.iter().flat_map(|kind| Structure::ALL.map(|structure| row(*kind, structure))).collect()
}

/// What a complete run lacks: faults of a kind or of a structure, errors that were reported, or
/// crash states behind them.
fn missed(rows: &[FaultRow], kinds: &[FaultKind]) -> Vec<String> {
    let mut missed = Vec::new();
    for (kind, rows) in kinds.iter().zip(rows.chunks(Structure::ALL.len())) {
        let row = &rows[0];
        let name = format!("{} {} {}", row.request, row.error, row.span.name());
        let sum = |count: fn(&Outcomes) -> u64| rows.iter().map(|row| count(&row.outcomes)).sum();
        let mut expect = |what: &str, count: u64, least: u64| {
            if count < least {
                missed.push(format!("{name}: {count} {what}, at least {least}"));
            }
        };
        expect("faults", sum(|row| row.faults), FAULTS_OF_A_KIND_MIN);
        expect("reported", sum(|row| row.reported + row.stopped), 1);
        expect("crash states", sum(|row| row.states), 1);
        for row in rows {
            let is_possible =
                (kind.request == Request::Flush) == (row.structure == Structure::Device);
            expect(row.structure.name(), row.outcomes.faults, u64::from(is_possible));
        }
    }
    missed
}

/// Runs all workloads, or `sample` of them, chosen by the seed. `progress` gets the workloads done
/// and to be done; `stop` ends it early.
///
/// # Errors
/// The volume to begin with can't be made. Findings are in the report.
pub fn run(
    seed: u64,
    sample: Option<u64>,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<FaultReport, String> {
    let start = Start::new(&systematic::setup())?;
    let kinds = kinds();
    let workloads = workloads();
    let all = workloads.len() as u64;
    let chosen = campaign::sample(all, sample.unwrap_or(all), seed);
    let workloads_total = chosen.len() as u64;
    let mut report =
        FaultReport { workloads_total, rows: all_rows(&kinds), ..FaultReport::default() };
    for (name, steps) in chosen.iter().map(|index| &workloads[*index as usize]) {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let operations = systematic::operations(steps, &start.model, systematic::setup().len());
        let map = Map::of(&start, &operations)?;
        let mut of_workload = Outcomes::default();
        let part = if sample.is_some() && steps.len() > 3 { PART_OF_LONG } else { 1 };
        for (kind, rows) in kinds.iter().zip(report.rows.chunks_mut(Structure::ALL.len())) {
            let first = hash((seed, name, format!("{kind:?}"))) % part as u64;
            for after in (first..).step_by(part) {
                let fault = Fault { kind: *kind, after };
                let Met { structure, outcome } = match one(&start, &operations, &map, fault, seed) {
                    None => break,
                    Some(met) => met,
                };
                let row = rows
                    .iter_mut()
                    .find(|row| row.structure == structure)
                    .expect("a row for each structure");
                if let Ok((_, judged)) = &outcome {
                    report.search.add(judged);
                }
                row.outcomes.add(&outcome);
                of_workload.add(&outcome);
                if let Err(problem) = outcome {
                    report
                        .findings
                        .push(format!("{name}: {fault} ({}): {problem}", structure.name()));
                }
            }
        }
        report.operations.push(OperationRow { operation: name.clone(), outcomes: of_workload });
        report.workloads += 1;
        progress(report.workloads, workloads_total);
    }
    if report.workloads == all && report.findings.is_empty() {
        let SearchReport { runs, points, states, during_recovery, checked, .. } = report.search;
        report.too_little = Floors::FAULTS.too_little((runs, states), during_recovery, &checked);
        let points_min = POINTS_PER_RUN * runs;
        if points < points_min {
            report.too_little.push(format!("power failures: {points}, at least {points_min}"));
        }
        report.too_little.extend(missed(&report.rows, &kinds));
    }
    report.rows.retain(|row| row.outcomes.faults > 0);
    Ok(report)
}

impl Outcomes {
    fn add(&mut self, outcome: &Result<(Ending, SearchReport), String>) {
        self.faults += 1;
        match outcome {
            Ok((ending, judged)) => {
                self.states += judged.states;
                match ending {
                    Ending::Refused => self.refused += 1,
                    Ending::Reported => self.reported += 1,
                    Ending::Stopped => self.stopped += 1,
                    Ending::Absorbed => self.absorbed += 1,
                }
            }
            Err(_) => self.wrong += 1,
        }
    }
}

/// Where the structures of a workload's volume stand: nodes are found by reading what a run without
/// faults has left.
pub(crate) struct Map {
    geometry: Geometry,
    nodes: BTreeSet<u64>,
}

impl Map {
    pub(crate) fn of(start: &Start, operations: &[Operation]) -> Result<Self, String> {
        let device = start.device();
        let touched: Arc<Mutex<BTreeSet<u64>>> = Arc::new(Mutex::new(Rank::LEAF, BTreeSet::new()));
        let seen = touched.clone();
        device.fail_when(move |request| {
            let blocks = request.offset_bytes / BLOCK_SIZE as u64
                ..(request.offset_bytes + request.length_bytes).div_ceil(BLOCK_SIZE as u64);
            seen.lock().extend(blocks);
            false
        });
        let block = |number: BlockNumber| {
            let mut bytes = vec![0; BLOCK_SIZE];
            device
                .read(number.offset_bytes(), &mut bytes)
                .map(|()| bytes)
                .map_err(|error| error.to_string())
        };
        let first = Geometry::SUPERBLOCKS[0];
        let superblock =
            Superblock::decode(&block(first)?, first).map_err(|error| error.to_string())?;
        let is_node = |address: &u64| {
            let mut page = Box::new([0; NODE_SIZE]);
            let read = device.read(BlockNumber(*address).offset_bytes(), &mut page[..]);
            read.is_ok() && Node::decode(page, superblock.volume, BlockNumber(*address)).is_ok()
        };
        let last = superblock.geometry.total_blocks - NODE_BLOCKS;
        let nodes_now = || {
            let touched = touched.lock().clone();
            touched
                .into_iter()
                .filter(|address| *address <= last)
                .filter(is_node)
                .collect::<Vec<_>>()
        };
        let volume = open(&device, false)?;
        let mut performer = Performer::new(start, &volume, &device)?;
        let mut nodes = BTreeSet::new();
        // A trim clears the nodes that were freed.
        for until_trim in operations.chunk_by(|_, next| !matches!(next, Operation::Trim)) {
            nodes.extend(nodes_now());
            perform(&mut performer, until_trim)?;
        }
        drop(performer);
        volume.close().map_err(|error| format!("closing without a fault: {error}"))?;
        device.clear_failures();
        nodes.extend(nodes_now());
        Ok(Self { geometry: superblock.geometry, nodes })
    }

    pub(crate) fn structure(&self, request: &simulated::RequestInfo) -> Structure {
        let block = BlockNumber(request.offset_bytes / BLOCK_SIZE as u64);
        let within =
            |range: BlockRange| (range.start.0..range.start.0 + range.blocks).contains(&block.0);
        match request.operation {
            Request::Flush => Structure::Device,
            _ if Geometry::SUPERBLOCKS.contains(&block)
                || block == self.geometry.superblock_copy() =>
            {
                Structure::Superblock
            }
            _ if within(self.geometry.bitmap_table()) => Structure::Bitmap,
            _ if within(self.geometry.log()) => Structure::Log,
            // Data may have the place now that a node had before.
            _ if self.nodes.contains(&block.0)
                && request.length_bytes.is_multiple_of(NODE_SIZE as u64) =>
            {
                Structure::Node
            }
            _ => Structure::Data,
        }
    }
}

/// A fault that was met, and what came of it: how the run ended, and what was judged afterwards.
struct Met {
    structure: Structure,
    outcome: Result<(Ending, SearchReport), String>,
}

/// Whether two requests are for the same place, in part.
fn overlap(one: &simulated::RequestInfo, other: &simulated::RequestInfo) -> bool {
    one.offset_bytes < other.offset_bytes + other.length_bytes
        && other.offset_bytes < one.offset_bytes + one.length_bytes
}

/// Has the requests of `fault` fail; the first of them is kept.
fn plan(device: &SimulatedDevice, fault: Fault) -> Arc<OnceLock<simulated::RequestInfo>> {
    let failed = Arc::new(OnceLock::new());
    let (first, mut seen) = (failed.clone(), 0);
    let predicate = move |request: &simulated::RequestInfo| {
        if request.operation != fault.kind.request {
            return false;
        }
        seen += 1;
        if seen <= fault.after {
            return false;
        }
        let first = first.get_or_init(|| *request);
        fault.kind.span.includes(first, request, seen - fault.after - 1)
    };
    if fault.kind.no_space {
        device.fail_for_lack_of_space_when(predicate)
    } else {
        device.fail_when(predicate)
    }
    failed
}

/// One run with one fault; `None` when it has no such request.
fn one(start: &Start, operations: &[Operation], map: &Map, fault: Fault, seed: u64) -> Option<Met> {
    let device = start.device();
    device.start_recording();
    let failed = plan(&device, fault);
    let ran = run_with_fault(start, operations, &device, device.clone());
    let structure = map.structure(failed.get()?);
    let failed_at = device.first_failure()?;
    device.clear_failures();
    let outcome = ran.and_then(|(mut history, ending)| {
        history.may_be_unreadable = fault.kind.request == Request::Write;
        let recording = Recording { device, history };
        // Each run makes choices of its own.
        let seed = hash((seed, operations, format!("{fault:?}")));
        let report = search_behind(&recording, failed_at, seed).map_err(|finding| finding.text)?;
        Ok((ending, report))
    });
    Some(Met { structure, outcome })
}

/// Opens the volume, performs the operations, and closes it. What the client did, and how it ended.
/// The engine sees the device as `seen`.
fn run_with_fault(
    start: &Start,
    operations: &[Operation],
    device: &Arc<SimulatedDevice>,
    seen: Arc<dyn BlockDevice>,
) -> Result<(ClientHistory, Ending), String> {
    let Ok(volume) = Volume::open(seen, quiet_options()) else {
        return Ok((start.history(), Ending::Refused));
    };
    let (mut history, told) = match Performer::new(start, &volume, device) {
        // Not even the root could be read.
        Err(_) => (start.history(), Told::Reported),
        Ok(mut performer) => {
            let told = perform(&mut performer, operations)?;
            (performer.into_history(), told)
        }
    };
    let stopped_before = volume.statistics().failure.is_some();
    let closed = volume.close().is_ok();
    if closed && told != Told::Unknown {
        history.acknowledge_all(device.history_len());
    }
    let ending = match (closed && told == Told::Nothing, stopped_before) {
        (true, _) => Ending::Absorbed,
        (false, true) => Ending::Stopped,
        (false, false) => Ending::Reported,
    };
    Ok((history, ending))
}

/// Whether a caller learned of the fault.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    Nothing,
    Reported,
    /// By an operation that may have been done or not.
    Unknown,
}

pub(crate) fn perform(performer: &mut Performer, operations: &[Operation]) -> Result<Told, String> {
    let mut told = Told::Nothing;
    for operation in operations {
        match performer.attempt(operation)? {
            Attempt::AsExpected => {}
            Attempt::Reported => told = Told::Reported,
            Attempt::Unknown => return Ok(Told::Unknown),
        }
    }
    for (path, node) in performer.model().paths() {
        let is_file = path.base == Base::Own
            && performer.model().node(node).is_some_and(|node| node.contents().is_some());
        let read =
            Operation::Read { target: Target::Path(path), offset_bytes: 0, length_bytes: 1 << 17 };
        if is_file && performer.attempt(&read)? == Attempt::Reported {
            told = Told::Reported;
        }
    }
    Ok(told)
}

#[cfg(test)]
#[path = "faults_tests.rs"]
mod faults_tests;
