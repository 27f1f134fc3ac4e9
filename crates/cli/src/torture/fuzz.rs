//! `cairn torture fuzz`: hostile volumes, in memory. [`cairn_torture::hostile`] makes and tries
//! them.
//!
//! Memory is watched by the kernel's mark of the most that this process had resident, set back
//! before each input. (The tests of `cairn-torture` count allocations instead, also of memory that
//! is never touched.)
use super::signals::Interrupt;
use super::told::{Told, interrupted_after, line};
use crate::commands::torture::make_folder;
use crate::progress::ProgressBar;
use anyhow::{Context, ensure};
use cairn_torture::hostile::{
    AllocationMeter, FuzzOptions, FuzzReport, INPUT_BYTES_MAX, corpus, from_hex, fuzz, to_hex,
};
use clap::Parser;
use serde::Serialize;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What one volume of 24 MiB may make this process take, all uses of it together.
const MEMORY_BYTES_MAX: u64 = 256 << 20;
/// Of the given inputs.
const GIVEN_TIME_MAX: Duration = Duration::from_secs(24 * 3600);

/// Volumes whose checksums hold but whose content no program of ours wrote: no crash, no hang, no
/// wrong bytes.
///
/// Each is checked, opened, read, changed and repaired. First come the inputs that are kept with
/// the source, then new ones, made from those that showed something new.
#[derive(Parser)]
pub struct Fuzz {
    /// Time for new inputs; a fraction is possible.
    #[arg(long, value_name = "S", default_value = "60", value_parser = crate::commands::bench::duration, allow_negative_numbers = true)]
    seconds: Duration,
    /// Chooses the inputs [default: a random one, which is printed].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Only this input, in the digits in which a finding is told.
    #[arg(long, value_name = "HEX", value_parser = input, conflicts_with_all = ["seconds", "save", "seed"])]
    input: Option<Input>,
    /// Folder for inputs that showed something new, each in a file; those that are there are tried
    /// first. It is made if there is none.
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone)]
struct Input(Vec<u8>);

fn input(text: &str) -> Result<Input, String> {
    match from_hex(text) {
        Some(bytes) if bytes.len() > INPUT_BYTES_MAX => Err(too_long(&bytes)),
        Some(bytes) if !bytes.is_empty() => Ok(Input(bytes)),
        _ => Err("an input consists of pairs of hexadecimal digits".into()),
    }
}

fn too_long(input: &[u8]) -> String {
    format!("an input has at most {INPUT_BYTES_MAX} bytes, but these are {}", input.len())
}

#[derive(Serialize)]
struct Tried {
    /// Volumes tried.
    volumes: u64,
    /// Inputs kept, since they showed something new.
    kept: u64,
    /// Different things seen.
    features: u64,
    /// Most memory that one input took, if the kernel tells.
    memory_bytes_max: u64,
    seconds: f64,
    findings: Vec<Found>,
}

#[derive(Serialize)]
struct Found {
    input: String,
    problem: String,
}

impl Fuzz {
    /// Runs the command.
    pub fn run(&self, interrupt: &Interrupt) -> anyhow::Result<ExitCode> {
        let seed = self.seed.unwrap_or_else(cairn_environment::random::u64);
        let given = match &self.input {
            Some(Input(input)) => vec![input.clone()],
            None => [corpus(), self.saved()?].concat(),
        };
        let only_corpus = self.input.is_some();
        let (stop, allocations) = (interrupt.stop.clone(), meter());
        let options = FuzzOptions {
            seed,
            corpus: given,
            only_corpus,
            allocations,
            stop,
            ..FuzzOptions::default()
        };
        let report = self.fuzz(options);
        self.save(&report)?;
        let findings: Vec<Found> = report
            .findings
            .iter()
            .map(|finding| Found {
                input: to_hex(&finding.input),
                problem: finding.problem.clone(),
            })
            .collect();
        let tried = Tried {
            volumes: report.runs,
            kept: report.corpus.len() as u64,
            features: report.features as u64,
            memory_bytes_max: report.allocated_bytes_max.unwrap_or(0),
            seconds: report.elapsed.as_secs_f64(),
            findings,
        };
        let (passed, interrupted) = (tried.findings.is_empty(), interrupt.is_received());
        // One input is what it is, whatever the seed.
        let seed = self.input.is_none().then_some(seed);
        Told { command: "fuzz".into(), seed, passed, interrupted, report: tried }.tell(self.json)
    }

    /// First everything that is given, however long that takes, then new inputs.
    fn fuzz(&self, options: FuzzOptions) -> FuzzReport {
        // The unchanged volumes come before.
        let given = options.corpus.len() as u64 + 5;
        let bar = ProgressBar::items("known inputs", given).in_lines();
        if self.input.is_none() {
            bar.tell(&format!("seed {}", options.seed));
        }
        let known_options =
            FuzzOptions { runs_max: given, time: GIVEN_TIME_MAX, ..options.clone() };
        let known = fuzz(&known_options, &mut |progress| bar.set(progress.runs));
        if !known.findings.is_empty()
            || self.input.is_some()
            || options.stop.load(Ordering::Relaxed)
        {
            return known;
        }
        bar.restart("seconds", self.seconds.as_secs().max(1));
        let options = FuzzOptions { corpus: known.corpus, time: self.seconds, ..options };
        let mut report = fuzz(&options, &mut |progress| bar.set(progress.elapsed.as_secs()));
        report.runs += known.runs;
        report.elapsed += known.elapsed;
        report.features = report.features.max(known.features);
        report.allocated_bytes_max = report.allocated_bytes_max.max(known.allocated_bytes_max);
        report
    }

    fn saved(&self) -> anyhow::Result<Vec<Vec<u8>>> {
        let Some(folder) = &self.save else { return Ok(Vec::new()) };
        make_folder(folder)?;
        let told = || folder.display().to_string();
        let files = fs::read_dir(folder)
            .with_context(told)?
            .collect::<Result<Vec<_>, _>>()
            .with_context(told)?;
        let read = |file: fs::DirEntry| {
            let told = || file.path().display().to_string();
            let input = fs::read(file.path()).with_context(told)?;
            ensure!(input.len() <= INPUT_BYTES_MAX, "{}: {}", told(), too_long(&input));
            Ok(input)
        };
        files.into_iter().map(read).collect()
    }

    fn save(&self, report: &FuzzReport) -> anyhow::Result<()> {
        let Some(folder) = &self.save else { return Ok(()) };
        report.corpus.iter().try_for_each(|input| save_in(folder, input))
    }
}

/// The name says what is in it, so that an input is there once.
fn save_in(folder: &Path, input: &[u8]) -> anyhow::Result<()> {
    let hash = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let file = folder.join(format!("{hash:016x}"));
    fs::write(&file, input).with_context(|| file.display().to_string())
}

impl fmt::Display for Told<Tried, Option<u64>> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tried { volumes, kept, features, memory_bytes_max, seconds, findings } = &self.report;
        let interrupted = interrupted_after(self.interrupted, *volumes, None, "volumes");
        writeln!(formatter, "cairn torture {}{interrupted}", self.command)?;
        line(
            formatter,
            "hostile volumes",
            *volumes,
            "each checked, opened, read, changed, repaired",
        )?;
        line(formatter, "inputs kept", *kept, "since they showed something new")?;
        line(formatter, "different things seen", *features, "")?;
        line(formatter, "MiB of memory", memory_bytes_max >> 20, "taken by one of them at most")?;
        writeln!(formatter, "  {seconds:.1} s")?;
        for Found { input, problem } in findings {
            writeln!(
                formatter,
                "\nFOUND: {problem}\n  repeat: cairn torture fuzz --input {input}"
            )?;
        }
        match self.seed {
            _ if !self.passed => Ok(()),
            _ if *volumes == 0 => writeln!(formatter, "Nothing was tested."),
            Some(seed) => writeln!(formatter, "No volume broke a rule. (seed {seed})"),
            None => writeln!(formatter, "The volume broke no rule."),
        }
    }
}

/// Resident when the mark was set back.
static RESIDENT_BYTES: AtomicU64 = AtomicU64::new(0);

/// The meter, where the kernel has one.
fn meter() -> Option<AllocationMeter> {
    let reset = || {
        let _ = fs::write("/proc/self/clear_refs", "5");
        RESIDENT_BYTES.store(status_bytes("VmRSS:").unwrap_or(0), Ordering::Relaxed);
    };
    let peak_bytes = || {
        status_bytes("VmHWM:").unwrap_or(0).saturating_sub(RESIDENT_BYTES.load(Ordering::Relaxed))
    };
    let works = fs::write("/proc/self/clear_refs", "5").is_ok() && status_bytes("VmHWM:").is_some();
    works.then_some(AllocationMeter { reset, peak_bytes, bytes_max: MEMORY_BYTES_MAX })
}

fn status_bytes(field: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}
