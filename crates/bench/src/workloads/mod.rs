//! The load generators, and what they have in common: settings, a folder of their own, the report.
pub(crate) mod attribute_changes;
mod create_walk_unlink;
mod dbench;
mod device_limit;
mod forks;
mod fs_mark;
mod fsync_happy;
mod fsync_write;
mod isolation;
mod many_snapshots;
mod one_file_fsync;
mod round_trip;
mod small_durable_files;
mod snapshot_deletion;
mod snapshots;
pub(crate) mod tight_volume;
#[cfg(test)]
mod workload_tests;

use crate::ab::median;
use crate::client::{Limit, Measured, Plan};
use crate::disturbance::Observation;
use crate::engine_figures;
use crate::engine_settings::EngineSettings;
use crate::report::{Figure, Origin, Report};
use crate::resources::Resources;
use crate::spec::{FlushMode, TargetSpec};
use crate::target::{Target, remove_tree};
use anyhow::{Context, anyhow, ensure};
use cairn_engine::FlushPolicy;
use cairn_environment::random;
use cairn_harness::Interrupt;
use serde_json::Value;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// A load generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Each client writes its file in blocks of 64 KiB, with an fsync after each.
    FsyncWrite,
    /// Mail delivery: create, write 4 KiB, fsync, rename, fsync of the directory.
    SmallDurableFiles,
    /// Creates files as fs_mark does.
    FsMark,
    /// Creates, walks and removes a tree.
    CreateWalkUnlink,
    /// A write and a flush of the device, for sizes from 4 KiB to 4 MiB.
    DeviceLimit,
    /// Replays a load file of dbench.
    Dbench,
    /// Reads and writes with a periodic fsync, and the same without the cost of flushes.
    FsyncHappy,
    /// Small fsyncs, without and beside a large one.
    Isolation,
    /// Blocks of one file that all clients write, with an fsync after each.
    OneFileFsync,
    /// What no cache answers, and needs no work: the way to the file system and back.
    RoundTrip,
    /// Snapshots and forks, beside small fsyncs.
    Snapshots,
    /// Snapshots and forks, beside dbench.
    SnapshotsBesideDbench,
    /// Deletions of snapshots, in three orders.
    SnapshotDeletion,
    /// Forks that come at once, and early ones.
    Forks,
    /// A volume with many snapshots is opened and lists them.
    ManySnapshots,
}

impl Workload {
    /// All of them.
    pub const ALL: [Workload; 15] = [
        Workload::FsyncWrite,
        Workload::SmallDurableFiles,
        Workload::FsMark,
        Workload::CreateWalkUnlink,
        Workload::DeviceLimit,
        Workload::Dbench,
        Workload::FsyncHappy,
        Workload::Isolation,
        Workload::OneFileFsync,
        Workload::RoundTrip,
        Workload::Snapshots,
        Workload::SnapshotsBesideDbench,
        Workload::SnapshotDeletion,
        Workload::Forks,
        Workload::ManySnapshots,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Workload::FsyncWrite => "fsync-write",
            Workload::SmallDurableFiles => "small-durable-files",
            Workload::FsMark => "fs_mark",
            Workload::CreateWalkUnlink => "create-walk-unlink",
            Workload::DeviceLimit => "device-limit",
            Workload::Dbench => "dbench",
            Workload::FsyncHappy => "fsync-happy",
            Workload::Isolation => "isolation",
            Workload::OneFileFsync => "one-file-fsync",
            Workload::RoundTrip => "round-trip",
            Workload::Snapshots => "snapshots",
            Workload::SnapshotsBesideDbench => "snapshots-beside-dbench",
            Workload::SnapshotDeletion => "snapshot-deletion",
            Workload::Forks => "forks",
            Workload::ManySnapshots => "many-snapshots",
        }
    }

    /// Runs it.
    ///
    /// # Errors
    /// When the target can't be used, an operation fails, or the run is interrupted; the target is
    /// cleaned up all the same.
    pub fn run(self, spec: &TargetSpec, settings: &Settings) -> anyhow::Result<Report> {
        settings.check()?;
        ensure!(
            settings.snapshots.is_none() || self.can_have_snapshots(),
            "{} has no ratio to a run without snapshots; leave out --snapshots",
            self.name()
        );
        if self == Workload::DeviceLimit {
            return device_limit::run(spec, settings);
        }
        if self == Workload::ManySnapshots {
            return many_snapshots::run(spec, settings);
        }
        if self == Workload::Isolation {
            return run_on_target(self, spec, &isolation::settings(settings), FlushMode::Real);
        }
        if let Some(count) = settings.snapshots {
            return self.run_in_turns(count, spec, settings);
        }
        let report = run_on_target(self, spec, settings, FlushMode::Real)?;
        if self == Workload::FsyncHappy {
            return fsync_happy::with_loss(report, spec, settings);
        }
        Ok(report)
    }

    fn can_have_snapshots(self) -> bool {
        use Workload::*;
        let has_own = matches!(
            self,
            Snapshots | SnapshotsBesideDbench | SnapshotDeletion | Forks | ManySnapshots
        );
        !has_own && !matches!(self, DeviceLimit | Isolation | FsyncHappy)
    }

    /// Runs it without snapshots, with so many, with, and without: a target that becomes faster or
    /// slower by and by favours neither. The report is that of the first run with snapshots; it has
    /// the medians and their ratio.
    fn run_in_turns(
        self,
        count: u64,
        spec: &TargetSpec,
        settings: &Settings,
    ) -> anyhow::Result<Report> {
        let run = |snapshots| {
            let settings = Settings { snapshots: Some(snapshots), ..settings.clone() };
            run_on_target(self, spec, &settings, FlushMode::Real)
        };
        let first = run(0)?;
        let mut report = run(count)?;
        let (second, last) = (run(count)?, run(0)?);
        let of_both = |runs: [&Report; 2]| median(runs.map(|run| run.throughput.value));
        let (with, without) = (of_both([&report, &second]), of_both([&first, &last]));
        let ratio = if without > 0.0 { with / without } else { 0.0 };
        let unit = report.throughput.unit.clone();
        report.figures.extend([
            Figure::new("snapshots of the load's folder", count as f64, ""),
            Figure::new("throughput with them, median of 2 runs", with, unit.clone()),
            Figure::new("throughput without any, median of 2 runs", without, unit),
            Figure::new("ratio", ratio, ""),
        ]);
        Ok(report)
    }

    /// Runs it as [`run`](Self::run) does, and notes in the report when and where it ran, by which
    /// `command`, and what else the machine did meanwhile.
    ///
    /// # Errors
    /// Those of [`run`](Self::run).
    pub fn run_observed(
        self,
        spec: &TargetSpec,
        settings: &Settings,
        command: Vec<String>,
    ) -> anyhow::Result<Report> {
        let mut origin = Origin::here(command, spec.folder());
        let observation = Observation::begin();
        let report = self.run(spec, settings)?;
        origin.disturbance = observation.end();
        Ok(Report { origin: Some(origin), ..report })
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Workload::ALL.into_iter().find(|workload| workload.name() == text);
        known.ok_or_else(|| {
            format!(
                "unknown workload \"{text}\"; there are: {}",
                Workload::ALL.map(Workload::name).join(", ")
            )
        })
    }
}

/// When a file of `fs_mark` is made durable: the numbers of its option `-S`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SyncMethod {
    None = 0,
    FsyncEach = 1,
    SyncAll = 2,
    FsyncReversed = 3,
    SyncAllThenFsyncReversed = 4,
    FsyncAfterwards = 5,
    SyncAllThenFsync = 6,
}

impl SyncMethod {
    /// The method with a number of fs_mark's.
    pub fn from_number(number: u8) -> Option<Self> {
        use SyncMethod::*;
        let all = [
            None,
            FsyncEach,
            SyncAll,
            FsyncReversed,
            SyncAllThenFsyncReversed,
            FsyncAfterwards,
            SyncAllThenFsync,
        ];
        all.get(usize::from(number)).copied()
    }
}

/// How a load is run; what a load doesn't know it ignores.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Threads.
    pub clients: usize,
    /// Measured time of loads that go on until it is over.
    pub duration: Duration,
    /// Files for each client; `None` for the load's own number.
    pub files: Option<u64>,
    /// Size of the files that `fs_mark` makes.
    pub file_bytes: usize,
    /// Directories in which `fs_mark` makes them.
    pub directories: u64,
    /// When `fs_mark` makes them durable.
    pub sync_method: SyncMethod,
    /// Load file of `dbench`; `None` for the one that its package installs.
    pub loadfile: Option<PathBuf>,
    /// Whether `dbench` also reports latencies without the time in which a thread had no CPU.
    pub run_queue: bool,
    /// The load's folder is a subvolume with so many snapshots.
    pub snapshots: Option<u64>,
    /// How the engine shares flushes.
    pub policy: FlushPolicy,
    /// How the engine differs from its defaults.
    pub engine: EngineSettings,
    /// Whether the user wants the run to end.
    pub interrupt: Interrupt,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            clients: 8,
            duration: Duration::from_secs(10),
            files: None,
            file_bytes: 4096,
            directories: 8,
            sync_method: SyncMethod::FsyncEach,
            loadfile: None,
            run_queue: false,
            snapshots: None,
            policy: FlushPolicy::Auto,
            engine: EngineSettings::default(),
            interrupt: Interrupt::default(),
        }
    }
}

const CLIENTS_MAX: usize = 4096;
const FILE_BYTES_MAX: usize = 1 << 30;

impl Settings {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            (1..=CLIENTS_MAX).contains(&self.clients),
            "{} clients are not possible; write 1 to {CLIENTS_MAX}",
            self.clients
        );
        ensure!(
            self.duration > Duration::ZERO,
            "a load needs some time; write for example --seconds 10"
        );
        ensure!(self.directories > 0, "at least one directory is needed");
        ensure!(
            self.file_bytes <= FILE_BYTES_MAX,
            "files of up to {FILE_BYTES_MAX} bytes are possible"
        );
        Ok(())
    }

    fn plan(&self, task: &str, limit: Limit) -> Plan {
        Plan {
            task: task.to_owned(),
            clients: self.clients,
            warmup: Duration::ZERO,
            limit,
            interrupt: self.interrupt.clone(),
        }
    }

    fn timed_plan(&self, task: &str) -> Plan {
        self.plan(task, Limit::Time(self.duration))
    }
}

/// A target with a folder in which a load may do what it likes.
#[derive(Clone)]
struct Place {
    target: Arc<dyn Target>,
    folder: String,
}

impl Place {
    /// A path below the folder.
    fn path(&self, below: &str) -> String {
        format!("{}/{below}", self.folder)
    }
}

/// What a load found out.
struct Findings {
    measured: Measured,
    completed: u64,
    throughput: Figure,
    figures: Vec<Figure>,
}

impl Findings {
    /// The throughput is the number of completed operations per second.
    fn of_rate(measured: Measured, unit: &str) -> Self {
        let throughput = Figure::new("throughput", measured.per_second(measured.completed), unit);
        Self { completed: measured.completed, measured, throughput, figures: Vec::new() }
    }

    fn into_report(self, load: &str, target: String, clients: usize) -> Report {
        let Resources { cpu_seconds, system_cpu_seconds, context_switches } = self.measured.process;
        Report {
            workload: load.into(),
            target,
            version: env!("CARGO_PKG_VERSION").into(),
            clients: clients as u64,
            seconds: self.measured.seconds,
            completed: self.completed,
            throughput: self.throughput,
            figures: self.figures,
            operations: self.measured.recorder.summaries(),
            cpu_seconds,
            system_cpu_seconds,
            context_switches,
            machine_cpu_seconds: self.measured.machine.cpu_seconds,
            machine_context_switches: self.measured.machine.context_switches,
            statistics: None,
            origin: None,
        }
    }
}

fn run_on_target(
    workload: Workload,
    spec: &TargetSpec,
    settings: &Settings,
    flushes: FlushMode,
) -> anyhow::Result<Report> {
    run_in_folder(workload.name(), spec, settings, flushes, |place| {
        let Some(count) = settings.snapshots else { return generate(workload, place, settings) };
        // The folder that is there stays empty.
        let inner = Place { target: place.target.clone(), folder: place.path("subvolume") };
        let subvolumes = snapshots::of(&*place.target)?;
        subvolumes.make(&inner.folder).context("a subvolume cannot be made")?;
        let ran = snapshots::make_many(&inner, settings, count)
            .and_then(|()| generate(workload, &inner, settings));
        if spec.vanishes() {
            return ran;
        }
        // Also after an interruption.
        let lasting = Settings { interrupt: Interrupt::default(), ..settings.clone() };
        let cleaned = snapshots::delete_many(&inner, &lasting, count)
            .and_then(|()| Ok(subvolumes.remove(&inner.folder)?));
        with_end(ran, cleaned.with_context(|| format!("{} is left behind", inner.folder)))
    })
}

/// Opens the target, runs the load `name` in a new folder of it, removes the folder, closes the
/// target.
fn run_in_folder(
    name: &str,
    spec: &TargetSpec,
    settings: &Settings,
    flushes: FlushMode,
    load: impl FnOnce(&Place) -> anyhow::Result<Findings>,
) -> anyhow::Result<Report> {
    let target = spec.open(settings.policy, flushes, &settings.engine)?;
    let place =
        Place { target: target.clone(), folder: format!("cairn-bench-{:016x}", random::u64()) };
    let ran = run_and_clean_up(&place, spec, load);
    let (findings, statistics) =
        with_end(ran, target.close().context("the target could not be closed"))?;
    let mut report = findings.into_report(name, spec.name(), settings.clients);
    report.statistics = statistics;
    Ok(report)
}

/// Makes the folder, runs `load` in it, removes it unless it vanishes with the device; the engine's
/// counters are those before the removal.
fn run_and_clean_up(
    place: &Place,
    spec: &TargetSpec,
    load: impl FnOnce(&Place) -> anyhow::Result<Findings>,
) -> anyhow::Result<(Findings, Option<Value>)> {
    let (target, folder) = (&*place.target, &place.folder);
    target
        .make_directory(folder)
        .with_context(|| format!("target {}: cannot make a directory in it", spec.name()))?;
    let before = target.statistics();
    let ran = load(place);
    let statistics = counted(&before, target.statistics());
    let cleaned = if spec.vanishes() {
        Ok(())
    } else {
        remove_tree(target, folder)
            .with_context(|| format!("{folder} in {} is left behind", spec.name()))
    };
    with_end(ran.map(|findings| (findings, statistics)), cleaned)
}

/// The result of something whose end may have failed, too; then the error reports both.
fn with_end<T>(ran: anyhow::Result<T>, end: anyhow::Result<()>) -> anyhow::Result<T> {
    match (ran, end) {
        (Err(error), Err(also)) => Err(anyhow!("{error:#}; also, {also:#}")),
        (ran, end) => ran.and_then(|outcome| end.map(|()| outcome)),
    }
}

fn counted(before: &Option<Value>, after: Option<Value>) -> Option<Value> {
    Some(engine_figures::between(before.as_ref()?, after?))
}

fn generate(workload: Workload, place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    match workload {
        Workload::FsyncWrite => fsync_write::run(place, settings),
        Workload::SmallDurableFiles => small_durable_files::run(place, settings),
        Workload::FsMark => fs_mark::run(place, settings),
        Workload::CreateWalkUnlink => create_walk_unlink::run(place, settings),
        Workload::Dbench => dbench::run(place, settings),
        Workload::FsyncHappy => fsync_happy::run(place, settings),
        Workload::Isolation => isolation::run(place, settings),
        Workload::OneFileFsync => one_file_fsync::run(place, settings),
        Workload::RoundTrip => round_trip::run(place, settings),
        Workload::Snapshots => snapshots::run(place, settings),
        Workload::SnapshotsBesideDbench => snapshots::run_beside_dbench(place, settings),
        Workload::SnapshotDeletion => snapshot_deletion::run(place, settings),
        Workload::Forks => forks::run(place, settings),
        Workload::DeviceLimit | Workload::ManySnapshots => {
            unreachable!("it needs a device, not a target")
        }
    }
}
