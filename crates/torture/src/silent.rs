//! Every write and every flush of a run is lied about in turn ([`crate::lying`]): a flush that
//! makes nothing durable, a write that is lost, one that goes to the blocks behind its place, one
//! that goes to other blocks in use. The run goes on, on a volume that is mounted again half way,
//! and ends with the mount; or the power fails at points behind the lie.
//!
//! Required of what is left:
//!
//! - No file holds anything but what was written to it: older bytes of its own, or an error.
//! - What a mount refuses, or can't read, is an error of fsck.
//! - If fsck finds no error, the volume is in a state that it was in: a prefix of the operations,
//!   as after a crash. It may lack what was acknowledged since the lie; and what was acknowledged
//!   before, if a write went to where that stood: the last checkpoint of the log, damaged, looks as
//!   if a crash had cut it short.
//! - Then it can be mounted and closed, and fsck finds no error after that.
use crate::contents::Tag;
use crate::faults::{Map, Structure, Told, perform};
use crate::found::Found;
use crate::history::ClientHistory;
use crate::lying::{Lie, Lying, Met};
use crate::operation::{Base, Name, Operation, Path, Target, XattrSet};
use crate::search::open;
use crate::sequence::{Performer, Start, quiet_options};
use crate::share::Share;
use crate::systematic::{self, STEPS};
use crate::verdict::{judge_found, own_bytes};
use cairn_blockdev::simulated::{CrashExplorer, Fate, RequestInfo};
use cairn_blockdev::{BlockDevice, Operation as RequestKind, SimulatedDevice};
use cairn_engine::Volume;
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use cairn_format::BLOCK_SIZE;
use cairn_fsck::{CheckOptions, check};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The kinds of lies, as rows of a table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[allow(missing_docs)]
pub enum Kind {
    LostFlush,
    LostWrite,
    /// To the blocks behind.
    WriteBehind,
    /// To any blocks in use.
    WriteElsewhere,
}

impl Kind {
    const ALL: [Self; 4] =
        [Self::LostFlush, Self::LostWrite, Self::WriteBehind, Self::WriteElsewhere];
}

/// How states ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// Requests that were lied about.
    pub lies: u64,
    /// States looked at: the end of the run, and what power failures leave.
    pub states: u64,
    /// Everything that was acknowledged is there.
    pub unharmed: u64,
    /// Nothing reports an error, and something that was acknowledged is not there.
    pub older: u64,
    /// Only fsck finds an error.
    pub found_by_fsck: u64,
    /// It mounts, and reading something is an error.
    pub error_told: u64,
    /// It does not mount for writing.
    pub refused: u64,
}

/// What was tested.
#[derive(Clone, Debug, Default)]
pub struct SilentReport {
    /// By kind of lie and what was written.
    pub rows: BTreeMap<(Kind, &'static str), Outcomes>,
    /// What was wrong.
    pub findings: Vec<String>,
}

/// How one state ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    Unharmed,
    Older,
    FoundByFsck,
    ErrorTold,
    Refused,
}

impl Outcomes {
    fn count(&mut self, ending: Ending) {
        self.states += 1;
        match ending {
            Ending::Unharmed => self.unharmed += 1,
            Ending::Older => self.older += 1,
            Ending::FoundByFsck => self.found_by_fsck += 1,
            Ending::ErrorTold => self.error_told += 1,
            Ending::Refused => self.refused += 1,
        }
    }
}

/// Files that are there from the beginning, with so many attributes that the tree has several
/// leaves.
const FILES: u8 = 16;

/// States behind a lie about a superblock, beyond those behind any lie.
const SUPERBLOCK_STATES: usize = 16;

fn path_of(index: usize) -> Path {
    Path { base: Base::Own, names: vec![Name(4), Name(8 + index as u8 % FILES)] }
}

fn write(index: usize, offset_bytes: u64, done: usize) -> Operation {
    let tag = Tag { client: 0, operation: done as u32 };
    Operation::Write { target: Target::Path(path_of(index)), offset_bytes, length_bytes: 6000, tag }
}

fn setup() -> Vec<Operation> {
    let mut operations = systematic::setup();
    for index in 0..usize::from(FILES) {
        operations.push(Operation::Create { path: path_of(index), mode: 0o644, uid: 0 });
        operations.push(write(index, 0, operations.len()));
        let tag = Tag { client: 0, operation: operations.len() as u32 };
        let target = Target::Path(path_of(index));
        operations.push(Operation::SetXattr {
            target,
            name: 1,
            length_bytes: 2000,
            tag,
            mode: XattrSet::Any,
        });
    }
    operations
}

/// The run: every step, and after each of them one file is overwritten, something is made durable,
/// and another file is read.
fn workload(start: &Start) -> Vec<Operation> {
    let (mut model, done) = (start.model.clone(), setup().len());
    let mut operations = Vec::new();
    for (index, step) in STEPS.iter().enumerate() {
        let mut some = systematic::operations(&[*step], &model, done + operations.len());
        some.push(write(index, index as u64 % 3 * 4096, done + operations.len() + some.len()));
        let target = Target::Path(path_of(index));
        some.push(match index % 5 {
            0 | 3 => Operation::Fsync { target, data_only: false, wait: true },
            1 => Operation::Fsync { target, data_only: true, wait: true },
            2 => Operation::Sync,
            _ => Operation::Commit,
        });
        some.push(Operation::Read {
            target: Target::Path(path_of(index + 5)),
            offset_bytes: 0,
            length_bytes: 1 << 17,
        });
        some.iter().for_each(|operation| drop(model.apply(operation)));
        operations.append(&mut some);
    }
    operations
}

/// What is the same for all lies.
struct Subject {
    start: Start,
    operations: Vec<Operation>,
    map: Map,
    /// Blocks that hold something at the end of an honest run.
    used: Vec<u64>,
}

/// No more lies of a kind are told after so many findings.
const FINDINGS_MAX: usize = 5;

/// Lies about every write and flush of the `share`, one at a time; a thread for each kind of lie.
///
/// # Errors
/// An honest device does not do what it should. Findings are in the report.
pub fn run(seed: u64, share: Share) -> Result<SilentReport, String> {
    let start = Start::new(&setup())?;
    let operations = workload(&start);
    let map = Map::of(&start, &operations)?;
    let used = used_blocks(&start, &operations)?;
    let subject = Subject { start, operations, map, used };
    if !subject.run(Lie::LostFlush, u64::MAX)?.completed {
        return Err("a run without a lie was reported to fail".into());
    }
    let subject = Arc::new(subject);
    let threads = Kind::ALL.map(|kind| {
        let subject = Arc::clone(&subject);
        thread::spawn("lies", move || subject.lies(kind, seed, share))
    });
    let mut all = SilentReport::default();
    for report in threads.map(|thread| thread.join().expect("panics are findings")) {
        all.rows.extend(report.rows);
        all.findings.extend(report.findings);
    }
    Ok(all)
}

fn used_blocks(start: &Start, operations: &[Operation]) -> Result<Vec<u64>, String> {
    let device = start.record(operations)?.device;
    let holds_something = |block: &u64| {
        let mut bytes = vec![0; BLOCK_SIZE];
        device.read(block * BLOCK_SIZE as u64, &mut bytes).is_ok()
            && bytes.iter().any(|&byte| byte != 0)
    };
    Ok((0..device.length_bytes() / BLOCK_SIZE as u64).filter(holds_something).collect())
}

impl Subject {
    /// All lies of a kind, of this share.
    fn lies(&self, kind: Kind, seed: u64, share: Share) -> SilentReport {
        let mut report = SilentReport::default();
        for after in (0..).filter(|after| share.has(*after)) {
            let mut random = Seeded::new(seed ^ after);
            let what = format!("{kind:?} number {after}");
            let result = catch_unwind(AssertUnwindSafe(|| self.one(kind, after, &mut random)));
            match result.unwrap_or_else(|_| Err("a panic".into())) {
                Ok(None) => break,
                Ok(Some((structure, endings))) => {
                    let outcomes = report.rows.entry((kind, structure.name())).or_default();
                    outcomes.lies += 1;
                    endings.into_iter().for_each(|ending| outcomes.count(ending));
                }
                Err(problem) => report.findings.push(format!("{what}: {problem}")),
            }
            if report.findings.len() > FINDINGS_MAX {
                break;
            }
        }
        report
    }

    /// One run with one lie, and how the states ended that it leaves; `None` when there is no such
    /// request.
    fn one(
        &self,
        kind: Kind,
        after: u64,
        random: &mut Seeded,
    ) -> Result<Option<(Structure, Vec<Ending>)>, String> {
        let lie = match kind {
            Kind::LostFlush => Lie::LostFlush,
            Kind::LostWrite => Lie::LostWrite,
            Kind::WriteBehind => Lie::WriteBehind,
            Kind::WriteElsewhere => Lie::WriteTo(
                self.used[random.below(self.used.len() as u64) as usize] * BLOCK_SIZE as u64,
            ),
        };
        let Run { device, met, history, .. } = self.run(lie, after)?;
        let Some(met) = met else { return Ok(None) };
        let operation =
            if kind == Kind::LostFlush { RequestKind::Flush } else { RequestKind::Write };
        let structure = self.map.structure(&RequestInfo {
            operation,
            offset_bytes: met.offset_bytes,
            length_bytes: met.length_bytes,
        });
        let kept = match kind {
            // The history has no event for it: what it acknowledged comes at the same place.
            Kind::LostFlush => met.history_len.saturating_sub(1),
            Kind::LostWrite => met.history_len,
            // What stood elsewhere may have been destroyed.
            Kind::WriteBehind | Kind::WriteElsewhere => 0,
        };
        let histories = Histories { least: history.acknowledged_until(kept), all: history };
        let mut endings = Vec::new();
        let is_superblock = structure == Structure::Superblock;
        for (state, position, when) in states(&device, met, is_superblock, random) {
            let ending = judge(&Arc::new(state), &histories, position).map_err(|problem| {
                format!(
                    "{} at {}, {lie:?}, {when}: {problem}",
                    structure.name(),
                    met.offset_bytes / BLOCK_SIZE as u64
                )
            })?;
            endings.push(ending);
        }
        Ok(Some((structure, endings)))
    }

    /// Performs everything on a device that lies.
    fn run(&self, lie: Lie, after: u64) -> Result<Run, String> {
        let device = self.start.device();
        device.start_recording();
        let lying = Lying::new(device.clone(), lie, after);
        let (history, completed) = self.mounts(&lying, &device)?;
        Ok(Run { device, met: lying.met(), history, completed })
    }

    /// Two mounts, one for each half of the operations; what was done, and whether it was all. A
    /// mount that is refused ends the run, and so does an error of an operation that may have been
    /// done or not.
    fn mounts(
        &self,
        lying: &Arc<Lying>,
        device: &Arc<SimulatedDevice>,
    ) -> Result<(ClientHistory, bool), String> {
        let (first, second) = self.operations.split_at(self.operations.len() / 2);
        let mut history = self.start.history();
        let mut client: Option<Performer> = None;
        for half in [first, second] {
            let Ok(volume) = Volume::open(lying.clone() as Arc<dyn BlockDevice>, quiet_options())
            else {
                return Ok((history, false));
            };
            let went_on = match client.take() {
                None => Performer::new(&self.start, &volume, device),
                Some(client) => client.mounted_again(&volume),
            };
            // Not even the root could be read.
            let Ok(mut performer) = went_on else { return Ok((history, false)) };
            let told = perform(&mut performer, half)?;
            let goes_on = volume.close().is_ok() && told != Told::Unknown;
            if goes_on {
                performer.acknowledge_all();
            }
            history = performer.history().clone();
            if !goes_on {
                return Ok((history, false));
            }
            client = Some(performer);
        }
        Ok((history, true))
    }
}

/// A run with a lie.
struct Run {
    device: Arc<SimulatedDevice>,
    met: Option<Met>,
    history: ClientHistory,
    /// All operations were performed, and the mounts ended without an error.
    completed: bool,
}

/// What the client did, with all that was acknowledged, and with what must be there at least.
struct Histories {
    all: ClientHistory,
    least: ClientHistory,
}

/// The end of the run, and what power failures leave, with the positions in the device's history:
/// at once, before and after the next flushes, at any time, at the end. Behind a lie about a
/// superblock, many times until its copy is durable: as long as the copy may be lost as well, the
/// volume goes on from what no block holds.
fn states(
    device: &SimulatedDevice,
    met: Met,
    is_superblock: bool,
    random: &mut Seeded,
) -> Vec<(SimulatedDevice, usize, String)> {
    let end = device.history_len();
    let mut states = vec![(device.snapshot(), end, "at the end".to_owned())];
    let mut explorer = device.explorer();
    let flushes: Vec<usize> = explorer
        .flush_positions()
        .into_iter()
        .filter(|position| *position > met.history_len)
        .take(4)
        .collect();
    let mut positions: Vec<(usize, bool)> =
        flushes.iter().map(|position| (*position, true)).collect();
    let mut any_until = |last: usize| {
        (met.history_len + random.below((last - met.history_len) as u64 + 1) as usize, false)
    };
    positions.extend([
        (met.history_len, true),
        (met.history_len, false),
        any_until(end),
        (end, true),
    ]);
    let soon = flushes.get(2).copied().unwrap_or(end);
    positions
        .extend((0..if is_superblock { SUPERBLOCK_STATES } else { 0 }).map(|_| any_until(soon)));
    positions.sort_unstable();
    for (position, is_all_lost) in positions {
        explorer.advance_to(position);
        let lost = |explorer: &CrashExplorer| {
            explorer.state_with(|unflushed| vec![Fate::Lost; unflushed.len()])
        };
        let state = if is_all_lost { lost(&explorer) } else { explorer.state(random) };
        let survived =
            if is_all_lost { "the unflushed is lost" } else { "part of the unflushed is lost" };
        states.push((
            state,
            position,
            format!("power failure after {position} of {end} device operations, {survived}"),
        ));
    }
    states
}

/// Whether a state is permitted, and how it ended.
fn judge(
    state: &Arc<SimulatedDevice>,
    histories: &Histories,
    position: usize,
) -> Result<Ending, String> {
    let errors = errors_of(state);
    let judge_by =
        |history, found: &Found| judge_found(found, std::slice::from_ref(history), position);
    let permitted = |found: &Found, whose: &str| match &errors {
        None => judge_by(&histories.least, found)
            .map_err(|problem| format!("{whose}, fsck finds nothing, but: {problem}")),
        Some(_) => {
            own_bytes(found, &histories.all).map_err(|problem| format!("{whose}: {problem}"))
        }
    };
    let must_be_found = |problem: String| match &errors {
        None => Err(format!("fsck finds nothing, but: {problem}")),
        Some(_) => Ok(()),
    };
    // What a mount that only reads shows.
    match open(state, true).and_then(|volume| Found::read(&volume)) {
        Err(problem) => must_be_found(problem)?,
        Ok(found) => permitted(&found, "read-only")?,
    }
    let volume = match open(state, false) {
        Err(problem) => return must_be_found(problem).map(|()| Ending::Refused),
        Ok(volume) => volume,
    };
    let found = match Found::read(&volume) {
        Err(problem) => return must_be_found(problem).map(|()| Ending::ErrorTold),
        Ok(found) => found,
    };
    permitted(&found, "mounted")?;
    if let Some(problem) =
        found.objects.values().find_map(|object| object.bytes.as_ref()?.as_ref().err())
    {
        return must_be_found(problem.clone()).map(|()| Ending::ErrorTold);
    }
    if errors.is_some() {
        return Ok(Ending::FoundByFsck);
    }
    volume.close().map_err(|error| format!("fsck found nothing, but closing it: {error}"))?;
    if let Some(errors) = errors_of(state) {
        return Err(format!("fsck found nothing, but after a mount it finds: {errors}"));
    }
    Ok(if judge_by(&histories.all, &found).is_ok() { Ending::Unharmed } else { Ending::Older })
}

/// The errors that fsck finds, if any.
fn errors_of(state: &Arc<SimulatedDevice>) -> Option<String> {
    match check(&**state, &CheckOptions { data: true, repair: false }, &mut |_| {}) {
        Ok(report) => (report.errors > 0).then(|| report.to_string()),
        Err(error) => Some(error.to_string()),
    }
}
