//! Stops a real mount under load, again and again, and checks that nothing acknowledged is lost.
//!
//! One round: mount; the workers create, write, fsync, rename and append, each in its own folder, and remember what was
//! acknowledged; at a random moment the server is killed with SIGKILL (`load`) or its volume is shut down (`shutdown`). Then:
//! the mount is taken away, `fsck` must accept the image with its log not yet replayed, the volume is mounted again (sometimes
//! that server is killed too, during recovery), each worker compares what it finds with what it remembers, and after an
//! orderly unmount `fsck --data` must find nothing.
//!
//! `sync` instead writes without any fsync, calls sync(2), syncfs(2) or `cairn sync`, kills at once, and demands
//! everything. `cuts` cuts the power of a virtual machine in which `guest` runs the workers. `soak` runs them, and other
//! loads, for hours, and watches what the server takes.
//!
//! States live in memory only, outside the volume; those of a guest, in its journal. A worker's folder is its own; nothing is
//! shared between threads but the flag that says that errors are expected from now on.
mod append;
mod cuts;
mod guest;
mod journal;
mod machine;
mod memory;
mod overwrite;
mod pattern;
mod replace;
mod server;
mod soak;
mod synced;
mod tree;
mod write_log;

use cairn_environment::random::Seeded;
use cairn_environment::{clock, random, thread};
use clap::{Parser, Subcommand};
use server::{Running, Server};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What a failed check says.
pub type Problem = String;

/// A pattern of use, with its memory of what was acknowledged.
trait Worker: Send {
    /// Works below `folder` until an error comes, or `stop` is set. `journal` is told before each change that a crash may
    /// leave, and after each acknowledgement.
    fn work(&mut self, folder: &Path, stop: &AtomicBool, journal: &dyn Journal) -> io::Result<()>;
    /// How often something was acknowledged, in all rounds.
    fn acknowledgements(&self) -> u64;
    /// Compares the folder with what is remembered, takes what it finds as the new state, and tidies up for the next
    /// round.
    fn check(&mut self, folder: &Path) -> Result<(), Problem>;
    /// All that is remembered.
    fn memory(&self) -> io::Result<String>;
    /// Remembers `text`, and nothing else; a power cut may have come after.
    fn recall(&mut self, text: &str) -> Result<(), Problem>;
}

/// Keeps what a worker remembers where a power cut does not reach.
trait Journal: Sync {
    fn record(&self, worker: &dyn Worker) -> io::Result<()>;
}

/// For workers that live on.
struct NoJournal;

impl Journal for NoJournal {
    fn record(&self, _: &dyn Worker) -> io::Result<()> {
        Ok(())
    }
}

/// Stops a real mount, and checks that nothing acknowledged is lost.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Subcommand)]
enum Mode {
    /// Kill at random moments under load.
    Load(Common),
    /// Shut down at random moments under load, with and without a flush of the log.
    Shutdown(Common),
    /// Kill right after a sync.
    Sync(Common),
    /// Cut the power of a virtual machine.
    Cuts(cuts::Arguments),
    /// The load inside that machine.
    Guest(guest::Arguments),
    /// Run for hours, and watch what the server takes.
    Soak(soak::Arguments),
}

#[derive(clap::Args)]
struct Common {
    /// The `cairn` command.
    #[arg(long)]
    cairn: PathBuf,
    /// Folder for image and mount point.
    #[arg(long)]
    work: PathBuf,
    #[arg(long, default_value_t = 50)]
    rounds: u64,
    /// Repeats the choices of an earlier run; the moments differ all the same.
    #[arg(long)]
    seed: Option<u64>,
    /// Longest time under load, in milliseconds; most rounds take an eighth of it.
    #[arg(long, default_value_t = 2500)]
    load_ms_max: u64,
}

/// What ends a round.
#[derive(Clone, Copy, Debug)]
enum Stop {
    Kill,
    Shutdown { flush: bool },
}

fn main() -> ExitCode {
    let done = match Arguments::parse().mode {
        Mode::Load(common) => with_seed(&common, |seed| run_load(&common, seed, false)),
        Mode::Shutdown(common) => with_seed(&common, |seed| run_load(&common, seed, true)),
        Mode::Sync(common) => with_seed(&common, |seed| synced::run(&Server::new(&common.cairn, &common.work), common.rounds, seed)),
        Mode::Cuts(arguments) => cuts::run(&arguments),
        Mode::Guest(arguments) => guest::run(&arguments),
        Mode::Soak(arguments) => soak::run(&arguments),
    };
    match done {
        Ok(told) => {
            println!("{told}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            println!("FAILED: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn with_seed(common: &Common, run: impl FnOnce(u64) -> Result<(), Problem>) -> Result<String, Problem> {
    let seed = common.seed.unwrap_or_else(random::u64);
    println!("seed {seed}");
    let begin = clock::now_monotonic();
    run(seed).map_err(|problem| format!("seed {seed}: {problem}"))?;
    let seconds = begin.elapsed().as_secs_f64();
    Ok(format!("{} rounds, nothing acknowledged was lost; {:.2} s a round", common.rounds, seconds / common.rounds.max(1) as f64))
}

type Named = (String, Box<dyn Worker>);

fn workers(seed: u64) -> Vec<Named> {
    let mut workers: Vec<Named> = Vec::new();
    for index in 0..3u64 {
        let own = |kind: u64| pattern::identity(seed, kind * 100 + index);
        workers.push((format!("replace-{index}"), Box::new(replace::Replace::new(own(1)))));
        workers.push((format!("append-{index}"), Box::new(append::Append::new(own(2)))));
        workers.push((format!("overwrite-{index}"), Box::new(overwrite::Overwrite::new(own(3)))));
        workers.push((format!("tree-{index}"), Box::new(tree::Tree::new(own(4)))));
    }
    workers
}

fn run_load(arguments: &Common, seed: u64, shut_down: bool) -> Result<(), Problem> {
    let server = Server::new(&arguments.cairn, &arguments.work);
    // A small log goes round many times, and is full now and then.
    server.make_volume("768M", "4M")?;
    let mut random = Seeded::new(seed);
    let mut workers = workers(seed);
    for round in 1..=arguments.rounds {
        let load_ms_max = if random.chance(1, 8) { arguments.load_ms_max } else { arguments.load_ms_max / 8 };
        let load_ms = 20 + random.below(load_ms_max.max(1));
        let stop = if shut_down { Stop::Shutdown { flush: random.chance(1, 2) } } else { Stop::Kill };
        let recovery_kills = if random.chance(1, 3) { 1 + random.below(3) } else { 0 };
        let begin = clock::now_monotonic();
        workers = load_and_stop(&server, workers, Duration::from_millis(load_ms), stop).map_err(|problem| in_round(round, problem))?;
        let checked = recover_and_check(&server, &mut workers, recovery_kills, &mut random);
        checked.map_err(|problem| in_round(round, problem))?;
        let acknowledged: u64 = workers.iter().map(|(_, worker)| worker.acknowledgements()).sum();
        println!(
            "round {round}: {} after {load_ms} ms{}; {acknowledged} acknowledgements so far; {:.1} s",
            match stop {
                Stop::Kill => "killed",
                Stop::Shutdown { flush: true } => "shut down with a flush",
                Stop::Shutdown { flush: false } => "shut down without a flush",
            },
            if recovery_kills > 0 { format!(", {recovery_kills} times during recovery") } else { String::new() },
            begin.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

fn in_round(round: u64, problem: Problem) -> Problem {
    format!("round {round}: {problem}")
}

fn load_and_stop(server: &Server, workers: Vec<Named>, load: Duration, how: Stop) -> Result<Vec<Named>, Problem> {
    let mut running = server.start(&[])?;
    let (stop, threads) = start_workers(server, workers);
    clock::sleep(load);
    stop.store(true, Ordering::SeqCst);
    let stopped = stop_by(server, &mut running, how);
    let (workers, result) = join_workers(threads)?;
    stopped.and(result)?;
    how.take_away(server, &mut running)?;
    Ok(workers)
}

fn stop_by(server: &Server, running: &mut Running, how: Stop) -> Result<(), Problem> {
    match how {
        Stop::Kill => running.kill(),
        Stop::Shutdown { flush } => server.shut_down(flush),
    }
}

impl Stop {
    /// Ends the mount that was stopped so; nobody uses it any more.
    fn take_away(self, server: &Server, running: &mut Running) -> Result<(), Problem> {
        match self {
            Stop::Kill => server.take_away_dead_mount(),
            Stop::Shutdown { .. } => server.unmount(running),
        }
    }
}

type Outcome = (Named, Result<(), Problem>);

/// Lets each worker work on a thread of its own, until the flag is set or an error comes; an error before is a defect.
fn start_workers(server: &Server, workers: Vec<Named>) -> (Arc<AtomicBool>, Vec<thread::JoinHandle<Outcome>>) {
    let stop = Arc::new(AtomicBool::new(false));
    let start = |(name, mut worker): Named| {
        let (stop, folder) = (Arc::clone(&stop), server.mountpoint().join(&name));
        thread::spawn("worker", move || {
            let result = std::fs::create_dir_all(&folder).and_then(|()| worker.work(&folder, &stop, &NoJournal));
            let expected = stop.load(Ordering::SeqCst);
            let result = result.or_else(|error| if expected { Ok(()) } else { Err(format!("{name}: {error}")) });
            ((name, worker), result)
        })
    };
    let threads = workers.into_iter().map(start).collect();
    (stop, threads)
}

fn join_workers(threads: Vec<thread::JoinHandle<Outcome>>) -> Result<(Vec<Named>, Result<(), Problem>), Problem> {
    let mut result = Ok(());
    let mut workers = Vec::new();
    for thread in threads {
        let (worker, outcome) = thread.join().map_err(|_| "a worker panicked".to_owned())?;
        result = result.and(outcome);
        workers.push(worker);
    }
    Ok((workers, result))
}

fn recover_and_check(server: &Server, workers: &mut [Named], recovery_kills: u64, random: &mut Seeded) -> Result<(), Problem> {
    server.fsck(false)?;
    for _ in 0..recovery_kills {
        server.start_and_kill(Duration::from_millis(random.below(60)))?;
    }
    let mut running = server.start(&[])?;
    check_workers(server, workers)?;
    server.unmount(&mut running)?;
    server.fsck(true)
}

fn check_workers(server: &Server, workers: &mut [Named]) -> Result<(), Problem> {
    for (name, worker) in workers {
        let folder = server.mountpoint().join(&*name);
        // A round may end before a worker has made its folder.
        std::fs::create_dir_all(&folder).map_err(|error| format!("{name}: {error}"))?;
        worker.check(&folder).map_err(|problem| format!("{name}: {problem}"))?;
    }
    Ok(())
}
