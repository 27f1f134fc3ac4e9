//! File systems beside each other on this machine: loop devices of equal size on files that are written beforehand, fresh
//! file systems, all in turns, and the medians.
//!
//! Needs root. Everything that is set up belongs to a guard that takes it down again: mounts, servers, loop devices, the
//! folder with the images. An interruption is noticed between two polls of whatever runs, kills that, and returns through
//! the guards.
mod process;
mod stage;
mod summary;
mod system;
mod tools;

pub use summary::{Summary, SummaryRow, THROUGHPUT, ToolVersion};
pub use system::System;
pub use tools::PeerWorkload;

use crate::interrupt::Interrupt;
use crate::report::OperationSummary;
use crate::resources::Resources;
use anyhow::{Context, bail, ensure};
use process::run_to_end;
use serde::{Deserialize, Serialize};
use stage::{Mounted, Stage};
use std::path::{Path, PathBuf};
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
    /// Threads of each load.
    pub clients: usize,
    /// Time of each measurement.
    pub duration: Duration,
    /// Size of each file system.
    pub size_bytes: u64,
    /// Whether the loop devices bypass the host's page cache.
    pub direct_io: bool,
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
    /// Other figures.
    #[serde(default)]
    pub figures: Vec<PeerFigure>,
    /// Latencies by operation, as far as a tool tells them; 0 where it does not. Those of an own load, too.
    #[serde(default)]
    pub latencies: Vec<OperationSummary>,
    /// Operations done.
    pub completed: u64,
    /// Busy CPU time of the whole machine, in seconds: load, server and kernel threads.
    pub machine_cpu_seconds: f64,
    /// Context switches of the whole machine.
    pub machine_context_switches: u64,
    /// The part of the CPU time that Cairn's server used, in seconds.
    pub server_cpu_seconds: f64,
    /// The load's own report; `None` for a tool.
    pub report: Option<crate::Report>,
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
    /// What it tells.
    pub name: String,
    /// How much.
    pub value: f64,
    /// Of what.
    pub unit: String,
    /// Whether a smaller one is the better one.
    pub less_is_better: bool,
}

impl PeersSettings {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.repeat > 0, "at least one round is needed");
        ensure!(!self.systems.is_empty(), "name at least one file system, for example --fs ext4,cairn");
        ensure!(!self.workloads.is_empty(), "name at least one workload, for example --workload fsync-write");
        ensure!(rustix::process::geteuid().is_root(), "this must run as root, because it makes loop devices and mounts");
        let mut missing: Vec<String> = Vec::new();
        let commands =
            self.systems.iter().flat_map(|system| system.commands()).chain(self.workloads.iter().filter_map(PeerWorkload::command));
        for (command, package) in commands {
            if !process::is_installed(command) {
                missing.push(format!("{command} (package {package})"));
            }
        }
        missing.sort();
        missing.dedup();
        ensure!(missing.is_empty(), "these commands are not installed: {}", missing.join(", "));
        let needed_bytes = self.size_bytes * self.systems.len() as u64;
        let space = rustix::fs::statvfs(&self.folder).with_context(|| format!("{}", self.folder.display()))?;
        let free_bytes = space.f_bavail * space.f_frsize;
        if free_bytes < needed_bytes + needed_bytes / 20 {
            bail!(
                "{} has {} MiB free, but {} images of {} MiB are needed; name another folder with --dir, or a smaller --size",
                self.folder.display(),
                free_bytes >> 20,
                self.systems.len(),
                self.size_bytes >> 20,
            );
        }
        Ok(())
    }
}

/// Runs the comparison; `tell` hears what is going on.
///
/// # Errors
/// When something that is needed is missing, a file system or a load fails, or on interruption. Nothing is left mounted.
pub fn run(settings: &PeersSettings, tell: &mut dyn FnMut(&str)) -> anyhow::Result<Summary> {
    settings.check()?;
    let mut stage = Stage::new(&settings.folder)?;
    for &system in &settings.systems {
        tell(&format!("writing the image of {} ({} MiB)", system.name(), settings.size_bytes >> 20));
        stage.add_image(system, settings)?;
        settings.interrupt.check()?;
    }
    let mut samples = Vec::new();
    for round in 1..=settings.repeat {
        let mut order = settings.systems.clone();
        order.rotate_left((round - 1) % settings.systems.len());
        for system in order {
            tell(&format!("round {round} of {}: {}", settings.repeat, system.name()));
            let measured = measure(system, round, &stage, settings);
            samples.extend(measured.with_context(|| format!("{}, round {round}", system.name()))?);
        }
    }
    Ok(Summary::new(settings, samples))
}

fn measure(system: System, round: usize, stage: &Stage, settings: &PeersSettings) -> anyhow::Result<Vec<Sample>> {
    let device = stage.device_of(system)?;
    run_to_end(system.make(device, &settings.program), stage.folder(), &settings.interrupt)?;
    let mounted = Mounted::new(system, device, stage, settings)?;
    let mut samples = Vec::new();
    for workload in &settings.workloads {
        let mut sample = measure_one(workload, &mounted, stage, settings).with_context(|| workload.name())?;
        (sample.round, sample.system) = (round, system.name().into());
        samples.push(sample);
    }
    mounted.end()?;
    Ok(samples)
}

fn measure_one(workload: &PeerWorkload, mounted: &Mounted<'_>, stage: &Stage, settings: &PeersSettings) -> anyhow::Result<Sample> {
    let (machine, server) = (Resources::of_machine(), mounted.server_resources());
    let output = run_to_end(workload.invocation(mounted.path(), settings), stage.folder(), &settings.interrupt)?;
    let (machine, server) = (Resources::of_machine() - machine, mounted.server_resources() - server);
    let mut sample = workload.understand(&output, settings)?;
    workload.clean_up(mounted.path())?;
    sample.machine_cpu_seconds = machine.cpu_seconds;
    sample.machine_context_switches = machine.context_switches;
    sample.server_cpu_seconds = server.cpu_seconds;
    Ok(sample)
}

/// Whether anything is mounted at `path` or below.
fn is_mounted_below(path: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    table.lines().filter_map(|line| line.split(' ').nth(4)).any(|mount| Path::new(mount).starts_with(path))
}
