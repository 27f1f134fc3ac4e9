//! `cairn torture`: tries to break Cairn. The arguments of the runs in memory, which need no image,
//! no mount and no right; those of the others are in `mounted`. What the runs do lives in
//! `runs` and `mounted` of this crate.
//!
//! Ctrl-C ends a run in order, with the report of what was done. Exit code: 0 nothing found, 1 a
//! finding, 2 wrong usage, or this machine lacks what the run needs, 130 a second Ctrl-C.
mod mounted;

use crate::ace::AceFile;
use crate::campaign::{CampaignOptions, Source};
use crate::crash::CrashOptions;
use crate::medium::Medium;
use crate::run_report::RunReport;
use crate::runs::{self, fuzz};
use crate::search::SearchOptions;
use crate::systematic::Sequences;
use cairn_environment::random;
use cairn_harness::{Interrupt, console, duration};
use clap::builder::RangedU64ValueParser;
use clap::{Parser, Subcommand};
use mounted::{Differ, Guest, Kill9, MOUNT_OPTIONS, Shutdown, Soak, Sync, Vm};
use serde::Serialize;
use std::fmt::Display;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Try to make a volume lose data: power failures, device faults, hostile volumes, kills. Nothing
/// acknowledged may be lost.
///
/// crash, systematic, ace, faults and fuzz run in memory and need no privileges. kill9, shutdown,
/// sync, soak and differ mount volumes and need /dev/fuse, as recorded does; vm needs QEMU. Every
/// finding is printed with the command that repeats it. Exit code: 0 nothing was found, 1 something
/// was found, 2 wrong usage or the run was impossible, 130 a second Ctrl-C ended the run at once.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Crash(Crash),
    Recorded(Recorded),
    Systematic(Systematic),
    Ace(Ace),
    Faults(Faults),
    Fuzz(Fuzz),
    Kill9(Kill9),
    Shutdown(Shutdown),
    Sync(Sync),
    Soak(Soak),
    Differ(Differ),
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
    #[command(flatten)]
    amount: Amount,
}

/// Runs as of `crash`, but each volume is an image file below a mount of this program, which
/// records what reaches the file.
///
/// So the code for real files meets power failures as well: direct I/O, io_uring, fdatasync, the
/// filling of holes, discards. Requests take random times and overtake each other, and some writes
/// are short. Needs /dev/fuse; without root also fusermount3.
#[derive(Parser)]
struct Recorded {
    #[command(flatten)]
    amount: Amount,
}

#[derive(clap::Args)]
struct Amount {
    /// Crash states to check [default: 20000, or as many as --seconds allows].
    #[arg(long, value_name = "N", value_parser = from_one())]
    states: Option<u64>,
    /// Only the run with this number.
    #[arg(long, value_name = "N")]
    run: Option<u64>,
    #[command(flatten)]
    common: Common,
}

/// All sequences of a few operations on a small tree, with a power failure between every two device
/// operations.
///
/// Each power failure is tried with all sets of unflushed writes that may have survived (for more
/// than 10 writes: prefixes, single losses, pairs, random sets), and with writes torn at sectors of
/// 512 bytes.
#[derive(Parser)]
struct Systematic {
    /// Operations in each sequence.
    #[arg(long, value_name = "1-3", value_parser = clap::value_parser!(u32).range(1..=3))]
    length: u32,
    /// Only sequences that begin with this operation, or with one that has this in its name; a
    /// wrong name lists all.
    #[arg(long, value_name = "OPERATION")]
    first: Option<String>,
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

/// Every read, write and flush of many short runs fails in turn, once or from then on, with EIO or
/// ENOSPC.
///
/// Each operation of `systematic` is such a run, and all of them one after the other. Each error
/// must be reported to every caller that it concerns, and what was acknowledged must be there after
/// a power failure at the end. Two tables show the outcome: by kind of request and structure, and
/// by operation.
#[derive(Parser)]
struct Faults {
    /// Run only this many workloads, chosen by the seed.
    #[arg(long, value_name = "N", value_parser = from_one())]
    sample: Option<u64>,
    /// Seed that chooses which unflushed writes survive the power failure [default: a random one,
    /// which is printed].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Volumes with valid checksums and hostile content: they must cause no crash, no hang and no wrong
/// bytes.
///
/// Each is checked, opened, read, changed and repaired. First come the inputs that are kept with
/// the source, then new ones, made from those that showed something new.
#[derive(Parser)]
struct Fuzz {
    /// Time for new inputs; a fraction is possible.
    #[arg(
        long,
        value_name = "S",
        default_value = "60",
        value_parser = duration::seconds,
        allow_negative_numbers = true
    )]
    seconds: Duration,
    /// Seed that chooses the inputs [default: a random one, which is printed].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Only this input, in hexadecimal digits, as a finding prints it.
    #[arg(long, value_name = "HEX", conflicts_with_all = ["seconds", "save", "seed"])]
    input: Option<fuzz::Input>,
    /// Folder for inputs that showed something new, each in a file; those that are there are tried
    /// first. It is made if there is none.
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

const RECOVER_ONE_OF: u64 = 16;

#[derive(clap::Args)]
struct Selection {
    /// Run only this many workloads, chosen by the seed.
    #[arg(long, value_name = "N", value_parser = from_one())]
    sample: Option<u64>,
    /// Begin with the workload at this place, counted from 0.
    #[arg(long, value_name = "K", default_value_t = 0, conflicts_with_all = ["sample", "only"])]
    from: u64,
    /// Only the workload at this place.
    #[arg(long, value_name = "K", conflicts_with = "sample")]
    only: Option<u64>,
    /// Also recover one in this many images for writing, and cut the power once more during that; 0
    /// for none.
    #[arg(long, value_name = "N", default_value_t = RECOVER_ONE_OF)]
    recover_one_of: u64,
    /// Try only two states at each point: all unflushed writes survive, or none. Ten times as fast.
    #[arg(long)]
    boundaries: bool,
}

/// Each of them starts others: more than a system may grant.
const THREADS_MAX: i64 = 256;

#[derive(clap::Args)]
struct Common {
    /// Seed of all random choices [default: a random one, which is printed].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Begin nothing new after this time.
    #[arg(long, value_name = "S", value_parser = duration::seconds, allow_negative_numbers = true)]
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

/// A number of something of which there must be one.
fn from_one() -> RangedU64ValueParser {
    clap::value_parser!(u64).range(1..)
}

/// Neither a finding nor none: it could not be run.
pub const EXIT_UNABLE: u8 = 2;

/// The run that `command` stands for, with `check` for its mount options: only the product knows
/// what they may be.
pub fn check_mount_options(
    command: clap::Command,
    check: fn(&str) -> Result<String, String>,
) -> clap::Command {
    command.mut_args(|argument| match argument.get_id().as_str() {
        MOUNT_OPTIONS => argument.value_parser(check),
        _ => argument,
    })
}

/// Runs the command.
///
/// # Errors
/// When a file can't be read, or the test itself fails.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.command {
        Command::Crash(crash) => crash.amount.run(Medium::Simulated),
        Command::Recorded(recorded) => recorded.amount.run(Medium::File),
        Command::Systematic(systematic) => systematic.run(),
        Command::Ace(ace) => ace.run(),
        Command::Faults(faults) => faults.run(),
        Command::Fuzz(fuzz) => fuzz.run(),
        Command::Kill9(kill9) => kill9.run(),
        Command::Shutdown(shutdown) => shutdown.run(),
        Command::Sync(sync) => sync.run(),
        Command::Soak(soak) => soak.run(),
        Command::Differ(differ) => differ.run(),
        Command::Vm(vm) => vm.run(),
        Command::Guest(guest) => Ok(guest.run()),
    }
}

/// Prints the report; the exit code says whether something was found.
fn print<T, S>(report: &RunReport<T, S>, json: bool) -> anyhow::Result<ExitCode>
where
    RunReport<T, S>: Serialize + Display,
{
    console::print(report, json)?;
    Ok(if report.passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Amount {
    fn run(&self, medium: Medium) -> anyhow::Result<ExitCode> {
        medium.check().map_err(anyhow::Error::msg)?;
        let interrupt = Interrupt::by_signals_with_notice()?;
        let default_states = if self.common.seconds.is_some() { u64::MAX } else { 20_000 };
        let options = CrashOptions {
            seed: self.common.seed(),
            medium,
            states: self.states.unwrap_or(default_states),
            only_run: self.run,
            threads: self.common.threads(),
            duration: self.common.seconds,
            keep_in: self.common.folder_to_keep_in()?,
        };
        print(&runs::crash::run(&options, &interrupt)?, self.common.json)
    }
}

impl Systematic {
    fn run(&self) -> anyhow::Result<ExitCode> {
        let interrupt = Interrupt::by_signals_with_notice()?;
        let mut command = format!("systematic --length {}", self.length);
        let mut sequences = Sequences::all(self.length);
        if let Some(name) = &self.first {
            sequences = sequences.beginning_with(name).map_err(anyhow::Error::msg)?;
            // No name of an operation has a quotation mark.
            command.push_str(&format!(" --first '{name}'"));
        }
        run_campaign(
            Source::Systematic(sequences),
            &command,
            &self.selection,
            &self.common,
            &interrupt,
        )
    }
}

impl Ace {
    fn run(&self) -> anyhow::Result<ExitCode> {
        let interrupt = Interrupt::by_signals_with_notice()?;
        let source = Source::Ace(AceFile::read(&self.file).map_err(anyhow::Error::msg)?);
        let command = format!("ace {}", self.file.display());
        run_campaign(source, &command, &self.selection, &self.common, &interrupt)
    }
}

fn run_campaign(
    source: Source,
    command: &str,
    selection: &Selection,
    common: &Common,
    interrupt: &Interrupt,
) -> anyhow::Result<ExitCode> {
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
        ..CampaignOptions::new(common.seed())
    };
    let command = format!("{command}{}", selection.how());
    print(&runs::campaign::run(source, command, &options, interrupt)?, common.json)
}

impl Faults {
    fn run(&self) -> anyhow::Result<ExitCode> {
        let interrupt = Interrupt::by_signals_with_notice()?;
        let seed = self.seed.unwrap_or_else(random::u64);
        print(&runs::faults::run(seed, self.sample, &interrupt)?, self.json)
    }
}

impl Fuzz {
    fn run(&self) -> anyhow::Result<ExitCode> {
        let interrupt = Interrupt::by_signals_with_notice()?;
        let wanted = fuzz::FuzzRun {
            time: self.seconds,
            seed: self.seed.unwrap_or_else(random::u64),
            input: self.input.clone(),
            save: self.save.clone(),
        };
        print(&fuzz::run(&wanted, &interrupt)?, self.json)
    }
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

impl Common {
    fn seed(&self) -> u64 {
        self.seed.unwrap_or_else(random::u64)
    }

    fn threads(&self) -> usize {
        self.threads.map_or_else(
            || std::thread::available_parallelism().map_or(1, usize::from),
            usize::from,
        )
    }

    /// The folder for images, made now: a wrong one shows at once, not with the first finding.
    fn folder_to_keep_in(&self) -> anyhow::Result<Option<PathBuf>> {
        self.keep.as_deref().map(runs::make_folder).transpose()?;
        Ok(self.keep.clone())
    }
}
