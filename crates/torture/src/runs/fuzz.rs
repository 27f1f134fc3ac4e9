//! `cairn torture fuzz`: hostile volumes, in memory, with the report in words. [`crate::hostile`]
//! makes and tries them.
//!
//! Memory is watched by the kernel's mark of the most that this process had resident, set back
//! before each input. (The tests of this crate count allocations instead, also of memory that is
//! never touched.)
use super::make_folder;
use crate::hostile::{
    AllocationMeter, FuzzOptions, FuzzReport, INPUT_BYTES_MAX, corpus, from_hex, fuzz, to_hex,
};
use crate::run_report::{RunReport, interrupted_after, line};
use anyhow::{Context, ensure};
use cairn_harness::Interrupt;
use cairn_harness::proc::Status;
use cairn_harness::progress::ProgressBar;
use serde::Serialize;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What one volume of 24 MiB may make this process take, all uses of it together.
const MEMORY_BYTES_MAX: u64 = 256 << 20;
/// Of the given inputs.
const GIVEN_TIME_MAX: Duration = Duration::from_secs(24 * 3600);

/// Which inputs are tried.
pub struct FuzzRun {
    /// Time for new inputs.
    pub time: Duration,
    /// Chooses the inputs.
    pub seed: u64,
    /// Only this input.
    pub input: Option<Input>,
    /// Folder for inputs that showed something new, each in a file; those that are there are tried
    /// first. It is made if there is none.
    pub save: Option<PathBuf>,
}

/// One input, written in hexadecimal digits.
#[derive(Clone, Debug)]
pub struct Input(Vec<u8>);

impl FromStr for Input {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match from_hex(text) {
            Some(bytes) if bytes.len() > INPUT_BYTES_MAX => Err(too_long(&bytes)),
            Some(bytes) if !bytes.is_empty() => Ok(Self(bytes)),
            _ => Err("an input consists of pairs of hexadecimal digits".into()),
        }
    }
}

fn too_long(input: &[u8]) -> String {
    format!("an input has at most {INPUT_BYTES_MAX} bytes, but these are {}", input.len())
}

/// What the inputs showed.
#[derive(Serialize)]
pub struct FuzzFindings {
    /// Volumes tried.
    volumes: u64,
    /// Inputs kept, since they showed something new.
    kept: u64,
    /// Different things seen.
    features: u64,
    /// Most memory that one input took, if the kernel reports it.
    memory_bytes_max: u64,
    seconds: f64,
    findings: Vec<Found>,
}

#[derive(Serialize)]
struct Found {
    input: String,
    problem: String,
}

/// Runs them. The report has a seed unless a single input was given, which is what it is.
///
/// # Errors
/// When a saved input can't be read, or an input can't be saved.
pub fn run(
    wanted: &FuzzRun,
    interrupt: &Interrupt,
) -> anyhow::Result<RunReport<FuzzFindings, Option<u64>>> {
    let given = match &wanted.input {
        Some(Input(input)) => vec![input.clone()],
        None => [corpus(), wanted.saved()?].concat(),
    };
    let options = FuzzOptions {
        seed: wanted.seed,
        corpus: given,
        only_corpus: wanted.input.is_some(),
        allocations: meter(),
        stop: interrupt.flag(),
        ..FuzzOptions::default()
    };
    let report = wanted.fuzz(options);
    wanted.save(&report)?;
    let findings: Vec<Found> = report
        .findings
        .iter()
        .map(|finding| Found { input: to_hex(&finding.input), problem: finding.problem.clone() })
        .collect();
    let tried = FuzzFindings {
        volumes: report.runs,
        kept: report.corpus.len() as u64,
        features: report.features as u64,
        memory_bytes_max: report.allocated_bytes_max.unwrap_or(0),
        seconds: report.elapsed.as_secs_f64(),
        findings,
    };
    let (passed, interrupted) = (tried.findings.is_empty(), interrupt.is_set());
    let seed = wanted.input.is_none().then_some(wanted.seed);
    Ok(RunReport { command: "fuzz".into(), seed, passed, interrupted, report: tried })
}

impl FuzzRun {
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
        bar.restart("seconds", self.time.as_secs().max(1));
        let options = FuzzOptions { corpus: known.corpus, time: self.time, ..options };
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

impl fmt::Display for RunReport<FuzzFindings, Option<u64>> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FuzzFindings { volumes, kept, features, memory_bytes_max, seconds, findings } =
            &self.report;
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
        RESIDENT_BYTES.store(own_bytes("VmRSS").unwrap_or(0), Ordering::Relaxed);
    };
    let peak_bytes =
        || own_bytes("VmHWM").unwrap_or(0).saturating_sub(RESIDENT_BYTES.load(Ordering::Relaxed));
    let works = fs::write("/proc/self/clear_refs", "5").is_ok() && own_bytes("VmHWM").is_some();
    works.then_some(AllocationMeter { reset, peak_bytes, bytes_max: MEMORY_BYTES_MAX })
}

fn own_bytes(name: &str) -> Option<u64> {
    Status::of("self").ok()?.bytes(name)
}
