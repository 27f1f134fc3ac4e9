//! The crash-state test: clients work on a recorded device; then the power fails at very many
//! points of the record, each time with another choice of what the unflushed writes left behind,
//! and every state must recover to something that the clients' histories permit.
//!
//! One run is one small volume. States of a run are taken where most is at stake: around every
//! flush, and in between.
use crate::cleanups::expect_cleanups_to_end;
use crate::composition::{Composition, Present};
use crate::floors::Floors;
use crate::found::Found;
use crate::medium::Medium;
use crate::oracle::{Checked, Oracle};
use crate::sabotage::Sabotage;
use crate::second_reader;
use crate::shape::{Shape, record};
use crate::snapshot::hash;
use crate::survivors::{State, Survived};
use crate::unfinished::{expect_removals_to_end, finish_orphans, recovery_options};
use crate::used_again::{expect_file, use_volume};
use cairn_blockdev::simulated::Fate;
use cairn_blockdev::{BlockDevice, FileDevice, SimulatedDevice};
use cairn_engine::{Volume, VolumeOptions};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, clock, thread};
use cairn_fsck::{CheckOptions, PassId, Severity, Statistics, check};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How much to test.
#[derive(Clone, Debug)]
pub struct CrashOptions {
    /// Seed of everything.
    pub seed: u64,
    /// The way from the volume to the device that records.
    pub medium: Medium,
    /// Crash states to check, over all runs.
    pub states: u64,
    /// Only this run.
    pub only_run: Option<u64>,
    /// Threads that check.
    pub threads: usize,
    /// No run begins later than this after the start.
    pub duration: Option<Duration>,
    /// Where to keep the image of a state that fails.
    pub keep_in: Option<PathBuf>,
}

/// What was tested.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct CrashReport {
    /// Runs of the workload.
    pub runs: u64,
    /// Operations of all clients.
    pub operations: u64,
    /// Crash states recovered and checked, those below included.
    pub states: u64,
    /// States of a crash during the recovery of another state, or of what a process left that was
    /// killed.
    pub during_recovery: u64,
    /// States of a crash after the recovered volume had been used.
    pub after_use: u64,
    /// States that were recovered for writing, not only read.
    pub recovered: u64,
    /// States of which the recovery left something to do in a subvolume that it had not opened.
    pub finished_late: u64,
    /// States whose log held something to replay.
    pub replayed: u64,
    /// States that a second reader read, too, and found the same.
    pub compared: u64,
    /// Runs that wrote more to the log than its ring holds.
    pub wrapped: u64,
    /// Times that the ring, or what fits into one checkpoint of it, was full and a commit took
    /// over.
    pub fallbacks: u64,
    /// Runs in which a full volume refused an operation, or did a part of it.
    pub full: u64,
    /// Those operations.
    pub refused: u64,
    /// Runs of several threads on a simulated device that answered writes late.
    pub late: u64,
    /// Flushes of the clients' runs that began while a write was under way, which they don't cover.
    pub flushes_beside_writes: u64,
    /// What that could have noticed. Images are told apart by the set of writes that survived.
    #[serde(flatten)]
    pub checked: Checked,
}

/// What was found, and what it takes to find it again.
#[derive(Clone, Debug, serde::Serialize)]
pub struct CrashFinding {
    /// The run in which it was found; none when the volume hangs.
    pub run: Option<u64>,
    /// Whether that run does the same again. With several clients or background work it need not.
    pub repeats_exactly: bool,
    /// Seed, run, crash point, client, what was expected and what was found.
    pub problem: String,
}

impl fmt::Display for CrashFinding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.problem)
    }
}

impl CrashReport {
    /// What is below the floors of random runs, in words; nothing, if enough was checked.
    #[must_use]
    pub fn too_little(&self) -> Vec<String> {
        let size = (self.runs, self.states);
        let mut lacking = Floors::RANDOM.too_little(size, self.during_recovery, &self.checked);
        let others = [
            ("states that were read twice", self.compared, self.states / 3, 0),
            ("operations that a full volume refused", self.refused, 2 * self.runs, FULL_RUNS_MIN),
            ("flushes beside writes", self.flushes_beside_writes, self.late, 0),
        ];
        let is_low = |(_, count, floor, runs_min): &(_, u64, u64, u64)| {
            self.runs >= Floors::RANDOM.runs_min.max(*runs_min) && count < floor
        };
        let others = others.into_iter().filter(is_low);
        lacking.extend(
            others.map(|(what, count, floor, _)| format!("{what}: {count}, at least {floor}")),
        );
        lacking
    }

    fn add(&mut self, other: &CrashReport) {
        self.runs += other.runs;
        self.operations += other.operations;
        self.states += other.states;
        self.during_recovery += other.during_recovery;
        self.after_use += other.after_use;
        self.recovered += other.recovered;
        self.replayed += other.replayed;
        self.finished_late += other.finished_late;
        self.compared += other.compared;
        self.wrapped += other.wrapped;
        self.fallbacks += other.fallbacks;
        self.full += other.full;
        self.refused += other.refused;
        self.late += other.late;
        self.flushes_beside_writes += other.flushes_beside_writes;
        self.checked.add(&other.checked);
    }
}

/// Errors that fsck finds, in words.
///
/// # Errors
/// It finds any, or can't check.
pub fn expect_clean(device: &dyn BlockDevice) -> Result<u64, String> {
    expect_clean_but_for(device, None).map(|statistics| statistics.checkpoints)
}

/// As [`expect_clean`], whatever the tolerated pass finds.
pub(crate) fn expect_clean_but_for(
    device: &dyn BlockDevice,
    tolerated: Option<PassId>,
) -> Result<Statistics, String> {
    let report = check(device, &CheckOptions { data: true, repair: false }, &mut |_| {})
        .map_err(|error| format!("fsck: {error}"))?;
    let errors: Vec<String> = report
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error && Some(finding.pass) != tolerated)
        .take(5)
        .map(|finding| format!("{finding:?}"))
        .collect();
    if errors.is_empty() {
        Ok(report.statistics)
    } else {
        Err(format!("fsck finds:\n    {}", errors.join("\n    ")))
    }
}

/// Of so many recovered states the dead runs of one are damaged and repaired.
const REPAIR_ONE_OF: u64 = 8;

/// Checks states of one record.
struct Judge<'a> {
    oracle: Oracle<'a>,
    composition: Composition,
    keep_in: Option<&'a Path>,
    random: Seeded,
    report: CrashReport,
}

/// A state, and what tells its image from others.
struct Image {
    device: Arc<SimulatedDevice>,
    present: Present,
    key: u64,
}

impl Judge<'_> {
    /// Counts a state that a power failure left, of which these members are there.
    fn image(&mut self, key: u64, state: State, present: Present) -> Image {
        let key = if present == Present::All { key } else { hash((key, present)) };
        self.oracle.note(key, state.survived);
        Image { device: state.device, present, key }
    }

    fn device(&self, state: &Image, read_only: bool) -> Result<Arc<dyn BlockDevice>, String> {
        self.composition.open(&state.device, state.present, read_only)
    }

    /// Errors of a check of a state, which changes nothing.
    fn expect_clean(&self, state: &Image, when: &str) -> Result<Statistics, String> {
        let device = self.device(state, true)?;
        self.oracle.expect_clean(&*device).map_err(|error| format!("{when}: {error}"))
    }

    fn open(&self, state: &Image, read_only: bool) -> Result<Volume, String> {
        let options = VolumeOptions { read_only, ..recovery_options() };
        Volume::open(self.device(state, read_only)?, options)
            .map_err(|error| format!("the state does not mount: {error}"))
    }

    /// Judges what the volume of a state holds.
    fn judge(&mut self, volume: &Volume, key: u64, position: usize) -> Result<(), String> {
        self.oracle.judge(key, &Arc::new(Found::read(volume)?), position)
    }

    /// Checks and reads `state` without changing it: the log is replayed in memory.
    fn read(&mut self, state: &Image, position: usize) -> Result<(), String> {
        self.report.states += 1;
        let before = self.expect_clean(state, "before recovery")?;
        self.report.replayed += u64::from(before.checkpoints > 0);
        let (composition, device) = (self.composition, &state.device);
        self.oracle.plant_damage(|| {
            composition.open(&Arc::new(device.snapshot()), state.present, false)
        })?;
        let volume = self.open(state, true)?;
        let read_only = |error| format!("read-only: {error}");
        let found = Arc::new(Found::read(&volume).map_err(read_only)?);
        self.oracle.judge(state.key, &found, position).map_err(read_only)?;
        let device = self.device(state, true)?;
        second_reader::compare(&*device, &volume, &found)?;
        self.report.compared += 1;
        self.oracle.judge_extraction(state.key, &*device, &volume, &found)?;
        Ok(())
    }

    /// Recovers `state`, judges it, and closes it cleanly.
    fn recover(&mut self, state: &Image, position: usize) -> Result<(), String> {
        self.report.recovered += 1;
        state.device.start_recording();
        let volume = self.open(state, false)?;
        expect_removals_to_end(&volume)?;
        self.judge(&volume, state.key, position)?;
        volume.close().map_err(|error| format!("closing after recovery: {error}"))?;
        drop(volume);
        let left = self.expect_clean(state, "after recovery")?;
        if left.orphans > 0 {
            self.report.finished_late += 1;
            finish_orphans(&|| self.device(state, false))?;
        }
        expect_cleanups_to_end(&|| self.device(state, false))?;
        let choice = hash((state.key, "repaired"));
        if choice.is_multiple_of(REPAIR_ONE_OF) {
            let copy = Arc::new(state.device.snapshot());
            let copy = self.composition.open(&copy, state.present, false)?;
            self.oracle.judge_repair(&copy, choice / REPAIR_ONE_OF)?;
        }
        Ok(())
    }

    /// Judges a state of the record, and now and then what recovery and a second crash make of it.
    fn state(&mut self, state: State, position: usize) -> Result<(), String> {
        let present = self.composition.present(&mut self.random);
        let state = self.image(state.set, state, present);
        let original = state.device.snapshot();
        let keep_in = self.keep_in;
        let kept = |error| keep(keep_in, &original, error);
        self.read(&state, position).map_err(kept)?;
        let next = self.random.below(8);
        if next < 3 {
            self.recover(&state, position).map_err(kept)?;
        }
        match next {
            0 | 1 => self.crash_during_recovery(&state, position),
            3 => {
                let state = Image { device: Arc::new(original), ..state };
                self.crash_after_use(&state, position)
            }
            _ => Ok(()),
        }
    }

    fn crash_during_recovery(&mut self, recovered: &Image, position: usize) -> Result<(), String> {
        if self.oracle.sabotage() == Sabotage::NoCrashInRecovery {
            return Ok(());
        }
        let mut explorer = recovered.device.explorer();
        let event = self.random.below(explorer.history_len() as u64 + 1) as usize;
        explorer.advance_to(event);
        let again = State::random(&explorer, &mut self.random, self.oracle.sabotage());
        let again = self.image(hash((recovered.key, again.set)), again, recovered.present);
        let original = again.device.snapshot();
        self.report.during_recovery += 1;
        let result = self.read(&again, position).and_then(|()| self.recover(&again, position));
        result.map_err(|error| {
            keep(
                self.keep_in,
                &original,
                format!("after a crash in recovery, after {event} of its events: {error}"),
            )
        })
    }

    /// The process is killed, the machine goes on, and the power fails during the recovery of the
    /// next mount. `set` is that of all writes so far.
    fn killed(&mut self, device: SimulatedDevice, set: u64, position: usize) -> Result<(), String> {
        let (original, keep_in) = (device.snapshot(), self.keep_in);
        // Equal to the image of a power failure, but recovery finds writes that are not durable.
        let key = hash(("killed", set));
        self.oracle.note(key, Survived::default());
        let state = Image { device: Arc::new(device), present: Present::All, key };
        let when = |error| format!("after the process was killed: {error}");
        let kept = |error| keep(keep_in, &original, when(error));
        self.recover(&state, position).map_err(kept)?;
        self.crash_during_recovery(&state, position).map_err(when)
    }

    /// Uses the recovered volume, crashes it again: the old log must not come back, what was new
    /// must be there.
    fn crash_after_use(&mut self, state: &Image, position: usize) -> Result<(), String> {
        state.device.start_recording();
        let volume = self.open(state, false)?;
        let name = b"after the crash";
        let data = vec![0xA5; 1 + self.random.below(100_000) as usize];
        let has_deleted = use_volume(&volume, &*self.device(state, true)?, name, &data)
            .map_err(|error| format!("using the recovered volume: {error}"))?;
        let mut explorer = state.device.explorer();
        explorer.advance_to(explorer.history_len());
        let again = State::random(&explorer, &mut self.random, self.oracle.sabotage());
        state.device.cut_power();
        drop(volume);
        let key = hash(("used", state.key, data.len(), again.set));
        let again = self.image(key, again, state.present);
        let original = again.device.snapshot();
        self.report.after_use += 1;
        self.report.states += 1;
        let recovered = match has_deleted {
            // The clients know nothing of that.
            true => self.expect_clean(&again, "after snapshots were deleted").map(drop),
            false => self.recover(&again, position),
        };
        recovered
            .and_then(|()| expect_file(&self.open(&again, true)?, name, &data))
            .map_err(|error| keep(self.keep_in, &original, error))
    }
}

/// Keeps an image of a failing state; says where.
pub(crate) fn keep(directory: Option<&Path>, state: &SimulatedDevice, error: String) -> String {
    let Some(directory) = directory else { return error };
    let path =
        directory.join(format!("cairn-crash-{:08x}.img", cairn_environment::random::u64() as u32));
    let kept = FileDevice::create(&path, state.length_bytes()).map_err(|e| e.to_string());
    match kept.and_then(|file| state.copy_to(&file).map_err(|e| e.to_string())) {
        Ok(()) => format!("{error}\n  the state before recovery is kept in {}", path.display()),
        Err(problem) => format!("{error}\n  (the state could not be kept: {problem})"),
    }
}

/// The positions of a run to crash at, each with the number of states to make there.
fn positions(
    explorer: &cairn_blockdev::simulated::CrashExplorer,
    random: &mut Seeded,
    wanted: u64,
) -> BTreeMap<usize, u64> {
    let mut positions = BTreeMap::new();
    let flushes = explorer.flush_positions();
    for count in 0..wanted {
        let position = if count % 2 == 0 && !flushes.is_empty() {
            flushes[random.below(flushes.len() as u64) as usize]
        } else {
            random.below(explorer.history_len() as u64 + 1) as usize
        };
        *positions.entry(position).or_insert(0) += 1;
    }
    positions
}

/// One run: records, then checks about `states` states.
fn one_run(
    shape: &Shape,
    mut random: Seeded,
    states: u64,
    options: &CrashOptions,
    sabotage: Sabotage,
) -> Result<CrashReport, String> {
    let keep_in = options.keep_in.as_deref();
    let recorded = record(shape, &mut random, options.medium, sabotage)
        .map_err(|error| format!("{shape:?}\n  {error}"))?;
    let operations = recorded.histories.iter().map(|history| history.operations.len() as u64).sum();
    let wrapped = u64::from(recorded.log_blocks_written * 4096 > shape.log_bytes);
    let report = CrashReport {
        runs: 1,
        operations,
        wrapped,
        fallbacks: recorded.fallbacks,
        full: u64::from(recorded.refused > 0),
        refused: recorded.refused,
        late: u64::from(recorded.is_late),
        flushes_beside_writes: recorded.device.explorer().flushes_beside_writes() as u64,
        ..CrashReport::default()
    };
    let composition = shape.composition_on(options.medium);
    let oracle = Oracle::new(&recorded.histories);
    let mut judge = Judge { oracle, composition, keep_in, random: random.clone(), report };
    let mut explorer = recorded.device.explorer();
    for (position, count) in positions(&explorer, &mut random, states) {
        explorer.advance_to(position);
        for _ in 0..count {
            let state_seed = random.next_u64();
            let state = State::random(&explorer, &mut Seeded::new(state_seed), sabotage);
            judge.random = Seeded::new(state_seed ^ 1);
            judge.state(state, position).map_err(|error| {
                let total = explorer.history_len();
                format!("{shape:?}\n  crash after {position} of {total} events, state {state_seed:#x}: {error}")
            })?;
        }
        if random.chance(1, 4) {
            let all = vec![Fate::Written; explorer.unflushed().len()];
            judge
                .killed(explorer.killed(), explorer.survivors_digest(&all), position)
                .map_err(|error| format!("{shape:?}\n  after {position} events: {error}"))?;
        }
    }
    Ok(CrashReport { checked: judge.oracle.checked(), ..judge.report })
}

/// In this many runs, full volumes must have refused something: of fewer there may be none that is
/// nearly full.
const FULL_RUNS_MIN: u64 = 40;

/// States checked of each run; all of them, when fewer are wanted: then a repetition must want as
/// many.
pub const STATES_PER_RUN: u64 = 50;
/// A volume without a finished run for this long hangs.
const HANG_TIME: Duration = Duration::from_secs(240);

/// What the workers of a test share.
struct Shared {
    options: CrashOptions,
    sabotage: Sabotage,
    next_run: AtomicU64,
    /// Set by the caller.
    stop: Arc<AtomicBool>,
    /// Set by the first finding.
    over: AtomicBool,
    total: Mutex<CrashReport>,
    /// The runs that have begun and not ended.
    under_way: Mutex<BTreeSet<u64>>,
}

impl Shared {
    /// Does one run.
    fn run(&self, number: u64) -> Result<CrashReport, CrashFinding> {
        let options = &self.options;
        let mut random =
            Seeded::new(Seeded::new(options.seed ^ number.wrapping_mul(0x9e37_79b9)).next_u64());
        let shape = Shape::random(&mut random);
        let states = STATES_PER_RUN.min(options.states);
        let run = AssertUnwindSafe(|| one_run(&shape, random, states, options, self.sabotage));
        let report =
            catch_unwind(run).unwrap_or_else(|_| Err("a panic, whose message is above".into()));
        report.map_err(|error| CrashFinding {
            run: Some(number),
            repeats_exactly: shape.repeats_exactly() && options.medium == Medium::Simulated,
            problem: format!("run {number} of seed {}: {error}", options.seed),
        })
    }

    /// Runs until enough has been checked.
    fn work(&self) -> Result<(), CrashFinding> {
        let (begin, options) = (clock::now_monotonic(), &self.options);
        loop {
            let done = self.total.lock().states;
            let late = options.duration.is_some_and(|duration| begin.elapsed() >= duration);
            let stopped = [&*self.stop, &self.over].iter().any(|flag| flag.load(Ordering::Relaxed));
            if stopped || late || done >= options.states {
                return Ok(());
            }
            let number = self.next_run.fetch_add(1, Ordering::Relaxed);
            self.under_way.lock().insert(number);
            let report =
                self.run(number).inspect_err(|_| self.over.store(true, Ordering::Relaxed))?;
            self.under_way.lock().remove(&number);
            self.total.lock().add(&report);
            if options.only_run.is_some() {
                return Ok(());
            }
        }
    }

    /// Waits until all workers have ended, or none makes progress.
    fn wait_for<T>(
        &self,
        workers: &[thread::JoinHandle<T>],
        progress: &mut dyn FnMut(&CrashReport),
    ) -> Result<(), CrashFinding> {
        let mut last = (0, clock::now_monotonic());
        while workers.iter().any(|worker| !worker.is_finished()) {
            clock::sleep(Duration::from_millis(20));
            let total = *self.total.lock();
            progress(&total);
            if total.runs != last.0 {
                last = (total.runs, clock::now_monotonic());
            }
            if last.1.elapsed() > HANG_TIME {
                let (seed, runs) = (self.options.seed, self.under_way.lock().clone());
                let problem = format!(
                    "no run ended for {HANG_TIME:?}: a volume hangs (seed {seed}, one of the runs {runs:?})"
                );
                return Err(CrashFinding { run: None, repeats_exactly: false, problem });
            }
        }
        Ok(())
    }
}

/// Runs the test.
///
/// # Errors
/// The first state that is not permitted: seed, run, crash point, client, what was expected and
/// what was found.
pub fn run(options: &CrashOptions) -> Result<CrashReport, String> {
    let (report, outcome) = run_until(options, &Arc::new(AtomicBool::new(false)), &mut |_| {});
    outcome.map(|()| report).map_err(|finding| finding.problem)
}

/// As [`run`], until `stop` is set; `progress` gets what has been tested, several times a second.
/// What was tested is returned with a finding, too.
pub fn run_until(
    options: &CrashOptions,
    stop: &Arc<AtomicBool>,
    progress: &mut dyn FnMut(&CrashReport),
) -> (CrashReport, Result<(), CrashFinding>) {
    run_sabotaged(options, Sabotage::None, stop, progress)
}

/// As [`run_until`], with something wrong on purpose.
#[doc(hidden)]
pub fn run_sabotaged(
    options: &CrashOptions,
    sabotage: Sabotage,
    stop: &Arc<AtomicBool>,
    progress: &mut dyn FnMut(&CrashReport),
) -> (CrashReport, Result<(), CrashFinding>) {
    let total = Mutex::new(Rank::LEAF, CrashReport::default());
    let under_way = Mutex::new(Rank::LEAF, BTreeSet::new());
    let next_run = AtomicU64::new(options.only_run.unwrap_or(0));
    let (stop, over) = (stop.clone(), AtomicBool::new(false));
    let shared = Arc::new(Shared {
        options: options.clone(),
        sabotage,
        next_run,
        stop,
        over,
        total,
        under_way,
    });
    let threads = if options.only_run.is_some() { 1 } else { options.threads };
    let worker = || {
        let shared = shared.clone();
        thread::spawn("crash states", move || shared.work())
    };
    let workers: Vec<_> = (0..threads).map(|_| worker()).collect();
    let mut outcome = shared.wait_for(&workers, progress);
    if outcome.is_ok() {
        for worker in workers {
            outcome = outcome.and(worker.join().expect("a run's panic is caught"));
        }
    }
    let report = *shared.total.lock();
    (report, outcome)
}
