//! `cairn bench`: measures a directory or the engine, compares file systems, switches a mechanism
//! off and on.
//!
//! Ctrl-C or SIGTERM ends the run in order, so that nothing is left behind. A second one ends the
//! program at once, unless it has mounted something.
mod ab;
mod report;
mod transport;

use crate::peers::{self, DirectIo, NamedWorkloads, PeerWorkload, PeersSettings, System};
use crate::spec::TargetSpec;
use crate::workloads::{Settings, SyncMethod, Workload};
use anyhow::{Context, bail, ensure};
use cairn_fuse::MountOptions;
use cairn_harness::{Interrupt, SecondSignal, Size, console, duration};
use clap::{Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Measure a load on a directory or on the engine, compare file systems, or compare a mechanism off
/// and on.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(Run),
    Peers(Peers),
    Ab(ab::Arguments),
    Report(report::Arguments),
    Transport(transport::Arguments),
    #[command(hide = true)]
    ServeMemory(transport::Server),
}

/// Run one load against a directory or the engine.
///
/// Loads: fsync-write, small-durable-files, fs_mark, create-walk-unlink, device-limit, dbench,
/// fsync-happy, isolation, one-file-fsync, round-trip, snapshots, snapshots-beside-dbench,
/// snapshot-deletion, forks, many-snapshots. Each works in a directory of its own inside the
/// target, and removes it.
#[derive(Parser)]
struct Run {
    /// Name of the load.
    workload: Workload,
    /// DIR, engine:IMAGE[:size=4G], engine:memory[:size=4G],
    /// engine:simulated[:flush_ms=10,discard_ms=0.02,size=4G] or
    /// engine:disk[:flush_ms=10,read_ms=0.5,size=4G]. An image that is missing is made, and removed
    /// again.
    #[arg(long)]
    target: TargetSpec,
    #[command(flatten)]
    load: Load,
    /// Files for each client (fs_mark, create-walk-unlink, snapshots, snapshots-beside-dbench);
    /// files (forks); snapshots (snapshot-deletion, many-snapshots).
    #[arg(long, value_name = "N")]
    files: Option<u64>,
    /// Size of a file (fs_mark).
    #[arg(long, value_name = "SIZE", default_value = "4K")]
    file_size: Size,
    /// Directories for the files (fs_mark).
    #[arg(long, value_name = "N", default_value_t = 8)]
    directories: u64,
    /// When files are made durable (fs_mark's -S: 0 never, 1 each, 2 sync, 3 fsync reversed, 4
    /// both, 5 fsync, 6 both).
    #[arg(short = 'S', long, value_name = "0-6", default_value_t = 1)]
    sync_method: u8,
    /// Also report the longest latency without the time in which a thread was ready but had no CPU
    /// (dbench).
    #[arg(long)]
    run_queue: bool,
    /// Run the load four times: in a subvolume without snapshots, with N, with N, without. The
    /// result is that of the first run with snapshots; it has both medians and their ratio.
    #[arg(long, value_name = "N")]
    snapshots: Option<u64>,
}

#[derive(clap::Args)]
struct Load {
    /// Threads.
    #[arg(
        long,
        visible_alias = "threads",
        value_name = "N",
        default_value = "8",
        value_parser = positive
    )]
    clients: usize,
    /// Time of a measurement; a fraction is possible.
    #[arg(
        long,
        value_name = "S",
        default_value = "10",
        value_parser = duration::seconds,
        allow_negative_numbers = true
    )]
    seconds: Duration,
    /// Load file for dbench [default: the one of Debian's package].
    #[arg(long, value_name = "FILE")]
    loadfile: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Compare file systems on loop devices, in turns; needs root.
///
/// The images are written beforehand, the file systems made with their default options (without
/// discarding). CPU time and context switches are those of the whole machine, so nothing else
/// should run.
///
/// Everyday loads, in seconds, where less is better: untar, sync, grep, cp, find and rm (the
/// sources of a program), git (a clone), cargo-build, npm-like (tiny files), sqlite-load. As a
/// rate: sqlite (commits), seq-write, seq-read, rand-read, one-file-fdatasync, own-files-fdatasync.
/// A load whose program is not installed is left out, with a message.
#[derive(Parser)]
struct Peers {
    /// ext4, xfs, btrfs, cairn-loop, cairn-image, or cairn for the last two. Cairn's may be mounted
    /// over a transport, cairn-loop-dev or cairn-loop-uring, and with the kernel's writeback,
    /// cairn-loop-uring-writeback; cairn-uring is short for cairn-loop-uring.
    #[arg(long, default_value = "ext4,xfs,btrfs,cairn", value_name = "LIST")]
    fs: String,
    /// Loads of `cairn bench run`, the programs tool:dbench, tool:fs_mark, tool:fs_mark-nosync,
    /// tool:fio, tool:pgbench, everyday loads such as untar, or everyday for all of those; a number
    /// of clients may follow, as in dbench@64 [default: own loads, and the programs that are
    /// installed].
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    workload: Vec<NamedWorkloads>,
    /// Rounds; each figure is their median.
    #[arg(long, default_value = "5", value_name = "N", value_parser = positive)]
    repeat: usize,
    /// Size of each file system.
    #[arg(long, default_value = "3G", value_name = "SIZE")]
    size: Size,
    /// Folder for the images: the disk below it is what is measured.
    #[arg(long, default_value = "/var/tmp", value_name = "DIR")]
    dir: PathBuf,
    /// Whether loop devices bypass the host's page cache.
    #[arg(long, default_value = "true", value_name = "true|false|both")]
    direct_io: DirectIo,
    /// Two rounds of 2 seconds on smaller images, for a first look: less than five minutes for the
    /// default file systems and loads.
    #[arg(long, conflicts_with_all = ["repeat", "seconds", "size"])]
    quick: bool,
    /// Print a table in Markdown.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    #[command(flatten)]
    load: Load,
}

/// A number of something of which there must be one.
fn positive(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| "write a number of 1 or more".into())
}

/// Runs the command. `parse` understands lists of mount options.
///
/// # Errors
/// When something is missing or fails, or the user interrupts it.
pub fn run(
    arguments: &Arguments,
    parse: impl Fn(&[String]) -> anyhow::Result<MountOptions>,
) -> anyhow::Result<()> {
    let (at_once, after_cleaning) = (SecondSignal::EndsAtOnce, SecondSignal::ChangesNothing);
    let interrupt = Interrupt::by_signals;
    match &arguments.command {
        Command::Run(run) => run_load(run, interrupt(at_once)?),
        Command::Peers(peers) => run_peers(peers, interrupt(after_cleaning)?),
        Command::Ab(ab) => ab::run(ab, interrupt(at_once)?),
        Command::Report(report) => report::run(report),
        Command::Transport(transport) => transport::run(transport, interrupt(after_cleaning)?),
        // It ends with its mount, and by signals as any program.
        Command::ServeMemory(server) => transport::serve(server, parse(&server.options)?),
    }
}

impl Load {
    fn settings(&self, interrupt: Interrupt) -> Settings {
        Settings {
            clients: self.clients,
            duration: self.seconds,
            loadfile: self.loadfile.clone(),
            interrupt,
            ..Settings::default()
        }
    }
}

/// The command as it stands in results: where the program lies is left out.
fn recorded_command() -> Vec<String> {
    without_folder(std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()))
}

fn without_folder(mut arguments: impl Iterator<Item = String>) -> Vec<String> {
    let program = arguments.next().unwrap_or_default();
    let name = Path::new(&program).file_name().map(|name| name.to_string_lossy().into_owned());
    [name.unwrap_or(program)].into_iter().chain(arguments).collect()
}

fn run_load(run: &Run, interrupt: Interrupt) -> anyhow::Result<()> {
    let Some(sync_method) = SyncMethod::from_number(run.sync_method) else {
        bail!("there is no sync method {}; write 0 to 6", run.sync_method);
    };
    let settings = Settings {
        files: run.files,
        file_bytes: usize::try_from(run.file_size.bytes).unwrap_or(usize::MAX),
        directories: run.directories,
        sync_method,
        run_queue: run.run_queue,
        snapshots: run.snapshots,
        ..run.load.settings(interrupt)
    };
    let report = run.workload.run_observed(&run.target, &settings, recorded_command())?;
    console::print(&report, run.load.json)
}

fn run_peers(arguments: &Peers, interrupt: Interrupt) -> anyhow::Result<()> {
    let (mut repeat, mut duration, mut size_bytes) =
        (arguments.repeat, arguments.load.seconds, arguments.size.bytes);
    if arguments.quick {
        ensure!(
            arguments.direct_io != DirectIo::Both,
            "--quick measures with one kind of loop device, but --direct-io both needs two; write for example --repeat 2 --seconds 2 \
             instead of --quick"
        );
        (repeat, duration, size_bytes) = (2, Duration::from_secs(2), 2 << 30);
    }
    let named = arguments.workload.iter().flat_map(|named| named.0.clone());
    let workloads = if arguments.workload.is_empty() {
        PeerWorkload::defaults(arguments.quick)
    } else {
        named.collect()
    };
    let settings = PeersSettings {
        systems: System::parse_list(&arguments.fs).map_err(anyhow::Error::msg)?,
        workloads,
        repeat,
        clients: arguments.load.clients,
        duration,
        size_bytes: size_bytes - size_bytes % cairn_format::BLOCK_SIZE as u64,
        direct_io: arguments.direct_io,
        folder: arguments.dir.clone(),
        program: std::env::current_exe().context("cannot find the program's own file")?,
        loadfile: arguments.load.loadfile.clone(),
        command: recorded_command(),
        interrupt,
    };
    let summary = peers::run(&settings)?;
    if arguments.markdown {
        console::print_text(&summary.markdown())
    } else {
        console::print(&summary, arguments.load.json)
    }
}
