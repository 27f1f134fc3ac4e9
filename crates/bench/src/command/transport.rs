//! `cairn bench transport`: what the FUSE transport alone can do, and how much of it a volume
//! reaches; and the server of the file system in memory that this is measured with.
use super::{positive, recorded_command};
use crate::memory_file_system::serve_memory;
use crate::peers::{DirectIo, NamedWorkloads, PeersSettings, Transport};
use crate::transport;
use anyhow::Context;
use cairn_fuse::MountOptions;
use cairn_harness::{Interrupt, Size, console, duration};
use std::path::PathBuf;
use std::time::Duration;

/// Measure the limit of the FUSE transport, by a file system in memory beside a volume; needs root.
///
/// Both are served over the same transport and have the same loads, in turns: the round trip alone
/// (a request that no cache answers and that needs no work) and with eight callers, untar, dbench,
/// fs_mark, and blocks of 64 KiB with an fsync each, which the one in memory answers at once. The
/// share of the limit is what the volume reaches of it.
#[derive(clap::Args)]
pub struct Arguments {
    /// dev, uring or both [default: both, uring where it is switched on].
    #[arg(long, value_delimiter = ',', value_name = "LIST", value_parser = transport_of)]
    transport: Vec<Transport>,
    /// With the kernel's writeback cache.
    #[arg(long)]
    writeback: bool,
    /// Loads, as for `cairn bench peers` (default: round-trip@1, round-trip@8, untar, dbench@8,
    /// fs_mark@8, fsync-write@1, fsync-write@8).
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    workload: Vec<NamedWorkloads>,
    /// Clients of each load whose name has no number.
    #[arg(long, value_name = "N", default_value = "8", value_parser = positive)]
    clients: usize,
    /// Time of a measurement; a fraction is possible.
    #[arg(
        long,
        value_name = "S",
        default_value = "3",
        value_parser = duration::seconds,
        allow_negative_numbers = true
    )]
    seconds: Duration,
    /// Rounds; each figure is their median.
    #[arg(long, default_value = "3", value_name = "N", value_parser = positive)]
    repeat: usize,
    /// Size of the volume.
    #[arg(long, default_value = "2G", value_name = "SIZE")]
    size: Size,
    /// Folder for the volume's image; /dev/shm leaves the disk out.
    #[arg(long, default_value = "/var/tmp", value_name = "DIR")]
    dir: PathBuf,
    /// Load file for dbench [default: the one of Debian's package].
    #[arg(long, value_name = "FILE")]
    loadfile: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Serve a file system in memory, until it is unmounted.
#[derive(clap::Args)]
pub struct Server {
    /// File that the mount shows as its source; it is neither read nor written.
    source: PathBuf,
    /// Directory that will show it.
    dir: PathBuf,
    /// Mount options; only transport, writeback, threads and plain have an effect.
    #[arg(short = 'o', value_name = "OPTION,…")]
    pub options: Vec<String>,
}

fn transport_of(text: &str) -> Result<Transport, String> {
    match text {
        "dev" => Ok(Transport::Device),
        "uring" => Ok(Transport::Ring),
        other => Err(format!("\"{other}\" is not a transport; write dev or uring")),
    }
}

/// Runs the command.
///
/// # Errors
/// When something is missing or fails, or the user interrupts it.
pub fn run(arguments: &Arguments, interrupt: Interrupt) -> anyhow::Result<()> {
    let loadfile = arguments.loadfile.clone();
    let named: Vec<_> = arguments.workload.iter().flat_map(|named| named.0.clone()).collect();
    let workloads =
        if named.is_empty() { transport::default_loads(loadfile.as_deref()) } else { named };
    let transports = if arguments.transport.is_empty() {
        transport::available()
    } else {
        arguments.transport.clone()
    };
    let size_bytes = arguments.size.bytes;
    let settings = PeersSettings {
        systems: transport::systems(&transports, arguments.writeback),
        workloads,
        repeat: arguments.repeat,
        clients: arguments.clients,
        duration: arguments.seconds,
        size_bytes: size_bytes - size_bytes % cairn_format::BLOCK_SIZE as u64,
        // There are no loop devices.
        direct_io: DirectIo::Yes,
        folder: arguments.dir.clone(),
        program: std::env::current_exe().context("cannot find the program's own file")?,
        loadfile,
        command: recorded_command(),
        interrupt,
    };
    console::print(&transport::run(&settings)?, arguments.json)
}

/// Serves a file system in memory.
///
/// # Errors
/// When it can't be mounted, or the connection is cut.
pub fn serve(server: &Server, options: MountOptions) -> anyhow::Result<()> {
    // Others and reading alone are for volumes.
    let options = MountOptions { allow_other: false, read_only: false, ..options };
    serve_memory(&server.source, &server.dir, &options)
}
