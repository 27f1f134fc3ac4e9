//! Hours of mixed load on one mount, with an eye on what its server takes.
//!
//! A cycle: the workers; loads of `cairn bench`; filling the volume until nothing fits any more, and removing it all; then the
//! workers check what they remember, and the server's memory, file descriptors and threads are counted while nothing runs. For
//! the first half of the time one server lives on; then each cycle ends with a kill, a shutdown or an unmount, and recovery.
//!
//! Growth: each figure at the end of a server's life against its figure after [`WARM_UP_CYCLES`], with the allowances below. What
//! a cache takes is reached by then; what grows for ever passes any allowance in time.
use crate::server::{Running, Server};
use crate::{Named, Problem, Stop, check_workers, in_round, join_workers, recover_and_check, start_workers, stop_by, workers};
use cairn_environment::clock;
use cairn_environment::random::{self, Seeded};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Until memory stays where it is, as measured.
const WARM_UP_CYCLES: usize = 10;
/// Memory may grow by a quarter and this.
const MEMORY_KIB_MORE_MAX: u64 = 48 << 10;
const DESCRIPTORS_MORE_MAX: u64 = 4;
const THREADS_MORE_MAX: u64 = 4;
const SETTLE: Duration = Duration::from_secs(2);
const FILL_FILE_BYTES: usize = 3 << 20;
const SECONDS_PER_HOUR: f64 = 3600.0;

#[derive(clap::Args)]
pub struct Arguments {
    /// The `cairn` command.
    #[arg(long)]
    cairn: PathBuf,
    /// Folder for image and mount point.
    #[arg(long)]
    work: PathBuf,
    #[arg(long, default_value_t = 2.0)]
    hours: f64,
    /// Time of each load, in seconds; a cycle has five.
    #[arg(long, default_value_t = 10)]
    load_seconds: u64,
    /// Repeats the choices of an earlier run; the moments differ all the same.
    #[arg(long)]
    seed: Option<u64>,
}

/// What a server takes.
#[derive(Clone, Copy, Debug)]
struct Taken {
    memory_kib: u64,
    descriptors: u64,
    threads: u64,
}

impl Taken {
    fn of(process_id: u32) -> Result<Self, Problem> {
        let process = PathBuf::from(format!("/proc/{process_id}"));
        let status = fs::read_to_string(process.join("status")).map_err(text)?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok()).ok_or(format!("no {name} in /proc"))
        };
        let descriptors = fs::read_dir(process.join("fd")).map_err(text)?.count() as u64;
        Ok(Self { memory_kib: field("VmRSS:")?, descriptors, threads: field("Threads:")? })
    }

    fn check_growth_since(&self, warm: &Self) -> Result<(), Problem> {
        let grown = self.memory_kib > warm.memory_kib * 5 / 4 + MEMORY_KIB_MORE_MAX
            || self.descriptors > warm.descriptors + DESCRIPTORS_MORE_MAX
            || self.threads > warm.threads + THREADS_MORE_MAX;
        if grown { Err(format!("the server has grown from {warm:?} to {self:?}")) } else { Ok(()) }
    }
}

struct Soak<'a> {
    arguments: &'a Arguments,
    server: Server,
    random: Seeded,
    /// Of the running server, one for each cycle.
    samples: Vec<Taken>,
}

pub fn run(arguments: &Arguments) -> Result<String, Problem> {
    let seed = arguments.seed.unwrap_or_else(random::u64);
    println!("seed {seed}");
    let server = Server::new(&arguments.cairn, &arguments.work);
    server.make_volume("1G", "8M")?;
    let mut soak = Soak { arguments, server, random: Seeded::new(seed), samples: Vec::new() };
    let mut workers = workers(seed);
    let begin = clock::now_monotonic();
    let length = Duration::from_secs_f64(arguments.hours.max(0.0) * SECONDS_PER_HOUR);
    let (mut cycle, mut stops, mut first_life) = (0, 0, String::new());
    let mut running = soak.server.start(&[])?;
    loop {
        cycle += 1;
        workers = soak.run_cycle(workers, &running, cycle).map_err(|problem| format!("seed {seed}: {}", in_round(cycle, problem)))?;
        let over = begin.elapsed() >= length;
        if !over && begin.elapsed() < length / 2 {
            continue;
        }
        if first_life.is_empty() {
            first_life = format!("{:?} after {cycle} cycles, {:?} at first", soak.samples.last(), soak.samples.first());
        }
        stops += 1;
        soak.samples.clear();
        workers = soak.stop_and_check(workers, running).map_err(|problem| format!("seed {seed}: {}", in_round(cycle, problem)))?;
        if over {
            break;
        }
        running = soak.server.start(&[])?;
    }
    let acknowledgements: u64 = workers.iter().map(|(_, worker)| worker.acknowledgements()).sum();
    let hours = begin.elapsed().as_secs_f64() / SECONDS_PER_HOUR;
    Ok(format!(
        "{hours:.2} hours, {cycle} cycles, {stops} stops, {acknowledgements} acknowledgements: no growth, nothing lost, fsck clean; {first_life}"
    ))
}

impl Soak<'_> {
    fn load_time(&self) -> Duration {
        Duration::from_secs(self.arguments.load_seconds.max(1))
    }

    fn run_cycle(&mut self, workers: Vec<Named>, running: &Running, cycle: u64) -> Result<Vec<Named>, Problem> {
        let begin = clock::now_monotonic();
        let (stop, threads) = start_workers(&self.server, workers);
        // Together with the workers, then without.
        let filled = if cycle.is_multiple_of(3) { self.fill() } else { Ok(0) };
        clock::sleep(self.load_time());
        stop.store(true, Ordering::SeqCst);
        let (mut workers, worked) = join_workers(threads)?;
        // On a full volume, workers may be refused, but for lack of space only.
        worked.or_else(|problem| if cycle.is_multiple_of(3) && problem.contains("No space") { Ok(()) } else { Err(problem) })?;
        filled?;
        self.take_refusal()?;
        for load in ["fsync-write", "small-durable-files", "create-walk-unlink"] {
            self.bench(load, &self.server.mountpoint().to_string_lossy())?;
        }
        self.bench("fsync-write", "engine:memory:size=256M")?;
        let files = self.fill()?;
        check_workers(&self.server, &mut workers)?;
        self.server.sync()?;
        clock::sleep(SETTLE);
        let taken = Taken::of(running.id())?;
        self.samples.push(taken);
        if let Some(warm) = self.samples.get(WARM_UP_CYCLES - 1) {
            taken.check_growth_since(warm)?;
        }
        println!("cycle {cycle}: {taken:?}; filled with {files} files; {:.1} s", begin.elapsed().as_secs_f64());
        Ok(workers)
    }

    fn bench(&self, load: &str, target: &str) -> Result<(), Problem> {
        let seconds = self.load_time().as_secs().to_string();
        let mut command = Command::new(&self.arguments.cairn);
        command.args(["bench", "run", load, "--target", target, "--seconds", &seconds]);
        let output = command.stdin(Stdio::null()).output().map_err(text)?;
        if output.status.success() {
            return Ok(());
        }
        let space = rustix::fs::statvfs(self.server.mountpoint()).map(|space| (space.f_bavail, space.f_blocks));
        Err(format!("{load}, available and all blocks {space:?}: {}", String::from_utf8_lossy(&output.stderr)))
    }

    /// Writes files until nothing fits, then removes them; the volume must have room again. Returns how many there were.
    fn fill(&self) -> Result<u64, Problem> {
        let folder = self.server.mountpoint().join("fill");
        let content = vec![0x5a; FILL_FILE_BYTES];
        fs::create_dir_all(&folder).map_err(text)?;
        let mut files = 0;
        let full = loop {
            if let Err(error) = write_durably(&folder.join(files.to_string()), &content) {
                break error;
            }
            files += 1;
        };
        if full.kind() != io::ErrorKind::StorageFull {
            return Err(format!("filling the volume: {full}"));
        }
        self.take_refusal()?;
        fs::remove_dir_all(&folder).map_err(|error| format!("emptying a full volume: {error}"))?;
        write_durably(&self.server.mountpoint().join("room"), &content).map_err(|error| format!("after emptying the volume: {error}"))?;
        Ok(files)
    }

    /// The kernel keeps a refusal of data for lack of space for whoever syncs next, whose data it need not have been.
    fn take_refusal(&self) -> Result<(), Problem> {
        self.server.sync().or_else(|problem| if problem.contains("No space") { Ok(()) } else { Err(problem) })
    }

    /// Ends a server's life under load, in one of the ways.
    fn stop_and_check(&mut self, workers: Vec<Named>, mut running: Running) -> Result<Vec<Named>, Problem> {
        let (stop, threads) = start_workers(&self.server, workers);
        clock::sleep(Duration::from_millis(self.random.below(3000)));
        stop.store(true, Ordering::SeqCst);
        let how = match self.random.below(3) {
            0 => Stop::Kill,
            other => Stop::Shutdown { flush: other == 1 },
        };
        let stopped = stop_by(&self.server, &mut running, how);
        let (mut workers, worked) = join_workers(threads)?;
        stopped.and(worked)?;
        how.take_away(&self.server, &mut running)?;
        let recovery_kills = self.random.below(2);
        recover_and_check(&self.server, &mut workers, recovery_kills, &mut self.random)?;
        Ok(workers)
    }
}

fn write_durably(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.sync_all()
}

fn text(error: io::Error) -> Problem {
    error.to_string()
}
