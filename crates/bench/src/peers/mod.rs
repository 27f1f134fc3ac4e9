//! File systems beside each other on this machine: loop devices of equal size on files that are
//! written beforehand, fresh file systems, all in turns, and the medians.
//!
//! Needs root. Everything that is set up belongs to a guard that takes it down again: mounts,
//! servers, loop devices, the folder with the images. An interruption is noticed between two polls
//! of whatever runs, kills that, and returns through the guards.
mod everyday;
mod outputs;
mod postgres;
mod process;
mod stage;
mod summary;
mod system;
mod versions;
mod workload;

pub use everyday::Everyday;
#[cfg(test)]
pub use summary::ToolVersion;
pub use summary::{LoadSeconds, Summary, SummaryRow, THROUGHPUT};
pub use system::{Candidate, DirectIo, Mounting, System, Transport, ring_is_switched_on};
pub use workload::{Generator, NamedWorkloads, PeerWorkload, Tool};

use crate::disturbance::Observation;
use crate::machine::utc_now;
use crate::report::OperationSummary;
use crate::resources::Resources;
use anyhow::{Context, bail, ensure};
use cairn_harness::Interrupt;
use cairn_harness::progress::ProgressBar;
use everyday::Materials;
use postgres::Postgres;
use process::{run_timed, run_to_end};
use serde::{Deserialize, Serialize};
use stage::{Mounted, Stage};
use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

/// What is compared, and how.
#[derive(Clone, Debug)]
pub struct PeersSettings {
    /// Which file systems.
    pub systems: Vec<System>,
    /// Which loads.
    pub workloads: Vec<PeerWorkload>,
    /// Rounds.
    pub repeat: usize,
    /// Clients of each load that doesn't say how many it has.
    pub clients: usize,
    /// Time of each measurement.
    pub duration: Duration,
    /// Size of each file system.
    pub size_bytes: u64,
    /// Whether the loop devices bypass the host's page cache.
    pub direct_io: DirectIo,
    /// Folder for the images: the disk below it is what is measured.
    pub folder: PathBuf,
    /// The `cairn` command.
    pub program: PathBuf,
    /// Load file of `dbench`.
    pub loadfile: Option<PathBuf>,
    /// The exact command, for the summary.
    pub command: Vec<String>,
    /// Whether the user wants the comparison to end.
    pub interrupt: Interrupt,
}

/// One measurement: one load on one file system in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// From 1.
    pub round: usize,
    /// Which file system.
    pub system: String,
    /// Which load, and with how many clients: `tool:fio@16`.
    pub workload: String,
    /// Threads, processes or jobs of the load.
    #[serde(default)]
    pub clients: usize,
    /// The main figure.
    pub value: f64,
    /// Its unit.
    pub unit: String,
    /// Whether a smaller one is the better one.
    #[serde(default)]
    pub less_is_better: bool,
    /// Other figures.
    #[serde(default)]
    pub figures: Vec<PeerFigure>,
    /// Latencies by operation, as far as a tool reports them; 0 where it does not. Those of an own
    /// load, too.
    #[serde(default)]
    pub latencies: Vec<OperationSummary>,
    /// Operations done.
    pub completed: u64,
    /// From the program's start to its end.
    #[serde(default)]
    pub wall_seconds: f64,
    /// Busy CPU time of the whole machine, in seconds: load, server and kernel threads. Of an own
    /// load in its measured time, of a tool from its start to its end.
    pub machine_cpu_seconds: f64,
    /// Context switches of the whole machine in the same time.
    pub machine_context_switches: u64,
    /// CPU time of Cairn's server from the program's start to its end, in seconds.
    pub server_cpu_seconds: f64,
    /// That of the program, and of those that it started.
    #[serde(default)]
    pub caller_cpu_seconds: f64,
    /// What the kernel spent beside both in the same time: its own threads, and interrupts.
    #[serde(default)]
    pub kernel_cpu_seconds: f64,
    /// The load's own report; `None` for a tool.
    pub report: Option<crate::report::Report>,
    /// Cairn's counters before the load; `None` for the others.
    #[serde(default)]
    pub statistics_before: Option<serde_json::Value>,
    /// Cairn's counters after it.
    #[serde(default)]
    pub statistics_after: Option<serde_json::Value>,
}

/// A figure beside the main one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerFigure {
    /// What it measures.
    pub name: String,
    /// How much.
    pub value: f64,
    /// Of what.
    pub unit: String,
    /// Whether a smaller one is the better one.
    pub less_is_better: bool,
}

/// Preparing an image, as far as an estimate goes.
const IMAGE_BYTES_PER_SECOND: u64 = 500 << 20;
/// Making a file system, mounting and unmounting it.
const MOUNT_ESTIMATE: Duration = Duration::from_secs(2);

impl PeersSettings {
    /// The file systems, once for each kind of loop device that is asked for.
    pub fn candidates(&self) -> Vec<Candidate> {
        Candidate::all(&self.systems, self.direct_io)
    }

    /// About how long the comparison takes.
    pub fn estimate(&self) -> Duration {
        let candidates = self.candidates().len() as u32;
        let images = Duration::from_secs(self.size_bytes / IMAGE_BYTES_PER_SECOND) * candidates;
        let round: Duration =
            self.workloads.iter().map(|workload| workload.estimate(self.duration)).sum();
        images + (round + MOUNT_ESTIMATE) * candidates * self.repeat as u32
    }

    /// Why which loads of every day are left out.
    pub fn left_out(&self) -> Vec<String> {
        self.workloads.iter().filter_map(PeerWorkload::left_out).collect()
    }

    fn present_workloads(&self) -> Vec<PeerWorkload> {
        self.workloads.iter().copied().filter(|workload| workload.left_out().is_none()).collect()
    }

    #[cfg(test)]
    fn for_tests() -> Self {
        Self {
            systems: Vec::new(),
            workloads: Vec::new(),
            repeat: 1,
            clients: 1,
            duration: Duration::from_secs(1),
            size_bytes: 0,
            direct_io: DirectIo::Yes,
            folder: "/".into(),
            program: "/bin/false".into(),
            loadfile: None,
            command: Vec::new(),
            interrupt: Interrupt::default(),
        }
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.repeat > 0, "at least one round is needed");
        ensure!(
            !self.systems.is_empty(),
            "name at least one file system, for example --fs ext4,cairn"
        );
        let left_out = self.left_out();
        ensure!(
            left_out.len() < self.workloads.len() || left_out.is_empty(),
            "nothing can be measured: {}",
            left_out.join("; ")
        );
        ensure!(
            !self.workloads.is_empty(),
            "name at least one workload, for example --workload fsync-write"
        );
        ensure!(
            self.duration > Duration::ZERO,
            "a load needs some time; write for example --seconds 10"
        );
        ensure!(
            rustix::process::geteuid().is_root(),
            "this must run as root, because it makes loop devices and mounts; use sudo"
        );
        ensure!(
            self.folder.is_dir(),
            "{} is not a folder; name one for the images with --dir",
            self.folder.display()
        );
        let mut missing: Vec<String> = Vec::new();
        let of_workloads = self
            .present_workloads()
            .into_iter()
            .flat_map(|workload| workload.commands().iter().copied());
        for (command, package) in
            self.systems.iter().flat_map(|system| system.commands()).chain(of_workloads)
        {
            if !process::is_installed(command) {
                missing.push(format!("{command} (package {package})"));
            }
        }
        missing.sort();
        missing.dedup();
        ensure!(
            missing.is_empty(),
            "these commands are not installed: {}; install their packages, or leave out what needs them",
            missing.join(", ")
        );
        if let Some(system) =
            self.systems.iter().find(|system| system.size_bytes_min() > self.size_bytes)
        {
            bail!(
                "{} needs at least {} MiB; write a larger --size",
                system.name(),
                system.size_bytes_min() >> 20
            );
        }
        if let Some(why) = self.systems.iter().find_map(|system| system.is_impossible_because()) {
            bail!("{why}");
        }
        let images = self
            .candidates()
            .iter()
            .filter(|candidate| candidate.system.image_bytes(u64::MAX) == u64::MAX)
            .count() as u64;
        let needed_bytes = self.size_bytes.saturating_mul(images);
        let space = rustix::fs::statvfs(&self.folder)
            .with_context(|| format!("{}", self.folder.display()))?;
        let free_bytes = space.f_bavail * space.f_frsize;
        if free_bytes < needed_bytes.saturating_add(needed_bytes / 20) {
            bail!(
                "{} has {} MiB free, but {} images of {} MiB and a little more are needed; name another folder with --dir, or a smaller --size",
                self.folder.display(),
                free_bytes >> 20,
                images,
                self.size_bytes >> 20,
            );
        }
        Ok(())
    }
}

/// Runs the comparison, and reports the progress on standard error: with a bar on a terminal, else
/// in lines.
///
/// # Errors
/// When something that is needed is missing, a file system or a load fails, or on interruption.
/// Nothing is left mounted.
pub fn run(asked_for: &PeersSettings) -> anyhow::Result<Summary> {
    asked_for.check()?;
    let settings = &PeersSettings { workloads: asked_for.present_workloads(), ..asked_for.clone() };
    let began = utc_now();
    let candidates = settings.candidates();
    let measurements = candidates.len() * settings.workloads.len() * settings.repeat;
    let steps = ProgressBar::steps("peers", (candidates.len() + measurements) as u64);
    steps.tell(&format!(
        "{measurements} measurements of {} s; about {} min",
        settings.duration.as_secs_f64(),
        settings.estimate().as_secs().div_ceil(60),
    ));
    let left_out = asked_for.left_out();
    left_out.iter().for_each(|why| steps.tell(why));
    let mut stage = Stage::new(&settings.folder)?;
    let materials = Materials::new(stage.folder(), settings.size_bytes, settings.duration);
    let everyday: Vec<Everyday> =
        settings.workloads.iter().filter_map(PeerWorkload::as_everyday).collect();
    materials.write(&everyday, &settings.interrupt)?;
    let stage = &mut stage;
    for candidate in &candidates {
        steps.tell(&format!(
            "writing the image of {} ({} MiB)",
            candidate.label,
            settings.size_bytes >> 20
        ));
        stage.add_image(candidate, settings)?;
        settings.interrupt.check()?;
        steps.advance();
    }
    let mut samples = Vec::new();
    let observation = Observation::begin();
    for round in 1..=settings.repeat {
        let mut order = candidates.clone();
        order.rotate_left((round - 1) % candidates.len());
        for candidate in order {
            steps.tell(&format!("round {round} of {}: {}", settings.repeat, candidate.label));
            let measured = measure(
                &candidate,
                round,
                &Scene { stage, settings, materials: &materials },
                &steps,
            );
            samples
                .extend(measured.with_context(|| format!("{}, round {round}", candidate.label))?);
        }
    }
    Ok(Summary {
        disturbance: observation.end(),
        left_out,
        ..Summary::new(settings, began, samples)
    })
}

/// What all measurements have.
struct Scene<'a> {
    stage: &'a Stage,
    settings: &'a PeersSettings,
    materials: &'a Materials,
}

fn measure(
    candidate: &Candidate,
    round: usize,
    scene: &Scene<'_>,
    steps: &ProgressBar,
) -> anyhow::Result<Vec<Sample>> {
    let Scene { stage, settings, .. } = *scene;
    let device = stage.device_of(candidate)?;
    if let Some(make) = candidate.system.make(device, &settings.program) {
        run_to_end(make, stage.folder(), &settings.interrupt)?;
    }
    let mut mounted = Mounted::new(candidate.system, device, stage, settings)?;
    let mut samples = Vec::new();
    let mut workloads = settings.workloads.clone();
    workloads.rotate_left((round - 1) % settings.workloads.len());
    for workload in &workloads {
        steps.note(format!("{}, {}", candidate.label, workload.name()));
        let mut sample =
            measure_one(workload, &mut mounted, scene).with_context(|| workload.name())?;
        (sample.round, sample.system) = (round, candidate.label.clone());
        if let Some(report) = &mut sample.report {
            // The comparison says itself where it came from; the mount point's name means nothing
            // afterwards.
            (report.target, report.origin) = (candidate.label.clone(), None);
        }
        samples.push(sample);
        steps.advance();
    }
    mounted.end()?;
    Ok(samples)
}

/// Puts what a load of every day needs on the file system.
fn prepare(
    workload: &PeerWorkload,
    mounted: &mut Mounted<'_>,
    scene: &Scene<'_>,
) -> anyhow::Result<()> {
    let Some(load) = workload.as_everyday() else { return Ok(()) };
    let Scene { stage, settings, materials } = *scene;
    for command in
        everyday::preparations(load, workload.clients(settings), mounted.path(), materials)
    {
        run_to_end(command, stage.folder(), &settings.interrupt).context("what the load needs")?;
    }
    if everyday::settles_first(load) {
        rustix::fs::syncfs(File::open(mounted.path())?)?;
    }
    if everyday::is_cold(load) {
        mounted.forget()?;
    }
    Ok(())
}

fn measure_one(
    workload: &PeerWorkload,
    mounted: &mut Mounted<'_>,
    scene: &Scene<'_>,
) -> anyhow::Result<Sample> {
    let Scene { stage, settings, materials } = *scene;
    prepare(workload, mounted, scene)?;
    let needs_database = workload.generator == Generator::Tool(Tool::Pgbench);
    let database = needs_database
        .then(|| Postgres::start(mounted.path(), stage.folder(), &settings.interrupt))
        .transpose()?;
    let invocation = workload.invocation(
        mounted.path(),
        &postgres::socket_in(stage.folder()),
        settings,
        materials,
    );
    let statistics_before = mounted.statistics()?;
    let before =
        [Resources::of_machine(), mounted.server_resources(), Resources::of_ended_children()];
    let (output, elapsed) = run_timed(invocation, stage.folder(), &settings.interrupt)?;
    let [machine, server, callers] = [
        Resources::of_machine() - before[0],
        mounted.server_resources() - before[1],
        Resources::of_ended_children() - before[2],
    ];
    let statistics_after = mounted.statistics()?;
    drop(database);
    let mut sample = workload.understand(&output, elapsed, settings, materials)?;
    workload::clean_up(mounted.path())?;
    // The next load must not pay for this one.
    rustix::fs::syncfs(File::open(mounted.path())?)?;
    // An own load reports what its measured time took, without what it prepares and removes; a tool
    // counts as a whole.
    let own = sample
        .report
        .as_ref()
        .map(|report| (report.machine_cpu_seconds, report.machine_context_switches));
    (sample.machine_cpu_seconds, sample.machine_context_switches) =
        own.unwrap_or((machine.cpu_seconds, machine.context_switches));
    (sample.server_cpu_seconds, sample.caller_cpu_seconds) =
        (server.cpu_seconds, callers.cpu_seconds);
    sample.kernel_cpu_seconds = (machine - server - callers).system_cpu_seconds;
    (sample.statistics_before, sample.statistics_after) = (statistics_before, statistics_after);
    Ok(sample)
}
