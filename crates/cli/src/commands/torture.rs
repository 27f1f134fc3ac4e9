//! `cairn torture`: tries to break Cairn. Most parts do so in memory and need no image, no mount
//! and no right; the others stop real mounts of this program.
//!
//! The parts in memory live in `cairn-torture`; here are arguments, progress, and reports in words.
//! The others, and faults and fuzzing, are below `torture/`. Ctrl-C ends a run in order, with the
//! report of what was done. Exit code: 0 nothing found, 1 a finding, 2 wrong usage, or this machine
//! lacks what the run needs, 130 a second Ctrl-C.
use super::bench::duration;
use crate::progress::ProgressBar;
use crate::torture::faults::Faults;
use crate::torture::fuzz::Fuzz;
use crate::torture::guest::Guest;
use crate::torture::load::{Kill9, Shutdown};
use crate::torture::signals::Interrupt;
use crate::torture::soak::Soak;
use crate::torture::synced::Sync;
use crate::torture::told::{Told, grouped, interrupted_after, line};
use crate::torture::vm::Vm;
use anyhow::{Context, ensure};
use cairn_torture::ace::AceFile;
use cairn_torture::campaign::{self, CampaignFinding, CampaignOptions, CampaignReport, Source};
use cairn_torture::crash::{self, CrashFinding, CrashOptions, CrashReport, STATES_PER_RUN};
use cairn_torture::search::SearchOptions;
use clap::{Parser, Subcommand};
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Try to break it: power failures, faults of the device, hostile volumes, kills; nothing
/// acknowledged may be lost.
///
/// crash, systematic, ace, faults and fuzz happen in memory and need no right. kill9, shutdown,
/// sync and soak mount volumes and need /dev/fuse; vm needs QEMU. Every finding is printed with the
/// command that repeats it. Exit code: 0 nothing was found, 1 something was, 2 wrong usage or
/// something is missing, 130 a second Ctrl-C ended it at once.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Crash(Crash),
    Systematic(Systematic),
    Ace(Ace),
    Faults(Faults),
    Fuzz(Fuzz),
    Kill9(Kill9),
    Shutdown(Shutdown),
    Sync(Sync),
    Soak(Soak),
    Vm(Vm),
    #[command(hide = true)]
    Guest(Guest),
}

/// Random runs of several clients, with power failures at random points.
///
/// The runs differ in clients, log size, commits, flush times; failures come during recovery and
/// after it, too.
#[derive(Parser)]
struct Crash {
    /// Crash states to check [default: 20000, or as many as --seconds allows].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    states: Option<u64>,
    /// Only the run with this number.
    #[arg(long, value_name = "N")]
    run: Option<u64>,
    #[command(flatten)]
    common: Common,
}

/// All sequences of so many operations on a small tree, with power failures between every two
/// device operations.
///
/// At each of them, all sets of unflushed writes that may have survived are tried (when they are
/// more than 10: prefixes, single losses, pairs, random sets), and writes torn at sectors of 512
/// bytes.
#[derive(Parser)]
struct Systematic {
    /// Operations in each sequence.
    #[arg(long, value_name = "1-3", value_parser = clap::value_parser!(u32).range(1..=3))]
    length: u32,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    common: Common,
}

/// Workloads of a file made by ACE, the generator of CrashMonkey, searched as those of
/// `systematic`.
#[derive(Parser)]
struct Ace {
    /// The file, plain or .xz; the source tree has two of them in crates/torture/data.
    file: PathBuf,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    common: Common,
}

const RECOVER_ONE_OF: u64 = 16;

#[derive(clap::Args)]
struct Selection {
    /// Only so many of the workloads, chosen by the seed.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    sample: Option<u64>,
    /// Begin with the workload at this place, counted from 0.
    #[arg(long, value_name = "K", default_value_t = 0, conflicts_with_all = ["sample", "only"])]
    from: u64,
    /// Only the workload at this place.
    #[arg(long, value_name = "K", conflicts_with = "sample")]
    only: Option<u64>,
    /// Recover one of so many images for writing as well, and cut the power once more in that; 0
    /// for none.
    #[arg(long, value_name = "N", default_value_t = RECOVER_ONE_OF)]
    recover_one_of: u64,
    /// Only two states at each point: of what is unflushed, all or nothing survives. Ten times as
    /// fast.
    #[arg(long)]
    boundaries: bool,
}

impl Selection {
    /// The options that a repetition needs as well.
    fn how(&self) -> String {
        let boundaries = if self.boundaries { " --boundaries" } else { "" };
        let recover = if self.recover_one_of == RECOVER_ONE_OF {
            String::new()
        } else {
            format!(" --recover-one-of {}", self.recover_one_of)
        };
        format!("{boundaries}{recover}")
    }
}

/// Each of them starts others: more than a system may grant.
const THREADS_MAX: i64 = 256;

#[derive(clap::Args)]
struct Common {
    /// Chooses everything that is chosen at random [default: a random one, which is printed].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Begin nothing new after this time.
    #[arg(long, value_name = "S", value_parser = duration, allow_negative_numbers = true)]
    seconds: Option<Duration>,
    /// Threads, at most 256 [default: as many as there are CPUs].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=THREADS_MAX))]
    threads: Option<u16>,
    /// Folder in which to keep the image of a state that fails; it is made if there is none.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Neither a finding nor none: it could not be run.
pub const EXIT_UNABLE: u8 = 2;

/// Runs the command.
///
/// # Errors
/// When a file can't be read, or the test itself fails.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    // With something mounted, a second signal must clean up first.
    let in_memory = matches!(
        arguments.command,
        Command::Crash(_)
            | Command::Systematic(_)
            | Command::Ace(_)
            | Command::Faults(_)
            | Command::Fuzz(_)
    );
    let interrupt = if in_memory { Interrupt::listen()? } else { Interrupt::default() };
    match &arguments.command {
        Command::Crash(crash) => run_crash(crash, &interrupt),
        Command::Systematic(systematic) => {
            let command = format!("systematic --length {}", systematic.length);
            run_campaign(
                Source::Systematic(systematic.length),
                &command,
                &systematic.selection,
                &systematic.common,
                &interrupt,
            )
        }
        Command::Ace(ace) => {
            let source = Source::Ace(AceFile::read(&ace.file).map_err(anyhow::Error::msg)?);
            run_campaign(
                source,
                &format!("ace {}", ace.file.display()),
                &ace.selection,
                &ace.common,
                &interrupt,
            )
        }
        Command::Faults(faults) => faults.run(&interrupt),
        Command::Fuzz(fuzz) => fuzz.run(&interrupt),
        Command::Kill9(kill9) => kill9.run(),
        Command::Shutdown(shutdown) => shutdown.run(),
        Command::Sync(sync) => sync.run(),
        Command::Soak(soak) => soak.run(),
        Command::Vm(vm) => vm.run(),
        Command::Guest(guest) => Ok(guest.run()),
    }
}

/// Makes a folder for what is found, unless there is one.
///
/// # Errors
/// When that cannot be.
pub fn make_folder(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))
}

impl Common {
    fn seed(&self) -> u64 {
        self.seed.unwrap_or_else(cairn_environment::random::u64)
    }

    fn threads(&self) -> usize {
        self.threads.map_or_else(
            || std::thread::available_parallelism().map_or(1, usize::from),
            usize::from,
        )
    }

    /// The folder for images, made now: a wrong one shows at once, not with the first finding.
    fn folder_to_keep_in(&self) -> anyhow::Result<Option<PathBuf>> {
        self.keep.as_deref().map(make_folder).transpose()?;
        Ok(self.keep.clone())
    }
}

fn run_campaign(
    source: Source,
    command: &str,
    selection: &Selection,
    common: &Common,
    interrupt: &Interrupt,
) -> anyhow::Result<ExitCode> {
    let seed = common.seed();
    let options = CampaignOptions {
        sample: selection.sample,
        from: selection.from,
        only: selection.only,
        threads: common.threads(),
        duration: common.seconds,
        search: SearchOptions {
            recover_one_of: selection.recover_one_of,
            boundaries_only: selection.boundaries,
            keep_in: common.folder_to_keep_in()?,
        },
        ..CampaignOptions::new(seed)
    };
    let bar = ProgressBar::items("workloads", 0).in_lines();
    bar.tell(&format!("seed {seed}"));
    let mut total_before = 0;
    let mut show = |done, total, _states| {
        if total_before != total {
            bar.restart("workloads", total);
            total_before = total;
        }
        bar.set(done);
    };
    let report =
        campaign::run(source, &options, &interrupt.stop, &mut show).map_err(anyhow::Error::msg)?;
    drop(bar);
    let interrupted = interrupt.is_received();
    ensure!(
        interrupted || report.workloads > 0,
        "nothing was tested: --seconds leaves no time for it"
    );
    told_campaign(format!("{command}{}", selection.how()), seed, interrupted, report)
        .tell(common.json)
}

#[derive(Serialize)]
struct CampaignTold {
    #[serde(flatten)]
    report: CampaignReport,
    /// The command that repeats each finding.
    repeat: Vec<String>,
}

fn told_campaign(
    command: String,
    seed: u64,
    interrupted: bool,
    report: CampaignReport,
) -> Told<CampaignTold> {
    let repeated = |finding: &CampaignFinding| {
        format!("cairn torture {command} --only {} --seed {seed}", finding.workload)
    };
    let repeat = report.findings.iter().map(repeated).collect();
    Told {
        command,
        seed,
        passed: report.findings.is_empty(),
        interrupted,
        report: CampaignTold { report, repeat },
    }
}

impl fmt::Display for Told<CampaignTold> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CampaignTold { report, repeat } = &self.report;
        let CampaignReport { search, workloads, workloads_chosen, workloads_total, .. } = report;
        let (seconds, threads) = (report.seconds, report.threads);
        let speed = report.states_per_second_and_thread();
        let interrupted =
            interrupted_after(self.interrupted, *workloads, Some(*workloads_chosen), "workloads");
        writeln!(formatter, "cairn torture {}{interrupted}", self.command)?;
        line(formatter, "workloads", *workloads, &format!("of {}", grouped(*workloads_total)))?;
        line(formatter, "points of failure", search.points, "between every two device operations")?;
        line(
            formatter,
            "crash states",
            search.states,
            "each with another set of surviving writes",
        )?;
        line(
            formatter,
            "different images",
            search.images,
            "checked by fsck, replayed, every byte read; judged for each state",
        )?;
        line(formatter, "with a log to replay", search.replayed, "")?;
        line(
            formatter,
            "recovered for writing",
            search.recovered,
            "and closed, checked, judged again",
        )?;
        line(formatter, "failures in recovery", search.during_recovery, "")?;
        writeln!(
            formatter,
            "  {seconds:.1} s on {threads} threads: {speed:.0} crash states a second and thread"
        )?;
        for (finding, repeat) in report.findings.iter().zip(repeat) {
            writeln!(
                formatter,
                "\nFOUND in workload {}: {}\n  {}",
                finding.workload, finding.operations, finding.problem
            )?;
            writeln!(formatter, "  repeat: {repeat}")?;
        }
        match report.findings.len() {
            0 if *workloads == 0 => writeln!(formatter, "Nothing was tested. (seed {})", self.seed),
            0 => writeln!(
                formatter,
                "Every state is one that the operations permit; nothing acknowledged was lost. (seed {})",
                self.seed
            ),
            count => writeln!(
                formatter,
                "\n{count} findings; the run ends after {}.",
                campaign::FINDINGS_MAX
            ),
        }
    }
}

#[derive(Serialize)]
struct CrashTold {
    #[serde(flatten)]
    tested: CrashReport,
    seconds: f64,
    /// Of all threads.
    processor_seconds: f64,
    states_per_minute_and_core: f64,
    finding: Option<CrashFinding>,
    /// The command that repeats the finding.
    repeat: Option<String>,
}

impl CrashTold {
    fn new(
        options: &CrashOptions,
        tested: CrashReport,
        seconds: f64,
        processor_seconds: f64,
        finding: Option<CrashFinding>,
    ) -> CrashTold {
        let repeat = finding.as_ref().map(|finding| {
            let run = finding.run.map_or(String::new(), |run| format!(" --run {run}"));
            // With fewer, a run is crashed at other points.
            let states = if options.states < STATES_PER_RUN {
                format!(" --states {}", options.states)
            } else {
                String::new()
            };
            format!("cairn torture crash --seed {}{run}{states}", options.seed)
        });
        let states_per_minute_and_core = tested.states as f64 * 60.0 / processor_seconds.max(1e-9);
        CrashTold {
            tested,
            seconds,
            processor_seconds,
            states_per_minute_and_core,
            finding,
            repeat,
        }
    }
}

/// The processor's time that this process has had, all threads together, where the system tells.
fn processor_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the program may hold anything. After it user and system time are the fields 12
    // and 13, in hundredths.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some((ticks()? + ticks()?) as f64 / 100.0)
}

fn run_crash(arguments: &Crash, interrupt: &Interrupt) -> anyhow::Result<ExitCode> {
    let common = &arguments.common;
    let seed = common.seed();
    let default_states = if common.seconds.is_some() { u64::MAX } else { 20_000 };
    let options = CrashOptions {
        seed,
        states: arguments.states.unwrap_or(default_states),
        only_run: arguments.run,
        threads: common.threads(),
        duration: common.seconds,
        keep_in: common.folder_to_keep_in()?,
    };
    let (begin, processor_begin) = (cairn_environment::clock::now_monotonic(), processor_seconds());
    let bar = match common.seconds {
        Some(duration) => ProgressBar::items("seconds", duration.as_secs().max(1)),
        None => ProgressBar::items("crash states", options.states),
    }
    .in_lines();
    bar.tell(&format!("seed {seed}"));
    let mut show = |report: &CrashReport| {
        bar.set(if common.seconds.is_some() { begin.elapsed().as_secs() } else { report.states })
    };
    let (tested, outcome) = crash::run_until(&options, &interrupt.stop, &mut show);
    drop(bar);
    let seconds = begin.elapsed().as_secs_f64();
    let processor =
        processor_seconds().zip(processor_begin).map_or(seconds, |(end, begin)| end - begin);
    let report = CrashTold::new(&options, tested, seconds, processor, outcome.err());
    let (passed, interrupted) = (report.finding.is_none(), interrupt.is_received());
    ensure!(
        interrupted || !passed || report.tested.runs > 0,
        "nothing was tested: --seconds leaves no time for it"
    );
    Told { command: "crash".into(), seed, passed, interrupted, report }.tell(common.json)
}

/// What the seed does not decide.
const NOT_EXACTLY: &str = "several clients work at once: the seed fixes what each does, not how they interleave, so it may take \
                           several repetitions to meet this again";

impl fmt::Display for Told<CrashTold> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CrashTold {
            tested,
            seconds,
            processor_seconds,
            states_per_minute_and_core: speed,
            finding,
            repeat,
        } = &self.report;
        let interrupted = interrupted_after(self.interrupted, tested.states, None, "crash states");
        writeln!(formatter, "cairn torture {}{interrupted}", self.command)?;
        line(formatter, "runs", tested.runs, "each on a volume of its own, with 1 to 4 clients")?;
        line(formatter, "operations", tested.operations, "compared with the model")?;
        line(
            formatter,
            "crash states",
            tested.states,
            "checked by fsck, replayed, every byte read, judged",
        )?;
        line(formatter, "with a log to replay", tested.replayed, "")?;
        line(
            formatter,
            "recovered for writing",
            tested.recovered,
            "and closed, checked, judged again",
        )?;
        line(formatter, "failures in recovery", tested.during_recovery, "")?;
        line(formatter, "failures after use", tested.after_use, "of the recovered volume")?;
        line(formatter, "logs that wrapped", tested.wrapped, "")?;
        line(
            formatter,
            "fallbacks to commits",
            tested.fallbacks,
            "fsyncs for which the log had no room",
        )?;
        writeln!(
            formatter,
            "  {seconds:.1} s, {processor_seconds:.1} s of one core: {speed:.0} crash states a minute and core"
        )?;
        let Some(finding) = finding else {
            return match tested.runs {
                0 => writeln!(formatter, "Nothing was tested. (seed {})", self.seed),
                _ => writeln!(
                    formatter,
                    "Every state is one that the operations permit; nothing acknowledged was lost. (seed {})",
                    self.seed
                ),
            };
        };
        writeln!(
            formatter,
            "\nFOUND in {finding}\n  repeat: {}",
            repeat.as_deref().unwrap_or_default()
        )?;
        if finding.repeats_exactly { Ok(()) } else { writeln!(formatter, "  {NOT_EXACTLY}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_torture::campaign::CampaignFinding;

    #[test]
    fn a_finding_says_how_to_repeat_it() {
        let finding = CampaignFinding {
            workload: 7,
            operations: "unlink a; fsync d".into(),
            problem: "it is there".into(),
        };
        let report = CampaignReport {
            workloads: 8,
            workloads_total: 34,
            findings: vec![finding],
            threads: 1,
            ..CampaignReport::default()
        };
        let told = told_campaign("systematic --length 1".into(), 5, false, report).to_string();
        assert!(told.contains("FOUND in workload 7: unlink a; fsync d\n  it is there"), "{told}");
        assert!(
            told.contains("repeat: cairn torture systematic --length 1 --only 7 --seed 5"),
            "{told}"
        );
        assert!(!told.contains("Every state"), "{told}");
    }
    fn told_crash(states: u64, finding: Option<CrashFinding>) -> Told<CrashTold> {
        let options = CrashOptions {
            seed: 5,
            states,
            only_run: None,
            threads: 2,
            duration: None,
            keep_in: None,
        };
        let tested = CrashReport { runs: 1, states: 300, ..CrashReport::default() };
        Told {
            command: "crash".into(),
            seed: 5,
            passed: finding.is_none(),
            interrupted: false,
            report: CrashTold::new(&options, tested, 9.0, 6.0, finding),
        }
    }

    #[test]
    fn a_finding_of_a_random_run_says_which_run_and_whether_it_comes_again() {
        let finding = |run, repeats_exactly| {
            Some(CrashFinding {
                run,
                repeats_exactly,
                problem: "run 3 of seed 5: it is gone".into(),
            })
        };
        let exact = told_crash(20_000, finding(Some(3), true)).to_string();
        assert!(exact.contains("FOUND in run 3 of seed 5: it is gone\n  repeat: cairn torture crash --seed 5 --run 3\n"), "{exact}");
        assert!(!exact.contains(NOT_EXACTLY) && !exact.contains("Every state"), "{exact}");
        let few = told_crash(100, finding(Some(3), false)).to_string();
        assert!(
            few.contains("repeat: cairn torture crash --seed 5 --run 3 --states 100\n"),
            "{few}"
        );
        assert!(few.contains(NOT_EXACTLY), "{few}");
        let hangs = told_crash(20_000, finding(None, false)).to_string();
        assert!(hangs.contains("repeat: cairn torture crash --seed 5\n"), "{hangs}");
    }

    #[test]
    fn a_random_run_tells_its_speed() {
        let told = told_crash(20_000, None).to_string();
        assert!(
            told.contains("9.0 s, 6.0 s of one core: 3000 crash states a minute and core"),
            "{told}"
        );
        assert!(told.contains("Every state"), "{told}");
    }
}
